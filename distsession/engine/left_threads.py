"""Threads beside the main one, which go on while it waits or once it has ended its part of a run.

Such a thread may still call what other ranks wait for: it sends, sets a key, or saves a checkpoint.
One that waits for work does not, nor one that runs nothing but code of a library. Once the rank
has ended its part, nor does one that was there before the run, or a thread that is kept for ever
would keep every later deadlock from being seen.
"""

from __future__ import annotations

import os
import threading
import weakref

import torch.distributed as dist

from distsession.engine import frames
from distsession.engine.failure import is_user_code
from distsession.engine.listeners import RequestListener, is_run
from distsession.protocol.messages import Request

__all__ = ["LeftThreads"]

_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep


class LeftThreads(RequestListener):
    """Tells whether threads go on that the last run has started.

    Args:
        own: The names of threads that are not the user's.
    """

    def __init__(self, own: tuple[str, ...]):
        self._own = own
        self._before: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def begin_request(self, request: Request) -> None:
        if is_run(request):
            self._before = weakref.WeakSet(self._at_work())

    def are_at_work(self) -> bool:
        """From another thread, while the main thread runs nothing."""
        return any(thread not in self._before for thread in self._at_work())

    def any_at_work(self) -> bool:
        """From another thread, while the main thread waits: whether another one does something."""
        if self._at_work():
            return True
        known = {thread.ident for thread in threading.enumerate()}
        return any(_runs_code_of_a_user(n) for n in frames.threads() - known)

    def _at_work(self) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread is not threading.main_thread()
            and thread.name not in self._own
            and (isinstance(thread, threading.Timer) or _is_at_work(thread))
        ]


def _is_at_work(thread: threading.Thread) -> bool:
    return thread.is_alive() and _runs_code_of_a_user(thread.ident or 0)


def _runs_code_of_a_user(ident: int) -> bool:
    innermost = frames.innermost(ident)
    if innermost is None:  # it compiles
        return True
    files = (frame.f_code.co_filename for frame in frames.outward(innermost))
    return any(is_user_code(file) or file.startswith(_DISTRIBUTED) for file in files)
