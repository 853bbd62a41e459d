"""Training steps on a device, in processes that know no session.

Arguments: backend, file of the store, steps, ``Training`` (DistributedDataParallel) or ``Sharded``
(FSDP2). RANK and WORLD_SIZE say which of the processes this is. For each line on standard input it
trains some steps and prints microseconds of one: on the clock, and of processor time.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROWS = 512, 8, 128
"""A step takes about 30 ms on one core, and passes on 8 MB of gradients in two operations."""
PLAYS_DEVICE = "standin_"
"""How the names of threads begin that play a device, whose time is no processor's elsewhere."""


class Training:
    """A model on a device, and its steps.

    Args:
        device: Where.
        group: Default: the default one.
    """

    def __init__(self, device: torch.device, group: Any = None) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = torch.nn.Sequential(*layers).to(device)
        self._model = self._parallel(model, group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._rows = torch.ones(ROWS, WIDTH).to(device)
        self.time(3)

    def _parallel(self, model: torch.nn.Module, group: Any) -> torch.nn.Module:
        return DistributedDataParallel(model, process_group=group)

    def time(self, count: int) -> tuple[float, float]:
        """Microseconds of a step: on the clock, and of processor time of this process."""
        dist.barrier()
        torch.accelerator.synchronize()
        gc.collect()
        gc.disable()
        began, used = time.perf_counter(), processor_seconds()
        for _ in range(count):
            self._step()
        torch.accelerator.synchronize()
        took, used = time.perf_counter() - began, processor_seconds() - used
        gc.enable()
        return 1e6 * took / count, 1e6 * used / count

    def _step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._rows).square().mean().backward()
        self._optimizer.step()

    def time_beside(self, other: Training, count: int) -> list[tuple[float, float]]:
        """Microseconds of steps that both take in turns: of this one's, and of the other's."""
        times = []
        dist.barrier()
        gc.collect()
        gc.disable()
        for number in range(count):
            pair = (self, other) if number % 2 else (other, self)
            took = {training: training._time_one() for training in pair}
            times.append((took[self], took[other]))
        gc.enable()
        return times

    def _time_one(self) -> float:
        began = time.perf_counter()
        self._step()
        torch.accelerator.synchronize()
        return 1e6 * (time.perf_counter() - began)


class Sharded(Training):
    """The same with FSDP2, each layer by itself, over the default group."""

    def _parallel(self, model: torch.nn.Module, group: Any) -> torch.nn.Module:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        return model


def processor_seconds() -> float:
    """What the threads of this process have used, without those that play a device."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as name:
            if name.read().startswith(PLAYS_DEVICE):
                continue
        with open(f"/proc/self/task/{thread}/schedstat") as used:
            total += int(used.read().split()[0])
    return total / 1e9


def main(backend: str, path: str, count: int, kind: str) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if backend.startswith("standin"):
        importlib.import_module("tests.standin.register")
    device_type = "cuda" if backend.startswith("nccl") else "standin"
    module = torch.get_device_module(device_type)
    device = torch.device(device_type, rank % module.device_count())
    module.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    training = {"Training": Training, "Sharded": Sharded}[kind](device)
    print("READY", flush=True)
    for _ in sys.stdin:
        print(*training.time(count), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
