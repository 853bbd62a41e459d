"""Ranks telling each other what they are about to send.

Before values of unknown kind or shape move, each rank gives every other a header of numbers: which
call it is in, for which root, and the kind, dtype and shape of what it brings. So receivers know
what to make room for, and whatever does not fit together raises on every rank before it moves.

A small value on the CPU goes along with its header. What two ranks bring may differ in every call,
so headers are exchanged each time; but then nothing has to follow, and the helper takes a single
operation, as torch's own does.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed.accelerator import accelerator_of, backends_of, current_device
from distsession.distributed.header import (
    HEAD_BYTES,
    Call,
    Header,
    Kind,
    Payload,
    copied,
    pickle_problems,
)
from distsession.errors import CollectiveError, CollectiveMismatchError, OptionsError

__all__ = [
    "INLINE_BYTES",
    "Exchange",
    "GroupView",
    "as_bytes",
    "exchange",
    "exchange_headers",
    "exchange_numbers",
    "group_view",
    "mismatch",
    "padded",
]

INLINE_BYTES = 512
"""Bytes of a value up to which it goes along with its header, on the CPU."""
SLOT_BYTES = HEAD_BYTES + INLINE_BYTES
"""What each rank sends to all others in an exchange."""


class _Slots:
    """Memory for one exchange: to make it anew costs more than to send what is in it."""

    def __init__(self, size: int):
        self.mine, self.every = bytearray(SLOT_BYTES), bytearray(size * SLOT_BYTES)
        with torch.inference_mode(False):  # whose tensors could not be written to after it
            self.sent = torch.frombuffer(self.mine, dtype=torch.uint8)
            self.received = list(torch.frombuffer(self.every, dtype=torch.uint8).split(SLOT_BYTES))

    def write(self, header: Header, payload: Payload, count: int) -> None:
        """What this rank says and, if it is small, what it brings."""
        self.mine[:HEAD_BYTES] = header.raw
        size = count * header.nbytes
        if payload is None or header.on_gpu or not 0 < size <= INLINE_BYTES:
            return
        value = payload if isinstance(payload, bytes) else copied(payload)
        self.mine[HEAD_BYTES : HEAD_BYTES + size] = value

    def read(self, own: Header) -> Exchange:
        """What all have said; most say the very same, which is not read again."""
        every, said = bytes(self.every), own.raw
        headers = [
            own if every.startswith(said, at) else Header.from_raw(every[at : at + HEAD_BYTES])
            for at in range(0, len(every), SLOT_BYTES)
        ]
        return Exchange(headers, every)


@dataclass(frozen=True)
class GroupView:
    """A process group as its member sees it."""

    reference: weakref.ref[Any]
    ranks: tuple[int, ...]
    position: int
    backends: dict[str, str]
    slots: list[_Slots] = field(default_factory=list, compare=False)
    """Those that no exchange uses just now."""

    @property
    def group(self) -> Any:
        """The process group; held weakly here, so that it ends when torch destroys it."""
        return self.reference()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        """Where headers and objects travel."""
        return self.device_for(False)

    def device_for(self, on_gpu: bool) -> torch.device:
        """Where the bytes of a tensor travel."""
        if "cpu" in self.backends and not on_gpu:
            return torch.device("cpu")
        kind = accelerator_of(self.backends)
        return current_device(kind) if kind else torch.device("cpu")

    def position_of(self, rank: int, what: str) -> int:
        """A rank's place in the group, for roots."""
        if rank not in self.ranks:
            raise OptionsError(f"{what}={rank} is not in the group of ranks {list(self.ranks)}.")
        return self.ranks.index(rank)


_views: weakref.WeakKeyDictionary[Any, GroupView] = weakref.WeakKeyDictionary()


def _is_alone(group: Any = None) -> bool:
    """Whether there is nobody to meet: no process group, or not in this group."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER


def group_view(group: Any = None) -> GroupView | None:
    """The group, or the world for None; None where this process has nobody to meet."""
    if _is_alone(group):
        return None
    found = dist.group.WORLD if group is None else group
    view = _views.get(found)
    if view is None:
        try:
            position = dist.get_rank(found)
        except (RuntimeError, ValueError) as error:
            raise OptionsError(
                f"group={found!r} is no group of this world: it was destroyed, or made in another."
            ) from error
        if position < 0:
            return None
        ranks = tuple(dist.get_process_group_ranks(found))
        view = _views[found] = GroupView(weakref.ref(found), ranks, position, backends_of(found))
    return view


def exchange_numbers(view: GroupView, numbers: list[int]) -> list[list[int]]:
    """Every rank's numbers; all have to be of the same length."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=view.device)
    every = torch.empty(view.size, len(numbers), dtype=torch.int64, device=view.device)
    dist.all_gather(list(every.unbind()), mine, group=view.group)
    return every.tolist()


