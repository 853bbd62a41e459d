"""Sessions of 4, 16, 32 and 64 ranks: their start, what ends a hang, fresh ranks, and their end."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from distsession import Session
from distsession.errors import CollectiveHangError
from tests.benchmarks.bench import Bench, settle_agent
from tests.benchmarks.calls import noop
from tests.benchmarks.figures import OURS, Arm, Figure, Row, Target, describe, take_turns
from tests.benchmarks.memory import private_mb
from tests.benchmarks.processes import end_tree, program, snapshot
from tests.benchmarks.programs.hangs import WORK, cell
from tests.benchmarks.recovery import KEPT, VICTIM, kill_a_rank, stop_a_hang, verify
from tests.benchmarks.starts import IMPORT, import_torch, start_ours, swept_arm
from tests.ports import held_port

RANKS = (4, 16, 32, 64)
GRACE_S = 1.0
"""The ``hang_grace`` of these sessions: by its end every rank has long been where it will stay."""
PLAIN = "plain gloo, forked warm"

# Rank 1 has ended its part; the last of the others begins the deadlock.
DEADLOCK = """
import time
began = 0.0
if rank != 1:
    began = time.monotonic()
    dist.all_reduce(torch.ones(4))
"""


@dataclass(frozen=True)
class Aim:
    """A line for each number of ranks, and what it should be at most there."""

    title: str
    limits: tuple[float, float, float, float]
    unit: str = "s"

    def name(self, ranks: int) -> str:
        return f"{self.title}, {ranks} ranks"

    def target(self, ranks: int) -> Target:
        return Target(self.limits[RANKS.index(ranks)])


START = Aim("start to the first barrier", (1.15, 1.5, 2.0, 3.5))
RESTART = Aim("restart() of all", (1.3, 1.3, 1.3, 1.3))
STOP = Aim("Stop in a hung collective to ended cell", (0.05, 0.1, 0.2, 0.5))
STOPPED = Aim("from that Stop to a collective that works", (0.02, 0.2, 0.5, 1.5))
DEADLOCKED = Aim("end of a deadlock's grace to ended cell", (0.1, 0.3, 0.5, 1.5))
FREED = Aim("from that end to a collective that works", (0.02, 0.2, 0.5, 1.5))
KILL = Aim("SIGKILL of a rank to ended cell", (0.1, 0.2, 0.3, 0.5))
REPLACED = Aim("restart([1]) of it to a collective that works", (0.2, 0.4, 0.8, 2.0))
MEMORY = Aim("private memory of an idle rank", (40.0, 40.0, 40.0, 40.0), "MB")
CLOSE = Aim("close()", (0.3, 0.5, 1.0, 2.0))
KILLED = Aim("warnings of close(), such as of an agent that is killed", (0, 0, 0, 0), "said")
RATIOS = (START, RESTART)
"""What is shown as a multiple of what it was measured beside."""
AIMS = (*RATIOS, STOP, STOPPED, DEADLOCKED, FREED, KILL, REPLACED, MEMORY, CLOSE, KILLED)


def many(bench: Bench) -> Iterator[Row]:
    """For each number of ranks starts, then sessions that all of the rest is done to."""
    for ranks in RANKS:
        floor = Arm(IMPORT, import_torch)
        ours = swept_arm(bench, OURS, partial(start_ours, ranks))
        take_turns([floor, ours], bench.repeats)
        yield floor.row(START.name(ranks), "s")
        yield ours.row(START.name(ranks), "s", floor, target=START.target(ranks))
        yield from _Sessions(bench, ranks).rows()


class _Sessions:
    """Sessions of so many ranks, one after the other.

    ipyparallel's client is never asked for: its registration is on nobody's path.
    """

    def __init__(self, bench: Bench, ranks: int):
        self._bench = bench
        self._ranks = ranks
        self._values: dict[Aim, list[float]] = defaultdict(list)

    def rows(self) -> Iterator[Row]:
        note = ""
        with PlainGloo(self._ranks) as plain:
            plain, ours = Arm(PLAIN, plain.measure), Arm(OURS, list)
            try:
                for _ in range(self._bench.repeats):
                    self._session(plain, ours)
            except Exception as error:
                note = describe(error)
        name = RESTART.name(self._ranks)
        yield plain.row(name, "s")
        yield ours.row(name, "s", plain, target=RESTART.target(self._ranks))
        for aim in AIMS[len(RATIOS) :]:
            figure = Figure(tuple(self._values[aim])) if self._values[aim] else None
            yield Row(
                aim.name(self._ranks),
                OURS,
                figure,
                aim.unit,
                target=aim.target(self._ranks) if figure else None,
                note=note,
                failed=bool(note),
            )

    def _session(self, plain: Arm, restarts: Arm) -> None:
        before = snapshot()
        session = Session(self._ranks, hang_grace=GRACE_S)
        try:
            session.run(noop)
            settle_agent(session)
            self._values[MEMORY] += [private_mb(info.pid) for info in session.infos]
            restarts.measure = partial(_restart, session)
            take_turns([plain, restarts], 1)
            if restarts.failed:
                raise RuntimeError(restarts.note)
            session.execute(KEPT)
            self._faults(session)
        finally:
            with _warnings_of_agents() as said:
                began = time.monotonic()
                session.close()
            self._values[CLOSE].append(time.monotonic() - began)
            self._values[KILLED].append(len(said))
            self._bench.sweep(OURS, before)

    def _faults(self, session: Session) -> None:
        for aims, act in (
            ((STOP, STOPPED), partial(stop_a_hang, session, cell("stop", ""))),
            ((DEADLOCKED, FREED), partial(_deadlock, session)),
            ((KILL, REPLACED), partial(kill_a_rank, session, cell("kill", ""))),
        ):
            outcome = act()
            for aim, key in zip(aims, ("ended", "again"), strict=True):
                self._values[aim].append(outcome[key] or 0.0)
            verify(session, [r for r in range(self._ranks) if aims[0] is not KILL or r != VICTIM])


def _restart(session: Session) -> list[float]:
    began = time.monotonic()
    session.restart()
    return [time.monotonic() - began]


def _deadlock(session: Session) -> dict[str, float | None]:
    with contextlib.suppress(CollectiveHangError):
        session.execute(DEADLOCK)
        raise RuntimeError("the deadlock was not ended")
    ended = time.monotonic()
    session.execute(WORK)
    again = time.monotonic() - ended
    began = max(session.evaluate("began").values())
    return {"ended": ended - began - GRACE_S, "again": again}


class PlainGloo:
    """A process with torch that forks plain ranks when it is told to."""

    def __init__(self, ranks: int):
        self._process = subprocess.Popen(
            program("warm_gloo", ranks),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> PlainGloo:
        return self

    def __exit__(self, *_: object) -> None:
        end_tree(self._process)

    def measure(self) -> list[float]:
        """Seconds from the first fork until all are past their barrier."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with held_port() as port:
            self._process.stdin.write(f"{port}\n")
            self._process.stdin.flush()
            return [float(self._process.stdout.readline())]


@contextlib.contextmanager
def _warnings_of_agents() -> Iterator[list[str]]:
    """What is said of agents, such as that one is stuck and therefore killed."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("distsession.cluster.agents")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
