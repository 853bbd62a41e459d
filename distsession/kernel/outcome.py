"""From the failures of ranks to one error, and to what is said beside it."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from distsession.cluster.deaths import alike_text, joint_remedy
from distsession.cluster.pending import PendingRequest
from distsession.display import render
from distsession.display.colors import PLAIN, Colors
from distsession.display.differences import merge_texts
from distsession.errors import (
    CollectiveError,
    CollectiveHangError,
    CollectiveMismatchError,
    EngineDiedError,
    RunError,
    in_lines,
)
from distsession.kernel.cells import with_cells
from distsession.kernel.failures import (
    APART_S,
    COLLECTIVE_ERRORS,
    Failure,
    FailureKind,
    Failures,
    error_chain,
    failure_kinds,
    operation_key,
)
from distsession.protocol.cause import (
    late_remedy,
    late_text,
    merged,
    mismatch_remedy,
    mismatch_text,
    sentence,
)
from distsession.protocol.diagnosis import Kind, Verdict, describe_operation
from distsession.protocol.messages import (
    Aborted,
    ErrorInfo,
    Mismatch,
    TimedOut,
)
from distsession.ranks import RankInfo, host_names, ranks_text
from distsession.results import RankResults

__all__ = [
    "caught_text",
    "handled_text",
    "hang_error",
    "reconnected_text",
    "run_error",
]

error_colors: Callable[[], Colors] | None = None
"""Gives the colours that errors are to be shown in; the package's face sets it."""

_NEWLINE = "\n"
_LETTERS = f"{string.ascii_letters}{string.digits}_"

AN_OPERATION, OTHERS = "an operation", "others"
MOST_DIFFERENT = 16
"""For how many ranks it is told how their errors differ."""
MOST_WAITS = 3
"""In how many different operations ranks are said to have suffered; others are only counted."""


def run_error(
    failed: Failures,
    results: RankResults[Any],
    infos: Sequence[RankInfo],
    waited: Mapping[int, str] | None = None,
    then: str = "",
    places: Mapping[int, str] | None = None,
    verdict: Verdict | None = None,
) -> RunError:
    """One error for all ranks that failed, the cause first.

    Args:
        failed: What failed.
        results: The values of the others.
        infos: Of all ranks.
        waited: What ranks were seen to wait in when the process group was given up.
        then: How the process group is afterwards.
        places: Where ranks were that others had waited for in vain.
        verdict: Why ranks had to be freed, if they had.
    """
    waited = waited or {}
    failed = _with_one_remedy(failed, len(infos))
    where = {
        info.rank: f"{info.host}, {info.device.device}" for info in infos if info.rank in failed
    }
    for rank, failure in failed.items():
        with suppress(Exception):  # what it has for notes is no list
            failure.error.add_note(_note(rank, where.get(rank, ""), failure.info))
    kinds = failure_kinds(failed, waited)
    grade = kinds[0].grade
    causes = [kind for kind in kinds if kind.grade == grade]
    suffered = sorted(rank for kind in kinds[len(causes) :] for rank in kind.ranks)
    summary = _line(causes[0], failed, host_names(infos), places or {})
    if others := sorted(rank for kind in causes[1:] for rank in kind.ranks):
        summary += f" (and on {ranks_text(others)})"
    colors = PLAIN if error_colors is None else error_colors()
    details, plain = (
        "\n\n".join(_block(kind, failed, where, places or {}, each) for kind in causes)
        for each in (colors, PLAIN)
    )
    tracebacks = plain.partition(_NEWLINE)[2].strip()
    told = [rank for rank in suffered if not failed[rank].is_told]
    during = _during_text(failed, verdict, places or {})
    if told or during:
        freed = any(isinstance(failed[r].reason, Aborted) or r in waited for r in suffered)
        texts = [during, _suffered_text(told, failed, waited) if told else ""]
        text, after = " ".join(filter(None, texts)), then if freed or during else ""
        summary = f"{sentence(summary)} {text}{after}"
        details = f"{details.rstrip()}\n\n{text}\n{after.strip()}".rstrip()
    by_rank = {rank: failed[rank].error for kind in causes for rank in kind.ranks}
    by_rank |= {rank: failed[rank].error for rank in suffered}
    return RunError(
        summary, by_rank=by_rank, results=results, details=details, tracebacks=tracebacks
    )


