"""What errors of torch and gloo say: their texts are read here and nowhere else, and repeated.

torch raises plain ``RuntimeError``s for whatever ends an operation (2.13), so that only the text
tells a closed connection from a time limit. The texts are those of gloo's ``transport/tcp`` (pair,
buffer and unbound buffer) and of torch's ``ProcessGroupWrapper``.

Libraries and tests look for some of these texts, and for the types of the errors. So what a rank
raises of ours in the place of an error of torch's is of that type, too, and ends with that text.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from distsession.errors import CollectiveError, CollectiveHangError, CollectiveMismatchError

__all__ = [
    "CLOSED",
    "STORE_CLOSED",
    "TWICE",
    "Break",
    "classify",
    "clients_text",
    "in_torchs_place",
    "is_from_gloo",
    "is_wait_over",
    "key_text",
    "late_clients_text",
    "late_receive_text",
    "monitored_text",
    "plain_text",
    "stand_in",
    "time_limit_s",
    "without_log_header",
]

E = TypeVar("E", bound=BaseException)

_CLOSED = re.compile("[Cc]losed|reset by peer|[Bb]roken pipe")
"""gloo's "Connection closed by peer", and the system's own words for it."""
_LIMIT = re.compile(r"(\d+) ?ms")
"""In gloo's "Timed out waiting 5000ms for recv operation to complete" and its like."""


class Break(enum.Enum):
    """Why an operation broke off."""

    MISMATCH = "ranks called different operations, says torch's own comparison"
    CLOSED = "a connection was closed by the other end"
    TIMED_OUT = "a time limit"
    OTHER = "something else within gloo"
    OUTSIDE = "it was refused before it came to gloo"


