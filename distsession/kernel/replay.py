"""What the ranks put out in the cells of a notebook, kept so that it can be shown again.

Text stays in the log files of the ranks. Noted here is which parts of them belong to which cell,
and in which order; displays are kept themselves, within bounds.
"""

from __future__ import annotations

import codecs
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distsession.cluster.pending import OutputMessage
from distsession.display.colors import without_escapes
from distsession.display.render import Bundle
from distsession.errors import SessionStateError
from distsession.kernel.log_text import MissingText, read_log
from distsession.kernel.output import Output
from distsession.protocol.cells import cell_name
from distsession.protocol.messages import ClearOutput, Display, Text
from distsession.ranks import format_ranks, ranks_text

__all__ = ["OutputHistory", "OutputNoted", "RunRecord", "replay", "replayed_text", "show_again"]

KEPT_BYTES = 64 << 20
"""Bytes of displays that are kept, of all cells together."""
KEPT_RUNS = 1000
"""Runs that are kept."""
MAX_PIECES = 10_000
"""Pieces of one rank in one run; beyond it, the order of its two streams is not kept."""

MERGED_CHARS = 16 << 10
"""Text up to which pieces that follow each other are kept as one."""
PIECE_BYTES = 400
"""What a piece of text takes besides its characters."""
NO_ROOM = "text that found no room on the disk"
ELSEWHERE = "text whose log is on another host"

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

    @property
    def missed(self) -> str:
        """What to say of it when it has been let go of."""
        return self.name if self.name in (NO_ROOM, ELSEWHERE) else f"a display ({self.name})"


@dataclass(slots=True)
class _Missing:
    """Something that is known to have been there."""

    what: str


_Piece = _Span | _Kept | _Missing | ClearOutput


@dataclass(frozen=True, slots=True)
class OutputNoted:
    """What a run that is over has put out, for another process.

    Attributes:
        request: Its number.
        kernel: Which of the session's kernels ran the cell, from 1.
        cell: The number of the cell in that kernel's notebook.
        ranks: That it ran on.
        began: When, by ``time.time()``.
        error: How it failed, as the cell said it.
    """

    request: int
    kernel: int
    cell: int
    ranks: tuple[int, ...]
    began: float
    error: str
    pieces: dict[int, list[_Piece]]
    shown: dict[int, _Kept]


