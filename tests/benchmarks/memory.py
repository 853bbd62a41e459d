"""Memory that a rank has for itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.bench import Bench
from tests.benchmarks.calls import noop
from tests.benchmarks.figures import OURS, Figure, Row, Target


def private_mb(pid: int) -> float:
    """Megabytes that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def memory(bench: Bench) -> Iterator[Row]:
    """Private memory of idle CPU ranks that have had one call."""
    values = []
    for _ in range(min(bench.repeats, 3)):
        with bench.session(4) as session:
            session.run(noop)
            time.sleep(0.5)
            values += [private_mb(info.pid) for info in session.infos]
    name = "private memory of an idle CPU rank, N=4"
    yield Row(name, OURS, Figure(tuple(values)), "MB", target=Target(60))