def _with_one_remedy(failed: Failures, world: int) -> Failures:
    """What failed, with ranks that died alike told as one, and once what to do about all of them.

    Args:
        failed: What failed.
        world: How many ranks there are.
    """
    deaths = {
        rank: failure.error
        for rank, failure in failed.items()
        if isinstance(failure.error, EngineDiedError)
    }
    told = [rank for rank in sorted(deaths) if _says_remedy(failed[rank])]
    if len(deaths) < 2 and len(deaths) < world:
        return failed
    first_at = min((failed[rank].at for rank in told), default=0.0)
    first = next((rank for rank in told if failed[rank].at - first_at <= APART_S), None)
    remedies = joint_remedy({rank: deaths[rank].remedy for rank in told}, world)
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(deaths):
        alike.setdefault((deaths[rank].how, deaths[rank].details), []).append(rank)
    result = dict(failed)
    for (_, details), ranks in alike.items():
        what = alike_text(ranks, deaths)
        remedy = f" {' '.join(remedies)}" if first in ranks else ""
        info = ErrorInfo("EngineDiedError", f"{what}{remedy}{details}")
        result |= {rank: replace(failed[rank], info=info) for rank in ranks}
    return result


def _says_remedy(failure: Failure) -> bool:
    remedy = getattr(failure.error, "remedy", "")
    return bool(remedy) and remedy in failure.info.evalue


# --- in words -------------------------------------------------------------------------------------


def _line(
    kind: FailureKind, failed: Failures, where: Mapping[int, str], places: Mapping[int, str]
) -> str:
    """Who, what, where and why, in one line."""
    failure = failed[kind.ranks[0]]
    match failure.reason:
        case Mismatch():
            return f"CollectiveMismatchError: {mismatch_text(_mismatch(kind, failed))}"
        case TimedOut():
            return f"CollectiveHangError: {late_text(_late(kind, failed), kind.ranks, places)}"
        case _ if isinstance(failure.error, EngineDiedError):
            return f"EngineDiedError: {failure.info.evalue.partition(_NEWLINE)[0]}"
        case Aborted() if failure.info.ename in COLLECTIVE_ERRORS:  # its text says who
            return f"{failure.info.ename}: {failure.info.evalue}"
    line = render.error_line(kind.ranks, failure.info, where)
    is_same = all(failed[rank].info.evalue == failure.info.evalue for rank in kind.ranks)
    return line if is_same else f"{line.rstrip('.')} (on rank {kind.ranks[0]}; others differ)"


def _block(
    kind: FailureKind,
    failed: Failures,
    where: Mapping[int, str],
    places: Mapping[int, str],
    colors: Colors,
) -> str:
    """That line, what to do, and the tracebacks."""
    infos = {rank: failed[rank].info for rank in kind.ranks}
    line = _line(kind, failed, where, places)
    name = line[: len(line) - len(line.lstrip(_LETTERS))]
    line = f"{colors.name(name)}{line[len(name) :]}"
    match failed[kind.ranks[0]].reason:
        case Mismatch():
            remedy = mismatch_remedy(_mismatch(kind, failed))
        case TimedOut():
            remedy = late_remedy(_late(kind, failed))
        case _ if isinstance(failed[kind.ranks[0]].error, EngineDiedError):
            info = infos[kind.ranks[0]]  # it says who, and has no frames
            return render.remote_traceback(info, colors=colors)
        case _:
            info = infos[kind.ranks[0]]
            if info == ErrorInfo(info.ename, info.evalue) and _NEWLINE not in info.evalue:
                return line  # which says all
            return f"{line}\n\n{_folded_traceback(infos, colors)}"
    # What each rank's own exception says is in the line, so where it stands is enough.
    stands = {
        rank: render.remote_traceback(
            info, message=info.ename not in COLLECTIVE_ERRORS, colors=colors
        ).strip()
        for rank, info in infos.items()
    }
    folded = [(ranks, text) for ranks, text in render.fold(stands) if text][:MOST_WAITS]
    blocks = [f"{render.rank_label(ranks)}\n{text}" for ranks, text in folded]
    return "\n\n".join([f"{sentence(line)}\n{remedy}", *blocks])


