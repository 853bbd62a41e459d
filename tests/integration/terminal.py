"""IPython in a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import pexpect

__all__ = ["press_ctrl_c", "spawn_ipython"]


def spawn_ipython(**options: Any) -> pexpect.spawn:
    """Start it, with ``options`` of ``pexpect.spawn``."""
    return pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        encoding="utf-8",
        **options,
    )


def press_ctrl_c(child: pexpect.spawn) -> None:
    """Press it at a prompt of Python's ``input``.

    CPython writes the prompt and then reads. A signal between the two is noticed only with the next
    key, so wait until it reads.
    """
    asleep = 0
    while asleep < 5:
        with open(f"/proc/{child.pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.02)
    child.sendintr()
