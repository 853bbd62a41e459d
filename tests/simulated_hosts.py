"""A session on simulated hosts: its kernel is real, and it sends and gets what others do.

So one machine is enough for a thousand ranks, and what is measured is the kernel.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distsession
from distsession import Session
from distsession.cluster.agents import Agents
from distsession.cluster.local import LocalLauncher
from distsession.options import SessionOptions, resolve_options
from distsession.protocol.board import Board, file_size
from distsession.rank_plan import RankPlan
from distsession.ranks import DeviceInfo, RankInfo
from tests.until import until

__all__ = ["SimulatedLauncher", "simulated_session"]

ROOT = Path(distsession.__file__).parents[1]
FIRST = 1
"""The node of the first ranks: none are on the kernel's own."""


class NoAgents(Agents):
    """Agents that need nothing to be there."""

    def runs(self, node: int = 0) -> bool:
        return True


class SimulatedLauncher(LocalLauncher):
    """Plays hosts by processes of ``simulated_relays``.

    Args:
        options: Of the session.
        nodes: How many hosts.
        per_node: Ranks of each.
        processes: By how many processes they are played.
    """

    shares_board = False
    first_node = FIRST

    def __init__(self, options: SessionOptions, nodes: int, per_node: int, processes: int):
        super().__init__(options, lambda message: None)
        self._nodes_played, self._per_node, self._count = nodes, per_node, processes
        self.played: list[subprocess.Popen[str]] = []

    def _make_agents(self) -> Agents:
        return NoAgents(self.folder, self._board_file, self._pids_of, self._epoch)

    def start(self) -> tuple[RankInfo, ...]:
        nodes, each = self._nodes_played, self._per_node
        world = nodes * each
        self._plan = RankPlan(("cpu",) * world, "gloo", (1,) * nodes, (each,) * nodes)
        os.ftruncate(self._board_file, file_size(world))
        self.board = self.channel.board = Board(self._board_file, world)
        reader, writer = os.pipe()  # nobody says anything on it
        self._agents._links[0] = _connection(writer)
        self.channel.add_agent(0, _connection(reader))
        share = -(-nodes // self._count)
        for first in range(FIRST, FIRST + nodes, share):
            count = min(share, FIRST + nodes - first)
            arguments = (self.folder, self._epoch, first, count, each, nodes)
            self.played.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.simulated_relays", *map(str, arguments)],
                    cwd=ROOT, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        until(lambda: len(self.channel.links.nodes) == nodes, f"{nodes} simulated relays")
        until(lambda: len(self.channel.payloads.relays.pids()) == nodes, "their streams")
        for rank in range(world):
            node = rank // each
            info = RankInfo(
                rank, rank % each, world, each, node, nodes, f"host{node}", os.getpid(), "gloo",
                DeviceInfo("cpu", "simulated"),
            )  # fmt: skip
            self._monitor.ready[rank] = info
            self.channel.set_identity(rank, 0, FIRST + node)
        return self.infos

    def close(self) -> None:
        try:
            super().close()
        finally:
            for process in self.played:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            self.played.clear()


def _connection(descriptor: int) -> Any:
    from multiprocessing.connection import Connection

    return Connection(descriptor)


@contextlib.contextmanager
def simulated_session(nodes: int, per_node: int, *, processes: int = 2) -> Iterator[Session]:
    """A session on so many hosts, none of which there is."""
    options = resolve_options({"ranks": 2})
    session = Session.__new__(Session)
    session._prepare(options, {}, None)
    session._begin(
        lambda: SimulatedLauncher(options, nodes, per_node, processes), "starting what plays hosts"
    )
    try:
        yield session
    finally:
        session.close()
