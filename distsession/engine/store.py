"""The process that holds the rendezvous store.

Runs in: an engine.
"""

from __future__ import annotations

import signal
import socket

import torch.distributed as dist

from distsession.engine.process import die_with_parent

__all__ = ["connect", "serve"]


def serve(listener: socket.socket, agent: int) -> None:
    """Hold the store until the agent ends.

    torch's TCPStore binds every interface unless it is handed a socket that listens already; this
    one listens on the loopback interface alone.
    """
    die_with_parent(agent)
    port = listener.getsockname()[1]
    _store = dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while True:
        signal.pause()


def connect(port: int) -> dist.Store:
    """A client of the store."""
    return dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
