"""What the system says of a process on this host."""

from __future__ import annotations

import contextlib
import os

__all__ = [
    "ENDED",
    "GONE",
    "STOPPED",
    "has_ended",
    "process_facts",
    "process_state",
    "processor_time",
]


ENDED = ("Z", "X")
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


def has_ended(pid: int) -> bool:
    """Whether it has ended, with all of its threads, and its parent has not waited for it yet."""
    if process_state(pid) not in ENDED:
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    return True


def processor_time(pid: int) -> int:
    """Clock ticks that the main thread has used."""
    fields = _stat(f"/proc/{pid}/task/{pid}/stat")
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _stat(path: str) -> list[str]:
    with contextlib.suppress(OSError), open(path) as stat:
        # Behind the name, which is in parentheses and may hold anything.
        return stat.read().rpartition(")")[2].split()
    return []
