"""Pieces of text put together into lines, and what a progress bar's line says."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Bar", "Lines", "parse_bar"]

_BAR = re.compile(
    r"(?P<label>.*?)(?P<percent>\d{1,3})%\|[^|]*\|\s*"
    r"(?P<done>[\d.]+\w?)/(?P<total>[\d.]+\w?)\s*(?P<rest>\[(?P<elapsed>[\d:]+)<?.*\])?"
)
"""A bar of tqdm with its default format: ``train:  45%|####   | 45/100 [00:01<00:02, 30it/s]``."""


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
    found = _BAR.fullmatch(line.strip())
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
