"""IPython in a terminal."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pexpect

__all__ = ["spawn_ipython"]


def spawn_ipython(**options: Any) -> pexpect.spawn:
    """Start it, with ``options`` of ``pexpect.spawn``."""
    return pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        encoding="utf-8",
        preexec_fn=_hear_ctrl_c,
        **options,
    )


def _hear_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
