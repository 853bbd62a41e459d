"""What stands in the folder of a session that is kept, for whoever looks for it.

``session.json`` says what the session is, and ``owner.json`` who has it. Each is replaced as a
whole, so that nobody reads half of one, also where a process is killed meanwhile or the disk is
full. When a session has ended, a small file beside its folder, which is removed, says so for a
week.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

__all__ = [
    "ENDED",
    "FOUND_GONE",
    "OWNER_FILE",
    "SESSION_FILE",
    "WAS_ENDED",
    "EndedSession",
    "Owner",
    "note_end",
    "read_end",
    "read_ends",
    "read_record",
    "write_record",
]

SESSION_FILE = "session.json"
OWNER_FILE = "owner.json"

ENDED, FOUND_GONE, WAS_ENDED = "ended", "was found gone", "was ended"
"""How a session came to its end: by its lease, by the death of its agents, or as somebody wished.
"""
END_PREFIX, END_SUFFIX = ".", ".ended"
"""What the name of the file of an end has around that of the session's folder."""
END_KEPT_S = 7 * 24 * 3600.0
"""Seconds for which an end is remembered."""
MAX_ENDS = 20
"""How many are, in each place."""

LONGEST_RECORD_BYTES = 1 << 20
"""What is longer was not written by us."""
LARGEST = 1 << 53
"""The same of a number."""

LEAST = {"world_size": 1, "nodes": 1, "epoch": 1, "pid": 1}
"""The least that some of them can be; others are not negative."""

PIDS = "tuple[int, ...]"
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
}
"""Which values of JSON a field of a dataclass can have, by its annotation."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who has a session, or had it last; the content of ``owner.json``.

    Attributes:
        epoch: Counts the owners, from 1.
        pid: Of its process.
        since: When it got the session, by ``time.time()``, like all times here.
        gone_at: When it went; None while it is there.
        lease_ends_at: When the session ends if nobody attaches; None while somebody is there.
        began: When its process was started, as ``started_at()`` tells it, for another may have its
            pid later; 0 where that is not known.
        lease_ends_clock: The same by ``host_clock()``, which nobody sets.
    """

    epoch: int
    pid: int
    since: float
    gone_at: float | None = None
    lease_ends_at: float | None = None
    lease_ends_clock: float | None = None
    began: int = 0


@dataclass(frozen=True, kw_only=True)
class EndedSession:
    """A session that is over.

    Attributes:
        name: Of it.
        folder: The path of its folder, which is gone.
        world_size: Number of ranks that it had.
        backend: Of its process group.
        how: How it came to its end.
        at: When, by ``time.time()``.
        reason: Why.
    """

    name: str
    folder: str
    world_size: int
    backend: str
    how: str
    at: float
    reason: str


def note_end(folder: str, how: str, reason: str) -> None:
    """Note beside the folder of a session that this has ended; nothing where it cannot be noted.

    Args:
        folder: Of the session, as long as its files are there.
        how: ``ENDED``, ``FOUND_GONE`` or ``WAS_ENDED``.
        reason: Why.
    """
    with contextlib.suppress(OSError, ValueError):
        facts = _read(os.path.join(folder, SESSION_FILE))
        known = {each: facts.get(each) for each in ("name", "world_size", "backend")}
        end = {**known, "folder": folder, "how": how, "at": time.time(), "reason": reason}
        base, name = _note_of(folder)
        if how != FOUND_GONE or not os.path.lexists(os.path.join(base, name)):
            write_record(base, name, end)


def read_end(folder: str) -> EndedSession | None:
    """What is noted of the end of a session; None while it has not ended, or if nobody knows.

    Args:
        folder: Of the session, which may be there still.
    """
    with contextlib.suppress(OSError, ValueError):
        base, name = _note_of(folder)
        if os.lstat(os.path.join(base, name)).st_uid == os.geteuid():
            return read_record(base, name, EndedSession)
    return None


def _note_of(folder: str) -> tuple[str, str]:
    base, name = os.path.split(folder)
    return base, f"{END_PREFIX}{name}{END_SUFFIX}"


def read_ends(base: str, prefix: str) -> list[EndedSession]:
    """The sessions of this user that have ended, the last first; older notes are removed.

    Args:
        base: The folder that held the sessions' folders.
        prefix: How the names of these begin.
    """
    found: list[tuple[EndedSession, str]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if entry.name.startswith(END_PREFIX + prefix) and entry.name.endswith(END_SUFFIX):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found += _read_or_remove(base, entry.name)
    found.sort(key=lambda each: each[0].at, reverse=True)
    since = time.time() - END_KEPT_S
    old = [path for number, (end, path) in enumerate(found) if number >= MAX_ENDS or end.at < since]
    for path in old:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return [end for end, path in found if path not in old and not os.path.lexists(end.folder)]


def _read_or_remove(base: str, name: str) -> list[tuple[EndedSession, str]]:
    path = os.path.join(base, name)
    try:
        return [(read_record(base, name, EndedSession), path)]
    except ValueError:
        os.unlink(path)  # it is this user's, and nobody can read it
        return []


def write_record(folder: str, name: str, facts: Mapping[str, Any]) -> None:
    """Put a file of JSON in the place of the one that is there, which only this user can read.

    Raises:
        OSError: It cannot be written; the one that was there stays.
    """
    descriptor, path = tempfile.mkstemp(prefix=f".{name}-", dir=folder)  # mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(path, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def read_record(folder: str, name: str, kind: type[T], /, **known: Any) -> T:
    """What :func:`write_record` has written, as a dataclass.

    Another version of the package may have written more, or less.

    Args:
        folder: Of the session.
        name: Of the file.
        kind: The dataclass.
        known: Values of fields that do not stand in the file.

    Raises:
        OSError: There is no such file, or it cannot be read.
        ValueError: It is damaged; the message says how.
    """
    facts = {**_read(os.path.join(folder, name)), **known}
    missing = object()
    values = {}
    for each in fields(kind):  # type: ignore[arg-type]
        value = facts.get(each.name, missing if each.default is MISSING else each.default)
        if value is missing:
            raise ValueError(f"it does not say {each.name}")
        if each.name not in known:
            value = _checked(each.name, str(each.type), value)
        values[each.name] = value
    return kind(**values)


def _read(path: str) -> dict[str, Any]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # nobody may ever write to a fifo
            raise ValueError("it is no plain file")
        data = file.read(LONGEST_RECORD_BYTES + 1)
    if len(data) > LONGEST_RECORD_BYTES:
        raise ValueError(f"it has more than {LONGEST_RECORD_BYTES:,} bytes")
    try:
        facts = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(facts, dict):
        raise ValueError("it is no JSON object")
    return facts


def _checked(name: str, kind: str, value: Any) -> Any:
    """A value of JSON, if a field of this kind can have it."""
    if kind == PIDS:
        if isinstance(value, (list, tuple)) and value and all(map(_is_pid, value)):
            return tuple(value)
    elif type(value) in _KINDS[kind] and _can_be(name, value):
        return value
    raise ValueError(f"{name} is {value!r}")


def _can_be(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return value.isprintable()  # a terminal would obey other characters
    return value is None or LEAST.get(name, 0) <= value < LARGEST


def _is_pid(value: Any) -> bool:
    return type(value) is int and 0 < value < LARGEST
