"""A clock for what several processes of a host, one after the other, have to measure."""

from __future__ import annotations

import time

__all__ = ["host_clock"]


def host_clock() -> float:
    """Seconds by a clock that nobody sets, and that goes on while the machine sleeps.

    All processes of a host have the same one, until it is started anew. ``time.time()`` may jump,
    and ``time.monotonic()`` stands still during a suspend.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
