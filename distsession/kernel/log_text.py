"""Reading the log files of ranks: parts of them, their last lines, and what is looked for."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["LogPage", "LogReader", "MissingText", "read_log", "read_open_log"]

CHUNK_BYTES = 1 << 20
PAGE_BYTES = 64 << 10
"""Bytes of one page, however few lines they are."""
MAX_MATCHES = 100_000
"""Places that are kept of what was looked for."""


class MissingText(Exception):
    """A part of a log file is not there any more."""


def read_log(path: str, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """A part of a log file, in pieces, each with where it begins; of what was given back nothing.

    Raises:
        MissingText: In the end, if something was missing; it says what.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise MissingText("text whose log file is gone") from None
    try:
        yield from read_open_log(descriptor, begin, end)
    finally:
        os.close(descriptor)


def read_open_log(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The same of a file that is open, and may have been removed.

    Raises:
        MissingText: In the end, if something was missing; it says what.
    """
    lost = 0
    at = begin
    while at < end:
        there = _next_data(descriptor, at, end)
        lost += there - at
        data = os.pread(descriptor, min(CHUNK_BYTES, end - there), there)
        if there < end and not data:  # it was cut short by someone else
            lost += end - there
            break
        if data:
            yield there, data
        at = there + len(data)
    if lost:
        raise MissingText(f"{lost:,} bytes of text that were given back to the disk")


def _next_data(descriptor: int, at: int, end: int) -> int:
    """Where there is something from there on; holes are skipped."""
    try:
        return min(end, os.lseek(descriptor, at, os.SEEK_DATA))
    except OSError as error:
        # A file system may have no word for it; or there is nothing but a hole from there on.
        return end if error.errno == errno.ENXIO else at


@dataclass(frozen=True)
class LogPage:
    """Some lines of a log file.

    Attributes:
        begin: Where they begin.
        end: Where they end.
        text: What they say.
    """

    begin: int
    end: int
    text: str


class LogReader:
    """Looks through the log file of a rank, which goes on growing.

    Args:
        path: Of the file.
    """

    def __init__(self, path: str):
        self.path = path
        self.matches: list[int] = []
        """Where what was looked for stands; of very many the last ones."""
        self._wanted = ""
        self._searched = 0

    @property
    def size(self) -> int:
        """Bytes that were written so far; 0 if the file is gone."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def before(self, end: int, lines: int) -> LogPage:
        """The last lines before an offset."""
        begin = max(0, end - PAGE_BYTES)
        data = self._read(begin, end)
        found = data.removesuffix(b"\n").split(b"\n")
        if begin and len(found) > 1:
            found = found[1:]  # it begins before
        text = b"\n".join(found[-lines:]) + b"\n" * data.endswith(b"\n")
        return _page(end - len(text), end, text)

    def after(self, begin: int, lines: int) -> LogPage:
        """The lines from an offset on."""
        data = self._read(begin, min(self.size, begin + PAGE_BYTES))
        text = b"\n".join(data.split(b"\n", lines)[:lines])
        text += b"\n" * data.startswith(b"\n", len(text))
        return _page(begin, begin + len(text), text)

    def around(self, at: int, lines: int) -> LogPage:
        """The line at an offset, and as many before and after it."""
        data = self._read(max(0, at - PAGE_BYTES), at)
        begin = at - len(data) + data.rfind(b"\n") + 1
        after = self.after(begin, lines + 1)
        if not begin:
            return after
        before = self.before(begin, lines)
        return LogPage(before.begin, after.end, f"{before.text}\n{after.text}")

    def search(self, wanted: str) -> None:
        """Look for text, in what was written since the last time if it is the same.

        Capitals count only where it has some itself.
        """
        if wanted != self._wanted:
            self._wanted, self._searched, self.matches = wanted, 0, []
        sought = wanted.encode()
        flags = re.IGNORECASE if wanted == wanted.lower() else re.NOFLAG
        pattern = re.compile(re.escape(sought), flags)
        rest, at = b"", self._searched
        for begin, data in self._pieces(at, self.size) if wanted else ():
            if begin != at + len(rest):
                rest, at = b"", begin
            rest += data
            done = max(0, len(rest) - len(sought) + 1)  # a match may go on in the next piece
            for found in pattern.finditer(rest):
                self.matches.append(at + found.start())
                done = max(done, found.end())
            rest, at = rest[done:], at + done
        self._searched = at
        del self.matches[:-MAX_MATCHES]

    # --- inside -----------------------------------------------------------------------------------

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        with contextlib.suppress(MissingText):
            yield from read_log(self.path, begin, end)

    def _read(self, begin: int, end: int) -> bytes:
        return b"".join(data for _, data in self._pieces(begin, end))


def _page(begin: int, end: int, data: bytes) -> LogPage:
    return LogPage(begin, end, data.removesuffix(b"\n").decode("utf-8", "replace"))
