"""What the stand-in's three classes do, where NCCL's differ: programs as those of ``checks``.

``python -m tests.standin.class_checks NAME RANKS BACKEND``. ``standin`` is the class of torch up to
2.14, ``standin2`` that of 2.15, and ``standin-lazy`` what 2.15 calls ``"nccl-lazy"``.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from tests.standin.checks import ENDS, FOREVER_S, check, hear, in_thread, join, main, say, warm_up
from tests.standin.extension import native

BIG = 400_000
"""More elements than are sent without a receiver."""


def is_legacy() -> bool:
    return os.environ["BACKEND"] == "standin"


def backend() -> Any:
    """The backend of the default group."""
    return dist.group.WORLD._get_backend(torch.device("standin"))


def hung() -> tuple[Any, torch.Tensor]:
    """An operation that no other rank has begun."""
    x = torch.ones(4, device="standin")
    return dist.all_reduce(x, async_op=True), x


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + FOREVER_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def assert_device_works() -> None:
    assert torch.ones(3, device="standin").sum().item() == 3


@check
def connected_at_once(rank: int, size: int) -> None:
    """A group is made with its communicator; the older class makes that when it is first used."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=False)
    if rank > 0:
        hear(store, "seen")
        join()
        warm_up()
        return
    kind = native.ProcessGroupStandin if is_legacy() else native.ProcessGroupStandin2
    make = (dist.PrefixStore("own", store), 0, 2, kind.Options())
    thread, made = in_thread(lambda: kind(*make))
    thread.join(0.3)
    assert thread.is_alive() is not is_legacy(), made
    say(store, "seen")
    join()
    warm_up()


@check
def sync_gives_a_work(rank: int, size: int) -> None:
    """An operation that is not asynchronous has a work; with the older class it has none."""
    join()
    warm_up()
    x = torch.ones(4, device="standin")
    work = dist.group.WORLD.allreduce([x], dist.AllreduceOptions())
    options = dist.AllreduceOptions()
    options.asyncOp = False
    work = dist.group.WORLD.allreduce([x], options)
    assert (work is None) is is_legacy()
    dist.barrier()
    assert x[0].item() == size**2


@check
def aborted(rank: int, size: int) -> None:
    """What an abort does to works, to later calls and to the process."""
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)  # by default a failure ends the process
    store = join()
    warm_up()
    x = torch.ones(4, device="standin")
    if rank > 0:
        hear(store, "done")
        return
    work, y = hung()
    thread, outcome = in_thread(lambda: (y * 2).sum().item())
    thread.join(0.2)
    assert thread.is_alive()
    backend().abort()
    thread.join(FOREVER_S)
    assert isinstance(outcome[0], float), outcome
    assert work.is_completed()
    if is_legacy():
        assert backend().get_error() == ErrorType.SUCCESS
        with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
            dist.all_reduce(x)
    else:
        assert "NCCL operation failed" in str(work.exception())
        with pytest.raises(dist.DistBackendError, match="NCCL operation failed"):
            work.wait()
        assert backend().get_error() == ErrorType.COMM_ERROR
        with pytest.raises(RuntimeError, match="aborted after a previous error"):
            dist.all_reduce(x)
    assert_device_works()
    time.sleep(1.5)  # a watchdog that had not been stopped would have ended the process
    say(store, "done")


@check
def past_its_limit(rank: int, size: int) -> None:
    """With handling off nothing is freed; the newer class's group is of no use from then on."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    store = join()
    warm_up()
    backend().set_timeout(datetime.timedelta(seconds=0.3))
    if rank > 0:
        hear(store, "done")
        dist.all_reduce(torch.ones(4, device="standin"), async_op=True)
        torch.standin.synchronize()
        return
    work, x = hung()
    thread, _ = in_thread(torch.standin.synchronize)
    until(work.is_completed)
    assert "Watchdog caught collective operation timeout" in str(work.exception())
    if not is_legacy():
        until(lambda: backend().get_error() == ErrorType.TIMEOUT)
        with pytest.raises(RuntimeError, match="NCCL operation timed out"):
            dist.all_reduce(torch.ones(4, device="standin"))
    assert thread.is_alive()
    say(store, "done")
    thread.join(FOREVER_S)
    assert x[0].item() == size


@check
def cleaned_up(rank: int, size: int) -> None:
    """The newer class's watchdog can abort the communicator, and let the process live."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    store = join()
    warm_up()
    backend().set_timeout(datetime.timedelta(seconds=0.3))
    if rank > 0:
        hear(store, "done")
        return
    work, _ = hung()
    torch.standin.synchronize()  # until the watchdog has come
    assert "timed out" in str(work.exception())
    assert_device_works()
    say(store, "done")


@check
def process_ended(rank: int, size: int) -> None:
    """By default the newer class's watchdog ends the process."""
    os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    store = join()
    warm_up()
    backend().set_timeout(datetime.timedelta(seconds=0.3))
    if rank == 0:
        store.set("pid", str(os.getpid()))
        hung()
        torch.standin.synchronize()
    else:
        pid = int(store.get("pid"))
        until(lambda: not os.path.exists(f"/proc/{pid}"))


