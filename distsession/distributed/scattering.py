"""Giving each rank a value of its own.

As in ``collectives``, what ranks bring is compared before it moves, and nothing is part of
autograd.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed.groups import resolve_group
from distsession.distributed.handshake import (
    INLINE_BYTES,
    as_bytes,
    exchange,
    exchange_headers,
    exchange_numbers,
    group_view,
    padded,
)
from distsession.distributed.header import (
    FIELDS,
    FORMS,
    Call,
    Header,
    Kind,
    Payload,
    copied,
    pack,
    unpack,
)
from distsession.distributed.objects import device_of, to_length
from distsession.errors import CollectiveError, OptionsError

__all__ = ["all_to_all", "scatter"]

_NONE, _ALIKE, _TABLE = 0, 1, 2
"""What the root of a scatter has: not a value for each rank; tensors that are alike, of which its
header says everything; others, of which it says each for itself."""

Packed = list[tuple[Header, Payload]]
"""Values with their headers."""


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
    view = group_view(resolve_group(group))
    if view is None:
        if dist.is_initialized():
            return None
        parts = _parts_of(values, 1)
        if parts is None:
            raise OptionsError("scatter: in a world of one there has to be one value.")
        return parts[0]
    root = view.position_of(src, "src")
    here = view.position == root
    mine = _parts_of(values, view.size) if here else None
    packed = [pack(value, Call.SCATTER, src) for value in mine] if mine is not None else []
    header = _scatter_header(packed, src) if here else pack(None, Call.SCATTER, src)[0]
    found = exchange(view, header, _together(packed, header), view.size)
    said = found.headers[root]
    if said.bits == _NONE:
        raise OptionsError(f"scatter: rank {src} needs one value for each of {view.size} ranks.")
    if said.bits == _ALIKE:
        sent = [said] * view.size
    else:
        numbers = [number for header, _ in packed for number in header.numbers()]
        table = exchange_numbers(view, numbers or [0] * (FIELDS * view.size))[root]
        sent = [Header.from_numbers(table[at : at + FIELDS]) for at in range(0, len(table), FIELDS)]
    if any(header.kind is Kind.UNPICKLABLE for header in sent):
        raise CollectiveError(f"scatter: a value of rank {src} cannot be pickled.")
    own = sent[view.position]
    inline = found.inline(root, count=view.size) if said.bits == _ALIKE else None
    if inline is not None:
        at = view.position * own.nbytes
        data: Payload = inline[0][at : at + own.nbytes]
    else:
        device, length = device_of(view, sent), padded(sent)
        data = torch.empty(length, dtype=torch.uint8, device=device)
        if length:
            outgoing = [to_length(as_bytes(payload, device), length) for _, payload in packed]
            dist.scatter(data, outgoing or None, src, group=view.group)
    if mine is not None:
        return mine[view.position]
    return unpack(own, data, view.device_for(True) if own.kind is Kind.TENSOR else None)


def _scatter_header(packed: Packed, src: int) -> Header:
    """What the root says of all its values: of tensors that are alike everything is said then."""
    if not packed:
        return replace(pack(None, Call.SCATTER, src)[0], bits=_NONE)
    first = packed[0][0]
    if first.kind is Kind.TENSOR and all(each is first or each == first for each, _ in packed):
        return _alike(first)
    return replace(pack(None, Call.SCATTER, src)[0], bits=_TABLE)


@functools.lru_cache(FORMS)
def _alike(header: Header) -> Header:
    return replace(header, bits=_ALIKE)


def _together(packed: Packed, header: Header) -> bytes | None:
    """The bytes of tensors that are alike, if they are few enough to go along with their header."""
    few = 0 < len(packed) * header.nbytes <= INLINE_BYTES
    if header.bits != _ALIKE or header.on_gpu or not few:
        return None
    return b"".join(copied(payload) for _, payload in packed if isinstance(payload, torch.Tensor))


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
    view = group_view(resolve_group(group))
    size = 1 if view is None else view.size
    mine = _parts_of(values, size)
    if view is None:
        if mine is None and not dist.is_initialized():
            raise OptionsError("all_to_all: in a world of one there has to be one value.")
        return values
    meeting = exchange_headers(view, pack(bool(mine is not None), Call.ALL_TO_ALL)[0])
    short = [rank for rank, header in zip(view.ranks, meeting, strict=True) if not header.bits]
    if mine is None or short:
        raise OptionsError(f"all_to_all: rank {short[0]} needs one value for each of {size} ranks.")
    packed = [pack(value, Call.ALL_TO_ALL) for value in mine]
    table = exchange_numbers(view, [number for header, _ in packed for number in header.numbers()])
    width = len(table[0]) // size
    headers = [
        [Header.from_numbers(line[i * width : (i + 1) * width]) for i in range(size)]
        for line in table
    ]
    if any(header.kind is Kind.UNPICKLABLE for line in headers for header in line):
        raise CollectiveError("all_to_all: a value of a rank cannot be pickled.")
    device = device_of(view, [header for line in headers for header in line])
    incoming = [line[view.position] for line in headers]
    sizes = [header.nbytes for header in incoming]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    outgoing = torch.cat([as_bytes(payload, device) for _, payload in packed])
    if any(header.nbytes for line in headers for header in line):
        sends = [header.nbytes for header, _ in packed]
        dist.all_to_all_single(received, outgoing, sizes, sends, group=view.group)
    # A part begins where the ones before it end, which need not be where its dtype may begin.
    parts = [part.clone() for part in received.split(sizes)]
    own = view.device_for(True)
    if isinstance(values, torch.Tensor):
        got = [
            unpack(header, part, values.device)
            for header, part in zip(incoming, parts, strict=True)
        ]
        return torch.cat(got)
    return [
        unpack(header, part, own if header.kind is Kind.TENSOR else None)
        for header, part in zip(incoming, parts, strict=True)
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
