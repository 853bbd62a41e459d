"""What a rank did in one cell, as it wrote it down.

All times are nanoseconds of the rank's monotonic clock, which the processes of a Linux host share.
Ranks of several hosts would each need a shift, which :func:`.waits.merge` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["OperationRecord", "RankTrace", "TransferRecord"]


class OperationRecord(NamedTuple):
    """A collective, send or receive.

    Attributes:
        name: torch's name of it, such as ``"all_reduce"``.
        group: Name of the process group; for send and receive of the pair within it. The records
            of one operation on several ranks have the same group and sequence.
        members: The ranks that have to take part.
        sequence: Which operation of the group it is, from 1.
        size: Bytes that this rank puts in, or receives.
        detail: Dtype, shape, reduce op, root or peer, as text.
        place: Where in the user's code, such as ``"In[3] line 4"``; empty if unknown.
        began: When it was called, or issued.
        ended: When it was over, or this rank saw that it was; 0 if it was not yet.
        blocked: From when on the rank waited in it; 0 if it did not.
        is_async: It was issued, and waited for later if at all.
        is_future: C++ waits for it, as in a backward, and does not say from when on.
        failed: It was not done.
        is_from_any: It receives from whichever rank sends.
        is_enqueued: A device was given it; ``blocked`` is when the rank was first seen to wait for
            its device behind it.
    """

    name: str
    group: str
    members: tuple[int, ...]
    sequence: int
    size: int
    detail: str
    place: str
    began: int
    ended: int
    blocked: int
    is_async: bool = False
    is_future: bool = False
    failed: bool = False
    is_from_any: bool = False
    is_enqueued: bool = False


class TransferRecord(NamedTuple):
    """Data that went from the notebook to this rank, or back.

    Attributes:
        name: ``"push"``, ``"pull"``, ``"gather"`` or ``"result"``.
        size: Bytes.
    """

    name: str
    size: int
    began: int
    ended: int


@dataclass(frozen=True)
class RankTrace:
    """One rank's cell, with what happened in it.

    Attributes:
        rank: Whose.
        label: Of the cell, such as ``"In[3]"``, or the name of the function that was called.
        began: When the cell began.
        ended: When it ended.
        error: The exception that ended it, such as ``"ValueError: no"``; empty if none.
        operations: In the order in which they were begun.
        transfers: Those shortly before and after the cell, too.
        dropped: How many earlier operations there were that are not among these.
        is_recorded: Whether operations are recorded at all.
        epoch: What to add to a time of this rank for nanoseconds since 1970.
        profile: What torch's profiler has written, as JSON; empty if it did not run.
    """

    rank: int
    label: str
    began: int
    ended: int
    error: str = ""
    operations: tuple[OperationRecord, ...] = ()
    transfers: tuple[TransferRecord, ...] = ()
    dropped: int = 0
    is_recorded: bool = True
    epoch: int = 0
    profile: bytes = b""
