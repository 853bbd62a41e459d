"""What the helpers of distsession.distributed cost above the bare calls of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Figure, Row, Target
from tests.benchmarks.processes import program, run_program

UNIT = "us"
TARGETS = {
    "all_reduce": Target(5),
    **dict.fromkeys(("all_gather", "broadcast", "gather", "scatter"), Target(50)),
}


def helpers(bench: Bench) -> Iterator[Row]:
    """Small tensors in a group of one, where nobody is waited for."""
    calls = 100 if bench.quick else 400
    command = program("helper_costs", max(bench.repeats, 3), calls)
    found = json.loads(run_program(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    for name, rounds in found.items():
        title = f"a small {name}, a group of one"
        bare, ours = zip(*rounds, strict=True)
        above = tuple(mine - torchs for torchs, mine in rounds)
        yield Row(title, "torch's own", Figure(tuple(bare)), UNIT)
        ratio = Figure(tuple(b / a for a, b in zip(bare, ours, strict=True)))
        yield Row(
            title,
            f"{OURS}, above that",
            Figure(above),
            UNIT,
            note=f"{ratio.median:.1f} times torch's own in all",
            target=TARGETS.get(name),
        )
