"""What is known of each rank's process: starting, ready, dead."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from distsession.cluster.deaths import (
    AGENT_GONE,
    AGENT_REMEDY,
    JobEnd,
    agent_text,
    death_error,
    ended_text,
    node_gone_text,
    node_remedy,
    node_text,
    not_ready_text,
    relay_gone_text,
    restart_text,
)
from distsession.errors import (
    EngineDiedError,
    LaunchError,
    LaunchTimeoutError,
    ProcessGroupError,
    SessionStateError,
)
from distsession.protocol.agent_messages import (
    AgentFailed,
    AgentReady,
    GpuMemory,
    GpuReply,
    LogPiece,
    PreloadReply,
    RankExited,
    RanksNotStarted,
    StoreEnded,
    StoreReady,
    UsageReply,
)
from distsession.protocol.messages import EngineRegistered, RankAttached, RankFailed, RankReady
from distsession.ranks import HostInfo, RankInfo, ranks_text

__all__ = ["Monitor", "NodeGone", "RankUnreported", "RelayGone"]

log = logging.getLogger(__name__)


JOB_END_S = 1.0
"""Seconds within which the end of a job is told once the link of a host in it has closed."""


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The link to the agent of a node other than the first has closed."""

    node: int


@dataclass(frozen=True, slots=True)
class RelayGone:
    """The relay of a node has ended, and its agent has not.

    Attributes:
        is_replaced: Another one is there already.
    """

    node: int
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class RankUnreported:
    """A rank has ended, and its agent does not say so.

    Attributes:
        text: Why nobody says so.
    """

    rank: int
    pid: int
    text: str


