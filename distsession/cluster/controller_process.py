"""ipyparallel's controller in a process that ends with the kernel that wanted it.

Runs in: a process of its own, started from the kernel.
"""

from __future__ import annotations

import os
import threading
import time

__all__ = ["main"]

POLL = 0.25
"""Seconds between two looks at whether the parent still lives."""


def main() -> None:
    """Be the controller; the command line is ipyparallel's own."""
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)  # its heart monitor is a process
    from ipyparallel.controller.app import main as controller

    controller()


def _end_with_parent() -> None:
    """End when the parent does: nothing of ipyparallel's notices that nobody needs it any more."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        os._exit(0)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
