"""How a broken program is written down, and what the first line of its error must name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Program", "stops", "swallows"]


@dataclass(frozen=True)
class Program:
    """A broken one.

    Attributes:
        code: Of the cell.
        what: A regular expression for the operation, or the error, in the first line.
        line: The line of the cell in it, or one of several that it may be.
        who: A regular expression for the rank at fault.
        is_stopped: It never ends by itself.
        is_caught: Its code catches the error, so that a remark says it.
    """

    code: str
    what: str = "all_reduce"
    line: int | tuple[int, ...] = 1
    who: str = r"ranks? (\d-)?2"
    is_stopped: bool = False
    is_caught: bool = False


def stops(code: str, line: int | tuple[int, ...], what: str = "", who: str = r"rank 2") -> Program:
    """One that somebody has to stop."""
    return Program(code, what, line, who, is_stopped=True)


def swallows(code: str, line: int | tuple[int, ...], what: str = "all_reduce") -> Program:
    """One that catches its own error."""
    return Program(code, what, line, is_caught=True)
