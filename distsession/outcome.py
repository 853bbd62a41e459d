"""From the answers of the ranks to a result or an error.

Runs in: the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distsession import render, serialize
from distsession.cluster.base import Pending
from distsession.diagnosis import Kind, Verdict
from distsession.errors import (
    CollectiveError,
    CollectiveHangError,
    CollectiveMismatchError,
    EngineDiedError,
    RemoteError,
    RunError,
)
from distsession.messages import ErrorInfo
from distsession.ranks import RankInfo, ranks_text
from distsession.results import RankResults

__all__ = ["Failures", "collect", "hang_error", "mended_text", "run_error"]

Failures = dict[int, tuple[BaseException, ErrorInfo]]
"""For each rank that failed, its exception and what it reported of it."""


def collect(
    pending: Pending, duration: float, *, load: bool = True
) -> tuple[RankResults[Any], Failures]:
    """Sort the answers to a request into values and failures.

    Args:
        pending: Whose ranks have all answered or died.
        duration: Seconds since the call.
        load: Rebuild the values; otherwise they stay in ``pending``.
    """
    values: dict[int, Any] = {}
    failed: Failures = {}
    for rank, (reply, payload) in pending.replies.items():
        if reply.error is not None:
            failed[rank] = (_rebuild(reply.error, payload), reply.error)
        elif not payload or not load:
            values[rank] = None
        else:
            try:
                values[rank] = serialize.load(payload)
            except Exception as error:
                refused = RemoteError(
                    "SerializationError",
                    f"the result of rank {rank} cannot be rebuilt in the notebook: "
                    f"{type(error).__name__}: {error}",
                )
                failed[rank] = (refused, ErrorInfo("SerializationError", refused.evalue))
    for rank, death in pending.deaths.items():
        failed[rank] = (death, ErrorInfo("EngineDiedError", str(death)))
    durations = {rank: reply.duration for rank, (reply, _) in pending.replies.items()}
    return RankResults(values, duration=duration, durations=durations), failed


def run_error(
    failed: Failures,
    results: RankResults[Any],
    infos: Sequence[RankInfo],
    freed: Mapping[int, str] | None = None,
    problem: str = "",
) -> RunError:
    """One error for all ranks that failed, the cause first.

    Args:
        failed: What failed.
        results: The values of the others.
        infos: Of all ranks.
        freed: What each rank waited in that failed only since it was freed from there.
        problem: What prevents the process group from being connected anew.
    """
    freed = freed or {}

    # First a death, then what ranks raised by themselves, then what came of those.
    def cause(rank: int) -> tuple[bool, bool, int]:
        return rank in freed, not isinstance(failed[rank][0], EngineDiedError), rank

    order = sorted(failed, key=cause)
    causes = [rank for rank in order if rank not in freed] or order
    where = {
        info.rank: f"{info.host}, {info.device.device}" for info in infos if info.rank in failed
    }
    for rank, (error, info) in failed.items():
        error.add_note(_note(rank, where.get(rank, ""), info))
    summary = _summary(failed, causes)
    details = render.error_text({rank: failed[rank][1] for rank in causes}, where)
    waited = {rank: what for rank, what in freed.items() if rank in failed}
    if waited and causes is not order:
        text = f"{_freed_text(waited)}{mended_text(problem)}"
        end = "" if summary.endswith((".", "!", "?")) else "."
        summary, details = f"{summary}{end} {text}", f"{details.rstrip()}\n\n{text}"
    by_rank = {rank: failed[rank][0] for rank in order}
    return RunError(summary, by_rank=by_rank, results=results, details=details)


def _summary(failed: Failures, causes: Sequence[int]) -> str:
    """``ValueError on rank 1 at In[3] line 2: no``."""
    first = failed[causes[0]][1]
    same = [rank for rank in causes if failed[rank][1] == first]
    others = sorted(rank for rank in causes if rank not in same)
    line = _cell_line(first)
    reason = first.evalue.partition("\n")[0]
    text = f"{first.ename} on {ranks_text(same)}{f' at {line}' if line else ''}: {reason}"
    return f"{text} (and on {ranks_text(others)})" if others else text


def _freed_text(waited: Mapping[int, str]) -> str:
    """One line for all ranks that were freed."""
    together: dict[str, list[int]] = {}
    for rank, what in sorted(waited.items()):
        together.setdefault(what, []).append(rank)
    parts = [f"{ranks_text(ranks)} waited in {what}" for what, ranks in together.items()]
    text = "; ".join(parts)
    were = "was" if len(waited) == 1 else "were"
    return f"{text[0].upper()}{text[1:]} and {were} freed."


def mended_text(problem: str) -> str:
    """How the process group is after a run for which it had to be given up."""
    if problem:
        return f" The process group is not connected: {problem}."
    return " The process group is connected anew, and all variables are kept."


def hang_error(verdict: Verdict, problem: str) -> CollectiveError:
    """The error of a run whose ranks could never have come free by themselves."""
    kind = CollectiveMismatchError if verdict.kind is Kind.ORDER else CollectiveHangError
    return kind(f"{verdict.sentence} The waiting ranks were freed.{mended_text(problem)}")


def _rebuild(error: ErrorInfo, payload: serialize.Frames) -> BaseException:
    """The user's own exception where it can be rebuilt here, else one that stands for it."""
    if payload:
        try:
            rebuilt = serialize.load(payload)
            if isinstance(rebuilt, BaseException):
                str(rebuilt)
                return rebuilt
        except Exception:
            pass  # its class is not known here, or its __init__ or __str__ fails
    return RemoteError(error.ename, error.evalue, render.remote_traceback(error))


def _cell_line(error: ErrorInfo) -> str:
    for frame in error.frames:
        if frame.filename.startswith("In["):
            return f"{frame.filename} line {frame.lineno}"
    return ""


def _note(rank: int, where: str, error: ErrorInfo) -> str:
    return ", ".join(part for part in (f"on rank {rank}", where, _cell_line(error)) if part)
