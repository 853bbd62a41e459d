"""What each request does, on a rank and in an inline session.

A new request gets its case here. What only some processes can do with one (reach a payload in
shared memory, connect the group anew, open a debugger) comes from whoever makes the dispatcher.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from distsession.engine.diff import Summary
from distsession.engine.execute import NOTHING, Front, remember, run_call, run_cell
from distsession.engine.failure import name_cell
from distsession.engine.timeline import Trace
from distsession.engine.transfer import Transfers
from distsession.errors import SerializationError
from distsession.protocol import serialize, shared_memory
from distsession.protocol.board import Board
from distsession.protocol.fingerprint import fingerprint
from distsession.protocol.messages import (
    CallRequest,
    CellRequest,
    CommitRequest,
    FillRequest,
    PartsRequest,
    PieceRequest,
    PullRequest,
    PushRequest,
    Request,
    ShardsRequest,
    SummaryRequest,
    TimelineRequest,
)
from distsession.protocol.serialize import Frames

__all__ = ["PayloadReader", "RequestDispatcher"]


class PayloadReader(Protocol):
    """How this process reaches what was sent with a request."""

    def read_private(self, payload: Any) -> Frames:
        """The frames, in memory that nobody else changes."""

    def map_whole(self, payload: Any) -> Any:
        """Memory that the ranks of this host fill together; None where there is none such."""


class RequestDispatcher:
    """Performs the requests of one rank, one after another.

    Args:
        rank: Its number.
        namespace: Its variables.
        front: Magics and rich display.
        trace: Keeps what is done.
        payloads: Reaches what was sent with a request.
        around: Entered while the user's own code runs.
        extra: What is done with requests that only this kind of rank knows; gives their values.
        board: Where the kernel may say that what was pushed is to be set.
    """

    def __init__(
        self,
        rank: int,
        namespace: dict[str, Any],
        front: Front,
        trace: Trace,
        payloads: PayloadReader,
        *,
        around: AbstractContextManager[None] | None = None,
        extra: Mapping[type[Any], Callable[[Any], Any]] | None = None,
        board: Board | None = None,
    ):
        self._rank = rank
        self._namespace = namespace
        self._front = front
        self._trace = trace
        self._payloads = payloads
        self._around = contextlib.nullcontext() if around is None else around
        self._extra = extra or {}
        self.transfers = Transfers(namespace, rank, board)
        self._summary: Summary | None = None

    def perform(self, request: Request, payload: Any) -> tuple[Any, Any]:
        """The value of a request (``NOTHING`` if it has none), and what of it is to be shown."""
        self.transfers.commit_pushed()
        value, shown = self._perform(request, payload)
        self._trace.mark_end(request)
        return value, shown

    def _perform(self, request: Request, payload: Any) -> tuple[Any, Any]:
        value: Any = NOTHING
        match request:
            case CellRequest():
                return self._run_cell(request)
            case CallRequest():
                value = self._call(request, payload)
            case PullRequest():
                value = self.transfers.pull(request.names)
            case PushRequest():
                value = self._stage(request, payload)
            case CommitRequest():
                self.transfers.commit(request.keep)
            case ShardsRequest():
                value = self.transfers.shards(request.name)
            case FillRequest():
                value = self._fill(request, payload)
            case PieceRequest():
                value = self.transfers.piece(request.begin, request.shape)
            case SummaryRequest():
                value = self._summarise(request)
            case PartsRequest():
                value = self._parts(request)
            case TimelineRequest():
                value = self._trace.of(request.run)
            case _ if type(request) in self._extra:
                value = self._extra[type(request)](request)
        return value, None

    def _run_cell(self, request: CellRequest) -> tuple[Any, Any]:
        with self._trace.around(request):
            value, show = run_cell(
                request.source,
                request.label,
                self._namespace,
                self._front,
                expression=request.expression,
                around=self._around,
            )
        shown = self._render(value) if show and not request.expression else None
        return (value if request.fetch else NOTHING), shown

    def _render(self, value: Any) -> tuple[dict[str, Any], dict[str, Any], str] | None:
        """What is shown of a value, and a hash of what that leaves out."""
        bundle = self._front.render(value)
        return None if bundle is None else (*bundle, fingerprint(value))

    def _call(self, request: CallRequest, payload: Any) -> Any:
        if request.cells:
            self._remember_cells(request)
        frames = self._payloads.read_private(payload)
        try:
            function, args, kwargs = serialize.load(frames)
        except Exception as error:
            raise SerializationError(
                f"the function or its arguments cannot be rebuilt on rank {self._rank}: "
                f"{type(error).__name__}: {error}. A module that only the notebook has must be "
                "on sys.path here, too."
            ) from error
        return run_call(function, args, kwargs, self._namespace, self._around)

    def _remember_cells(self, request: CallRequest | PushRequest) -> None:
        for cell in request.cells:
            if cell.source:
                remember(cell.file, cell.source)
            if cell.label:
                name_cell(cell.file, cell.label)

    # --- push and gather --------------------------------------------------------------------------

    def _stage(self, request: PushRequest, payload: Any) -> Any:
        self._remember_cells(request)
        began, frames = time.monotonic_ns(), self._payloads.read_private(payload)
        problem = self.transfers.stage(frames, request.id if request.by_word else 0)
        self._trace.moved(request, shared_memory.nbytes(frames), began)
        return problem or NOTHING

    def _fill(self, request: FillRequest, payload: Any) -> Any:
        at, began = request.at.get(self._rank), time.monotonic_ns()
        whole = self._payloads.map_whole(payload)
        if whole is None:  # of another host, it is not within reach
            return self.transfers.stage_part(request.name, at)
        size = self.transfers.fill(request.name, request.shape, at, whole)
        self._trace.moved(request, size, began)
        return NOTHING

    # --- comparing over ranks ---------------------------------------------------------------------

    def _summarise(self, request: SummaryRequest) -> Any:
        self._summary = None
        cell = CellRequest(request.id, request.expression, request.label, True, True)
        self._summary = Summary(self._run_cell(cell)[0])
        return self._summary.leaves

    def _parts(self, request: PartsRequest) -> Any:
        if not request.paths or self._summary is None:
            self._summary = None
            return NOTHING
        return self._summary.values(request.paths)
