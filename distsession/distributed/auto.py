"""Models, optimizers and data loaders for however many ranks there are."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from distsession.distributed import rank_info
from distsession.distributed.data import DistributedProxySampler, ExactSampler, get_sampler
from distsession.errors import OptionsError

__all__ = ["auto_dataloader", "auto_model", "auto_optim"]

_log = logging.getLogger("distsession.distributed")


def auto_model(
    model: nn.Module,
    sync_bn: bool = False,
    *,
    strategy: str = "ddp",
    units: tuple[type[nn.Module], ...] = (),
    **kwargs: Any,
) -> nn.Module:
    """The model on this rank's device, and in several ranks wrapped so that they train it together.

    Args:
        model: Changed in place: moved, and with ``"fsdp"`` sharded.
        sync_bn: Let batch norm layers use the batches of all ranks (on GPUs only, says torch).
        strategy: ``"ddp"`` for ``DistributedDataParallel``, ``"fsdp"`` for FSDP2's
            ``fully_shard``.
        units: With ``"fsdp"``, classes whose modules are sharded on their own.
        **kwargs: More for ``DistributedDataParallel`` or ``fully_shard``.

    Returns:
        With ``"ddp"`` the wrapper, with ``"fsdp"`` the model. In a world of one the model, without
        a wrapper.

    Raises:
        OptionsError: The strategy is not known; or ``device_ids`` is given, which is chosen here.
    """
    if strategy not in ("ddp", "fsdp"):
        raise OptionsError(f"strategy={strategy!r} is neither 'ddp' nor 'fsdp'.")
    if "device_ids" in kwargs:
        raise OptionsError("device_ids= is chosen by auto_model: leave it out.")
    device = rank_info.device()
    if any(parameter.device != device for parameter in model.parameters()):
        model.to(device)
    if rank_info.get_world_size() == 1:
        return model
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if strategy == "fsdp":
        return _sharded(model, units, kwargs)
    if device.type == "cuda":
        kwargs["device_ids"] = [device.index]
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def _sharded(
    model: nn.Module, units: tuple[type[nn.Module], ...], kwargs: dict[str, Any]
) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    if units:
        for module in list(model.modules()):
            if isinstance(module, units) and module is not model:
                fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)
    return model


def auto_optim(optimizer: torch.optim.Optimizer, **kwargs: Any) -> torch.optim.Optimizer:
    """The optimizer as it is: none of torch's backends needs another one.

    Args:
        optimizer: Made of the parameters of what :func:`auto_model` returned.
        **kwargs: Accepted, since ignite has them for backends that torch has not.
    """
    return optimizer


def auto_dataloader(
    dataset: Dataset[Any], *, exact: bool = False, **kwargs: Any
) -> DataLoader[Any]:
    """A data loader of this rank's share, with sizes given for all ranks together.

    In a world of several ranks:

    - ``batch_size`` is that of all ranks; each gets a part of it, rounded down, where it is at
      least the world size.
    - ``num_workers`` is that of all ranks of a host; each gets a part of it, rounded up.
    - Without a ``sampler`` there is a ``DistributedSampler``, which shuffles unless
      ``shuffle=False``. Another sampler is wrapped in :class:`DistributedProxySampler`; one that
      is distributed already, and a ``batch_sampler``, are used as they are; a warning says what
      of them does not fit. An iterable dataset has to give each rank its own samples.

    ``pin_memory`` is on where :func:`device` is a GPU, and workers persist.

    Args:
        dataset: The same on all ranks.
        exact: Each sample exactly once; see :class:`ExactSampler`. It shuffles only on
            ``shuffle=True``.
        **kwargs: For ``DataLoader``.

    Returns:
        The loader. Its ``sampler.set_epoch(n)`` draws another order.
    """
    world_size = rank_info.get_world_size()
    if world_size > 1:
        if (kwargs.get("batch_size") or 0) >= world_size:
            kwargs["batch_size"] = _share(kwargs["batch_size"], world_size)
        local = rank_info.get_nproc_per_node()
        if kwargs.get("num_workers", 0) >= local:
            kwargs["num_workers"] = -(-kwargs["num_workers"] // local)
        if kwargs.get("batch_sampler") is not None:
            warnings.warn(
                "batch_sampler= is used as it is: it has to draw this rank's share.", stacklevel=2
            )
        elif not isinstance(dataset, IterableDataset):
            kwargs["sampler"] = _sampler(dataset, kwargs, exact)
    kwargs.setdefault("pin_memory", rank_info.device().type == "cuda")
    kwargs.setdefault("persistent_workers", kwargs.get("num_workers", 0) > 0)
    return DataLoader(dataset, **kwargs)


def _share(batch_size: int, world_size: int) -> int:
    if batch_size % world_size:
        _log.warning(
            "batch_size=%d is not a multiple of %d ranks: each has %d",
            batch_size,
            world_size,
            batch_size // world_size,
        )
    return batch_size // world_size


def _sampler(dataset: Dataset[Any], kwargs: dict[str, Any], exact: bool) -> Any:
    sampler = kwargs.get("sampler")
    if sampler is None:
        shuffle = bool(kwargs.pop("shuffle", not exact))
        return get_sampler(dataset, shuffle=shuffle, exact=exact)
    if isinstance(sampler, DistributedSampler | ExactSampler):
        rank, world_size = rank_info.get_rank(), rank_info.get_world_size()
        if (sampler.rank, sampler.num_replicas) != (rank, world_size):
            warnings.warn(
                f"the sampler is that of rank={sampler.rank} of num_replicas="
                f"{sampler.num_replicas}, and this is rank {rank} of {world_size}.",
                stacklevel=3,
            )
        return sampler
    return DistributedProxySampler(sampler)
