"""What of torch's is not public and is needed here."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["default_store"]


def default_store() -> dist.Store:
    """The store through which the default process group has met."""
    store: dist.Store = c10d._get_default_store()
    return store
