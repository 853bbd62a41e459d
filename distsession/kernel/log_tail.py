"""What the ranks of a session that is kept write, as they write it."""

from __future__ import annotations

import codecs
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Protocol

from distsession.cluster.kept_session import KeptSession, refuse_lost
from distsession.engine.log_file import newest_log
from distsession.kernel.far_logs import FarTails
from distsession.kernel.log_text import LogReader, MissingText, read_open_log
from distsession.protocol.messages import Text

__all__ = ["STREAMS", "LogTail", "LogTails", "looks", "open_tails", "texts_of_all"]

POLL_S, FAR_POLL_S = 0.2, 1.0
"""Seconds between two looks for more text; on other hosts somebody has to be asked for it."""
STREAMS = {"stdout": "out", "stderr": "err"}
"""The ends of the names of their log files."""


class LogTails(Protocol):
    """What some ranks write from here on."""

    @property
    def is_there(self) -> bool:
        """Whether one of them had a log at the beginning."""

    @property
    def problem(self) -> str:
        """Why a log could not be had; empty where nothing was wrong."""

    def read(self) -> Iterator[tuple[int, str, bytes]]:
        """What has been written since the last time, with its rank and stream."""

    def close(self) -> None: ...


def open_tails(
    kept: KeptSession,
    ranks: Iterable[int],
    streams: Iterable[str],
    lines: int | None = None,
    miss: Callable[[str], None] = lambda text: None,
) -> LogTails:
    """What ranks of a session write, wherever they are.

    Args:
        kept: The session.
        ranks: Which.
        streams: ``"stdout"``, ``"stderr"``, or both.
        lines: How many of those that are there already come first. Default: all.
        miss: Is told what is missing.

    Raises:
        KeptSessionError: The session is lost.
    """
    refuse_lost(kept)
    wanted = [(rank, stream) for rank in ranks for stream in streams]
    return (FarTails if kept.keeper else _LocalTails)(kept, wanted, lines, miss)


class _LocalTails:
    problem = ""

    def __init__(
        self,
        kept: KeptSession,
        wanted: Iterable[tuple[int, str]],
        lines: int | None,
        miss: Callable[[str], None],
    ):
        self._tails = {each: LogTail(kept.folder, *each, lines, miss) for each in wanted}

    @property
    def is_there(self) -> bool:
        return any(tail.is_there for tail in self._tails.values())

    def read(self) -> Iterator[tuple[int, str, bytes]]:
        for (rank, stream), tail in self._tails.items():
            for data in tail.read():
                yield rank, stream, data

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


class LogTail:
    """What a rank writes from here on, also where another process takes its place.

    Args:
        folder: Of the session.
        rank: Which.
        stream: ``"stdout"`` or ``"stderr"``.
        lines: How many of those that are there already come first. Default: all.
        miss: Is told what is missing.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        stream: str,
        lines: int | None = None,
        miss: Callable[[str], None] = lambda text: None,
    ):
        self._miss = miss
        self._folder, self._rank, self._stream = folder, rank, STREAMS[stream]
        self._path = newest_log(folder, rank, self._stream)
        self._file: BinaryIO | None = None
        self._shown = 0
        if self._path is not None:
            self._file = open(self._path, "rb")
            if lines is not None:
                reader = LogReader(self._path)
                self._shown = reader.before(reader.size, lines).begin if lines else reader.size

    @property
    def is_there(self) -> bool:
        """Whether the rank has a log file yet."""
        return self._file is not None

    def read(self) -> Iterator[bytes]:
        """What has been written since the last time; what is missing is said."""
        newest = newest_log(self._folder, self._rank, self._stream)  # its predecessor has ended
        yield from self._read()
        if newest is not None and newest != self._path:
            self.close()
            self._path, self._file, self._shown = newest, open(newest, "rb"), 0
            yield from self._read()

    def _read(self) -> Iterator[bytes]:
        if self._file is None:
            return
        begin, self._shown = self._shown, os.fstat(self._file.fileno()).st_size
        try:
            for _, data in read_open_log(self._file.fileno(), begin, self._shown):
                yield data
        except MissingText as missing:
            self._miss(f"{missing} are missing here")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def looks(kept: KeptSession, follow: bool = True) -> Iterator[None]:
    """Now and then, until the session has ended, and once after that."""
    while follow and kept.is_alive:
        yield
        time.sleep(FAR_POLL_S if kept.keeper else POLL_S)
    yield


def texts_of_all(
    kept: KeptSession, lines: int, miss: Callable[[str], None] = lambda text: None
) -> Iterator[list[Text]]:
    """What all ranks write, now and then, until the session has ended.

    Args:
        kept: The session.
        lines: How many lines of each rank that are there already come first.
        miss: Is told what is missing.

    Raises:
        KeptSessionError: The session is lost.
    """
    ranks = range(kept.world_size)
    decoders = {(rank, stream): _decoder() for rank in ranks for stream in STREAMS}
    with contextlib.closing(open_tails(kept, ranks, STREAMS, lines, miss)) as tails:
        for _ in looks(kept):
            yield [
                Text(rank, 0, stream, decoders[rank, stream](data))
                for rank, stream, data in tails.read()
            ]


def _decoder() -> Any:
    return codecs.getincrementaldecoder("utf-8")("replace").decode