def _folded_traceback(infos: Mapping[int, ErrorInfo], colors: Colors) -> str:
    """One traceback for ranks that failed at the same place, and what differs between them."""
    first = next(iter(infos.values()))
    if len(set(infos.values())) == 1:
        return render.remote_traceback(first, colors=colors)
    merged_texts = merge_texts({rank: _texts(info) for rank, info in infos.items()})
    texts = iter(merged_texts.texts)
    told = {
        rank: ", ".join(f"<{letter}> {text}" for letter, text in differing.items())
        for rank, differing in merged_texts.differing.items()
    }
    told = {rank: f": {text}" if text else "" for rank, text in told.items()}
    for rank, instead in merged_texts.instead.items():
        if instead:
            told[rank] = "\n    ".join([f"{told[rank]} instead:", *instead])
    lines = [f"  {ranks_text(ranks)}{text}" for ranks, text in render.fold(told) if text]
    if len(lines) > MOST_DIFFERENT:
        left = sum(len(ranks) for ranks, _ in render.fold(told)[MOST_DIFFERENT:])
        lines[MOST_DIFFERENT:] = [f"  and {left} more ranks: .by_rank of the error has them"]
    return "\n".join([render.remote_traceback(_with_texts(first, texts), colors=colors), *lines])


def _texts(info: ErrorInfo) -> list[str]:
    """What an error and those before it say."""
    return [text for part in error_chain(info) for text in (part.evalue, *part.notes)]


def _with_texts(info: ErrorInfo, texts: Iterator[str]) -> ErrorInfo:
    """The same error, saying other things; in the order of :func:`_texts`."""
    evalue = next(texts)
    notes = tuple(next(texts) for _ in info.notes)
    cause = None if info.cause is None else _with_texts(info.cause, texts)
    return replace(info, evalue=evalue, notes=notes, cause=cause)


def _mismatch(kind: FailureKind, failed: Failures) -> Mismatch:
    """What the ranks have seen of it, put together."""
    reasons = [failed[rank].reason for rank in kind.ranks]
    return merged(reason for reason in reasons if isinstance(reason, Mismatch))


def _late(kind: FailureKind, failed: Failures) -> TimedOut:
    """The same of what these ranks waited for too long in."""
    late = [r for rank in kind.ranks if isinstance(r := failed[rank].reason, TimedOut)]
    return replace(late[0], threads=tuple(call for each in late for call in each.threads))


def _during_text(failed: Failures, verdict: Verdict | None, places: Mapping[int, str]) -> str:
    """What broke off while ranks were handling errors of their own."""
    handling = {rank: f.during for rank, f in failed.items() if f.during is not None}
    texts = []
    mismatches = [reason for reason in handling.values() if isinstance(reason, Mismatch)]
    everywhere = [f.reason for f in failed.values() if isinstance(f.reason, Mismatch)]
    for key in dict.fromkeys(map(operation_key, mismatches)):
        parts = [each for each in (*mismatches, *everywhere) if operation_key(each) == key]
        texts.append(mismatch_text(merged(parts)))
    texts += [
        late_text(reason, (rank,), places)
        for rank, reason in handling.items()
        if isinstance(reason, TimedOut)
    ][:1]
    if any(isinstance(reason, Aborted) for reason in handling.values()):
        texts += ["others waited"] if verdict is None else [verdict.sentence.rstrip(".")]
    if not texts:
        return ""
    who = ranks_text(sorted(handling))
    return sentence(f"While {who} handled that, {'; '.join(texts)}")


