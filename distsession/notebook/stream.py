"""The ranks' output in the notebook's cell, or in a terminal.

Runs in: the kernel.

Text is put together into lines, each marked with its rank, so that ranks which write at the same
time do not tear each other's lines. A line that is not finished (a progress bar) is held back; in
a notebook it is shown in a block that is updated in place, one line for each rank, where it also
stays when it is finished; in a terminal the last line is used for all of them.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import Any

from distsession.cluster.base import OutputMessage
from distsession.messages import ClearOutput, Display, Text
from distsession.notebook import debug
from distsession.render import Bundle, fold_bundles, rank_label

__all__ = ["Lines", "Printer"]

LIVE_INTERVAL = 0.1
"""Seconds between two updates of the block of unfinished lines."""
BATCH = 1 << 16
"""Characters that are written to the notebook in one piece."""


class Lines:
    """Turns pieces of a stream into whole lines, honouring carriage returns.

    What stands before a carriage return is overwritten by what follows, as in a terminal: as far
    as the new text reaches.
    """

    def __init__(self) -> None:
        self._line: list[str] = []
        self._returned = False
        self.redrawn = False
        """Whether the unfinished line has been overwritten: then it is a progress bar."""

    def feed(self, text: str) -> list[tuple[str, bool]]:
        """Take a piece; gives the lines that it finished, and whether each was redrawn."""
        if "\r" not in text and not self.redrawn:
            *whole, rest = text.split("\n")
            if whole and self._line:
                whole[0] = "".join((*self._line, whole[0]))
                self._line.clear()
            if rest:
                self._line.append(rest)
            return [(line, False) for line in whole]
        finished = []
        pieces = text.split("\n")
        for number, piece in enumerate(pieces):
            self._overwrite(piece)
            if number < len(pieces) - 1:
                redrawn = self.redrawn
                finished.append((self.finish(), redrawn))
        return finished

    def _overwrite(self, piece: str) -> None:
        for number, part in enumerate(piece.split("\r")):
            if number:
                self._returned = True
            if not part:
                continue
            if self._returned:
                before = self.partial
                self.redrawn = self.redrawn or bool(before)
                self._line = [part, before[len(part) :]]
                self._returned = False
            else:
                self._line.append(part)

    @property
    def partial(self) -> str:
        """The line that is not finished."""
        if len(self._line) > 1:
            self._line = ["".join(self._line)]
        return self._line[0] if self._line else ""

    def finish(self) -> str:
        """The unfinished line, which is thereby finished."""
        rest = self.partial
        self._line.clear()
        self._returned = self.redrawn = False
        return rest


class Printer:
    """Writes one run's output to ``sys.stdout`` and ``sys.stderr``, and displays what is rich."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], Lines] = {}
        self._batch: list[str] = []
        self._batch_size = 0
        self._batch_stream = "stdout"
        self._flushed = time.monotonic()
        self._live: _LiveBlock | _LiveLine = _LiveBlock() if _in_notebook() else _LiveLine()
        self._notice = _Notice()

    def write(self, message: OutputMessage) -> None:
        """Take one piece of output of one rank."""
        if isinstance(message, Text):
            lines = self._lines.setdefault((message.rank, message.stream), Lines())
            prefix = f"[{message.rank}] "
            text = []
            for line, redrawn in lines.feed(message.text):
                if not (redrawn and self._live.keep(message.rank, line)):
                    text.append(f"{prefix}{line}\n")
            if text:
                self._put(message.stream, "".join(text))
            self._update_live()
        elif isinstance(message, Display):
            self._flush()
            _display(message)
        elif isinstance(message, ClearOutput):
            self._flush()
            _clear_output(message)

    def show(self, shown: dict[int, Bundle]) -> None:
        """Show the last value of a cell, ranks that show the same folded into one."""
        self._finish_lines()
        for ranks, bundle in fold_bundles(shown):
            _show_bundle(ranks, bundle)

    def notify(self, text: str) -> None:
        """Show a line about the run that replaces the one before; it does not stay."""
        self._flush()
        self._notice.show(text)

    def close(self) -> None:
        """Write what is still held back."""
        self._finish_lines()
        self._notice.show("")

    def ask(self, prompt: str, secret: bool) -> str:
        """Have somebody answer a rank, below all that has been put out so far."""
        self._finish_lines()
        self._notice.show("")
        return debug.ask(prompt, secret)

    # --- text -------------------------------------------------------------------------------------

    def _put(self, stream: str, text: str) -> None:
        if stream != self._batch_stream:
            self._flush()
            self._batch_stream = stream
        self._batch.append(text)
        self._batch_size += len(text)
        now = time.monotonic()
        if self._batch_size > BATCH or now - self._flushed > 0.02:
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._batch:
            self._live.make_way()
            target = getattr(sys, self._batch_stream)
            target.write("".join(self._batch))
            target.flush()
            self._batch.clear()
            self._batch_size = 0

    def _finish_lines(self) -> None:
        for (rank, stream), lines in sorted(self._lines.items()):
            redrawn = lines.redrawn
            rest = lines.finish()
            if rest and not (redrawn and self._live.keep(rank, rest)):
                self._put(stream, f"[{rank}] {rest}\n")
        self._flush()
        self._live.show({})

    def _update_live(self) -> None:
        if self._live.is_due:
            partial = {
                rank: lines.partial
                for (rank, _), lines in sorted(self._lines.items())
                if lines.partial
            }
            if partial:
                self._flush()
            self._live.show(partial)


