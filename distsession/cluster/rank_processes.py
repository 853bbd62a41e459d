"""What the system says of the processes of ranks, agents and relays, on whichever host they are.

Of this machine's processes, /proc says it. Of those of another host, the relay there writes it on
the node's board, see ``process_watch``, and a pid is of no use here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from distsession.engine import process_state as system
from distsession.engine.process_state import ENDED, GONE, ZOMBIE
from distsession.protocol.board import Board
from distsession.ranks import RankInfo

__all__ = ["RankProcesses"]


class RankProcesses:
    """Asks of processes by their ranks and nodes.

    Args:
        ready: What is known of each rank; those that start are missing.
        is_here: Says of a node whether its processes are on this machine.
        board: Gives the kernel's board, once there is one.
        first_node: The number of the node that is 0 for users.
    """

    def __init__(
        self,
        ready: Mapping[int, RankInfo],
        is_here: Callable[[int], bool],
        board: Callable[[], Board | None],
        first_node: int = 0,
    ):
        self._ready, self._is_here, self._board = ready, is_here, board
        self._first_node = first_node

    def _node_of(self, info: RankInfo) -> int:
        return self._first_node + info.node_rank

    def state(self, rank: int) -> str:
        """The letter of /proc for a rank's process; empty where that is not known."""
        info, board = self._ready.get(rank), self._board()
        if info is None:
            return ""
        if self._is_here(self._node_of(info)):
            return system.process_state(info.pid)
        return "" if board is None else board.regions[rank].process_state(info.pid)

    def has_ended(self, rank: int) -> bool:
        """Whether it has ended, with all its threads, and its agent has not waited for it yet."""
        info = self._ready.get(rank)
        if info is None:
            return False
        if self._is_here(self._node_of(info)):
            return system.has_ended(info.pid)
        return self.state(rank) == ZOMBIE

    def is_gone(self, rank: int) -> bool:
        """Whether it has ended, and may have been waited for."""
        info = self._ready.get(rank)
        if info is None:
            return False
        if self._is_here(self._node_of(info)):
            # Without /proc, this process would be gone, too.
            return self.state(rank) in GONE and system.process_state(os.getpid()) not in GONE
        return self.state(rank) in ENDED

    def processor_time(self, rank: int) -> int:
        """Clock ticks that its main thread has used; of another host's, in runs."""
        info, board = self._ready.get(rank), self._board()
        if info is None:
            return 0
        if self._is_here(self._node_of(info)):
            return system.processor_time(info.pid)
        return 0 if board is None else board.regions[rank].processor_time

    def agent(self, node: int, pid: int) -> tuple[int, str]:
        """The pid of a node's agent, and its letter.

        Args:
            node: Which.
            pid: Of its process, as this machine knows it; 0 if it has ended.
        """
        if self._is_here(node):
            return pid, system.process_state(pid)
        board = self._board()
        ranks = [rank for rank, info in list(self._ready.items()) if self._node_of(info) == node]
        if board is None or not ranks:
            return pid, ""
        return board.regions[min(ranks)].agent_state

    def on_host(self, node: int) -> str:
        """``" on gpu2"`` for a node that is not here, to be put behind a command; else nothing."""
        if self._is_here(node):
            return ""
        return f" on {self.host(node)}"

    def host(self, node: int) -> str:
        """The host of a node; what to say of one that has not told its name."""
        hosts = [info.host for info in list(self._ready.values()) if self._node_of(info) == node]
        return hosts[0] if hosts else f"the host of node {node}"

    def continue_text(self, ranks: Iterable[int]) -> str:
        """The commands that let ranks go on which a signal has stopped, and on which hosts."""
        pids: dict[str, list[int]] = {}
        for rank in ranks:
            if (info := self._ready.get(rank)) is not None:
                pids.setdefault(self.on_host(self._node_of(info)), []).append(info.pid)
        return " and ".join(
            f"kill -CONT {' '.join(map(str, there))}{where}" for where, there in pids.items()
        )
