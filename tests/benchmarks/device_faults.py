"""How soon ranks are free that wait for a device in vain, and how soon the next cell works."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from distsession import CollectiveHangError, RunError, RunInterrupt, Session
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Figure, Row, Target
from tests.benchmarks.programs.hangs import Fault
from tests.gpu import target as targets

RANKS = 4
VICTIM = 1
GRACE_S = 1.0
"""Of the sessions: how long a certain deadlock is left alone."""

# Rank 1 does something else, and the others wait for their device.
HANG = """
import time
tensor = torch.ones(4, device=device)
if rank == 1:
    {other}
else:
    dist.all_reduce(tensor)
    tensor.sum().item()
"""

WORK = """
total = torch.ones(4, device=device)
dist.all_reduce(total)
total = total.tolist()
"""


def faults(bench: Bench, target: targets.Target) -> Iterator[Row]:
    """A Stop, a certain deadlock, an error of one rank, and a death, each followed by a cell."""
    ranks = min(RANKS, target.ranks)
    options = {"threads": 1, "hang_grace": GRACE_S, **target.options}
    if "devices" in options:
        options["devices"] = options["devices"][:ranks]
    aims = {
        "Stop to a collective that works": (_stop, 2.0 if target.is_nccl else 0.3),
        f"certain deadlock to ended cell, beyond the grace of {GRACE_S:g} s": (_deadlock, 0.5),
        "error of a rank to ended cell": (_error, 0.5),
        "SIGKILL of a rank to ended cell": (_death, 0.3),
        "restart([1]) of the killed rank to a collective that works": (_replace, 1.5),
    }
    found: dict[str, list[float]] = {what: [] for what in aims}
    with bench.session(ranks, **options) as session:
        session.execute(WORK)
        for _ in range(max(bench.repeats, 3)):
            for what, (measure, _) in aims.items():
                found[what].append(measure(session))
                if measure is not _death:
                    _check(session, ranks)
    for what, times in found.items():
        name = f"{what}, ranks waiting for a device ({target.backend}), N={ranks}"
        yield Row(name, OURS, Figure(tuple(times)), "s", target=Target(aims[what][1]))


def _stop(session: Session) -> float:
    fault = Fault(session.interrupt)
    _end(session, "time.sleep(60)", RunInterrupt)
    session.execute(WORK)
    return time.monotonic() - fault.at


def _deadlock(session: Session) -> float:
    began = time.monotonic()
    _end(session, "pass", CollectiveHangError)
    return time.monotonic() - began - GRACE_S


def _error(session: Session) -> float:
    began = time.monotonic()
    _end(session, "time.sleep(1)\n    raise ValueError('on purpose')", RunError)
    return time.monotonic() - began - 1


def _death(session: Session) -> float:
    victim = session.infos[VICTIM].pid
    fault = Fault(lambda: os.kill(victim, signal.SIGKILL))
    _end(session, "time.sleep(60)", RunError)
    return time.monotonic() - fault.at


def _replace(session: Session) -> float:
    began = time.monotonic()
    session.restart([VICTIM])
    session.execute(WORK)
    return time.monotonic() - began


def _end(session: Session, other: str, error: type[BaseException]) -> None:
    with contextlib.suppress(error):
        session.execute(HANG.format(other=other))
        raise RuntimeError("the cell ended without an error")


def _check(session: Session, ranks: int) -> None:
    session.execute(WORK)
    found = dict(session.evaluate("total"))
    if any(total != [float(ranks)] * 4 for total in found.values()):
        raise RuntimeError(f"the next collective gave {found}")
