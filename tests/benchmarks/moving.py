"""What it costs to move tensors and arrays: beside one memcpy of the same bytes, beside peers.

A memcpy here copies into memory that the process has just asked for, since whoever receives
something needs a place for it; a row shows what it costs where that is there already. The
receivers' first touch, a read of each page, counts as part of every transfer.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from distsession.protocol import shared_memory
from tests.benchmarks.bench import Bench
from tests.benchmarks.calls import RayActors, noop
from tests.benchmarks.figures import (
    OURS,
    Arm,
    Figure,
    NotInstalled,
    Row,
    Target,
    describe,
    take_turns,
)
from tests.benchmarks.processes import snapshot

MB = 1_000_000
SIZES = {"1 MB": MB, "64 MB": 64 * MB, "256 MB": 256 * MB, "1 GB": 1000 * MB}
WORLDS = (2, 4)
PAGE = 1024
AGAIN = 7
"""How often the same is sent, where memory that is there already counts from the fourth time on."""
SLOW = 300 * MB
"""Bytes up to which ipyparallel is asked, which copies each of them several times."""


def _by_value(source: str, name: str) -> Any:
    """A function that travels by value, as one that a notebook defines."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    return names[name]


touch = _by_value(f"def touch(): return float(x[::{PAGE}].sum())", "touch")


def moving(bench: Bench) -> Iterator[Row]:
    """Sending to all ranks and bringing from all of them."""
    for ranks in WORLDS:
        with bench.session(ranks) as session, bench.session(ranks, is_registered=True) as other:
            yield from _small(session, ranks, bench)
            for label, size in SIZES.items():
                if bench.quick and size > SLOW:
                    continue
                for kind in ("torch", "numpy"):
                    yield from _rows(session, other, ranks, label, size, kind, bench)
            yield from _memory(session, ranks)
        yield from _beside_ray(bench, ranks)
    yield from _between_nodes(bench)


def _between_nodes(bench: Bench) -> Iterator[Row]:
    """To and from the ranks of another node, beside the same bytes through one unix socket."""
    size = SIZES["256 MB"]
    value = _make("torch", size)
    with bench.session(4, nodes=2) as session:
        far = session[2:]
        far.push(x=value)
        copy = Arm("memcpy", lambda: _timed(partial(_copy, value)))
        wire = Arm("one unix socket", lambda: _timed(partial(_through_socket, value)))
        send = Arm(OURS, lambda: _timed(partial(_send, far, value)))
        bring = Arm(OURS, lambda: _timed(partial(_bring, session[2])))
        take_turns([copy, wire, send, bring], 2 * bench.repeats)
        name = "send 256 MB to 2 ranks of another node"
        yield copy.row(name, "ms")
        yield wire.row(name, "ms", copy)
        yield send.row(name, "ms", wire)
        name = "bring 256 MB from another node"
        yield copy.row(name, "ms")
        yield wire.row(name, "ms", copy)
        yield bring.row(name, "ms", wire)


def _through_socket(value: Any) -> Any:
    """Send the memory of a tensor through a socket, into new memory."""
    ours, theirs = socket.socketpair()
    data = memoryview(value.numpy()).cast("B")
    thread = threading.Thread(target=ours.sendall, args=[data])
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MB)
        thread.start()
        arrived = torch.empty_like(value)
        rest = memoryview(arrived.numpy()).cast("B")
        while rest:
            rest = rest[theirs.recv_into(rest) :]
        thread.join()
    return arrived


