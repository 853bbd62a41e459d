"""Whether a Stop is one, or only announces that the kernel is restarted or shut down."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

__all__ = ["kernel_ends"]

POLL_S = 0.01


def kernel_ends(wait: float) -> bool:
    """Whether Jupyter asks the kernel to end, right after it has interrupted it.

    That comes by another channel, which a thread of its own reads while a cell runs. A second
    Ctrl-C meanwhile is a Stop by somebody who is in a hurry.

    Args:
        wait: Seconds within which it comes.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = None if get_ipython is None else get_ipython()
    if not hasattr(shell, "kernel"):
        return False
    deadline = time.monotonic() + wait
    with contextlib.suppress(KeyboardInterrupt):
        while not shell.exit_now and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return bool(shell.exit_now)
    return False
