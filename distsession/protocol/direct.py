"""The socket between the kernel and a rank of its node for messages that are small."""

from __future__ import annotations

import socket

from distsession.protocol.wire import socket_path

__all__ = ["LARGEST", "direct_path", "open_socket"]

LARGEST = 64 << 10
"""Bytes of a message. The system takes some of them at once, so nobody waits to send one."""


def direct_path(folder: str, epoch: int) -> str:
    """Where the kernel listens that owns a session."""
    return socket_path(folder, "direct", epoch)


def open_socket() -> socket.socket:
    """One that keeps messages apart, and says when its other end is gone."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
