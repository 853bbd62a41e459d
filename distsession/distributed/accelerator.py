"""Which type of device a process group's backends work on, and which of them is this rank's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from distsession.devices import NCCL_CLASSES_TORCH, NCCL_NAMES

__all__ = ["accelerator_of", "backends_of", "current_device", "nccl_names"]


def backends_of(group: Any = None) -> dict[str, str]:
    """For each type of device the backend that moves its tensors."""
    parts = str(dist.get_backend_config(group)).split(",")
    pairs = [part.partition(":") for part in parts]
    return {device.strip(): backend.strip() for device, colon, backend in pairs if colon}


def accelerator_of(backends: Mapping[str, str]) -> str:
    """The type of device that a group is for; empty where it is the CPU.

    A backend that serves the CPU as well, such as gloo, is for that.

    Args:
        backends: As of :func:`backends_of`.
    """
    capabilities = dist.Backend.backend_capability
    for kind, name in backends.items():
        if "nccl" in name:
            return "cuda"
        if kind != "cpu" and not {"cpu", "cuda"} & set(capabilities.get(name, ("cpu",))):
            return kind
    return "" if "cpu" in backends else next(iter(backends), "")


def nccl_names() -> tuple[str, ...]:
    """The names by which this torch knows NCCL, also where it has none: ``"nccl"`` first.

    From torch 2.15 on each of its classes has a name, which torch registers when it is first used.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", str(torch.__version__))[:2])
    return NCCL_NAMES if release >= NCCL_CLASSES_TORCH else NCCL_NAMES[:1]


def current_device(kind: str) -> torch.device:
    """The device of a type that this process uses at present."""
    return torch.device(kind, torch.get_device_module(kind).current_device())
