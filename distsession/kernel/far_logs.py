"""What ranks on other hosts write, for those who do not own their session: by its keeper."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from distsession.cluster.kept_hosts import LogsRead, ReadLogs, keeper_path
from distsession.cluster.kept_session import KeptSession
from distsession.engine.log_file import PARTS_BYTES
from distsession.engine.process_state import STOPPED, process_state
from distsession.protocol.attach import LogPart, LogRead
from distsession.protocol.messages import LogPiece

__all__ = ["FarLogs", "FarTails", "FarText"]

ANSWER_TIMEOUT_S = 30.0
"""Seconds that the keeper has to answer: hosts are not asked too often, whoever asks."""
LOOK_S = 1.0
"""Seconds between two looks whether the keeper can answer at all."""
NEWEST_S = 1.0
"""Seconds that what is known of a rank's newest log is taken for true."""
TEXT_BYTES = 4 << 20
"""Bytes that come here of all that a cell which runs has written on other hosts. What a cell has
written that has ended came to its kernel."""
TAIL_BYTES = 16 << 10
"""Bytes of a log in which its last lines are looked for."""


@dataclass(slots=True)
class FarText:
    """A part of a log of another host.

    Attributes:
        begin: Where it begins.
        lost: Bytes before it that are not here.
        data: What it says.
        problem: Why it is not all here; empty if it is.
    """

    begin: int
    lost: int
    data: bytes = b""
    problem: str = ""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class FarLogs:
    """Reads logs on other hosts, from any thread.

    Args:
        kept: The session.
    """

    def __init__(self, kept: KeptSession):
        self._kept = kept
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._newest: dict[tuple[int, str], tuple[float, LogPart]] = {}

    def read(self, reads: Sequence[LogRead]) -> Sequence[LogPart]:
        """Parts of logs, one for each that is wanted."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.send(ReadLogs(tuple(reads)))
                problem = self._wait(self._connection)
                reply = None if problem else self._connection.recv()
                if isinstance(reply, LogsRead):
                    return reply.parts
            except (EOFError, OSError):
                problem = ""
            self._hang_up()
            return [LogPart(problem=problem or self._gone_text())] * len(reads)

    def since(self, begins: Mapping[tuple[int, str], int]) -> dict[tuple[int, str], FarText]:
        """What newest logs have from an offset on; of very much the end.

        Args:
            begins: The offsets, by rank and stream.
        """
        wanted = list(begins)
        most = TEXT_BYTES // max(1, len(wanted))
        heads = self.read([LogRead(*each, None, begins[each], 0) for each in wanted])
        found: dict[tuple[int, str], FarText] = {}
        ends: dict[tuple[int, str], tuple[int | None, int]] = {}
        for each, head in zip(wanted, heads, strict=True):
            begin = max(begins[each], head.size - most)
            found[each] = FarText(begin, begin - begins[each], problem=head.problem)
            if head.size > begin:
                ends[each] = head.generation, head.size
        while ends:
            reads = []
            for each, (generation, end) in ends.items():
                at = found[each].end
                reads.append(LogRead(*each, generation, at, end - at))
            for each, part in zip(list(ends), self.read(reads), strict=True):
                text = found[each]
                text.problem = part.problem
                if not text.data and part.data:  # its front was given back to the disk
                    text.lost += part.begin - text.begin
                    text.begin = part.begin
                text.data += part.data
                if not part.data or text.end >= ends[each][1]:
                    del ends[each]
        return found

    def newest(self, rank: int, stream: str) -> LogPart:
        """The newest log of a rank, without its text; as it was a moment ago."""
        now = time.monotonic()
        at, part = self._newest.get((rank, stream), (-NEWEST_S, LogPart()))
        if now - at >= NEWEST_S:
            (part,) = self.read([LogRead(rank, stream, None, 0, 0)])
            self._newest[rank, stream] = time.monotonic(), part
        return part

    def ask(
        self, rank: int, stream: str, generation: int | None, begin: int, count: int
    ) -> LogPiece | None:
        """A part of one log; None where nobody answers. Its size is that of a moment ago."""
        known = LogPart() if count else self.newest(rank, stream)
        if known.generation is not None and known.generation == generation:
            return LogPiece(0, 0, known.size, begin, b"")
        (part,) = self.read([LogRead(rank, stream, generation, begin, count)])
        return None if part.problem else LogPiece(0, 0, part.size, part.begin, part.data)

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    # --- inside -----------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        with contextlib.ExitStack() as stack:
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.connect(keeper_path(self._kept.folder))
            return Connection(link.detach())

    def _wait(self, connection: Connection) -> str:
        """Wait for an answer; gives why none comes, or nothing."""
        pid, deadline = self._kept.keeper, time.monotonic() + ANSWER_TIMEOUT_S
        who = f"the process that holds the connections to the hosts (pid {pid})"
        while not connection.poll(LOOK_S):
            if process_state(pid) in STOPPED:
                return (
                    f"{who} is stopped by SIGSTOP or a debugger: `kill -CONT {pid}` lets it go on"
                )
            if time.monotonic() > deadline:
                return f"{who} has not answered within {ANSWER_TIMEOUT_S:g} s"
        return ""

    def _gone_text(self) -> str:
        return (
            "the process that holds the connections to the hosts "
            f"(pid {self._kept.keeper}) does not answer"
        )

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(slots=True)
class _Place:
    """How far a log has been read; without a generation it is not known yet."""

    generation: int | None = None
    begin: int = 0


class FarTails:
    """What ranks on other hosts write from here on, also where another process takes one's place.

    Args:
        logs: Reads them.
        wanted: Ranks, and their streams by the ends of the names of log files.
        lines: How many of those that are there already come first. Default: all.
        miss: Is told what is missing.
    """

    def __init__(
        self,
        logs: FarLogs,
        wanted: Sequence[tuple[int, str]],
        lines: int | None,
        miss: Callable[[str], None],
    ):
        self._logs, self._miss = logs, miss
        self._places = {each: _Place() for each in wanted}
        self._said: set[str] = set()
        self.problem = ""
        """Why nothing can be had of one of them, as it was last tried."""
        self.is_there = True
        """Whether one of them has a log, as far as is known."""
        self._begin(lines)

    def read(self) -> Iterator[tuple[tuple[int, str], bytes]]:
        """What has been written since the last time; what is missing is said."""
        ends: dict[tuple[int, str], tuple[int, int]] = {}
        behind = list(self._places)
        while behind:
            reads = [self._next(each) for each in behind]
            parts = self._logs.read(reads)
            self._note_problems(parts)
            found = list(zip(behind, parts, strict=True))
            behind = []
            for each, part in found:
                if part.generation is None:
                    continue
                if part.data:
                    yield each, self._take(each, part)
                place = self._places[each]
                is_read = place.begin >= part.size or not part.data
                if is_read and part.newest not in (None, part.generation):
                    self._places[each] = _Place(part.newest)  # its predecessor has ended
                    is_read = False
                end = ends.setdefault(each, (part.newest or part.generation, part.size))
                place = self._places[each]
                if not is_read and (place.generation, place.begin) < end:
                    behind.append(each)

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, lines: int | None) -> None:
        heads = self._logs.read([self._next(each, 0) for each in self._places])
        self._note_problems(heads)
        self.is_there = any(head.generation is not None for head in heads)
        for each, head in zip(self._places, heads, strict=True):
            if head.generation is not None:
                begin = 0 if lines is None else head.size
                self._places[each] = _Place(head.generation, begin)
        if not lines:
            return
        count = min(TAIL_BYTES, PARTS_BYTES // len(self._places))
        reads = [self._next(each, count) for each in self._places]
        reads = [replace(read, begin=max(0, read.begin - count)) for read in reads]
        for place, part in zip(self._places.values(), self._logs.read(reads), strict=True):
            # The last byte may end a line.
            found = part.data[:-1].split(b"\n")[-lines:]
            if part.generation is not None:
                place.begin = part.begin + max(0, len(part.data) - len(b"\n".join(found)) - 1)

    def _next(self, each: tuple[int, str], count: int = PARTS_BYTES) -> LogRead:
        place = self._places[each]
        return LogRead(*each, place.generation, place.begin, count)

    def _take(self, each: tuple[int, str], part: LogPart) -> bytes:
        assert part.generation is not None
        place = self._places[each]
        lost = part.begin - place.begin
        if lost > 0:
            self._miss(f"{lost:,} bytes of text that were given back to the disk are missing here")
        self._places[each] = _Place(part.generation, part.begin + len(part.data))
        return part.data

    def _note_problems(self, parts: Sequence[LogPart]) -> None:
        """Say each once, until all can be had again."""
        problems = dict.fromkeys(part.problem for part in parts if part.problem)
        self.problem = next(iter(problems), "")
        for problem in problems:
            if problem not in self._said:
                self._miss(problem)
        self._said = set(problems) if len(parts) == len(self._places) else {*self._said, *problems}
