"""The processes of a session on this host, as /proc has them: its agents and all they started."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distsession.engine.process_state import GONE, process_facts

__all__ = ["SessionProcesses", "look_at_processes", "memory_bytes"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOG = re.compile(r"/logs/rank(\d+)-\d+\.(?:out|err)(?: \(deleted\))?$")


@dataclass(frozen=True)
class SessionProcesses:
    """Whose processes live.

    Attributes:
        ranks: The pid of each rank that has one.
        all: The pids of the agents, and of all that they have started, also by way of others.
    """

    ranks: Mapping[int, int]
    all: tuple[int, ...]


def look_at_processes(folder: str, agents: Iterable[int]) -> SessionProcesses:
    """The processes of a session.

    A rank is a child of an agent that writes to a log file of the session. What a rank has
    started, and has outlived who started it, is in the rank's session (of ``setsid``) still.

    Args:
        folder: Of the session.
        agents: The pids of its agents that live.
    """
    parents, sessions = {}, {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        facts = process_facts(pid)
        if facts and facts[0] not in GONE:
            parents[pid], sessions[pid] = int(facts[1]), int(facts[3])
    agents = {pid for pid in agents if pid in parents}
    ranks = {}
    for pid, parent in parents.items():
        rank = _rank_of(pid, folder) if parent in agents else None
        if rank is not None:
            ranks[rank] = pid
    found = agents | {pid for pid, leader in sessions.items() if leader in ranks.values()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return SessionProcesses(ranks, tuple(sorted(found)))


def _rank_of(pid: int, folder: str) -> int | None:
    """Which rank a process is, by the log file that it writes to; None if it is none."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            found = _LOG.search(path)
            if found is not None and path.startswith(os.path.realpath(folder) + os.sep):
                return int(found[1])
    return None


def memory_bytes(pids: Iterable[int]) -> int:
    """Bytes of memory that processes hold together.

    What several of them share counts once, as far as the system tells (``Pss``).
    """
    return sum(map(_memory_of, pids))


def _memory_of(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE
    return 0
