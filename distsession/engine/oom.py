"""Whether the system has killed a process for want of memory.

Linux counts such kills in the victim's memory cgroup (version 1 or 2), which is what limits a
container or a batch job, and for the whole host. The count of the cgroup is the better witness:
on a shared host somebody else's process may have been the one.
"""

from __future__ import annotations

import os

from distsession.engine.cgroups import group_folders, read_lines, read_value

__all__ = ["OomKills", "oom_text"]

_NO_LIMIT = 1 << 60
"""What version 1 has as the limit where there is none is about 2**63."""


class OomKills:
    """Remembers the counts, to see which of them rises.

    Args:
        proc: Where the files of processes are.
    """

    def __init__(self, proc: str = "/proc"):
        self._proc = proc
        self._host = self._count_host()
        self._folder = ""
        self._counts: dict[str, int] = {}
        self._folders: dict[int, str] = {}

    def look_up(self, pid: int) -> None:
        """Processes that are watched from here on are in the cgroup of this one, their parent.

        Once a process has ended, the system tells no cgroup of it.
        """
        self._folder = self._find_folder(pid)
        if self._folder and self._folder not in self._counts:
            self._counts[self._folder] = _count(self._folder)

    def watch(self, pid: int) -> None:
        """A process has been started."""
        self._folders[pid] = self._folder

    def forget(self) -> None:
        """The kills so far were of others than those that are watched."""
        self._host = self._count_host()
        self._counts = {folder: _count(folder) for folder in self._counts}

    def check(self, pid: int) -> tuple[bool, int]:
        """Whether a process that has ended on SIGKILL was killed so.

        Returns:
            Whether it was, and how many bytes its cgroup may have; 0 where that is not known.
        """
        folder = self._folders.pop(pid, "")
        before_host, self._host = self._host, self._count_host()
        before, now = self._counts.get(folder, 0), _count(folder)
        if now < 0:  # there is no such cgroup, or it is gone with its count
            return self._host > before_host, 0
        self._counts[folder] = now
        return now > before, _limit(folder) if now > before else 0

    def _count_host(self) -> int:
        return read_value(os.path.join(self._proc, "vmstat"), "oom_kill", 0)

    def _find_folder(self, pid: int) -> str:
        """Of the memory cgroup of a process; empty where there is none that counts."""
        folders = group_folders(pid, "memory", self._proc)
        return next((folder for folder in folders if _count(folder) >= 0), "")


def _count(folder: str) -> int:
    """How many processes of a cgroup were killed; -1 where nobody counts."""
    for name in ("memory.events", "memory.oom_control"):
        count = read_value(os.path.join(folder, name), "oom_kill", -1)
        if count >= 0:
            return count
    return -1


def _limit(folder: str) -> int:
    """The lowest limit of a cgroup and of those around it; 0 where there is none."""
    lowest = _NO_LIMIT
    while len(folder) > 1:
        for name in ("memory.max", "memory.limit_in_bytes"):
            for line in read_lines(os.path.join(folder, name))[:1]:
                if line.isdigit():
                    lowest = min(lowest, int(line))
        folder = os.path.dirname(folder)
    return lowest if lowest < _NO_LIMIT else 0


def oom_text(limit: int) -> str:
    """What is said of a process that was killed so.

    Args:
        limit: Of its cgroup in bytes; 0 where there is none.
    """
    size = f"{limit / 2**30:.1f} GiB" if limit >= 2**30 else f"{limit / 2**20:.0f} MiB"
    known = f"; its limit is {size}" if limit else ""
    return f"by the system for want of memory (its count of out-of-memory kills rose{known})"
