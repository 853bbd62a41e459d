"""From what every rank says of itself to a verdict: who waits for whom, and why.

Pure functions of the ranks' reports. A rank is *blocked* while its main thread waits in a
collective, send or receive. That operation *misses* each of its members that has not begun it
(operations of one group are matched by their number), and each that died or is halted inside it.
A missing rank that computes, is halted or has been given nothing yet can still come, and so can
one that is blocked in an operation that can itself complete. One that has died or has ended its
part cannot, unless its device still works at a replayed graph, which may hold what is waited for,
or a thread that its part has started goes on.
A rank that waits for its device, and not certainly for an operation that is seen, counts as one
that computes. An operation that a device was given behind another one, in the same stream, has not
begun there. Some backends run all operations of a group in one stream, messages too. A rank that
waits for a key of the store misses all others, any of which may set it:
nobody can only if each has died, has ended its part or is blocked for good and has one thread, and
nothing more can be asked of them. What follows from these rules is certain, so a verdict of
deadlock is too.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distsession.protocol.board import key_of
from distsession.protocol.cause import ONE_THREAD, sentence, threads_text
from distsession.protocol.messages import (
    LIMITED_STORE_WAIT,
    STORE_WAIT,
    Called,
    Left,
    Operation,
    RankReport,
)
from distsession.protocol.operation_names import (
    WORLD,
    AnySource,
    Pair,
    SplitSizes,
    group_title,
    root_of,
)
from distsession.protocol.rank_state import AbortReason, Ending, Outcome, RankState
from distsession.ranks import format_ranks

__all__ = [
    "Kind",
    "Verdict",
    "describe_operation",
    "device_wait_text",
    "diagnose",
    "is_from_any",
    "shortened",
]

LONGEST_REASON = 200
MISMATCH = "CollectiveMismatchError"


class Kind(enum.StrEnum):
    """What the ranks' reports amount to.

    Attributes:
        NOTHING: No rank waits for one that is missing.
        WAIT: Some ranks wait for others, all of which can still come.
        DEADLOCK: Some ranks wait for others that have died or have ended their part.
        ORDER: Some ranks wait for one another, each in an operation that the other has not begun.
    """

    NOTHING = "nothing"
    WAIT = "wait"
    DEADLOCK = "deadlock"
    ORDER = "order"


@dataclass(frozen=True)
class Verdict:
    """Who waits for whom.

    Attributes:
        sentence: The verdict for people; more than one sentence where ranks wait in different
            operations.
        waiting: Ranks that wait for missing ones; of a deadlock those that never come free.
        missing: Ranks that the waiting ones miss. One may itself be waiting, for yet another.
        failed: Some missing rank has died or failed, so its own error is the cause.
        reason: Why the process group is to be given up for it.
        lines: The sentence in lines: one for each operation that ranks wait in.
        untimed: The sentence without how long ranks have waited, where it says that.
        has_left: A rank that the waiting ones miss has left the process group for good.
        is_crossed: Devices have operations of two groups in different orders, in streams that may
            well go on past each other.
        threads: Which ranks have several threads in one group, which they take for one another's;
            the last of the lines, empty if none has.
    """

    kind: Kind
    sentence: str
    waiting: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    failed: bool = False
    reason: AbortReason = AbortReason.HANG
    lines: tuple[str, ...] = field(default=(), compare=False)
    untimed: str = field(default="", compare=False)
    is_crossed: bool = False
    has_left: bool = False
    threads: str = ""


def diagnose(reports: Mapping[int, RankReport], *, is_sole: bool = False) -> Verdict:
    """Say who waits for whom, from the report of each rank.

    Members of an operation that have no report are taken to be where they should be.

    Args:
        reports: Of all ranks.
        is_sole: The kernel waits for this run alone: nothing else will be asked of the ranks.
    """
    verdict = _verdict(_Findings(reports, is_sole))
    threads = " ".join(_threads(reports))
    if not threads:
        return verdict
    return replace(
        verdict,
        sentence=f"{verdict.sentence} {threads}",
        untimed=f"{verdict.untimed} {threads}" if verdict.untimed else "",
        lines=(*verdict.lines, threads),
        threads=threads,
    )


def _verdict(found: _Findings) -> Verdict:
    reports = found.reports
    if found.stuck:
        never = {m for rank in found.stuck for m in found.missing[rank] if found.is_lost(m, rank)}
        missing = _union(found.missing[rank] for rank in found.stuck)
        failed = any(_has_failed(reports[rank]) for rank in never)
        is_for_keys = any(_is_store_wait(found.blocked[rank]) for rank in found.stuck)
        kind = Kind.DEADLOCK if never or is_for_keys else Kind.ORDER
        parts = found.never_came() if never else [found.circle()]
        lines = _lines(parts, found.waits(found.late))
        reason = _abort_reason(kind, [reports[rank] for rank in never])
        waiting = _sorted(found.stuck)
        has_left = any(found.has_left(m, rank) for rank in found.stuck for m in never)
        return Verdict(
            kind, " ".join(lines), waiting, missing, failed, reason, lines, has_left=has_left
        )
    if found.late:
        missing = _union(found.missing[rank] for rank in found.late)
        lines = _lines(found.waits(found.late, timed=True))
        untimed = " ".join(_lines(found.waits(found.late)))
        late = _sorted(found.late)
        return Verdict(Kind.WAIT, " ".join(lines), late, missing, lines=lines, untimed=untimed)
    crossed = found.crossed()
    lines = _lines(crossed, found.nothing())
    return Verdict(Kind.NOTHING, " ".join(lines), lines=lines, is_crossed=bool(crossed))


def _threads(reports: Mapping[int, RankReport]) -> list[str]:
    """For each group that several threads of a rank wait in, who that is; then what to do."""
    used: dict[str, list[Called]] = {}
    for rank, report in sorted(reports.items()):
        together: dict[int, list[Operation]] = {}
        for op in report.operations:
            if (op.is_waiting or op.in_thread) and not _is_pair(op.group):
                together.setdefault(op.stream_key, []).append(op)
        for operations in together.values():
            if len({op.thread for op in operations}) > 1:
                used.setdefault(operations[0].group, []).extend(
                    Called(rank, op.name, op.detail, op.place) for op in operations
                )
    told = [sentence(threads_text(group, calls)) for group, calls in used.items()]
    return [*told, ONE_THREAD] if told else []


def describe_operation(operation: Operation) -> str:
    """The operation and its place: ``"all_reduce #5 (float32 [4, 2], sum) at In[3] line 4"``.

    Its group is named too, unless that is all ranks.
    """
    group = _group_name(operation.group)
    if _is_store_wait(operation):
        return f"a wait for {_described_keys(operation)}"
    return (
        f"{operation.name} #{operation.sequence}"
        + (f" of {group}" if group not in ("", WORLD) else "")
        + (f" ({operation.detail})" if operation.detail else "")
        + (f" at {operation.place}" if operation.place else "")
    )


def _described_keys(operation: Operation) -> str:
    """What a rank waits for that waits for the store: ``"the key 'x' of the store"``."""
    at = f" at {operation.place}" if operation.place else ""
    return f"the {operation.detail} of the store{at}"


def _in_or_for(operation: Operation) -> str:
    """What a rank waits in, or for which key."""
    if _is_store_wait(operation):
        return f"for {_described_keys(operation)}"
    return f"in {describe_operation(operation)}"


def _did_not(operation: Operation) -> str:
    """What ranks have not done that others wait for: ``"did not come to barrier #2 at In[3] ..."``.

    Of a message its other end is missing.
    """
    if _is_store_wait(operation):
        return f"did not set {_described_keys(operation)}"
    verb = "did not come to"
    if _is_pair(operation.group):
        verb = {"recv": "sent nothing for", "send": "did not receive"}.get(operation.name, verb)
    return f"{verb} {describe_operation(operation)}"


_LEFT, _ELSEWHERE = -1, 4
"""How grave it is that a rank has left a group: there is nothing to be said before it; and that it
waits for yet another."""
IN_DIFFERENT_ORDERS = "The ranks issue their operations in different orders"
ALL_FIRST = {"send": "All of them send first", "recv": "All of them receive first"}
NO_SENDER = "No rank is left that could send something"
NO_SETTER = "No rank is left that could set the key"
NO_WAIT = "No wait can help"


# --- who misses whom ------------------------------------------------------------------------------


class _Known(NamedTuple):
    """Of an operation: who has not begun it, and whose device comes to it only behind another."""

    members: tuple[int, ...]
    absent: frozenset[int]
    behind: frozenset[int]


class _Findings:
    """What follows from the reports.

    Attributes:
        blocked: The operation that each blocked rank waits in.
        missing: The ranks that each blocked rank misses.
        stuck: Blocked ranks that can never come free.
        late: Blocked ranks that miss some rank, and can still come free.
    """

    def __init__(self, reports: Mapping[int, RankReport], is_sole: bool):
        self.reports = reports
        self._is_sole = is_sole
        self.blocked = {
            rank: report.operations[-1]
            for rank, report in self.reports.items()
            if report.state == RankState.RUNNING
            and report.operations
            and report.operations[-1].is_waiting
        }
        self._known: dict[tuple[str, int], list[_Known]] = {}
        self.missing = {rank: self._missing(rank) for rank in self.blocked}
        self.stuck = self._stuck()
        self.late = {rank for rank in self.blocked if self.missing[rank]} - self.stuck

    def _missing(self, rank: int) -> frozenset[int]:
        operation = self.blocked[rank]
        if _is_store_wait(operation):
            return frozenset(self.reports.keys() - {rank})
        if is_from_any(operation):
            senders = set(operation.members) & self.reports.keys() - {rank}
            if any(_has_sent(self.reports[s], self.reports[rank], operation) for s in senders):
                return frozenset()
            return frozenset(senders)
        known = self._know(operation)
        if not operation.is_enqueued or not known.behind:
            return known.absent
        return known.absent | (known.behind & _needed(operation, rank))

    def _know(self, operation: Operation) -> _Known:
        """What is the same for all that wait in an operation: with many ranks there are many."""
        all_known = self._known.setdefault((operation.group, operation.sequence), [])
        for known in all_known:
            if known.members == operation.members:
                return known
        members = frozenset(operation.members) & self.reports.keys()
        known = _Known(
            operation.members,
            frozenset(m for m in members if not _takes_part(self.reports[m], operation)),
            frozenset(m for m in members if self._is_behind(m, operation)),
        )
        all_known.append(known)
        return known

    def _is_behind(self, rank: int, operation: Operation) -> bool:
        """Whether a rank's device comes to an operation only after what the rank waits in."""
        before = self.blocked.get(rank)
        if before is None or not (before.device_stream or before.in_group_order):
            return False
        key = (operation.group, operation.sequence)
        return key != (before.group, before.sequence) and any(
            (op.group, op.sequence) == key
            and op.seconds < before.seconds
            and _is_in_line(before, op)
            for op in self.reports[rank].operations
        )

    def _stuck(self) -> set[int]:
        """Start with all blocked ranks, and set free each one whose missing ranks can all come."""
        stuck = set(self.blocked)
        while True:
            free = {rank for rank in stuck if self._comes_free(rank, stuck)}
            if not free:
                return stuck
            stuck -= free

    def _comes_free(self, rank: int, stuck: set[int]) -> bool:
        """Whether the ranks that this one misses can still come, while some others cannot."""
        missing = self.missing[rank]
        if self.blocked[rank].is_enqueued and any(self.reports[m].is_replaying for m in missing):
            return True
        if is_from_any(self.blocked[rank]):  # who sends first is enough
            return not missing or any(m not in stuck and not self.is_lost(m, rank) for m in missing)
        if not _is_store_wait(self.blocked[rank]):
            return not any(m in stuck or self.is_lost(m, rank) for m in missing)
        if self.blocked[rank].name == LIMITED_STORE_WAIT or not missing:
            return True
        is_last = self._is_sole or any(_has_failed(self.reports[m]) for m in missing)
        return not is_last or not all(
            self.is_gone(m) or (m in stuck and self.reports[m].has_one_thread) for m in missing
        )

    def is_gone(self, rank: int) -> bool:
        """The rank begins no further operation of this run."""
        report = self.reports[rank]
        return report.state == RankState.DEAD or (
            report.state == RankState.IDLE and report.outcome is not None and not report.has_threads
        )

    def is_lost(self, rank: int, waiting: int) -> bool:
        """A rank does not come any more to what another one waits in."""
        return self.is_gone(rank) or self.has_left(rank, waiting)

    def has_left(self, rank: int, waiting: int) -> bool:
        """It has destroyed the group that another one waits in and has not destroyed itself."""
        left = self._left(rank, waiting)
        return left is not None and left.is_final

    def _left(self, rank: int, waiting: int) -> Left | None:
        """Where a rank has left the group that another one waits in, if it has."""
        operation = self.blocked[waiting]
        if rank not in self.missing[waiting] or _left_by(self.reports[waiting], operation):
            return None
        return _left_by(self.reports[rank], operation)

    # --- in words ---------------------------------------------------------------------------------

    def waits(self, ranks: Iterable[int], timed: bool = False) -> list[str]:
        """For each operation that some ranks wait in, for whom; the gravest reason first."""
        parts = []
        for together, operation in self._together(ranks):
            reasons = self._reasons(self._missed(together))
            seconds = max(self.blocked[rank].seconds for rank in together)
            since = f" (for {seconds:.0f} s)" if timed and seconds >= 1 else ""
            wait = _agree(together, "waits", "wait")
            described = describe_operation(operation)
            missing = "; ".join(f"{_name(late)}, which {does}" for _, late, does in reasons)
            if is_from_any(operation):
                missing = f"a message from {missing}"
            where = (
                f"for {_agree(together, 'its', 'their')} device in"
                if operation.is_of_device
                else "in"
            )
            text = f"{_name(together)} {wait} {where} {described}{since} for {missing}"
            if _is_store_wait(operation):
                does_what = "; ".join(f"{_name(late)} {does}" for _, late, does in reasons)
                keys = f"{_described_keys(operation)}{since}, which no rank has set"
                text = f"{_name(together)} {wait} for {keys}{does_what and f': {does_what}'}"
            grades = (grade for grade, _, _ in reasons)
            parts.append((min(grades, default=_ELSEWHERE), together, text))
        return [text for _, _, text in sorted(parts)]

    def never_came(self) -> list[str]:
        """The same of a deadlock, in which the missing ranks are at fault: they come first."""
        parts = []
        for together, operation in self._together(self.stuck):
            left = self._left_by(together)
            if left:
                parts.append((_LEFT, together, self._left_text(left, together, operation)))
                continue
            missing = self._missed(together)
            reasons = self._reasons(missing)
            why = ", ".join(f"{_name(late)} {does}" for _, late, does in reasons)
            if len(reasons) == 1:
                why = f"{_agree(missing, 'it', 'they')} {reasons[0][2]}"
            wait = _agree(together, "waits", "wait")
            whose = f" for {_agree(together, 'its', 'their')} device" * operation.is_of_device
            text = f"{_name(missing)} {_did_not(operation)}: {why}; {_name(together)} {wait}{whose}"
            parts.append((min(grade for grade, _, _ in reasons), together, text))
        texts = [text for _, _, text in sorted(parts)]
        return [*texts[:-1], f"{texts[-1]}. {NO_WAIT}"]

    def _missed(self, together: Sequence[int]) -> tuple[int, ...]:
        """Whom ranks miss that wait for the same; of these none is missing."""
        return _union(self.missing[rank].difference(together) for rank in together)

    def _left_by(self, waiting: Sequence[int]) -> dict[int, Left]:
        """The ranks that have left the group which others wait in, of those that these miss.

        Who has only put another group in its place has left it once it is certain not to come.
        """
        first = waiting[0]
        found = {rank: self._left(rank, first) for rank in self.missing[first]}
        return {
            rank: left
            for rank, left in found.items()
            if left is not None and self.is_lost(rank, first)
        }

    def _left_text(
        self, left: Mapping[int, Left], waiting: Sequence[int], operation: Operation
    ) -> str:
        """``rank 0 left the session's group at In[2] line 3: rank 1 waits in ... for rank 0``."""
        group = _group_name(operation.group)
        what = "the session's group" if group == WORLD else group
        at: dict[str, list[int]] = {}
        for rank, each in sorted(left.items()):
            at.setdefault(each.place, []).append(rank)
        who = ", ".join(
            f"{_name(ranks)} left {what}{f' at {place}' if place else ''}"
            for place, ranks in at.items()
        )
        where = (
            f"for {_agree(waiting, 'its', 'their')} device in" if operation.is_of_device else "in"
        )
        missed = _union(self.missing[rank] for rank in waiting)
        others = self._reasons(rank for rank in missed if rank not in left)
        missing = "; ".join(
            [_name(sorted(left)), *(f"{_name(late)}, which {does}" for _, late, does in others)]
        )
        wait = _agree(waiting, "waits", "wait")
        described = describe_operation(operation)
        return f"{who}: {_name(waiting)} {wait} {where} {described} for {missing}"

    def circle(self) -> str:
        """The stuck ranks, all of which wait for one another, and why."""
        sides = self._together(self.stuck)
        sides.sort(key=lambda side: not _is_store_wait(side[1]))
        alike: dict[str, list[int]] = {}
        for ranks, operation in sides:
            alike.setdefault(_in_or_for(operation), []).extend(ranks)
        texts = [f"{_name(sorted(ranks))} {text}" for text, ranks in alike.items()]
        text, first = next(iter(alike.items()))
        device = f"for {_agree(first, 'its', 'their')} device " * sides[0][1].is_of_device
        texts[0] = f"{_name(sorted(first))} {_agree(first, 'waits', 'wait')} {device}{text}"
        other = "the other" if 2 in (len(texts), len(self.stuck)) else "another of them"
        each = f": each waits for {other}" if len(sides) > 1 else ""
        return f"{', '.join(texts)}{each}. {self._why_stuck()}"

    def _why_stuck(self) -> str:
        operations = [self.blocked[rank] for rank in self.stuck]
        if any(map(_is_store_wait, operations)):
            return NO_SETTER
        if any(map(is_from_any, operations)):
            return NO_SENDER
        names = {operation.name for operation in operations}
        return ALL_FIRST.get(next(iter(names)) if len(names) == 1 else "", IN_DIFFERENT_ORDERS)

    def crossed(self) -> list[str]:
        """Where two devices have the oldest operations of two groups in different orders.

        All ranks have issued them, so none is missing. They may run beside each other, or have run
        by the next look; but a GPU has room for so many at a time, and CUDA promises no order.
        """
        seen: dict[tuple[tuple[str, int], tuple[str, int]], tuple[int, Operation]] = {}
        for rank, report in sorted(self.reports.items()):
            oldest: dict[str, Operation] = {}
            given = [op for op in report.operations if op.is_of_device and not _is_pair(op.group)]
            for op in sorted(given, key=lambda op: -op.seconds):
                oldest.setdefault(op.group, op)
            for first, second in itertools.combinations(oldest.values(), 2):
                keys = (first.group, first.sequence), (second.group, second.sequence)
                other = seen.get((keys[1], keys[0]))
                if other is not None:
                    has = f"rank {other[0]} has given its device {describe_operation(other[1])}"
                    before = f"before {describe_operation(first)}, rank {rank} the other way round"
                    return [f"{has} {before}: the devices may be waiting for each other"]
                seen.setdefault(keys, (rank, first))
        return []

    def nothing(self) -> list[str]:
        """What the ranks do when none waits for a missing one."""
        if not self.reports:
            return ["no rank has reported"]
        done = [f"{_name(ranks)} {does}" for _, ranks, does in self._reasons(self.reports, False)]
        at_rest = all(
            report.state in (RankState.IDLE, RankState.DEAD) for report in self.reports.values()
        )
        if any(rank not in self.blocked and r.is_device_wait for rank, r in self.reports.items()):
            return ["; ".join(done), *self._mismatches()]  # it may well wait for one
        head = "nothing runs" if at_rest else "no rank waits for a missing one"
        return [f"{head}: {'; '.join(done)}", *self._mismatches()]

    def _mismatches(self) -> list[str]:
        """Operations that cannot work together, though none of their members is missing."""
        names: dict[tuple[str, int], set[str]] = {}
        for op in self.blocked.values():
            if not _is_pair(op.group):
                names.setdefault((op.group, op.sequence), set()).add(op.name)
        return [
            f"as operation #{sequence} of {group_title(group)} the ranks call "
            f"{' and '.join(sorted(called))}, which do not match"
            for (group, sequence), called in sorted(names.items())
            if len(called) > 1
        ]

    def _together(self, ranks: Iterable[int]) -> list[tuple[tuple[int, ...], Operation]]:
        """Put ranks that are blocked in the same operation at the same place together."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(ranks):
            op = self.blocked[rank]
            which = (op.detail,) if _is_store_wait(op) else (op.group, op.sequence)
            groups.setdefault((*which, op.name, op.place), []).append(rank)
        folded = []
        for together in groups.values():
            details = dict.fromkeys(self.blocked[rank].detail for rank in together)
            detail = " or ".join(text for text in details if text)
            folded.append((tuple(together), replace(self.blocked[together[0]], detail=detail)))
        return folded

    def _reasons(
        self, ranks: Iterable[int], as_missing: bool = True
    ) -> list[tuple[int, tuple[int, ...], str]]:
        """What each rank does, as grade and verb; those that do the same together."""
        folded: dict[tuple[int, str, str], list[int]] = {}
        for rank in sorted(ranks):
            folded.setdefault(self._does(rank, as_missing), []).append(rank)
        return sorted(
            (grade, tuple(same), _agree(same, one, many))
            for (grade, one, many), same in folded.items()
        )

    def _does(self, rank: int, as_missing: bool) -> tuple[int, str, str]:
        """What a rank does: how grave that is, and the verb for one rank and for several."""
        report = self.reports[rank]
        if rank in self.blocked:
            described = describe_operation(self.blocked[rank])
            if self.missing[rank]:
                return _ELSEWHERE, "waits elsewhere", "wait elsewhere"
            return 5, f"is in {described}", f"are in {described}"
        if report.state == RankState.DEAD:
            how = shortened(report.outcome.text) if report.outcome else ""
            died = f"died ({how})" if how else "died"
            return 0, died, died
        if report.state == RankState.IDLE:
            grade, one, many = _idle(report.outcome, as_missing)
            under_way = f", its device not: {_listed(report.unseen)}" if report.is_replaying else ""
            under_way += ", but has a thread that goes on" if report.has_threads else ""
            plural = under_way.replace("its device", "their devices").replace("has a", "have a")
            return grade, one + under_way, many + plural
        if report.is_device_wait:
            behind = device_wait_text(report)
            grade = 5 if as_missing else -1
            return grade, f"waits for its device {behind}", f"wait for their device {behind}"
        one, many = (report.place,) * 2 if report.place else ("its code", "their code")
        states = {
            RankState.RUNNING: (7, f"runs {one}", f"run {many}"),
            RankState.STOPPED: (
                6,
                "is stopped (SIGSTOP): kill -CONT lets it go on",
                "are stopped (SIGSTOP): kill -CONT lets them go on",
            ),
            RankState.TRACED: (6, "is held by a debugger", "are held by a debugger"),
            RankState.DEBUGGING: (
                6,
                *_at("is in the debugger", "are in the debugger", report.place),
            ),
            RankState.WAITING_FOR_INPUT: (
                6,
                *_at("waits for input", "wait for input", report.place),
            ),
            RankState.SILENT: (
                6,
                "does not answer: it computes in C code that holds the interpreter's lock, or gets "
                "no processor time",
                "do not answer: they compute in C code that holds the interpreter's lock, or get "
                "no processor time",
            ),
        }
        return states.get(report.state, (6, f"is {report.state}", f"are {report.state}"))


def _at(one: str, many: str, place: str) -> tuple[str, str]:
    at = f" at {place}" if place else ""
    return f"{one}{at}", f"{many}{at}"


def _takes_part(report: RankReport, operation: Operation) -> bool:
    """Whether a rank has begun an operation, and was not halted in it."""
    key = (operation.group, operation.sequence)
    inside = any((op.group, op.sequence) == key for op in report.operations)
    if inside:
        return report.state != RankState.DEAD and not RankState(report.state).is_halted
    return key not in report.refused and report.sequences.get(key[0], 0) >= key[1]


def _is_in_line(before: Operation, operation: Operation) -> bool:
    """Whether a device begins an operation only after an earlier one has ended."""
    if before.thread != operation.thread:  # they may have been given to it the other way round
        return False
    if before.device_stream and before.device_stream == operation.device_stream:
        return True
    is_ordered = before.in_group_order and operation.in_group_order
    return is_ordered and _group_name(before.group) == _group_name(operation.group)


def _left_by(report: RankReport, operation: Operation) -> Left | None:
    """Where a rank has left the group of an operation; another one may have its name by now."""
    left = report.left.get(_group_name(operation.group))
    if left is None or key_of(*left.family, operation.group) != operation.stream_key:
        return None
    return left


def _needed(operation: Operation, rank: int) -> frozenset[int]:
    """The ranks without whose part a rank's own part of an operation cannot come to its end."""
    others = frozenset(operation.members) - {rank}
    if operation.name in _OF_ALL:
        return others
    if operation.name == "recv":  # what is sent may go into a buffer, and the sender on
        return others
    sizes = SplitSizes.from_description(operation.detail)
    if sizes is not None:
        received = zip(operation.members, sizes.receive, strict=False)
        return frozenset(member for member, size in received if size) - {rank}
    root = root_of(operation.detail)
    if root is None:
        return frozenset()
    if operation.name in _FROM_ROOT:
        return frozenset({root} - {rank})
    return others if operation.name in _TO_ROOT and rank == root else frozenset()


