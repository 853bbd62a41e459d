"""Processes that do nothing any more and do not say so.

An agent that is stopped by a signal reports no end of a rank, and a relay that is stopped passes
nothing on. Both are seen in what the system says of their processes, or, on another host, in that
nothing comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from distsession.cluster.agents import Agents
from distsession.cluster.channel import SocketChannel
from distsession.cluster.deaths import agent_text, node_text
from distsession.cluster.monitor import Monitor, RankUnreported
from distsession.cluster.rank_processes import RankProcesses
from distsession.engine.process_state import STOPPED, process_state
from distsession.ranks import RankInfo

__all__ = ["Health"]

LOOK_FOR_ENDS_S = 0.25
"""Seconds between two looks for ranks that have ended and of which no agent tells."""
STOPPED_AGENT_S = 0.5
"""Seconds after which a rank that has ended counts as dead though its agent, stopped by a signal,
says nothing."""
SILENT_AGENT_S = 10.0
"""The same of an agent that is not stopped, and may only be slow."""
SILENT_RELAY_S = 5.0
"""Seconds without a word after which a relay of another host counts as stopped or cut off."""
FAR_WORDS_S = 2.0
"""Seconds after which what is known of agents and relays of other hosts is no longer that of before
somebody let them go on."""


class _Ranks(Protocol):
    """What is needed of the launcher."""

    @property
    def channel(self) -> SocketChannel: ...
    @property
    def processes(self) -> RankProcesses: ...
    @property
    def infos(self) -> tuple[RankInfo, ...]: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def nodes(self) -> range: ...
    def node_of(self, rank: int) -> int: ...
    def is_here(self, node: int) -> bool: ...


class Health:
    """Looks at the agents and relays of a session, and for ranks whose end nobody has told.

    Args:
        ranks: The session's.
        agents: Its.
        monitor: Is told of such ranks.
    """

    def __init__(self, ranks: _Ranks, agents: Agents, monitor: Monitor):
        self._ranks, self._agents, self._monitor = ranks, agents, monitor
        self._unreported: dict[tuple[int, int], float] = {}
        """Since when a rank, and its process, has been seen to have ended."""
        self._looked_at = 0.0

    # --- what is stopped --------------------------------------------------------------------------

    def stopped(self) -> Iterator[str]:
        """What to say of each agent and each relay that is stopped."""
        yield from self._stopped_agents()
        yield from self._stopped_relays()

    def await_stopped(self) -> str:
        """The first of them, before something is asked of them all; nothing if none is.

        That of another host may have gone on meanwhile, and is given a moment to say so.
        """
        is_far = not all(map(self._ranks.is_here, self._ranks.nodes))
        deadline = time.monotonic() + (FAR_WORDS_S if is_far else 0.0)
        while stopped := [*self.stopped()]:
            if time.monotonic() >= deadline:
                return stopped[0]
            time.sleep(0.02)
        return ""

    def _stopped_agents(self) -> Iterator[str]:
        for node in range(self._ranks.nodes.stop):
            if not self._agents.runs(node):
                continue
            pid, letter = self._agent(node)
            if letter in STOPPED:
                who = agent_text(node, self._agents.name(node))
                where = self._ranks.processes.on_host(node)
                yield (
                    f"{who[0].upper()}{who[1:]} (pid {pid}) is stopped by SIGSTOP or a debugger: "
                    "no rank can be replaced, and none that ends is reported. "
                    f"`kill -CONT {pid}`{where} lets it go on."
                )

    def _stopped_relays(self) -> Iterator[str]:
        channel = self._ranks.channel
        for node, pid in channel.payloads.relays.pids().items():
            who = f"The relay of {node_text(node, self._agents.name(node))} (pid {pid})"
            where = self._ranks.processes.on_host(node)
            if self._ranks.is_here(node):
                if process_state(pid) in STOPPED:
                    yield (
                        f"{who} is stopped by SIGSTOP or a debugger: none of the node's ranks is "
                        f"reached. `kill -CONT {pid}` lets it go on."
                    )
            elif (seconds := channel.links.silent_s(node)) > SILENT_RELAY_S:
                yield (
                    f"Nothing has come from {who[0].lower()}{who[1:]}{where} for {seconds:.0f} s: "
                    "none of the node's ranks is reached. If it is stopped by SIGSTOP, "
                    f"`kill -CONT {pid}`{where} lets it go on."
                )

    def _agent(self, node: int) -> tuple[int, str]:
        """The pid of a node's agent, and its letter of /proc."""
        return self._ranks.processes.agent(node, self._agents.pid(node))

    # --- ends that nobody has told ----------------------------------------------------------------

    def unreported(self, rank: int) -> str:
        """Why the agent of a rank that has ended has not said how."""
        node = self._ranks.node_of(rank)
        pid, letter = self._agent(node)
        who = f"{agent_text(node, self._agents.name(node))} (pid {pid})"
        where = self._ranks.processes.on_host(node)
        if letter in STOPPED:
            return (
                f"{who} cannot say how, since it is stopped: `kill -CONT {pid}`{where} lets it "
                "go on"
            )
        return f"{who} has not said how"

    def note_unreported(self) -> None:
        """Tell the monitor of ranks that ended some time ago; now and then is often enough."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_FOR_ENDS_S:
            return
        self._looked_at = now
        for info in self._ranks.infos:
            rank = info.rank
            is_late = rank not in self._monitor.dead and self._ranks.processes.has_ended(rank)
            process = rank, info.pid
            if not is_late or self._ranks.is_closed:
                self._unreported.pop(process, None)
                continue
            since = self._unreported.setdefault(process, now)
            is_stopped = self._agent(self._ranks.node_of(rank))[1] in STOPPED
            if now - since > (STOPPED_AGENT_S if is_stopped else SILENT_AGENT_S):
                self._monitor.handle(RankUnreported(rank, info.pid, self.unreported(rank)))
