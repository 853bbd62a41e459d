"""What recording costs where work is given to a device, beside torch alone.

On NCCL where there are GPUs, otherwise on the stand-in of the tests.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from distsession import Session
from tests.benchmarks import device_faults, device_moves
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Figure, Row, Target
from tests.benchmarks.processes import end_tree, program, run_program, snapshot
from tests.gpu import target as targets

POSTING_RANKS = 8
RANKS = 2
"""Of what is trained: as many as small machines have processors."""
STEPS = 12
"""In a block, as long as a short cell: what a call costs is no part of a step."""
MOST_OF_A_STEP = 1.01
MOST_OF_AN_ALL_REDUCE = 1.05
UNIT = "us"
BARE = "torch's own group"
APART = "processes without a session"
ROOT = Path(__file__).parents[2]

# On each rank, beside the session's group, the one within it: on the same communicator.
TIMES = """
import time

def times(group, count):
    tensor = torch.ones(4, device=device)
    for _ in range(20):
        dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(count):
        dist.all_reduce(tensor, group=group)
    cpu = time.thread_time() - cpu
    torch.accelerator.synchronize()
    return 1e6 * (time.perf_counter() - wall) / count, 1e6 * cpu / count
"""


def devices(bench: Bench) -> Iterator[Row]:
    """On the device that there is."""
    yield from _posting(bench)
    try:
        target = targets.nccl()
        if target.ranks < RANKS:
            raise targets.NotHereError(target.limits[0])
    except targets.NotHereError:
        try:
            target = targets.standin()
        except targets.NotHereError as missing:
            yield Row("a device backend", OURS, note=str(missing))
            return
    yield from beside_torch(bench, target)


def beside_torch(bench: Bench, target: targets.Target) -> Iterator[Row]:
    """A small all_reduce, training steps, what ends a hang, and tensors that are moved."""
    yield from _all_reduce(bench, target)
    yield from _step(bench, target)
    yield from _sharded_step(bench, target)
    yield from device_faults.faults(bench, target)
    yield from device_moves.moves(bench, target)


def _options(target: targets.Target, ranks: int) -> dict[str, object]:
    options = {"threads": 1, **target.options}
    if "devices" in options:
        options["devices"] = options["devices"][:ranks]
    return options


def _posting(bench: Bench) -> Iterator[Row]:
    """In Python alone, without a device."""
    command = program("record_cost", POSTING_RANKS, max(bench.repeats, 3), "nccl")
    plain, recorded, compared = zip(*json.loads(run_program(command)), strict=True)
    name = f"processor time of an all_reduce that a device is given, N={POSTING_RANKS}"
    yield Row(name, f"{BARE}, doing nothing", Figure(tuple(plain)), UNIT)
    yield Row(name, f"{OURS}, recording, above that", _above(recorded, plain), UNIT)
    both = _above(compared, plain)
    yield Row(name, f"{OURS}, and comparing, above that", both, UNIT, target=Target(10))


def _above(these: Sequence[float], those: Sequence[float]) -> Figure:
    return Figure(tuple(a - b for a, b in zip(these, those, strict=True)))


def _all_reduce(bench: Bench, target: targets.Target) -> Iterator[Row]:
    """On one communicator, with the session's group around it and without."""
    count = 300 if bench.quick else 1000
    with bench.session(RANKS, **_options(target, RANKS)) as session:
        session.execute(TIMES)
        found: dict[str, list[Sequence[float]]] = {"dist.group.WORLD": [], "bare": []}
        session.execute("bare = dist.group.WORLD.inner")
        for _ in range(max(bench.repeats, 5)):
            for group, values in found.items():
                values.append(session.evaluate(f"times({group}, {count})")[0])
    ours, bare = found.values()
    for number, what in enumerate(("wall time", "processor time at the caller")):
        name = f"{what} of a small all_reduce on {target.backend}, N={RANKS}"
        mine, theirs = [v[number] for v in ours], [v[number] for v in bare]
        ratio = Figure(tuple(a / b for a, b in zip(mine, theirs, strict=True)))
        yield Row(name, BARE, Figure(tuple(theirs)), UNIT)
        # Where the CPU plays the device, what the one does is taken from the other.
        aim = None if number or not target.is_nccl else Target(MOST_OF_AN_ALL_REDUCE)
        yield Row(name, OURS, Figure(tuple(mine)), UNIT, ratio, BARE, aim)
        yield Row(name, f"{OURS}, above that", _above(mine, theirs), UNIT)


# --- a training step ------------------------------------------------------------------------------


