"""Reading the log files of ranks: parts of them, their last lines, and what is looked for."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from distsession.engine.log_file import next_data
from distsession.protocol.agent_messages import LogPiece

__all__ = [
    "FarLog",
    "LocalLog",
    "LogPage",
    "LogReader",
    "LogSource",
    "MissingText",
    "read_log",
    "read_open_log",
]

CHUNK_BYTES = 1 << 20
PAGE_BYTES = 64 << 10
"""Bytes of one page, however few lines they are."""
FAR_SEARCH_BYTES = 16 << 20
"""The end of a log of another host that is looked through, for all of it has to come here."""
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
        there = next_data(descriptor, at, end)
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


class LogSource(Protocol):
    """A log file, wherever it is."""

    name: str
    """Its path, with the host where that is another one; empty where there is no log."""

    note: str
    """What to say of it beside what is shown; empty for an ordinary file."""

    @property
    def size(self) -> int:
        """Bytes that were written so far; 0 if the file is gone."""

    @property
    def first_searched(self) -> int:
        """Where a search of all of it begins."""

    def read(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """A part of it, in pieces, each with where it begins; of what is not there nothing."""


class LocalLog:
    """A log file of this host.

    Args:
        path: Of the file; empty where there is none.
    """

    first_searched = 0
    note = ""

    def __init__(self, path: str):
        self.name = path

    @property
    def size(self) -> int:
        try:
            return os.stat(self.name).st_size
        except OSError:
            return 0

    def read(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        with contextlib.suppress(MissingText):
            yield from read_log(self.name, begin, end)


class FarLog:
    """A log file of another host, which an agent reads there.

    Args:
        name: Host and path.
        ask: Asks for a part, by its begin and its bytes; None where nobody answers.
    """

    def __init__(self, name: str, ask: Callable[[int, int], LogPiece | None]):
        self.name = name
        self._ask = ask
        self._size = 0
        self.note = f"in {name}"

    @property
    def size(self) -> int:
        """As it was last known, where nobody answers."""
        piece = self._ask(0, 0)
        self.note = f"in {self.name}"
        if piece is None:
            self.note += ", which cannot be read now"
        else:
            self._size = piece.size
        return self._size

    @property
    def first_searched(self) -> int:
        return max(0, self.size - FAR_SEARCH_BYTES)

    def read(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        while begin < end:
            piece = self._ask(begin, end - begin)
            if piece is None or not piece.data or piece.begin >= end:
                return
            data = piece.data[: end - piece.begin]
            yield piece.begin, data
            begin = piece.begin + len(data)


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
        source: The file, or its path.
    """

    def __init__(self, source: LogSource | str):
        self._source = LocalLog(source) if isinstance(source, str) else source
        self.name = self._source.name
        self.matches: list[int] = []
        """Where what was looked for stands; of very many the last ones."""
        self._wanted = ""
        self._searched = 0

    @property
    def note(self) -> str:
        """What to say of it beside what is shown; empty for an ordinary file."""
        return self._source.note

    @property
    def size(self) -> int:
        """Bytes that were written so far; 0 if the file is gone."""
        return self._source.size

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
            self._wanted, self._searched, self.matches = wanted, self._source.first_searched, []
        sought = wanted.encode()
        flags = re.IGNORECASE if wanted == wanted.lower() else re.NOFLAG
        pattern = re.compile(re.escape(sought), flags)
        rest, at = b"", self._searched
        for begin, data in self._source.read(at, self.size) if wanted else ():
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

    def _read(self, begin: int, end: int) -> bytes:
        return b"".join(data for _, data in self._source.read(begin, end))


def _page(begin: int, end: int, data: bytes) -> LogPage:
    return LogPage(begin, end, data.removesuffix(b"\n").decode("utf-8", "replace"))
