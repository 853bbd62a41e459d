"""Takes the message streams of who connects to a unix socket, each known by a name.

The first message of each is its name. Messages for it leave from whichever thread makes them, and
one thread receives. None of them waits: what the system does not take at once is sent by the thread
that receives, when there is room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from dataclasses import dataclass

from distsession.protocol import message_stream, unix_socket
from distsession.protocol.message_stream import MessageStream, Packed

__all__ = ["MessageListener", "Peer"]

log = logging.getLogger(__name__)

BACKLOG = 4096
_ONE = (1).to_bytes(8, sys.byteorder)


@dataclass(eq=False)
class Peer:
    """Who has connected.

    Attributes:
        stream: To it.
        name: What it calls itself; empty until it has said so.
        watched: What the system is asked of its descriptor.
    """

    stream: MessageStream
    name: bytes = b""
    watched: int = select.EPOLLIN


class MessageListener:
    """Listens until it is closed.

    Args:
        path: Of the socket, in a folder that only this user can open. What a process that was
            killed has left there is removed.
        is_asked: Who connects asks first how its messages travel (see ``message_stream``).

    Attributes:
        descriptor: Is readable when there is something to do for :meth:`receive`.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, path: str, *, is_asked: bool = False):
        self._path, self._is_asked = path, is_asked
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = unix_socket.listen(path, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        # As a file, since the number of one that is closed may be another's by the next write.
        self._woken = open(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+b", buffering=0)
        self._epoll.register(self._woken, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()
        self._lock = threading.Lock()
        self._asking: dict[int, socket.socket] = {}
        """Those that have not been told yet how messages travel."""
        self._peers: dict[int, Peer] = {}
        self._named: dict[bytes, Peer] = {}
        self._kept: dict[bytes, list[Packed]] = {}
        """Messages for names under which nobody has connected yet."""
        self._is_closed = False

    # --- sending: any thread ----------------------------------------------------------------------

    def find(self, name: bytes) -> Peer | None:
        """Who has connected and not gone again."""
        return self._named.get(name)

    def send(self, name: bytes, message: Packed, *, keep: bool = False) -> bool:
        """Send a message.

        Args:
            name: Whom to.
            message: What.
            keep: If nobody of this name has connected, send it when somebody does.

        Returns:
            False if nobody of this name has connected, or has gone again.
        """
        with self._lock:
            if self._is_closed:
                return False
            if (peer := self._named.get(name)) is not None:
                self._send(peer, message)
            elif keep:
                self._kept.setdefault(name, []).append(message)
            return peer is not None

    def forget(self, name: bytes) -> None:
        """Throw away what is kept for a name: nobody will connect under it."""
        with self._lock:
            self._kept.pop(name, None)

    def _send(self, peer: Peer, message: Packed) -> None:
        try:
            is_done = peer.stream.send(message)
        except OSError:  # the thread that receives sees its end
            return
        if not is_done or peer.watched != select.EPOLLIN:
            self._watch(peer, is_done)

    @property
    def holds_something(self) -> bool:
        """Something was sent that the system has not taken yet."""
        with self._lock:
            return any(peer.stream.holds_something for peer in self._peers.values())

    def _watch(self, peer: Peer, is_done: bool) -> None:
        """Be told when there is room, unless all is sent."""
        wanted = select.EPOLLIN if is_done else select.EPOLLIN | select.EPOLLOUT
        if wanted != peer.watched and peer.stream.fileno() in self._peers:
            peer.watched = wanted
            self._epoll.modify(peer.stream.fileno(), wanted)

    # --- receiving: one thread --------------------------------------------------------------------

    def receive(self, timeout_s: float = 0.0) -> list[tuple[bytes, list[bytes]]]:
        """What has come, and from whom; more may be there afterwards.

        Args:
            timeout_s: How long to wait for something, or for :meth:`wake`.
        """
        found: list[tuple[bytes, list[bytes]]] = []
        for descriptor, events in self._epoll.poll(timeout_s):
            if self._is_closed:
                break
            if (peer := self._peers.get(descriptor)) is not None:
                self._receive(peer, events, found)
            elif descriptor == self._woken.fileno():
                self._woken.read(8)
            elif descriptor in self._asking:
                self._answer(self._asking.pop(descriptor), found)
            else:
                self._accept()
        return found

    def wake(self) -> None:
        """From any thread: end a wait in :meth:`receive`, or the next one."""
        with contextlib.suppress(ValueError):  # it was closed
            self._woken.write(_ONE)

    def _receive(self, peer: Peer, events: int, found: list[tuple[bytes, list[bytes]]]) -> None:
        if events & select.EPOLLOUT:
            with self._lock, contextlib.suppress(OSError):
                self._watch(peer, peer.stream.flush())
        for frames in peer.stream.receive():
            if peer.name:
                found.append((peer.name, frames))
            elif frames[0]:
                self._name(peer, frames[0])
        if peer.stream.is_over:
            self._drop(peer)

    def _name(self, peer: Peer, name: bytes) -> None:
        with self._lock:
            peer.name = name
            self._named[name] = peer
            for message in self._kept.pop(name, ()):
                self._send(peer, message)

    def _drop(self, peer: Peer) -> None:
        with self._lock:
            if self._is_closed or self._peers.pop(peer.stream.fileno(), None) is None:
                return
            if self._named.get(peer.name) is peer:  # another may have come under its name
                del self._named[peer.name]
            self._epoll.unregister(peer.stream)
            peer.stream.close()

    def _accept(self) -> None:
        try:
            connection = unix_socket.accept(self._listener)
        except OSError as error:
            log.debug("no connection can be taken: %s", error)
            return
        if self._is_asked:
            self._asking[connection.fileno()] = connection
            self._epoll.register(connection, select.EPOLLIN)
        else:
            self._add(MessageStream(connection))

    def _answer(self, connection: socket.socket, found: list[tuple[bytes, list[bytes]]]) -> None:
        """Somebody asks how its messages travel, or hands over a stream."""
        self._epoll.unregister(connection)
        try:
            stream = message_stream.accept(connection, socket.MSG_DONTWAIT)
        except OSError as error:
            log.warning("a stream of messages is refused: %s", error)
            connection.close()
        else:
            self._receive(self._add(stream), 0, found)  # who had it may have read something

    def _add(self, stream: MessageStream) -> Peer:
        peer = Peer(stream)
        with self._lock:
            self._peers[stream.fileno()] = peer
        self._epoll.register(stream, select.EPOLLIN)
        return peer

    # --- the end ----------------------------------------------------------------------------------

    def close(self, linger_ms: int = 0) -> None:
        """Close all; nothing is sent or received any more. Harmless when repeated.

        Args:
            linger_ms: How long what has been sent may take to leave this process.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            deadline = time.monotonic() + linger_ms / 1000
            for peer in self._peers.values():
                _leave(peer.stream, deadline)
            for connection in (*self._asking.values(), self._listener):
                connection.close()
            self._named.clear()
            self._kept.clear()
            self._epoll.close()
            self._woken.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def _leave(stream: MessageStream, deadline: float) -> None:
    """Close a stream, when all has been sent or the time is up."""
    with contextlib.suppress(OSError):
        while not stream.flush() and (left := deadline - time.monotonic()) > 0:
            stream.wait(left)
    stream.close()