class _Apart:
    """The same training in processes as torchrun starts them."""

    def __init__(self, bench: Bench, target: targets.Target, count: int, kind: str = "Training"):
        arguments = (target.backend, bench.folder / f"device-store-{kind}", count, kind)
        several = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if target.is_nccl else {}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        # As torchrun has it, and a session: the threads that play a device go by this alone.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environ = {**os.environ, **several, **threads, "PYTHONPATH": path, "WORLD_SIZE": str(RANKS)}
        self._processes = [
            subprocess.Popen(
                program("device_steps", *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]

    def begin(self) -> None:
        self._answers()

    def measure(self) -> list[float]:
        """Microseconds of a step on rank 0: on the clock, and of processor time."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [float(part) for part in self._answers()[0].split()]

    def _answers(self) -> list[str]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(process.stdout.readline())
            if not answers[-1]:
                raise RuntimeError("a process of the training ended")
        return answers

    def close(self) -> None:
        for process in self._processes:
            end_tree(process)


def _step(bench: Bench, target: targets.Target) -> Iterator[Row]:
    """Blocks of steps in turns: on a session's ranks with our group and without it, and apart.

    Blocks differ by some percent, whosever they are. So on the session's ranks single steps are
    taken in turns as well, with the one group and the other: many, as each takes part in the noise.
    """
    rounds_of_blocks, rounds_of_steps = (12, 600) if bench.quick else (40, 3000)
    before = snapshot()
    apart = _Apart(bench, target, STEPS)
    try:
        apart.begin()
        with Session(RANKS, **_options(target, RANKS)) as session:
            session.execute(
                "from tests.benchmarks.programs.device_steps import Training\n"
                "ours = Training(device)\n"
                "bare = Training(device, dist.group.WORLD.inner)"
            )
            arms: dict[str, Callable[[], Sequence[float]]] = {
                APART: apart.measure,
                OURS: lambda: session.evaluate(f"ours.time({STEPS})")[0],
                f"{OURS}, with {BARE}": lambda: session.evaluate(f"bare.time({STEPS})")[0],
            }
            rounds = []
            for number in range(rounds_of_blocks):
                order = [*arms][number % 3 :] + [*arms][: number % 3]  # none is always behind one
                rounds.append({name: arms[name]() for name in order})
            steps = session.evaluate(f"ours.time_beside(bare, {rounds_of_steps})")[0]
    finally:
        apart.close()
        bench.sweep(OURS, before)
    what = f"a step of DistributedDataParallel on {target.backend}, N={RANKS}"
    walls = {name: [each[name][0] for each in rounds] for name in arms}
    used = {name: [each[name][1] for each in rounds] for name in arms}
    aim = Target(MOST_OF_A_STEP) if target.is_nccl else None  # for the same reason
    yield from _beside_apart(f"wall time of {what}", walls, aim)
    yield from _step_by_step(f"{what}, step by step", steps)
    yield from _beside_apart(f"processor time of rank 0 in {what}", used)
    # What is added is the same however long a step is: it is a share of one of the usual length.
    length = statistics.median(walls[APART])
    shares = tuple(1 + each / length for each in _above(used[OURS], used[APART]).values)
    name = f"processor time that is added to {what}, as a share of its wall time"
    yield Row(name, OURS, ratio=Figure(shares), beside=APART, target=Target(MOST_OF_A_STEP))


def _sharded_step(bench: Bench, target: targets.Target) -> Iterator[Row]:
    """The same of FSDP2, whose groups find each other by name: so there is no third arm."""
    rounds = 12 if bench.quick else 40
    before = snapshot()
    apart = _Apart(bench, target, STEPS, "Sharded")
    try:
        apart.begin()
        with Session(RANKS, **_options(target, RANKS)) as session:
            session.execute(
                "from tests.benchmarks.programs.device_steps import Sharded\nours = Sharded(device)"
            )
            pairs = []
            for number in range(rounds):
                arms = [apart.measure, lambda: session.evaluate(f"ours.time({STEPS})")[0]]
                found = {n: arms[n]() for n in ((0, 1) if number % 2 else (1, 0))}
                pairs.append((found[0], found[1]))
    finally:
        apart.close()
        bench.sweep(OURS, before)
    for number, what in enumerate(("wall time", "processor time of rank 0")):
        name = f"{what} of a step of FSDP2 on {target.backend}, N={RANKS}"
        theirs, mine = ([each[number] for each in arm] for arm in zip(*pairs, strict=True))
        ratio = Figure(tuple(b / a for a, b in zip(theirs, mine, strict=True)))
        aim = Target(MOST_OF_A_STEP) if target.is_nccl and not number else None
        yield Row(name, APART, Figure(tuple(theirs)), UNIT)
        yield Row(name, OURS, Figure(tuple(mine)), UNIT, ratio, APART, aim)


def _beside_apart(
    name: str, times: Mapping[str, Sequence[float]], target: Target | None = None
) -> Iterator[Row]:
    """A row for each, with its ratio in each round; that of our group may have a target."""
    bare = f"{OURS}, with {BARE}"
    yield Row(name, APART, Figure(tuple(times[APART])), UNIT)
    for subject, beside, aim in ((bare, APART, None), (OURS, APART, target), (OURS, bare, None)):
        mine, theirs = times[subject], times[beside]
        ratio = Figure(tuple(a / b for a, b in zip(mine, theirs, strict=True)))
        yield Row(name, subject, Figure(tuple(mine)), UNIT, ratio, beside, aim)


def _step_by_step(name: str, pairs: Sequence[tuple[float, float]]) -> Iterator[Row]:
    """Medians of tenths of all pairs: how far these differ says how sure the figure is."""
    bare = f"{OURS}, with {BARE}"
    tenths = [pairs[first::10] for first in range(10)]
    ratio = Figure(tuple(statistics.median(a / b for a, b in tenth) for tenth in tenths))
    mine, theirs = zip(*pairs, strict=True)
    yield Row(name, bare, Figure(theirs), UNIT)
    yield Row(name, OURS, Figure(mine), UNIT, ratio, bare, Target(MOST_OF_A_STEP))
