"""What an agent has forked: ranks, spares that become ranks, and the processes that help them."""

from __future__ import annotations

import os

import psutil

from distsession import Session
from tests.until import until

__all__ = ["relay_of", "spares_of", "wait_for_spares"]


def spares_of(session: Session) -> set[int]:
    """Pids of the spares of a session on one host."""
    ranks = {info.pid for info in session.infos}
    agent = psutil.Process(psutil.Process(session.infos[0].pid).ppid())
    return {pid for pid in _leaders(agent) if pid not in ranks}


def wait_for_spares(session: Session) -> None:
    """Until each rank has one."""
    until(lambda: len(spares_of(session)) == len(session.infos), "spares")


def relay_of(agent: psutil.Process) -> psutil.Process:
    """The only child of an agent, of another node than the first, that never becomes a rank."""
    found: list[psutil.Process] = []

    def is_alone() -> bool:  # a spare that was forked just now has no group of its own yet
        leaders = _leaders(agent)
        found[:] = [child for child in agent.children() if child.pid not in leaders]
        return len(found) == 1

    until(is_alone, "the one relay")
    return found[0]


def _leaders(agent: psutil.Process) -> set[int]:
    """Pids of children that lead a process group, as ranks and spares do."""
    found = set()
    for child in agent.children():
        try:
            if os.getpgid(child.pid) == child.pid:
                found.add(child.pid)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    return found
