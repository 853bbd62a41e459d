"""The connections of a zmq socket on TCP, of which strangers may open as many as they like.

zmq keeps each that says nothing for the time that a handshake has, and lets nobody count them. But
it tells of each by a monitor, and of each message by which connection it has come.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from distsession.protocol.waiting_room import WAITING_MAX

__all__ = ["HANDSHAKE_TIMEOUT_S", "LinkConnections"]

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that one who has connected has to show the session's key."""
EACH_TWICE = 2
"""A host looks whether the port is open, and connects then."""
EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
)


class LinkConnections:
    """Follows the connections of a socket, for the one thread that uses it.

    Args:
        context: Of the socket.
        link: The socket, which is not bound yet and connected to nobody. It takes in messages of
            the session's members only.
        expected: How many members may come at once. So many more who have connected and brought no
            message are kept, and ``WAITING_MAX``; then the one that waits longest is shut.

    Attributes:
        events: Is readable when :meth:`look` has something to do.
        lost_at: When the connection was closed by which the last message had come, by the monotonic
            clock; None while it is there, or another member has come.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        link: zmq.Socket[bytes],
        expected: int,
    ):
        link.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_TIMEOUT_S))
        self._link = link
        self._waiting_max = WAITING_MAX + EACH_TWICE * expected
        place = f"inproc://connections-{id(self)}"
        link.monitor(place, EVENTS)
        self.events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.events.rcvhwm = 0  # zmq's own thread is not to wait for this one
        self.events.connect(place)
        self._open: set[int] = set()
        self._waiting: dict[int, None] = {}
        """Those that have come and brought no message, in the order in which they have come."""
        self._last: int | None = None
        self.lost_at: float | None = None
        self._port = 0

    def bind(self, place: str) -> int:
        """Have the socket listen at a port of its own, and give it."""
        self._port = self._link.bind_to_random_port(place)
        return self._port

    def look(self) -> None:
        """Take in what zmq tells of connections."""
        while self.events.poll(0):
            said = recv_monitor_message(self.events)
            event, descriptor = said["event"], int(said["value"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._last = self.lost_at = None
            elif event == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                self._waiting.pop(descriptor, None)
                if self._last in (None, descriptor) and self.lost_at is None:
                    self.lost_at = time.monotonic()
            else:
                self._open.add(descriptor)
                if event == zmq.EVENT_ACCEPTED:
                    self._waiting[descriptor] = None
        while len(self._waiting) > self._waiting_max:
            descriptor = next(iter(self._waiting))
            del self._waiting[descriptor]
            self._shut(descriptor)

    def note(self, frame: zmq.Frame) -> None:
        """A message has come from a member.

        Args:
            frame: Any of it.
        """
        self.look()  # that its connection was made has been told before
        descriptor = int(frame.get(zmq.SRCFD))
        self._waiting.pop(descriptor, None)
        if descriptor in self._open:
            self._last, self.lost_at = descriptor, None

    def close(self) -> None:
        """Follow them no longer."""
        self._link.disable_monitor()
        self.events.close(linger=0)

    def _shut(self, descriptor: int) -> None:
        """End a connection that zmq has, which then closes it."""
        with contextlib.suppress(OSError):  # it has closed it just now
            copy = os.dup(descriptor)
            try:
                end = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                raise
            with end:
                # The number may be that of something else by now, which has another place.
                is_of_tcp = end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()
                if is_of_tcp and end.getsockname()[1] == self._port:
                    end.shutdown(socket.SHUT_RDWR)
