"""The faults that this project and its peers are given alike, and how a peer's program reports."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAUSE = 1.0
"""Seconds until the fault: every rank is where it will stay by then."""
LIMIT = 10.0
"""Seconds after which whoever still waits counts as stuck."""

# Rank 1 never joins the collective: it sleeps until somebody stops it, or raises.
CELL = """
import time
import torch
import torch.distributed as dist
if rank == 1:
    time.sleep({seconds})
    with open({path!r}, "w") as file:
        file.write(str(time.monotonic()))
    raise ValueError("on purpose")
dist.all_reduce(torch.ones(4))
"""

WORK = """
total = torch.ones(4)
dist.all_reduce(total)
"""


def cell(case: str, path: str | Path) -> str:
    """The code of a case: ``stop``, ``kill`` or ``raise``."""
    return CELL.format(seconds=PAUSE if case == "raise" else 60, path=str(path))


class Fault:
    """Something that happens in a while, from another thread.

    Attributes:
        at: By ``time.monotonic()`` when it happened, which all processes of a machine share.
    """

    def __init__(self, act: Callable[[], Any]):
        self.at = 0.0
        self._act = act
        self._timer = threading.Timer(PAUSE, self._do)
        self._timer.daemon = True
        self._timer.start()

    def _do(self) -> None:
        self.at = time.monotonic()
        self._act()


def outcome(
    case: str, fault: Fault | None, ended: float | None, path: str | Path, again: float | None
) -> None:
    """Print what came of a case, in seconds.

    Args:
        case: As for :func:`cell`.
        fault: What made it happen; None where the code raised by itself.
        ended: When its caller had the end of the cell; None if it still waited after the limit.
        path: Where the code wrote when it raised.
        again: When the next collective had worked; None if it did not within the limit.
    """
    began = float(Path(path).read_text()) if fault is None else fault.at
    facts = {
        "ended": None if ended is None else ended - began,
        "again": None if ended is None or again is None else again - ended,
    }
    print(f"\nOUTCOME {json.dumps(facts)}", flush=True)


def within_limit(attempt: Callable[[], Any], expected: type[BaseException]) -> float | None:
    """Make an attempt whose own time-out raises ``expected``; gives when it was through.

    Any other error counts as having come through: it was said.
    """
    try:
        attempt()
    except expected:
        return None
    except (Exception, KeyboardInterrupt) as error:
        print(f"said: {type(error).__name__}: {error}"[:2000], file=sys.stderr)
    return time.monotonic()


def works_again(attempt: Callable[[], Any]) -> float | None:
    """When the attempt was through without any error."""
    try:
        attempt()
    except Exception as error:
        print(f"the next one: {type(error).__name__}: {error}"[:2000], file=sys.stderr)
        return None
    return time.monotonic()