class Monitor:
    """Collects what the channel hears, and lets others wait for it.

    Args:
        on_deaths: Called, in the channel's thread, when ranks that were in use have died.
        operation_of: Gives the collective that a rank's main thread waits in; empty if in none.
        first_node: The agent of the ranks whose node's number is 0 for users.
    """

    def __init__(
        self,
        on_deaths: Callable[[Sequence[EngineDiedError]], None],
        operation_of: Callable[[int], str] = lambda _: "",
        first_node: int = 0,
    ):
        self.host_names: dict[int, str] = {}
        """Of nodes that are other hosts."""
        self.why_gone: dict[int, str] = {}
        self.job_end: JobEnd | None = None
        """How the job ended that all hosts are in, once it has."""
        self.how_ended: Callable[[int], str] = lambda node: ""
        """Says how a node's agent has ended, once its link has closed; empty if nobody knows."""
        self.may_end_with_job: Callable[[], bool] = lambda: False
        """Whether all hosts are in one job."""
        self.starts_hosts_alone = True
        """What is known of the end of a node, before it comes."""
        self._first_node = first_node
        self._on_deaths = on_deaths
        self.operation_of = operation_of
        self._changed = threading.Condition()
        self.hosts: dict[int, HostInfo] = {}
        self.store_port = 0
        self.store_ended = ""
        """What to say of a store that has ended since the present generation began."""
        self.store_is_down = False
        self.tcp_store_ended = ""
        self.lost_nodes: set[int] = set()
        self._lost_relays: set[int] = set()
        self.ready: dict[int, RankInfo] = {}
        self.dead: dict[int, EngineDiedError] = {}
        self.cut_off: set[int] = set()
        """Those of them whose processes live, but that nobody reaches."""
        self.pids: dict[int, int] = {}
        self.engine_ids: dict[int, int] = {}
        self.unregistered: dict[int, str] = {}
        """Why an engine could not register, for those whose id is below 0."""
        self._gauges: dict[int, UsageReply] = {}
        self._log_asked: dict[int, int] = {}
        """The number of the last question for a part of a log that each node's agent was asked."""
        self._log_pieces: dict[int, LogPiece] = {}
        self._preloads: dict[int, PreloadReply] = {}
        """What the agent of each node has said last of modules that it was to import."""
        self.gpus: dict[int, tuple[GpuMemory, ...]] = {}
        """Of each node, as they were at the start."""
        self.agent_gone = False
        self._let_go = ""
        """Why nothing more is heard of ranks that live."""
        self.closing = False
        """The user closes the session: deaths from here on are no surprise."""
        self._agent_problem = ""
        self.attached: dict[int, RankAttached] = {}
        """What ranks said when this kernel attached."""
        self._failed: dict[int, RankFailed] = {}
        self._exited: dict[int, RankExited] = {}
        self._not_started: dict[int, RanksNotStarted] = {}
        """What the agent of each node has said last of what it could not start."""
        self._unreported: set[tuple[int, int]] = set()
        self._starting: set[int] = set()
        """Ranks that are being replaced, until their fresh processes are ready."""

    def handle(self, message: object) -> None:
        """Take in one message; None says that the link of the first node's agent has closed."""
        deaths: list[EngineDiedError] = []
        if message is None or isinstance(message, NodeGone):
            self._note_how_ended(0 if message is None else message.node)
        with self._changed:
            match message:
                case AgentReady():
                    self.hosts[message.node] = message.host
                case StoreReady():
                    self.store_port = message.port
                    self.store_is_down, self.tcp_store_ended = False, ""
                case StoreEnded():
                    self._note_store_end(message)
                case AgentFailed():
                    self._agent_problem = message.reason
                case RankReady():
                    self.ready[message.rank] = message.info
                    self._starting.discard(message.rank)
                case RankAttached():
                    self.ready[message.rank] = message.info
                    self.attached[message.rank] = message
                case RankFailed():
                    self._failed[message.rank] = message
                case EngineRegistered():
                    self.engine_ids[message.rank] = message.engine_id
                    self.unregistered[message.rank] = message.problem
                case UsageReply():
                    self._gauges[message.node] = message
                case LogPiece():
                    self._log_pieces[message.node] = message
                case PreloadReply():
                    self._preloads[message.node] = message
                case GpuReply():
                    self.gpus[message.node] = message.gpus
                case RanksNotStarted():
                    self._not_started[message.node] = message
                case RankExited():
                    deaths += self._note_exit(message)
                case RankUnreported():
                    deaths += self._note_unreported(message)
                case NodeGone():
                    self.lost_nodes.add(message.node)
                    self.cut_off = {r for r in self.cut_off if not self._is_on(r, message.node)}
                    if self.may_end_with_job() and self.job_end is None:
                        # That is told on another way, and says more than the loss of its host.
                        self._changed.wait_for(lambda: self.job_end is not None, JOB_END_S)
                    deaths += self._lost_with_node(message.node)
                case RelayGone():
                    deaths += self._lost_with_relay(message)
                case None:
                    self.agent_gone = True
                    self.cut_off.clear()
                    text = self.agent_gone_text
                    lost = [self._lost_with_agent(rank, text) for rank in self._living()]
                    deaths += lost
            # Before anybody who waits goes on: a fresh process in the place of a dead one must not
            # be taken for it.
            if deaths:
                self._on_deaths(deaths)
            self._changed.notify_all()

    def _note_how_ended(self, node: int) -> None:
        if not self.closing and (how := self.how_ended(node)):
            self.why_gone.setdefault(node, f"it {how}")

    @property
    def agent_gone_text(self) -> str:
        """What the end of the first agent means, how it was if known, and what to do about it."""
        return self._let_go or f"{self._agent_gone} {AGENT_REMEDY}"

    @property
    def _agent_gone(self) -> str:
        if self._let_go:
            return self._let_go
        why = self.why_gone.get(0, "")
        return AGENT_GONE.replace(" is gone", f" is gone ({why})") if why else AGENT_GONE

    def _living(self) -> list[int]:
        return [rank for rank in sorted(self.ready) if rank not in self.dead]

    def _host(self, node: int) -> str:
        return self.host_names.get(node, "")

    def _is_on(self, rank: int, node: int) -> bool:
        return self.ready[rank].node_rank + self._first_node == node

    def _note_exit(self, message: RankExited) -> list[EngineDiedError]:
        if (message.rank, message.pid) in self._unreported:
            self._unreported.discard((message.rank, message.pid))
            if message.rank not in self.dead:  # it has been replaced meanwhile
                return []
        self._exited[message.rank] = message
        if message.with_agent and not self.closing:
            return []  # its agent is about to be lost, which says more
        info = self.ready.get(message.rank)
        self.engine_ids.pop(message.rank, None)
        error = death_error(message, operation=self.operation_of(message.rank))
        if info is not None and info.pid == message.pid:
            self._set_ended(error)
            return [error]
        return []

    def _set_ended(self, error: EngineDiedError) -> None:
        """A rank has no process any more, so nobody waits for its end, wherever it was before."""
        self.dead[error.rank] = error
        self.cut_off.discard(error.rank)
        self._starting.discard(error.rank)

    def _note_store_end(self, message: StoreEnded) -> None:
        how = ended_text(message.returncode)
        if message.is_tcp:
            text = f"torch's TCP store, at which scripts meet, (pid {message.pid}) {how}"
            now = "another one is in its place, and what was in it is lost."
        else:
            text = f"The session's rendezvous store (pid {message.pid}) {how}"
            now = (
                "another one is in its place. What was in it is lost; the next run connects the "
                "process group anew."
            )
        if not message.is_replaced:
            now = "it could not be replaced: session.restart() starts it again, with all ranks."
        if message.is_tcp:
            self.tcp_store_ended = f"{text[0].upper()}{text[1:]}; {now}"
        else:
            self.store_ended = f"{text}; {now}"
            self.store_is_down = not message.is_replaced
        log.warning("%s", self.tcp_store_ended if message.is_tcp else self.store_ended)

    def note_job_end(self, end: JobEnd) -> None:
        """The job that all hosts are in has ended."""
        with self._changed:
            self.job_end = end
            self._changed.notify_all()

    def mark_lost(self, ranks: Iterable[int]) -> None:
        """These were to be started, and are ended since that did not work."""
        with self._changed:
            lost = sorted(ranks)
            be = "was" if len(lost) == 1 else "were"
            how = f"{be} to be replaced, but did not start"
            remedy = "session.restart() starts all ranks again."
            if len(lost) < len(self.ready):
                remedy = restart_text(lost)
            for rank in lost:
                info = self.ready[rank]
                error = EngineDiedError(
                    f"{ranks_text(lost)} {how}.",
                    rank=rank,
                    pid=info.pid,
                    returncode=-signal.SIGKILL,
                    how=how,
                    remedy=remedy,
                )
                self._set_ended(error)
            self._on_deaths([self.dead[rank] for rank in lost])

    def _note_unreported(self, message: RankUnreported) -> list[EngineDiedError]:
        info = self.ready.get(message.rank)
        if info is None or info.pid != message.pid:
            return []
        if message.rank in self.dead and message.rank not in self.cut_off:
            return []
        error = EngineDiedError(
            f"rank {message.rank} (pid {message.pid}) has ended; {message.text}.",
            rank=message.rank,
            pid=message.pid,
            returncode=-signal.SIGKILL,
            how=f"has ended; {message.text}",
            remedy=restart_text([message.rank]),
        )
        self._set_ended(error)
        self._unreported.add((message.rank, message.pid))
        return [error]

    def _lost_with_node(self, node: int) -> list[EngineDiedError]:
        ranks = [rank for rank in self._living() if self._is_on(rank, node)]
        if (job := self.job_end) is not None:
            text, remedy = job.text, job.remedy
        else:
            text = node_gone_text(node, ranks, self._host(node), self.why_gone.get(node, ""))
            remedy = node_remedy(ranks, len(self.ready), alone=self.starts_hosts_alone)
        return [self._lost_with_agent(rank, text, remedy=remedy) for rank in ranks]

    def _lost_with_relay(self, message: RelayGone) -> list[EngineDiedError]:
        node = message.node
        # A rank that is starting has no connection to the relay that ended.
        living = (rank for rank in self._living() if rank not in self._starting)
        ranks = [rank for rank in living if self._is_on(rank, node)]
        self.cut_off.update(ranks)
        if not message.is_replaced:
            self._lost_relays.add(node)
        elif not ranks:
            return []
        text = relay_gone_text(node, ranks, self._host(node))
        log.warning("%s", text)
        return [self._lost_with_agent(rank, text, "cannot be reached") for rank in ranks]

    def lose_all(self, text: str) -> None:
        """Nobody here hears of these ranks any more, which live."""
        with self._changed:
            self.agent_gone = True
            self._let_go = text
            self._on_deaths([self._lost_with_agent(rank, text) for rank in self._living()])
            self._changed.notify_all()

    def _lost_with_agent(
        self, rank: int, text: str, fact: str = "is gone", *, remedy: str = ""
    ) -> EngineDiedError:
        info = self.ready[rank]
        how = "ended with its session, which was closed." if self.closing else f"{fact}: {text}"
        error = EngineDiedError(
            f"rank {rank} (pid {info.pid}) {how}",
            rank=rank,
            pid=info.pid,
            returncode=-signal.SIGKILL,
            how=how.rstrip("."),
            remedy="" if self.closing else remedy,
        )
        self.dead[rank] = error
        return error

    def expect(self, node: int) -> None:
        """Another agent takes the place of a node's that is gone."""
        with self._changed:
            self.lost_nodes.discard(node)
            self.why_gone.pop(node, None)
            self.hosts.pop(node, None)
            self._gauges.pop(node, None)  # its questions are counted anew
            self._log_asked.pop(node, None)
            self._log_pieces.pop(node, None)

    def expect_relay(self, node: int) -> None:
        """The relay of a node lives, or another one has come."""
        with self._changed:
            self._lost_relays.discard(node)

    def expect_store(self) -> None:
        """The first node's agent starts a rendezvous store if there is none any more."""
        with self._changed:
            self.store_port, self.store_is_down, self.store_ended = 0, False, ""

    def is_gone(self, node: int) -> bool:
        """Whether a node's agent has ended, or is about to with the session."""
        return self.closing or self.agent_gone or node in self.lost_nodes

    # --- waiting ----------------------------------------------------------------------------------

    def forget(self, ranks: Iterable[int]) -> None:
        """These ranks are about to be started anew."""
        with self._changed:
            for rank in tuple(ranks):
                self.cut_off.discard(rank)
                self._starting.add(rank)
                for known in (self.dead, self._failed, self._exited, self.engine_ids):
                    known.pop(rank, None)
            self._not_started.clear()

    def wait_exited(self, ranks: Sequence[int], timeout: float) -> bool:
        """Wait until the processes of these ranks have ended."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self.agent_gone
                    or bool(self.lost_nodes)
                    or all(self._has_no_process(rank) for rank in ranks)
                ),
                timeout,
            )

    def _has_no_process(self, rank: int) -> bool:
        missing = (rank in said.ranks for said in self._not_started.values())
        return rank in self.dead or rank in self._exited or any(missing)

    def wait_lost(self, node: int, timeout: float) -> bool:
        """Wait until the link of a node's agent has closed."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.agent_gone or node in self.lost_nodes, timeout
            )

    def wait_attached(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Wait until ranks have connected to this kernel; gives those that have not."""

        def late() -> list[int]:
            return [r for r in ranks if r not in self.attached and r not in self._exited]

        with self._changed:
            self._changed.wait_for(
                lambda: self.agent_gone or not late(), max(0.0, deadline - time.monotonic())
            )
            return [rank for rank in ranks if rank not in self.attached]

    def wait_host(self, node: int, is_alive: Callable[[], bool], deadline: float) -> HostInfo:
        """Wait until the agent of a node has imported torch."""
        with self._changed:
            while node not in self.hosts:
                if self._agent_problem:
                    raise LaunchError(self._agent_problem)
                if self.agent_gone or node in self.lost_nodes or not is_alive():
                    who = agent_text(node, self._host(node))
                    how = self.why_gone.get(node, "").removeprefix("it ") or self.how_ended(node)
                    raise LaunchError(not_ready_text(who, how))
                if time.monotonic() > deadline:
                    raise LaunchTimeoutError("importing torch took too long.")
                self._changed.wait(0.1)
            return self.hosts[node]

    def wait_store(self, deadline: float) -> int:
        """Wait until the rendezvous store has a port."""
        with self._changed:
            while not self.store_port:
                self._raise_failure(())
                if time.monotonic() > deadline:
                    raise LaunchTimeoutError("the rendezvous store did not come up.")
                self._changed.wait(0.1)
            return self.store_port

    def late(self, world: Sequence[int], generation: int) -> list[int]:
        """Ranks that are not yet in the process group of a generation."""

        def here(rank: int) -> bool:
            return rank in self.ready and self.ready[rank].generation == generation

        return [rank for rank in world if not here(rank)]

    def wait_ready(
        self,
        world: Sequence[int],
        generation: int,
        deadline: float,
        problem: Callable[[], str] = str,
    ) -> None:
        """Wait until each rank is in the process group of a generation.

        Args:
            world: All ranks.
            generation: Of the group.
            deadline: By ``time.monotonic()``.
            problem: Asked meanwhile for what prevents it; nothing by default.
        """
        with self._changed:
            while late := self.late(world, generation):
                self._raise_failure(world, generation)
                if text := problem():
                    raise ProcessGroupError(f"the process group could not be connected: {text}")
                if time.monotonic() > deadline:
                    raise LaunchTimeoutError(f"{ranks_text(late)} did not become ready.")
                self._changed.wait(0.1)

    def _raise_failure(self, world: Sequence[int], generation: int = -1) -> None:
        if self.store_is_down and world:
            how = self.store_ended.partition(";")[0]
            raise LaunchError(f"{how}, and so did those in its place: ranks have nowhere to meet.")
        if self.agent_gone:
            raise LaunchError("the session was closed." if self.closing else self._agent_gone)
        for said in self._not_started.values():
            if said.generation == generation or not world:
                which = ranks_text(said.ranks) if said.ranks else "the ranks"
                raise LaunchError(f"{which} could not be started: {said.reason}")
        for node in sorted(self.lost_nodes):
            who, its = agent_text(node, self._host(node)), node_text(node, self._host(node))
            how = self.why_gone.get(node, "").removeprefix("it ") or "ended"
            raise LaunchError(f"{who} {how}, and with it the ranks of {its}.")
        for node in sorted(self._lost_relays) if world else ():
            its = node_text(node, self._host(node))
            raise LaunchError(f"the relay of {its} ended: its ranks cannot be reached.")
        for rank in world:
            failed = self._failed.get(rank)
            if failed is not None and failed.generation == generation:
                error = failed.error
                text = f"{error.ename}: {error.evalue}"
                if error.ename == "StoreEndedError" and self.store_ended:
                    text = self.store_ended.partition(";")[0]
                limit = f". {failed.limit}" if failed.limit else ""
                raise ProcessGroupError(
                    f"rank {rank} could not join the process group: {text}{limit}"
                )
        for rank in world:
            # The end of a process of an earlier attempt may be told of late.
            exited = self._exited.get(rank)
            if exited is None or exited.with_agent:  # the end of its agent, which says more, comes
                continue
            if exited.generation == generation or rank in self.dead:
                raise LaunchError(str(death_error(self._exited[rank], while_starting=True)))
        for rank in world:
            if rank in self.dead and rank not in self._exited:  # it was cut off meanwhile
                raise LaunchError(str(self.dead[rank]))

    def has_usage(self, node: int, number: int) -> bool:
        """Whether the agent of a node has come to the question of this number."""
        return node in self._gauges and self._gauges[node].number >= number

    def wait_usage(self, asked: Mapping[int, int], timeout: float) -> UsageReply | None:
        """What the ranks of some nodes use; what was last known where no answer comes in time.

        Args:
            asked: For each node the number of its question.
            timeout: In seconds.
        """

        def answered() -> bool:
            return all(self.has_usage(node, number) for node, number in asked.items())

        with self._changed:
            self._changed.wait_for(lambda: self.agent_gone or answered(), timeout)
            known = [self._gauges[node] for node in asked if node in self._gauges]
        if not known:
            return None
        uses = tuple(use for one in known for use in one.uses)
        return UsageReply(known[0].number, uses)

    def expect_log(self, node: int) -> int:
        """The number of a question for a part of a log, which is asked now."""
        with self._changed:
            number = self._log_asked[node] = self._log_asked.get(node, 0) + 1
            return number

    def is_log_expected(self, node: int) -> bool:
        """Whether the last question has not been answered."""
        piece, number = self._log_pieces.get(node), self._log_asked.get(node, 0)
        return number != 0 and (piece is None or piece.number != number)

    def wait_log(self, node: int, timeout: float) -> LogPiece | None:
        """The answer to the last question; None if it does not come in time.

        Args:
            node: Whose agent was asked.
            timeout: In seconds.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.agent_gone or not self.is_log_expected(node), timeout
            )
            return None if self.is_log_expected(node) else self._log_pieces.get(node)

    def wait_gpus(self, nodes: Sequence[int], timeout: float) -> dict[int, tuple[GpuMemory, ...]]:
        """The GPUs of some nodes; without those of nodes whose agents do not say in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.agent_gone or all(node in self.gpus for node in nodes), timeout
            )
            return dict(self.gpus)

    def wait_preload(self, nodes: Sequence[int], number: int) -> dict[int, PreloadReply]:
        """Wait until the agents of some nodes have imported modules, or one says why it cannot.

        Args:
            nodes: Theirs.
            number: Of the request.

        Raises:
            SessionStateError: One of the agents is gone.
        """
        with self._changed:
            while True:
                said = {
                    node: reply
                    for node in nodes
                    if (reply := self._preloads.get(node)) is not None and reply.number == number
                }
                if len(said) == len(nodes) or any(reply.problem for reply in said.values()):
                    return said
                if self.agent_gone:
                    raise SessionStateError(
                        "the session was closed." if self.closing else self.agent_gone_text
                    )
                for node in sorted(self.lost_nodes.intersection(nodes)):
                    who = agent_text(node, self._host(node))
                    raise SessionStateError(f"{who} is gone: call session.restart().")
                self._changed.wait(0.1)

    def forget_engines(self, ranks: Iterable[int]) -> None:
        """These ranks are about to register with ipyparallel."""
        with self._changed:
            for rank in ranks:
                self.engine_ids.pop(rank, None)

    def late_engines(self, world: Sequence[int]) -> list[int]:
        """Ranks that have not registered with ipyparallel."""
        return [rank for rank in world if rank not in self.engine_ids]

    def wait_registered(self, world: Sequence[int], timeout: float) -> dict[int, int]:
        """Wait until each rank has an engine id, or cannot get one; gives rank -> id."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.agent_gone or bool(self.dead) or not self.late_engines(world), timeout
            )
            return {rank: self.engine_ids[rank] for rank in world if rank in self.engine_ids}
