"""What stands in the folder of a session that is kept, for whoever looks for it.

``session.json`` says what the session is, and ``owner.json`` who has it. Each is replaced as a
whole, so that nobody reads half of one, also where a process is killed meanwhile or the disk is
full.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

__all__ = ["OWNER_FILE", "SESSION_FILE", "Owner", "read_record", "write_record"]

SESSION_FILE = "session.json"
OWNER_FILE = "owner.json"

LONGEST_RECORD_BYTES = 1 << 20
"""What is longer was not written by us."""
LARGEST = 1 << 53
"""The same of a number."""

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
    """

    epoch: int
    pid: int
    since: float
    gone_at: float | None = None
    lease_ends_at: float | None = None


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
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
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
        if isinstance(value, (list, tuple)) and value and all(type(pid) is int for pid in value):
            return tuple(value)
    elif type(value) in _KINDS[kind] and (not _is_number(value) or abs(value) < LARGEST):
        return value
    raise ValueError(f"{name} is {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
