"""Programs in which torch raises, run on the ranks of a session and in plain processes.

As a program it runs those that it is given, each in two plain processes, all beside each other, and
writes what each rank came to as JSON.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.ports import held_port

LIMIT = timedelta(seconds=0.4)
LONGEST_S = 30

Program = Callable[[int], object]
Caught = tuple[list[str], str]
"""The classes of an exception and what it says."""


def tensor() -> torch.Tensor:
    return torch.ones(4)


def group() -> dist.ProcessGroup:
    found = dist.new_group([0, 1], timeout=LIMIT)
    assert isinstance(found, dist.ProcessGroup)
    return found


def collective(rank: int) -> None:
    together = group()
    if rank == 0:
        dist.all_reduce(tensor(), group=together)


def issued(rank: int) -> None:
    together = group()
    if rank == 0:
        handle = dist.all_reduce(tensor(), group=together, async_op=True)
        assert handle is not None
        handle.wait()


def issued_with_limit(rank: int) -> None:
    if rank == 0:
        handle = dist.all_reduce(tensor(), async_op=True)
        assert handle is not None
        handle.wait(LIMIT)


def receive(rank: int) -> None:
    together = group()
    if rank == 1:
        dist.recv(tensor(), 0, group=together)


def receive_from_any(rank: int) -> None:
    together = group()
    if rank == 1:
        dist.recv(tensor(), group=together)


def send(rank: int) -> None:
    together = group()
    if rank == 0:
        dist.send(torch.ones(1 << 22), 1, group=together)


def barrier_without_1(rank: int) -> None:
    if rank == 0:
        dist.monitored_barrier(timeout=LIMIT)


def barrier_without_1_for_all(rank: int) -> None:
    if rank == 0:
        dist.monitored_barrier(timeout=LIMIT, wait_all_ranks=True)


def barrier_without_0(rank: int) -> None:
    together = group()
    if rank == 1:
        dist.monitored_barrier(together, timeout=LIMIT)


def get_key(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(LIMIT)
    if rank == 0:
        store.get("nothing")


def wait_for_keys(rank: int) -> None:
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["nothing", "else"], LIMIT)


def new_group(rank: int) -> None:
    if rank == 0:
        dist.new_group([0, 1], timeout=LIMIT)


def new_group_alone(rank: int) -> None:
    if rank == 0:
        dist.new_group([0, 1], timeout=LIMIT, use_local_synchronization=True)


def begin_alone(rank: int) -> None:
    dist.destroy_process_group()
    for _ in range(10 if rank == 0 else 0):
        # On a busy machine torch's store may fail to connect with itself, which is not meant here.
        with contextlib.suppress(dist.DistNetworkError):
            dist.init_process_group("gloo", timeout=timedelta(seconds=1))


def join_nobody(rank: int) -> None:
    if rank == 1:
        url = "tcp://nobody.invalid:29500"
        next(iter(dist.rendezvous(url, 1, 2, timeout=timedelta(seconds=1))))


def begin_twice(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=3)


def other_rank_ends(rank: int) -> None:
    if rank == 1:
        time.sleep(0.1)
        os._exit(0)
    dist.all_reduce(tensor())


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        collective, issued, issued_with_limit, receive, receive_from_any, send, barrier_without_1,
        barrier_without_1_for_all, barrier_without_0, get_key, wait_for_keys, new_group,
        new_group_alone, begin_alone, join_nobody, begin_twice,
    )
}  # fmt: skip
DEATH: dict[str, Program] = {"other_rank_ends": other_rank_ends}


def caught(program: Program, rank: int) -> Caught | None:
    """What a program raises on this rank."""
    try:
        program(rank)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return None


def caught_here(name: str) -> Caught | None:
    """The same of a program by its name, on a rank of a session."""
    return caught({**PROGRAMS, **DEATH}[name], dist.get_rank())


def _become_rank(rank: int, name: str, port: int, end: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=LONGEST_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with held_port() as another:
        if name == "begin_alone":  # the first store still listens at its port
            os.environ["MASTER_PORT"] = str(another)
        end.send(caught_here(name))
    time.sleep(2.5)  # whoever ends has closed its connections
    os._exit(0)


def in_plain_processes(names: list[str]) -> dict[str, list[Caught | None]]:
    """What each program comes to on each of two ranks that are plain processes."""
    with contextlib.ExitStack() as ports:
        return _beside_each_other({name: ports.enter_context(held_port()) for name in names})


def _beside_each_other(ports: dict[str, int]) -> dict[str, list[Caught | None]]:
    fork = multiprocessing.get_context("fork")
    ends: dict[tuple[str, int], Any] = {}
    processes = []
    for name, port in ports.items():
        for rank in range(2):
            mine, its = fork.Pipe()
            process = fork.Process(target=_become_rank, args=(rank, name, port, its))
            process.start()
            its.close()
            processes.append(process)
            ends[name, rank] = mine
    found: dict[str, list[Caught | None]] = {}
    for (name, _), end in ends.items():
        try:
            found.setdefault(name, []).append(end.recv() if end.poll(LONGEST_S) else None)
        except EOFError:
            found[name].append(None)
    for process in processes:
        process.kill()
        process.join()
    return found


if __name__ == "__main__":
    print(json.dumps(in_plain_processes(sys.argv[1:])))
