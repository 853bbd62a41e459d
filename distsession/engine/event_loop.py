"""The event loop of a rank's main thread, which runs between requests if anything needs it.

ipyparallel's engine lives in it, and what user code has left there. To enter and to leave it for
each request costs more than a small request itself, and most ranks have nothing in it. Until
something is, the main thread waits for requests by a plain ``poll``.
"""

from __future__ import annotations

import asyncio
import os
import select
from typing import Any

__all__ = ["RankLoop"]


class RankLoop(asyncio.SelectorEventLoop):
    """An event loop that knows whether it was ever given anything to do."""

    def __init__(self) -> None:
        self.is_used = False
        """Somebody has given it something: from here on, only the loop itself may wait."""
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._polled = -1
        super().__init__()

    def wait_outside(self, descriptor: int, timeout_ms: int | None = None) -> bool:
        """In the main thread: wait until a descriptor is readable, or :meth:`wake` is called.

        Args:
            descriptor: Of what may come.
            timeout_ms: How long at most.

        Returns:
            Whether it is readable, and nobody has called :meth:`wake`.
        """
        if descriptor != self._polled:  # the first time, and when another kernel has come
            self._poll = select.poll()
            for each in (self._waker, descriptor):
                self._poll.register(each, select.POLLIN)
            self._polled = descriptor
        ready = self._poll.poll(timeout_ms)
        if not ready:
            return False
        if len(ready) == 1 and ready[0][0] == descriptor:
            return True
        os.eventfd_read(self._waker)
        return False

    def wake(self) -> None:
        """From any thread: end a wait outside of the loop, the present one or the next."""
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        """See :class:`asyncio.BaseEventLoop`."""
        if not self.is_closed():
            os.close(self._waker)
        super().close()

    # --- by what it can be given something --------------------------------------------------------

    def call_soon(self, *args: Any, **keys: Any) -> asyncio.Handle:  # type: ignore[override]
        """See :class:`asyncio.BaseEventLoop`."""
        self.is_used = True
        return super().call_soon(*args, **keys)

    def call_at(self, *args: Any, **keys: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        """See :class:`asyncio.BaseEventLoop`; ``call_later`` comes here, too."""
        self.is_used = True
        return super().call_at(*args, **keys)

    def call_soon_threadsafe(self, *args: Any, **keys: Any) -> asyncio.Handle:  # type: ignore[override]
        """See :class:`asyncio.BaseEventLoop`."""
        self.is_used = True
        handle = super().call_soon_threadsafe(*args, **keys)
        self.wake()
        return handle

    def add_reader(self, *args: Any) -> None:  # type: ignore[override]
        """See :class:`asyncio.AbstractEventLoop`."""
        self.is_used = True
        super().add_reader(*args)

    def add_writer(self, *args: Any) -> None:  # type: ignore[override]
        """See :class:`asyncio.AbstractEventLoop`."""
        self.is_used = True
        super().add_writer(*args)
