"""What the ranks put out in the cells of a notebook, kept so that it can be shown again.

Text stays in the log files of the ranks. Noted here is which parts of them belong to which cell,
and in which order; displays are kept themselves, within bounds.
"""

from __future__ import annotations

import codecs
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distsession.cluster.pending import OutputMessage
from distsession.display.render import Bundle
from distsession.errors import SessionStateError
from distsession.kernel.log_text import MissingText, read_log
from distsession.kernel.output import Output
from distsession.protocol.cells import cell_name
from distsession.protocol.messages import ClearOutput, Display, Text
from distsession.ranks import format_ranks, ranks_text

__all__ = ["OutputHistory", "RunRecord", "replay", "replayed_text"]

KEPT_BYTES = 64 << 20
"""Bytes of displays that are kept, of all cells together."""
KEPT_RUNS = 1000
"""Runs that are kept."""
MAX_PIECES = 10_000
"""Pieces of one rank in one run; beyond it, the order of its two streams is not kept."""

LogPath = Callable[[int, str], Path | None]


@dataclass(slots=True)
class _Span:
    """A part of a log file."""

    stream: str
    path: str
    begin: int
    end: int


@dataclass(slots=True)
class _Kept:
    """Something that takes memory here; without content once it has been let go of."""

    content: Any
    size: int
    name: str


_Piece = _Span | _Kept | ClearOutput


@dataclass(eq=False)
class RunRecord:
    """What one run has put out.

    Attributes:
        cell: The number of the notebook's cell.
        ranks: That it ran on.
        began: When, by ``time.time()``.
        error: How it failed, as the cell said it.
    """

    cell: int
    ranks: tuple[int, ...]
    log_path: LogPath
    keep: Callable[[RunRecord, _Kept | None], None]
    began: float = field(default_factory=time.time)
    error: str = ""
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)
    shown: dict[int, _Kept] = field(default_factory=dict)

    def add(self, message: OutputMessage) -> None:
        """Note a piece of output."""
        if isinstance(message, Text):
            self._add_text(message)
        elif isinstance(message, Display):
            self._add_display(message)
        elif isinstance(message, ClearOutput):
            self._pieces(message.rank).append(message)

    def show(self, shown: dict[int, Bundle]) -> None:
        """Note the last values."""
        for rank, bundle in shown.items():
            self.shown[rank] = kept = _Kept(bundle, _size(bundle[0]), _name(bundle[0]))
            self.keep(self, kept)

    def fail(self, error: BaseException) -> None:
        """Note how it has ended."""
        render = getattr(error, "_render_traceback_", None)
        if render is not None and self.cell:
            self.error = "\n".join(render())
            self.keep(self, None)

    # --- inside -----------------------------------------------------------------------------------

    def _pieces(self, rank: int) -> list[_Piece]:
        if rank not in self.pieces:
            self.pieces[rank] = []
            self.keep(self, None)
        return self.pieces[rank]

    def _add_text(self, message: Text) -> None:
        pieces = self._pieces(message.rank)
        path = self.log_path(message.rank, message.stream) if message.end >= 0 else None
        if path is None:
            kept = _Kept(message, len(message.text), "text that found no room on the disk")
            pieces.append(kept)
            self.keep(self, kept)
            return
        span = _Span(message.stream, str(path), message.begin, message.end)
        near = pieces[-1:] if len(pieces) < MAX_PIECES else reversed(pieces)
        for last in near:
            if isinstance(last, _Span) and (last.path, last.end) == (span.path, span.begin):
                last.end = span.end
                return
        pieces.append(span)

    def _add_display(self, message: Display) -> None:
        pieces = self._pieces(message.rank)
        kept = _Kept(message, _size(message.data), _name(message.data))
        self.keep(self, kept)
        if not message.update:
            pieces.append(kept)
            return
        for at, piece in enumerate(pieces):
            if isinstance(piece, _Kept) and _display_id(piece) == message.display_id:
                piece.content = None  # it is not the last any more
                kept.content = replace(message, update=False)
                pieces[at] = kept


def _display_id(piece: _Kept) -> str | None:
    return piece.content.display_id if isinstance(piece.content, Display) else None


