"""Whole messages through a connection of ``multiprocessing``, with a deadline.

``recv`` waits for the rest of a message that has begun, and ``send`` for one who does not read. A
process with one thread that serves all must not: a byte from somebody would hold it up for ever.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

__all__ = ["MESSAGE_TIMEOUT_S", "is_over", "read_into", "receive", "receive_bytes", "send"]

MESSAGE_TIMEOUT_S = 15.0
"""Seconds that the rest of a message may take of one who is known. It is long, for a network may be
cut meanwhile, and what is cut for less than that costs nothing."""
MESSAGE_MAX = 64 << 20
"""Bytes of the longest message."""
_HEAD = struct.Struct("!i")  # of multiprocessing.connection, for less than 2 GiB


def receive(connection: Connection, timeout_s: float) -> Any:
    """The next message.

    Raises:
        TimeoutError: Not all of it has come within this time.
        EOFError: The other end is gone.
        OSError: The connection is broken, or what comes is no message.
    """
    return pickle.loads(receive_bytes(connection, timeout_s))


def receive_bytes(connection: Connection, timeout_s: float) -> bytearray:
    """The bytes of the next message, for one who goes on where they cannot be unpickled.

    Raises:
        TimeoutError: Not all of it has come within this time.
        EOFError: The other end is gone.
        OSError: The connection is broken, or what comes is no message.
    """
    deadline = time.monotonic() + timeout_s
    with _end_of(connection) as end:
        head = bytearray(_HEAD.size)
        read_into(end, memoryview(head), deadline)
        (size,) = _HEAD.unpack(head)
        if not 0 <= size <= MESSAGE_MAX:
            raise ConnectionError("what comes is no message")
        data = bytearray(size)
        read_into(end, memoryview(data), deadline)
    return data


def is_over(connection: Connection) -> bool:
    """Whether the other end is gone, and all that it has sent was read."""
    try:
        with _end_of(connection) as end:
            return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_into(end: socket.socket, memory: memoryview, deadline: float) -> None:
    """Read as many bytes as there is room for.

    Args:
        end: Of a connection.
        memory: For the bytes.
        deadline: Until when all of them have to come, by the monotonic clock.

    Raises:
        TimeoutError: They have not.
        EOFError: The other end is gone.
        OSError: The connection is broken.
    """
    while memory:
        _wait(end, select.POLLIN, deadline, "not all of the message has come")
        with contextlib.suppress(BlockingIOError):
            count = end.recv_into(memory, 0, socket.MSG_DONTWAIT)
            if not count:
                raise EOFError
            memory = memory[count:]


def send(connection: Connection, message: Any, timeout_s: float) -> None:
    """Send a message.

    Raises:
        TimeoutError: The other end has not taken all of it within this time.
        OSError: It is gone.
    """
    deadline = time.monotonic() + timeout_s
    data = bytes(ForkingPickler.dumps(message))
    left = memoryview(_HEAD.pack(len(data)) + data)
    with _end_of(connection) as end:
        while left:
            _wait(end, select.POLLOUT, deadline, "it does not take what it is sent")
            with contextlib.suppress(BlockingIOError):
                left = left[end.send(left, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]


@contextlib.contextmanager
def _end_of(connection: Connection) -> Iterator[socket.socket]:
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        yield end


def _wait(end: socket.socket, event: int, deadline: float, late: str) -> None:
    poll = select.poll()
    poll.register(end, event)
    if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError(late)
