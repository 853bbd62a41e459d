"""What an all_reduce that is given to a device costs in Python, at the caller.

Arguments: ranks, rounds. As ``record_cost.py``, but nobody waits: an operation is posted, compared
with what the others have posted, passed on to a group that has everything done already, and noted
until its handle says that it is complete. Prints a list for each round, in microseconds of
processor time a call: plain, recorded, recorded and compared.

With ``--profile`` it prints which line of these functions takes how much instead.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
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

    work = Done()

    def allreduce(self, tensors: Any, opts: Any) -> Done:
        return self.work


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
        members = range(ranks)
        group = SwappableGroup(Groups(recorder), "0", members, rank, limit, True, Recipe("nccl"))
        group.use(Nothing(rank, ranks))
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


def parts(first: Any, others: list[Any]) -> dict[str, float]:
    """Microseconds of each function that an operation passes, with what it calls."""
    from distsession.engine.collectives import in_flight, recorder
    from distsession.engine.collectives.group import SwappableGroup

    spent: dict[str, float] = {}
    counting = [False]

    def timed(owner: Any, name: str) -> None:
        native: Callable[..., Any] = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return native(*args, **kwargs)
            finally:
                if counting[0]:
                    took = time.perf_counter() - began
                    spent[name] = spent.get(name, 0.0) + took

        setattr(owner, name, wrapper)

    for owner, names in {
        SwappableGroup: ("allreduce", "_collective", "_enqueue", "_enqueued_on"),
        recorder.Stream: ("post", "compare", "enqueued", "_are_all_here", "sequence_word"),
        recorder.Recorder: ("place",),
        in_flight.InFlight: ("add", "note_completed"),
    }.items():
        for name in names:
            timed(owner, name)
    tensor = torch.ones(4)
    for _ in range(BATCHES):
        counting[0] = False
        for other in others:
            for _ in range(BATCH):
                dist.all_reduce(tensor, group=other)
        counting[0] = True
        for _ in range(BATCH):
            dist.all_reduce(tensor, group=first)
    count = BATCHES * BATCH
    return {name: round(1e6 * value / count, 2) for name, value in spent.items()}


def main(ranks: int, rounds: int) -> None:
    nothing = Nothing(0, ranks)
    recorded = groups(ranks, check=False)[0]
    compared, *others = groups(ranks, check=True)
    cost(compared, others)
    if "--profile" in sys.argv:
        print(json.dumps(parts(compared, others), indent=1))
        return
    print(
        json.dumps(
            [(cost(nothing, []), cost(recorded, []), cost(compared, others)) for _ in range(rounds)]
        )
    )


main(int(sys.argv[1]), int(sys.argv[2]))
