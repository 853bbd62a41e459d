"""The operations of a cell, kept for its timeline.

Each costs a small list, kept in a queue. Texts and sizes are made when they are asked for.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from distsession.engine.collectives.operations import describe_detail, size
from distsession.protocol.board import LINE_BITS, LINE_MASK
from distsession.protocol.operation_names import AnySource, CodeLine
from distsession.timeline.records import OperationRecord

__all__ = [
    "BEGAN",
    "BLOCKED",
    "ENDED",
    "FAILED",
    "FLAGS",
    "IS_ASYNC",
    "IS_ENQUEUED",
    "IS_FUTURE",
    "OPERATIONS",
    "Entry",
    "OperationLog",
    "begin_wait",
    "end",
]

OPERATIONS = 20_000
"""How many operations of a cell are kept; the earlier ones of a longer cell are only counted."""

# An operation, while it happens: a list, since an object would cost three times as much.
STREAM, SEQUENCE, KEY, PLACE, BEGAN, ENDED, BLOCKED, FLAGS = range(8)
IS_ASYNC, IS_FUTURE, FAILED, IS_ENQUEUED = 1, 2, 4, 8

Entry = list[Any]


def begin_wait(entry: Entry, *, is_over: bool) -> None:
    """The rank begins to wait for an operation that it issued before."""
    if not entry[ENDED]:
        now = time.monotonic_ns()
        entry[BLOCKED] = entry[BLOCKED] or now
        if is_over:
            entry[ENDED] = now


def end(entry: Entry) -> None:
    """An operation is over, or is seen to be."""
    if not entry[ENDED]:
        entry[ENDED] = time.monotonic_ns()


class OperationLog:
    """The operations of one cell.

    Args:
        names: Texts of places, by number.
    """

    def __init__(self, names: dict[int, str]):
        self.names = names
        self.count = 0
        self.entries: deque[Entry] = deque(maxlen=OPERATIONS)
        self.append = self.entries.append

    def records(self) -> tuple[OperationRecord, ...]:
        """As the notebook gets them."""
        texts: dict[tuple[Any, ...], tuple[int, str]] = {}
        return tuple(self._record(entry, texts) for entry in list(self.entries))

    def _record(
        self, entry: Entry, texts: dict[tuple[Any, ...], tuple[int, str]]
    ) -> OperationRecord:
        stream, sequence, key, place, began, ended, blocked, flags = entry
        known = texts.get(key)
        if known is None:
            known = texts[key] = size(key), describe_detail(key)
        file = self.names.get(place >> LINE_BITS, "")
        return OperationRecord(
            name=key[0],
            group=stream.name,
            members=stream.members,
            sequence=sequence,
            size=known[0],
            detail=known[1],
            place=CodeLine(file, place & LINE_MASK).name if file else "",
            began=began,
            ended=ended,
            blocked=blocked if flags & IS_ASYNC else began,
            is_async=bool(flags & IS_ASYNC),
            is_future=bool(flags & IS_FUTURE),
            failed=bool(flags & FAILED),
            is_enqueued=bool(flags & IS_ENQUEUED),
            is_from_any=any(isinstance(part, AnySource) for part in key[1:2]),
        )
