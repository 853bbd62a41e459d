"""A cell in Chrome's trace format, which Perfetto and chrome://tracing show.

Each rank is a process of the trace. Times are microseconds since the cell began. What torch's
profiler has written has times of its own, microseconds since ``baseTimeNanoseconds`` of 1970; each
rank has said how its clock stands to that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distsession.timeline.records import RankTrace
from distsession.timeline.waits import Merged, Step

__all__ = ["trace"]

CELL, TRANSFERS, OPERATIONS = 0, 1, 10
"""Threads of a rank; operations that overlap are on several, numbered from the last of these."""
PROFILED = 1000
"""Threads of torch's profiler are numbered from here on."""
ARROW_MIN_WAIT_NS = 100_000
"""Nanoseconds of waiting from which an arrow shows for whom."""

Event = dict[str, Any]


def trace(merged: Merged, names: Mapping[int, str]) -> Event:
    """All events of a cell.

    Args:
        merged: The cell.
        names: What each rank is called, such as ``"rank 0 (cpu)"``.
    """
    events: list[Event] = []
    for rank, record in merged.traces.items():
        name = names.get(rank, f"rank {rank}")
        events.append(_meta("process_name", rank, name=name))
        events.append(_meta("process_sort_index", rank, sort_index=rank))
        events += _rank_events(merged, rank)
        events += _profile_events(record, merged.began)
    events += _arrows(merged)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"cell": merged.label, "written by": "distsession"},
    }


def _meta(kind: str, rank: int, thread: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "ts": 0, "args": args}


def _thread(rank: int, thread: int, name: str) -> list[Event]:
    return [
        _meta("thread_name", rank, thread, name=name),
        _meta("thread_sort_index", rank, thread, sort_index=thread),
    ]


def _span(
    rank: int, thread: int, name: str, kind: str, span: tuple[int, int], **args: Any
) -> Event:
    begin, end = span
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": thread,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "args": args,
    }


# --- what the session has recorded ----------------------------------------------------------------


def _rank_events(merged: Merged, rank: int) -> Iterator[Event]:
    record, zero = merged.traces[rank], merged.began
    yield from _thread(rank, CELL, "cell")
    span = (record.began - zero, record.ended - zero)
    yield _span(rank, CELL, record.label, "cell", span, **_without_empty(error=record.error))
    if merged.transfers[rank]:
        yield from _thread(rank, TRANSFERS, "transfers")
    for moved in merged.transfers[rank]:
        span = (moved.began - zero, moved.ended - zero)
        yield _span(rank, TRANSFERS, moved.name, "transfer", span, bytes=moved.size)
    lanes = _lanes(merged.steps[rank])
    for lane in sorted(set(lanes)):
        title = "collectives" if lane == 0 else f"collectives ({lane + 1})"
        yield from _thread(rank, OPERATIONS + lane, title)
    for step, lane in zip(merged.steps[rank], lanes, strict=True):
        yield from _step_events(step, OPERATIONS + lane, zero)


def _step_events(step: Step, thread: int, zero: int) -> Iterator[Event]:
    record = step.record
    begin, end = record.began - zero, step.ended - zero
    args = _without_empty(
        bytes=record.size,
        detail=record.detail,
        group=record.group,
        sequence=record.sequence,
        place=record.place,
        wait_us=step.wait / 1e3,
        run_us=step.run / 1e3,
        waited_for=list(step.late),
        asynchronous=record.is_async,
        failed=record.failed,
    )
    yield _span(step.rank, thread, step.title, "collective", (begin, end), **args)
    if step.wait:
        who = ", ".join(map(str, step.late))
        span = (begin, begin + step.wait)
        yield _span(step.rank, thread, f"wait for rank {who}", "wait", span)


def _without_empty(**args: Any) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value not in ("", [], False)}


def _lanes(steps: Sequence[Step]) -> list[int]:
    """For each step the first thread that is free: what overlaps cannot be on the same."""
    free: list[int] = []
    found = []
    for step in steps:
        begin, end = step.record.began, step.ended
        lane = next((n for n, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        found.append(lane)
    return found


def _arrows(merged: Merged) -> Iterator[Event]:
    """From where the last member came to where the others then went on."""
    threads: dict[tuple[str, int, int], tuple[int, int]] = {}
    lanes = {rank: _lanes(steps) for rank, steps in merged.steps.items()}
    for rank, steps in merged.steps.items():
        for step, lane in zip(steps, lanes[rank], strict=True):
            record = step.record
            threads[record.group, record.sequence, rank] = OPERATIONS + lane, record.began
    number = 0
    for rank, steps in merged.steps.items():
        for step, lane in zip(steps, lanes[rank], strict=True):
            record = step.record
            source = threads.get((record.group, record.sequence, *step.late[:1]))  # type: ignore[arg-type]
            if step.wait < ARROW_MIN_WAIT_NS or len(step.late) != 1 or source is None:
                continue
            number += 1
            arrow = {"name": "waited for", "cat": "wait", "id": f"wait {number}"}
            came = (source[1] - merged.began) / 1e3
            yield {**arrow, "ph": "s", "pid": step.late[0], "tid": source[0], "ts": came}
            went_on = (record.began + step.wait - merged.began) / 1e3
            place = {"pid": rank, "tid": OPERATIONS + lane, "ts": went_on}
            yield {**arrow, "ph": "f", "bp": "e", **place}


# --- what torch's profiler has written ------------------------------------------------------------


def _profile_events(record: RankTrace, zero: int) -> Iterator[Event]:
    if not record.profile:
        return
    written = json.loads(record.profile)
    base = int(written.get("baseTimeNanoseconds", 0)) - record.epoch - zero
    names = {
        (event.get("pid"), event.get("tid")): event["args"]["name"]
        for event in written["traceEvents"]
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    threads: dict[Any, int] = {}
    for event in written["traceEvents"]:
        # Events of no process, such as the profiler's own span, say nothing about the code.
        if event.get("ph") == "M" or "ts" not in event or not isinstance(event.get("pid"), int):
            continue
        key = event["pid"], event.get("tid")
        if key not in threads:
            threads[key] = PROFILED + len(threads)
            title = f"torch: {names.get(key, f'thread {key[1]}')}"
            yield from _thread(record.rank, threads[key], title)
        moved = {**event, "pid": record.rank, "tid": threads[key], "ts": event["ts"] + base / 1e3}
        if "id" in event:  # ranks count by themselves
            moved["id"] = f"{record.rank}.{event['id']}"
        yield moved
