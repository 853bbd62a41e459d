"""ipyparallel's controller in a process that ends with the kernel that wanted it.

Runs in: a process of its own, started from the kernel.
"""

from __future__ import annotations

import os
import threading
import time

POLL = 0.25


def _end_with(parent: int) -> None:
    """Ipyparallel's controller does not notice that nobody needs it any more."""
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(0)


def main() -> None:
    """Be the controller; the command line is ipyparallel's own."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    from ipyparallel.controller.app import main as controller

    controller()


if __name__ == "__main__":
    main()
