"""Who takes in what the ranks of this host answer.

That is the channel's own thread, unless somebody who has sent a request does so while waiting for
its answers: to be woken by another thread would take longer than all else of a short call. There is
never more than one who receives.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator

from distsession.protocol.message_listener import MessageListener

__all__ = ["Receiving"]

CLOSE_TIMEOUT_S = 2.0
"""Seconds that who receives has to let go when the session is closed."""


class Receiving:
    """The right to receive from a listener, which one thread has at a time.

    Args:
        listener: From which is received.

    Attributes:
        descriptor: Is readable, for the channel's thread, when there is something to receive and
            nobody else waits for it.
    """

    def __init__(self, listener: MessageListener):
        self._listener = listener
        self._right = threading.Lock()
        self._owner = 0
        """The thread that has taken it from the channel's."""
        self._is_waiting = self._is_woken = False
        self._epoll = select.epoll()
        self._epoll.register(listener.descriptor, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()

    # --- the channel's thread ---------------------------------------------------------------------

    def receive(self) -> list[list[bytes]]:
        """What has come; nothing while another thread receives."""
        if not self._right.acquire(blocking=False):
            return []
        try:
            return [frames for _, frames in self._listener.receive()]
        finally:
            self._right.release()

    # --- who waits for answers --------------------------------------------------------------------

    def take(self) -> bool:
        """Receive from here on in this thread, until :meth:`give_back`; False if another does."""
        if not self._right.acquire(blocking=False):
            return False
        if self._epoll.closed:
            self._right.release()
            return False
        self._owner, self._is_woken = threading.get_ident(), False
        self._epoll.modify(self._listener.descriptor, 0)
        return True

    def give_back(self) -> None:
        """Leave it to the channel's thread again, if this thread has taken it."""
        if self._owner != threading.get_ident():
            return
        self._owner = 0
        self._epoll.modify(self._listener.descriptor, select.EPOLLIN)
        self._right.release()

    def receive_until(
        self, is_over: Callable[[], bool], deadline: float
    ) -> Iterator[list[list[bytes]]]:
        """Messages as they come, if this thread has taken the right to receive them.

        Args:
            is_over: Says that no more are wanted.
            deadline: By ``time.monotonic()``. A :meth:`wake` since it was taken ends it as well.
        """
        if self._owner != threading.get_ident():
            return
        try:
            while True:
                self._is_waiting = True  # before it is asked, so that no change is missed
                left = deadline - time.monotonic()
                if self._is_woken or left <= 0 or is_over():
                    return
                found = self._listener.receive(left)
                self._is_waiting = False
                yield [frames for _, frames in found]
        finally:
            self._is_waiting = False

    def wake(self) -> None:
        """From any thread, or a handler of a signal: who receives has something else to do."""
        self._is_woken = True
        if self._is_waiting:
            self._listener.wake()

    def close(self) -> None:
        """Wait until nobody receives any more; those who do were woken and find it over."""
        self.wake()
        if self._right.acquire(timeout=CLOSE_TIMEOUT_S):
            self._epoll.close()
            self._right.release()
