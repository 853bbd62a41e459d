"""Where those wait who have connected to a TCP port, until they have said something.

Anybody may connect there, and as often as he likes. One who is silent costs a descriptor and no
thread, waits for some seconds at most, and makes room for others when there are too many. All
listeners on TCP take their connections from here.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import time
from collections.abc import Callable

from distsession.protocol import unix_socket

__all__ = ["WaitingRoom", "is_own_connection"]

log = logging.getLogger(__name__)

WAITING_MAX = 64
"""So many wait at once at most. One more, and the one that has waited longest is given up."""
WAIT_S = 10.0
"""Seconds that one who has connected may take to say the first byte."""
ACCEPTS_AT_ONCE = 16
"""So many are taken between two looks at whether those who wait have said something."""
RETRY_S = 0.05
"""Seconds until connections are taken again where the system had no room for one more."""
ESTABLISHED = "01"


class WaitingRoom:
    """Takes connections until the listener is shut down.

    Args:
        listener: Listens on TCP.
        let_in: Called with each connection on which something has come, which it is not to keep
            waiting for long; the connection is its own from then on.
        may_enter: Whether one is let in at all, asked when something has come.
        on_drop: Called for each that is given up.
    """

    def __init__(
        self,
        listener: socket.socket,
        let_in: Callable[[socket.socket], None],
        may_enter: Callable[[socket.socket], bool] = lambda connection: True,
        on_drop: Callable[[], None] = lambda: None,
    ):
        self._listener, self._let_in = listener, let_in
        self._may_enter, self._on_drop = may_enter, on_drop
        self._waiting: dict[int, tuple[float, socket.socket]] = {}
        """Until when, in the order in which they have come."""
        self._poll = select.poll()

    @property
    def count(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Take connections until this says so, and the listener was shut down."""
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)
        try:
            while not is_over():
                ready = [descriptor for descriptor, _ in self._poll.poll(self._wait_ms())]
                for descriptor in ready:
                    if descriptor in self._waiting:
                        self._enter(descriptor)
                self._drop_late()
                if self._listener.fileno() in ready and not is_over():
                    self._take()
        finally:
            for descriptor in list(self._waiting):
                self._remove(descriptor).close()

    def _wait_ms(self) -> float | None:
        """Until the one that has waited longest is given up."""
        until = next(iter(self._waiting.values()), (None, None))[0]
        return None if until is None else 1000 * max(0.0, until - time.monotonic()) + 1

    def _take(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._is_shut():
                    return
                log.warning("no connection can be taken: %s", error)
                time.sleep(RETRY_S)  # until a descriptor is free
                return
            connection.setblocking(True)
            if len(self._waiting) >= WAITING_MAX:
                self._drop(next(iter(self._waiting)))
            self._waiting[connection.fileno()] = time.monotonic() + WAIT_S, connection
            self._poll.register(connection, select.POLLIN)

    def _is_shut(self) -> bool:
        return not self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

    def _enter(self, descriptor: int) -> None:
        connection = self._remove(descriptor)
        if self._may_enter(connection):
            self._let_in(connection)
        else:
            connection.close()
            self._on_drop()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for descriptor, (until, _) in list(self._waiting.items()):
            if until > now:
                return
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        connection = self._remove(descriptor)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        self._on_drop()

    def _remove(self, descriptor: int) -> socket.socket:
        self._poll.unregister(descriptor)
        return self._waiting.pop(descriptor)[1]


def is_own_connection(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end, on the loopback interface of this host.

    The system lists which user has each connection. Where it has no such list, nobody can know. A
    client asks once the server has sent something, and so has accepted the connection.
    """
    try:
        (address, port), (own_address, own_port) = (
            connection.getpeername(),
            connection.getsockname(),
        )
    except (OSError, ValueError):  # it is gone
        return False
    theirs, ours = _as_listed(address, port), _as_listed(own_address, own_port)
    is_listed = False
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # of IPv6, one that speaks IPv4
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            is_listed = True
            for line in lines:
                if theirs not in line:
                    continue
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                if local.endswith(theirs) and remote.endswith(ours) and state == ESTABLISHED:
                    # Before the other end has accepted it, it belongs to nobody, and says 0.
                    return inode != "0" and unix_socket.is_own(int(uid))
    return not is_listed


def _as_listed(address: str, port: int) -> str:
    """As the system lists an address: its number as this processor has it in its memory."""
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{port:04X}"
