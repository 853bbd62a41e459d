"""Where another thread is, as its frames say, when it is safe to ask.

Two looks from another thread may end the process with SIGSEGV:

- With Python 3.11, one during which garbage is collected. Python makes an object for each frame
  that is asked for. That may start a collection, and its finalizers may let the other thread go on.
  The frame may be over when they are done; the object then points to freed memory. Seen in a rank
  that was stopped; a script of 40 lines shows it within seconds. From Python 3.12 on nothing is
  collected there.
- One while ``torch.compile`` translates a function of that thread: seen with torch 2.13 and Python
  3.11, once in some twenty thousand looks, and never while what was translated runs. Dynamo has a
  lock of its own meanwhile, by which that is known.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["compile_lock", "innermost", "outward", "threads", "without_gc"]

_holds = False
"""Whether a look has dynamo's lock at this moment."""
_has_stopped_gc = False
"""Whether a look has switched garbage collection off at this moment."""


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
        return _current_frames().get(thread)
    if not lock.acquire(blocking=False):
        return None
    _holds = True
    try:
        return _current_frames().get(thread)
    finally:
        _holds = False
        lock.release()


def threads() -> set[int]:
    """The identifiers of all threads that run Python code, also of those that C code started."""
    return {*_current_frames()}


def _current_frames() -> dict[int, FrameType]:
    with without_gc():  # up to Python 3.11.4 a collection would wait for its own thread
        return sys._current_frames()


def outward(frame: FrameType | None) -> list[FrameType]:
    """A frame, the one that has called it, and so on to the outermost one."""
    found = []
    with without_gc():
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return found


@contextmanager
def without_gc() -> Iterator[None]:
    """Collect no garbage for some microseconds.

    What another thread switches just then may be undone.
    """
    global _has_stopped_gc
    if not gc.isenabled():
        yield
        return
    _has_stopped_gc = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _has_stopped_gc = False


def _free_in_child() -> None:
    """A process that is forked in the midst of a look has no thread that would let go."""
    global _holds, _has_stopped_gc
    if _holds:
        _holds = False
        compile_lock()._at_fork_reinit()
    if _has_stopped_gc:
        _has_stopped_gc = False
        gc.enable()


os.register_at_fork(after_in_child=_free_in_child)
