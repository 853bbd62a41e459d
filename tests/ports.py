"""Ports that nobody else is given until they are used."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_port"]


@contextmanager
def held_port() -> Iterator[int]:
    """A port of this machine that the system gives to no other program inside the ``with`` block.

    A port that was merely found free is anybody's a moment later. This one stays bound. The server
    that it is meant for may listen on it all the same, if it asks for this very port with
    ``SO_REUSEADDR``, as torch's store does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
