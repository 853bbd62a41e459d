"""What it costs to keep a session: calls beside those of one that is not kept; and attaching."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial

from distsession import Session
from tests.benchmarks.bench import Bench
from tests.benchmarks.calls import noop, time_calls
from tests.benchmarks.figures import OURS, Arm, Row, Target, take_turns
from tests.benchmarks.processes import program

__all__ = ["ATTACH_TARGET", "attach_in_a_fresh_process", "keep"]

RANKS = 4
KEEP_S = 600.0
ATTACH_TARGET = Target(500.0)
CALL_TARGET = Target(1.05)


def keep(bench: Bench) -> Iterator[Row]:
    """Calls of a kept session, and attaching to it in a fresh process and in this one."""
    each, rounds = (200, 6) if bench.quick else (400, 10)
    with bench.session(RANKS) as plain, bench.session(RANKS, keep=KEEP_S, name="bench") as kept:
        floor = Arm("not kept", lambda: time_calls(partial(plain.run, noop), each))
        ours = Arm(OURS, lambda: time_calls(partial(kept.run, noop), each))
        take_turns([floor, ours], rounds)
        yield ours.row(f"call with no work, N={RANKS}, kept", "ms", floor, "not kept", CALL_TARGET)
        kept.detach()
        fresh = Arm(OURS, lambda: [attach_in_a_fresh_process("bench")])
        again = Arm(OURS, lambda: [_attach_here()])
        take_turns([fresh, again], bench.repeats * 2)
        yield fresh.row(f"attach after the import, N={RANKS}", "ms", target=ATTACH_TARGET)
        yield again.row(f"attach and detach again, N={RANKS}", "ms")
        Session.attach("bench").close()


def attach_in_a_fresh_process(name: str) -> float:
    """Milliseconds that it takes after the import."""
    command = program("attach", name)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def _attach_here() -> float:
    began = time.perf_counter()
    session = Session.attach("bench")
    took = 1e3 * (time.perf_counter() - began)
    session.detach()
    return took
