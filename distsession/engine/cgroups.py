"""Where the system has the control groups of a process: of both versions, and of both at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["group_folders", "read_lines", "read_value"]


def group_folders(pid: int, controller: str, proc: str = "/proc") -> Iterator[str]:
    """The folders of the groups that a process is in, each before those around it.

    Args:
        pid: Its own.
        controller: What the groups are to limit, such as ``"memory"``.
        proc: Where the files of processes are.
    """
    for line in read_lines(os.path.join(proc, str(pid), "cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root, mount in _mounts(proc, "" if not controllers else controller):
            inside = path if root == "/" else path.removeprefix(root)
            folder = os.path.normpath(f"{mount}/{inside}")
            while len(folder) >= len(mount):
                yield folder
                folder = os.path.dirname(folder)


def _mounts(proc: str, controller: str) -> list[tuple[str, str]]:
    """Root and mount point of each mounted control group file system; version 2 has no name."""
    found = []
    for line in read_lines(os.path.join(proc, "self", "mountinfo")):
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        is_named = kind == "cgroup" and controller in options.replace(" ", ",").split(",")
        if is_named if controller else kind == "cgroup2":
            root, mount = fields.split(" ")[3:5]
            found.append((root, mount))
    return found


def read_value(path: str, name: str, default: int) -> int:
    """The number that stands behind a name in a file."""
    for line in read_lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return default


def read_lines(path: str) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().splitlines()
    return []
