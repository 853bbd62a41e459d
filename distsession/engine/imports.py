"""Which imports take a rank's user code long, so that they can be said to be worth preloading.

The rank's output thread, which wakes twenty times a second anyway, looks now and then whether the
main thread is in an import. So nothing is put into Python's import system: code that looks at
loaders, specs or tracebacks finds all as it is, and what is imported already costs nothing.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from types import FrameType

from distsession.engine import frames
from distsession.engine.listeners import RequestListener, is_run
from distsession.engine.preload import LATER_IMPORTS
from distsession.protocol.messages import Request

__all__ = ["LONG_S", "ImportWatch"]

LONG_S = 5.0
"""Seconds from which on an import is worth a word."""
LOOK_S = 0.2
"""Seconds between two looks."""

_FIND_AND_LOAD = "<frozen importlib._bootstrap>", "_find_and_load"
"""What Python runs for each import of a module that is not there yet."""
_FOLDERS = tuple(
    {sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class ImportWatch(RequestListener):
    """Notes for how long the main thread has been in imports while a request ran.

    Of imports within an import only the outermost counts: the one that user code, or a library that
    was loaded already, has asked for.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._runs = False
        self._looked_at = 0.0
        self._seconds: dict[str, float] = {}

    def begin_request(self, request: Request) -> None:
        self._seconds = {}
        self._looked_at = time.monotonic()
        self._runs = is_run(request)

    def end_code(self, request: Request, error: BaseException | None) -> None:
        self._runs = False

    def update(self) -> None:
        """From another thread, now and then."""
        began, now = self._looked_at, time.monotonic()
        if not self._runs or now - began < LOOK_S:
            return
        self._looked_at, seconds = now, self._seconds
        if name := _imported(frames.innermost(self._main)):
            # An import that holds the interpreter's lock lets nobody look until it is through.
            seconds[name] = seconds.get(name, 0.0) + now - began

    def long(self) -> tuple[tuple[str, float], ...]:
        """What took the request long, and how long.

        Without files that their user may edit, and what agents import by themselves.
        """
        return tuple(
            (name, seconds)
            for name, seconds in list(self._seconds.items())
            if seconds >= LONG_S and name not in LATER_IMPORTS and _is_installed(name)
        )


def _imported(frame: FrameType | None) -> str:
    """The module that is being imported where a thread is; empty if it imports none."""
    outermost = None
    for each in frames.outward(frame):
        code = each.f_code
        if (code.co_filename, code.co_name) == _FIND_AND_LOAD:
            outermost = each
    return "" if outermost is None else str(outermost.f_locals.get("name", ""))


def _is_installed(name: str) -> bool:
    """Whether a module is one of Python's own, or of an installed package."""
    file = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
    return isinstance(file, str) and (
        file.startswith(_FOLDERS)
        or any(f"{os.sep}{part}{os.sep}" in file for part in ("site-packages", "dist-packages"))
    )
