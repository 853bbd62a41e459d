"""Who waited for whom: the records of all ranks, put together.

An operation can only run once the last of its members has begun it. What the others spend in it
until then is waiting, and that last member is whom they wait for.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distsession.timeline.records import OperationRecord, RankTrace, TransferRecord

__all__ = ["Merged", "Share", "Step", "Wait", "merge", "shares", "union", "waits"]

ADJACENT_NS = 1_000_000_000
"""Nanoseconds between a cell and a transfer up to which the two belong together."""

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of one rank, with what it waited for in it.

    Attributes:
        rank: Whose.
        record: As the rank wrote it down.
        ended: When it was over; the end of the rank's cell, if it was not over then.
        wait: Nanoseconds until the last member had begun it; as much of it as this rank spent.
        run: Nanoseconds from then on.
        late: The members that this rank waited for; more than one only if they never came.
        held: When the rank itself could do nothing else but wait; None if it did not have to.
    """

    rank: int
    record: OperationRecord
    ended: int
    wait: int
    run: int
    late: tuple[int, ...] = ()
    held: Interval | None = None

    @property
    def title(self) -> str:
        """``all_reduce #4``."""
        return f"{self.record.name} #{self.record.sequence}"


@dataclass(frozen=True)
class Merged:
    """All ranks of a cell, on one clock.

    Attributes:
        traces: By rank.
        steps: By rank, each in the order in which they were begun.
        transfers: By rank; those that belong to the cell.
        absent: Ranks of the cell that have no record of it, since they have been replaced or died.
        began: When the first rank, or transfer, began.
        ended: When the last one ended.
    """

    traces: Mapping[int, RankTrace]
    steps: Mapping[int, tuple[Step, ...]]
    transfers: Mapping[int, tuple[TransferRecord, ...]]
    absent: tuple[int, ...]
    began: int
    ended: int

    @property
    def label(self) -> str:
        return next((trace.label for trace in self.traces.values()), "")


@dataclass(frozen=True)
class Wait:
    """What ranks waited for the same ones.

    Attributes:
        late: Those that came last.
        seconds: For each rank that waited, how long it did.
        longest: For each rank that waited, the longest of its steps.
    """

    late: tuple[int, ...]
    seconds: Mapping[int, float]
    longest: Mapping[int, Step]
    count: int


@dataclass(frozen=True)
class Share:
    """Where the seconds of one rank went; work is what is neither of the others."""

    total: float
    work: float
    run: float
    wait: float


def merge(
    traces: Iterable[RankTrace],
    *,
    absent: Sequence[int] = (),
    shifts: Mapping[int, int] | None = None,
) -> Merged:
    """Put the records of the ranks of a cell together.

    Args:
        traces: Of different ranks, at least one.
        absent: Ranks of the cell without a record.
        shifts: For ranks of other hosts, nanoseconds to add to their times.
    """
    shifted = {t.rank: _shifted(t, (shifts or {}).get(t.rank, 0)) for t in traces}
    known = {rank: _closed(shifted[rank]) for rank in sorted(shifted)}
    transfers = {rank: _own_transfers(trace) for rank, trace in known.items()}
    moved = [transfer for found in transfers.values() for transfer in found]
    spans: list[RankTrace | TransferRecord] = [*known.values(), *moved]
    began, ended = min(span.began for span in spans), max(span.ended for span in spans)
    return Merged(known, _steps(known), transfers, tuple(sorted(absent)), began, ended)


def _shifted(trace: RankTrace, shift: int) -> RankTrace:
    if not shift:
        return trace
    return replace(
        trace,
        began=trace.began + shift,
        ended=trace.ended + shift if trace.ended else 0,
        operations=tuple(
            o._replace(
                began=o.began + shift,
                ended=o.ended + shift if o.ended else 0,
                blocked=o.blocked + shift if o.blocked else 0,
            )
            for o in trace.operations
        ),
        transfers=tuple(
            t._replace(began=t.began + shift, ended=t.ended + shift) for t in trace.transfers
        ),
        epoch=trace.epoch - shift,
    )


def _closed(trace: RankTrace) -> RankTrace:
    """A cell that has not ended is drawn up to the last thing known of it."""
    if trace.ended:
        return trace
    times = [trace.began, *(max(o.began, o.ended) for o in trace.operations)]
    return replace(trace, ended=max(times))


