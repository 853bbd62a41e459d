"""Reading the log files of ranks: parts of them, their last lines, and what is looked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

__all__ = ["MissingText", "read_log"]

CHUNK_BYTES = 1 << 20


class MissingText(Exception):
    """A part of a log file is not there any more."""


def read_log(path: str, begin: int, end: int) -> Iterator[bytes]:
    """A part of a log file, in pieces; of what was given back nothing.

    Raises:
        MissingText: In the end, if something was missing; it says what.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise MissingText("text whose log file is gone") from None
    lost = 0
    try:
        at = begin
        while at < end:
            there = _next_data(descriptor, at, end)
            lost += there - at
            data = os.pread(descriptor, min(CHUNK_BYTES, end - there), there)
            if there < end and not data:  # it was cut short by someone else
                lost += end - there
                break
            if data:
                yield data
            at = there + len(data)
    finally:
        os.close(descriptor)
    if lost:
        raise MissingText(f"{lost:,} bytes of text that were given back to the disk")


def _next_data(descriptor: int, at: int, end: int) -> int:
    """Where there is something from there on; holes are skipped."""
    try:
        return min(end, os.lseek(descriptor, at, os.SEEK_DATA))
    except OSError as error:
        # A file system may have no word for it; or there is nothing but a hole from there on.
        return end if error.errno == errno.ENXIO else at
