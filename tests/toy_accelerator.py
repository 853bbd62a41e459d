"""A type of device that torch does not know, with a backend of its own: to be preloaded.

There is no memory behind it, so no tensor can be made on it, and the backend moves nothing. What it
shows is where ranks are placed. Importing it starts no thread.
"""

from __future__ import annotations

import os
import types
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

TYPE, BACKEND, DEVICES = "toy", "toyccl", 3
GIB = 1 << 30

_chosen: list[int] = []


def _index(device: object) -> int:
    return device if isinstance(device, int) else torch.device(str(device)).index


def _set_device(device: object) -> None:
    if os.environ.get("TOY_IS_FULL"):
        raise RuntimeError("out of memory")
    _chosen.append(_index(device))


class ToyGroup(dist.ProcessGroup):
    def getBackendName(self) -> str:
        return BACKEND


def _make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ToyGroup:
    return ToyGroup(rank, size)


module = types.ModuleType(f"torch.{TYPE}")
module.device_count = lambda: int(os.environ.get("TOY_DEVICES", DEVICES))
module.is_available = lambda: True
module.set_device = _set_device
module.current_device = lambda: _chosen[-1] if _chosen else 0
module.get_device_properties = lambda device: SimpleNamespace(
    name=f"Toy {_index(device)}", total_memory=(1 + _index(device)) * GIB
)

torch.utils.rename_privateuse1_backend(TYPE)
torch._register_device_module(TYPE, module)
dist.Backend.register_backend(BACKEND, _make_group, devices=[TYPE])
