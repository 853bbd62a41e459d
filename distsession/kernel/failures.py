"""How ranks failed, from their answers, and which failures are the cause of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from distsession.cluster.pending import PendingRequest
from distsession.display import render
from distsession.errors import CollectiveMismatchError, EngineDiedError, RemoteError
from distsession.kernel.cells import with_cells
from distsession.protocol import serialize
from distsession.protocol.cause import mismatch_remedy, mismatch_text, sentence
from distsession.protocol.messages import (
    Aborted,
    ErrorInfo,
    Mismatch,
    Operation,
    Reason,
    TimedOut,
)
from distsession.results import RankResults

__all__ = [
    "APART_S",
    "COLLECTIVE_ERRORS",
    "Failure",
    "FailureKind",
    "Failures",
    "collect",
    "error_chain",
    "failure_kinds",
    "operation_key",
    "own_causes",
    "with_handled",
    "with_mismatch",
]

COLLECTIVE_ERRORS = ("CollectiveError", "CollectiveHangError", "CollectiveMismatchError")
"""The classes of errors that a rank raises for a collective, by name."""

APART_S = 0.5
"""Seconds by which one failure must precede another to be taken for the earlier one: two that come
of the same may reach the kernel in either order."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        error: Its exception, where that could be rebuilt.
        info: What it reported of it.
        reason: Why an operation broke off, if one did.
        at: When that was heard of.
        own: What its code had raised by itself, and was handling, when that operation broke off;
            and that exception.
        during: Where ``error`` is what its code was handling: why an operation broke off then.
        is_told: It suffered from what the error of another rank says.
    """

    error: BaseException
    info: ErrorInfo
    reason: Reason | None = None
    at: float = 0.0
    own: tuple[ErrorInfo, BaseException] | None = None
    during: Reason | None = None
    is_told: bool = False


Failures = dict[int, Failure]
"""By rank."""


def collect(
    pending: PendingRequest, duration: float, *, load: bool = True, remedies: bool = True
) -> tuple[RankResults[Any], Failures]:
    """Sort the answers to a request into values and failures.

    Args:
        pending: Whose ranks have all answered or died.
        duration: Seconds since the call.
        load: Rebuild the values; otherwise they stay in ``pending``.
        remedies: Say what to do about a death.
    """
    values: dict[int, Any] = {}
    failed: Failures = {}
    for rank, (reply, payload) in pending.replies.items():
        at = pending.times[rank]
        if reply.error is not None:
            told = with_cells(reply.error)
            own = None if reply.own is None else with_cells(reply.own)
            error, handled = _rebuild(told, own, payload)
            both = None if own is None or handled is None else (own, handled)
            failed[rank] = Failure(error, told, reply.reason, at, both)
        elif not payload or not load:
            values[rank] = None
        else:
            try:
                values[rank] = serialize.load(payload)
            except Exception as error:
                refused = RemoteError(
                    "SerializationError",
                    f"the result cannot be rebuilt in the notebook: {type(error).__name__}: "
                    f"{error}",
                )
                info = ErrorInfo("SerializationError", refused.evalue)
                failed[rank] = Failure(refused, info, at=at)
    for rank, death in pending.deaths.items():
        info = ErrorInfo("EngineDiedError", death.text(with_remedy=remedies))
        failed[rank] = Failure(death, info, at=pending.times[rank])
    durations = {rank: reply.duration for rank, (reply, _) in pending.replies.items()}
    return RankResults(values, duration=duration, durations=durations), failed


def _rebuild(
    error: ErrorInfo, own: ErrorInfo | None, payload: serialize.Frames
) -> tuple[BaseException, BaseException | None]:
    """The user's own exceptions where they can be rebuilt here, else some that stand for them."""
    rebuilt: Any = None
    with suppress(Exception):  # its class is not known here, or its __init__ or __str__ fails
        rebuilt = serialize.load(payload) if payload else None
    both = rebuilt if isinstance(rebuilt, tuple) else (rebuilt, None)
    handled = None if own is None else _or_stand_in(both[1], own)
    return _or_stand_in(both[0], error), handled


def _or_stand_in(rebuilt: Any, error: ErrorInfo) -> BaseException:
    with suppress(Exception):
        if isinstance(rebuilt, BaseException):
            str(rebuilt)
            return rebuilt
    return RemoteError(error.ename, error.evalue, render.remote_traceback(error))


def with_mismatch(failed: Failures, mismatch: Mismatch) -> Failures:
    """What failed, with what ranks of different nodes have called that did not match.

    All of it may have come to an end, or broken off in a way that does not say why: with the death
    of a rank, or with a connection that was closed. Or some have raised it, and others were freed
    before it was known what they had called.
    """
    if any(isinstance(failure.reason, Mismatch) for failure in failed.values()):
        called = {call.rank for call in mismatch.calls}
        return {
            rank: replace(failure, reason=mismatch)
            if rank in called and _was_freed_from(failure, mismatch)
            else failure
            for rank, failure in failed.items()
        }
    text, remedy = sentence(mismatch_text(mismatch)), mismatch_remedy(mismatch)
    error = CollectiveMismatchError(text, remedy=remedy)
    info = ErrorInfo("CollectiveMismatchError", str(error))
    took_part = [call.rank for call in mismatch.calls]
    living = [r for r in took_part if not isinstance(_error_of(failed, r), EngineDiedError)]
    told = {
        rank: replace(failed[rank], reason=mismatch)
        for rank in living
        if rank in failed and _is_told(failed[rank])
    }
    if not told:
        told = {rank: Failure(error, info, mismatch) for rank in living if rank not in failed}
    return {**failed, **told}


def _error_of(failed: Failures, rank: int) -> BaseException | None:
    return failed[rank].error if rank in failed else None


