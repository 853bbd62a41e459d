"""The journal of a session that is kept: what a new kernel has to know of what happened before.

The kernel that owns the session appends records to a file in the session's folder, without waiting
for the disk: what was written is there when the process has been killed. A record that was cut off
by that is dropped whole. The file belongs to one owner, whose epoch is in its name. So one that was
stopped, and finds on waking that another has taken the session over, writes to a file that nobody
reads any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Journal", "Record", "journal_path", "read_journal"]

log = logging.getLogger(__name__)

REWRITE_BYTES = 4 << 20
"""Bytes that a journal grows by, at least, until it is written anew without what is outdated."""
TRY_AGAIN_S = 1.0
"""Seconds between two attempts to write a journal for which there was no room."""

_HEAD = struct.Struct("<II")  # length of the record, and its CRC
_NAME = re.compile(r"journal-(\d+)")


class Record:
    """A dataclass for a journal: it is pickled in half the time that a dataclass takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(vars(self).values())


def journal_path(folder: str, epoch: int) -> str:
    """The journal that an owner of a session writes.

    Args:
        folder: Of the session.
        epoch: Of the owner.
    """
    return os.path.join(folder, f"journal-{epoch}")


def read_journal(folder: str) -> list[Any]:
    """The records of the last owner that wrote any, oldest first; none if nobody has.

    Only for folders of this user: to read a record runs what its pickle names.

    Args:
        folder: Of the session.
    """
    for _, path in sorted(_journals(folder), reverse=True):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            return list(_records(file.read(), path))
    return []


def _journals(folder: str) -> list[tuple[int, str]]:
    """The journals in a folder, with the epochs of those who write them."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = ((_NAME.fullmatch(name), name) for name in names)
    return [(int(match[1]), os.path.join(folder, name)) for match, name in found if match]


def _records(data: bytes, path: str) -> Iterator[Any]:
    for frame in _frames(data, path):
        try:
            yield pickle.loads(frame)
        except Exception:
            log.exception("%s: a record cannot be read and is left out", path)


def _frames(data: bytes, path: str) -> Iterator[bytes]:
    """The records that are whole, up to the first that is not."""
    at = 0
    while at < len(data):
        if len(data) - at >= _HEAD.size:
            length, checksum = _HEAD.unpack_from(data, at)
            record = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(record) == length and zlib.crc32(record) == checksum:
                yield record
                at += _HEAD.size + length
                continue
        log.info("%s: the last %d bytes are no whole record", path, len(data) - at)
        return


def _framed(record: object) -> bytes:
    data = pickle.dumps(record, protocol=5)
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


class Journal:
    """Writes the journal of one owner. No problem with it is one of whoever runs something.

    Args:
        folder: Of the session.
        epoch: Of the owner.
        everything: Gives the records that say all that has to be known now.
    """

    def __init__(self, folder: str, epoch: int, everything: Callable[[], Iterable[object]]):
        self.path = journal_path(folder, epoch)
        self._folder = folder
        self._epoch = epoch
        self._everything = everything
        self._lock = threading.RLock()
        self._file = -1
        self._size = 0
        self._later = b""
        self._limit = 0
        self._is_behind = True
        """Something could not be written, so all is to be written anew."""
        self._has_complained = False
        self._tried_at = 0.0
        self._closed = False
        with self._lock:
            self._catch_up()

    def append(self, record: object, *, later: bool = False) -> None:
        """Add a record; from any thread.

        Args:
            record: Anything that can be pickled.
            later: It is written together with the next one.
        """
        try:
            data = _framed(record)
        except Exception:  # nothing of ours: it would be an error in the midst of a run
            log.exception("a record of the journal cannot be written")
            return
        with self._lock:
            if self._closed:
                return
            if self._is_behind:
                self._catch_up()  # the record is part of all that has to be known
                return
            if later:
                self._later += data
                return
            self._flush(data)

    def tidy(self) -> None:
        """Write it anew if it has grown a lot; called where nobody waits for the next moment."""
        with self._lock:
            if self._size > self._limit and not self._is_behind and not self._closed:
                self._tried_at = 0.0
                self._catch_up()

    def close(self) -> None:
        """Nothing is written any more. The file stays."""
        with self._lock:
            if self._later and not self._is_behind:
                self._flush(b"")
            self._closed = True
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    # --- inside -----------------------------------------------------------------------------------

    def _flush(self, data: bytes) -> None:
        data, self._later = self._later + data, b""
        try:
            self._write(data)
        except OSError as error:
            self._fall_behind(error)

    def _write(self, data: bytes) -> None:
        """Append bytes, all of them or none.

        Raises:
            OSError: There is no room for all of them.
        """
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:] if done else data)
        except OSError:
            if done:
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _catch_up(self) -> None:
        """Write a new file with all that has to be known, and put it in the place of the old."""
        if time.monotonic() - self._tried_at < TRY_AGAIN_S:
            return
        part = f"{self.path}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        before, size = self._file, self._size
        file = -1
        try:
            self._file = file = os.open(part, flags, 0o600)
            self._size = 0
            for record in self._everything():
                self._write(_framed(record))
            os.rename(part, self.path)
        except OSError as error:
            self._file, self._size = before, size
            with contextlib.suppress(OSError):
                os.unlink(part)
            if file >= 0:
                os.close(file)
            self._fall_behind(error)
            return
        if before >= 0:
            os.close(before)
        self._later = b""  # part of all that was written just now
        self._limit = max(REWRITE_BYTES, 2 * self._size)
        self._is_behind = False
        self._remove_earlier()
        if self._has_complained:
            self._has_complained = False
            log.warning("the session's journal is written again: nothing is missing in it.")

    def _fall_behind(self, error: OSError) -> None:
        self._is_behind = True
        self._tried_at = time.monotonic()
        if self._has_complained:
            return
        self._has_complained = True
        log.warning(
            "%s: %s. Cells run as ever; but a kernel that attaches to this session would not know "
            "of what runs from now on until there is room again.",
            self.path,
            error.strerror or error,
        )

    def _remove_earlier(self) -> None:
        """Those of earlier owners, all of which this one has read."""
        for epoch, path in _journals(self._folder):
            if epoch < self._epoch:
                for left in (path, f"{path}.part"):
                    with contextlib.suppress(OSError):
                        os.unlink(left)
