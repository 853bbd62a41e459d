"""What a call costs in the kernel with ranks on many hosts, none of which there is.

The kernel is a real one, and so is what it sends and gets; see ``tests.simulated_hosts``. The clock
says little here, since the machine plays the hosts, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import psutil

from distsession import Session
from tests.benchmarks.bench import Bench
from tests.benchmarks.calls import noop
from tests.benchmarks.figures import OURS, Figure, Row, Target
from tests.benchmarks.processes import snapshot
from tests.simulated_hosts import simulated_session

HOSTS, RANKS = (8, 32, 128), 8
HANG_S = 2.0


def scale(bench: Bench) -> Iterator[Row]:
    """Processor time and memory of the kernel, with more and more simulated hosts."""
    calls = 10 if bench.quick else 30
    figures: dict[int, dict[str, tuple[float, ...]]] = {}
    for hosts in HOSTS:
        before, used = snapshot(), psutil.Process().memory_full_info().uss
        with simulated_session(hosts, RANKS) as session:
            _call(session)
            called = [_call(session) for _ in range(calls)]
            grown = psutil.Process().memory_full_info().uss - used
            waiting = _processor_time_of_a_wait(session)
        bench.sweep(OURS, before)
        processor, clock = zip(*called, strict=True)
        figures[hosts] = {
            "processor time of the kernel for a call": processor,
            "the same call on the clock, the machine plays the hosts, too": clock,
            "memory of the kernel": (grown / 1e6,),
            "processor time of the kernel while ranks wait, for each second": (waiting,),
        }
    units = dict(zip(figures[HOSTS[0]], ("ms", "ms", "MB", "ms"), strict=True))
    for hosts, found in figures.items():
        for number, (name, values) in enumerate(found.items()):
            ratio = statistics.median(values) / statistics.median(figures[HOSTS[0]][name])
            yield Row(
                f"{name}, {hosts * RANKS} ranks on {hosts} simulated hosts",
                OURS,
                Figure(values),
                units[name],
                target=Target(60) if hosts == HOSTS[-1] and not number else None,
                note=f"{ratio:.1f} times that of {HOSTS[0]} hosts" if hosts > HOSTS[0] else "",
            )


def _call(session: Session) -> tuple[float, float]:
    """Milliseconds of the processors, in all threads of this process, and of the clock."""
    began, used = time.perf_counter(), time.process_time()
    answers = session.run(noop)
    times = 1e3 * (time.process_time() - used), 1e3 * (time.perf_counter() - began)
    assert len(answers) == session.world_size
    return times


def _processor_time_of_a_wait(session: Session) -> float:
    began, used = time.perf_counter(), time.process_time()
    session.execute("pass", label=f"hang {HANG_S}")
    return 1e3 * (time.process_time() - used) / (time.perf_counter() - began)
