"""A rank's log file: room ahead of what is written, and what is old given back.

Writers append to the file, Python's own prints and any C library or subprocess, and nobody can ask
them to wait or to open another one. So it is one file for as long as the rank lives. Blocks behind
its end are reserved, so that they can go on writing when the disk is full. Blocks at its front are
given back when it is longer than its limit, or when the disk is full: a hole is punched,
which changes no offset and which no writer notices.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence

from distsession.protocol.attach import LogPart, LogRead

__all__ = [
    "DISK_FULL",
    "PARTS_BYTES",
    "PIECE_BYTES",
    "LogFile",
    "log_path",
    "newest_generation",
    "newest_log",
    "next_data",
    "read_parts",
    "read_piece",
    "read_tail",
]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write says when there is no room for it."""

LIMIT_STEP_BYTES = 16 << 20
"""Bytes that are given back together when a file is longer than its limit; fewer of a low one."""
RESERVED_BYTES = 256 << 10
"""Bytes that are reserved behind the end of a file."""
LAST_BYTES = 64 << 10
"""Bytes that are kept of a file on a full disk: a message about a death shows the last lines."""
BLOCK_BYTES = 1 << 16
"""Holes begin and end at multiples of it, which those of any file system divide."""
PIECE_BYTES = 256 << 10
"""The most that is sent of a log file in one message."""
PARTS_BYTES = 256 << 10
"""The most that is sent together of the logs of one host to somebody who looks on: what the system
takes at once, so that the agent waits for nobody."""
RETRY_S = 1.0
"""Seconds between two attempts to reserve room on a full disk."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # <linux/falloc.h>


def log_path(folder: str, rank: int, generation: int, stream: str) -> str:
    """Where the raw output of a rank is kept.

    Args:
        folder: Of the session.
        rank: Which.
        generation: In which it was forked.
        stream: ``"out"``, ``"err"``, or ``"fault"`` for the Python stack of a crash.
    """
    return os.path.join(folder, "logs", f"rank{rank}-{generation}.{stream}")


def read_tail(path: str, count: int) -> str:
    """The end of a file, however long it is; empty where there is none.

    Args:
        path: Of the file.
        count: So many bytes at most.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - count))
        return file.read(count).decode("utf-8", "replace")
    return ""


def newest_log(folder: str, rank: int, stream: str) -> str | None:
    """The log file of the process that is the rank now, or was it last; None if there is none.

    Args:
        folder: Of the session.
        rank: Which.
        stream: As of :func:`log_path`.
    """
    generation = newest_generation(folder, rank, stream)
    return None if generation is None else log_path(folder, rank, generation, stream)


def newest_generation(folder: str, rank: int, stream: str) -> int | None:
    """In which the process was forked that is the rank now, or was it last; None without a log."""
    wanted = re.compile(rf"rank{rank}-(\d+)\.{stream}")
    generations = []
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.join(folder, "logs")):
            found = wanted.fullmatch(name)
            if found is not None:
                generations.append(int(found[1]))
    return max(generations, default=None)


