"""Sockets between the kernel and the ranks of its own node with no other thread in between.

Whatever goes through zmq is handed to a thread of zmq's on either side. For a call and its answer
these are four more changes of threads for each rank, a large part of what a small call takes. A
rank that waits for a request needs no queue before it. So it has one more unix socket: a request
comes on it straight from the thread that makes it, and the answer goes back on it.

zmq has the rest: what is large, what ranks of other nodes send and get, and a request to a rank
that has others to answer first, which has to wait somewhere. So there is one request at most on
such a socket, and none overtakes another: what follows through zmq was sent when it was there.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

from distsession.protocol.direct import LARGEST, direct_path, open_socket

__all__ = ["DirectSockets"]


class DirectSockets:
    """The kernel's ends.

    One thread receives. Any other may send, under a lock of the caller's, which is held to drop a
    socket, too.

    Args:
        folder: The session's private folder.
        epoch: Of the kernel that owns the session.
    """

    def __init__(self, folder: str, epoch: int):
        self._listener = open_socket()
        self._listener.bind(direct_path(folder, epoch))
        self._listener.listen(4096)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, tuple[socket.socket, bytes]] = {}
        self._sockets: dict[bytes, socket.socket] = {}
        self._memory = memoryview(bytearray(LARGEST))

    @property
    def descriptor(self) -> int:
        """Is readable where something has come."""
        return self._epoll.fileno()

    def send(self, name: bytes, data: bytes) -> bool:
        """Send a process a message; False if it has to go another way."""
        connection = self._sockets.get(name)
        if connection is None or len(data) > LARGEST:
            return False
        try:
            connection.send(data, socket.MSG_DONTWAIT)
        except OSError:  # it has ended, or there is no room
            return False
        return True

    def receive(self) -> Iterator[tuple[bytes, memoryview]]:
        """All that has come, and from whom, to be read before the next; nothing of who is gone."""
        while events := self._epoll.poll(0):
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    connection, _ = self._listener.accept()
                    self._connections[connection.fileno()] = connection, b""
                    self._epoll.register(connection, select.EPOLLIN)
                    continue
                connection, name = self._connections[descriptor]
                try:
                    count = connection.recv_into(self._memory, 0, socket.MSG_DONTWAIT)
                except ConnectionError:
                    count = 0
                if name:
                    yield name, self._memory[:count]
                elif count:  # the first that it says is who it is
                    name = bytes(self._memory[:count])
                    self._connections[descriptor] = connection, name
                    self._sockets[name] = connection
                else:
                    self._close(connection)

    def drop(self, name: bytes) -> None:
        """A process is gone."""
        connection = self._sockets.pop(name, None)
        if connection is not None:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._epoll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()

    def close(self) -> None:
        """When nobody receives any more."""
        for connection, _ in [*self._connections.values(), (self._listener, b"")]:
            connection.close()
        self._connections.clear()
        self._sockets.clear()
        self._epoll.close()
