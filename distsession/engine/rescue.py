"""Freeing a main thread that is blocked in C code.

Runs in: an engine.

Nothing that torch offers ends a wait in gloo or in its store (2.13). Its sockets do: shut down,
they end every wait with an error within some milliseconds. The descriptors stay open, so nothing
else can come by their numbers before torch closes them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

__all__ = ["shut_gloo", "shut_store"]


def shut_gloo() -> int:
    """Shut down all connections of all gloo groups in this process; gives their number.

    A gloo device waits in an epoll set that holds one pipe, one listening socket and the sockets
    to its peers; no other library's set looks like that.
    """
    shut = 0
    for members in _epoll_sets():
        pipes = [fd for fd in members if _is_pipe(fd)]
        sockets = [fd for fd in members if _is_tcp(fd)]
        if not pipes or not any(_is_listening(fd) for fd in sockets):
            continue
        for descriptor in sockets:
            if not _is_listening(descriptor):
                shut += _shut(descriptor)
    return shut


def shut_store(port: int) -> int:
    """Shut down all connections to the store at this port; gives their number."""
    shut = 0
    for descriptor in _descriptors():
        if _is_tcp(descriptor) and _peer_port(descriptor) == port:
            shut += _shut(descriptor)
    return shut


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _epoll_sets() -> Iterator[list[int]]:
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{descriptor}") as info:
                    yield [int(line.split()[1]) for line in info if line.startswith("tfd:")]


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The descriptor as a socket, without owning it."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _is_tcp(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with _borrowed(descriptor) as s:
            return s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM
    except OSError:
        return False


def _is_listening(descriptor: int) -> bool:
    try:
        with _borrowed(descriptor) as s:
            return bool(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _peer_port(descriptor: int) -> int:
    try:
        with _borrowed(descriptor) as s:
            return int(s.getpeername()[1])
    except OSError:
        return 0


def _shut(descriptor: int) -> bool:
    try:
        with _borrowed(descriptor) as s:
            s.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