def read_piece(path: str, begin: int, count: int) -> tuple[int, int, bytes]:
    """A part of a log file, without what was given back to the disk.

    Args:
        path: Of the file.
        begin: Where it begins.
        count: Bytes that are wanted at most; ``PIECE_BYTES`` are the most that there are.

    Returns:
        The file's size, 0 if it is gone; where the data begins; and the data.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, begin, b""
    try:
        size = os.fstat(descriptor).st_size
        begin = next_data(descriptor, begin, size)
        return size, begin, os.pread(descriptor, min(count, PIECE_BYTES), begin)
    finally:
        os.close(descriptor)


def read_parts(folder: str, reads: Sequence[LogRead]) -> tuple[LogPart, ...]:
    """Parts of logs, each with as much as leaves room for the others.

    Args:
        folder: Of the session, on this host.
        reads: Which.
    """
    most = PARTS_BYTES // max(1, sum(read.count > 0 for read in reads))
    return tuple(_read_part(folder, read, most) for read in reads)


def _read_part(folder: str, read: LogRead, most: int) -> LogPart:
    newest = newest_generation(folder, read.rank, read.stream)
    generation = newest if read.generation is None else read.generation
    if generation is None:
        return LogPart()
    path = log_path(folder, read.rank, generation, read.stream)
    piece = read_piece(path, max(0, read.begin), min(max(0, read.count), most))
    return LogPart(generation, newest, path, *piece)


def next_data(descriptor: int, at: int, end: int) -> int:
    """Where there is something in a file from there on, up to an end; holes are skipped."""
    try:
        return min(end, os.lseek(descriptor, at, os.SEEK_DATA))
    except OSError as error:
        # A file system may have no word for it; or there is nothing but a hole from there on.
        return end if error.errno == errno.ENXIO else at


class LogFile:
    """A log file as the thread sees it that sends its text on.

    Args:
        path: Of the file, which is there already.
        limit: Bytes of it that are kept.
    """

    def __init__(self, path: str, limit: int):
        self._limit = limit
        self._step = min(LIMIT_STEP_BYTES, limit // 4)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._begin = 0
        self._reserved = 0
        self.is_full = False
        """Whether the disk was full when room was last looked for."""
        self._next_attempt = 0.0
        self._fallocate = _fallocate()

    @property
    def size(self) -> int:
        """Bytes that have been written to it."""
        # A quarter of what fstat costs, and each request asks four times. Nothing else here goes by
        # where the descriptor is at.
        return os.lseek(self._descriptor, 0, os.SEEK_END)

    @property
    def begin(self) -> int:
        """Where what is still there begins."""
        return self._begin

    def read(self, size: int, at: int) -> bytes:
        return os.pread(self._descriptor, size, at)

    def has_room(self, size: int) -> bool:
        """Whether Python may write as much on a full disk; half of the room is for others."""
        return self.size + size <= self._reserved - RESERVED_BYTES // 2

    def maintain(self, sent: int) -> bool:
        """Keep room behind the end, and no more than the limit before it.

        Args:
            sent: How far the file has been read; nothing behind that is given back.

        Returns:
            False if the disk is full: older text was given back for room, or there is none.
        """
        if self._fallocate is None:
            return True
        size = self.size
        if sent - self._begin > self._limit + self._step:
            self._punch_hole(sent - self._limit)
        if size + RESERVED_BYTES // 2 <= self._reserved:
            return True
        if time.monotonic() < self._next_attempt and sent - LAST_BYTES < self._begin + BLOCK_BYTES:
            return True
        self.is_full = not self._reserve(size)
        if not self.is_full:
            return True
        while self._punch_hole(min((self._begin + sent + BLOCK_BYTES) // 2, sent - LAST_BYTES)):
            if self._reserve(size):
                return False
        # Less than wanted: what was given back may be less, and other ranks take from it, too.
        any(self._reserve(size, RESERVED_BYTES >> halvings) for halvings in range(1, 7))
        self._next_attempt = time.monotonic() + RETRY_S
        return False

    def _reserve(self, size: int, room: int = RESERVED_BYTES) -> bool:
        assert self._fallocate is not None
        problem = self._fallocate(self._descriptor, _KEEP_SIZE, size, room)
        if problem in DISK_FULL:
            return False
        # Where a file system cannot do this, there is no use in asking again.
        self._reserved = sys.maxsize if problem else size + room
        return True

    def _punch_hole(self, until: int) -> bool:
        """Punch a hole up to about there; whether that was possible."""
        until = until // BLOCK_BYTES * BLOCK_BYTES
        if until <= self._begin:
            return False
        begin, self._begin = self._begin, until
        return punch_hole(self._descriptor, begin, until)


def punch_hole(descriptor: int, begin: int, until: int) -> bool:
    """Give the blocks of a part of a file back to the disk; False where that is not possible."""
    fallocate = _fallocate()
    if fallocate is None:
        return False
    return not fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, until - begin)


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """The system's function of this name, which Python lacks; it gives an error number, or 0."""
    try:
        native = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return None
    native.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def fallocate(descriptor: int, mode: int, begin: int, size: int) -> int:
        return ctypes.get_errno() if native(descriptor, mode, begin, size) else 0

    return fallocate
