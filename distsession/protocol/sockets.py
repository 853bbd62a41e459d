"""Whole messages through a zmq socket, which is a unix socket in a session's folder.

As pyzmq's ``send_multipart`` and ``recv_multipart``, which take each flag and option through an
enum: that costs more than to send and to receive a small message.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import zmq

from distsession.protocol import unix_socket

__all__ = ["POLLIN", "receive", "send"]

log = logging.getLogger(__name__)

POLLIN = int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)
SNDMORE = int(zmq.SNDMORE)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of the next message; what another user has sent is dropped.

    Raises:
        zmq.Again: None is there.
    """
    while True:
        frame = socket.recv(NOBLOCK, copy=False)
        sender = _sender(frame)
        frames = [frame.bytes]
        while frame.more:
            frame = socket.recv(copy=False)
            frames.append(frame.bytes)
        if sender is None or unix_socket.is_own(sender):
            return frames
        log.warning("dropped a message of a process of another user (uid %d)", sender)


def _sender(frame: zmq.Frame) -> int | None:
    """The user whose process has sent it, by what the system says; None within this process."""
    try:
        address = frame.get("Peer-Address")
    except zmq.ZMQError:
        return None
    _, uid, _, _ = str(address).rsplit(":", 3)  # of a unix socket: a name, and who is there
    return int(uid)


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
