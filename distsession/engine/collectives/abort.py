"""Freeing a main thread that is blocked in C code.

NCCL's communicators can be aborted. Nothing that torch offers ends a wait in gloo or in its store
(2.13). Its sockets do: shut down, they end every wait with an error within some milliseconds. The
descriptors stay open, so nothing else can come by their numbers before torch closes them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "abort_communicators",
    "abort_gloo",
    "abort_store",
    "bind_listener_stand_in",
    "close_gloo_listener",
]


def abort_communicators() -> None:
    """Give up the communicators of all groups whose backend can do so (NCCL); from any thread."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            c10d._abort_process_group()


def abort_gloo() -> int:
    """Shut down all connections of all gloo groups in this process; gives their number.

    A gloo device waits in an epoll set that holds one pipe, one listening socket and the sockets
    to its peers; no other library's set looks like that.
    """
    shut = 0
    for _, members in _gloo_sets():
        for descriptor in members:
            if _is_tcp(descriptor) and not _is_listening(descriptor):
                shut += _shut(descriptor)
    return shut


def close_gloo_listener(address: bytes) -> bool:
    """Close the port of a gloo device all of whose pairs are connected; says whether it was found.

    gloo goes on listening there, and whoever of this machine connects takes a descriptor of the
    rank for good; where none is left, gloo ends the process. gloo knows its socket by the number
    of the descriptor, takes it out of its epoll set one day and closes it. So another socket gets
    that number, at which nobody can arrive: its path is gone as soon as it is bound. To accept from
    it is to be told to try again, as before, should gloo's thread be just about to.

    Args:
        address: What gloo has told its peers: somewhere within is its ``struct sockaddr``.
    """
    stand_in = _stand_in
    if stand_in is None:
        return False
    for epoll, members in _gloo_sets():
        for descriptor in members:
            if _is_listening(descriptor) and _is_tcp(descriptor) and _name(descriptor) in address:
                os.dup2(stand_in.fileno(), descriptor, inheritable=False)
                # The other end of a duplicate: closing it must not close gloo's.
                with select.epoll.fromfd(os.dup(epoll)) as same:
                    same.register(descriptor, 0)
                return True
    return False


_stand_in: socket.socket | None = None


def bind_listener_stand_in(folder: str) -> None:
    """Make what :func:`close_gloo_listener` needs.

    Args:
        folder: Where a socket may be bound for a moment.
    """
    global _stand_in
    path = os.path.join(folder, f"stand-in-{os.getpid()}")
    _stand_in = socket.socket(socket.AF_UNIX)
    _stand_in.setblocking(False)
    _stand_in.bind(path)
    _stand_in.listen(1)
    os.unlink(path)


def abort_store(port: int) -> int:
    """Shut down all connections to the store at this port; gives their number."""
    shut = 0
    for descriptor in _descriptors():
        if _is_tcp(descriptor) and _peer_port(descriptor) == port:
            shut += _shut(descriptor)
    return shut


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _gloo_sets() -> Iterator[tuple[int, list[int]]]:
    """The epoll sets of gloo's devices: their descriptors and those in them."""
    for epoll, members in _epoll_sets():
        if any(map(_is_pipe, members)) and any(map(_is_listening, members)):
            yield epoll, members


def _epoll_sets() -> Iterator[tuple[int, list[int]]]:
    for descriptor in sorted(_descriptors(), reverse=True):  # what is looked for has just been made
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{descriptor}") as info:
                    lines = [line.split() for line in info if line.startswith("tfd:")]
                yield descriptor, [int(words[1]) for words in lines]


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
    # Asked of all sockets to the peers, as each rank begins: of which family it is, the system
    # would have to be asked as well, and makes no difference here.
    try:
        borrowed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, descriptor)
    except OSError:  # it is no socket
        return False
    try:
        return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
    finally:
        borrowed.detach()


def _name(descriptor: int) -> bytes:
    """How a ``struct sockaddr`` with its own address begins."""
    with _borrowed(descriptor) as s:
        host, port = str(s.getsockname()[0]), int(s.getsockname()[1])
        family = int(s.family).to_bytes(2, sys.byteorder)
        if s.family == socket.AF_INET:
            return family + port.to_bytes(2, "big") + socket.inet_aton(host)
        return family + port.to_bytes(2, "big")


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
