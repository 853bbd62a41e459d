"""The ranks' output in a terminal, and what they write between runs.

Text is put together into lines, each marked with its rank, so that ranks which write at the same
time do not tear each other's lines. A line that is not finished (a progress bar) is held back; the
terminal's last line is used for those of all ranks.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distsession.cluster.pending import OutputMessage
from distsession.display import columns
from distsession.display.render import Bundle, fold_bundles, note_of, rank_label
from distsession.display.widgets import Bars, Models
from distsession.kernel.notice_line import NoticeLine
from distsession.kernel.output import NO_NOTICE, Notice, Output
from distsession.notebook import stdin
from distsession.notebook.lines import Line, Lines
from distsession.protocol.messages import CommMessage, Display, RankReport, Text

__all__ = ["TerminalOutput"]

LIVE_INTERVAL_S = 0.1
"""Seconds between two updates of the line of unfinished lines."""
BATCH_CHARS = 1 << 16
"""Characters that are written in one piece."""
FLUSH_INTERVAL_S = 0.02
"""Seconds after which text is written though a piece is not full."""


class TerminalOutput(Output):
    """Writes one run's output to ``sys.stdout`` and ``sys.stderr``."""

    can_ask = True

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], Lines] = {}
        self._held: dict[tuple[int, str], list[Line]] = {}
        self._models = Models()
        self._bars = Bars(self._models)
        self._batch: list[str] = []
        self._batch_size = 0
        self._batch_stream = "stdout"
        self._flushed_at = time.monotonic()
        self._live = _LiveLine()
        self._notice = NoticeLine()
        self.is_file = not sys.stderr.isatty()

    def write(self, message: OutputMessage) -> None:
        """Take one piece of output of one rank."""
        if isinstance(message, Text):
            place = message.rank, message.stream
            lines = self._lines.get(place)
            if lines is None:
                lines = self._lines[place] = Lines(message.stream)
            given = [*self._held.pop(place, ()), *lines.feed(message.text)]
            self._write_lines(message.rank, [*given, *lines.settled()])
            if held := [line for line in given if line.is_open]:
                self._held[place] = held
            self._update_live()
        elif isinstance(message, CommMessage):
            self._models.apply(message)
            for text in self._bars.take_ended(message.rank):
                self._write_batched("stderr", f"[{message.rank}] {text}\n")
            self._update_live()
        elif isinstance(message, Display) and not self._bars.show(message):
            self._flush()
            self._write_batched("stdout", _plain_text([message.rank], message.data) + "\n")

    def tick(self, reports: Callable[[bool], Mapping[int, RankReport]]) -> None:
        """Write what came too soon after other text; of what ranks do nothing is shown."""
        if self._batch:
            self._flush()
            self._update_live()

    def show(self, shown: dict[int, Bundle]) -> None:
        """Show the last value of a cell, ranks that show the same folded into one."""
        self._finish_lines()
        folded = fold_bundles(shown)
        lines = None
        if not any(note_of(bundle) for _, bundle in folded):
            texts = [str(data.get("text/plain", "")) for _, (data, _) in folded]
            lines = columns.labelled([rank_label(ranks) for ranks, _ in folded], texts)
        if lines is None:
            lines = [_plain_text(list(r), bundle[0], note_of(bundle)) for r, bundle in folded]
        for line in lines:
            self._write_batched("stdout", f"{line}\n")
        self._flush()

    def notify(self, notice: Notice) -> None:
        """Show a line about the run that replaces the one before; it does not stay."""
        self._flush()
        self._notice.show(notice)

    def remark(self, text: str) -> None:
        """Say it on the standard error, below the output."""
        self._finish_lines()
        self._notice.clear()
        sys.stderr.write(f"distsession: {text}\n")
        sys.stderr.flush()

    def fail(self, text: str) -> None:
        """Say it on the standard error."""
        self._notice.clear()
        sys.stderr.write(f"{text}\n")

    def close(self) -> None:
        """Write what is still held back."""
        self._finish_lines()
        self._notice.show(NO_NOTICE)

    def ask(self, prompt: str, secret: bool) -> str:
        """Have somebody answer a rank, below all that has been put out so far."""
        self._finish_lines()
        self._notice.show(NO_NOTICE)
        return stdin.read_input(prompt, secret)

    # --- text -------------------------------------------------------------------------------------

    def _write_lines(self, rank: int, lines: Sequence[Line]) -> None:
        """Write those that are not about to be drawn anew, unless they stand there already."""
        parts = []
        for line in lines:
            if not line.is_open and line.is_news:
                line.written = line.text
                parts.append(f"[{rank}] {line.text}\n")
        if parts:
            self._write_batched(lines[0].stream, "".join(parts))

    def _write_batched(self, stream: str, text: str) -> None:
        if stream != self._batch_stream:
            self._flush()
            self._batch_stream = stream
        self._batch.append(text)
        self._batch_size += len(text)
        now = time.monotonic()
        if self._batch_size > BATCH_CHARS or now - self._flushed_at > FLUSH_INTERVAL_S:
            self._flush()

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self._batch:
            self._notice.clear()
            self._live.clear()
            target = getattr(sys, self._batch_stream)
            target.write("".join(self._batch))
            target.flush()
            self._batch.clear()
            self._batch_size = 0

    def _finish_lines(self) -> None:
        for (rank, stream), lines in sorted(self._lines.items()):
            given = self._held.pop((rank, stream), [])
            recent = lines.recent
            self._write_lines(rank, [*given, *recent, *lines.finish()])
        for rank, text in self._bars.take_all():
            self._write_batched("stderr", f"[{rank}] {text}\n")
        self._flush()
        self._live.show({})

    def _update_live(self) -> None:
        if self._live.is_due:
            partial = {
                rank: "  ".join(shown)
                for (rank, _), lines in sorted(self._lines.items())
                if (shown := lines.live)
            }
            partial |= {rank: "  ".join(self._bars.live(rank)) for rank in self._bars.ranks}
            if partial:
                self._flush()
            self._live.show(partial)


class _LiveLine:
    """The lines that ranks redraw, side by side in a terminal's last line."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_shown = False
        self._shown_at = 0.0

    @property
    def is_due(self) -> bool:
        return self._is_terminal and time.monotonic() - self._shown_at > LIVE_INTERVAL_S

    def clear(self) -> None:
        """Other text is about to be written."""
        if self._is_shown:
            self._is_shown = False
            sys.stdout.write("\r\x1b[K")

    def show(self, partial: dict[int, str]) -> None:
        """Show the beginnings of what is unfinished, as far as the line reaches."""
        self.clear()
        if partial and self._is_terminal:
            self._shown_at = time.monotonic()
            share = max(12, (shutil.get_terminal_size().columns - 1) // len(partial))
            text = "".join(f"[{rank}] {line}"[: share - 1] + " " for rank, line in partial.items())
            sys.stdout.write(text[: shutil.get_terminal_size().columns - 1])
            sys.stdout.flush()
            self._is_shown = True


def _plain_text(ranks: list[int], data: dict[str, Any], note: str = "") -> str:
    text = str(data.get("text/plain", f"<{', '.join(data)}>"))
    return f"{rank_label(ranks, note)}{chr(10) if chr(10) in text else ' '}{text}"
