"""Writes that no interrupt parts, so that each print is whole.

``print`` writes its text and the end of its line one after the other. An error that a signal raises
within the first write, or before the second, would lose what comes after it; where C code writes,
as to plain files, Python raises only once the print is over. So a signal that comes within a write
is held, and comes again at the end of it.

When it then comes before the next write of the same print has really begun, Python names the code
that prints as what it came to (3.11 to 3.14), just as after the print. So one that came to the
user's code is let pass and comes again, too: to that write, or to the code after the print.
"""

from __future__ import annotations

import functools
import signal
from _thread import interrupt_main
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from distsession.engine.failure import is_user_code

__all__ = ["COME_AGAIN", "hold", "is_held", "whole"]

F = TypeVar("F", bound=Callable[..., Any])

COME_AGAIN = functools.partial(map, interrupt_main, (signal.SIGINT,))
"""Gives what lets SIGINT come again when it is looped over.

Python looks for signals at the end of a call and of a round of a loop, and would find it too soon
there. It does not where a loop asks for an item; the function has to return in that first round.
"""

_is_held = False


def is_held() -> bool:
    """Whether an interrupt waits for the end of a write."""
    return _is_held


def hold(frame: FrameType | None) -> bool:
    """Hold an interrupt if it came within a write; whether it did.

    Args:
        frame: What it came to in the main thread.
    """
    global _is_held
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        if frame.f_code is _code:
            _is_held = True
            return True
        frame = frame.f_back
    return False


def whole(write: F) -> F:
    """Have a function be done before an interrupt is raised that comes within it."""

    @functools.wraps(write)
    def held(*args: Any) -> Any:
        global _is_held
        try:
            return write(*args)
        finally:
            if _is_held:
                _is_held = False
                for _ in COME_AGAIN():
                    break

    return held  # type: ignore[return-value]


_code = whole(len).__code__
"""That of all functions which are whole."""
