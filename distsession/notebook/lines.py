"""Pieces of text put together into lines, and what a progress bar's line says."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from distsession.notebook.screen import NARROW, ROWS, Line, Screen

__all__ = ["MAX_LIVE_BARS", "Bar", "Line", "Lines", "parse_bar"]

_BAR = re.compile(
    r"(?P<label>.*?)(?P<percent>\d{1,3})%\|[^|]*\|\s*"
    r"(?P<done>[\d.]+\w?)/(?P<total>[\d.]+\w?)\s*(?P<rest>\[(?P<elapsed>[\d:]+)<?.*\])?"
)
"""A bar of tqdm with its default format: ``train:  45%|####   | 45/100 [00:01<00:02, 30it/s]``."""
_SGR = re.compile(r"\x1b\[[\d;]*m")
_MOVES = re.compile(r"\x1b\[[\d;]*[@-GJKPX]|\x08")
"""What only a screen can show."""
_SIMPLE = re.compile(f"[\r\n{NARROW}]*")
"""Text of which each character takes one column, so that it can be overwritten as a string."""
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,4}|\][^\x07\x1b\r\n]{0,200}\x1b?)?\Z")
"""The beginning of an escape sequence at the end of a piece."""
MAX_LIVE_BARS = 4
"""Bars of one rank that are shown at a time while it works."""


class Lines:
    """Turns pieces of a stream into whole lines, as a terminal would show them.

    Lines that are given out may still change, as long as the cursor can go up to them. Most text
    has nothing that moves the cursor; then whole lines are split off, which takes no time. A
    screen is made for the rest, and left when there is only plain text again.
    """

    def __init__(self, stream: str = "stdout") -> None:
        self._stream = stream
        self._carry = ""
        self._line: list[str] = []
        self._rest = ""
        self._returned = False
        self._drawn = False
        self._recent: deque[Line] = deque(maxlen=ROWS - 1)
        self._screen: Screen | None = None

    def feed(self, text: str) -> list[Line]:
        """Take a piece; gives the lines that it finished."""
        text = self._carry + text
        self._carry = ""
        if "\x1b" in text[-210:] and (found := _INCOMPLETE.search(text)):
            self._carry = found[0]
            text = text[: found.start()]
        if self._screen is not None:
            return self._feed_screen(text)
        at = self._first_move(text)
        if at is None:
            return self._feed_plain(text)
        start = text.rfind("\n", 0, at) + 1
        given = self._feed_plain(text[:start])
        column = None
        if self._returned or self._rest:
            column = 0 if self._returned else len(self.partial) - len(self._rest)
        self._screen = Screen(
            self._stream, self._recent, self.partial, drawn=self._drawn, column=column
        )
        return given + self._feed_screen(text[start:])

    def _first_move(self, text: str) -> int | None:
        """Where the line begins to need a screen, if one does."""
        overwrites = self._returned or bool(self._rest)
        if "\r" not in text and "\x1b" not in text and "\x08" not in text and not overwrites:
            return None
        found = _MOVES.search(text)
        at = None if found is None else found.start()
        if ("\r" in text or overwrites) and not _SIMPLE.fullmatch(self.partial + text):
            back = 0 if overwrites else text.index("\r")
            at = back if at is None else min(at, back)
        return at

    # --- plain text -------------------------------------------------------------------------------

    def _feed_plain(self, text: str) -> list[Line]:
        if "\r" not in text and not self._returned and not self._drawn:
            *whole, rest = text.split("\n")
            if whole and self._line:
                whole[0] = "".join((*self._line, whole[0]))
                self._line.clear()
            if rest:
                self._line.append(rest)
            stream = self._stream
            return self._give([Line(line, stream) for line in whole])
        given = []
        pieces = text.split("\n")
        for number, piece in enumerate(pieces):
            self._overwrite(piece)
            if number < len(pieces) - 1:
                given.append(self._end_line())
        return self._give(given)

    def _overwrite(self, piece: str) -> None:
        for number, part in enumerate(piece.split("\r")):
            if number:
                self._returned = True
            if not part:
                continue
            if self._returned:
                before = self.partial
                self._drawn = True
                self._line, self._rest = [part], before[len(part) :]
                self._returned = False
            else:
                self._line.append(part)
                self._rest = self._rest[len(part) :]

    def _give(self, lines: list[Line]) -> list[Line]:
        self._recent.extend(lines[-ROWS:])
        return lines

    def _end_line(self) -> Line:
        text = self.partial
        line = Line(text.rstrip(" ") if self._drawn else text, self._stream, self._drawn)
        self._line.clear()
        self._rest = ""
        self._returned = self._drawn = False
        return line

    # --- a screen ---------------------------------------------------------------------------------

    def _feed_screen(self, text: str) -> list[Line]:
        screen = self._screen
        assert screen is not None
        given = screen.feed(text)
        self._mark_open(screen)
        if screen.is_plain and not _MOVES.search(text):
            self._line, self._rest = ([text] if (text := screen.unstripped) else []), ""
            self._returned, self._drawn = screen.is_returned, screen.lines[-1].drawn
            self._recent = deque(screen.lines[:-1], maxlen=ROWS - 1)
            self._screen = None
        return given

    @staticmethod
    def _mark_open(screen: Screen) -> None:
        """Lines from the cursor on, and bars right above it, are likely to be drawn anew."""
        start = screen.y
        while start and _is_unfinished(screen.lines[start - 1]):
            start -= 1
        for at, line in enumerate(screen.lines):
            line.is_open = at >= start

    @property
    def partial(self) -> str:
        """The line that is not finished."""
        if self._screen is not None:
            return self._screen.partial
        if len(self._line) > 1:
            self._line = ["".join(self._line)]
        return self._line[0] + self._rest if self._line else ""

    @property
    def has_bar(self) -> bool:
        """Whether a progress bar is being drawn."""
        if self._screen is not None:
            return any(_is_unfinished(line) for line in self._screen.lines if line.is_open)
        return self._drawn and _is_unfinished(Line(self.partial, drawn=True))

    @property
    def live(self) -> tuple[str, ...]:
        """What is being written: the unfinished line, or the bars that are drawn."""
        if self._screen is None:
            shown = [self.partial]
        else:
            shown = [line.text for line in self._screen.lines if line.is_open]
        return tuple(text for text in shown if text.strip())[-MAX_LIVE_BARS:]

    def settled(self) -> list[Line]:
        """Recent lines above the cursor that have not been written as they are now."""
        return [line for line in self.recent if not line.is_open and line.is_news]

    @property
    def recent(self) -> list[Line]:
        """Lines that were given out last, which the cursor can reach."""
        lines = self._recent if self._screen is None else self._screen.lines
        return [line for line in lines if line.is_given]

    def finish(self) -> list[Line]:
        """The unfinished line, if there is one; it is thereby finished."""
        if self._screen is not None:
            rest = self._screen.finish()
            self._screen = None
        else:
            line = self._end_line()
            rest = [line] if line.text else []
        self._carry = ""
        self._recent.clear()
        return rest


