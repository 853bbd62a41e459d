"""What it costs to record and to compare collectives, in a call that has little else to do."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence

from distsession import Session
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Figure, Row, Target
from tests.benchmarks.processes import program, run_program

CHECKS = ("off", "shared", "detail")
RANKS = (2, 4)
MORE_RANKS = (8, 16, 32, 64)
"""Where only Python is measured: other ranks are played in the same process."""
UNIT = "us"
TURN = 40
"""Operations of one group before it is the other's turn."""
NATIVE = "torch's own"

# On each rank, beside the session's group, one of torch's own: both in the same process.
PREPARE = """
import time
from datetime import timedelta
from distsession.engine.collectives.torch_private import make_native_group

native = make_native_group(
    dist.PrefixStore("native", dist.FileStore({path!r}, world_size)),
    rank, world_size, timedelta(seconds=60),
)

def times(group, count):
    tensor = torch.ones(4)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        dist.all_reduce(tensor, group=group)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return 1e6 * wall / count, 1e6 * cpu / count

def turns(count):
    times(native, 20), times(None, 20)
    return [(times(native, {turn}), times(None, {turn})) for _ in range(count // {turn})]
"""


def check(bench: Bench) -> Iterator[Row]:
    """The cost in Python alone, and beside torch's own group in the ranks of a session."""
    for ranks in RANKS + MORE_RANKS:
        yield from _python(bench, ranks)
    for ranks in RANKS:
        yield from _in_a_session(bench, ranks)


def _python(bench: Bench, ranks: int) -> Iterator[Row]:
    """Without gloo and without waiting: what is added to a call, whatever the machine does."""
    rounds = json.loads(run_program(program("record_cost", ranks, max(bench.repeats, 3), "gloo")))
    plain, recorded, compared = zip(*rounds, strict=True)
    name = f"Python of an all_reduce with nobody to wait for, N={ranks}"
    yield Row(name, f"{NATIVE}, doing nothing", Figure(tuple(plain)), UNIT)
    yield Row(name, f"{OURS}, recording, above that", _above(recorded, plain), UNIT)
    yield Row(name, f"{OURS}, comparing, above recording", _above(compared, recorded), UNIT)
    both = _above(compared, plain)
    yield Row(name, f"{OURS}, both, above torch's", both, UNIT, target=Target(_most(ranks)))


def _most(ranks: int) -> float:
    """Microseconds: four with 4 ranks, and one more for each doubling."""
    return max(4, 2 + math.log2(ranks))


def _above(these: Sequence[float], those: Sequence[float]) -> Figure:
    return Figure(tuple(a - b for a, b in zip(these, those, strict=True)))


def _in_a_session(bench: Bench, ranks: int) -> Iterator[Row]:
    count = 500 if bench.quick else 2000
    ours: dict[str, list[Sequence[float]]] = {kind: [] for kind in CHECKS}
    theirs: dict[str, list[Sequence[float]]] = {kind: [] for kind in CHECKS}
    with contextlib.ExitStack() as stack:
        sessions = {kind: stack.enter_context(bench.session(ranks, check=kind)) for kind in CHECKS}
        for kind, session in sessions.items():
            path = str(bench.folder / f"native-{ranks}-{kind}")
            session.execute(PREPARE.format(path=path, turn=TURN))
        for _ in range(max(bench.repeats, 5)):
            for kind, session in sessions.items():
                native, own = _by_turns(session, count)
                theirs[kind].append(native)
                ours[kind].append(own)
    for number, what in enumerate(("wall time", "processor time of rank 0")):
        name = f"{what} of a small all_reduce, N={ranks}"
        native_times = [times[number] for kind in CHECKS for times in theirs[kind]]
        yield Row(name, NATIVE, Figure(tuple(native_times)), UNIT)
        for kind in CHECKS:
            mine = [times[number] for times in ours[kind]]
            beside = [times[number] for times in theirs[kind]]
            ratio = Figure(tuple(a / b for a, b in zip(mine, beside, strict=True)))
            subject = f"{OURS}, check={kind!r}, above that"
            yield Row(name, subject, _above(mine, beside), UNIT, ratio, NATIVE)


def _by_turns(session: Session, count: int) -> tuple[Sequence[float], Sequence[float]]:
    """Wall and processor time of a call on rank 0, torch's own and the session's: medians of turns.

    Both take turns within one call, as how soon a process is woken changes from second to second.
    """
    turns: list[tuple[Sequence[float], Sequence[float]]] = session.evaluate(f"turns({count})")[0]
    native, own = zip(*turns, strict=True)
    return _medians(native), _medians(own)


def _medians(times: Sequence[Sequence[float]]) -> Sequence[float]:
    return [statistics.median(values) for values in zip(*times, strict=True)]
