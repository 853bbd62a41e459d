"""Colours of tracebacks, where the front end has them, and what colours text in a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["OTHER_ESCAPES", "PLAIN", "SGR", "Colors", "sgr", "without_escapes"]

SGR = re.compile(r"\x1b\[([\d;]*)m")
OTHER_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_ANY_ESCAPE = re.compile(f"{SGR.pattern}|{OTHER_ESCAPES.pattern}")

Paint = Callable[[str], str]


def sgr(code: int) -> Paint:
    """Colours text by an escape sequence."""
    return lambda text: f"\x1b[{code}m{text}\x1b[39m" if text else text


def _as_it_is(text: str) -> str:
    return text


@dataclass(frozen=True)
class Colors:
    """How the parts of a traceback are coloured.

    Attributes:
        name: The class of an error.
        place: Where a frame is, and the number of its line.
        source: A line of code.
    """

    name: Paint = _as_it_is
    place: Paint = _as_it_is
    source: Paint = _as_it_is


PLAIN = Colors()
"""None."""


def without_escapes(text: str) -> str:
    """Text without its escape sequences."""
    return _ANY_ESCAPE.sub("", text)
