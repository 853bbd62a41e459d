"""Free ports of this machine, held until they are used."""

from __future__ import annotations

import socket

__all__ = ["get_available_local_url", "release_port"]

_held: dict[str, socket.socket] = {}


def get_available_local_url() -> str:
    """An address at which ranks on this machine can meet: ``tcp://127.0.0.1:PORT``.

    No other program is given the port meanwhile: this process keeps it until it has met others
    there, by :func:`initialize`, or ends. Rank 0 of the meeting may be another process.

    Returns:
        The address, for ``init_method=``.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Bound with SO_REUSEADDR and not listening, it keeps the port from being given away, while a
    # server that asks for this very port (with SO_REUSEADDR, as torch's does) may have it.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    url = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
    _held[url] = holder
    return url


def release_port(url: str) -> None:
    """Hold the port of this address no longer, if it was held."""
    holder = _held.pop(url, None)
    if holder is not None:
        holder.close()
