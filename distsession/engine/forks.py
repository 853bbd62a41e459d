"""What a process that is forked from a rank has of the rank: its memory, and nothing that acts.

``multiprocessing``, workers of a ``DataLoader`` and ``os.fork()`` copy the rank with one thread
of it. The copy has to be what a child of a plain Python program is. So around each fork SIGTERM is
held back: Python drops what comes between the fork and the child's first line, and
``Pool.terminate`` waits for ever for a child that missed it. And the child puts away whatever of
ours would act in it: handlers of signals, exit functions, the board that others read, and the
streams' wait for a thread that it has not.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import mmap
import os
import re
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch.multiprocessing import start_processes

from distsession.engine import cause
from distsession.engine.failure import is_own, is_user_code, message_of
from distsession.engine.process import forget_inherited_finalizers
from distsession.errors import SessionStateError

__all__ = ["Forks", "launch_error", "make_private", "spawn_hint"]

_MAP_FIXED = 0x10  # <sys/mman.h>
_INTERRUPTED = 130
"""The exit code of shells for what SIGINT has ended."""


def spawn_hint(error: BaseException) -> str:
    """What to do where ``torch.multiprocessing.spawn`` was given a function of a cell."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is start_processes.__code__:
            function, method = frame.f_locals.get("fn"), frame.f_locals.get("start_method")
            if method != "fork" and getattr(function, "__module__", "") == "__main__":
                name = getattr(function, "__name__", "function")
                return (
                    f"A spawned process cannot import {name} from a cell. The ranks are processes "
                    f"already: call {name}(rank, ...) itself, or keep it in a .py file."
                )
    return ""


LAUNCHERS = {
    ("accelerate.launchers", "notebook_launcher"): ("notebook_launcher", "function"),
    ("accelerate.launchers", "debug_launcher"): ("debug_launcher", "function"),
    ("ignite.distributed.utils", "spawn"): ("ignite.distributed", "fn"),
    ("torch.distributed.launcher.api", "launch_agent"): ("elastic_launch", "entrypoint"),
    ("torch.multiprocessing.spawn", "start_processes"): ("torch.multiprocessing", "fn"),
}
"""Where processes are started that are to be ranks: how that is called, and what it calls the
function that they run."""
_CANNOT_MEET = re.compile(
    r"EADDRINUSE|this process was forked from rank \d+|default one is already initialized"
)
"""The last is ignite's, which looks itself whether there is a group."""
_NOTHING_SAID = "ChildFailedError"
"""torch's elastic agent raises it without what its processes have said."""


def launch_error(error: BaseException) -> BaseException | None:
    """What to raise instead where code on a rank starts ranks of its own that cannot meet.

    They want the port of all other ranks of the host, or were forked from a rank with its group.
    """
    parts = list(cause.chain(error))
    found = next((each for part in parts if (each := _launcher(part)) is not None), None)
    if found is None:
        return None
    launcher, function = found
    texts = [message_of(part) for part in parts]
    is_silent = any(type(part).__name__ == _NOTHING_SAID for part in parts)
    is_refused = is_silent and launcher in ("notebook_launcher", "debug_launcher")
    if not is_refused and not any(_CANNOT_MEET.search(text) for text in texts):
        return None
    name = getattr(function, "__name__", "the function")
    own_port = "" if launcher.endswith("_launcher") else (
        ", or start processes by 'spawn' with a MASTER_PORT of their own"
    )  # fmt: skip
    explained = SessionStateError(
        f"{launcher} starts processes to train with, and the ranks are these processes already: "
        f"call {name}(...) itself{own_port}."
    )
    return explained.with_traceback(_users_part(error.__traceback__))


def _launcher(error: BaseException) -> tuple[str, Any] | None:
    """Which function started processes, as a traceback shows, and what they were to run."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        key = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if key in LAUNCHERS:
            title, name = LAUNCHERS[key]
            return title, frame.f_locals.get(name)
    return None


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback up to the innermost one of the user's code."""
    each = list(traceback.walk_tb(frames))
    count = max(
        (n + 1 for n, (f, _) in enumerate(each) if is_user_code(f.f_code.co_filename)), default=0
    )
    part: TracebackType | None = None
    for frame, line in reversed(each[:count]):
        part = TracebackType(part, frame, frame.f_lasti, line)
    return part


class Forks:
    """Makes plain children of whatever is forked from this process.

    Args:
        handlers: For each signal, the handler that is the rank's own, and a plain process's.
        in_child: What else the child does first.
    """

    def __init__(
        self,
        handlers: Mapping[int, tuple[Any, Any]],
        in_child: Sequence[Callable[[], None]],
    ):
        self._handlers = handlers
        self._in_child = in_child
        self._held_back = threading.local()
        self.is_child = False
        """This is no longer the rank, but a process that was forked from it."""

    def install(self) -> None:
        """From here on, once in the life of a process.

        What is registered last runs first before a fork and last after it, so SIGTERM is held back
        while the hooks of other libraries run, too.
        """
        os.register_at_fork(
            before=self._before, after_in_parent=self._after, after_in_child=self._become_child
        )

    def _before(self) -> None:
        if self.is_child:
            return
        # In two steps: handlers of Python's may run, and raise, within each of these calls.
        self._held_back.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after(self) -> None:
        mask = getattr(self._held_back, "mask", None)
        if mask is not None:
            self._held_back.mask = None
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become_child(self) -> None:
        if self.is_child:  # what is forked from a child is the child's own affair
            return
        self.is_child = True
        for number, (ours, plain) in self._handlers.items():
            if signal.getsignal(number) == ours:
                signal.signal(number, plain)
        for action in (*self._in_child, _forget_exit_functions, _forget_event_loop):
            with contextlib.suppress(Exception):
                action()
        self._after()

    def end_child(self, error: BaseException | None = None) -> None:
        """End this process if it is a child: it has come to the end of the rank's code.

        A child that ends by itself, as those of multiprocessing do, never comes here.

        Args:
            error: What it raised, if it did.
        """
        if not self.is_child:
            return
        code = 1
        try:
            code = _exit_code(error)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def make_private(memory: memoryview, descriptor: int) -> Callable[[], None]:
    """What a child calls so that nothing that it writes to a shared memory is seen by others.

    Args:
        memory: The memory, mapped from its first byte on.
        descriptor: Of its file.
    """
    address, size = ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory.nbytes
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED

    def become_private() -> None:
        map_memory(address, size, access, flags, descriptor, 0)

    return become_private


def _forget_exit_functions() -> None:
    """Those of the rank, and of the agent before it, are theirs; the child may add its own.

    multiprocessing does the same in its children.
    """
    atexit._clear()
    forget_inherited_finalizers()
    if getattr(weakref.finalize, "_registered_with_atexit", False):
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]


def _forget_event_loop() -> None:
    """The rank's loop waits in an epoll set, which the child would share with it."""
    if sys.version_info < (3, 12):  # since then Python does this
        asyncio.set_event_loop_policy(None)


def _exit_code(error: BaseException | None) -> int:
    """What Python would exit with, having shown the error as it would."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    frames = error.__traceback__
    while frames is not None and is_own(frames.tb_frame):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