@dataclass(eq=False)
class RunRecord:
    """What one run has put out.

    Attributes:
        cell: The number of the notebook's cell.
        ranks: That it ran on.
        began: When, by ``time.time()``.
        error: How it failed, as the cell said it.
        request: The number of its request.
        kernel: Which of the session's kernels ran the cell, from 1.
        is_over: Nothing comes of it any more.
        title: What the cell is called now.
        goes_on: More may come of it, and displays are not here before it has ended.
    """

    cell: int
    ranks: tuple[int, ...]
    log_path: LogPath
    keep: Callable[[RunRecord, _Kept | None], None]
    extend: Callable[[_Kept, Text], bool]
    began: float = field(default_factory=time.time)
    error: str = ""
    request: int = 0
    kernel: int = 1
    is_over: bool = False
    title: str = ""
    goes_on: bool = False
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

    def miss(self, rank: int, what: str) -> None:
        """Note that there is something which cannot be shown."""
        self._pieces(rank).append(_Missing(what))

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

    @property
    def noted(self) -> OutputNoted | None:
        """What another process has to know of it; nothing of a run that has put out nothing."""
        if not (self.pieces or self.shown or self.error):
            return None
        return OutputNoted(
            self.request, self.kernel, self.cell, self.ranks, self.began, self.error,
            self.pieces, self.shown,
        )  # fmt: skip

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
            last = pieces[-1] if pieces else None
            if isinstance(last, _Kept) and self.extend(last, message):
                return
            size = PIECE_BYTES + len(message.text)
            kept = _Kept(message, size, NO_ROOM if message.end < 0 else ELSEWHERE)
            pieces.append(kept)
            self.keep(self, kept)
            return
        span = _Span(message.stream, sys.intern(str(path)), message.begin, message.end)
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
        self.kernel = 1
        """Which of the session's kernels this is, from 1."""

    def begin(
        self,
        cell: int | None,
        ranks: Sequence[int],
        log_path: LogPath,
        *,
        request: int = 0,
        kernel: int = 0,
        began: float = 0.0,
    ) -> RunRecord | None:
        """The record of a run that begins; None where no cell runs it.

        It is kept from the moment on when there is something in it.

        Args:
            cell: The number of the notebook's cell.
            ranks: That it runs on.
            log_path: Gives the log file of a rank's stream.
            request: The number of its request.
            kernel: Which kernel's cell it is. Default: the present one's.
            began: When, by ``time.time()``. Default: now.
        """
        if cell is None:
            return None
        made = RunRecord(
            cell, tuple(ranks), log_path, self._keep, self._extend, began or time.time(),
            request=request,
        )  # fmt: skip
        return self._named(made, kernel or self.kernel)

    def runs(self, cell: int | None = None, kernel: int | None = None) -> list[RunRecord]:
        """The runs of a cell; by default of the last that has put out something.

        Args:
            cell: The number of the notebook's cell.
            kernel: Which kernel's, from 1. Default: the last one's that had a cell of that number.

        Raises:
            SessionStateError: There is none.
        """
        with self._lock:
            runs = [run for run in self._runs if kernel in (None, run.kernel)]
        if not runs:
            of = f" in cells of kernel {kernel}" if kernel is not None else ""
            raise SessionStateError(
                f"no cell has put out anything on the ranks of this session{of}."
            )
        if cell is None:
            cell, kernel = runs[-1].cell, runs[-1].kernel
        found = [run for run in runs if run.cell == cell]
        if not found:
            cells = format_ranks(sorted({run.cell for run in runs}))
            raise SessionStateError(
                f"there is no output of ranks in {cell_name(cell)}: the cells that have some "
                f"are In {cells}."
            )
        last = max(run.kernel for run in found) if kernel is None else kernel
        return [run for run in found if run.kernel == last]

    def kernels(self, cell: int) -> list[int]:
        """The kernels that have output of a cell with this number."""
        with self._lock:
            return sorted({run.kernel for run in self._runs if run.cell == cell})

    # --- for another process ----------------------------------------------------------------------

    def noted(self) -> Iterator[OutputNoted]:
        """All that is kept of runs that are over."""
        with self._lock:
            runs = list(self._runs)
        for run in runs:
            if run.is_over and (noted := run.noted) is not None:
                yield noted

    def restore(self, noted: OutputNoted) -> None:
        """Take in what another process has noted of a run."""
        made = self.begin(
            noted.cell, noted.ranks, _no_log_path, request=noted.request, kernel=noted.kernel,
            began=noted.began,
        )  # fmt: skip
        assert made is not None
        made.error, made.is_over = noted.error, True
        made.pieces, made.shown = noted.pieces, noted.shown
        self._keep(made, None)
        pieces = [piece for pieces in made.pieces.values() for piece in pieces]
        for piece in (*pieces, *made.shown.values()):
            if isinstance(piece, _Kept) and piece.content is not None:
                self._keep(made, piece)

    def restore_error(self, request: int, error: str) -> None:
        """The same of how a run has failed."""
        with self._lock:
            for run in self._runs:
                if run.request == request:
                    run.error = error

    def _named(self, run: RunRecord, kernel: int) -> RunRecord:
        run.kernel = kernel
        of = f" of kernel {kernel}" if kernel != self.kernel else ""
        run.title = f"{cell_name(run.cell)}{of}"
        return run

    def _keep(self, record: RunRecord, kept: _Kept | None) -> None:
        with self._lock:
            if record not in self._runs:
                self._runs.append(record)
            if kept is None:
                return
            self._displays.append(kept)
            self._bytes += kept.size
            self._let_go()

    def _extend(self, kept: _Kept, more: Text) -> bool:
        """Put text behind what is kept; whether it goes on there, and both are short enough."""
        with self._lock:
            text = kept.content
            if (
                not isinstance(text, Text)
                or (text.stream, text.end) != (more.stream, more.begin)
                or len(text.text) + len(more.text) > MERGED_CHARS
                or more.end < 0
            ):
                return False
            kept.content = replace(text, text=text.text + more.text, end=more.end)
            kept.size += len(more.text)
            self._bytes += len(more.text)
            self._let_go()
            return True

    def _let_go(self) -> None:
        """Of what takes memory, let the oldest go where that is too much."""
        while self._bytes > KEPT_BYTES and len(self._displays) > 1:
            oldest = self._displays.popleft()
            self._bytes -= oldest.size
            oldest.content = None


