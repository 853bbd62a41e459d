"""Tensors that are spread over the ranks of a mesh (DTensor).

Each rank writes what it holds straight into the whole, so no rank ever has more than its share.
Where the parts are of sums that are still to be made (``Partial``), or are interleaved (FSDP over
tensor parallelism), torch first has to give each rank a plain part.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distsession.engine import pinned

__all__ = ["elements", "part", "write"]


def elements(tensor: DTensor) -> int:
    """How many elements of the whole this rank writes."""
    if not _is_plain(tensor):
        return tensor.numel() if _is_first(tensor) else 0
    return math.prod(_local(tensor)[0]) if _is_chosen(tensor) else 0


def write(tensor: DTensor, whole: torch.Tensor) -> None:
    """Put this rank's part of the tensor where it belongs.

    Every rank of the tensor's mesh has to call this or :func:`part`: a sum is made by a collective.
    """
    found = part(tensor)
    if found is not None:
        offset, held = found
        window = tuple(slice(at, at + n) for at, n in zip(offset, held.shape, strict=True))
        pinned.copy_to_host(whole[window], held)


def part(tensor: DTensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """Where this rank's part begins and what it is; None if it has none to give."""
    with torch.no_grad():
        if not _is_plain(tensor):
            full = tensor.full_tensor()
            return ((0,) * tensor.ndim, full) if _is_first(tensor) else None
        if not _is_chosen(tensor):
            return None
        return _local(tensor)[1], tensor.to_local()


def _local(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and place of what this rank holds."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(shape), tuple(offset)


def _is_plain(tensor: DTensor) -> bool:
    """Whether every rank holds one block of the whole, or all of it."""
    kinds = (Shard, Replicate)
    dims = [p.dim for p in tensor.placements if isinstance(p, Shard)]
    return (
        all(type(p) in kinds for p in tensor.placements)
        and len(set(dims)) == len(dims)  # sharded twice along one dimension: order matters
    )


def _coordinate(tensor: DTensor) -> list[int]:
    return list(tensor.device_mesh.get_coordinate() or [])


def _is_first(tensor: DTensor) -> bool:
    coordinate = _coordinate(tensor)
    return bool(coordinate) and not any(coordinate)


def _is_chosen(tensor: DTensor) -> bool:
    """Whether this rank writes its block: of those with the same one, the first does."""
    coordinate = _coordinate(tensor)
    return bool(coordinate) and not any(
        at for at, p in zip(coordinate, tensor.placements, strict=True) if isinstance(p, Replicate)
    )