ENDS["process_ended"] = -signal.SIGABRT


@check
def dropped(rank: int, size: int) -> None:
    """A group that nobody holds any more aborts what it has under way, or lets it wait."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), is_master=False)
    kind = native.ProcessGroupStandin if is_legacy() else native.ProcessGroupStandin2
    group = kind(dist.PrefixStore("own", store), rank, size, kind.Options())
    x = torch.ones(4, device="standin")
    group.allreduce([x])
    torch.standin.synchronize()
    if rank > 0:
        hear(store, "done")
        group.allreduce([x])
        torch.standin.synchronize()
        return
    group.allreduce([x])
    thread, _ = in_thread(torch.standin.synchronize)
    thread.join(0.2)
    assert thread.is_alive()
    del group
    thread.join(0.5 if is_legacy() else FOREVER_S)
    assert thread.is_alive() is is_legacy()
    say(store, "done")
    thread.join(FOREVER_S)


@check
def shut_down(rank: int, size: int) -> None:
    """An end in good order waits for what is under way; the newer class until its time limit."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    store = join()
    warm_up()
    backend().set_timeout(datetime.timedelta(seconds=1))
    if rank > 0:
        hear(store, "done")
        if is_legacy():
            dist.all_reduce(torch.ones(4, device="standin"), async_op=True)
            torch.standin.synchronize()
        return
    hung()
    thread, _ = in_thread(backend().shutdown)
    thread.join(3 if is_legacy() else FOREVER_S)
    assert thread.is_alive() is is_legacy()
    say(store, "done")
    torch.standin.synchronize()
    assert_device_works()


@check
def put_together(rank: int, size: int) -> None:
    """Collectives within a group of calls begin at once; with the older class at its end."""
    store = join()
    warm_up()
    x = torch.ones(4, device="standin")
    pg, device = dist.group.WORLD, torch.device("standin", rank)
    pg._start_coalescing(device)
    work = pg.allreduce([x])
    if not is_legacy():
        with pytest.raises(RuntimeError, match="a batch is already active"):
            pg._start_coalescing(device)
        until(work.is_completed)
    else:
        time.sleep(0.3)
        assert not work.is_completed()
    store.add("seen", 1)
    until(lambda: int(store.add("seen", 0)) == size)
    pg._end_coalescing(device).wait()
    assert x[0].item() == size
    out = torch.full((BIG,), float(rank), device="standin")
    into = torch.zeros(BIG, device="standin")
    pg._start_coalescing(device)
    sent = pg.send([out], (rank + 1) % size, 0)
    pg.recv([into], (rank - 1) % size, 0)
    assert is_legacy() or sent.is_completed()  # which says nothing of the message
    pg._end_coalescing(device).wait()
    assert into[-1].item() == (rank - 1) % size


def ring(rank: int, size: int) -> list[Any]:
    """Send to the next and receive from the one before, one after the other on each rank."""
    sent = torch.full((BIG,), float(rank), device="standin")
    got = torch.zeros(BIG, device="standin")
    works = [dist.isend(sent, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
    return [*works, got]


@check
def messages(rank: int, size: int) -> None:
    """Pairs of ranks have a stream each with the lazy class, and share one with that of 2.15."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    store = join()
    warm_up()
    kind = os.environ["BACKEND"]
    # The first message of a pair connects it, and waits for the other one.
    order = (dist.isend, dist.irecv) if rank % 2 == 0 else (dist.irecv, dist.isend)
    for call in order:
        peer = rank + 1 if call is dist.isend else rank - 1
        call(torch.zeros(1, device="standin"), peer % size)
    torch.standin.synchronize()
    *works, got = ring(rank, size)
    if kind == "standin2":
        time.sleep(1)
        assert not any(work.is_completed() for work in works)  # each waits behind its own send
        store.add("seen", 1)
        until(lambda: int(store.add("seen", 0)) == size)
        backend().abort()
        return
    for work in works:
        work.wait()
    assert got[-1].item() == (rank - 1) % size
    if kind == "standin-lazy":
        assert backend()._num_active_channels() == 2
        with pytest.raises(RuntimeError, match="invalid peer"):
            backend().send([got], rank, 0)


@check
def abort_of_pairs(rank: int, size: int) -> None:
    """The lazy class aborts its own communicator first, and CUDA lets it wait for the pairs'."""
    store = join()
    warm_up()
    x = torch.zeros(4, device="standin")
    for _ in range(2):
        if rank == 0:
            dist.recv(x, 1)
        else:
            dist.send(x, 0)
        torch.standin.synchronize()
    if rank > 0:
        hear(store, "done")
        if os.environ["BACKEND"] == "standin-lazy":
            dist.send(x, 0)
            torch.standin.synchronize()
        return
    dist.irecv(x, 1)
    thread, _ = in_thread(backend().abort)
    thread.join(FOREVER_S if os.environ["BACKEND"] != "standin-lazy" else 1)
    assert thread.is_alive() is (os.environ["BACKEND"] == "standin-lazy")
    say(store, "done")
    thread.join(FOREVER_S)
    assert not thread.is_alive()
    assert_device_works()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