def _own_transfers(trace: RankTrace) -> tuple[TransferRecord, ...]:
    """What was pushed right before a cell, and what was brought right after it."""
    before: list[TransferRecord] = []
    began, ended = trace.began, trace.ended
    for transfer in reversed([t for t in trace.transfers if t.ended <= trace.began]):
        if transfer.name != "push" or transfer.ended < began - ADJACENT_NS:
            break
        before.insert(0, transfer)
        began = transfer.began
    after: list[TransferRecord] = []
    for transfer in [t for t in trace.transfers if t.began >= trace.ended]:
        if transfer.name == "push" or transfer.began > ended + ADJACENT_NS:
            break
        after.append(transfer)
        ended = transfer.ended
    return (*before, *after)


# --- steps ----------------------------------------------------------------------------------------

Key = tuple[str, int]


def _steps(traces: Mapping[int, RankTrace]) -> dict[int, tuple[Step, ...]]:
    begun: dict[Key, dict[int, int]] = {}
    for rank, trace in traces.items():
        # One that failed on this rank alone is made again under the same number: the last counts.
        for record in trace.operations:
            begun.setdefault((record.group, record.sequence), {})[rank] = record.began
    return {rank: tuple(_rank_steps(trace, begun, traces)) for rank, trace in traces.items()}


def _rank_steps(
    trace: RankTrace, begun: Mapping[Key, Mapping[int, int]], traces: Mapping[int, RankTrace]
) -> Iterable[Step]:
    futures = sorted(record.began for record in trace.operations if record.is_future)
    for number, record in enumerate(trace.operations):
        ended = max(record.began, record.ended or trace.ended)
        if record.is_from_any:
            following = trace.operations[number + 1 : number + 2]
            late = tuple(m for o in following for m in o.members if m != trace.rank)
            held = (record.began, ended) if late else None
            wait = ended - record.began if late else 0
            yield Step(trace.rank, record, ended, wait, ended - record.began - wait, late, held)
            continue
        came = begun[record.group, record.sequence]
        late, until = _latest(trace.rank, record, came, traces)
        until = max(record.began, ended if until is None else min(until, ended))
        held = None
        blocked = record.blocked
        if record.is_future and not blocked:
            # In a backward, C++ waits once all of its operations are issued.
            blocked = futures[bisect.bisect_right(futures, ended) - 1]
        if late and blocked and max(record.began, blocked) < until:
            held = max(record.began, blocked), until
        wait = until - record.began
        yield Step(trace.rank, record, ended, wait, ended - until, late if wait else (), held)


def _latest(
    rank: int,
    record: OperationRecord,
    came: Mapping[int, int],
    traces: Mapping[int, RankTrace],
) -> tuple[tuple[int, ...], int | None]:
    """The members that came last, and when; None for never."""
    missing = [member for member in record.members if member not in came]
    if missing:
        # Where the record of a member is cut short, it may well have come.
        never = [m for m in missing if m not in traces or not traces[m].dropped]
        return (tuple(never), None) if len(never) == len(missing) else ((), record.began)
    last = max(came, key=lambda member: (came[member], -member))
    return ((last,), came[last]) if last != rank else ((), record.began)


# --- sums -----------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in union(intervals))


def waits(merged: Merged) -> list[Wait]:
    """For whom the ranks waited, most of all first."""
    found: dict[tuple[int, ...], dict[int, list[Step]]] = {}
    for rank, steps in merged.steps.items():
        for step in steps:
            if step.held is not None:
                found.setdefault(step.late, {}).setdefault(rank, []).append(step)
    result = []
    for late, by_rank in found.items():
        seconds = {
            rank: _length(step.held for step in steps if step.held) / 1e9
            for rank, steps in by_rank.items()
        }
        longest = {rank: max(steps, key=_held) for rank, steps in by_rank.items()}
        result.append(Wait(late, seconds, longest, max(map(len, by_rank.values()))))
    return sorted(result, key=lambda wait: (-sum(wait.seconds.values()), wait.late))


def _held(step: Step) -> int:
    return step.held[1] - step.held[0] if step.held else 0


def shares(merged: Merged, rank: int) -> Share:
    """Where the time of a rank's cell went."""
    trace, steps = merged.traces[rank], merged.steps[rank]
    waiting = [step.held for step in steps if step.held]
    inside = [
        (max(step.record.began, step.record.blocked), step.ended)
        for step in steps
        if step.record.blocked and step.record.blocked < step.ended
    ]
    total = trace.ended - trace.began
    wait = min(total, _length(waiting))
    both = min(total, _length([*waiting, *inside]))
    return Share(total / 1e9, (total - both) / 1e9, (both - wait) / 1e9, wait / 1e9)
