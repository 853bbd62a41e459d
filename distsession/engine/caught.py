"""Where code has caught what interrupted it."""

from __future__ import annotations

import dis
import sys
import threading
from types import CodeType
from typing import Any

from distsession.engine.failure import line_name
from distsession.engine.frames import without_gc

__all__ = ["caught_text"]


def caught_text(error: BaseException) -> str:
    """What code of the main thread has done with an error that was raised in it.

    From another thread.

    Args:
        error: It is not on its way any more.
    """
    found = error.__traceback__
    if found is None:
        return ""
    code = found.tb_frame.f_code  # the last one that it came to
    line = _handler_line(code, found.tb_lasti) or found.tb_lineno
    does = "is handling" if _is_handled(error) else "caught"
    return f"its code {does} the interrupt at {line_name(code.co_filename, line)}"


def _handler_line(code: CodeType, at: int) -> int:
    """The line at which code goes on after an error at one of its instructions; 0 if unknown."""
    parse: Any = getattr(dis, "_parse_exception_table", None)
    for entry in () if parse is None else parse(code):
        if entry.start <= at < entry.end:
            # What begins a handler has no line, or that of what it is for.
            behind = (line for _, end, line in code.co_lines() if end > entry.target + 2 and line)
            return next(behind, 0)
    return 0


def _is_handled(error: BaseException) -> bool:
    """Whether the handler that has caught it has not come to its end."""
    with without_gc():  # up to Python 3.11.4 a collection would wait for its own thread
        current: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    part = current[1] if isinstance(current, tuple) else current
    while part is not None and part is not error:
        part = part.__context__
    return part is error
