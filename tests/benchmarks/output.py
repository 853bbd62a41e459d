"""What output costs: lines from two ranks to a place in this process that counts them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from distsession.view import Silent
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Arm, Figure, Row, take_turns

RANKS = 2
COUNTS = (50_000, 100_000, 200_000)
LOOP = "for number in range({count}):\n    print(f'line {{number}} of many')\n"


class Counter(Silent):
    """Counts lines instead of showing them."""

    def __init__(self) -> None:
        self.lines = 0

    def write(self, message: Any) -> None:
        self.lines += getattr(message, "text", "").count("\n")


def _memory_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def output(bench: Bench) -> Iterator[Row]:
    """Lines of two ranks beside the same loop printing to a file here."""
    counters: list[Counter] = []
    growth: list[float] = []

    def counter() -> Counter:
        counters.append(Counter())
        return counters[-1]

    with bench.session(RANKS, output=counter) as session:

        def ours(count: int) -> list[float]:
            counters.clear()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this run
            before = _memory_kb("VmRSS")
            began = time.perf_counter()
            session.execute(LOOP.format(count=count))
            seconds = time.perf_counter() - began
            growth.append((_memory_kb("VmHWM") - before) / 1024)
            seen = sum(each.lines for each in counters)
            if seen != RANKS * count:
                raise RuntimeError(f"{seen} lines came, not {RANKS * count}")
            return [seconds]

        def local() -> list[float]:
            code = compile(LOOP.format(count=100_000), "loop", "exec")
            began = time.perf_counter()
            with open(bench.folder / "lines", "w") as file, contextlib.redirect_stdout(file):
                exec(code, {})
            return [time.perf_counter() - began]

        floor = Arm("the loop to a file, once", local)
        arms = {count: Arm(OURS, partial(ours, count)) for count in COUNTS}
        take_turns([floor, *arms.values()], min(bench.repeats, 3))

    name = f"100,000 lines on each of {RANKS} ranks"
    yield floor.row(name, "s")
    yield arms[100_000].row(name, "s", floor)
    for count, arm in arms.items():
        yield _rate(count, arm, arms[COUNTS[0]])
    if growth:
        yield Row("memory of the kernel while they come", OURS, Figure(tuple(growth)), "MB more")


def _rate(count: int, arm: Arm, first: Arm) -> Row:
    """Lines a second; the same whatever their number, if the cost is linear."""
    name = f"rate of {count:,} lines on each of {RANKS} ranks"
    if arm.figure is None or first.figure is None:
        return Row(name, OURS, note=arm.note or first.note, failed=True)

    def rates(one: Arm, lines: int) -> list[float]:
        return [RANKS * lines / statistics.median(values) for values in one.rounds]

    mine, least = rates(arm, count), rates(first, COUNTS[0])
    ratio = Figure(tuple(a / b for a, b in zip(mine, least, strict=False)))
    return Row(name, OURS, Figure(tuple(mine)), "lines/s", ratio, f"{COUNTS[0]:,} lines")
