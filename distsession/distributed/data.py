"""Each rank's share of a dataset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from distsession.distributed import rank_info
from distsession.errors import OptionsError

__all__ = ["DistributedProxySampler", "ExactSampler", "get_sampler"]


class ExactSampler(Sampler[int]):
    """Each sample on exactly one rank, none repeated: for exact evaluation.

    Ranks may differ by one sample, so by one batch, too. A collective in each batch (as in
    ``DistributedDataParallel`` in training mode) would then wait for a rank that has ended.

    Args:
        dataset: With a length.
        num_replicas: Into how many shares. Default: the world size.
        rank: Which share. Default: this process's rank.
        shuffle: In an order drawn from seed and epoch.
        seed: The same on all ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ):
        self.num_replicas = rank_info.get_world_size() if num_replicas is None else num_replicas
        self.rank = rank_info.get_rank() if rank is None else rank
        _check_share(self.rank, self.num_replicas)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        if not self.shuffle:
            return iter(range(self.rank, size, self.num_replicas))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(size, generator=generator, device="cpu").tolist()
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return max(0, math.ceil((len(self.dataset) - self.rank) / self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Draw another order, where it is shuffled."""
        self.epoch = epoch


class DistributedProxySampler(DistributedSampler[int]):
    """Each rank's share of what another sampler draws.

    The sampler draws the same on all ranks: torch's generator is seeded with seed and epoch while
    it does, and put back. (ignite seeds it for good.) Shares are padded to one length.

    Args:
        sampler: With a length, which stays.
        num_replicas: Into how many shares. Default: the world size.
        rank: Which share. Default: this process's rank.
        seed: The same on all ranks.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ):
        if isinstance(sampler, DistributedSampler | ExactSampler):
            raise TypeError("this sampler is distributed already: give it to the loader itself.")
        if not isinstance(sampler, Sampler) or not hasattr(sampler, "__len__"):
            raise TypeError(f"a Sampler with a length is needed, not {type(sampler).__name__}.")
        super().__init__(
            cast(Any, sampler),
            num_replicas=rank_info.get_world_size() if num_replicas is None else num_replicas,
            rank=rank_info.get_rank() if rank is None else rank,
            shuffle=False,
            seed=seed,
        )
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.epoch)
            drawn = list(self.sampler)
        while drawn and len(drawn) < self.total_size:
            drawn += drawn[: self.total_size - len(drawn)]
        return iter(drawn[self.rank : self.total_size : self.num_replicas])


def get_sampler(
    dataset: Dataset[Any],
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
    seed: int = 0,
    exact: bool = False,
) -> DistributedSampler[Any] | ExactSampler:
    """A sampler of this rank's share of a dataset.

    Args:
        dataset: With a length, the same on all ranks.
        drop_last: Leave samples out to make shares equal. Otherwise some are repeated.
        shuffle: In an order that ``set_epoch`` changes.
        num_replicas: Into how many shares. Default: the world size.
        rank: Which share. Default: this process's rank.
        seed: Of the order; the same on all ranks.
        exact: Each sample exactly once, none left out; see :class:`ExactSampler`.

    Returns:
        The sampler, for a ``DataLoader``.

    Raises:
        OptionsError: ``exact`` together with ``drop_last``; or there is no such share.
    """
    if exact and drop_last:
        raise OptionsError("exact=True leaves no sample out, and drop_last=True does: choose one.")
    shares = rank_info.get_world_size() if num_replicas is None else num_replicas
    mine = rank_info.get_rank() if rank is None else rank
    _check_share(mine, shares)
    if exact:
        return ExactSampler(cast(Sized, dataset), shares, mine, shuffle, seed)
    return DistributedSampler(
        dataset, num_replicas=shares, rank=mine, shuffle=shuffle, seed=seed, drop_last=drop_last
    )


def _check_share(rank: int, num_replicas: int) -> None:
    if not 0 <= rank < num_replicas:
        raise OptionsError(f"rank={rank} is not below num_replicas={num_replicas}, or below 0.")
