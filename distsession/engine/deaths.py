"""What is left of a rank that dies: the line that its main thread was at.

A signal that Python can catch on its way (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) makes
``faulthandler`` write the Python stack, to a file of its own: children of the rank crash on
stderr. Of everything else (SIGKILL, ``os._exit``) only what was written down before is left, in a
page of memory that the rank shares with its agent. The rank's output thread, which wakes twenty
times a second anyway, keeps the line of the main thread there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from distsession.engine import frames
from distsession.engine.failure import is_own_file, is_user_code, line_name
from distsession.engine.listeners import RequestListener, name_of
from distsession.protocol.board import Region
from distsession.protocol.messages import Request

__all__ = [
    "DeathRecord",
    "LastLine",
    "catch_faults",
    "fault_signal",
    "make_memory",
    "read_fault",
    "read_memory",
]

MEMORY_BYTES = 512
_LONGEST_STACK = 12
_NOTHING, _BEGUN, _SEEN, _EXITING, _TERMINATED = b"\0", b"b", b"s", b"e", b"t"
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class DeathRecord:
    """What is known of the end of a rank.

    Attributes:
        place: The innermost line of user code, such as ``"In[3] line 4"``; empty if not known.
        runs: The cell or function that ran, whether its line is known or not.
        is_certain: It ended there, rather than that it was seen there some time before.
        is_idle: Nothing ran.
        is_terminated: It has received SIGTERM.
        stack: The Python stack, innermost line first.
    """

    place: str = ""
    runs: str = ""
    is_certain: bool = False
    is_idle: bool = False
    is_terminated: bool = False
    stack: tuple[str, ...] = ()


def make_memory() -> mmap.mmap:
    """Memory that a process shares with those that it forks; it has no descriptor and no file."""
    return mmap.mmap(-1, MEMORY_BYTES)


class LastLine(RequestListener):
    """A rank's hand on that memory.

    Args:
        memory: From :func:`make_memory`, before the fork.
    """

    def __init__(self, memory: mmap.mmap):
        self._memory = memory
        self._region: Region | None = None
        self._main = threading.main_thread().ident or 0
        self._runs = False
        self._exit = os._exit
        self.place = ""
        """The line of the present request that was seen last; empty if none was."""

    def share(self, region: Region) -> None:
        """Note the line on the board, too, where others see it while this process lives."""
        self._region = region
        region.set_last_line("")

    def install(self) -> None:
        """Let ``os._exit`` say from where it was called."""
        process = os.getpid()

        def _exit(status: int) -> NoReturn:
            place = _place_of(sys._getframe(1))
            if place and os.getpid() == process:
                self._write(_EXITING, place)
            self._exit(status)

        os._exit = _exit

    def uninstall(self) -> None:
        """In a forked process, whose end is no death of the rank."""
        os._exit = self._exit
        self._region = None
        self.update = _do_nothing  # type: ignore[method-assign]

    def begin_request(self, request: Request) -> None:
        self._write(_BEGUN, name_of(request))
        self.place = ""
        self._runs = True

    def end_request(self, request: Request) -> None:
        self._runs = False
        self._clear()

    def update(self) -> None:
        """From another thread, now and then: note where the main thread is."""
        if not self._runs:
            return
        place = _place_of(frames.innermost(self._main))
        if place:
            self.place = place
            self._write(_SEEN, place)
            if not self._runs:  # the request has ended meanwhile
                self._clear()

    def note_terminated(self, frame: FrameType | None) -> None:
        """SIGTERM has come, at this frame."""
        self._write(_TERMINATED, _place_of(frame) if self._runs else "")

    def _write(self, kind: bytes, text: str) -> None:
        data = kind + text.encode("utf-8", "replace")[: MEMORY_BYTES - 2] + b"\0"
        self._memory[: len(data)] = data
        if self._region is not None:
            self._region.set_last_line(text)

    def _clear(self) -> None:
        self._memory[:1] = _NOTHING
        if self._region is not None:
            self._region.set_last_line("")


def _do_nothing() -> None:
    pass


def _place_of(frame: FrameType | None) -> str:
    for each in frames.outward(frame):
        name = each.f_code.co_filename
        if is_user_code(name):
            return line_name(name, each.f_lineno)
    return ""


def read_memory(memory: mmap.mmap) -> DeathRecord:
    """By the agent: what a rank that has ended left in its memory."""
    data = memory[:MEMORY_BYTES]
    kind, text = data[:1], data[1:].partition(b"\0")[0].decode("utf-8", "replace")
    if kind == _BEGUN:
        return DeathRecord(runs=text)
    if kind == _NOTHING:
        return DeathRecord(is_idle=True)
    return DeathRecord(
        place=text, is_certain=kind in (_EXITING, _TERMINATED), is_terminated=kind == _TERMINATED
    )


# --- crashes --------------------------------------------------------------------------------------


def catch_faults(path: str) -> Callable[[], None]:
    """Have the Python stack written to a file when this process crashes.

    Args:
        path: Of the file.

    Returns:
        What a forked process calls, which crashes on its stderr.
    """
    file = None
    with contextlib.suppress(OSError):
        file = open(path, "wb", buffering=0)
    faulthandler.enable(2 if file is None else file)

    def crash_on_stderr() -> None:
        faulthandler.enable(2)
        if file is not None:  # or Python, with all its warnings, would say that it was left open
            file.close()

    return crash_on_stderr


def read_fault(text: str) -> DeathRecord | None:
    """By the agent: what ``faulthandler`` wrote last; None if that is nothing of use.

    It can crash itself, at a thread that runs on meanwhile, and has then written its first line.
    """
    _, found, text = text.rpartition("Fatal Python error: ")
    if not found:
        return None
    threads: list[list[tuple[str, int, str]]] = []
    current: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if line.startswith(("Current thread 0x", "Thread 0x")):
            threads.append([])
            if line.startswith("Current"):
                current = threads[-1]
        elif threads and (match := _FRAME.fullmatch(line)):
            threads[-1].append((match[1], int(match[2]), match[3]))
    if not any(threads):
        return None
    # The last one is the oldest: the main thread, which may have called what crashed elsewhere.
    for lines in (current, *threads[-1:]):
        place = next((line_name(f, n) for f, n, _ in lines if is_user_code(f)), "")
        if place:
            return DeathRecord(place=place, is_certain=True, stack=_shown(lines))
    return DeathRecord(is_certain=True, stack=_shown(current))


_FAULTS = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Aborted": signal.SIGABRT,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,  # up to Python 3.13
    "Illegal instruction": signal.SIGILL,
}
"""What ``faulthandler`` calls the signals that it catches."""


def fault_signal(text: str) -> int:
    """By the agent: the signal that ``faulthandler`` wrote of last; 0 if it wrote of none.

    The system may name another, that of a crash of ``faulthandler`` itself.
    """
    _, found, text = text.rpartition("Fatal Python error: ")
    return _FAULTS.get(text.partition("\n")[0].strip(), 0) if found else 0


def _shown(frames: list[tuple[str, int, str]]) -> tuple[str, ...]:
    shown: list[str] = []
    for filename, number, name in frames:
        if is_own_file(filename) and shown:
            break  # from here on it is how user code is called
        shown.append(f'File "{filename}", line {number}, in {name}')
    return tuple(shown[:_LONGEST_STACK])
