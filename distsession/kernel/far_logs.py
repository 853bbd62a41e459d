"""What ranks on other hosts write, for those who do not own their session: by its keeper."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from distsession.cluster.kept_session import KeptSession
from distsession.engine.log_file import PARTS_BYTES
from distsession.engine.process_state import STOPPED, process_state
from distsession.protocol import unix_socket
from distsession.protocol.agent_messages import LogPiece
from distsession.protocol.attach import LogPart, LogRead, LogsReply, LogsRequest, keeper_path

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
        parts: Sequence[LogPart] | None = None
        problem = ""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.send(LogsRequest(tuple(reads)))
                problem = self._wait(self._connection)
                reply = None if problem else self._connection.recv()
                if isinstance(reply, LogsReply):
                    parts = reply.parts
            except (EOFError, OSError):
                pass
            finally:
                if parts is None:  # also at Stop: else the next question got the answer to this one
                    self._hang_up()
        if parts is None:
            return [LogPart(problem=problem or self._gone_text())] * len(reads)
        return parts

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
                if part.data and part.begin > text.end:  # what is before it goes back to the disk
                    text.lost += part.begin - text.begin
                    text.begin, text.data = part.begin, b""
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
        if not count and generation is not None:
            known = self.newest(rank, stream)
            if known.generation == generation:
                return LogPiece(0, 0, known.size, begin, b"")
        (part,) = self.read([LogRead(rank, stream, generation, begin, count)])
        return None if part.problem else LogPiece(0, 0, part.size, part.begin, part.data)

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    # --- inside -----------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        return Connection(unix_socket.connect(keeper_path(self._kept.folder)).detach())

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
        kept: The session.
        wanted: Ranks, and of each ``"stdout"`` or ``"stderr"``.
        lines: How many of those that are there already come first. Default: all.
        miss: Is told what is missing.
    """

    def __init__(
        self,
        kept: KeptSession,
        wanted: Iterable[tuple[int, str]],
        lines: int | None,
        miss: Callable[[str], None],
    ):
        self._kept, self._lines, self._miss = kept, lines, miss
        self._logs = FarLogs(kept)
        self._places = {each: _Place() for each in wanted}
        self._unknown = list(self._places)
        self._problems: dict[tuple[int, str], str] = {}
        problems = self._locate()
        self.problem = next(filter(None, problems.values()), "")
        """Why one of them could not be had at the beginning; empty if all could."""
        self.is_there = any(place.generation is not None for place in self._places.values())
        """Whether one of them had a log then."""

    def read(self) -> Iterator[tuple[int, str, bytes]]:
        """What has been written since the last time; what is missing is said."""
        if self._unknown:
            self._tell(self._locate())
        ends: dict[tuple[int, str], int] = {}  # what comes behind them waits for the next time
        behind = [each for each in self._places if each not in self._unknown]
        while behind:
            parts = self._logs.read([self._next(each) for each in behind])
            found, behind = dict(zip(behind, parts, strict=True)), []
            self._tell({each: part.problem for each, part in found.items()})
            for each, part in found.items():
                if part.generation is None:
                    continue
                if part.data:
                    yield *each, self._take(each, part)
                begin = self._places[each].begin
                if part.newest not in (None, part.generation):  # so this one has ended
                    if begin >= part.size or not part.data:
                        self._places[each] = _Place(part.newest)
                    behind.append(each)
                elif part.data and begin < ends.setdefault(each, part.size):
                    behind.append(each)

    def close(self) -> None:
        """Ask no more. Harmless when repeated."""
        self._logs.close()

    # --- inside -----------------------------------------------------------------------------------

    def _locate(self) -> dict[tuple[int, str], str]:
        """Find where to begin, where that is not known yet; gives why of some it still is not."""
        heads = self._logs.read([self._next(each, 0) for each in self._unknown])
        found = dict(zip(self._unknown, heads, strict=True))
        for each, head in found.items():
            if head.generation is not None:
                begin = 0 if self._lines is None else head.size
                self._places[each] = _Place(head.generation, begin)
        if self._lines:
            self._go_back([each for each, head in found.items() if head.size], self._lines)
        self._unknown = [each for each, head in found.items() if head.problem]
        return {each: head.problem for each, head in found.items()}

    def _go_back(self, wanted: Sequence[tuple[int, str]], lines: int) -> None:
        """From where logs end, to where their last lines begin."""
        count = min(TAIL_BYTES, PARTS_BYTES // max(1, len(wanted)))
        reads = [self._next(each, count) for each in wanted]
        reads = [replace(read, begin=max(0, read.begin - count)) for read in reads]
        for each, part in zip(wanted, self._logs.read(reads) if reads else (), strict=True):
            if part.data:
                shown = b"\n".join(part.data[:-1].split(b"\n")[-lines:])  # its end may end a line
                self._places[each].begin = part.begin + len(part.data) - 1 - len(shown)

    def _next(self, each: tuple[int, str], count: int = PARTS_BYTES) -> LogRead:
        (rank, stream), place = each, self._places[each]
        return LogRead(rank, stream.removeprefix("std"), place.generation, place.begin, count)

    def _take(self, each: tuple[int, str], part: LogPart) -> bytes:
        lost = part.begin - self._places[each].begin
        if lost > 0:
            self._miss(f"{lost:,} bytes of text that were given back to the disk are missing here")
        self._places[each] = _Place(part.generation, part.begin + len(part.data))
        return part.data

    def _tell(self, problems: Mapping[tuple[int, str], str]) -> None:
        """Tell each once, until what had it can be had again."""
        said = set(self._problems.values())
        self._problems.update(problems)
        if self._kept.is_alive:  # else nobody answers any more, which is told otherwise
            for problem in dict.fromkeys(problems.values()):
                if problem and problem not in said:
                    self._miss(problem)
