"""Messages of some frames each over a connected socket; sending waits for nobody.

Within a host such a stream is a unix socket in a private folder of the session. Nothing else stands
between both ends, for to wake a thread that does the sending takes longer than to send.

Nor does anything between hosts. A relay connects to a unix socket and asks how its messages are to
travel. The kernel's own socket says: here, as they are. On another host nobody listens there but
the process that leads to the kernel, and that hands a :class:`SecureStream` over to the relay, by
its descriptor. At the kernel's end the stream is handed over as well. So a message is encrypted and
sent by who has it, and decrypted by who it is for.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from distsession.protocol import unix_socket
from distsession.protocol.secure_stream import RECORD_MAX_BYTES, SecureStream

__all__ = ["MessageStream", "Packed", "accept", "connect", "ended", "hand_over", "lend", "packed"]

HAND_OVER_TIMEOUT_S = 10.0
"""Seconds until who connects has been told how its messages travel."""
DRAIN_TIMEOUT_S = 2.0
"""Seconds that the other host has to take what a process has sent that is gone."""
RECEIVE_BYTES = 256 << 10
SMALL_BYTES = 16 << 10
"""Bytes of a message that is rather copied than sent from where it is."""
FRAMES_MAX = 1 << 20
"""Frames of one message at most. Who announces more sends no messages."""

_PLAIN, _SEALED = b"P", b"S"
_INTRODUCTION_MAX_BYTES = 64 << 10
_ONE = struct.Struct("<IQ")
"""Before a message: how many frames it has, and how long each is."""
NOTHING = memoryview(b"")
MSG_DONTWAIT = int(socket.MSG_DONTWAIT)
SEND_FLAGS = MSG_DONTWAIT | int(socket.MSG_NOSIGNAL)
"""That the other end is gone is an error, and no signal: code of the user may let that one end the
process."""

Packed = Sequence[memoryview]
"""A message as it is sent."""


def packed(frames: Sequence[Any]) -> Packed:
    """Make a message of one frame or more; those that are large must stay as they are."""
    if len(frames) == 1 and type(frame := frames[0]) is bytes and len(frame) < SMALL_BYTES:
        return (memoryview(_ONE.pack(1, len(frame)) + frame),)  # as most are
    views = [_bytes_of(frame) for frame in frames]
    head = struct.pack(f"<I{len(views)}Q", len(views), *map(len, views))
    if sum(map(len, views)) < SMALL_BYTES:
        return (memoryview(b"".join((head, *views))),)
    return (memoryview(head), *filter(len, views))


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
        self._record = NOTHING
        self._in = bytearray()
        self.is_over = False

    def fileno(self) -> int:
        return self._socket.fileno()

    # --- sending ----------------------------------------------------------------------------------

    def post(self, message: Packed) -> None:
        """Have a message sent by the next :meth:`flush`."""
        self._pieces.extend(message)

    def send(self, message: Packed) -> bool:
        """Post a message and flush, which takes one step where nothing is in the way."""
        if len(message) == 1 and not (self._stream or self._record or self._pieces):
            try:
                count = self._socket.send(message[0], SEND_FLAGS)
            except BlockingIOError:
                count = 0
            if count == len(message[0]):
                return True
            self._record = message[0][count:]
            return False
        self.post(message)
        return self.flush()

    def flush(self) -> bool:
        """Send as much as the system takes now; False if something is left.

        Raises:
            OSError: The other end is gone.
        """
        while self._record or self._pieces:
            record = self._record or self._next_record()
            try:
                count = self._socket.send(record, SEND_FLAGS)
            except BlockingIOError:
                self._record = record
                return False
            self._record = record[count:] if count < len(record) else NOTHING
        return True

    def _next_record(self) -> memoryview:
        """What is sent next: some small pieces together, or a part of a large one."""
        if len(self._pieces) == 1 and len(self._pieces[0]) <= RECORD_MAX_BYTES:
            data = self._pieces.popleft()
        else:
            data = memoryview(b"".join(self._take(RECORD_MAX_BYTES)))
        return data if self._stream is None else self._stream.seal(data)

    def _take(self, room: int) -> Iterator[memoryview]:
        while room and self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > room:
                self._pieces.appendleft(piece[room:])
                piece = piece[:room]
            room -= len(piece)
            yield piece

    @property
    def holds_something(self) -> bool:
        """Something was posted and is not sent yet."""
        return bool(self._record or self._pieces)

    # --- receiving --------------------------------------------------------------------------------

    def receive(self) -> list[list[bytes]]:
        """The messages that are there by now, or the first of many; see ``is_over``."""
        try:
            if self._stream is None:
                data = self._socket.recv(RECEIVE_BYTES, MSG_DONTWAIT)
                if not self._in and len(data) >= _ONE.size:
                    count, size = _ONE.unpack_from(data)
                    if count == 1 and len(data) == _ONE.size + size:  # as most come
                        return [[data[_ONE.size :]]]
                self._in += data
                self.is_over = not data
            else:
                self._read_records(self._stream)
        except BlockingIOError:
            return []
        except OSError:
            self.is_over = True
        return self._cut()

    def _read_records(self, stream: SecureStream) -> None:
        """Take in what has come.

        Raises:
            OSError: The other end is gone, or the stream is broken.
        """
        with contextlib.suppress(BlockingIOError):
            stream.read_more()
        while stream.has_record():
            self._in += stream.receive()

    def _cut(self) -> list[list[bytes]]:
        """Take the whole messages out of what has come."""
        messages: list[list[bytes]] = []
        here, at, end = self._in, 0, len(self._in)
        while end - at >= _ONE.size:
            count, size = _ONE.unpack_from(here, at)
            if count == 1:  # as most have
                begin, sizes = at + _ONE.size, (size,)
            elif 0 < count <= FRAMES_MAX:
                head = f"<I{count}Q"
                begin = at + struct.calcsize(head)
                if begin > end:
                    break
                sizes = struct.unpack_from(head, here, at)[1:]
            else:
                self.is_over = True
                break
            if begin + sum(sizes) > end:
                break
            at, frames = begin, []
            with memoryview(here) as view:
                for size in sizes:
                    frames.append(bytes(view[at : at + size]))
                    at += size
            messages.append(frames)
        del here[:at]
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


def connect(path: str, name: bytes, *, asks: bool = False) -> MessageStream:
    """Connect to who takes messages, under a name.

    Args:
        path: Of its unix socket.
        name: What it knows this process by.
        asks: Be told first how messages travel.

    Raises:
        OSError: Nobody listens, or the kernel is not reached from there.
    """
    connection = unix_socket.connect(path, timeout_s=HAND_OVER_TIMEOUT_S)
    try:
        if asks:
            connection.sendall(_PLAIN)
            stream = _take_over(connection)
        else:
            stream = MessageStream(connection)
        connection.settimeout(None)
        stream.post(packed([name]))
        stream.flush()
    except BaseException:
        connection.close()
        raise
    return stream


def ended() -> MessageStream:
    """One whose other end is gone."""
    connection, other = socket.socketpair()
    other.close()
    stream = MessageStream(connection)
    stream.is_over = True
    return stream


def accept(connection: socket.socket, flags: int = 0) -> MessageStream:
    """Tell who asks that its messages travel here as they are, or take over a stream.

    Args:
        connection: A unix socket. It belongs to the stream if there is one.
        flags: For receiving from it.

    Raises:
        OSError: It has neither asked nor handed over a stream, or is gone.
    """
    stream = _take_over(connection, flags)
    if stream.fileno() == connection.fileno():
        connection.sendall(_PLAIN)
    return stream


def _take_over(connection: socket.socket, flags: int = 0) -> MessageStream:
    """The stream that the other end hands over; else the connection itself."""
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
