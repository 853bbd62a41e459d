"""Giving each rank a value of its own.

As in ``collectives``, what ranks bring is compared before it moves, and nothing is part of
autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed.groups import resolved
from distsession.distributed.handshake import as_bytes, exchange, meet, padded, ring_of
from distsession.distributed.header import Call, Kind, Row, pack, unpack
from distsession.distributed.objects import device_of, to_length
from distsession.errors import CollectiveError, OptionsError

__all__ = ["all_to_all", "scatter"]


def scatter(values: Any, src: int = 0, group: Any = None) -> Any:
    """One rank's values, one to each rank.

    Args:
        values: On ``src`` a list with a value for each rank, in rank order: tensors of any shapes
            and dtypes, numbers, strings, objects. Or a tensor whose first dimension is split into
            equal parts. On the others it is ignored; None will do.
        src: The (global) rank that sends.
        group: A process group, or a list of ranks. Default: the world.

    Returns:
        This rank's value; a tensor is new, on :func:`device`, and outside autograd. On ``src`` the
        very one that was given. None for a process that is no member.

    Raises:
        OptionsError: ``src`` is not in the group, or does not have a value for each rank. The
            latter is raised on every rank.
        CollectiveMismatchError: Ranks name different ``src``.
        CollectiveError: An object cannot be pickled. It is raised on every rank.
    """
    ring = ring_of(resolved(group))
    if ring is None:
        if dist.is_initialized():
            return None
        parts = _parts_of(values, 1)
        if parts is None:
            raise OptionsError("scatter: in a world of one there has to be one value.")
        return parts[0]
    root = ring.position_of(src, "src")
    here = ring.position == root
    mine = _parts_of(values, ring.size) if here else None
    row, _ = pack(bool(mine is not None), Call.SCATTER, src)
    rows = meet(ring, row)
    if not rows[root].bits:
        raise OptionsError(f"scatter: rank {src} needs one value for each of {ring.size} ranks.")
    packed = [pack(value, Call.SCATTER, src) for value in mine] if mine is not None else []
    blank = pack(None, Call.SCATTER, src)[0]
    numbers = [number for row, _ in packed for number in row.numbers()]
    width = len(blank.numbers())
    table = exchange(ring, numbers or blank.numbers() * ring.size)[root]
    sent = [Row.from_numbers(table[i * width : (i + 1) * width]) for i in range(ring.size)]
    if any(row.kind is Kind.UNFIT for row in sent):
        raise CollectiveError(f"scatter: a value of rank {src} cannot be pickled.")
    device, length = device_of(ring, sent), padded(sent)
    data = torch.empty(length, dtype=torch.uint8, device=device)
    if length:
        outgoing = [to_length(as_bytes(follows, device), length) for _, follows in packed]
        dist.scatter(data, outgoing or None, src, group=ring.group)
    if mine is not None:
        return mine[ring.position]
    own = sent[ring.position]
    return unpack(own, data, ring.device_for(True) if own.kind is Kind.TENSOR else None)


def all_to_all(values: Any, group: Any = None) -> Any:
    """A value from each rank to each rank.

    Args:
        values: A list with a value for each rank, in rank order, as for :func:`scatter`. Or a
            tensor whose first dimension is split into equal parts.
        group: A process group, or a list of ranks. Default: the world.

    Returns:
        A new list in rank order of what the ranks have sent here; for a tensor one new tensor of
        these, one after another along dimension 0. Its tensors are outside autograd. A process
        that is no member gets its values back.

    Raises:
        OptionsError: There is not one value for each rank. It is raised on every rank.
        CollectiveMismatchError: Some ranks are in another call.
        CollectiveError: An object cannot be pickled. It is raised on every rank.
    """
    ring = ring_of(resolved(group))
    size = 1 if ring is None else ring.size
    mine = _parts_of(values, size)
    if ring is None:
        if mine is None and not dist.is_initialized():
            raise OptionsError("all_to_all: in a world of one there has to be one value.")
        return values
    meeting = meet(ring, pack(bool(mine is not None), Call.ALL_TO_ALL)[0])
    short = [rank for rank, row in zip(ring.ranks, meeting, strict=True) if not row.bits]
    if mine is None or short:
        raise OptionsError(f"all_to_all: rank {short[0]} needs one value for each of {size} ranks.")
    packed = [pack(value, Call.ALL_TO_ALL) for value in mine]
    table = exchange(ring, [number for row, _ in packed for number in row.numbers()])
    width = len(table[0]) // size
    rows = [
        [Row.from_numbers(line[i * width : (i + 1) * width]) for i in range(size)] for line in table
    ]
    if any(row.kind is Kind.UNFIT for line in rows for row in line):
        raise CollectiveError("all_to_all: a value of a rank cannot be pickled.")
    device = device_of(ring, [row for line in rows for row in line])
    incoming = [line[ring.position] for line in rows]
    sizes = [row.nbytes for row in incoming]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    outgoing = torch.cat([as_bytes(follows, device) for _, follows in packed])
    if any(row.nbytes for line in rows for row in line):
        sends = [row.nbytes for row, _ in packed]
        dist.all_to_all_single(received, outgoing, sizes, sends, group=ring.group)
    # A part begins where the ones before it end, which need not be where its dtype may begin.
    parts = [part.clone() for part in received.split(sizes)]
    own = ring.device_for(True)
    if isinstance(values, torch.Tensor):
        got = [unpack(row, part, values.device) for row, part in zip(incoming, parts, strict=True)]
        return torch.cat(got)
    return [
        unpack(row, part, own if row.kind is Kind.TENSOR else None)
        for row, part in zip(incoming, parts, strict=True)
    ]


def _parts_of(values: Any, size: int) -> list[Any] | None:
    """A value for each rank; None where these are not as many."""
    if isinstance(values, torch.Tensor):
        if values.dim() == 0 or values.shape[0] % size:
            return None
        return list(values.chunk(size)) if values.shape[0] else [values] * size
    if not isinstance(values, list | tuple) or len(values) != size:
        return None
    return list(values)
