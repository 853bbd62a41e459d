"""Messages of some frames each over a connected socket, of which nobody waits for the other end.

A relay connects to a unix socket and asks how its messages are to travel. The kernel's own socket
says: here, as they are. On another host nobody listens there but the process that leads to the
kernel, and it hands over a :class:`SecureStream` to it, by descriptor. At the kernel's end such a
stream is handed over as well. So a message is encrypted and sent by who has it, and decrypted by
who it is for, and no thread in between has to be woken.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from distsession.protocol.secure_stream import RECORD_MAX_BYTES, SecureStream

__all__ = ["MessageStream", "accept", "connect", "hand_over", "lend"]

HAND_OVER_TIMEOUT_S = 10.0
"""Seconds until who connects has been told how its messages travel."""
DRAIN_TIMEOUT_S = 2.0
"""Seconds that the other host has to take what a process has sent that is gone."""
RECEIVE_BYTES = 256 << 10
FRAMES_MAX = 1 << 20
"""Frames of one message at most. Who announces more sends no messages."""

_PLAIN, _SEALED = b"P", b"S"
_INTRODUCTION_MAX_BYTES = 64 << 10
_COUNT = struct.Struct("<I")


class MessageStream:
    """One end. One thread at a time may send, and another one receive.

    Args:
        connection: Belongs to it from now on.
        stream: By which bytes travel on it; None for as they are.
        lease: Another connection, which is closed with it.

    Attributes:
        is_over: The other end is gone, or has sent what is no message: nothing comes any more.
    """

    def __init__(
        self,
        connection: socket.socket,
        stream: SecureStream | None = None,
        lease: socket.socket | None = None,
    ):
        self._socket, self._stream, self._lease = connection, stream, lease
        self._pieces: deque[memoryview] = deque()
        self._record = memoryview(b"")
        self._in = bytearray()
        self.is_over = False

    def fileno(self) -> int:
        return self._socket.fileno()

    # --- sending ----------------------------------------------------------------------------------

    def post(self, frames: Sequence[Any]) -> None:
        """Have a message sent by the next :meth:`flush`; large frames must stay as they are."""
        views = [_bytes_of(frame) for frame in frames]
        head = struct.pack(f"<I{len(views)}Q", len(views), *map(len, views))
        self._pieces.append(memoryview(head))
        self._pieces.extend(views)

    def flush(self) -> bool:
        """Send as much as the system takes now; False if something is left.

        Raises:
            OSError: The other end is gone.
        """
        while self._record or self._pieces:
            if not self._record:
                self._record = self._next_record()
            try:
                count = self._socket.send(self._record, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._record = self._record[count:]
        return True

    def _next_record(self) -> memoryview:
        """What is sent next: some small pieces together, or a part of a large one."""
        taken: list[memoryview] = []
        room = RECORD_MAX_BYTES
        while room and self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > room:
                self._pieces.appendleft(piece[room:])
                piece = piece[:room]
            taken.append(piece)
            room -= len(piece)
        data = taken[0] if len(taken) == 1 else memoryview(b"".join(taken))
        return data if self._stream is None or not data else self._stream.seal(data)

    @property
    def holds_something(self) -> bool:
        """Something was posted and is not sent yet."""
        return bool(self._record or self._pieces)

    # --- receiving --------------------------------------------------------------------------------

    def receive(self) -> list[list[bytes]]:
        """The messages that are there by now, or the first of many; see ``is_over``."""
        left = RECEIVE_BYTES
        while left > 0 and not self.is_over:
            try:
                data = self._read()
            except BlockingIOError:
                break
            except OSError:
                data = memoryview(b"")
            self.is_over = not data
            self._in += data
            left -= len(data)
        return self._cut()

    def _read(self) -> memoryview:
        """Bytes that have come; none at the end.

        Raises:
            BlockingIOError: Nothing is there.
            OSError: The stream is broken.
        """
        if self._stream is not None:
            return self._stream.receive_now()
        return memoryview(self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT))

    def _cut(self) -> list[list[bytes]]:
        """Take the whole messages out of what has come."""
        messages: list[list[bytes]] = []
        at, end = 0, len(self._in)
        with memoryview(self._in) as here:
            while end - at >= _COUNT.size:
                (count,) = _COUNT.unpack_from(here, at)
                if count > FRAMES_MAX:
                    self.is_over = True
                    break
                head = f"<I{count}Q"
                begin = at + struct.calcsize(head)
                if begin > end:
                    break
                _, *sizes = struct.unpack_from(head, here, at)
                if begin + sum(sizes) > end:
                    break
                at, frames = begin, []
                for size in sizes:
                    frames.append(bytes(here[at : at + size]))
                    at += size
                messages.append(frames)
        del self._in[:at]
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be received, or what is left can be sent."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT if self.holds_something else select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, timeout_s)))

    def close(self) -> None:
        """Close it, also for children of a fork that have it; what was flushed still arrives."""
        for each in (self._socket, self._lease):
            if each is not None:
                _shut(each)
                each.close()


# --- how messages travel --------------------------------------------------------------------------


def connect(path: str) -> MessageStream:
    """Make the stream of a relay.

    Raises:
        OSError: Nobody listens, or the kernel is not reached from there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(HAND_OVER_TIMEOUT_S)
        connection.connect(path)
        connection.sendall(_PLAIN)
        stream = accept(connection)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return stream


def accept(connection: socket.socket, flags: int = 0) -> MessageStream:
    """Take in what the other end says first.

    Args:
        connection: A unix socket. It belongs to the stream if there is one.
        flags: For receiving from it.

    Raises:
        OSError: It has not said it, or is gone.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, _INTRODUCTION_MAX_BYTES, 1, flags)
    if data == _PLAIN:
        return MessageStream(connection)
    if data[:1] != _SEALED or not descriptors:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionError("it does not say how messages travel")
    shared = socket.socket(fileno=descriptors[0])
    try:
        stream = SecureStream.resumed(shared, data[1:])
    except ValueError as error:
        shared.close()
        raise ConnectionError(f"it hands over what is no stream: {error}") from None
    return MessageStream(shared, stream, lease=connection)


def accept_plain(connection: socket.socket) -> None:
    """Tell a relay that its messages travel here, as they are."""
    connection.sendall(_PLAIN)


def hand_over(stream: SecureStream, connection: socket.socket) -> None:
    """Let who is at the other end of a unix socket have a stream, until one of both has ended.

    What a process has sent that is gone still arrives.

    Args:
        stream: Of which this process uses no more. It is closed in the end.
        connection: Is closed in the end.
    """
    try:
        socket.send_fds(connection, [_SEALED + stream.suspended()], [stream.fileno()])
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(stream.fileno(), 0)  # that it is broken is told without being asked for
        if all(descriptor != stream.fileno() for descriptor, _ in poll.poll()):
            stream.drain(DRAIN_TIMEOUT_S)
    except OSError:
        pass
    finally:
        stream.close()
        connection.close()


def lend(stream: SecureStream, connection: socket.socket) -> None:
    """The same, for a relay, which asks first."""
    try:
        connection.settimeout(HAND_OVER_TIMEOUT_S)
        asked = connection.recv(1)
        connection.settimeout(None)
    except OSError:
        asked = b""
    if asked == _PLAIN:
        hand_over(stream, connection)
    else:
        stream.close()
        connection.close()


def _bytes_of(frame: Any) -> memoryview:
    view = memoryview(frame)
    return view.cast("B") if view.nbytes else memoryview(b"")  # what is empty cannot be cast


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not connected any more
        connection.shutdown(socket.SHUT_RDWR)
