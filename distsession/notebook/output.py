"""What the ranks put out in one run, kept within bounds.

A rank's output is a row of parts: text, a display, text, a display, and so on. The n-th parts of
all ranks make a section, which is shown together: ranks that wrote the same text share it, and
what they displayed stands side by side.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsession.notebook.lines import Bar, Lines, parse_bar
from distsession.notebook.screen import ROWS, Line
from distsession.protocol.messages import Display

__all__ = ["OutputLine", "RankText", "Section", "Transcript"]

HEAD_LINES, TAIL_LINES = 100, 100
"""Lines of a rank's text that are kept from its beginning and from its end."""
MAX_LINES = 3000
"""Lines of all blocks together that go into the notebook."""
MAX_LINE_CHARS = 4000
"""Characters of a line that are kept."""


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One line of text; with its bar, if it is a progress bar's last state."""

    text: str
    stream: str = "stdout"
    bar: Bar | None = None


class RankText:
    """Text that one rank wrote: its first and its last lines, and a hash of all of it.

    The newest lines are kept aside, for they may still be drawn anew; so are older ones that are
    likely to be, such as a progress bar's. These come after all others.

    Args:
        head: Lines that are kept from its beginning.
        tail: Lines that are kept from its end.
    """

    def __init__(self, head: int = HEAD_LINES, tail: int = TAIL_LINES) -> None:
        self.head: list[OutputLine] = []
        self.tail: deque[OutputLine] = deque(maxlen=tail)
        self.count = 0
        self._head_lines = head
        self._hashes = {"stdout": hashlib.blake2b(), "stderr": hashlib.blake2b()}
        self._recent: list[Line] = []
        self._open: list[Line] = []

    def add(self, lines: Sequence[Line]) -> None:
        """Take whole lines, of which the newest may still change."""
        if self._open:  # what is no longer drawn stands where that ended
            self._recent += [line for line in self._open if not line.is_low]
            self._open = [line for line in self._open if line.is_low]
        self._recent += lines
        newest = self._recent[-ROWS:]
        if any(line.is_low for line in newest):
            self._open += [line for line in newest if line.is_low]
            self._recent[-ROWS:] = [line for line in newest if not line.is_low]
        if len(self._recent) > ROWS:
            older, self._recent = self._recent[:-ROWS], self._recent[-ROWS:]
            self._settle(older)

    def finish(self) -> list[Line]:
        """No line changes any more, except those that this gives back, which it lets go of."""
        rest = self._in_order()
        self._recent, self._open = [], []
        self._settle([line for line in rest if not line.is_open])
        return [line for line in rest if line.is_open]

    def finished(self) -> RankText:
        """All of it as it is now, as a text that does not change."""
        if not self._recent and not self._open:
            return self
        text = RankText(self._head_lines, self.tail.maxlen or 0)
        text.head, text.tail, text.count = list(self.head), self.tail.copy(), self.count
        text._hashes = {stream: each.copy() for stream, each in self._hashes.items()}
        text._settle(self._in_order())
        return text

    def _in_order(self) -> list[Line]:
        return sorted([*self._recent, *self._open], key=operator.attrgetter("is_low"))

    def _settle(self, lines: Sequence[Line]) -> None:
        lines = [line for line in lines if not line.is_gone]
        self.count += len(lines)
        for stream, run in itertools.groupby(lines, key=operator.attrgetter("stream")):
            self._settle_stream(stream, list(run))

    def _settle_stream(self, stream: str, lines: Sequence[Line]) -> None:
        bars = {
            at: bar for at, line in enumerate(lines) if line.drawn and (bar := parse_bar(line.text))
        }
        same = [line.text for line in lines]
        for at, bar in bars.items():  # two ranks that came equally far are alike
            same[at] = f"{bar.label} {bar.count}"
        self._hashes[stream].update("\n".join((*same, "")).encode("utf-8", "surrogatepass"))
        room = max(0, self._head_lines - len(self.head))
        first = max(room, len(lines) - (self.tail.maxlen or 0))
        for at in (*range(min(room, len(lines))), *range(first, len(lines))):
            line = OutputLine(_cut(lines[at].text), stream, bars.get(at))
            (self.head if at < room else self.tail).append(line)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two ranks that wrote the same."""
        return (self.count, *(each.digest() for each in self._hashes.values()))

    @property
    def left_out(self) -> int:
        """Lines between the first and the last ones."""
        return self.count - len(self.head) - len(self.tail)

    def __bool__(self) -> bool:
        return self.count > 0


def _cut(text: str) -> str:
    if len(text) <= MAX_LINE_CHARS:
        return text
    return f"{text[:MAX_LINE_CHARS]} ... ({len(text) - MAX_LINE_CHARS:,} more characters)"


@dataclass
class Section:
    """The n-th parts of all ranks: text, and then a display.

    Attributes:
        is_value: Its text is that of values, not of what ranks wrote.
        most: Lines of its text that are shown, of all ranks together.
        changed: Whether it is other than what was last shown of it.
        handle: Where it is shown.
        notes: What is said of the text of a rank.
        again: The command that shows what is left out here; empty where there is none.
    """

    texts: dict[int, RankText] = field(default_factory=dict)
    displays: dict[int, Display] = field(default_factory=dict)
    is_value: bool = False
    most: int = MAX_LINES
    changed: bool = True
    handle: Any = None
    notes: dict[int, str] = field(default_factory=dict)
    again: str = ""


class Transcript:
    """The output of all ranks in one run.

    Args:
        most: Lines that are kept of a rank's text and shown of all; by default as many as go into
            the notebook unasked.
    """

    def __init__(self, most: int | None = None) -> None:
        self._kept = (HEAD_LINES, TAIL_LINES) if most is None else (most // 2, most // 2)
        self._most = MAX_LINES if most is None else most
        self.sections: list[Section] = []
        self._section_index: dict[int, int] = {}
        self._lines: dict[tuple[int, str], Lines] = {}
        self._last_lines: dict[int, str] = {}
        self._pending_clears: set[int] = set()

    def write(self, rank: int, stream: str, text: str) -> None:
        """Take a piece of text."""
        self._clear_pending(rank)
        lines = self._lines.get((rank, stream))
        if lines is None:
            lines = self._lines[rank, stream] = Lines(stream)
        self._add(rank, lines.feed(text))

    def display(self, message: Display) -> None:
        """Take something displayed; it comes after what the rank has written.

        A progress bar that is not at its end goes on below it.
        """
        self._clear_pending(message.rank)
        bars = self._finish(message.rank, keep_bars=True)
        section = self._section(message.rank)
        section.displays[message.rank] = message
        section.changed = True
        self._section_index[message.rank] = self._section_index.get(message.rank, 0) + 1
        self._add(message.rank, bars)

    def update(self, message: Display) -> bool:
        """Take what something displayed is now; False where it does not stand here."""
        is_here = False
        for section in self.sections:
            shown = section.displays.get(message.rank)
            if shown is not None and shown.display_id == message.display_id:
                section.displays[message.rank] = message
                section.changed = is_here = True
        return is_here

    def add_bar(self, rank: int, text: str) -> None:
        """Take the last state of a progress bar that was no text."""
        self._add(rank, [Line(text, "stderr", drawn=True)])

    def position(self, rank: int) -> int:
        """How often a rank has displayed something, which is shown in as many parts."""
        return self._section_index.get(rank, 0)

    def clear(self, rank: int, wait: bool) -> None:
        """Drop what a rank has put out: now, or when it next puts something out."""
        self._pending_clears.add(rank)
        if not wait:
            self._clear_pending(rank)

    def finish(self) -> None:
        """The run is over: unfinished lines are finished."""
        for rank in {rank for rank, _ in self._lines}:
            self._finish(rank)

    def live(self, rank: int) -> tuple[str, ...]:
        """The line that a rank writes, or wrote last; or the progress bars that it draws."""
        for stream in ("stderr", "stdout"):
            lines = self._lines.get((rank, stream))
            if lines is not None and (shown := lines.live):
                return tuple(_cut(line) for line in shown)
        last = self._last_lines.get(rank, "")
        return (last,) if last else ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have put out something."""
        return tuple(
            sorted({*self._section_index, *self._last_lines, *(rank for rank, _ in self._lines)})
        )

    def __iter__(self) -> Iterator[Section]:
        return iter(self.sections)

    # --- inside -----------------------------------------------------------------------------------

    def _section(self, rank: int) -> Section:
        at = self._section_index.setdefault(rank, 0)
        while len(self.sections) <= at:
            self.sections.append(Section(most=self._most))
        return self.sections[at]

    def _add(self, rank: int, lines: Sequence[Line]) -> None:
        if not lines:
            if (written := self._text(rank)) is not None:
                written.add(())
            return
        section = self._section(rank)
        section.texts.setdefault(rank, RankText(*self._kept)).add(lines)
        section.changed = True
        last = next((line.text for line in reversed(lines) if line.text.strip()), "")
        self._last_lines[rank] = _cut(last) or self._last_lines.get(rank, "")

    def _finish(self, rank: int, *, keep_bars: bool = False) -> list[Line]:
        for stream in ("stdout", "stderr"):
            lines = self._lines.get((rank, stream))
            if lines is not None and not (keep_bars and lines.has_bar):
                self._add(rank, lines.finish())
        written = self._text(rank)
        if written is None:
            return []
        self._section(rank).changed = True
        return written.finish()

    def _text(self, rank: int) -> RankText | None:
        """What a rank has written since it last displayed something, if anything."""
        at = self._section_index.get(rank, 0)
        return self.sections[at].texts.get(rank) if at < len(self.sections) else None

    def _clear_pending(self, rank: int) -> None:
        if rank not in self._pending_clears:
            return
        self._pending_clears.discard(rank)
        self._finish(rank)
        for section in self.sections:
            dropped = (section.texts.pop(rank, None), section.displays.pop(rank, None))
            section.changed = section.changed or any(dropped)
        self._section_index[rank] = 0
        self._last_lines.pop(rank, None)