def _is_unfinished(line: Line) -> bool:
    bar = parse_bar(line.text) if line.drawn else None
    return bar is not None and bar.percent < 100


@dataclass(frozen=True, slots=True)
class Bar:
    """What a progress bar's line says.

    Attributes:
        label: The text before it.
        percent: From 0 to 100.
        done: How much of the total, such as ``"45"``.
        total: Such as ``"100"`` or ``"1.2M"``.
        rest: Times and rate, such as ``"[00:01<00:02, 30.0it/s]"``.
        seconds: That have passed, if it says so.
    """

    label: str
    percent: int
    done: str
    total: str
    rest: str = ""
    seconds: int | None = None

    @property
    def count(self) -> str:
        """``45/100``."""
        return f"{self.done}/{self.total}"


def parse_bar(line: str) -> Bar | None:
    """The progress bar in a line, if there is one."""
    if "%|" not in line:
        return None
    found = _BAR.fullmatch(_SGR.sub("", line).strip())
    if found is None:
        return None
    seconds = None
    if found["elapsed"]:
        seconds = 0
        for part in found["elapsed"].split(":"):
            seconds = seconds * 60 + int(part or 0)
    return Bar(
        found["label"].strip().rstrip(":"),
        min(100, int(found["percent"])),
        found["done"],
        found["total"],
        found["rest"] or "",
        seconds,
    )
