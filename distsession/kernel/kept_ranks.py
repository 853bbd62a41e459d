"""The ranks of a session that another process owns, as one sees them who only looks.

No rank is asked anything: what ranks do stands in memory that they share, what they use in /proc,
what they write in their log files, and who they are in the session's folder. What ranks on other
hosts write is read by the agents there, which the session's keeper asks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from distsession.cluster.attachment import STATE_FILE, LauncherState, read_state
from distsession.cluster.kept_session import KeptSession, read_kept, refuse_lost
from distsession.engine import usage
from distsession.engine.log_file import newest_log
from distsession.engine.process_state import GONE, process_facts
from distsession.errors import KeptSessionError
from distsession.kernel.far_logs import FarLogs
from distsession.kernel.kept_state import board_reports, far_pids, open_board
from distsession.kernel.log_text import FarLog, LocalLog, LogSource
from distsession.kernel.replay import OutputHistory, RunRecord
from distsession.kernel.session_record import known_outputs
from distsession.protocol.agent_messages import UsageReply, UsageRequest
from distsession.protocol.board import Board
from distsession.protocol.messages import RankReport, Text
from distsession.ranks import RankInfo

__all__ = ["KeptRanks", "NotThereError"]

STREAMS = ("stdout", "stderr")


class NotThereError(Exception):
    """The session has ended, or it is just being changed."""


@dataclass(frozen=True)
class _Facts:
    """What a folder says, and by which version of its file."""

    state: LauncherState
    version: tuple[int, int]


class KeptRanks:
    """Looks at the ranks of a session, now and then, from any thread.

    Args:
        kept: The session.
    """

    def __init__(self, kept: KeptSession):
        self._kept = kept
        self._lock = threading.RLock()
        self._board: Board | None = None
        self._board_path = ""
        self._gpus: usage.GpuReader | None = None
        self._facts = self._read_facts()
        self._far_logs = FarLogs(kept) if kept.keeper else None
        self.has_ended = False
        """The session is over; nothing is looked for any more."""

    def look(self) -> KeptSession:
        """The session as its files are now; as they were last, if it has ended."""
        with self._lock:
            if not self.has_ended:
                try:
                    self._kept = read_kept(self._kept.folder)
                    self.has_ended = not self._kept.is_alive
                except FileNotFoundError:
                    self.has_ended = True
                except KeptSessionError:  # damaged; it goes on as it was
                    self.has_ended = not self._kept.is_alive
            if self.has_ended:
                self.close()
            return self._kept

    @property
    def state(self) -> LauncherState:
        """What the session's owner knows of it: its options, and its ranks."""
        with self._lock, contextlib.suppress(OSError):
            self._facts = self._read_facts(self._facts)
        return self._facts.state

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        """The facts of each rank, those that were replaced included."""
        return self.state.infos

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that live."""
        if self._kept.keeper:
            with self._lock, contextlib.suppress(NotThereError):
                return {} if self._kept.is_keeper_gone else far_pids(self._open_board())
            return {}
        agents = {*self._kept.agents} - {*self._kept.gone_agents.values()}
        found = {}
        for info in self.infos:
            facts = process_facts(info.pid)
            if facts and facts[0] not in GONE and int(facts[1]) in agents:
                found[info.rank] = info.pid
        return found

    def reports(
        self, ranks: Iterable[int] | None = None, *, ask: bool = False, timeout: float = 0.0
    ) -> dict[int, RankReport]:
        """What each rank does; also where they should be asked, nobody is.

        Raises:
            NotThereError: The memory that says so cannot be read.
        """
        with self._lock:
            board, pids = self._open_board(), self.pids()
            return board_reports(board, None if self._kept.keeper and pids else pids)

    def usage(self, timeout: float) -> UsageReply:
        """What the ranks use of processors, memory and GPUs."""
        gpus = {info.rank: info.device.uuid for info in self.infos if info.device.uuid}
        if gpus and self._gpus is None:
            self._gpus = usage.GpuReader()
        # Of other hosts nothing is known here.
        pids = {} if self._kept.keeper else self.pids()
        return usage.read(UsageRequest(0, gpus), pids, self._gpus)

    def log_path(self, rank: int, stream: str) -> Path | None:
        """The file that has what a rank has written; None if it has none here, or not yet."""
        if self._far_logs is not None:
            return None
        found = newest_log(self._kept.folder, rank, stream.removeprefix("std"))
        return None if found is None else Path(found)

    def log_source(self, rank: int, stream: str) -> LogSource:
        """The same file, also of another host, to be looked through."""
        logs = self._far_logs
        if logs is None:
            return LocalLog(str(self.log_path(rank, stream) or ""))
        end = stream.removeprefix("std")
        part = logs.newest(rank, end)
        name = f"{self.infos[rank].host}:{part.path or f'the log of rank {rank}'}"
        return FarLog(name, partial(logs.ask, rank, end, part.generation))

    def outputs(self) -> OutputHistory:
        """What the cells of all kernels have put out, and the text of those that run.

        Raises:
            NotThereError: The memory that says what runs cannot be read.
            KeptSessionError: The session is lost.
        """
        refuse_lost(self._kept)
        outputs, running = known_outputs(self._kept.folder)
        for run in running:
            record = outputs.begin(
                run.cell,
                run.ranks,
                self.log_path,
                request=run.request,
                kernel=run.kernel,
                began=run.at,
            )
            if record is not None:
                self._add_texts(record)
        return outputs

    def close(self) -> None:
        """Let go of the memory that the ranks share."""
        with self._lock:
            if self._board is not None:
                self._board.close()
                self._board = None
            if self._far_logs is not None:
                self._far_logs.close()

    # --- inside -----------------------------------------------------------------------------------

    def _add_texts(self, record: RunRecord) -> None:
        """What ranks have written so far in a run that has not ended."""
        record.goes_on = True
        with self._lock:
            regions = self._open_board().regions
            begun = {rank: regions[rank].last_begun for rank in record.ranks}
            begins = {rank: regions[rank].log_begins(record.request) for rank in record.ranks}
        for rank in record.ranks:
            if begun[rank] >= record.request:
                record.keep(record, None)
            if self._far_logs is None:
                for stream, begin in zip(STREAMS, begins[rank] or (), strict=False):
                    path = self.log_path(rank, stream)
                    end = 0 if path is None else _size(path)
                    if end > begin:
                        record.add(Text(rank, record.request, stream, "", begin, end))
            if begun[rank] > record.request:
                record.miss(rank, "the text, until the cell has ended,")
        if self._far_logs is not None:
            self._add_far_texts(record, self._far_logs, begins)

    def _add_far_texts(
        self, record: RunRecord, logs: FarLogs, begins: Mapping[int, tuple[int, int] | None]
    ) -> None:
        """The same of ranks on other hosts, as much as comes here."""
        wanted = {
            (rank, stream.removeprefix("std")): begin
            for rank, each in begins.items()
            for stream, begin in zip(STREAMS, each or (), strict=False)
        }
        for (rank, stream), text in logs.since(wanted).items():
            if text.problem:
                record.miss(rank, f"the text ({text.problem})")
            elif text.lost:
                record.miss(rank, f"{text.lost:,} bytes of text before what is shown")
            if text.data:
                written, end = text.data.decode("utf-8", "replace"), text.begin + len(text.data)
                record.add(Text(rank, record.request, f"std{stream}", written, text.begin, end))

    def _open_board(self) -> Board:
        """The session's board, that of a new agent where the first node has one."""
        if self.has_ended:
            raise NotThereError
        if self._board is None or self._board_path != self._kept.board:
            self.close()
            try:
                self._board = open_board(self._kept)
            except (OSError, ValueError) as error:
                raise NotThereError(str(error)) from None
            self._board_path = self._kept.board
        return self._board

    def _read_facts(self, before: _Facts | None = None) -> _Facts:
        """What the session's owner has written, unless it is known already.

        Raises:
            OSError: It is not there any more.
        """
        file = os.stat(os.path.join(self._kept.folder, STATE_FILE))
        version = file.st_ino, file.st_mtime_ns
        if before is not None and before.version == version:
            return before
        return _Facts(read_state(self._kept.folder), version)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
