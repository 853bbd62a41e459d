"""What the ranks of a session that is kept write, as they write it."""

from __future__ import annotations

import codecs
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from distsession.cluster.kept_session import KeptSession, refuse_far_logs
from distsession.engine.log_file import newest_log
from distsession.kernel.log_text import LogReader, MissingText, read_open_log
from distsession.protocol.messages import Text

__all__ = ["STREAMS", "LogTail", "looks", "texts_of_all"]

POLL_S = 0.2
"""Seconds between two looks for more text."""
STREAMS = {"stdout": "out", "stderr": "err"}
"""The ends of the names of their log files."""


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
        time.sleep(POLL_S)
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
        KeptSessionError: The ranks are on other hosts.
    """
    refuse_far_logs(kept)
    with contextlib.ExitStack() as stack:
        tails = [
            (rank, stream, stack.enter_context(contextlib.closing(tail)), _decoder())
            for rank in range(kept.world_size)
            for stream in STREAMS
            for tail in [LogTail(kept.folder, rank, stream, lines, miss)]
        ]
        for _ in looks(kept):
            yield [
                Text(rank, 0, stream, decode(data))
                for rank, stream, tail, decode in tails
                for data in tail.read()
            ]


def _decoder() -> Any:
    return codecs.getincrementaldecoder("utf-8")("replace").decode
