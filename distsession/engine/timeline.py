"""What this rank does in a cell, kept for a timeline.

Each operation costs a small list, kept in a queue. Texts and sizes are made when they are asked
for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distsession.engine.collectives.operations import describe, size
from distsession.engine.profiler import profiled
from distsession.protocol import shared_memory
from distsession.protocol.board import LINE_BITS, LINE_MASK
from distsession.protocol.diagnosis import ANY_SOURCE
from distsession.protocol.messages import (
    CallRequest,
    CellRequest,
    FillRequest,
    PieceRequest,
    PullRequest,
    PushRequest,
    Request,
)
from distsession.timeline.records import OperationRecord, RankTrace, TransferRecord

if TYPE_CHECKING:
    from distsession.engine.collectives.recorder import Recorder

__all__ = [
    "ENDED",
    "FAILED",
    "FLAGS",
    "IS_ASYNC",
    "IS_FUTURE",
    "OPERATIONS",
    "Entry",
    "Log",
    "Trace",
    "begin_wait",
    "end",
]

OPERATIONS = 20_000
"""How many operations of a cell are kept; the earlier ones of a longer cell are only counted."""
KEPT = 3
"""How many cells are kept: those of the session's own, such as an export's, are among them."""
TRANSFERS = 200

_TRANSFERS: dict[type[Any], str] = {
    CallRequest: "result",
    CellRequest: "result",
    FillRequest: "gather",
    PieceRequest: "gather",
    PullRequest: "pull",
    PushRequest: "push",
}


# An operation, while it happens: a list, since an object would cost three times as much.
STREAM, SEQUENCE, KEY, PLACE, BEGAN, ENDED, BLOCKED, FLAGS = range(8)
IS_ASYNC, IS_FUTURE, FAILED = 1, 2, 4

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


class Log:
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
            known = texts[key] = size(key), describe(key).partition(" ")[2]
        file = self.names.get(place >> LINE_BITS, "")
        return OperationRecord(
            name=key[0],
            group=stream.name,
            members=stream.members,
            sequence=sequence,
            size=known[0],
            detail=known[1],
            place=f"{file} line {place & LINE_MASK}" if file else "",
            began=began,
            ended=ended,
            blocked=blocked if flags & IS_ASYNC else began,
            is_async=bool(flags & IS_ASYNC),
            is_future=bool(flags & IS_FUTURE),
            failed=bool(flags & FAILED),
            is_from_any=key[:2] == ("recv", ANY_SOURCE),
        )


class _Run:
    """One cell or call."""

    def __init__(self, number: int, label: str, log: Log):
        self.number = number
        self.label = label
        self.log = log
        self.began = time.monotonic_ns()
        self.ended = 0
        self.error = ""
        self.profile = b""

    def keep_profile(self, profile: bytes) -> None:
        """What torch's profiler has written."""
        self.profile = profile


class Trace:
    """Keeps the last cells and calls of a rank.

    Args:
        rank: Its number.
        recorder: Sees the operations; None where nothing does.
    """

    def __init__(self, rank: int, recorder: Recorder | None):
        self._rank = rank
        self._recorder = recorder
        self._runs: deque[_Run] = deque(maxlen=KEPT)
        self._transfers: deque[TransferRecord] = deque(maxlen=TRANSFERS)

    def begin(self, request: Request) -> None:
        """A request begins; those that run a cell or a function begin a record."""
        match request:
            case CellRequest(label=label, expression=False) | CallRequest(name=label):
                log = Log({}) if self._recorder is None else self._recorder.begin_log()
                self._runs.append(_Run(request.id, label, log))

    @contextmanager
    def around(self, request: CellRequest) -> Iterator[None]:
        """The cell itself runs within, and torch's profiler around it if that is asked for."""
        if self._rank not in request.profile:
            yield
            return
        run = self._runs[-1]
        with profiled(run.keep_profile):
            run.began = time.monotonic_ns()  # the profiler's own time is not the cell's
            try:
                yield
            finally:
                self.end(request)

    def end(self, request: Request, error: BaseException | None = None) -> None:
        """The user's code is over; the first call says when, a later one may say how."""
        if self._recorder is not None:
            self._recorder.log = None
        run = self._runs[-1] if self._runs else None
        if run is not None and run.number == request.id:
            run.ended = run.ended or time.monotonic_ns()
            run.error = "" if error is None else _headline(error)

    def moved(self, request: Request, size: int, began: int) -> None:
        """Data of a request have been moved, since that time; small results do not count."""
        name = _TRANSFERS.get(type(request))
        if name is not None and (name != "result" or size >= shared_memory.THRESHOLD):
            self._transfers.append(TransferRecord(name, size, began, time.monotonic_ns()))

    def of(self, number: int) -> RankTrace | None:
        """The record of a request; None if it is not kept, or never came here."""
        before = 0
        for run in self._runs:
            if run.number == number:
                return RankTrace(
                    rank=self._rank,
                    label=run.label,
                    began=run.began,
                    ended=run.ended,
                    error=run.error,
                    operations=run.log.records(),
                    transfers=tuple(t for t in self._transfers if t.began >= before),
                    dropped=run.log.count - len(run.log.entries),
                    is_recorded=self._recorder is not None,
                    epoch=time.time_ns() - time.monotonic_ns(),
                    profile=run.profile,
                )
            before = run.ended
        return None


def _headline(error: BaseException) -> str:
    from distsession.engine.failure import message_of

    text = message_of(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