def classify(text: str) -> Break:
    """Why an operation broke off, from what its error says."""
    if text.startswith("Detected mismatch between collectives"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        return Break.MISMATCH
    if "gloo" not in text and "timed out" not in text:
        return Break.OUTSIDE
    if _CLOSED.search(text):
        return Break.CLOSED
    return Break.TIMED_OUT if "imed out" in text else Break.OTHER


def time_limit_s(text: str) -> float:
    """The time limit that an error names, in seconds; 0 where it names none."""
    limit = _LIMIT.search(text)
    return int(limit[1]) / 1000 if limit else 0.0


def is_from_gloo(text: str) -> bool:
    """Whether an error was raised within gloo, also if C++ code has raised it again as its own."""
    return "/gloo/" in text  # each of its errors has the path of its source


def is_without_group(text: str) -> bool:
    """Whether code wanted a process group that there is none of."""
    return text.startswith("Default process group has not been initialized")


def is_wait_over(error: RuntimeError) -> bool:
    """Whether only ``Work.wait`` has ended, by its own limit; the operation goes on."""
    return "Operation timed out" in str(error)


# --- what our errors repeat -----------------------------------------------------------------------

CLOSED = "Connection closed by peer"
STORE_CLOSED = (
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or "
    "crash?"
)
TWICE = "trying to initialize the default process group twice!"
_SOURCE = re.compile(r"\[(?:[^\]]*\.cc:\d+|gloo)\] ")
"""The path and line of its source, which each of gloo's errors begins with."""


_LOG_HEADER = re.compile(r"(\[rank\d+\]:)?\[[A-Z]\d{4} [\d:.]+ \S+:\d+\] ")
"""What a check in C++ that fails writes first, as a line of a log: rank, time and source."""


def without_log_header(text: str) -> str:
    """What an error says, without what only belongs into a log."""
    header = _LOG_HEADER.match(text)
    return text[header.end() :] if header else text


def in_torchs_place(error: E, text: str, kind: type[BaseException] = RuntimeError) -> E:
    """Let an error of ours be of torch's type, and end with what torch says.

    Args:
        error: Is changed, if it is a :class:`CollectiveError`; others stay as they are.
        text: Of torch's error.
        kind: Its type.
    """
    if isinstance(error, CollectiveError):
        error.torch_text = text
        own = getattr(type(error), "_own", type(error))
        if (own, kind) not in _joint:
            _joint[own, kind] = own if issubclass(own, kind) else _join(own, kind)
        error.__class__ = _joint[own, kind]
    return error


def plain_text(text: str) -> str:
    """What an error of gloo's says, without the place in its source."""
    return _SOURCE.sub("", text)


_joint: dict[tuple[type, type], type[Any]] = {}
"""Classes of ours that are one of torch's, too."""


def _join(own: type[CollectiveError], kind: type[BaseException]) -> type[Any]:
    """A class of both, which goes to other processes as ours alone: they may not have torch."""

    def reduce(error: CollectiveError) -> Any:
        return own, error.args, dict(vars(error))

    members = {"__module__": own.__module__, "__reduce__": reduce, "_own": own}
    return type(own.__name__, (own, kind), members)


def stand_in(error: E, *, name: str, sequence: int, limit_s: float, rank: int, is_gloo: bool) -> E:
    """Let an error stand in for the one that torch raises where an operation breaks off.

    Args:
        error: As for :func:`in_torchs_place`.
        name: Of the operation.
        sequence: Its number.
        limit_s: Its time limit in seconds.
        rank: That raises it.
        is_gloo: gloo would do the operation; otherwise a device.
    """
    ms = round(limit_s * 1000)
    if isinstance(error, CollectiveMismatchError):
        text = f"Detected mismatch between collectives on rank {rank}."
        return in_torchs_place(error, text)
    is_late = isinstance(error, CollectiveHangError)
    if not is_gloo:
        kind = name.replace("_", "").upper()
        work = f"WorkNCCL(SeqNum={sequence}, OpType={kind}, Timeout(ms)={ms})"
        text = (
            f"[Rank {rank}] Watchdog caught collective operation timeout: {work} ran for {ms} "
            "milliseconds before timing out."
            if is_late
            else f"NCCL communicator was aborted on rank {rank}."
        )
        return in_torchs_place(error, text, dist.DistBackendError)
    way = "send" if name == "send" else "recv"
    late = f"Timed out waiting {ms}ms for {way} operation to complete"
    return in_torchs_place(error, late if is_late else CLOSED)


def monitored_text(rank: int, missing: Sequence[int], limit_s: float, *, all_ranks: bool) -> str:
    """What a ``monitored_barrier`` says that breaks off.

    Args:
        rank: That raises it; as all of them, within the group.
        missing: Who did not come.
        limit_s: Its time limit in seconds.
        all_ranks: Rank 0 was told to wait for all, and names all.
    """
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    ms = round(limit_s * 1000)
    if not ms:  # its time was over before it looked for anyone
        return f"Rank 0 timed out in monitoredBarrier after {ms} ms."
    found = [r for r in missing if r != rank] or [1]
    who = f"Ranks {', '.join(map(str, found))}" if all_ranks else f"Rank {found[0]}"
    return f"[Rank 0]: {who} failed to pass monitoredBarrier in {ms} ms"


def late_receive_text(limit_s: float) -> str:
    """What a receive says that nothing came to, as gloo puts it."""
    return f"[gloo] Timed out waiting {round(limit_s * 1000)}ms for recv operation to complete"


def key_text(keys: Sequence[str], limit_s: float) -> str:
    """What a wait for keys of a store says that is over."""
    return f"wait timeout after {limit_s * 1000:.0f}ms, keys: {', '.join(f'/{k}' for k in keys)}"


def clients_text(limit_s: float, joined: int, size: int) -> str:
    """What the rank that holds a store says when others do not come."""
    return (
        f"Timed out after {max(1, round(limit_s))} seconds waiting for clients. {joined}/{size} "
        "clients joined."
    )


def late_clients_text(host: str, port: int, limit_s: float) -> str:
    """What the others say when nobody holds it."""
    return (
        f"The client socket has timed out after {limit_s * 1000:.0f}ms while trying to connect to "
        f"({host}, {port})."
    )
