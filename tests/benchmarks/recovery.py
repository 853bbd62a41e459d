"""How soon a cell ends that cannot go on, and how soon the next one works."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator

from distsession import RunError, Session
from distsession.errors import RunInterrupt
from tests.benchmarks import peers
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Figure, NotInstalled, Row, Target, describe
from tests.benchmarks.processes import program, run_program, snapshot
from tests.benchmarks.programs.hangs import LIMIT, WORK, Fault, cell
from tests.ports import held_port

RANKS = (2, 4)
PEER_RANKS = 4
VICTIM = 1
KEPT = "kept = [rank, 'from before']"

Outcome = dict[str, float | None]
"""Seconds to the end of the cell, and from there to a collective that has worked."""


class Broken(Exception):
    """What should have been there after the recovery is not."""


def stop(bench: Bench) -> Iterator[Row]:
    """Stop while rank 1 sleeps and the others wait for it in a collective."""
    names = ("Stop in a hung collective to ended cell", "from there to a collective that works")
    yield from _rows(
        bench, "stop", stop_a_hang, {"ended": (names[0], 0.3), "again": (names[1], 0.5)}
    )


def failure(bench: Bench) -> Iterator[Row]:
    """An error on rank 1 while the others wait for it in a collective."""
    name = "error of a rank, others in a collective, to ended cell"
    after = "from that error to a collective that works"
    yield from _rows(bench, "raise", _raise, {"ended": (name, 1.0), "again": (after, 0.5)})


def replace(bench: Bench) -> Iterator[Row]:
    """SIGKILL of rank 1 while the others wait for it in a collective, then a fresh rank 1."""
    name = "SIGKILL of a rank, others in a collective, to ended cell"
    mine = "restart([1]) of a killed rank to a collective that works"
    yield from _rows(bench, "kill", kill_a_rank, {"ended": (name, 1.0)}, {"again": (mine, 1.0)})


# --- ours -----------------------------------------------------------------------------------------


def stop_a_hang(session: Session, code: str) -> Outcome:
    fault = Fault(session.interrupt)
    with contextlib.suppress(RunInterrupt):
        session.execute(code)
        raise Broken("the cell ended by itself")
    ended = time.monotonic()
    session.execute(WORK)
    return {"ended": ended - fault.at, "again": time.monotonic() - ended}


def _raise(session: Session, code: str, path: str) -> Outcome:
    with contextlib.suppress(RunError):
        session.execute(code)
        raise Broken("the cell ended without an error")
    ended = time.monotonic()
    with open(path) as file:
        began = float(file.read())
    session.execute(WORK)
    return {"ended": ended - began, "again": time.monotonic() - ended}


def kill_a_rank(session: Session, code: str) -> Outcome:
    victim = session.infos[VICTIM].pid
    fault = Fault(lambda: os.kill(victim, signal.SIGKILL))
    with contextlib.suppress(RunError):
        session.execute(code)
        raise Broken("the cell ended without an error")
    ended = time.monotonic()
    session.restart([VICTIM])
    session.execute(WORK)
    return {"ended": ended - fault.at, "again": time.monotonic() - ended}


def _ours(bench: Bench, case: str, ranks: int, measure: Callable[..., Outcome]) -> list[Outcome]:
    outcomes = []
    with bench.session(ranks) as session:
        session.execute(KEPT)
        for number in range(max(bench.repeats, 3)):
            path = str(bench.folder / f"{case}-{ranks}-{number}")
            code = cell(case, path)
            outcomes.append(
                measure(session, code, path) if case == "raise" else measure(session, code)
            )
            verify(session, [r for r in range(ranks) if case != "kill" or r != VICTIM])
    return outcomes


def verify(session: Session, keepers: list[int]) -> None:
    """The collective came to the right sum, and the ranks that stayed have their variables."""
    sums = session.evaluate("total.tolist()")
    if any(sums[rank] != [float(session.world_size)] * 4 for rank in session.ranks):
        raise Broken(f"the next collective gave {dict(sums)}")
    kept = session[keepers].evaluate("kept")
    if any(kept[rank] != [rank, "from before"] for rank in keepers):
        raise Broken(f"variables were lost: {dict(kept)}")


# --- rows -----------------------------------------------------------------------------------------


def _rows(
    bench: Bench,
    case: str,
    measure: Callable[..., Outcome],
    compared: dict[str, tuple[str, float]],
    alone: dict[str, tuple[str, float]] | None = None,
) -> Iterator[Row]:
    """Ours for each number of ranks, and the peers' for one.

    Args:
        bench: Of this run.
        case: See ``programs/hangs.py``.
        measure: Has our session do it.
        compared: What of an outcome becomes a row, under which name and with what target.
        alone: The same for what no peer has.
    """
    for ranks in RANKS:
        outcomes: list[Outcome] = []
        note = ""
        try:
            outcomes = _ours(bench, case, ranks, measure)
        except Exception as error:
            note = describe(error)
        theirs = dict(_peers(bench, case)) if ranks == PEER_RANKS else {}
        for key, (what, limit) in {**compared, **(alone or {})}.items():
            name = f"{what}, N={ranks}"
            target = Target(limit) if ranks == max(RANKS) else None
            if note:
                yield Row(name, OURS, note=note, failed=True)
            else:
                figure = Figure(tuple(outcome[key] or 0.0 for outcome in outcomes))
                yield Row(name, OURS, figure, "s", target=target)
            for subject, theirs_of in theirs.items() if key in compared else ():
                yield _peer_row(name, subject, key, theirs_of)


def _peer_row(name: str, subject: str, key: str, outcomes: list[Outcome] | Row) -> Row:
    if isinstance(outcomes, Row):
        return Row(name, subject, note=outcomes.note, failed=outcomes.failed)
    values = [value for outcome in outcomes if (value := outcome[key]) is not None]
    if len(values) < len(outcomes):
        if key == "again" and any(outcome["ended"] is None for outcome in outcomes):
            return Row(name, subject, note="the cell before never ended")
        return Row(name, subject, note=f"not within {LIMIT:g} s")
    return Row(name, subject, Figure(tuple(values)), "s")


def _peers(bench: Bench, case: str) -> Iterator[tuple[str, list[Outcome] | Row]]:
    """What came of it with each peer; a row where it could not be had."""
    for subject, run in {
        "ipyparallel": _ipyparallel,
        "nbdistributed": _nbdistributed,
        "ray": _ray,
    }.items():
        outcomes: list[Outcome] = []
        for number in range(1 if bench.quick else min(bench.repeats, 3)):
            path = bench.folder / f"{case}-{subject}-{number}"
            before = snapshot()
            try:
                printed = run(bench, case, str(path))
            except NotInstalled as missing:
                yield subject, Row("", subject, note=str(missing))
                break
            except Exception as error:
                yield subject, Row("", subject, note=describe(error), failed=True)
                bench.sweep(subject, before)
                break
            bench.sweep(subject, before)
            line = next(line for line in printed.splitlines() if line.startswith("OUTCOME "))
            outcomes.append(json.loads(line.removeprefix("OUTCOME ")))
        else:
            yield subject, outcomes


def _ipyparallel(bench: Bench, case: str, path: str) -> str:
    with held_port() as port:
        return run_program(program("hang_ipyparallel", case, PEER_RANKS, port, path))


def _nbdistributed(bench: Bench, case: str, path: str) -> str:
    python = peers.python_with("nbdistributed")
    command = program("hang_nbdistributed", case, PEER_RANKS, path, python=python)
    return run_program(command, env=peers.path_with(python))


def _ray(bench: Bench, case: str, path: str) -> str:
    python = peers.python_with("ray")
    folder = tempfile.mkdtemp(prefix="r", dir=bench.folder)  # short: it holds unix sockets
    command = program("hang_ray", case, PEER_RANKS, folder, path, python=python)
    return run_program(command, env=peers.ray_environment(python, bench.folder))
