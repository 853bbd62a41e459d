"""What NCCL says of a job: its RAS service answers on each host since NCCL 2.24.

A thread in one of NCCL's processes listens, and asks the others. The protocol is lines of text
(NCCL, ``src/ras/client_support.cc``): the two greet each other by version, then a question is
answered and the connection closed.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from distsession.display.colors import without_escapes
from distsession.protocol.waiting_room import is_own_connection

__all__ = ["ras_address", "ras_report"]

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "localhost:28028"
PROTOCOL = 2
WAIT_S = 1
"""Seconds that NCCL waits for its other processes; those that do not answer it then names."""
TIMEOUT_S = 3.0
"""Seconds for the whole answer."""
MAX_BYTES = 1 << 18


def ras_address(backend: str) -> tuple[str, int] | None:
    """Where it listens on this host; None where it is not in use.

    Args:
        backend: Of the process group. With another than NCCL, only somebody who has named an
            address is taken to use it.
    """
    named = os.environ.get("NCCL_RAS_ADDR", "")
    if os.environ.get("NCCL_RAS_ENABLE", "1").strip() == "0" or not (named or "nccl" in backend):
        return None
    host, _, port = (named or DEFAULT_ADDRESS).rpartition(":")
    return (host.strip("[]") or "localhost", int(port)) if port.isdecimal() else None


def ras_report(backend: str) -> str:
    """The state of the NCCL job of this user on this host, as NCCL tells it.

    Args:
        backend: Of the process group.

    Returns:
        Its text; empty where nothing listens, or somebody else's process does.
    """
    address = ras_address(backend)
    if address is None:
        return ""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(address)
            text = _ask(connection, deadline)
    except OSError as error:
        log.debug("NCCL's RAS service at %s:%d: %s", *address, error)
        return ""
    return "".join(c for c in without_escapes(text) if c == "\n" or c.isprintable()).strip()


def _ask(connection: socket.socket, deadline: float) -> str:
    for line, answer in (
        (f"CLIENT PROTOCOL {PROTOCOL}", "SERVER PROTOCOL "),
        (f"TIMEOUT {WAIT_S}", "OK"),
    ):
        connection.sendall(f"{line}\n".encode())
        if not _received(connection, deadline, b"\n").startswith(answer):
            return ""
        if not is_own_connection(connection):
            return ""
    connection.sendall(b"STATUS\n")
    return _received(connection, deadline)


def _received(connection: socket.socket, deadline: float, until: bytes = b"") -> str:
    """What comes up to this, or to the end; what has come when the time is over."""
    data = b""
    while len(data) < MAX_BYTES and not (until and data.endswith(until)):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            piece = connection.recv(4096)
        except TimeoutError:
            break
        if not piece or time.monotonic() > deadline:
            break
        data += piece
    return data.decode(errors="replace")
