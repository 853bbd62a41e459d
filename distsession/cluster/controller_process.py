"""ipyparallel's controller in a process that ends with the kernel that wanted it.

Runs in: a process of its own, started from the kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys

from distsession import folder_lock
from distsession.engine.process import die_with_parent

__all__ = ["main"]


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

    run()
