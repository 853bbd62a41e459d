"""What a session that is kept does and uses, seen from outside: nobody of it is asked anything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distsession.cluster.kept import KeptSession
from distsession.cluster.session_processes import (
    SessionProcesses,
    look_at_processes,
    memory_bytes,
)
from distsession.engine.process_state import ENDED, STOPPED, process_state
from distsession.engine.usage import GpuReader
from distsession.protocol.board import Board, Region
from distsession.protocol.board_report import running_report
from distsession.protocol.messages import RankReport
from distsession.protocol.rank_state import Ending, Outcome, RankState

__all__ = [
    "KeptState",
    "board_reports",
    "far_pids",
    "kept_reports",
    "look_at",
    "open_board",
    "rank_pids",
]

HAS_ENDED = Outcome(Ending.DIED, "its process has ended")
LOST = Outcome(Ending.DIED, "what held the connection to its host has ended")


@dataclass(frozen=True)
class KeptState:
    """A session that is kept, as it is at this moment.

    Attributes:
        kept: Which.
        reports: What each rank does.
        problem: Why that is not known; empty if it is.
        pids: Of the ranks that live.
        memory_bytes: Memory that its processes hold together.
        gpu_memory_bytes: The same of GPUs; None where that is not known.
        stopped_agents: The nodes whose agents are stopped by a signal, with their pids.
    """

    kept: KeptSession
    reports: Mapping[int, RankReport]
    problem: str = ""
    pids: Mapping[int, int] = field(default_factory=dict)
    memory_bytes: int = 0
    gpu_memory_bytes: int | None = None
    stopped_agents: Mapping[int, int] = field(default_factory=dict)


def look_at(kept: KeptSession, gpus: GpuReader | None = None) -> KeptState:
    """What a session does and uses now.

    Args:
        kept: Which.
        gpus: Asks how much memory of GPUs is used; without it that is not known.
    """
    gone = kept.gone_agents
    living = {node: pid for node, pid in enumerate(kept.agents) if node not in gone}
    processes = look_at_processes(kept.folder, living.values())
    reports, problem = _reports_or_problem(kept, processes)
    return KeptState(
        kept,
        reports,
        problem,
        rank_pids(kept, processes),
        memory_bytes(processes.all),
        gpus.memory_of(processes.all) if gpus is not None else None,
        {node: pid for node, pid in living.items() if process_state(pid) in STOPPED},
    )


def _reports_or_problem(
    kept: KeptSession, processes: SessionProcesses
) -> tuple[dict[int, RankReport], str]:
    if not kept.is_of_this_version:
        return {}, f"of distsession {kept.version}"
    try:
        return kept_reports(kept, processes), ""
    except (OSError, ValueError) as error:  # its agent is gone, or has been replaced just now
        return {}, f"its board cannot be read: {error}"


def kept_reports(
    kept: KeptSession, processes: SessionProcesses | None = None
) -> dict[int, RankReport]:
    """What each rank does, by the memory in which all of them write that down.

    Args:
        kept: The session.
        processes: Those of the session, if they are known already.

    Raises:
        OSError: That memory cannot be had, since the agent of the first node has ended.
        ValueError: It is not what it should be.
    """
    known = processes or look_at_processes(kept.folder, kept.agents)
    if kept.is_keeper_gone:
        return {
            rank: RankReport(rank, RankState.DEAD, outcome=LOST) for rank in range(kept.world_size)
        }
    board = open_board(kept)
    try:
        return board_reports(board, None if kept.keeper else known.ranks)
    finally:
        board.close()


def rank_pids(kept: KeptSession, processes: SessionProcesses) -> Mapping[int, int]:
    """The ranks that live, and their processes, on whichever host these are."""
    if not kept.keeper:
        return processes.ranks
    with contextlib.suppress(OSError, ValueError):  # the agent here is gone
        board = open_board(kept)
        try:
            return far_pids(board)
        finally:
            board.close()
    return {}


def open_board(kept: KeptSession) -> Board:
    """The memory in which all ranks write down what they do, to be read only.

    Args:
        kept: The session.

    Raises:
        OSError: It cannot be had, since the agent of the first node has ended.
        ValueError: It is not what it should be.
    """
    descriptor = os.open(kept.board, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return Board(descriptor, kept.world_size, is_read_only=True)
    finally:
        os.close(descriptor)


def far_pids(board: Board) -> dict[int, int]:
    """The ranks that live on other hosts, and their processes there, as the board says."""
    found = {region.rank: region.process[0] for region in board.regions}
    return {
        rank: pid
        for rank, pid in found.items()
        if pid and board.regions[rank].process_state(pid) not in ENDED
    }


def board_reports(board: Board, pids: Mapping[int, int] | None) -> dict[int, RankReport]:
    """What each rank does, as the board says.

    Args:
        board: Of the session.
        pids: Of the ranks that live; None where they are on other hosts.
    """
    if pids is not None:
        letters = {rank: process_state(pid) for rank, pid in pids.items()}
    else:
        letters = {r: board.regions[r].process_state(pid) for r, pid in far_pids(board).items()}
    return {region.rank: _report(region, letters) for region in board.regions}


def _report(region: Region, letters: Mapping[int, str]) -> RankReport:
    if region.rank not in letters:
        return RankReport(
            region.rank, RankState.DEAD, outcome=HAS_ENDED, sequences=region.sequences()
        )
    if region.request:
        report = running_report(region, letters[region.rank])
        return replace(report, place=report.place or region.last_line)
    return RankReport(
        region.rank,
        RankState.IDLE,
        region.seconds,
        sequences=region.sequences(),
        refused=region.refused(),
    )
