"""An event that works on whatever is raised within it.

``threading.Event`` takes its lock in Python code. An error that the handler of a signal raises just
behind that leaves it locked, and the next thread that sets the event or waits for it hangs.
"""

from __future__ import annotations

import threading
from contextlib import suppress

__all__ = ["Gate"]


class Gate:
    """Is closed at first. Its lock is held while it is closed, and taken by C code alone."""

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        """From any thread: let the threads that wait go on."""
        with suppress(RuntimeError):  # it is open
            self._closed.release()

    def close(self) -> None:
        """From here on, threads wait again."""
        self._closed.acquire(blocking=False)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is open, for so long at most; says whether it is."""
        is_open = self._closed.acquire(timeout=-1 if seconds is None else seconds)
        if is_open:
            self.open()
        return is_open
