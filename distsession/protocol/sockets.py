"""Whole messages through a zmq socket.

As pyzmq's ``send_multipart`` and ``recv_multipart``, which take each flag and option through an
enum: that costs more than to send and to receive a small message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

__all__ = ["POLLIN", "receive", "send"]

POLLIN = int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of the next message.

    Raises:
        zmq.Again: None is there.
    """
    frame = socket.recv(NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.bytes)
    return frames


def send(
    socket: zmq.Socket[bytes], frames: Sequence[Any], *, copy: bool = True, wait: bool = True
) -> None:
    """Send frames as one message.

    Args:
        socket: Where.
        frames: At least one.
        copy: Large ones are sent from a copy, not from where they are.
        wait: For as long as the socket says, until there is room.

    Raises:
        zmq.Again: There is none.
        zmq.ZMQError: The message cannot be sent; nothing of it was.
    """
    flags = 0 if wait else NOBLOCK
    for frame in frames[:-1]:
        socket.send(frame, flags | SNDMORE, copy=copy)
    socket.send(frames[-1], flags, copy=copy)
