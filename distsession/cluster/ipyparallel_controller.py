"""ipyparallel's controller in a process that ends with the kernel that wanted it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import sys

from distsession.engine.process import die_with_parent
from distsession.protocol import folder_lock

__all__ = ["main"]

PORTS = 24
"""Ports that are held for it. ipyparallel 9.2 takes 18."""


def _held_ports() -> list[socket.socket]:
    """Sockets on free ports, which nobody else is given while they are open.

    Left to itself ipyparallel looks for free ports, lets go of them, and listens some tenths of a
    second later. Whoever was given one meanwhile (1 of 200 starts beside other sessions) leaves it
    without a heart monitor. With SO_REUSEADDR zmq can listen beside a socket that does not, while
    Linux gives the port to nobody who asks for any or connects from one.
    """
    sockets = []
    for _ in range(PORTS):
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        sockets.append(held)
    return sockets


def main() -> None:
    """Be the controller; the command line is ipyparallel's own behind our two arguments."""
    kernel, folder = int(sys.argv.pop(1)), sys.argv.pop(1)
    die_with_parent(kernel)
    try:
        folder_lock.hold(folder)  # nobody removes it while ipyparallel may make folders in it
    except FileNotFoundError:  # the session is over already
        return
    # It has some connections for each rank, and runs no code of the user's that could mind.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Its heart monitor is a process, too.
    multiprocessing.set_start_method("fork")
    controller = os.getpid()
    os.register_at_fork(after_in_child=lambda: die_with_parent(controller))
    from ipyparallel.controller.app import main as run

    held = _held_ports()
    sys.argv.append(f"--ports={','.join(str(one.getsockname()[1]) for one in held)}")
    run()
