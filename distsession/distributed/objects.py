"""Moving the payloads of headers: bytes of any length from each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from distsession.distributed.groups import resolve_group
from distsession.distributed.handshake import (
    Exchange,
    GroupView,
    as_bytes,
    exchange,
    exchange_headers,
    exchange_numbers,
    group_view,
    padded,
)
from distsession.distributed.header import Call, Header, Payload, dumps, loads, pack, unpack
from distsession.errors import CollectiveError, CollectiveMismatchError, OptionsError

__all__ = ["all_gather_object", "broadcast_object_list"]

T = TypeVar("T")


def device_of(view: GroupView, headers: Sequence[Header]) -> torch.device:
    """Where the bytes of these headers travel; the same on all ranks."""
    return view.device_for(all(header.on_gpu for header in headers if header.nbytes))


def to_length(data: torch.Tensor, length: int) -> torch.Tensor:
    """The bytes, and zeros up to a length."""
    if data.numel() == length:
        return data
    longer = torch.zeros(length, dtype=torch.uint8, device=data.device)
    longer[: data.numel()] = data
    return longer


def gather_bytes(view: GroupView, found: Exchange, payload: Payload) -> Sequence[Payload]:
    """Every rank's bytes, on every rank; tensors are parts of one, in which they follow."""
    if (inline := found.inline()) is not None:
        return inline
    device = device_of(view, found.headers)
    length = padded(found.headers)
    every = torch.empty(view.size * length, dtype=torch.uint8, device=device)
    parts = list(every.split(length)) if length else [every] * view.size
    if length:
        dist.all_gather(parts, to_length(as_bytes(payload, device), length), group=view.group)
    return parts


def gather_objects(view: GroupView, found: Exchange, payload: Payload) -> list[Any]:
    """Every rank's value, on every rank."""
    parts = gather_bytes(view, found, payload)
    return [unpack(header, part) for header, part in zip(found.headers, parts, strict=True)]


def all_gather_object(obj: T, group: Any = None) -> list[T]:
    """Every rank's object.

    Args:
        obj: Anything that can be pickled. Tensors of a GPU arrive on the receiver's GPU.
        group: A process group, or a list of ranks. Default: the world.

    Returns:
        A new list, in rank order. Only this rank's object, unpickled or not, where there is no
        process group, or this process is no member.

    Raises:
        CollectiveError: A rank's object cannot be pickled. It is raised on every rank.
    """
    view = group_view(resolve_group(group))
    if view is None:
        return [obj]
    header, payload = pack(obj, Call.ALL_GATHER_OBJECT)
    return gather_objects(view, exchange(view, header, payload), payload)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Any = None) -> None:
    """Put one rank's objects into every rank's list, in place.

    Args:
        object_list: On ``src`` what to send, anything that can be pickled. On the others a list of
            the same length, whose items are replaced.
        src: The (global) rank that sends.
        group: A process group, or a list of ranks. Default: the world.

    Raises:
        OptionsError: It is no list, or ``src`` is not in the group.
        CollectiveMismatchError: The lists are not of the same length.
        CollectiveError: An object cannot be pickled. It is raised on every rank.
    """
    if not isinstance(object_list, list):
        raise OptionsError(f"broadcast_object_list needs a list, not {type(object_list).__name__}.")
    view = group_view(resolve_group(group))
    if view is None:
        return
    root = view.position_of(src, "src")
    raw, reason = b"", ""
    if view.position == root:
        try:
            raw = dumps(object_list)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raw = b""
    header, _ = pack(len(object_list), Call.BROADCAST_OBJECT_LIST, src)
    headers = exchange_headers(view, header)
    lengths = [header.bits for header in headers]
    if any(length != lengths[0] for length in lengths):
        each = ", ".join(f"rank {r}: {n}" for r, n in zip(view.ranks, lengths, strict=True))
        raise CollectiveMismatchError(f"broadcast_object_list: lists differ in length ({each}).")
    sent = broadcast_bytes(view, src, raw)
    if not sent:
        raise _cannot_send(src, reason)
    if view.position != root:
        object_list[:] = loads(sent)


def _cannot_send(src: int, reason: str) -> CollectiveError:
    why = f" ({reason})" if reason else ""
    return CollectiveError(f"broadcast_object_list: what rank {src} has cannot be pickled{why}.")


def broadcast_bytes(view: GroupView, src: int, raw: bytes) -> bytes:
    """The bytes that one rank has; the others need not know how many they are."""
    length = exchange_numbers(view, [len(raw)])[view.ranks.index(src)][0]
    if not length:
        return b""
    if view.ranks[view.position] == src:
        dist.broadcast(as_bytes(raw, view.device), src, group=view.group)
        return raw
    buffer = bytearray(length)
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    here = data.to(view.device)
    dist.broadcast(here, src, group=view.group)
    data.copy_(here)
    return bytes(buffer)