def _no_log_path(rank: int, stream: str) -> Path | None:
    """That of a run which is over, and of which no text comes any more."""
    return None


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


def show_again(
    outputs: OutputHistory,
    wanted: Sequence[int],
    make_output: Callable[[], Output],
    cell: int | None = None,
    kernel: int | None = None,
) -> str:
    """Put out again what ranks put out in a cell.

    Args:
        outputs: All that is known of.
        wanted: The ranks.
        make_output: Makes the place for it.
        cell: As of :meth:`OutputHistory.runs`.
        kernel: The same.

    Returns:
        Of which cell it was, what is missing, and the cell's error.

    Raises:
        SessionStateError: There is no output of that cell, or not of these ranks.
    """
    runs = outputs.runs(cell, kernel)
    ran = {rank for run in runs for rank in run.ranks}
    if not ran & set(wanted):
        raise SessionStateError(
            f"{runs[0].title} ran on {ranks_text(sorted(ran))}, not on {ranks_text(wanted)}."
        )
    missing = []
    for run in runs:
        output = make_output()
        output.show_more()
        missing += replay(run, output, [rank for rank in wanted if rank in run.ranks])
    text = replayed_text(runs, missing)
    earlier = [each for each in outputs.kernels(runs[0].cell) if each < runs[0].kernel]
    if earlier and kernel is None:
        text += (
            f"\n{cell_name(runs[0].cell)} of an earlier kernel is there, too: "
            f"%session output In {runs[0].cell} --kernel {earlier[-1]}"
        )
    return text


def replayed_text(runs: Sequence[RunRecord], missing: Sequence[str]) -> str:
    """Whose output was put out again, what is missing of it, and how it ended."""
    at = time.strftime("%H:%M:%S", time.localtime(runs[0].began))
    ranks = ranks_text(sorted({rank for run in runs for rank in run.ranks}))
    title = runs[0].title or cell_name(runs[0].cell)
    lines = [f"This was the output of {title}, which began at {at} on {ranks}."]
    if any(run.goes_on for run in runs):
        lines = [
            f"This is the text so far of {title}, which began at {at} on {ranks}; what it displays "
            "comes at its end."
        ]
    if missing:
        lines.append(f"Not kept: {'; '.join(dict.fromkeys(missing))}.")
    errors = [without_escapes(run.error) for run in runs if run.error]
    return "\n\n".join(["\n".join(lines), *(f"It failed with\n\n{error}" for error in errors)])


def _messages(
    piece: _Piece, rank: int, miss: Callable[[str, int], None]
) -> Iterator[OutputMessage]:
    if isinstance(piece, ClearOutput):
        yield piece
    elif isinstance(piece, _Missing):
        miss(piece.what, rank)
    elif isinstance(piece, _Kept):
        if piece.content is not None:
            yield piece.content
        else:
            miss(piece.missed, rank)
    else:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            for _, data in read_log(piece.path, piece.begin, piece.end):
                yield Text(rank, 0, piece.stream, decoder.decode(data))
        except MissingText as error:
            miss(str(error), rank)