def _suffered_text(ranks: Sequence[int], failed: Failures, waited: Mapping[int, str]) -> str:
    """One line for all ranks that failed only for another's sake."""
    there: dict[tuple[str, bool], list[int]] = {}
    later: dict[str, list[int]] = {}
    told: dict[str, list[int]] = {}
    for rank in ranks:
        reason, info = failed[rank].reason, failed[rank].info
        operation = reason.operation if isinstance(reason, Aborted) else None
        if reason is None and rank not in waited:
            line = f"{info.ename}: {info.evalue.partition(_NEWLINE)[0]}"
            told.setdefault(line.rstrip("."), []).append(rank)
        elif operation is not None and not operation.is_waiting:
            later.setdefault(describe_operation(operation), []).append(rank)
        else:
            what = waited.get(rank) or (
                describe_operation(operation) if operation else AN_OPERATION
            )
            is_free = not isinstance(failed[rank].error, EngineDiedError)
            there.setdefault((what, is_free), []).append(rank)
    parts = []
    free = {what: ranks for (what, is_free), ranks in there.items() if is_free}
    stuck = {what: ranks for (what, is_free), ranks in there.items() if not is_free}
    for what, who in _most(free):
        were = "was" if len(who) == 1 else "were"
        parts.append(f"{ranks_text(who)} waited in {what} and {were} freed")
    for what, who in _most(stuck):
        parts.append(f"{ranks_text(who)} waited in {what} and could not be freed")
    for what, who in _most(later):
        came = "it" if len(parts) == 1 and what in free else what
        parts.append(f"{ranks_text(who)} came to {came} later")
    parts += [f"{ranks_text(who)} raised {what}" for what, who in _most(told)]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _most(by_operation: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    """The operations with their ranks; many of them together."""
    found = list(by_operation.items())
    if len(found) <= MOST_WAITS:
        return found
    rest = sorted(rank for _, ranks in found[MOST_WAITS - 1 :] for rank in ranks)
    return [*found[: MOST_WAITS - 1], (OTHERS, rest)]


def handled_text(pending: PendingRequest) -> str:
    """Which errors of their own ranks were handling when they were freed from an operation."""
    handled: dict[ErrorInfo, list[int]] = {}
    for rank, (reply, _) in sorted(pending.replies.items()):
        own = None if reply.own is None else with_cells(reply.own)
        # What was interrupted itself, and cleans up, was handling the stop.
        if own is not None and own.ename != "KeyboardInterrupt" and render.error_place(own):
            handled.setdefault(own, []).append(rank)
    lines = [render.error_line(ranks, own, {}) for own, ranks in handled.items()]
    return sentence(f"This came in the handling of {'; '.join(lines)}") if lines else ""


def caught_text(
    pending: PendingRequest, failed: Failures, verdict: Verdict | None, waited: Mapping[int, str]
) -> str:
    """What is wrong though no rank says so: its code has caught the error, or Python has.

    Args:
        pending: The run.
        failed: What failed.
        verdict: Why ranks had to be freed, if they had.
        waited: What they waited in.
    """
    told = {operation_key(failure.during or failure.reason) for failure in failed.values()}
    caught: dict[object, dict[int, Mismatch]] = {}
    for rank, (reply, _) in sorted(pending.replies.items()):
        if reply.error is None and isinstance(reply.reason, Mismatch):
            caught.setdefault(operation_key(reply.reason), {})[rank] = reply.reason
    texts = [
        f"CollectiveMismatchError: {mismatch_text(merged(by_rank.values()))}; the code of "
        f"{ranks_text(sorted(by_rank))} caught it"
        for key, by_rank in caught.items()
        if key not in told
    ]
    if verdict is not None and not verdict.failed and waited and not waited.keys() & failed.keys():
        kind = "CollectiveMismatchError" if verdict.kind is Kind.ORDER else "CollectiveHangError"
        text = f"{kind}: {verdict.sentence} They were freed, and their code caught the error"
        texts.append(text)
    return "\n".join(map(sentence, texts))


def reconnected_text(problem: str, cut_off: Sequence[int] = ()) -> str:
    """How the process group is after a run for which it had to be given up.

    Args:
        problem: Why it is not connected.
        cut_off: Ranks whose devices have gone on behind an operation that was given up.
    """
    behind = (
        f" What {ranks_text(cut_off)} had given to the device behind it was computed from values "
        "that had not come: set again what that may have changed."
        if cut_off
        else ""
    )
    if problem:
        return f" {sentence(f'The process group is not connected: {problem}')}{behind}"
    return f" The process group is connected anew, and all variables are kept.{behind}"


def hang_error(
    verdict: Verdict, then: str, failed: Failures, waited: Mapping[int, str]
) -> CollectiveError:
    """The error of a run whose ranks could never have come free by themselves."""
    kind = CollectiveMismatchError if verdict.kind is Kind.ORDER else CollectiveHangError
    causes = [each for each in failure_kinds(failed, waited) if each.grade == 0]
    also = [sentence(_line(each, failed, {}, {})) for each in causes]
    waits = verdict.lines or (verdict.sentence,)
    stuck = [r for r in waited if r in failed and isinstance(failed[r].error, EngineDiedError)]
    freed = "The waiting ranks were freed."
    if stuck:
        text = ranks_text(sorted(stuck))
        freed = f"{text[0].upper()}{text[1:]} could not be freed."
    lines = [*waits, *also, f"{freed}{then}"]
    return in_lines(kind, "\n".join(lines))


def _note(rank: int, where: str, error: ErrorInfo) -> str:
    return ", ".join(part for part in (f"on rank {rank}", where, render.error_place(error)) if part)
