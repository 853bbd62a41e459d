"""What each helper costs above the bare call of torch, in a group of one.

Arguments: rounds, calls a round. There is nobody to wait for, so what is added is the helper's own.
Prints, for each helper, a list of rounds; each is the bare call and the helper, in microseconds.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import distsession.distributed as dd


def main(rounds: int, calls: int) -> None:
    dd.initialize_cpu()
    small = torch.ones(4)
    parts = [torch.empty(4)]
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all_reduce": (lambda: dist.all_reduce(small), lambda: dd.all_reduce(small)),
        "reduce": (lambda: dist.reduce(small, 0), lambda: dd.reduce(small, 0)),
        "all_gather": (lambda: dist.all_gather(parts, small), lambda: dd.all_gather(small)),
        "broadcast": (lambda: dist.broadcast(small, 0), lambda: dd.broadcast(small, 0)),
        "gather": (lambda: dist.gather(small, parts, 0), lambda: dd.gather(small)),
        "scatter": (lambda: dist.scatter(small, [small], 0), lambda: dd.scatter([small])),
        "all_gather_object": (
            lambda: dist.all_gather_object([None], {"x": 1}),
            lambda: dd.all_gather_object({"x": 1}),
        ),
        "barrier": (dist.barrier, dd.barrier),
        "get_rank": (dist.get_rank, dd.get_rank),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in pairs}
    for _ in range(rounds):
        for name, pair in pairs.items():
            found[name].append([cost(call, calls) for call in pair])
    dd.finalize()
    print(json.dumps(found))


def cost(call: Callable[[], Any], calls: int) -> float:
    """Microseconds a call: the median of some runs, for a machine is never quite still."""
    call()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - began) / calls)
    return statistics.median(times)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
