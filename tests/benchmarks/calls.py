"""What a call costs that does no work: beside the floor, beside peers, and with more ranks."""

from __future__ import annotations

import contextlib
import json
import pickle
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import zmq

from tests.benchmarks import peers
from tests.benchmarks.bench import Bench
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
from tests.benchmarks.processes import end_tree, program, snapshot

RANKS = 4
GROWTH = (1, 2, 4, 8, 16, 32)
MANY = (16, 32, 64)
MOST_ABOVE_RAW_US = 100
"""For each rank, where there are many."""
PAUSE = 0.05
ANSWER_TIMEOUT = 120
RAW = "raw pyzmq"


def _from_a_notebook() -> Callable[[], None]:
    """A function that travels by value, as one that a notebook defines."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def noop():\n    return None\n", names)
    function: Callable[[], None] = names["noop"]
    return function


noop = _from_a_notebook()


def time_calls(call: Callable[[], Any], count: int, pause: float = 0.0) -> list[float]:
    """Milliseconds of each of some calls."""
    times = []
    for _ in range(count):
        if pause:
            time.sleep(pause)
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return times


class RawFloor:
    """The least that a call can be: one zmq socket, cloudpickle, processes without torch."""

    def __init__(self, bench: Bench, workers: int):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        address = f"ipc://{bench.folder}/raw.sock"
        self._socket.bind(address)
        self._identities = [str(number).encode() for number in range(workers)]
        self._processes = [
            subprocess.Popen(program("raw_worker", address, number), text=True)
            for number in range(workers)
        ]
        for _ in range(workers):
            if not self._socket.poll(30_000):
                self.close()
                raise TimeoutError("the raw workers did not come")
            self._socket.recv_multipart()

    def call(self) -> list[Any]:
        payload = cloudpickle.dumps((noop, (), {}), protocol=5)
        for identity in self._identities:
            self._socket.send_multipart([identity, payload])
        values = []
        for _ in self._identities:
            if not self._socket.poll(1000 * ANSWER_TIMEOUT):
                raise TimeoutError("a raw worker did not answer")
            values.append(pickle.loads(self._socket.recv_multipart()[1]))
        return values

    def close(self) -> None:
        for process in self._processes:
            end_tree(process)
        self._context.destroy(0)


class RayActors:
    """Ray's actors in an interpreter that has it, driven by lines.

    Args:
        bench: Where it may write.
        actors: How many.
        name: Of the program that has them do something.
    """

    def __init__(self, bench: Bench, actors: int, name: str = "calls_ray"):
        python = peers.python_with("ray")
        self._process = subprocess.Popen(
            program(name, actors, bench.folder / "ray", python=python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=peers.ray_environment(python, bench.folder),
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def time(self, line: object) -> list[float]:
        """Send a line; gives the numbers that come back."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith("["):
                    times: list[float] = json.loads(line)
                    return times
        finally:
            watchdog.cancel()
        raise RuntimeError(f"Ray ended, or did not answer within {ANSWER_TIMEOUT} s")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # it shuts down when there is nothing more to do
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        end_tree(self._process)


def call(bench: Bench) -> Iterator[Row]:
    """A call with no work on four ranks, and the same after a pause."""
    name = f"call with no work, N={RANKS}"
    each = 100 if bench.quick else 200
    with bench.session(RANKS) as session, contextlib.closing(RawFloor(bench, RANKS)) as floor:
        run = partial(session.run, noop)
        time_calls(run, 10)

        rounds = max(bench.repeats, 5)
        raw = Arm(RAW, lambda: time_calls(floor.call, each))
        ours = Arm(OURS, lambda: time_calls(run, each))
        take_turns([raw, ours], rounds)
        yield raw.row(name, "ms")
        yield ours.row(name, "ms", raw, target=Target(1.5))
        yield from _beside_ipyparallel(bench, name, each)

        paused = f"call {1e3 * PAUSE:g} ms after the last, N={RANKS}"
        raw = Arm(RAW, lambda: time_calls(floor.call, each // 10, PAUSE))
        ours = Arm(OURS, lambda: time_calls(run, each // 10, PAUSE))
        take_turns([raw, ours], rounds)
        yield raw.row(paused, "ms")
        yield ours.row(paused, "ms", raw)
        yield from _beside_ray(bench, name, run, each, rounds)


def _beside_ipyparallel(bench: Bench, name: str, each: int) -> Iterator[Row]:
    """Its client, and ours to the same ranks, which are its engines then."""
    with bench.session(RANKS, is_registered=True) as session:
        apply = partial(session.client[:].apply_sync, noop)
        ours = Arm(OURS, lambda: time_calls(partial(session.run, noop), each))
        theirs = Arm("ipyparallel", lambda: time_calls(apply, each // 5))
        take_turns([ours, theirs], max(bench.repeats, 3))
        beside = f"{OURS} to its engines"
        yield theirs.row(name, "ms", ours, beside=beside, target=Target(5, at_least=True))


def _beside_ray(
    bench: Bench, name: str, run: Callable[[], Any], each: int, rounds: int
) -> Iterator[Row]:
    """Ray for itself, for its own processes keep a small machine busy."""
    before = snapshot()
    try:
        ray = RayActors(bench, RANKS)
    except NotInstalled as missing:
        yield Row(name, "ray", note=str(missing))
        return
    except Exception as error:
        yield Row(name, "ray", note=describe(error), failed=True)
        bench.sweep("ray", before)
        return
    try:
        ours = Arm(OURS, lambda: time_calls(run, each))
        theirs = Arm("ray", lambda: ray.time(each))
        take_turns([ours, theirs], rounds)
        yield theirs.row(name, "ms", ours, beside=f"{OURS} while ray runs")
    finally:
        ray.close()
        bench.sweep("ray", before)


def growth(bench: Bench) -> Iterator[Row]:
    """A call with no work, with more and more ranks."""
    rounds: dict[int, list[list[float]]] = {ranks: [] for ranks in GROWTH}
    for _ in range(min(bench.repeats, 3)):
        for ranks in GROWTH:
            with bench.session(ranks) as session:
                run = partial(session.run, noop)
                time_calls(run, 20)
                rounds[ranks].append(time_calls(run, 100 if bench.quick else 200))
    least = [statistics.median(values) for values in rounds[1]]
    for ranks, measured in rounds.items():
        every = [value for values in measured for value in values]
        medians = [statistics.median(values) for values in measured]
        yield Row(
            f"call with no work, N={ranks}, for growth",
            OURS,
            Figure(tuple(every)),
            "ms",
            Figure(tuple(a / b for a, b in zip(medians, least, strict=True))),
            "N=1",
            note=f"{1e3 * statistics.median(every) / ranks:.0f} microseconds a rank",
        )


def many(bench: Bench) -> Iterator[Row]:
    """A call with no work on many ranks, in turns with the floor."""
    each = 30 if bench.quick else 60
    for ranks in MANY:
        with (
            bench.session(ranks) as session,
            contextlib.closing(RawFloor(bench, ranks)) as floor,
        ):
            run = partial(session.run, noop)
            time_calls(run, 10)
            raw = Arm(RAW, lambda call=floor.call: time_calls(call, each))  # type: ignore[misc]
            ours = Arm(OURS, lambda call=run: time_calls(call, each))  # type: ignore[misc]
            take_turns([raw, ours], max(bench.repeats, 3))
        yield from rows_beside_raw(f"call with no work, N={ranks}", ranks, raw, ours)


def rows_beside_raw(name: str, ranks: int, raw: Arm, ours: Arm) -> Iterator[Row]:
    """What a call takes, and what each rank adds to what it takes at least.

    Args:
        name: Of the benchmark.
        ranks: How many there are.
        raw: The floor, measured in turns with us.
        ours: Milliseconds of our calls.
    """
    yield raw.row(name, "ms")
    yield ours.row(name, "ms", raw, target=Target(1.5))
    above = tuple(
        1e3 * (statistics.median(mine) - statistics.median(least)) / ranks
        for least, mine in zip(raw.rounds, ours.rounds, strict=True)
    )
    if above:
        yield Row(
            f"{name}, for each rank",
            f"{OURS}, above that",
            Figure(above),
            "us",
            target=Target(MOST_ABOVE_RAW_US),
        )
