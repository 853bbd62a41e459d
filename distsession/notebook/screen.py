"""The last lines of a stream, as a terminal shows them: text and what moves the cursor.

Own code, for the terminal emulators that there are take a hundred times as long: they keep a grid
of a fixed size, and treat each character by itself. The tests compare it with one of them, pyte.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable

__all__ = ["NARROW", "ROWS", "Line", "Screen"]

ROWS = 40
"""Lines that the cursor can go up."""
MAX_COLUMNS = 1 << 16
"""How far a cursor can be moved to the right."""
_TAB = 8
_TOKEN = re.compile(
    r"(?P<control>[\n\r\t\x08])"
    r"|\x1b\[(?P<numbers>[0-9;]{0,80})(?P<final>[@-GJKPXm])"
    r"|(?P<other>\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]"
    r"|[\x00-\x1f\x7f])"
    r"|(?P<text>[^\x00-\x1f\x7f]+)"
)
NARROW = r" -~\xa0-\xac\xae-\u02ff\u2500-\u259f"
"""Characters that take one column each; those of progress bars are among them."""
_NARROW = re.compile(f"[{NARROW}]*")

Cell = tuple[str, str]
"""A character (none in the second column of a wide one), and its style."""
_BLANK: Cell = (" ", "")


class Line:
    """A line of a stream, which may change as long as the cursor can reach it.

    Attributes:
        drawn: Something in it was overwritten, as in a progress bar.
        is_given: It has come to an end, and somebody else has it, too.
        is_open: It is likely to change.
        was_open: It was until the end.
        is_gone: There is nothing in it and nothing below it any more.
        written: What a terminal has of it.
    """

    __slots__ = (
        *("drawn", "is_given", "is_gone", "is_open"),
        *("stream", "text", "was_open", "written"),
    )

    def __init__(self, text: str, stream: str = "stdout", drawn: bool = False, given: bool = True):
        self.text = text
        self.stream = stream
        self.drawn = drawn
        self.is_given = given
        self.is_open = self.was_open = False
        self.is_gone = False
        self.written: str | None = None

    @property
    def is_low(self) -> bool:
        """Whether it stands below lines that cannot change any more."""
        return self.is_open or self.was_open

    @property
    def is_news(self) -> bool:
        """Whether it is other than what a terminal has of it."""
        return not self.is_gone and self.written != self.text


class Screen:
    """Some lines, and a cursor.

    Args:
        stream: Whose lines they are.
        lines: Those above the cursor.
        partial: The text of the cursor's line.
        drawn: It had been overwritten.
        column: Where in it the cursor is, if not at its end.
    """

    def __init__(
        self,
        stream: str,
        lines: Iterable[Line],
        partial: str,
        *,
        drawn: bool,
        column: int | None = None,
    ):
        self._stream = stream
        self.lines = [*lines, Line(partial, stream, drawn, given=False)]
        self._rows: list[list[Cell] | None] = [None] * len(self.lines)
        self._style = ""
        self.y, self.x = len(self.lines) - 1, 0
        self._changed: set[int] = set()
        self._given: list[Line] = []
        self._returned = column == 0
        self.x = len(self._row(self.y)) if column is None else column

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def partial(self) -> str:
        """The text of its last line."""
        return self.lines[-1].text

    @property
    def unstripped(self) -> str:
        """The text of its last line, with blanks at its end."""
        return _text(self._row(len(self.lines) - 1), strip=False)

    @property
    def is_returned(self) -> bool:
        """Whether the cursor has been put to the beginning of its line."""
        return self.x == 0 and (self._returned or bool(self._row(self.y)))

    @property
    def is_plain(self) -> bool:
        """Whether the cursor is where plain text would go on."""
        at_bottom = self.y == len(self.lines) - 1
        row = self._row(self.y)
        styled = any(style for _, style in row)
        return at_bottom and not self._style and not styled and self.x in (0, len(row))

    def feed(self, text: str) -> list[Line]:
        """Take a piece; gives the lines that have come to their end, which may still change."""
        self._given = []
        for token in _TOKEN.finditer(text):
            if token["text"]:
                self._write(token["text"])
            elif token["control"]:
                self._control(token["control"])
            elif token["final"]:
                self._sequence(token["final"], token["numbers"])
        for y in self._changed:
            self.lines[y].text = _text(self._rows[y] or [], strip=self.lines[y].drawn)
        self._changed.clear()
        for y, line in enumerate(self.lines):
            line.is_gone = y >= self.y and not line.text.strip()
        return self._given

    def finish(self) -> list[Line]:
        """Its last line, if there is something in it."""
        for line in self.lines:
            line.was_open, line.is_open = line.is_open, False
        last = self.lines[-1]
        last.is_given = True
        return [last] if last.text else []

    # --- inside -----------------------------------------------------------------------------------

    def _row(self, y: int) -> list[Cell]:
        row = self._rows[y]
        if row is None:
            row = self._rows[y] = []
            style = ""
            for token in _TOKEN.finditer(self.lines[y].text):
                if token["text"]:
                    row += _cells(token["text"], style)
                elif token["control"] == "\t":
                    row += [_BLANK] * (_TAB - len(row) % _TAB)
                elif token["final"] == "m":
                    style = _styled(style, token["numbers"])
        return row

    def _write(self, text: str) -> None:
        cells = _cells(text, self._style)
        row = self._row(self.y)
        while 0 < self.x <= len(row) and text and not _width(text[0]):
            before, style = row[self.x - 1]  # which an accent belongs to
            row[self.x - 1] = (before + text[0], style)
            text = text[1:]
        if self._returned or self.x < len(row):
            self.lines[self.y].drawn = True
            self._returned = False
        if self.x > len(row):
            row += [_BLANK] * (self.x - len(row))
        end = self.x + len(cells)
        if 0 < self.x < len(row) and not row[self.x][0]:  # the second half of a wide one
            row[self.x - 1] = _BLANK
        if end < len(row) and not row[end][0]:
            row[end] = _BLANK
        row[self.x : end] = cells
        self.x = end
        self._changed.add(self.y)

    def _control(self, character: str) -> None:
        if character == "\n":
            self._returned = False
            self.x = 0
            self._down()
        elif character == "\r":
            self.x = 0
            self._returned = True
        elif character == "\t":
            self.x = (self.x // _TAB + 1) * _TAB
        else:
            self.x = max(0, self.x - 1)

    def _down(self) -> None:
        self.y += 1
        if self.y < len(self.lines):
            return
        last = self.lines[-1]
        last.is_given = True
        self._given.append(last)
        self.lines.append(Line("", self._stream, given=False))
        self._rows.append([])
        if len(self.lines) > ROWS:
            if 0 in self._changed:
                self.lines[0].text = _text(self._rows[0] or [], strip=self.lines[0].drawn)
            self._changed = {y - 1 for y in self._changed if y}
            self.lines[0].is_open = self.lines[0].is_gone = False
            del self.lines[0], self._rows[0]
            self.y -= 1

    def _sequence(self, final: str, numbers: str) -> None:
        first = numbers.partition(";")[0]
        count = min(int(first or 0), MAX_COLUMNS)
        if final == "m":
            self._style = _styled(self._style, numbers)
        elif final in "AF":
            self.y = max(0, self.y - max(1, count))
        elif final in "BE":
            self.y = min(len(self.lines) - 1, self.y + max(1, count))
        elif final == "C":
            self.x = min(MAX_COLUMNS, self.x + max(1, count))
        elif final == "D":
            self.x = max(0, self.x - max(1, count))
        elif final == "G":
            self.x = max(1, count) - 1
        else:
            self._erase(final, count)
        if final in "EF":
            self.x = 0

    def _erase(self, final: str, count: int) -> None:
        row, x = self._row(self.y), self.x
        before = len(row)
        if final == "J":
            if count == 0:  # the whole of the screen would be more than what was drawn
                del row[x:]
                for y in range(self.y + 1, len(self.lines)):
                    self._row(y).clear()
                    self._changed.add(y)
        elif final == "K" and count == 0:
            del row[x:]
        elif final == "K" and count == 1:
            row[: x + 1] = [_BLANK] * min(len(row), x + 1)
        elif final == "K" and count == 2:
            row.clear()
        elif final == "P":
            del row[x : x + max(1, count)]
        elif final == "X":
            end = min(len(row), x + max(1, count))
            row[x:end] = [_BLANK] * (end - x)
        elif final == "@" and x < len(row):
            row[x:x] = [_BLANK] * max(1, count)
        if before:
            self.lines[self.y].drawn = True
            self._changed.add(self.y)


def _cells(text: str, style: str) -> list[Cell]:
    if _NARROW.fullmatch(text):
        return list(zip(text, itertools.repeat(style), strict=False))
    cells: list[Cell] = []
    for character in text:
        width = _width(character)
        if width:
            cells.append((character, style))
        elif cells:
            cells[-1] = (cells[-1][0] + character, cells[-1][1])
        if width == 2:
            cells.append(("", style))
    return cells


@functools.lru_cache(4096)
def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _text(row: list[Cell], *, strip: bool) -> str:
    end = len(row)
    while strip and end and row[end - 1] == _BLANK:
        end -= 1
    parts = []
    for style, cells in itertools.groupby(row[:end], key=_style_of):
        text = "".join([character for character, _ in cells])
        parts.append(f"\x1b[{style}m{text}\x1b[0m" if style else text)
    return "".join(parts)


def _style_of(cell: Cell) -> str:
    return cell[1]


_KINDS = {
    **dict.fromkeys((*range(30, 39), *range(90, 98)), "colour"),
    **dict.fromkeys((*range(40, 49), *range(100, 108)), "background"),
    **dict.fromkeys((1, 2), "weight"),
    **{3: "italic", 4: "underline", 5: "blink", 7: "reverse", 8: "hidden", 9: "strike"},
}
_ENDS = {
    **{39: "colour", 49: "background", 22: "weight", 23: "italic", 24: "underline"},
    **{25: "blink", 27: "reverse", 28: "hidden", 29: "strike"},
}


@functools.lru_cache(1024)
def _styled(style: str, numbers: str) -> str:
    """A style with others on top, each kind of which counts once."""
    kinds: dict[str, str] = {}
    codes = iter(f"{style};{numbers or 0}".lstrip(";").split(";"))
    for code in codes:
        number = int(code or 0)
        if number == 0:
            kinds.clear()
        elif number in (38, 48):  # one of 256 or more colours
            how = next(codes, "")
            rest = itertools.islice(codes, 3 if how == "2" else 1)
            kinds[_KINDS[number]] = ";".join((code, how, *rest))
        elif number in _KINDS:
            kinds[_KINDS[number]] = code
        elif number in _ENDS:
            kinds.pop(_ENDS[number], None)
    return ";".join(kinds.values())
