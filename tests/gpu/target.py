"""Where the checks run: on GPUs by NCCL, or on the stand-in that needs none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from distsession.devices import MULTI_RANK_NCCL
from distsession.engine.host_info import nccl_version

RANKS = 4
"""As many as there are, unless every rank needs a GPU of its own and there are fewer."""


@dataclass(frozen=True)
class Target:
    """A backend, with the device that it works on.

    Attributes:
        backend: Its name.
        device: torch's name of the type of device.
        ranks: How many can be had.
        options: Of the sessions.
        limits: What is not tried here, in sentences.
        break_device: Code that breaks the current device for the rest of the process.
    """

    backend: str
    device: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    break_device: str = ""

    @property
    def is_nccl(self) -> bool:
        return self.device == "cuda"


class NotHereError(Exception):
    """Why a backend cannot be tried on this machine."""


def nccl(name: str = "nccl") -> Target:
    """Several ranks on GPU 0; with an NCCL that does not take that, a rank on each GPU.

    Args:
        name: Of the backend: torch 2.15 has more than one class for NCCL.

    Raises:
        NotHereError: There is no GPU.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        raise NotHereError("there is no GPU")
    # An index out of range ends all work of the process on its GPU.
    broken = "torch.zeros(4, device=device)[torch.full((1,), 99, device=device)].sum().item()"
    version = nccl_version()
    if version >= MULTI_RANK_NCCL:
        options = {"backend": name, "devices": [0] * RANKS}
        return Target(name, "cuda", RANKS, options, (), broken)
    ranks = min(gpus, RANKS)
    numbers = ".".join(map(str, version))
    limit = f"NCCL {numbers} takes one rank on a GPU (several from 2.30 on): {ranks} of them are "
    limit += f"tried, on {ranks} GPU{'s' if ranks > 1 else ''}"
    options = {"backend": name, "devices": list(range(ranks))}
    return Target(name, "cuda", ranks, options, (limit,), broken)


def standin(name: str = "standin") -> Target:
    """Ranks with a device each that is played by the CPU.

    Args:
        name: Of the backend: ``"standin2"`` and ``"standin-lazy"`` play the classes that NCCL has
            from torch 2.15 on.

    Raises:
        NotHereError: It cannot be built.
    """
    if importlib.util.find_spec("tests.standin") is None:
        raise NotHereError("there is no stand-in in this checkout")
    from tests.standin.build import build, why_not

    if reason := why_not():
        raise NotHereError(reason)
    build()
    options = {"backend": name, "preload": ["tests.standin.register", "tests.standin.ipc"]}
    limit = "the stand-in plays NCCL and its device on the CPU: nothing was seen on a GPU"
    return Target(name, "standin", RANKS, options, (limit,), "torch.standin._break()")


def gloo() -> Target:
    """Ranks on the CPU, which show what programs do there."""
    limit = "ranks wait on the CPU: only what does not need a device is tried"
    return Target("gloo", "cpu", RANKS, {"backend": "gloo"}, (limit,))


TARGETS: dict[str, Callable[[], Target]] = {
    "nccl": nccl,
    "nccl2": lambda: nccl("nccl2"),
    "nccl-legacy": lambda: nccl("nccl-legacy"),
    "nccl-lazy": lambda: nccl("nccl-lazy"),
    "gloo": gloo,
    "standin": standin,
    "standin2": lambda: standin("standin2"),
    "standin-lazy": lambda: standin("standin-lazy"),
}
