"""What the system says of a process on this host."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

__all__ = [
    "DEAD",
    "ENDED",
    "GONE",
    "RUNS",
    "STOPPED",
    "ZOMBIE",
    "MainThread",
    "has_ended",
    "main_thread",
    "process_facts",
    "process_state",
    "processor_time",
    "scheduled",
    "switches",
]


RUNS, ZOMBIE, DEAD = "R", "Z", "X"
"""Letters of /proc for a process that runs, that has ended and that its parent has not waited for,
and that is gone."""
ENDED = (ZOMBIE, DEAD)
"""Letters of /proc for a process that has ended and that its parent has not waited for."""
GONE = ("", *ENDED)
"""The same, or of one that its parent has waited for."""
STOPPED = ("T", "t")
"""Letters of /proc for a process that is stopped, by SIGSTOP or by a debugger."""


def process_state(pid: int) -> str:
    """The letter that /proc has for it; empty where that is not known."""
    return (_stat(f"/proc/{pid}/stat") or [""])[0]


def process_facts(pid: int) -> list[str]:
    """What stands in /proc of a process behind its name: state, parent, group, session, and more.

    Empty where there is no such process.
    """
    return _stat(f"/proc/{pid}/stat")


def switches(pid: int) -> tuple[str, ...]:
    """How often a process was given a processor; that does not change while it is stuck.

    Empty where there is no such process.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        return tuple(line for line in status if "ctxt_switches" in line)
    return ()


def has_ended(pid: int) -> bool:
    """Whether it has ended, with all of its threads, and its parent has not waited for it yet."""
    if process_state(pid) not in ENDED:
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    return True


STAT_BYTES = 4096
"""More than /proc says of a process or a thread."""


class MainThread(NamedTuple):
    """A process's main thread.

    Attributes:
        letter: The one that /proc has for it.
        ticks: Clock ticks that it has used.
        started: When it was started, in ticks since the system was.
    """

    letter: str
    ticks: int
    started: int


def main_thread(pid: int) -> MainThread | None:
    """What /proc says of the main thread of a process; None if there is no such process."""
    fields = _stat(f"/proc/{pid}/task/{pid}/stat")
    if len(fields) < 20:
        return None
    return MainThread(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))


def processor_time(pid: int) -> int:
    """Clock ticks that the main thread has used."""
    thread = main_thread(pid)
    return 0 if thread is None else thread.ticks


def scheduled(pid: int) -> tuple[float, float]:
    """Seconds that the main thread ran, and that it was ready to run and others had the processors.

    A wait that has not ended yet is not counted. Both are 0 where the system does not say so.
    """
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/schedstat") as f:
        ran, waited = f.read().split()[:2]
        return int(ran) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


def _stat(path: str) -> list[str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a relay does this all the time
        try:
            data = os.read(descriptor, STAT_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return []
    # Behind the name, which is in parentheses and may hold anything.
    return data.rpartition(b")")[2].decode("ascii", "replace").split()
