"""What an all_reduce costs in Python where there is nothing to wait for.

Arguments: ranks, rounds, backend: ``gloo``, or ``nccl`` for an operation that a device is given. It
is then posted, compared with what the others have posted, passed on, and noted until its handle
says that it is complete. The other ranks are played in this process: what they post is there before
it is looked for. Below is a group that has everything done already, so that all of the time is
Python's. Prints a list for each round, in microseconds of processor time a call: plain, recorded,
recorded and compared.
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
from distsession.engine.collectives.torch_private import Recipe
from distsession.protocol.board import Board, file_size, make_file

BATCH = 14
"""As many operations as the others may be ahead."""
BATCHES = 200


class Done(dist.Work):
    """Is complete."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: Any) -> bool:
        return True


class Nothing(dist.ProcessGroup):
    """Has everything done already."""

    work: Done | None = None

    def allreduce(self, tensors: Any, opts: Any) -> Done | None:
        return self.work


def inner(ranks: int, backend: str) -> Nothing:
    """What does the work: only a device's operations have handles."""
    nothing = Nothing(0, ranks)
    if backend != "gloo":
        nothing.work = Done()
    return nothing


def groups(ranks: int, backend: str, *, check: bool) -> list[Any]:
    """A group as each of some ranks has it; only the first compares."""
    file = make_file()
    os.ftruncate(file, file_size(ranks))
    board = Board(file, ranks)
    made = []
    for rank in range(ranks):
        recorder = Recorder(board, rank, check=check and rank == 0)
        recorder.begin_log()  # as while a cell runs
        limit, recipe = timedelta(seconds=60), Recipe(backend)
        members = range(ranks)
        group = SwappableGroup(Groups(recorder), "0", members, rank, limit, True, recipe)
        group.use(inner(ranks, backend))
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
        began = time.thread_time()
        for _ in range(BATCH):
            dist.all_reduce(tensor, group=first)
        times.append(1e6 * (time.thread_time() - began) / BATCH)
    return statistics.median(times)


def main(ranks: int, rounds: int, backend: str) -> None:
    nothing = inner(ranks, backend)
    recorded = groups(ranks, backend, check=False)[0]
    compared, *others = groups(ranks, backend, check=True)
    cost(compared, others)
    print(
        json.dumps(
            [(cost(nothing, []), cost(recorded, []), cost(compared, others)) for _ in range(rounds)]
        )
    )


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