def _size(data: dict[str, Any]) -> int:
    return sum(len(v) if isinstance(v, (str, bytes)) else 1000 for v in data.values())


def _name(data: dict[str, Any]) -> str:
    return next((kind for kind in data if kind != "text/plain"), "text/plain")


class OutputHistory:
    """The output of a session's runs in cells."""

    def __init__(self) -> None:
        self._runs: deque[RunRecord] = deque(maxlen=KEPT_RUNS)
        self._displays: deque[_Kept] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def begin(self, cell: int | None, ranks: Sequence[int], log_path: LogPath) -> RunRecord | None:
        """The record of a run that begins; None where no cell runs it.

        It is kept from the moment on when there is something in it.
        """
        return None if cell is None else RunRecord(cell, tuple(ranks), log_path, self._keep)

    def runs(self, cell: int | None = None) -> list[RunRecord]:
        """The runs of a cell; by default of the last that has put out something.

        Raises:
            SessionStateError: There is none.
        """
        with self._lock:
            runs = list(self._runs)
        if not runs:
            raise SessionStateError("no cell has put out anything on the ranks of this session.")
        wanted = runs[-1].cell if cell is None else cell
        found = [run for run in runs if run.cell == wanted]
        if not found:
            cells = format_ranks(sorted({run.cell for run in runs}))
            raise SessionStateError(
                f"there is no output of ranks in {cell_name(wanted)}: the cells that have some "
                f"are In {cells}."
            )
        return found

    def _keep(self, record: RunRecord, kept: _Kept | None) -> None:
        with self._lock:
            if record not in self._runs:
                self._runs.append(record)
            if kept is None:
                return
            self._displays.append(kept)
            self._bytes += kept.size
            while self._bytes > KEPT_BYTES and len(self._displays) > 1:
                oldest = self._displays.popleft()
                self._bytes -= oldest.size
                oldest.content = None


def replay(run: RunRecord, output: Output, ranks: Sequence[int]) -> list[str]:
    """Put a run's output out again.

    Args:
        run: Which.
        output: Where to; it is closed afterwards.
        ranks: Whose.

    Returns:
        What is missing, in words.
    """
    missing: dict[str, list[int]] = {}

    def miss(what: str, rank: int) -> None:
        missing.setdefault(what, []).append(rank)

    for rank in ranks:
        for piece in list(run.pieces.get(rank, ())):
            for message in _messages(piece, rank, miss):
                output.write(message)
    shown = {rank: run.shown[rank] for rank in ranks if rank in run.shown}
    for rank, kept in shown.items():
        if kept.content is None:
            miss(f"the value ({kept.name})", rank)
    values = {rank: kept.content for rank, kept in shown.items() if kept.content is not None}
    if values:
        output.show(values)
    output.close()
    return [f"{what} of {ranks_text(sorted({*of}))}" for what, of in missing.items()]


def replayed_text(runs: Sequence[RunRecord], missing: Sequence[str]) -> str:
    """Whose output was put out again, what is missing of it, and how it ended."""
    at = time.strftime("%H:%M:%S", time.localtime(runs[0].began))
    ranks = ranks_text(sorted({rank for run in runs for rank in run.ranks}))
    lines = [f"This was the output of {cell_name(runs[0].cell)}, which began at {at} on {ranks}."]
    if missing:
        lines.append(f"Not kept: {'; '.join(dict.fromkeys(missing))}.")
    errors = [run.error for run in runs if run.error]
    return "\n\n".join(["\n".join(lines), *(f"It failed with\n\n{error}" for error in errors)])


def _messages(
    piece: _Piece, rank: int, miss: Callable[[str, int], None]
) -> Iterator[OutputMessage]:
    if isinstance(piece, ClearOutput):
        yield piece
    elif isinstance(piece, _Kept):
        if piece.content is not None:
            yield piece.content
        else:
            miss(f"a display ({piece.name})", rank)
    else:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            for _, data in read_log(piece.path, piece.begin, piece.end):
                yield Text(rank, 0, piece.stream, decoder.decode(data))
        except MissingText as error:
            miss(str(error), rank)
