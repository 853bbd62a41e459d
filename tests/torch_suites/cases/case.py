"""What a case knows of the rank that runs it."""

from __future__ import annotations

import unittest
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Case"]


class Case(unittest.TestCase):
    """Attributes are set before the method runs: its rank, and a file that all ranks share."""

    rank: int
    file_name: str

    @property
    def world_size(self) -> int:
        return 3

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    def store(self, name: str = "store", count: int | None = None) -> dist.FileStore:
        """A store of its own, on a file."""
        return dist.FileStore(f"{self.file_name}.{name}", count or self.world_size)

    def gloo(self, timeout: float = 50.0) -> dist.ProcessGroupGloo:
        """A backend that is made directly, as torch's tests of gloo make theirs."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        return dist.ProcessGroupGloo(self.store("gloo"), self.rank, self.world_size, options)

    def equal(self, one: object, other: object) -> None:
        """Tensors, or lists of them, have the same values."""
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
