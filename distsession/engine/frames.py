"""Where another thread is, as its frames say, when it is safe to ask.

While ``torch.compile`` translates a function, a look from another thread at the frames of its
thread may end the process with SIGSEGV: the object of a frame is not what it should be. That was
seen with torch 2.13 and Python 3.11, once in some twenty thousand looks, and never while what was
translated runs. Dynamo has a lock of its own meanwhile, by which that is known.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["compile_lock", "innermost", "outward"]

_holds = False
"""Whether a look has dynamo's lock at this moment."""


def compile_lock() -> Any:
    """The lock that dynamo has while it translates a function; None if it was not imported."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


def innermost(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None where there is no such thread, or while it compiles.

    Args:
        thread: Its identifier, as of ``threading.Thread.ident``.
    """
    global _holds
    lock = compile_lock()
    if lock is None:
        return sys._current_frames().get(thread)
    if not lock.acquire(blocking=False):
        return None
    _holds = True
    try:
        return sys._current_frames().get(thread)
    finally:
        _holds = False
        lock.release()


def outward(frame: object) -> Iterator[FrameType]:
    """A frame, the one that has called it, and so on.

    Of a thread that goes on meanwhile, what comes next may be no frame at all: with Python 3.11 it
    was once a variable of the thread's, where another frame had taken the place. It ends there.
    """
    while isinstance(frame, FrameType):
        yield frame
        frame = frame.f_back


def _free_in_child() -> None:
    """A process that is forked in the midst of a look has no thread that would let go."""
    global _holds
    if _holds:
        _holds = False
        compile_lock()._at_fork_reinit()


os.register_at_fork(after_in_child=_free_in_child)
