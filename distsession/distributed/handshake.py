"""Ranks telling each other what they are about to send.

Before values of unknown kind or shape move, each rank gives every other a row of numbers: which
call it is in, for which root, and the kind, dtype and shape of what it brings. So receivers know
what to make room for, and whatever does not fit together raises on every rank before it moves.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed.header import Call, Kind, Row, unfit
from distsession.errors import CollectiveError, CollectiveMismatchError, OptionsError

__all__ = ["Ring", "alone", "as_bytes", "exchange", "meet", "mismatch", "padded", "ring_of"]


@dataclass(frozen=True)
class Ring:
    """A process group as its member sees it."""

    reference: weakref.ref[Any]
    ranks: tuple[int, ...]
    position: int
    backends: dict[str, str]

    @property
    def group(self) -> Any:
        """The process group; held weakly here, so that it ends when torch destroys it."""
        return self.reference()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        """Where rows and objects travel."""
        return self.device_for(False)

    def device_for(self, on_gpu: bool) -> torch.device:
        """Where the bytes of a tensor travel."""
        if (on_gpu and self.backends.get("cuda") == "nccl") or "cpu" not in self.backends:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def position_of(self, rank: int, what: str) -> int:
        """A rank's place in the group, for roots."""
        if rank not in self.ranks:
            raise OptionsError(f"{what}={rank} is not in the group of ranks {list(self.ranks)}.")
        return self.ranks.index(rank)


_rings: weakref.WeakKeyDictionary[Any, Ring] = weakref.WeakKeyDictionary()


def alone(group: Any = None) -> bool:
    """Whether there is nobody to meet: no process group, or not in this group."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    return group is not None and group is dist.GroupMember.NON_GROUP_MEMBER


def ring_of(group: Any = None) -> Ring | None:
    """The group, or the world for None; None where this process has nobody to meet."""
    if alone(group):
        return None
    found = dist.group.WORLD if group is None else group
    ring = _rings.get(found)
    if ring is None:
        position = dist.get_rank(found)
        if position < 0:
            return None
        ranks = tuple(dist.get_process_group_ranks(found))
        ring = _rings[found] = Ring(weakref.ref(found), ranks, position, backends_of(found))
    return ring


def backends_of(group: Any) -> dict[str, str]:
    """For each type of device the backend that moves its tensors."""
    parts = str(dist.get_backend_config(group)).split(",")
    pairs = [part.partition(":") for part in parts]
    return {device.strip(): backend.strip() for device, colon, backend in pairs if colon}


def exchange(ring: Ring, row: list[int]) -> list[list[int]]:
    """Every rank's row of numbers; all have to be of the same length."""
    mine = torch.tensor(row, dtype=torch.int64, device=ring.device)
    every = torch.empty(ring.size, len(row), dtype=torch.int64, device=ring.device)
    dist.all_gather(list(every.unbind()), mine, group=ring.group)
    return every.tolist()


def meet(ring: Ring, row: Row) -> list[Row]:
    """Every rank's row, in the group's order.

    Raises:
        CollectiveMismatchError: The ranks are in different calls, or name different roots.
        CollectiveError: A rank has something that cannot be pickled.
    """
    rows = [Row.from_numbers(numbers) for numbers in exchange(ring, row.numbers())]
    check_calls(ring, rows)
    return rows


def check_calls(ring: Ring, rows: Sequence[Row]) -> None:
    """Raise, on every rank alike, unless all are in the same call with the same root."""
    if any(row.call != rows[0].call for row in rows):
        raise mismatch(ring, "different calls", [Call(row.call).name.lower() for row in rows])
    if any(row.root != rows[0].root for row in rows):
        raise mismatch(ring, "different roots or operations", [str(row.root) for row in rows])
    bad = [ring.ranks[i] for i, row in enumerate(rows) if row.kind is Kind.UNFIT]
    if bad:
        why = f" ({unfit[-1]})" if unfit and ring.ranks[ring.position] in bad else ""
        unfit.clear()
        raise CollectiveError(
            f"{Call(rows[0].call).name.lower()}: what rank {bad[0]} has cannot be pickled{why}."
        )


def mismatch(ring: Ring, what: str, each: Sequence[str]) -> CollectiveMismatchError:
    """An error that names what each rank has."""
    theirs = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ring.ranks, each, strict=True))
    return CollectiveMismatchError(f"the ranks have {what}: {theirs}.")


def as_bytes(follows: bytes | torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """What follows a row as a flat uint8 tensor; of a contiguous tensor there it is a view."""
    if follows is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if isinstance(follows, torch.Tensor):
        flat = follows.detach().to(device).contiguous().view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        return flat.resolve_neg().view(torch.uint8)
    if not follows:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(follows), dtype=torch.uint8).to(device)


def padded(rows: Sequence[Row]) -> int:
    """The bytes that each rank sends where all have to send the same number."""
    most = max(row.nbytes for row in rows)
    if all(row.nbytes == most and row.dtype == rows[0].dtype for row in rows):
        return most
    return math.ceil(most / 16) * 16  # so that each part begins where any dtype may begin
