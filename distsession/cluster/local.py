"""Ranks on this machine: agents that fork them, one for each node that the machine plays."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distsession import __version__
from distsession.cluster.agents import Agents
from distsession.cluster.attachment import (
    Adopted,
    Attachment,
    FarHosts,
    LauncherState,
    write_state,
)
from distsession.cluster.base import Launcher
from distsession.cluster.channel import SocketChannel
from distsession.cluster.deaths import node_text
from distsession.cluster.descriptor_limit import check_room, with_remedy
from distsession.cluster.folder import PrivateFolder
from distsession.cluster.gpu_notes import full_gpus
from distsession.cluster.health import Health
from distsession.cluster.interrupts import InterruptHold, interrupts_held
from distsession.cluster.ipyparallel import CONTROLLER_GONE
from distsession.cluster.kept_session import write_kept
from distsession.cluster.monitor import Monitor, NodeGone, RelayGone
from distsession.cluster.pending import OutputMessage, PendingRequest
from distsession.cluster.preload import Preload
from distsession.cluster.rank_processes import RankProcesses
from distsession.cluster.reconnect import UNDISTURBED_S, Halted, Reconnect, failure_of
from distsession.cluster.registration import Registration
from distsession.cluster.takeover import Takeover
from distsession.engine import process_limit
from distsession.engine.log_file import log_path
from distsession.errors import (
    DOCTOR_REMEDY,
    DistsessionError,
    EngineDiedError,
    LaunchError,
    LaunchTimeoutError,
    RunInterrupt,
    SessionStateError,
)
from distsession.options import SessionOptions
from distsession.protocol.agent_messages import (
    GpuRequest,
    LogPiece,
    LogRequest,
    PrepareAgent,
    RankExited,
    StartRanks,
    StopRanks,
    UsageReply,
    UsageRequest,
)
from distsession.protocol.attach import Fenced
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.comparison import Comparison, completed, late_members
from distsession.protocol.diagnosis import describe_operation
from distsession.protocol.messages import (
    Abort,
    CompletionReply,
    CompletionRequest,
    Mismatch,
    RankAttached,
    Reason,
    ReconnectRequest,
    StackReply,
    TimedOut,
)
from distsession.protocol.rank_state import AbortReason
from distsession.rank_plan import RankPlan, plan_ranks
from distsession.ranks import HostInfo, RankInfo, ranks_text

__all__ = ["LocalLauncher"]

log = logging.getLogger(__name__)

DESCRIPTORS, DESCRIPTORS_OF_RANK = 24, 6
"""How many descriptors a session takes in the kernel, and how many more for each rank."""

PROCESSES = 8
"""How many threads a session has in the kernel, and processes beside its ranks."""

SETTLE = 1.0
"""Seconds that ranks have to come to an end before some others are replaced."""
SETTLE_PER_RANK = 0.05
"""By how much each of them makes that longer."""
HALF_SENT = "its kernel ended as it sent it, and other ranks never got it."
LOG_PIECE_S = 3.0
"""Seconds that an agent has to read a part of a log."""
GPU_NOTES_S = 1.0
"""How long a start waits for what NVML says of the GPUs, once the ranks are there."""
LINGER_MS = 2000
"""How long requests may take to reach the ranks of a session that is let go."""
END = 5.0
"""Seconds that a rank which did not come into its group has to end."""


class LocalLauncher(Launcher):
    """Starts agents and, through them, ranks on this machine.

    Args:
        options: What to start.
        on_background: Takes output that belongs to no run, in a thread of its own.
        attachment: To a session that another process has started, and whose ranks are there.
    """

    name = "local"
    channel: SocketChannel
    shares_board = True
    """The nodes are all on this machine. Of several hosts each has a board of its own."""
    first_node = 0
    """The agent of the first ranks. One before it has the rendezvous stores, and no ranks."""

    def __init__(
        self,
        options: SessionOptions,
        on_background: Callable[[OutputMessage], None],
        attachment: Attachment | None = None,
    ):
        check_room(DESCRIPTORS, "A session")
        if problem := process_limit.room_problem(PROCESSES, "A session takes, beside its ranks,"):
            raise LaunchError(problem)
        self._options = options
        self._generation = 0
        self.forked_in: dict[int, int] = {}
        """For which generation each rank's process was started."""
        self.is_broken = False
        self._reconnect: Reconnect | None = None
        self._problem = ""
        """Why the process group could not be connected anew; empty where that was not tried."""
        self._gauges_asked: dict[int, int] = {}
        self._asked_gpus = False
        self._reading_log = threading.Lock()
        self._plan: RankPlan | None = None
        self._attachment = attachment
        self._takeover: Takeover | None = None
        self._started = time.time() if attachment is None else attachment.state.started
        self._epoch = 1 if attachment is None else attachment.epoch
        self.adopted: tuple[Adopted, ...] = ()
        """What a former owner has left, where this process has attached."""
        self.taken = self.taken_over = ""
        self._closing = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self._monitor = Monitor(self._on_deaths, self._operation_of, self.first_node)
        self._registration = Registration(
            self, self._monitor, timeout=options.start_timeout, is_open=self.first_node > 0
        )
        self.processes = RankProcesses(
            self._monitor.ready, self.is_here, lambda: self.board, self.first_node
        )
        self._comparison: Comparison | None = None
        self._comparing = threading.Lock()
        self._background = PendingRequest(0, [-1])
        with contextlib.ExitStack() as made, _errors_named():
            if attachment is None:
                self._folder = PrivateFolder()
                made.callback(self._folder.remove)
                self._board_file = self._board_in_agent = make_file()
            else:
                self._folder = attachment.folder
                made.callback(self._folder.release)
                try:
                    self._board_file = os.open(attachment.state.board, os.O_RDWR)
                except OSError:
                    raise SessionStateError(
                        f"the agent (pid {attachment.agents[0].pid}) of the session in "
                        f"{self.folder} has ended as it was attached to, and with it the session: "
                        "`distsession ls` shows those that are there."
                    ) from None
                self._board_in_agent = int(os.path.basename(attachment.state.board))
            made.callback(os.close, self._board_file)
            self._agents = self._make_agents()
            self._monitor.how_ended = self._agents.how_ended
            self._health = Health(self, self._agents, self._monitor)
            made.callback(self._agents.abandon if attachment else self._agents.close)
            self.channel = SocketChannel(
                self.folder,
                self._handle_event,
                self._background,
                epoch=self._epoch,
                is_kept=options.keep > 0,
            )
            made.callback(self.channel.close)
            relays = self.channel.payloads.relays
            relays.is_expected = self._is_agent_gone
            relays.on_lost = lambda *lost: self._monitor.handle(RelayGone(*lost))
            self.channel.has_ended = self._is_gone
            self.channel.complete = self._complete
            self.channel.shares_board = self.shares_board
            threading.Thread(
                target=self._background.wait, args=(on_background,), name="distsession-background",
                daemon=True,
            ).start()  # fmt: skip
            made.callback(
                self._background.put_death, EngineDiedError("", rank=-1, pid=0, returncode=0)
            )
            self._made = made.pop_all()

    def _prepare(self) -> int:
        """What comes before agents can be started, however long it takes; gives their number."""
        return self._options.nodes

    def _make_agents(self) -> Agents:
        return Agents(self.folder, self._board_file, self._pids_of, self._epoch)

    @property
    def folder(self) -> str:
        """The session's private folder: sockets and logs."""
        return self._folder.path

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def agent_pid(self) -> int:
        """Of the first agent's process; 0 once it has ended."""
        return self._agents.pid()

    def host_name(self, node: int) -> str:
        return f"node{node}" if self._options.nodes > 1 else ""

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> tuple[RankInfo, ...]:
        if self._attachment is not None:
            deadline = time.monotonic() + self._options.start_timeout
            return self._adopt(self._attachment, deadline)
        try:
            return self._start_all()
        except LaunchTimeoutError as error:
            raise LaunchTimeoutError(
                f"the ranks did not start within start_timeout={self._options.start_timeout:g} s: "
                f"{error}{self._why_late()}{self._close_with_log()}"
            ) from None
        except SessionStateError as error:  # an agent has ended, and nothing can be restarted yet
            text = str(error).partition(": call session.restart()")[0]
            raise LaunchError(
                f"{text[0].upper()}{text[1:]} before the session had started."
                f"{self._close_with_log()}"
            ) from None
        except LaunchError as error:
            text = f"{with_remedy(str(error))}{self._why_late()}"
            raise type(error)(f"{text}{self._close_with_log()}") from None
        except OSError as error:
            self.close()
            raise _set_up_error(error) from error
        except BaseException:  # also Ctrl-C: nothing stays
            self.close()
            raise

    def _start_all(self) -> tuple[RankInfo, ...]:
        count = self._prepare()
        deadline = time.monotonic() + self._options.start_timeout
        hosts = self._start_agents(range(count), deadline)
        self._plan = plan_ranks(self._options, hosts[self.first_node :])
        infos = self._start_ranks(deadline)
        if self._options.ipyparallel == "eager":
            self._registration.begin()
        return infos

    def _start_ranks(self, deadline: float) -> tuple[RankInfo, ...]:
        """Fork all ranks, of which the plan is made."""
        assert self._plan is not None
        world = self._plan.world_size
        check_room(DESCRIPTORS_OF_RANK * world, f"A session of {world} ranks")
        os.ftruncate(self._board_file, file_size(world))
        self.board = self.channel.board = Board(self._board_file, world)
        self._ask_gpus()
        with InterruptHold() as interrupts:
            ranks = range(world)
            infos = self._launch(ranks, self._start_message(ranks), deadline, interrupts)
        self._write_state()
        self.notes = (*self._plan.notes, *self._full_gpus())
        return infos

    @property
    def nodes(self) -> range:
        """The numbers of all agents; none as long as nothing is planned for them."""
        return range(0 if self._plan is None else self.first_node + self._plan.nodes)

    def _ranks_on(self, node: int) -> range:
        """The ranks of an agent's node."""
        assert self._plan is not None
        if node < self.first_node:
            return range(0)
        return self._plan.ranks_of(node - self.first_node)

    def _is_agent_gone(self, node: int) -> bool:
        return self._monitor.is_gone(node) or self._agents.is_link_over(node)

    def node_of(self, rank: int) -> int:
        """The agent's node of a rank."""
        assert self._plan is not None
        return self.first_node + self._plan.node_of(rank)

    def _node_text(self, node: int) -> str:
        return node_text(node, self._agents.name(node))

    def _start_agents(self, nodes: Sequence[int], deadline: float) -> list[HostInfo]:
        """Start the agents of some nodes and wait until they can fork."""
        for node in nodes:
            self._monitor.expect(node)
            self.channel.payloads.relays.forget(node)
            self._gauges_asked.pop(node, None)
            self._agents.start(node)
        self._folder.sweep()  # while the agents import torch
        identify = any(isinstance(device, str) for device in self._options.devices or ())
        for node, link in self._agents.accept(deadline).items():
            self.channel.add_agent(node, link)
            has_ranks = node >= self.first_node
            prepare = PrepareAgent(
                self._options.preload, tuple(sys.path), identify, has_ranks=has_ranks
            )
            self._agents.send(node, prepare)
        return [
            self._monitor.wait_host(node, partial(self._agents.runs, node), deadline)
            for node in nodes
        ]

    def _ask_gpus(self) -> None:
        """Have the agents ask NVML, while the ranks start, whether others fill their GPUs."""
        assert self._plan is not None
        if any(device.startswith("cuda") for device in self._plan.devices):
            for node in self.nodes[self.first_node :]:
                self._agents.send(node, GpuRequest(node))
            self._asked_gpus = True

    def _full_gpus(self) -> tuple[str, ...]:
        if not self._asked_gpus or self._plan is None:
            return ()
        first = self.first_node
        gpus = self._monitor.wait_gpus(self.nodes[first:], GPU_NOTES_S)
        pids = {node - first: self._pids_beside(node) for node in gpus}
        return full_gpus({node - first: its for node, its in gpus.items()}, self.infos, pids)

    def _why_late(self) -> str:
        """What may be a reason that the ranks did not start."""
        return "".join(f" {text}" for text in self._full_gpus())

    def _handle_event(self, event: object) -> None:
        if isinstance(event, Fenced):
            self._on_taken(event)
            return
        if self.taken and (event is None or isinstance(event, NodeGone)):
            return
        if isinstance(event, RankExited) and event.oom:
            self._agents.forget_kills()
        self._monitor.handle(event)
        if isinstance(event, RankAttached) and self._takeover is not None:
            self._takeover.on_attached(event.rank)
        if event is None:  # the store is gone with the first agent: no rank can go on without it
            self._agents.terminate()

    def _close_with_log(self) -> str:
        """End everything; gives what the agents wrote, for the message."""
        tails = self._agents.log_tails()
        self.close()
        return tails

    def _launch(
        self, ranks: Sequence[int], start: StartRanks, deadline: float, interrupts: InterruptHold
    ) -> tuple[RankInfo, ...]:
        """Fork these ranks into the present generation and wait for the whole world.

        Args:
            ranks: Which.
            start: What all agents are told.
            deadline: By ``time.monotonic()``.
            interrupts: Released while something is waited for.
        """
        plan = self._plan
        assert plan is not None
        world = range(plan.world_size)
        self._fork(ranks, start, deadline, interrupts)
        halted = Halted(self.processes)
        rejoining = [rank for rank in world if rank not in ranks]
        pending = None

        def make(number: int) -> ReconnectRequest:
            return ReconnectRequest(number, self._generation, self._options.start_timeout)

        try:
            if rejoining:
                pending = self.channel.submit(rejoining, make, [])

            def wait_ready(until: float) -> None:
                self._monitor.wait_ready(
                    world,
                    self._generation,
                    until,
                    lambda: failure_of(pending) or halted.check(rejoining),
                )

            try:
                with interrupts.released():
                    wait_ready(deadline)
            except KeyboardInterrupt:
                if rejoining:  # nothing would end their wait for a rank that they have met
                    with contextlib.suppress(LaunchError):
                        wait_ready(min(deadline, time.monotonic() + UNDISTURBED_S))
                raise
        finally:
            if pending is not None:
                self.channel.forget(pending)
        self.channel.payloads.link(ranks)
        self.is_broken = False
        return self.infos

    def _start_message(self, ranks: Sequence[int]) -> StartRanks:
        """What all agents are told that are to start these ranks, now and from here."""
        plan = self._plan
        assert plan is not None
        return StartRanks(
            ranks=(),
            world_size=plan.world_size,
            generation=self._generation,
            devices=(),
            backend=plan.backend,
            timeout=self._options.timeout,
            seed=self._options.seed,
            seed_per_rank=self._options.seed_per_rank,
            threads=0,
            check=self._options.check,
            groups=self._options.groups,
            board=self._board_file,
            is_board_shared=self.shares_board,
            folder=self.folder,
            cwd=os.getcwd(),
            sys_path=tuple(sys.path),
            environ=dict(os.environ),
            is_whole=len(ranks) == plan.world_size,
            nodes=plan.nodes,
            epoch=self._epoch,
            keep=self._options.keep,
            keep_idle=self._options.keep_idle,
            keep_output=self._options.keep_output,
            version=__version__,
            is_shared=plan.is_shared,
        )

    def _fork(
        self, ranks: Sequence[int], start: StartRanks, deadline: float, interrupts: InterruptHold
    ) -> None:
        """Have the agents fork these ranks; that of the first node, which has the store, first."""
        plan = self._plan
        assert plan is not None
        port = 0
        self._monitor.expect_store()
        for node in self.nodes:
            here = self._ranks_on(node)
            wanted = tuple(rank for rank in ranks if rank in here)
            if node and not wanted:
                continue
            if node and not port:
                with interrupts.released():
                    port = self._monitor.wait_store(deadline)
            devices = tuple(plan.devices[rank] for rank in here)
            visible = tuple(plan.visible[rank] for rank in here) if plan.visible else ()
            self._monitor.forget(wanted)
            for rank in wanted:
                self.channel.set_identity(rank, self._generation, node)
                self.forked_in[rank] = self._generation
            message = replace(
                start,
                ranks=wanted,
                devices=devices,
                visible=visible,
                node=node,
                node_rank=node - self.first_node,
                threads=plan.threads[node - self.first_node] if here else 1,
                first_rank=here.start,
                host=self.host_name(node - self.first_node) if here else "",
                store_port=port,
            )
            self._agents.send(node, self._for_node(node, message))
            if node:
                with interrupts.released():
                    runs = partial(self._agents.runs, node)
                    is_up = self.channel.payloads.relays.wait_up(node, runs, deadline)
                if not is_up:
                    raise LaunchError(f"the relay of {self._node_text(node)} did not come up.")
                # Only now: until then the end of an earlier one could still be told.
                self._monitor.expect_relay(node)

    def _for_node(self, node: int, start: StartRanks) -> StartRanks:
        """What differs where a node is another host."""
        return start

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        world = range(self._plan.world_size if self._plan is not None else 0)
        if any(rank not in self._monitor.ready for rank in world):
            return ()  # it is starting
        return tuple(self._monitor.ready[rank] for rank in world)

    # --- a session that is kept -------------------------------------------------------------------

    def _write_state(self) -> None:
        if not self._options.keep or self._plan is None:
            return
        agents = [self._agents.pid(node) for node in self.nodes if self.is_here(node)]
        board = f"/proc/{agents[0]}/fd/{self._board_in_agent}"
        state = LauncherState(
            self._options, self._plan, self.infos, board, self._started, self._far_hosts()
        )
        write_state(self.folder, state)
        write_kept(
            self.folder,
            name=self._options.name,
            world_size=self._plan.world_size,
            nodes=self._plan.nodes,
            backend=self._plan.backend,
            keep_s=self._options.keep,
            keep_idle_s=self._options.keep_idle,
            keep_output_bytes=self._options.keep_output,
            agents=agents,
            board=board,
            started=self._started,
            keeper=self._keeper(),
        )

    def _far_hosts(self) -> FarHosts | None:
        """What another kernel has to know of hosts that are not this one."""
        return None

    def _keeper(self) -> int:
        """The process that keeps them."""
        return 0

    def _adopt(self, attachment: Attachment, deadline: float) -> tuple[RankInfo, ...]:
        """Become the owner of ranks that are there."""
        self._plan = attachment.state.plan
        self.board = self.channel.board = Board(self._board_file, self._plan.world_size)
        takeover = self._takeover = Takeover(
            attachment, self._monitor, self._agents, self.channel, self.board, self.first_node
        )
        self.forked_in = takeover.forked_in
        try:
            takeover.run(deadline)
        except BaseException:  # it goes on without this process, as it was
            self.detach()
            raise
        self._generation, self.is_broken = takeover.generation, takeover.is_broken
        self.adopted = takeover.adopted
        if lost := takeover.never_met:
            self.abort(AbortReason.FAILED, f"{ranks_text(lost)} could not be started")
        for number in takeover.half_sent:
            self.abort(AbortReason.STOP, HALF_SENT, interrupt=number)
        return self.infos

    def adopt_late(self, request: int, ranks: Sequence[int]) -> PendingRequest | None:
        return None if self._takeover is None else self._takeover.adopt_late(request, ranks)

    def resume_late(self) -> None:
        if self._takeover is not None:
            self._takeover.resume_late()

    def _on_taken(self, event: Fenced) -> None:
        """Somebody else owns the session from now on, or has ended it."""
        self.taken = (
            f"this session is over: {event.reason}."
            if event.is_over
            else f"this session is no longer this process's: {event.reason}. "
            "%session attach --take takes it back."
        )
        self.taken_over = f"taken over {event.taken}" if event.taken else self.taken
        self.channel.refusal = self.taken
        self._monitor.lose_all(self.taken)

    def detach(self) -> None:
        """Let go of the session: its ranks go on, and another process may attach."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._monitor.closing = True
        self.channel.close(linger_ms=0 if self.taken else LINGER_MS)
        self._agents.abandon()
        self._registration.close()
        self._folder.release()
        self._folder.sweep()  # it is over if it was ended, and nobody else may be there
        self._monitor.handle(None)
        self._background.put_death(EngineDiedError("", rank=-1, pid=0, returncode=0))
        with contextlib.suppress(OSError):
            os.close(self._board_file)

    # --- the process group ------------------------------------------------------------------------

    def abort(
        self,
        reason: AbortReason,
        text: str,
        *,
        interrupt: int = 0,
        refuse: Sequence[int] = (),
        stuck: Sequence[int] = (),
        mismatch: Mismatch | None = None,
        force: bool = False,
    ) -> None:
        self.is_broken = True
        message = Abort(
            reason,
            text,
            self._generation,
            interrupt,
            tuple(refuse),
            tuple(stuck),
            mismatch,
            force,
        )
        self.channel.broadcast(self._living(), message)

    def find_mismatch(self) -> Mismatch | None:
        plan, board = self._plan, self.board
        is_compared = self._options.check in ("shared", "strict")
        if plan is None or board is None or self._is_one_board or not is_compared:
            return None
        with self._comparing:
            if self._comparison is None:
                self._comparison = Comparison(board, plan.node_of)
            return self._comparison.find()

    @property
    def _is_one_board(self) -> bool:
        return self.shares_board or self._plan is None or self._plan.nodes == 1

    def _complete(self, reason: Reason) -> Reason:
        """A rank does not see who of another node is late, or has called what."""
        board = self.board
        if board is None or self._is_one_board:
            return reason
        if isinstance(reason, Mismatch):
            return completed(board, reason)
        if not isinstance(reason, TimedOut):
            return reason
        late = {*reason.missing, *late_members(board, reason.operation)}
        return replace(reason, missing=tuple(sorted(late)))

    def refuse(self, requests: Sequence[int]) -> None:
        message = Abort(AbortReason.REFUSED, "", -1, 0, tuple(requests))
        self.channel.broadcast(self._living(), message)

    def leave(self, ranks: Sequence[int], request: int, text: str) -> None:
        message = Abort(AbortReason.FAILED, text, -1, interrupt=request, refuse=(request,))
        self.channel.broadcast(ranks, message)

    @property
    def must_reconnect(self) -> bool:
        return self.is_broken or bool(self._monitor.store_ended)

    @property
    def may_keep_connections(self) -> bool:
        """Whether the board tells all that ranks have done, and their store is still there."""
        return self._is_one_board and not self._monitor.store_ended

    @property
    def lacks_group(self) -> bool:
        board = self.board
        return board is not None and board.lacks_group and not self.channel.pending()

    def reconnect(self, *, may_keep: bool = True) -> str:
        self._reconnect = reconnect = Reconnect(self, self._world, may_keep=may_keep)
        try:
            reconnect.run()
        finally:  # also where the caller is interrupted, which may be after it was done
            self._reconnect = None
            self._problem = reconnect.problem
            self.is_broken = bool(self._problem)
        return self._problem

    def is_reconnecting_by(self, pending: PendingRequest) -> bool:
        reconnect = self._reconnect
        return reconnect is not None and reconnect.is_request_of(pending)

    def cancel_reconnect(self, pending: PendingRequest | None = None) -> bool:
        reconnect = self._reconnect
        if reconnect is None or (pending is not None and not reconnect.is_request_of(pending)):
            return False
        reconnect.cancel()
        return True

    def begin_generation(self) -> int:
        """The number of a generation that begins now."""
        if not self._monitor.store_is_down:
            self._monitor.store_ended = ""  # what is in the store now is of no earlier one
        self._generation += 1
        return self._generation

    def store_problem(self) -> str:
        """Why there is no store at which ranks could meet; nothing if there is one."""
        if not self._monitor.store_is_down:
            return ""
        return "there is no rendezvous store: session.restart() starts it again, with all ranks"

    def folder_on(self, node: int) -> str:
        """The session's folder as the host of a node has it."""
        return self.folder

    def log_path(self, rank: int, stream: str) -> Path | None:
        node = self.node_of(rank)
        return Path(self._path_of_log(rank, stream)) if self.is_here(node) else None

    def log_place(self, rank: int, stream: str) -> str:
        path, node = self._path_of_log(rank, stream), self.node_of(rank)
        return path if self.is_here(node) else f"{self.processes.host(node)}:{path}"

    def _path_of_log(self, rank: int, stream: str) -> str:
        folder = self.folder_on(self.node_of(rank))
        return log_path(folder, rank, self.forked_in[rank], stream.removeprefix("std"))

    def read_log(self, rank: int, stream: str, begin: int, count: int) -> LogPiece | None:
        node, generation = self.node_of(rank), self.forked_in[rank]
        name = stream.removeprefix("std")
        with self._reading_log:
            # A stopped agent must not be sent questions until there is no room for them.
            if self._monitor.is_log_expected(node):
                self._monitor.wait_log(node, LOG_PIECE_S)
            if self._closed or self._monitor.is_log_expected(node):
                return None
            number = self._monitor.expect_log(node)
            message = LogRequest(number, rank, generation, name, begin, count, node)
            try:
                self._agents.send(node, message)
            except SessionStateError:  # it is gone
                return None
            return self._monitor.wait_log(node, LOG_PIECE_S)

    def waits_for(self) -> str:
        if self._plan is None:
            modules = ", ".join(("torch", *self._options.preload))
            return f"{modules} to be imported"
        world = range(self._plan.world_size)
        if late := self._monitor.late(world, self._generation):
            return f"{ranks_text(late)} to join the process group"
        return self._registration.waits_for()

    def problems(self) -> str:
        parts = [
            self._group_problems(),
            self._monitor.store_ended or self._monitor.tcp_store_ended,
            CONTROLLER_GONE if self._registration.has_died else "",
            *self._health.stopped(),
        ]
        return " ".join(filter(None, parts))

    def _group_problems(self) -> str:
        if self.channel.pending():
            return ""
        if not self.is_broken:
            return self._ranks_without_group()
        if self._problem:
            return f"The process group is not connected: {self._problem}."
        return "The process group is not connected; the next run connects it anew."

    def _ranks_without_group(self) -> str:
        dead = self._monitor.dead
        regions = () if self.board is None else self.board.regions
        ranks = [r.rank for r in regions if r.is_without_group and r.rank not in dead]
        own = [r.rank for r in regions if r.has_own_group and r.rank not in dead]
        parts = []
        if ranks:
            parts.append(f"destroy_process_group() was called on {ranks_text(ranks)}")
        if own:
            parts.append(f"code on {ranks_text(own)} has made another process group")
        if not parts:
            return ""
        back = "session.reconnect() or %session reconnect brings back the session's group"
        if not own:
            back = "the next run has the session's group again"
        return f"{' and '.join(parts)}: {back}."

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of a rank that was ready is gone, told or not."""
        info = self._monitor.ready.get(rank)
        if info is None or info.generation < self.forked_in[rank]:  # of the one before
            return False
        return self.processes.is_gone(rank)

    def is_here(self, node: int) -> bool:
        return self.shares_board or not node

    def process_state(self, rank: int) -> str:
        return self.processes.state(rank)

    def has_ended(self, rank: int) -> bool:
        return self.processes.has_ended(rank)

    def processor_time(self, rank: int) -> int:
        return self.processes.processor_time(rank)

    def unreported(self, rank: int) -> str:
        return self._health.unreported(rank)

    def note_unreported(self) -> None:
        self._health.note_unreported()

    def request_stacks(self, ranks: Sequence[int], timeout: float) -> dict[int, StackReply]:
        return self.channel.request_stacks(ranks, timeout)

    def complete(
        self, ranks: Sequence[int], code: str, inspect: bool, timeout: float
    ) -> dict[int, CompletionReply]:
        return self.channel.query(
            ranks, lambda number: CompletionRequest(number, code, inspect), timeout
        )

    def usage(self, timeout: float) -> UsageReply | None:
        assert self._plan is not None
        gpus = {info.rank: info.device.uuid for info in self.infos if info.device.uuid}
        nodes = [node for node in self.nodes[self.first_node :] if self._agents.runs(node)]
        for node in nodes:
            last = self._gauges_asked.get(node, 0)
            # A stopped agent must not be sent questions until there is no room for them.
            if not last or self._monitor.has_usage(node, last):
                self._gauges_asked[node] = last + 1
                self._agents.send(node, UsageRequest(last + 1, gpus, node))
        asked = {node: self._gauges_asked[node] for node in nodes}
        return self._monitor.wait_usage(asked, timeout)

    @property
    def _world(self) -> range:
        assert self._plan is not None
        return range(self._plan.world_size)

    def _living(self) -> list[int]:
        return [rank for rank in self._world if rank not in self._monitor.dead]

    # --- ipyparallel ------------------------------------------------------------------------------

    def client(self, timeout: float) -> Any:
        return self._registration.client(timeout)

    def kernel_address(self, rank: int) -> str:
        """Of this host, as that of a rank reaches it; empty where they are one."""
        return ""

    # --- restart ----------------------------------------------------------------------------------

    def check_restart(self, ranks: Sequence[int] | None) -> None:
        wanted = self._to_replace(ranks)
        if others := [rank for rank in self._living() if rank not in wanted]:
            if text := Halted(self.processes).check_twice(others):
                raise SessionStateError(f"the new process group needs all ranks, but {text}.")
            self._wait_idle(others)
        if stopped := self._health.await_stopped():
            raise SessionStateError(stopped)

    def _to_replace(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        """Some ranks and the dead ones, which must come back too: the group needs all of them."""
        return tuple(sorted({*(self._world if ranks is None else ranks), *self._monitor.dead}))

    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        with self._registration.lock:
            self.check_restart(ranks)
            try:
                return self._restart(ranks)
            except DistsessionError:  # LaunchTimeoutError is an OSError, too
                if self.taken:  # whatever was waited for will not come any more
                    raise SessionStateError(self.taken) from None
                raise
            except OSError as error:
                raise SessionStateError(
                    f"the restart failed: {with_remedy(str(error))}. Once that is mended, "
                    "session.restart() starts all ranks."
                ) from error

    def _restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        assert self._plan is not None
        deadline = time.monotonic() + self._options.start_timeout
        wanted = self._to_replace(ranks)
        if ranks is not None:
            be = "is" if len(wanted) == 1 else "are"
            self.abort(
                AbortReason.REPLACED, f"{ranks_text(wanted)} {be} being replaced by a fresh process"
            )
        engine_ids = self._registration.engine_ids(wanted)
        self._monitor.forget(self._monitor.cut_off)
        living = [rank for rank in wanted if rank not in self._monitor.dead]
        gone = [
            node
            for node in self.nodes
            # The link of an agent that ends closes some time before its process is gone.
            if node in self._monitor.lost_nodes or not self._agents.runs(node)
        ]
        # From here on a Ctrl-C comes only where something is waited for: what is begun is taken
        # back, so that each rank either works or is known to be gone.
        with InterruptHold() as interrupts:
            interrupts.hold()
            self.begin_generation()
            try:
                if gone:
                    with interrupts.released():
                        self._start_agents(gone, deadline)
                self._stop_ranks(living)
                start = self._start_message(wanted)
                if living:
                    with interrupts.released():
                        self._monitor.wait_exited(living, self._options.start_timeout)
                infos = self._launch(wanted, start, deadline, interrupts)
            except BaseException as error:
                late = self._abandon_launch(wanted, gone, error)
                if isinstance(error, KeyboardInterrupt):
                    text = _stopped_restart_text(late, self._plan.world_size)
                    raise RunInterrupt(text) from None
                raise
            self._registration.replace(engine_ids)
        self._write_state()
        return infos

    def check_preload(self, names: Sequence[str]) -> tuple[str, ...]:
        return self._preload.check(names)

    def preload(self, options: SessionOptions) -> None:
        with InterruptHold() as interrupts:
            interrupts.hold()
            before, self._options = self._options, options
            new = [name for name in options.preload if name not in before.preload]
            if not new:
                return
            self._write_state()
            number = self._preload.begin(new)
            try:
                with interrupts.released():
                    self._preload.wait(number)
            except KeyboardInterrupt:
                raise RunInterrupt(
                    f"{', '.join(new)} is still being imported, once per host: ranks that are "
                    "started later wait for that, and have it."
                ) from None

    @property
    def _preload(self) -> Preload:
        return Preload(self._agents, self._monitor, self.nodes[self.first_node :])

    def _stop_ranks(self, ranks: Sequence[int]) -> None:
        assert self._plan is not None
        for node in self.nodes:
            if here := tuple(rank for rank in ranks if rank in self._ranks_on(node)):
                self._agents.send(node, StopRanks(here))

    def _abandon_launch(
        self, ranks: Sequence[int], nodes: Sequence[int], error: BaseException
    ) -> list[int]:
        """Nobody stays in a group that did not come together; fresh ranks that did not join end.

        Args:
            ranks: That were to be started.
            nodes: Whose agents were to be started.
            error: Why that failed.

        Returns:
            The ranks that are gone.
        """
        late = self._monitor.late(ranks, self._generation)
        for node in nodes:
            if node not in self._monitor.hosts:
                self._agents.end(node)
        self.channel.mute(late)  # each complains that it cannot reach those which end before it
        for node in self.nodes:
            with contextlib.suppress(SessionStateError):  # its agent is gone, and they too
                self._stop_ranks([rank for rank in late if rank in self._ranks_on(node)])
        self._monitor.wait_exited(late, END)
        self._monitor.mark_lost(late)
        self._problem = f"{ranks_text(ranks)} did not start: {type(error).__name__}"
        self.abort(AbortReason.FAILED, f"{ranks_text(ranks)} could not be started")
        self.channel.payloads.link([rank for rank in ranks if rank not in late])
        return late

    def _wait_idle(self, ranks: Sequence[int]) -> None:
        """Ranks that are to join a new group must have nothing else to do, or soon have not.

        A run that somebody waits for is left alone; one that was stopped has to come back.
        """
        deadline = time.monotonic() + SETTLE + SETTLE_PER_RANK * len(ranks)
        is_freed = False
        while busy := [rank for rank in ranks if self.channel.is_busy(rank)]:
            if time.monotonic() > deadline:
                raise SessionStateError(
                    f"{ranks_text(busy)} still run{'s' if len(busy) == 1 else ''} something, and "
                    "the new process group needs all ranks: wait for it, stop it with "
                    "session.interrupt(), or replace all of them with session.restart()."
                )
            if not is_freed and not any(run.is_awaited for run in self.channel.pending()):
                is_freed = True
                self.abort(AbortReason.FAILED, "an earlier run was stopped")
            time.sleep(0.005)

    @property
    def is_closed(self) -> bool:
        """Whether this process has ended the session, or has let go of it."""
        return self._closed

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._agents.runs() and not self._monitor.agent_gone

    def dead_ranks(self) -> dict[int, EngineDiedError]:
        return dict(self._monitor.dead)

    def _operation_of(self, rank: int) -> str:
        """The collective that a rank's main thread waits in, or waited in when it ended."""
        operations = self.board.regions[rank].operations() if self.board is not None else ()
        if not operations or not operations[-1].is_waiting:
            return ""
        return describe_operation(operations[-1])

    def _on_deaths(self, errors: Sequence[EngineDiedError]) -> None:
        # Of one that goes on, with another kernel, its question waits.
        if self.board is not None and not (self._closed or self.taken):
            for error in errors:
                self.channel.clear_input_request(error.rank)
        self.channel.mark_dead(errors)

    # --- close ------------------------------------------------------------------------------------

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child of the kernel owns nothing of this
            return
        if self.taken:
            self.detach()
            return
        with interrupts_held(self._agents.end_at_once):
            with self._closing:
                if self._closed:
                    return
                self._closed = True
            self._monitor.closing = True
            self.channel.close()
            # So the last agent removes the folder, also if this process is killed meanwhile.
            self._folder.release()
            self._agents.release()
            self._registration.close()
            self._agents.close()
            self._monitor.handle(None)
            self._made.close()

    def _pids_beside(self, node: int) -> set[int]:
        """Of the ranks on a node's host, as far as that is known."""
        is_here = self.is_here(node)
        return {
            info.pid
            for info in list(self._monitor.ready.values())
            if self.first_node + info.node_rank == node
            or (is_here and self.is_here(self.first_node + info.node_rank))
        }

    def _pids_of(self, node: int) -> list[int]:
        """Processes of a node's ranks that can be sent signals."""
        if not self.is_here(node):
            return []
        dead = self._monitor.dead
        infos = list(self._monitor.ready.values())
        return [
            info.pid
            for info in infos
            if info.node_rank + self.first_node == node and info.rank not in dead
        ]


@contextlib.contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except DistsessionError:
        raise
    except OSError as error:
        raise _set_up_error(error) from error


def _set_up_error(error: OSError) -> LaunchError:
    text = f"the session could not be set up: {with_remedy(str(error))}."
    return LaunchError(text, remedy=DOCTOR_REMEDY)


def _stopped_restart_text(ranks: Sequence[int], world: int) -> str:
    if not ranks:
        return "the restart was stopped when the fresh ranks were there already."
    if len(ranks) == world:
        return "the restart was stopped: all ranks have ended, and session.restart() starts them."
    have, them = ("has", "it") if len(ranks) == 1 else ("have", "them")
    return (
        f"the restart was stopped: {ranks_text(ranks)} {have} ended, and session.restart({ranks}) "
        f"starts {them}. The other ranks keep their variables."
    )