def _was_freed_from(failure: Failure, mismatch: Mismatch) -> bool:
    operation = failure.reason.operation if isinstance(failure.reason, Aborted) else None
    where = mismatch.group, mismatch.sequence
    return operation is not None and (operation.group, operation.sequence) == where


def _is_told(failure: Failure) -> bool:
    """Whether it is raised for another's sake."""
    return isinstance(failure.reason, Aborted) or failure.info.ename in COLLECTIVE_ERRORS


# --- whose fault it is ----------------------------------------------------------------------------


def with_handled(failed: Failures, waited: Mapping[int, str], ranks: int) -> Failures:
    """What failed, with errors of their own in the place of what ranks met in handling these.

    A rank that fails, and cleans up with a collective, calls what the others do not: a mismatch, or
    a wait for ranks that do not come. It is the rank's own error that explains this. What all ranks
    were handling explains nothing, nor what most were handling that wait for others in vain.

    Args:
        failed: What failed.
        waited: What ranks were seen to wait in when the process group was given up.
        ranks: How many run this.
    """
    has_cause = bool(own_causes(failed, waited))
    mismatches = [f.reason for f in failed.values() if isinstance(f.reason, Mismatch)]
    for rank, failure in failed.items():
        for mismatch in mismatches if failure.own is not None else ():
            # Others have seen it, and this one was freed before it did.
            if _was_freed_from(failure, mismatch) and rank in {c.rank for c in mismatch.calls}:
                failed = {**failed, rank: replace(failure, reason=mismatch)}
    to_blame: dict[int, Failure] = {}
    for rank, failure in failed.items():
        if failure.own is None or not render.error_place(failure.own[0]):
            continue
        match failure.reason:
            case Mismatch(calls=calls):
                most, there = len(calls) - 1, {call.rank for call in calls}
            case TimedOut():
                most, there = ranks // 2, set(failed)
            case Aborted() if not has_cause:
                most, there = ranks // 2, set(failed)
            case _:
                continue
        alike = [
            other
            for other in there & failed.keys()
            if (own := failed[other].own) and own[0].frames == failure.own[0].frames
        ]
        if len(alike) <= max(1, most):
            to_blame[rank] = failure
    found = dict(failed)
    for rank, failure in to_blame.items():
        assert failure.own is not None
        info, error = failure.own
        found[rank] = Failure(error, info, at=failure.at, during=failure.reason)
    keys = {operation_key(failure.reason) for failure in to_blame.values()} - {None}
    return {
        rank: replace(failure, is_told=operation_key(failure.reason) in keys)
        for rank, failure in found.items()
    }


def operation_key(reason: Reason | None) -> object:
    """Which operation it is that ranks called differently, or did not come to in time."""
    match reason:
        case (
            Mismatch(group=group, sequence=sequence)
            | TimedOut(operation=Operation(group=group, sequence=sequence))
        ):
            return type(reason), group, sequence
    return None


@dataclass(frozen=True)
class FailureKind:
    """Ranks that failed alike; ``grade`` is 0 for what may be the cause of what has others."""

    ranks: tuple[int, ...]
    grade: int


def own_causes(failed: Failures, waited: Mapping[int, str]) -> list[int]:
    """The ranks that failed by themselves, rather than for another's sake."""
    return sorted(rank for rank in failed if _grade(rank, failed[rank], waited) == 0)


def _grade(rank: int, failure: Failure, waited: Mapping[int, str]) -> int:
    """0: it failed by itself. 1: it may have. 2: it only suffered."""
    if failure.during is not None or failure.is_told:
        return 2 if failure.is_told else 0
    if isinstance(failure.reason, Aborted):
        return 2 if failure.own is None else 1
    is_told = failure.info.ename == "CollectiveError"  # it is raised for another's sake
    return int(failure.reason is None and (rank in waited or is_told))


def failure_kinds(failed: Failures, waited: Mapping[int, str]) -> list[FailureKind]:
    """Those that failed alike together; the cause first, and last those that only suffered.

    Of several causes the earliest comes first; of those at about the same time a death, and then
    that of the lowest rank.
    """
    alike: dict[object, list[int]] = {}
    for rank in sorted(failed):
        failure = failed[rank]
        grade = _grade(rank, failure, waited)
        what = operation_key(failure.reason) or _alike(failure)
        alike.setdefault((grade, what), []).append(rank)
    kinds = [
        FailureKind(tuple(ranks), _grade(ranks[0], failed[ranks[0]], waited))
        for ranks in alike.values()
    ]
    began = {kind: min(failed[rank].at for rank in kind.ranks) for kind in kinds}
    times = sorted(began.values())
    later = [at for before, at in pairwise(times) if at - before > APART_S]

    def order(kind: FailureKind) -> tuple[int, bool, int, bool, int]:
        is_death = isinstance(failed[kind.ranks[0]].error, EngineDiedError)
        lateness = sum(at <= began[kind] for at in later)
        reason = failed[kind.ranks[0]].reason
        # gloo may end a process that is sent more than it expects.
        is_begun = isinstance(reason, Mismatch) and reason.is_begun
        return kind.grade, not is_begun, lateness, not is_death, kind.ranks[0]

    return sorted(kinds, key=order)


def _alike(failure: Failure) -> object:
    """Equal for ranks that failed at the same place, whatever numbers their messages have."""
    info = failure.info
    if not info.frames or isinstance(failure.error, EngineDiedError):
        return info
    return tuple((part.ename, part.frames, len(part.notes)) for part in error_chain(info))


def error_chain(info: ErrorInfo) -> Iterator[ErrorInfo]:
    """An error and those before it."""
    part: ErrorInfo | None = info
    while part is not None:
        yield part
        part = part.cause
