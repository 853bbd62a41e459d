"""Who still uses a session's folder, told by a lock that ends with its process.

The kernel, the agents and ipyparallel's controller each hold a shared lock on one file of the
folder for as long as they live. The system releases it when a process ends, however that ends. So
whoever gets the lock for itself alone knows that nobody lives, and may remove the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["LOCK", "PREFIX", "hold", "make", "release", "remove", "remove_unused", "sweep"]

PREFIX = "distsession-"
"""How the names of all sessions' folders begin."""

REMOVE_ATTEMPTS = 50
REMOVE_PAUSE_S = 0.02
LOCK = "lock"
"""The name of the lock's file."""

YOUNG_S = 60.0
"""Seconds in which a folder without a lock may be one that is being made just now."""

_held: set[int] = set()


def make(folder: str) -> int:
    """Give a new folder its lock, and hold it.

    Returns:
        The descriptor that holds it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    lock = os.open(os.path.join(folder, LOCK), flags, 0o600)
    try:
        # A lock file without content is taken for one that nobody has come to hold yet.
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.write(lock, f"{os.getpid()} {_boot()}\n".encode())
    except BaseException:
        os.close(lock)
        raise
    _held.add(lock)
    return lock


def hold(folder: str) -> int:
    """Hold the lock of a folder that is there.

    Returns:
        The descriptor that holds it.

    Raises:
        FileNotFoundError: The folder has been removed, or is being removed.
    """
    path = os.path.join(folder, LOCK)
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(path)):
            raise FileNotFoundError(path)
    except BlockingIOError:  # somebody removes it
        os.close(lock)
        raise FileNotFoundError(path) from None
    except BaseException:
        os.close(lock)
        raise
    _held.add(lock)
    return lock


def release(lock: int) -> None:
    """Hold it no longer."""
    if lock in _held:
        _held.discard(lock)
        os.close(lock)


def remove_unused(folder: str, lock: int, give_up: Callable[[], bool]) -> bool:
    """Remove a folder once no other process uses it, and release its lock.

    Args:
        folder: Which.
        lock: What :func:`hold` gave.
        give_up: Whether to leave it to the others that use it.

    Returns:
        Whether nobody else used it.
    """
    try:
        while not _is_alone(lock):
            if give_up():
                return False
            time.sleep(0.01)
        remove(folder)
        return True
    finally:
        release(lock)


def remove(folder: str) -> None:
    """Remove a folder that nobody uses; its lock last, so that a sweep can go on from here.

    A process that is just being killed may make a file meanwhile, so it is tried again.
    """
    for _ in range(REMOVE_ATTEMPTS):
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name != LOCK:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, LOCK))
            os.rmdir(folder)
        if not os.path.lexists(folder):
            return
        time.sleep(REMOVE_PAUSE_S)


def sweep(base: str) -> list[str]:
    """Remove what sessions have left whose processes were all killed.

    Only folders of this user are looked at, and only those that this package has made.

    Args:
        base: The folder that holds sessions' folders.

    Returns:
        The folders that were removed.
    """
    removed = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if not entry.name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
                if is_own and _sweep_one(entry.path, facts):
                    removed.append(entry.path)
    return removed


def _sweep_one(folder: str, facts: os.stat_result) -> bool:
    is_young = time.time() - facts.st_mtime < YOUNG_S
    path = os.path.join(folder, LOCK)
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Killed before it came to its lock. Of another version, it would hold something.
        if not is_young:
            os.rmdir(folder)
        return not is_young
    try:
        if not _is_alone(lock) or not os.path.samestat(os.fstat(lock), os.stat(path)):
            return False
        _, _, boot = os.read(lock, 200).decode("ascii", "replace").strip().partition(" ")
        # Another host that shares this disk cannot be asked for its locks.
        if boot != _boot() if boot else is_young:
            return False
        remove(folder)
        return True
    finally:
        os.close(lock)


def _is_alone(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _boot() -> str:
    """What tells this host, since it was switched on, from all others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


def _release_in_child() -> None:
    """A forked child has no part in the session; while it held the lock, nobody could sweep."""
    for lock in list(_held):
        with contextlib.suppress(OSError):
            os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)
