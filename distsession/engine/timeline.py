"""What this rank does in a cell, kept for a timeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distsession.engine.collectives.operation_log import OperationLog
from distsession.engine.collectives.recorder import Recorder
from distsession.engine.listeners import RequestListener
from distsession.engine.profiler import profiled
from distsession.protocol import shared_memory
from distsession.protocol.messages import (
    CallRequest,
    CellRequest,
    FillRequest,
    PieceRequest,
    PullRequest,
    PushRequest,
    Request,
)
from distsession.timeline.records import RankTrace, TransferRecord

__all__ = ["Trace"]

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


class _Run:
    """One cell or call."""

    def __init__(self, number: int, label: str, log: OperationLog):
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


class Trace(RequestListener):
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

    def begin_request(self, request: Request) -> None:
        """A request begins; those that run a cell or a function begin a record."""
        match request:
            case CellRequest(label=label, expression=False) | CallRequest(name=label):
                log = OperationLog({}) if self._recorder is None else self._recorder.begin_log()
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
                self.mark_end(request)

    def mark_end(self, request: Request) -> None:
        """The user's code has come to its end; what follows in this request is not its time."""
        if self._recorder is not None:
            self._recorder.log = None
        run = self._runs[-1] if self._runs else None
        if run is not None and run.number == request.id:
            run.ended = run.ended or time.monotonic_ns()

    def end_code(self, request: Request, error: BaseException | None) -> None:
        self.mark_end(request)
        if error is not None and self._runs and self._runs[-1].number == request.id:
            self._runs[-1].error = _headline(error)

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
