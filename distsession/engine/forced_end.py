"""Ending code that catches whatever interrupts it.

An exception that is raised there is caught as well, so it is raised again on the line behind, where
nothing may be left that catches it: in the next round of a loop, or in the caller. Python's own
means for that is a trace function, which may raise on each line. Python takes a trace function away
that has raised. The exception itself puts it back, as it is let go where it was caught.

It must not be raised in the midst of our modules and Python's own: one that is raised as soon as a
lock is taken in Python code (``Condition.__enter__``) leaves it locked for ever, and the
next thread that takes it hangs. An exception that another thread sets for the main one may arrive
anywhere. So the other thread asks Python for a pending call, which the main thread makes as soon as
it is out of C code. That call sets the trace function, and a handler of SIGINT that raises only
what a call within C code holds up. Elsewhere it would part a line: between the two writes of a
``print`` Python names the code that prints as what a signal came to.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ctypes
import dataclasses
import math
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["ForcedEnd", "end", "force", "on_signal"]

LOOK_S = 0.05
"""Seconds for which code has to go on between two looks at where it is."""
HELD_UP_LOOKS = 3
"""Times that it has to be seen at one instruction to count as held up there, within C code. On a
busy machine one look may last long, so time alone does not tell."""

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_OWN = ("<frozen", os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)
_MAIN_THREAD = threading.main_thread()

# Those of ``signal`` are others on a rank, and wrap what user code sets.
_get_handler, _set_handler = _signal.getsignal, _signal.signal

_lock = threading.Lock()
_is_begun = False
_before: Any = signal.default_int_handler
"""The handler of SIGINT in the place of which there is ours."""
_seen: _Seen | None = None
"""Where a signal last found the main thread."""


@dataclasses.dataclass
class _Seen:
    """A place of the main thread.

    Attributes:
        frame: Its innermost one.
        instruction: In that.
        looks: How often it was seen there.
        left: When the last look was over.
    """

    frame: FrameType
    instruction: int
    looks: int = 0
    left: float = -math.inf


class ForcedEnd(BaseException):
    """Raised again where it was caught. It is no KeyboardInterrupt, which code may well catch."""

    def __init__(self) -> None:
        super().__init__()
        self._repeat()

    def __del__(self) -> None:
        self._repeat()

    def _repeat(self) -> None:
        if threading.get_ident() == _MAIN_THREAD.ident:
            _raise_on_next_line(sys._getframe(1))


def force(is_running: Callable[[], bool]) -> bool:
    """From any thread: raise it in the main thread once that is out of C code.

    A SIGINT that follows gets it out of what sleeps there.

    Args:
        is_running: Whether the code that is to end still runs.

    Returns:
        The same.
    """
    global _is_begun
    with _lock:
        if not is_running():
            return False
        _is_begun = True
        ctypes.pythonapi.Py_AddPendingCall(_call, None)  # where there are too many, one is enough
    return True


def end() -> None:
    """In the main thread, when it is noted that what was to end has ended.

    Nothing is raised from here on.
    """
    global _is_begun, _seen
    with _lock:
        was_begun, _is_begun = _is_begun, False
    if was_begun:
        sys.settrace(None)
        _seen = None
        if _get_handler(signal.SIGINT) == on_signal:
            _set_handler(signal.SIGINT, _before)


def _on_call(_: Any) -> int:
    """Called in the main thread, between two instructions of whatever it runs."""
    global _before
    if _is_begun:
        handler = _get_handler(signal.SIGINT)
        if handler is not None and handler != on_signal:  # it is Python's, and can be put back
            _before = handler
            _set_handler(signal.SIGINT, on_signal)
        _raise_on_next_line(sys._getframe(1))
    return 0


_call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_on_call)


def on_signal(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT meanwhile."""
    global _seen
    if not _is_begun:  # user code has put it back that had found it
        if callable(_before):
            _before(number, frame)
        return
    if frame is None:
        return
    if _seen is None or _seen.frame is not frame or _seen.instruction != frame.f_lasti:
        _seen = _Seen(frame, frame.f_lasti)
    if time.monotonic() - _seen.left > LOOK_S:
        _seen.looks += 1
    if _seen.looks < HELD_UP_LOOKS:
        _raise_on_next_line(frame)
        _seen.left = time.monotonic()
        return
    _seen = None
    raise ForcedEnd


def _raise_on_next_line(frame: FrameType | None) -> None:
    """In the main thread: raise it on the next line of code in which it may be raised.

    Args:
        frame: Where to begin; its callers follow.
    """
    if not _is_begun:
        return
    while frame is not None:
        if _may_end(frame):
            frame.f_trace = _on_event
        frame = frame.f_back
    sys.settrace(_on_event)


def _on_event(frame: FrameType, event: str, _: Any) -> Any:
    if not _is_begun or not _may_end(frame):
        return None
    if event == "line":
        raise ForcedEnd
    return _on_event


def _may_end(frame: FrameType) -> bool:
    """Whether it may be raised in a frame: not where Python's own modules, and ours, hold locks."""
    filename = frame.f_code.co_filename
    if filename.startswith("<"):  # it may be generated, as the methods of a dataclass are
        if frame.f_globals.get("__name__", "").startswith("namedtuple_"):
            return frame.f_back is not None and _may_end(frame.f_back)
        filename = frame.f_globals.get("__file__") or filename
    if filename.startswith(_OWN):
        return False
    return not filename.startswith(_STDLIB) or any(folder in filename for folder in _PACKAGES)
