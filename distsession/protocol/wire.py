"""The stream between the kernel and the relay of another node: messages, and payloads in chunks.

Everything on the stream is a head of fixed size and what it announces: a message, or some bytes of
a payload. Payloads have numbers (keys) that the kernel gives. A chunk says to which payload it
belongs and where in it, so messages can be sent between the chunks of a large payload, and one
that was given up leaves nothing half sent: whoever has no use for a chunk any more reads over it.

The stream is a unix socket in the session's private folder, which only its user can open. Nothing
but :func:`listen` and :func:`connect` depends on that, and nothing but :func:`link_path` says
where messages cross, which have a connection of their own (see ``message_stream``).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

from distsession.protocol import unix_socket, whole_messages

__all__ = [
    "CHUNK",
    "Cancel",
    "Chunk",
    "Discard",
    "DropRank",
    "Fetch",
    "Fetched",
    "Hand",
    "LinkRanks",
    "Linked",
    "Open",
    "RelayHere",
    "Release",
    "Stored",
    "Wire",
    "connect",
    "link_path",
    "listen",
    "make_node_folder",
    "memory_path",
    "node_folder",
    "socket_path",
]

CHUNK = 4 << 20
"""Bytes of a payload between two looks at whether there is something else to send, or to stop."""

BUFFER = 1 << 20
"""Bytes that the system may hold of what was sent and not read."""

MESSAGE_MAX = 16 << 20

_HEAD = struct.Struct("<BQQQ")
_MESSAGE, _CHUNK = 1, 2


# --- relay to kernel ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RelayHere:
    """The first message on a stream: whose relay this is, and which process."""

    node: int
    pid: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A payload is in the node's memory, or cannot be.

    Attributes:
        refusal: Why its host has no room for it.
        problem: Why its host gives no shared memory at all.
    """

    key: int
    refusal: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Fetched:
    """All of a payload has been sent, or as much of it as there will be."""

    key: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Linked:
    """These ranks take and give payloads through this relay."""

    names: tuple[str, ...]


# --- kernel to relay ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Chunks of a payload follow; answered by ``Stored``."""

    key: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hand:
    """Give a stored payload to ranks, under a number to which their request refers."""

    key: int
    number: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of a payload, whether it is complete or not.

    Attributes:
        reuse: All ranks have taken it, so its memory can take the next one.
    """

    key: int
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send what a rank has handed over; answered by chunks and ``Fetched``."""

    key: int
    sender: str
    number: int
    length: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Send no more of a payload; ``Fetched`` follows all the same."""

    key: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Let go of what a rank has handed over."""

    sender: str
    number: int


@dataclass(frozen=True, slots=True)
class LinkRanks:
    """Take the connections of these ranks; answered by ``Linked``."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropRank:
    """A rank is gone."""

    name: str


# --- the stream -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a payload that come next on the stream."""

    key: int
    at: int
    length: int


class Wire:
    """One end of the stream. Any thread may send; one receives.

    Attributes:
        sent: Bytes of payloads that have been sent.
        received: Bytes of payloads that have been received.
    """

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._socket = connection
        self._lock = threading.Lock()
        self.sent = 0
        self.received = 0

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: The other end is gone.
        """
        data = pickle.dumps(message, protocol=5)
        with self._lock:
            self._socket.sendall(_HEAD.pack(_MESSAGE, 0, 0, len(data)) + data)

    def send_chunk(self, key: int, at: int, data: memoryview) -> None:
        """Send bytes of a payload from memory."""
        with self._lock:
            self._socket.sendall(_HEAD.pack(_CHUNK, key, at, len(data)))
            self._socket.sendall(data)
        self.sent += len(data)

    def send_file(self, key: int, at: int, descriptor: int, count: int) -> None:
        """Send bytes of a payload from a file, of the same place in it."""
        with self._lock:
            self._socket.sendall(_HEAD.pack(_CHUNK, key, at, count))
            end = at + count
            while at < end:
                moved = os.sendfile(self._socket.fileno(), descriptor, at, end - at)
                if not moved:
                    raise ConnectionError("the file is shorter than what was announced of it")
                at += moved
        self.sent += count

    def receive(self, deadline: float | None = None) -> Any:
        """The next message; or a :class:`Chunk`, whose bytes are to be read next.

        Args:
            deadline: Until when all of it has to come, by the monotonic clock; None for ever.

        Raises:
            TimeoutError: It has not.
            OSError: The other end is gone, or sends what is no message.
        """
        head = bytearray(_HEAD.size)
        self._read(memoryview(head), deadline)
        kind, key, at, length = _HEAD.unpack(head)
        if kind == _CHUNK:
            return Chunk(key, at, length)
        if kind != _MESSAGE or length > MESSAGE_MAX:
            raise ConnectionError("what comes on the stream is no message")
        data = bytearray(length)
        self._read(memoryview(data), deadline)
        message = pickle.loads(data)
        if type(message).__module__ != __name__:
            raise ConnectionError(f"a {type(message).__name__} where a message should be")
        return message

    def read_into(self, memory: memoryview) -> None:
        """Read bytes of a chunk."""
        self._read(memory)
        self.received += len(memory)

    def skip(self, count: int) -> None:
        """Read over bytes of a chunk."""
        rest = memoryview(bytearray(min(count, BUFFER)))
        while count:
            self._read(rest[: min(count, len(rest))])
            count -= min(count, len(rest))

    def _read(self, memory: memoryview, deadline: float | None = None) -> None:
        if deadline is not None:
            try:
                whole_messages.read_into(self._socket, memory, deadline)
            except EOFError:
                raise ConnectionError("the stream was closed") from None
            return
        while memory:
            count = self._socket.recv_into(memory)
            if not count:
                raise ConnectionError("the stream was closed")
            memory = memory[count:]

    def close(self) -> None:
        """Close it, also for a thread that waits in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def socket_path(folder: str, name: str, epoch: int) -> str:
    """Where the kernel listens that owns a session, or a relay in its place.

    Args:
        folder: The session's, or a node's.
        name: For what.
        epoch: Which owner: nobody who connects can reach one of those before.
    """
    return os.path.join(folder, f"{name}-{epoch}.sock")


def listen(folder: str, epoch: int = 1) -> socket.socket:
    """Where the relays of a session connect to its kernel."""
    return unix_socket.listen(socket_path(folder, "relay", epoch))


def connect(folder: str, node: int, epoch: int = 1) -> Wire:
    """The stream of a node's relay to the kernel."""
    wire = Wire(unix_socket.connect(socket_path(folder, "relay", epoch)))
    wire.send(RelayHere(node, os.getpid()))
    return wire


def link_path(folder: str, epoch: int = 1) -> str:
    """Where the relays of a session connect to its kernel for messages."""
    return socket_path(folder, "link", epoch)


def node_folder(folder: str, node: int) -> str:
    """Where the sockets are to which the ranks of a node connect: the kernel's, or a relay's."""
    return os.path.join(folder, f"node{node}") if node else folder


def make_node_folder(folder: str, node: int) -> str:
    """Make the folder of a node's sockets, unless it is there."""
    path = node_folder(folder, node)
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def memory_path(folder: str, node: int, epoch: int = 1) -> str:
    """Where the ranks of a node connect that take and give payloads."""
    return socket_path(node_folder(folder, node), "memory", epoch)