class _LiveBlock:
    """The lines that ranks redraw, in one display that is updated in place. Notebooks only."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str]] = []
        self._handle: Any = None
        self._text = ""
        self._shown_at = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._shown_at > LIVE_INTERVAL

    def make_way(self) -> None:
        """Other text is about to be written."""

    def keep(self, rank: int, line: str) -> bool:
        """Take a redrawn line that is finished; False where there is no block to take it."""
        if self._handle is None:
            return False
        self._kept.append((rank, line))
        return True

    def show(self, partial: dict[int, str]) -> None:
        """Show what was kept and what is unfinished."""
        self._shown_at = time.monotonic()
        lines = [f"[{rank}] {line}" for rank, line in sorted(self._kept)]
        text = "\n".join([*lines, *(f"[{rank}] {line}" for rank, line in partial.items())])
        if text == self._text or (not text and self._handle is None):
            return
        self._text = text
        if self._handle is None:
            from IPython.display import display

            self._handle = display(_raw(text), raw=True, display_id=True)
        else:
            self._handle.update(_raw(text), raw=True)


class _LiveLine:
    """The lines that ranks redraw, side by side in a terminal's last line."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_shown = False
        self._shown_at = 0.0

    @property
    def is_due(self) -> bool:
        return self._is_terminal and time.monotonic() - self._shown_at > LIVE_INTERVAL

    def make_way(self) -> None:
        """Other text is about to be written."""
        if self._is_shown:
            self._is_shown = False
            sys.stdout.write("\r\x1b[K")

    def keep(self, rank: int, line: str) -> bool:
        """Finished lines are printed as any others."""
        return False

    def show(self, partial: dict[int, str]) -> None:
        """Show the beginnings of what is unfinished, as far as the line reaches."""
        self.make_way()
        if partial and self._is_terminal:
            self._shown_at = time.monotonic()
            share = max(12, (shutil.get_terminal_size().columns - 1) // len(partial))
            text = "".join(f"[{rank}] {line}"[: share - 1] + " " for rank, line in partial.items())
            sys.stdout.write(text[: shutil.get_terminal_size().columns - 1])
            sys.stdout.flush()
            self._is_shown = True


class _Notice:
    """A line about the run: updated in place in a notebook, written as it changes elsewhere."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._written = ""

    def show(self, text: str) -> None:
        if _in_notebook():
            self._display(text)
            return
        lasting = re.sub(r"[\d.]+ (s|min|h)\b", "", text)  # how long it lasts is no news by itself
        if text and lasting != self._written:
            self._written = lasting
            sys.stderr.write(f"distsession: {text}\n")
            sys.stderr.flush()

    def _display(self, text: str) -> None:
        from IPython.display import display

        if self._handle is not None:
            self._handle.update(_raw(text), raw=True)
        elif text:
            self._handle = display(_raw(text), raw=True, display_id=True)


def _clear_output(message: ClearOutput) -> None:
    if _in_notebook():
        from IPython.display import clear_output

        clear_output(message.wait)


def _raw(text: str) -> dict[str, str]:
    return {"text/plain": text}


def _shell() -> Any:
    """The IPython shell, if there is one; without importing IPython where there is none."""
    # Another thread may be half-way through importing it.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def _in_notebook() -> bool:
    return hasattr(_shell(), "kernel")


def _display(message: Display) -> None:
    """Something that a rank displayed, under its rank."""
    if _shell() is None:
        sys.stdout.write(_plain([message.rank], message.data) + "\n")
        return
    from IPython.display import display, update_display

    if message.update:
        update_display(
            message.data, raw=True, display_id=_own_id(message), metadata=message.metadata
        )
        return
    if not _in_notebook() or set(message.data) == {"text/plain"}:
        sys.stdout.write(_plain([message.rank], message.data) + "\n")
        return
    display(_raw(rank_label([message.rank])), raw=True)
    options = {"display_id": _own_id(message)} if message.display_id else {}
    display(message.data, raw=True, metadata=message.metadata, **options)


def _own_id(message: Display) -> str:
    """Two ranks may use the same id; they must not overwrite each other."""
    return f"{message.display_id}-rank{message.rank}"


def _show_bundle(ranks: tuple[int, ...], bundle: Bundle) -> None:
    data, metadata = bundle
    if not _in_notebook() or set(data) <= {"text/plain"}:
        sys.stdout.write(_plain(list(ranks), data) + "\n")
        sys.stdout.flush()
        return
    from IPython.display import display

    display(_raw(rank_label(ranks)), raw=True)
    display(data, raw=True, metadata=metadata)


def _plain(ranks: list[int], data: dict[str, Any]) -> str:
    text = str(data.get("text/plain", f"<{', '.join(data)}>"))
    return f"{rank_label(ranks)}{chr(10) if chr(10) in text else ' '}{text}"
