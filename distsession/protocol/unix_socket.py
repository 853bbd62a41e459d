"""Unix sockets of a session: listening, connecting and accepting, with this user alone.

They lie in a folder that only its user can open. Where somebody else could put another folder in
its place, that would not be enough. So both ends ask the system whose process the other one is,
before anything is sent, and nothing that a stranger sends is ever read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import NamedTuple

__all__ = ["Peer", "StrangerError", "accept", "connect", "is_own", "listen", "peer"]

ROOT = 0
_CREDENTIALS = struct.Struct("3i")  # struct ucred of <sys/socket.h>: pid, uid, gid


class StrangerError(PermissionError):
    """The process at the other end of a socket is another user's."""


class Peer(NamedTuple):
    """The process that has connected; at the end that has connected, the one that listens."""

    pid: int
    uid: int
    gid: int


def listen(path: str, *, kind: int = socket.SOCK_STREAM, backlog: int = 128) -> socket.socket:
    """Listen at a path, for this user alone.

    Raises:
        OSError: It cannot listen there.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # nobody can connect yet
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(
    path: str, *, kind: int = socket.SOCK_STREAM, timeout_s: float | None = None
) -> socket.socket:
    """Connect to who listens at a path.

    Args:
        path: Of the socket.
        kind: Of the socket.
        timeout_s: For this, and for what follows on the socket; None for ever.

    Raises:
        StrangerError: It is another user's process.
        OSError: Nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        _refuse_stranger(connection, f"who listens at {path}")
    except BaseException:
        connection.close()
        raise
    return connection


def accept(listener: socket.socket) -> socket.socket:
    """Take one who has connected.

    Raises:
        StrangerError: It is another user's process; its connection is closed.
        OSError: None can be taken.
    """
    connection, _ = listener.accept()
    try:
        _refuse_stranger(connection, "who has connected")
    except BaseException:
        connection.close()
        raise
    return connection


def peer(connection: socket.socket) -> Peer:
    """Who is at the other end, by what the system says.

    Raises:
        OSError: It is not connected.
    """
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(said))


def is_own(uid: int) -> bool:
    """Whether a user is this one, or root, who can do all that this one can."""
    return uid in (ROOT, os.geteuid())


def _refuse_stranger(connection: socket.socket, who: str) -> None:
    found = peer(connection)
    if not is_own(found.uid):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        raise StrangerError(
            f"{who} is a process of another user (uid {found.uid}, pid {found.pid})"
        )