@dataclass(frozen=True)
class Exchange:
    """What the ranks of a group have told each other.

    Attributes:
        headers: Each rank's, in the group's order.
        slots: What all have sent, one after another; None where values never come along.
    """

    headers: list[Header]
    slots: bytes | None

    def inline(self, *positions: int, count: int = 1) -> list[bytes] | None:
        """The bytes of these ranks' values, if all of them came along with their headers.

        The answer is the same on all ranks, for it follows from the headers.

        Args:
            *positions: The ranks' places in the group. Default: all.
            count: How many values of the size that its header says each of them has sent.
        """
        if self.slots is None:
            return None
        found = []
        for position in positions or range(len(self.headers)):
            header, begin = self.headers[position], position * SLOT_BYTES + HEAD_BYTES
            size = count * header.nbytes
            if header.on_gpu or size > INLINE_BYTES:
                return None
            found.append(self.slots[begin : begin + size])
        return found


def exchange(
    view: GroupView,
    header: Header,
    payload: Payload = None,
    count: int = 1,
) -> Exchange:
    """Tell all ranks what this one brings, and hear the same of them.

    Args:
        view: The group.
        header: Of what this rank brings.
        payload: What it brings, for those that need not wait for it.
        count: How many values of the header's size that is.

    Raises:
        CollectiveMismatchError: The ranks are in different calls, or name different roots.
        CollectiveError: A rank has something that cannot be pickled.
    """
    if view.device.type != "cpu":
        numbers = exchange_numbers(view, header.numbers())
        found = Exchange([Header.from_numbers(each) for each in numbers], None)
        check_calls(view, found.headers)
        return found
    try:
        slots = view.slots.pop()
    except IndexError:  # of several threads, each needs its own
        slots = _Slots(view.size)
    slots.write(header, payload, count)
    dist.all_gather(slots.received, slots.sent, group=view.group)
    found = slots.read(header)
    view.slots.append(slots)  # not where it failed: the backend may write to them yet
    check_calls(view, found.headers)
    return found


def exchange_headers(view: GroupView, header: Header) -> list[Header]:
    """Every rank's header, in the group's order; see :func:`exchange`."""
    return exchange(view, header).headers


def check_calls(view: GroupView, headers: Sequence[Header]) -> None:
    """Raise, on every rank alike, unless all are in the same call with the same root."""
    first = headers[0]
    if first.kind is not Kind.UNPICKLABLE and all(header is first for header in headers):
        return
    if any(header.call != headers[0].call for header in headers):
        raise mismatch(
            view, "different calls", [Call(header.call).name.lower() for header in headers]
        )
    if any(header.root != headers[0].root for header in headers):
        raise mismatch(
            view, "different roots or operations", [str(header.root) for header in headers]
        )
    bad = [view.ranks[i] for i, header in enumerate(headers) if header.kind is Kind.UNPICKLABLE]
    if bad:
        is_ours = pickle_problems and view.ranks[view.position] in bad
        why = f" ({pickle_problems[-1]})" if is_ours else ""
        pickle_problems.clear()
        raise CollectiveError(
            f"{Call(headers[0].call).name.lower()}: what rank {bad[0]} has cannot be pickled{why}."
        )


def mismatch(view: GroupView, what: str, each: Sequence[str]) -> CollectiveMismatchError:
    """An error that names what each rank has."""
    theirs = "; ".join(f"rank {rank}: {text}" for rank, text in zip(view.ranks, each, strict=True))
    return CollectiveMismatchError(f"the ranks have {what}: {theirs}.")


def as_bytes(payload: Payload, device: torch.device) -> torch.Tensor:
    """The payload of a header as a flat uint8 tensor; of a contiguous tensor there it is a view."""
    if payload is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if isinstance(payload, torch.Tensor):
        flat = payload.detach().to(device).contiguous().view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        return flat.resolve_neg().view(torch.uint8)
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def padded(headers: Sequence[Header]) -> int:
    """The bytes that each rank sends where all have to send the same number."""
    most = max(header.nbytes for header in headers)
    if all(header.nbytes == most and header.dtype == headers[0].dtype for header in headers):
        return most
    return math.ceil(most / 16) * 16  # so that each part begins where any dtype may begin
