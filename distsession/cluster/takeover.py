"""How a process that has attached becomes the owner of ranks that are there.

The ranks connect to its sockets and say what they run, what waits and what is answered. A request
that all of its ranks have is waited for here; one that its kernel had sent to some of them only is
dropped whole. Then the ranks go on, and send again what nobody has acknowledged.

A rank in C code that lets no thread run connects later. What it was sent stands in the session's
journal alone until then, so it goes on only after the session has named the runs of that (see
:meth:`Takeover.adopt_late`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from distsession.cluster.agents import Agents
from distsession.cluster.attachment import Adopted, Attachment, LeftRequest, requests_of
from distsession.cluster.channel import SocketChannel
from distsession.cluster.monitor import Monitor, NodeGone
from distsession.cluster.pending import PendingRequest
from distsession.errors import SessionStateError
from distsession.protocol import serialize
from distsession.protocol.agent_messages import AgentReady, StopRanks, StoreReady
from distsession.protocol.attach import Adopt
from distsession.protocol.board import Board
from distsession.protocol.messages import ErrorInfo, RankAttached, ReconnectRequest, Reply, Resume

__all__ = ["Takeover"]

ATTACH_TIMEOUT_S = 5.0
"""Seconds that ranks have to connect. One may be in C code that holds the interpreter's lock: it
connects later."""
END_TIMEOUT_S = 5.0
"""Seconds that a rank has to end which was being started when its kernel ended."""


class Takeover:
    """Takes over the ranks of a session.

    Args:
        attachment: To its agents.
        monitor: Learns of agents and ranks.
        agents: Those of this process from now on.
        channel: With the sockets of this owner.
        board: That all ranks share.
        first_node: The agent of the first ranks.
    """

    def __init__(
        self,
        attachment: Attachment,
        monitor: Monitor,
        agents: Agents,
        channel: SocketChannel,
        board: Board,
        first_node: int = 0,
    ):
        self._first_node = first_node
        self._attachment = attachment
        self._monitor = monitor
        self._agents = agents
        self._channel = channel
        self._board = board
        self._plan = attachment.state.plan
        self._living = {r: g for a in attachment.agents.values() for r, g in a.ranks.items()}
        self._lock = threading.Lock()
        self._late: set[int] = set()
        """Ranks that have not connected yet, or not been told to go on."""
        self._is_named = False
        """All runs that late ranks may have are known."""
        self._awaited: list[PendingRequest] = []
        """Those, and others that late ranks are to answer."""
        self._dropped: set[int] = set()
        self.forked_in = {
            info.rank: self._living.get(info.rank, (info.generation, 0))[0]
            for info in attachment.state.infos
        }
        """For which generation each rank's process was started."""
        self.generation = 0
        """The last one that any rank has been in."""
        self.is_broken = False
        """The group of that generation has to be connected anew."""
        self.adopted: tuple[Adopted, ...] = ()
        self.half_sent: list[int] = []
        """Requests that run on some ranks, and that others never got."""
        self.ended: list[int] = []
        """Ranks that were being started when their kernel ended: they had nobody to meet."""

    def run(self, deadline: float) -> None:
        """Connect the ranks, and have them go on.

        Args:
            deadline: By ``time.monotonic()``.
        """
        self._board.begin_epoch(self._attachment.epoch)
        self._monitor.ready = {info.rank: info for info in self._attachment.state.infos}
        for rank, generation in self.forked_in.items():
            self._channel.set_identity(rank, generation, self._node_of(rank))
        self._take_agents()
        relays = self._channel.payloads.relays
        for node in self._attachment.agents:
            if node:  # what is sent to a node before its relay is there would be lost
                relays.wait_up(node, partial(self._agents.runs, node), deadline)
        limit = min(deadline, time.monotonic() + ATTACH_TIMEOUT_S)
        late = self._monitor.wait_attached(sorted(self._living), limit)
        said = [self._monitor.attached[rank] for rank in sorted(self._living) if rank not in late]
        generations = {rank.generation for rank in said}
        forked_in = [generation for generation, _ in self._living.values()]
        self.generation = max([*generations, *forked_in, 0])
        self.is_broken = len(generations) > 1 or any(rank.is_broken for rank in said)
        self._end_fresh(late)
        self._monitor.mark_lost(sorted({*self.forked_in} - {*self._living} - {*self._monitor.dead}))
        self._channel.payloads.link([rank.rank for rank in said])
        self._adopt(said)
        for each in said:
            self._resume(each.rank)
        with self._lock:
            self._late = {*late} - {*self.ended}

    @property
    def never_met(self) -> list[int]:
        """Ranks that will not come to a group in which others may wait for them."""
        if self.ended:
            return self.ended
        is_met = any(isinstance(each.request, ReconnectRequest) for each in self.adopted)
        return sorted(self._monitor.dead) if is_met else []

    def _node_of(self, rank: int) -> int:
        return self._first_node + self._plan.node_of(rank)

    # --- ranks that are late ----------------------------------------------------------------------

    def adopt_late(self, number: int, ranks: Sequence[int]) -> PendingRequest | None:
        """Wait for a request of a former owner that no rank has told of, if a late one may.

        Args:
            number: Of the request.
            ranks: That were to get it.
        """
        with self._lock:
            late = self._late.intersection(ranks)
            if not late or self._is_named:
                return None
            pending = self._channel.adopt(number, ranks, sorted(late))
            for rank in ranks:
                if rank in self._monitor.attached and rank not in late:
                    self._dropped.add(number)
                    _put_never_sent(pending, rank)
            self._awaited.append(pending)
            return pending

    def resume_late(self) -> None:
        """Let late ranks go on, now or once they connect: all that they may have is known."""
        with self._lock:
            self._is_named = True
            late = [rank for rank in self._late if rank in self._monitor.attached]
        for rank in late:
            self.on_attached(rank)

    def on_attached(self, rank: int) -> None:
        """A rank has connected; if it is late, it goes on."""
        with self._lock:
            if not self._is_named or rank not in self._late:
                return
            self._late.discard(rank)
            said = self._monitor.attached[rank]
            begun = [said.running, *said.answered]
            has = {each.request.id for each in begun if each is not None}
            has |= {each.request.id for each in said.queued} - self._dropped
            for pending in self._awaited:
                if rank in pending.missing and pending.request not in has:
                    _put_never_sent(pending, rank)
            self._resume(rank)

    # --- inside -----------------------------------------------------------------------------------

    def _take_agents(self) -> None:
        agents, links = self._attachment.agents, self._attachment.links
        for node, agent in agents.items():
            self._agents.adopt(node, agent.pid, links[node])
            self._monitor.handle(AgentReady(agent.host, node))
            self._channel.add_agent(node, links[node])
        self._monitor.handle(StoreReady(agents[0].store_port))
        for node in agents:
            self._agents.send(node, Adopt(self._attachment.epoch))
        for node in range(self._first_node, self._first_node + self._plan.nodes):
            if node not in agents:  # its host is gone, and was when nobody was there
                self._monitor.handle(NodeGone(node))
        for event in [event for agent in agents.values() for event in agent.events]:
            self._monitor.handle(event)

    def _end_fresh(self, late: Sequence[int]) -> None:
        """Of the ranks that are late, end those that were just being started; others are busy."""
        pids = {info.rank: info.pid for info in self._attachment.state.infos}
        fresh = [rank for rank in late if self._living[rank][1] != pids[rank]]
        self.ended = [rank for rank in fresh if rank not in self._monitor.dead]
        for rank in self.ended:
            self._agents.send(self._node_of(rank), StopRanks((rank,)))
        if self.ended:
            self._monitor.wait_exited(self.ended, END_TIMEOUT_S)
            self._monitor.mark_lost([r for r in self.ended if r not in self._monitor.dead])

    def _adopt(self, said: Sequence[RankAttached]) -> None:
        """Wait from now on for what a former owner has left."""
        seen = self._board.acknowledged(max((rank.before for rank in said), default=0))
        self._board.acknowledge(self._attachment.epoch, seen)
        self._channel.share_words()
        adopted, dropped = [], set()
        for left in requests_of(said):
            if left.request.id <= seen:
                dropped.add(left.request.id)
            elif not left.missing:
                adopted.append(self._adopt_one(left))
            else:  # lost on its way to some ranks, so the others are not to begin it, either
                dropped.add(left.request.id)
                if left.running:
                    self.half_sent.append(left.request.id)
                if left.begun:
                    pending = self._channel.adopt(left.request.id, left.begun, left.running)
                    adopted.append(Adopted(left.request, pending, left.missing))
        self.adopted, self._dropped = tuple(adopted), dropped
        self._awaited = [each.pending for each in adopted]
        numbers = [region.request for region in self._board.regions]
        self._channel.go_on_after(max(self._board.last_committed(), *numbers))

    def _adopt_one(self, left: LeftRequest) -> Adopted:
        dead = self._monitor.dead
        busy = (*left.running, *left.queued, *(rank for rank in left.gone if rank not in dead))
        ranks = sorted((*left.ranks, *left.gone))
        pending = self._channel.adopt(left.request.id, ranks, busy)
        for rank in left.gone:
            if rank in dead:
                pending.put_death(dead[rank])
        return Adopted(left.request, pending)

    def _resume(self, rank: int) -> None:
        self._channel.send_control(rank, Resume(tuple(sorted(self._dropped))))


def _put_never_sent(pending: PendingRequest, rank: int) -> None:
    error = SessionStateError(
        "this never reached the rank, for its kernel ended as it sent it: run it again."
    )
    info = ErrorInfo(type(error).__name__, str(error))
    payload = serialize.dump_value(error, what="an error")
    pending.put_reply(Reply(pending.request, rank, error=info), payload)
