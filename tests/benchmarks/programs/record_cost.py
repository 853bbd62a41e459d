"""What an all_reduce costs in Python where there is nothing to wait for.

Arguments: ranks, rounds. The other ranks are played in this process: what they post is there
before it is looked for. Below is a group that does nothing, so that all of the time is Python's.
Prints a list for each round, in microseconds a call: plain, recorded, recorded and compared.
"""

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distsession.engine.collectives.group import Groups, SwappableGroup
from distsession.engine.collectives.recorder import Recorder
from distsession.protocol.board import Board, file_size, make_file

BATCH = 14
"""As many operations as the others may be ahead."""
BATCHES = 100


class Nothing(dist.ProcessGroup):
    """Has everything done already."""

    def allreduce(self, tensors: Any, opts: Any) -> None:
        return None


def groups(ranks: int, *, check: bool) -> list[Any]:
    """A group as each of some ranks has it; only the first compares."""
    file = make_file()
    os.ftruncate(file, file_size(ranks))
    board = Board(file, ranks)
    made = []
    for rank in range(ranks):
        recorder = Recorder(board, rank, check=check and rank == 0)
        recorder.begin_log()  # as while a cell runs
        limit = timedelta(seconds=60)
        group = SwappableGroup(Groups(recorder), "0", range(ranks), rank, limit, True)
        group.inner = Nothing(rank, ranks)
        made.append(group)
    return made


def cost(first: Any, others: list[Any]) -> float:
    """Microseconds of a call: the median of some batches."""
    tensor = torch.ones(4)
    times = []
    for _ in range(BATCHES):
        for other in others:
            for _ in range(BATCH):
                dist.all_reduce(tensor, group=other)
        began = time.perf_counter()
        for _ in range(BATCH):
            dist.all_reduce(tensor, group=first)
        times.append(1e6 * (time.perf_counter() - began) / BATCH)
    return statistics.median(times)


def main(ranks: int, rounds: int) -> None:
    nothing = Nothing(0, ranks)
    recorded = groups(ranks, check=False)[0]
    compared, *others = groups(ranks, check=True)
    cost(compared, others)
    print(
        json.dumps(
            [(cost(nothing, []), cost(recorded, []), cost(compared, others)) for _ in range(rounds)]
        )
    )


main(int(sys.argv[1]), int(sys.argv[2]))
