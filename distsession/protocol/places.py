"""Where the private folders of sessions are made.

A folder with the mode 0700 is closed to others. But who may write to the folder that it lies in, or
to one above that, may rename it and put one of their own in its place, unless the sticky bit is set
there. Processes that come later would connect to their sockets. So such a place is passed over.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distsession.protocol import folder_lock

__all__ = ["NoPlaceError", "has_ipython_folder", "make_folder", "places", "problem", "refused"]

PATH_MAX = 54
"""A unix socket's path has 107 bytes at most (sun_path in <sys/un.h>), and we add names."""
ROOT = 0


class NoPlaceError(OSError):
    """There is no place for a session's folder; the text says why and what to do."""


def places() -> list[str]:
    """The paths of all places that come into question, in the order in which they are tried."""
    wanted = (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm")
    return list(dict.fromkeys(os.path.realpath(place) for place in wanted if place))


def refused() -> dict[str, str]:
    """The places of :func:`places` that come before the one that is taken, and why."""
    found = {}
    for place in places():
        if not (why := _why_not(place)):
            break
        found[place] = why
    return found


def make_folder() -> tuple[str, int]:
    """Make a folder that only this user can open, and that nobody else can replace.

    It has its lock, and a folder for logs.

    Returns:
        Its path, and the descriptor that holds its lock.

    Raises:
        NoPlaceError: There is no place for it.
    """
    problems = []
    for place in places():
        if why := _why_not(place):
            problems.append(why)
            continue
        try:
            return _make_in(place)
        except OSError as error:  # it may be full, and the next one not
            problems.append(f"{place}: {error.strerror}")
    raise NoPlaceError(
        f"there is no folder for the session's sockets and logs ({'; '.join(problems)}). Set "
        "TMPDIR to a short path that you alone can write to."
    )


def _make_in(place: str) -> tuple[str, int]:
    folder = tempfile.mkdtemp(prefix=folder_lock.PREFIX, dir=place)
    try:
        lock = folder_lock.make(folder)
        try:
            os.mkdir(os.path.join(folder, "logs"), mode=0o700)
        except BaseException:
            folder_lock.release(lock)
            raise
    except BaseException:
        folder_lock.remove(folder)
        raise
    return folder, lock


def has_ipython_folder() -> bool:
    """Whether IPython has a folder of this user, or can make one.

    Where it has none, as without a home, it makes one in the place of temporary files, for each
    shell and each client, and leaves it there.
    """
    folder = os.path.normpath(os.path.expanduser(os.environ.get("IPYTHONDIR") or "~/.ipython"))
    place = folder if os.path.exists(folder) else os.path.dirname(folder)
    return os.path.isdir(place) and os.access(place, os.W_OK)


def _why_not(place: str) -> str:
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written to"
    if len(place) > PATH_MAX:
        return f"{place} is too long for the path of a socket"
    return problem(place)


def problem(place: str) -> str:
    """Why others could put something else in the place of a folder there; empty if they cannot.

    Args:
        place: In which the folder lies. All above it count as well, as for keys of ssh.
    """
    for path in _with_parents(os.path.realpath(place)):
        try:
            facts = os.stat(path)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if facts.st_uid not in _trusted():
            return f"{path} is another user's (uid {facts.st_uid}), who may rename what lies there"
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not facts.st_mode & stat.S_ISVTX:
            whom = "everybody" if facts.st_mode & stat.S_IWOTH else "its group"
            return (
                f"{whom} may rename what lies in {path}: it can be written to and has no sticky "
                f"bit (`chmod +t {path}` sets it)"
            )
    return ""


def _with_parents(path: str) -> Iterator[str]:
    yield path
    yield from map(str, Path(path).parents)


def _trusted() -> tuple[int, ...]:
    """The users who can do with all of this user's files what they like, or are this one."""
    own = (ROOT, os.geteuid())
    # In a container of a user's own (Apptainer), root of the machine has no number, and what is
    # root's seems to be of one whom nobody can be.
    overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    return own if _has_number(overflow) else (*own, overflow)


def _has_number(uid: int) -> bool:
    """Whether somebody in this container can be this user."""
    with open("/proc/self/uid_map", encoding="ascii") as table:
        ranges = [[int(word) for word in line.split()] for line in table]
    return any(first <= uid < first + count for first, _, count in ranges)