_OF_ALL = frozenset(
    {"all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced", "barrier"}
    | {"all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}
)
_FROM_ROOT = frozenset({"broadcast", "scatter"})
_TO_ROOT = frozenset({"reduce", "gather"})


def is_from_any(operation: Operation) -> bool:
    """Whether it is a receive that takes what comes first, whoever sends it."""
    return AnySource.from_description(operation.detail) is not None


def _has_sent(sender: RankReport, receiver: RankReport, operation: Operation) -> bool:
    """Whether a message of that rank's is on its way."""
    receives, pair = AnySource.from_description(operation.detail), Pair.from_name(operation.group)
    assert receives is not None
    assert pair is not None
    name = pair._replace(source=sender.rank, tag=receives.tag).name
    return sender.sequences.get(name, 0) > receiver.sequences.get(name, 0)


def _has_failed(report: RankReport) -> bool:
    failed = report.outcome is not None and report.outcome.ending is Ending.FAILED
    return report.state == RankState.DEAD or failed


def _abort_reason(kind: Kind, gone: Iterable[RankReport]) -> AbortReason:
    outcomes = [report.outcome for report in gone if _has_failed(report)]
    if kind is Kind.ORDER or any(o is not None and o.ename == MISMATCH for o in outcomes):
        return AbortReason.MISMATCH
    return AbortReason.FAILED if outcomes else AbortReason.HANG


# --- words ----------------------------------------------------------------------------------------


def _idle(outcome: Outcome | None, as_missing: bool) -> tuple[int, str, str]:
    without = " without it" if as_missing else ""
    match outcome.ending if outcome is not None else None:
        case Ending.FAILED | Ending.DIED:
            assert outcome is not None
            failed = f"failed ({shortened(outcome.reason)})" if outcome.reason else "failed"
            return 1, failed, failed
        case Ending.NO_PART:
            return 3, "has no part in this run", "have no part in this run"
        case Ending.FINISHED:
            return 2, f"finished its part{without}", f"finished their part{without}"
        case _:
            none = ": nothing runs on it" if as_missing else ""
            return 8, f"is idle{none}", f"are idle{none and ': nothing runs on them'}"


def _name(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{_agree(ranks, 'rank', 'ranks')} {format_ranks(ranks)}"


def _agree(ranks: Iterable[int], one: str, many: str) -> str:
    return one if len(list(ranks)) == 1 else many


def device_wait_text(report: RankReport) -> str:
    """Where a rank waits for its device, and for what, where that is not known for certain.

    Such as ``"at In[3] line 4, for something that is not seen (a CUDAGraph that was replayed at
    In[3] line 2)"``.
    """
    at = f"at {report.place}" if report.place else "in its code"
    if not report.unseen:
        return at
    seen = [describe_operation(op) for op in report.operations if op.is_enqueued][:1]
    unseen = f"something that is not seen ({_listed(report.unseen)})"
    return f"{at}, for {' or for '.join([*seen, unseen])}"


def _listed(texts: Sequence[str]) -> str:
    return " or ".join(texts)


def _is_store_wait(operation: Operation) -> bool:
    return operation.name in (STORE_WAIT, LIMITED_STORE_WAIT)


def _is_pair(group: str) -> bool:
    return Pair.from_name(group) is not None


def _group_name(group: str) -> str:
    """The group that a pair of ranks belongs to: ``"world 0->1"`` is of ``"world"``."""
    pair = Pair.from_name(group)
    return group if pair is None else pair.group


def shortened(text: str, longest: int = LONGEST_REASON) -> str:
    """The first line, if that is not too long."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def _lines(*blocks: Sequence[str]) -> tuple[str, ...]:
    """Each part as a line: end it with a period, and begin all but the first with a capital."""
    parts = [sentence(part) for block in blocks for part in block]
    return tuple(_capital(part) if number else part for number, part in enumerate(parts))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sorted(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _union(sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return _sorted({rank for ranks in sets for rank in ranks})