def _make(kind: str, size: int) -> Any:
    return torch.ones(size // 4) if kind == "torch" else np.ones(size // 4, dtype=np.float32)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _copy_into(target: Any, value: Any) -> None:
    target[:] = value


def _timed(work: Callable[[], Any]) -> list[float]:
    began = time.perf_counter()
    value = work()
    took = 1e3 * (time.perf_counter() - began)
    del value
    return [took]


def _send(session: Any, value: Any) -> None:
    session.push(x=value)
    session.run(touch)


def _first(session: Any, value: Any) -> list[float]:
    """To send what finds no memory that was kept for it."""
    session.execute("x = None")
    time.sleep(2 * shared_memory.KEEP)
    return _timed(partial(_send, session, value))


def _bring(session: Any) -> Any:
    values = session.pull("x")
    for value in values.values():
        float(value[::PAGE].sum())
    return values


def _rows(
    session: Any, other: Any, ranks: int, label: str, size: int, kind: str, bench: Bench
) -> Iterator[Row]:
    """Ours, and ipyparallel's way to its engines, which are the ranks of the other session."""
    value = _make(kind, size)
    is_judged = size == SIZES["256 MB"] and kind == "torch" and ranks == 4
    rounds = bench.repeats if size > 100 * MB else 3 * bench.repeats
    if is_judged:
        rounds = max(rounds, AGAIN)
    peer = other.client[:]

    def push() -> None:
        peer.push({"x": value}, block=True)
        peer.apply_sync(touch)

    def pull() -> None:
        for arrived in peer.pull("x", block=True):
            float(arrived[::PAGE].sum())

    name = f"send {label} of {kind}, N={ranks}"
    copy = Arm("memcpy", lambda: _timed(partial(_copy, value)))
    ours = Arm(OURS, lambda: _timed(partial(_send, session, value)))
    theirs = Arm("ipyparallel", lambda: _timed(push))
    take_turns([copy, ours], rounds)
    if size <= SLOW:
        take_turns([theirs], min(rounds, 3))
    yield copy.row(name, "ms")
    yield ours.row(name, "ms", copy, target=Target(1.2) if is_judged else None)
    yield theirs.row(name, "ms", ours)

    if is_judged:
        first = Arm(f"{OURS}, the first for seconds", lambda: _first(session, value))
        take_turns([first], rounds)
        yield first.row(name, "ms", copy)
        target = _copy(value)
        warm = Arm("memcpy into memory that is there", lambda: _timed(
            partial(_copy_into, target, value)))  # fmt: skip
        take_turns([warm], rounds)
        yield warm.row(name, "ms", copy)
        del target

    if size * ranks > 4000 * MB:
        return
    name = f"bring {ranks} x {label} of {kind}"
    whole = _make(kind, size * ranks)
    copy = Arm("memcpy", lambda: _timed(partial(_copy, whole)))
    ours = Arm(OURS, lambda: _timed(partial(_bring, session)))
    theirs = Arm("ipyparallel", lambda: _timed(pull))
    take_turns([copy, ours], rounds)
    if size <= SLOW:
        take_turns([theirs], min(rounds, 3))
    yield copy.row(name, "ms")
    yield ours.row(name, "ms", copy, target=Target(1.5) if is_judged else None)
    yield theirs.row(name, "ms", ours)


def _small(session: Any, ranks: int, bench: Bench) -> Iterator[Row]:
    """What 1 MB as an argument costs above a call with no work."""
    value = torch.ones(MB // 4)
    take = _by_value("def take(value): return None", "take")
    name = f"1 MB as an argument, above a call with no work, N={ranks}"
    above = []
    for _ in range(20 * bench.repeats):
        empty = _timed(lambda: session.run(noop))[0]
        above.append(_timed(lambda: session.run(take, value))[0] - empty)
    yield Row(name, OURS, Figure(tuple(above)), "ms", target=Target(2))


def _memory(session: Any, ranks: int) -> Iterator[Row]:
    """Memory that all processes together take for a transfer, as a multiple of what is moved."""
    size = SIZES["256 MB"]
    value = _make("torch", size)
    session.execute("x = None")
    time.sleep(2)  # until nothing is kept for another transfer
    yield _peak(f"memory taken to send 256 MB, N={ranks}", size, lambda: session.push(x=value))
    time.sleep(2)
    yield _peak(f"memory taken to bring {ranks} x 256 MB", size * ranks, lambda: session.pull("x"))
    session.execute("x = None")


def _peak(name: str, size: int, work: Callable[[], Any]) -> Row:
    before, seen, is_over = _used(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            seen.append(_used() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        value = work()
    finally:
        is_over.set()
        thread.join()
    del value
    return Row(name, OURS, Figure((max(seen) / size,)), "payloads", target=Target(1.1))


def _used() -> int:
    """Bytes of anonymous and shared memory on this machine."""
    with open("/proc/meminfo") as meminfo:
        facts = {line.split(":")[0]: int(line.split()[1]) << 10 for line in meminfo}
    return facts["AnonPages"] + facts["Shmem"]


def _beside_ray(bench: Bench, ranks: int) -> Iterator[Row]:
    """Ray by itself: its own processes keep a small machine busy."""
    name = f"256 MB, N={ranks}, beside ray"
    before = snapshot()
    try:
        ray = RayActors(bench, ranks, "moves_ray")
    except NotInstalled as missing:
        yield Row(name, "ray", note=str(missing))
        return
    except Exception as error:
        yield Row(name, "ray", note=describe(error), failed=True)
        bench.sweep("ray", before)
        return
    try:
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(bench.session(ranks))
            size = SIZES["256 MB"]
            value = _make("torch", size)
            for what in ("send", "bring"):
                ours = Arm(f"{OURS}, torch", lambda: _timed(
                    partial(_send, session, value) if what == "send"  # noqa: B023
                    else partial(_bring, session)))  # fmt: skip
                line = f"{what} {{}} {size}"
                arms = [
                    Arm(f"ray, {kind}", partial(ray.time, line.format(kind)))
                    for kind in ("numpy", "torch")
                ]
                for arm in (ours, *arms):
                    with contextlib.suppress(Exception):
                        arm.measure()  # what is set up once is not part of it
                    take_turns([arm], max(bench.repeats, AGAIN))
                yield ours.row(f"{what} {name}", "ms")
                yield arms[0].row(f"{what} {name}", "ms", ours, target=Target(2, at_least=True))
                yield arms[1].row(f"{what} {name}", "ms", ours)
    except Exception as error:
        print(error, file=sys.stderr)
        yield Row(name, "ray", note=describe(error), failed=True)
    finally:
        ray.close()
        bench.sweep("ray", before)
