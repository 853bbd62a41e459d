"""The names that every rank has before any code of the user's runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["rank_names"]


def rank_names(rank: int, local_rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """What cells and functions find on a rank without an import.

    Args:
        rank: Of this process in the world.
        local_rank: Of this process on its host.
        world_size: Number of ranks.
        device: Where the rank's tensors belong.
    """
    return {
        "torch": torch,
        "dist": dist,
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "device": device,
    }
