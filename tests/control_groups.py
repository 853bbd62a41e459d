"""Control groups of both versions, for tests of what happens at their limits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["ControlGroup", "control_group"]

_ROOT = Path("/sys/fs/cgroup")
_FILES = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max", "pids.max")}
"""Of each controller, the file of the limit in version 2 and in version 1."""


class ControlGroup:
    """A group with a limit.

    Args:
        folder: Of the group.
        file: Of its limit.
    """

    def __init__(self, folder: Path, file: str):
        self.folder, self._file = folder, file

    def limit(self, amount: int) -> None:
        (self.folder / self._file).write_text(str(amount))

    def add(self, pid: int) -> None:
        """Have a process be in it, and what that starts from here on."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def used(self) -> int:
        """How many processes and threads are in it."""
        return int((self.folder / "pids.current").read_text())

    def join(self) -> None:
        """Have this process be in it, such as one that is about to become a program."""
        self.add(os.getpid())


@contextlib.contextmanager
def control_group(controller: str, limit: int) -> Iterator[ControlGroup]:
    """A group below this process's own, or below the root; it is removed at the end.

    Args:
        controller: ``"memory"`` or ``"pids"``.
        limit: In bytes, or a number of processes and threads.
    """
    group = _made(controller, limit)
    try:
        yield group
    finally:
        deadline = time.monotonic() + 10
        while group.folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the last of its processes is just ending
                for pid in (group.folder / "cgroup.procs").read_text().split():
                    (group.folder.parent / "cgroup.procs").write_text(pid)
                group.folder.rmdir()
            time.sleep(0.05)


def _made(controller: str, limit: int) -> ControlGroup:
    parents = [_ROOT / controller, _ROOT]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            parents[:0] = [parent / path.lstrip("/") for parent in parents[-2:]]
    for parent in parents:
        second, first = _FILES[controller]
        file = second if (parent / "cgroup.controllers").exists() else first
        with contextlib.suppress(OSError):
            folder = parent / f"distsession-test-{os.getpid()}"
            folder.mkdir()
            try:
                (folder / file).write_text(str(limit))
            except OSError:
                folder.rmdir()
                raise
            return ControlGroup(folder, file)
    pytest.skip("no control group can be made here: that takes root, and a group to make it in")
