"""Seeds for every source of random numbers that training code uses."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["seed_everything"]


def seed_everything(seed: int, per_rank: bool = False) -> int:
    """Seed torch (CPU and this rank's GPU), random, and numpy where it is imported.

    Args:
        seed: Any whole number from 0; numpy gets it modulo 2**32.
        per_rank: Add this process's rank to it, so that ranks differ.

    Returns:
        The seed that was used.
    """
    if per_rank:
        from distsession.distributed.rank_info import get_rank

        seed += get_rank()
    random.seed(seed)
    if torch.accelerator.current_accelerator() is None:
        # torch would note the seed, with a stack each, for devices that this build does not know.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    return seed
