"""What the ranks put out in one run, kept within bounds.

A rank's output is a row of parts: text, a display, text, a display, and so on. The n-th parts of
all ranks make a section, which is shown together: ranks that wrote the same text share it, and
what they displayed stands side by side.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsession.notebook.lines import Bar, Lines, parse_bar
from distsession.protocol.messages import Display

__all__ = ["OutputLine", "RankText", "Section", "Transcript"]

HEAD_LINES, TAIL_LINES = 100, 100
"""Lines of a rank's text that are kept from its beginning and from its end."""
MAX_LINE_CHARS = 4000
"""Characters of a line that are kept."""


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One line of text; with its bar, if it is a progress bar's last state."""

    text: str
    stream: str = "stdout"
    bar: Bar | None = None


class RankText:
    """Text that one rank wrote: its first and its last lines, and a hash of all of it."""

    def __init__(self) -> None:
        self.head: list[OutputLine] = []
        self.tail: deque[OutputLine] = deque(maxlen=TAIL_LINES)
        self.count = 0
        self._hashes = {"stdout": hashlib.blake2b(), "stderr": hashlib.blake2b()}

    def add(self, stream: str, lines: Sequence[tuple[str, bool]]) -> None:
        """Take whole lines, each with whether it had been overwritten."""
        if not lines:
            return
        self.count += len(lines)
        bars = {
            at: bar for at, (text, drawn) in enumerate(lines) if drawn and (bar := parse_bar(text))
        }
        same = [text for text, _ in lines]
        for at, bar in bars.items():  # two ranks that came equally far are alike
            same[at] = f"{bar.label} {bar.count}"
        self._hashes[stream].update("\n".join((*same, "")).encode("utf-8", "surrogatepass"))
        room = max(0, HEAD_LINES - len(self.head))
        first = max(room, len(lines) - TAIL_LINES)
        for at in (*range(min(room, len(lines))), *range(first, len(lines))):
            line = OutputLine(_cut(lines[at][0]), stream, bars.get(at))
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
        changed: Whether it is other than what was last shown of it.
        handle: Where it is shown.
        notes: What is said of the text of a rank.
    """

    texts: dict[int, RankText] = field(default_factory=dict)
    displays: dict[int, Display] = field(default_factory=dict)
    changed: bool = True
    handle: Any = None
    notes: dict[int, str] = field(default_factory=dict)


class Transcript:
    """The output of all ranks in one run."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._section_index: dict[int, int] = {}
        self._lines: dict[tuple[int, str], Lines] = {}
        self._last_lines: dict[int, str] = {}
        self._pending_clears: set[int] = set()

    def write(self, rank: int, stream: str, text: str) -> None:
        """Take a piece of text."""
        self._clear_pending(rank)
        lines = self._lines.setdefault((rank, stream), Lines())
        self._add(rank, stream, lines.feed(text))

    def display(self, message: Display) -> None:
        """Take something displayed; it comes after what the rank has written."""
        self._clear_pending(message.rank)
        self._finish(message.rank)
        section = self._section(message.rank)
        section.displays[message.rank] = message
        section.changed = True
        self._section_index[message.rank] = self._section_index.get(message.rank, 0) + 1

    def clear(self, rank: int, wait: bool) -> None:
        """Drop what a rank has put out: now, or when it next puts something out."""
        self._pending_clears.add(rank)
        if not wait:
            self._clear_pending(rank)

    def finish(self) -> None:
        """The run is over: unfinished lines are finished."""
        for rank in {rank for rank, _ in self._lines}:
            self._finish(rank)

    def last_line(self, rank: int) -> str:
        """The line that a rank writes, or wrote last."""
        for stream in ("stderr", "stdout"):
            lines = self._lines.get((rank, stream))
            if lines is not None and lines.partial.strip():
                return lines.partial
        return self._last_lines.get(rank, "")

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
            self.sections.append(Section())
        return self.sections[at]

    def _add(self, rank: int, stream: str, lines: Sequence[tuple[str, bool]]) -> None:
        if not lines:
            return
        section = self._section(rank)
        section.texts.setdefault(rank, RankText()).add(stream, lines)
        section.changed = True
        last = next((text for text, _ in reversed(lines) if text.strip()), "")
        self._last_lines[rank] = _cut(last) or self._last_lines.get(rank, "")

    def _finish(self, rank: int) -> None:
        for stream in ("stdout", "stderr"):
            lines = self._lines.get((rank, stream))
            if lines is not None:
                redrawn = lines.redrawn
                rest = lines.finish()
                if rest:
                    self._add(rank, stream, [(rest, redrawn)])

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
