"""Ranks on this machine: agents that fork them, one for each node that the machine plays.

Runs in: the kernel.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distsession.board import Board, file_size, make_file
from distsession.cluster.agents import Agents
from distsession.cluster.base import Launcher, OutputMessage, Pending
from distsession.cluster.channel import SocketChannel
from distsession.cluster.controller import CONTROLLER_GONE, Controller
from distsession.cluster.folder import private_folder
from distsession.cluster.monitor import Monitor, RankUnreported, agent_text
from distsession.cluster.processes import GONE, STOPPED, has_ended, process_state
from distsession.diagnosis import describe_operation
from distsession.errors import (
    EngineDiedError,
    LaunchError,
    LaunchTimeoutError,
    RunTimeoutError,
    SessionStateError,
)
from distsession.messages import (
    Abort,
    AskGauges,
    AskLook,
    ControllerInfo,
    Gauges,
    LookReply,
    PrepareAgent,
    RejoinRequest,
    StackReply,
    StartRanks,
    StopRanks,
)
from distsession.options import RankPlan, SessionOptions, plan_ranks
from distsession.ranks import HostInfo, RankInfo, ranks_text

__all__ = ["LocalLauncher"]

log = logging.getLogger(__name__)

SETTLE_BEFORE_REJOIN = 0.2
"""Seconds that ranks have to come to an end before connecting them anew is put off."""
LOOK_FOR_ENDS_S = 0.25
"""Seconds between two looks for ranks that have ended and of which no agent tells."""
STOPPED_AGENT_S = 0.5
"""Seconds after which a rank that has ended counts as dead though its agent, stopped by a signal,
says nothing."""
SILENT_AGENT_S = 10.0
"""The same of an agent that is not stopped, and may only be slow."""
SETTLE = 1.0
"""Seconds that ranks have to come to an end before some others are replaced."""


class LocalLauncher(Launcher):
    """Starts agents and, through them, ranks on this machine.

    Args:
        options: What to start.
        on_background: Takes output that belongs to no run, in a thread of its own.
    """

    name = "local"
    channel: SocketChannel

    def __init__(self, options: SessionOptions, on_background: Callable[[OutputMessage], None]):
        self._options = options
        self._generation = 0
        self._forked_in: dict[int, int] = {}
        self.is_broken = False
        self._mending: Pending | None = None
        self._gauges_asked: dict[int, int] = {}
        self._unreported: dict[int, float] = {}
        self._looked_at = 0.0
        self._plan: RankPlan | None = None
        self._controller: Controller | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self._folder = private_folder()
        self._board_file = make_file()
        self._agents = Agents(self._folder, self._board_file)
        self._monitor = Monitor(self._on_death, self._operation_of)
        self._background = Pending(0, [-1])
        self.channel = SocketChannel(self._folder, self._hear, self._background)
        self.channel.payloads.relays.is_expected = self._monitor.is_gone
        self.channel.has_ended = self._has_ended
        threading.Thread(
            target=self._background.wait, args=(on_background,), name="distsession-background",
            daemon=True,
        ).start()  # fmt: skip

    @property
    def folder(self) -> str:
        """The session's private folder: sockets and logs."""
        return self._folder

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> tuple[RankInfo, ...]:
        deadline = time.monotonic() + self._options.start_timeout
        try:
            host = self._start_agents(range(self._options.nodes), deadline)
            self._plan = plan_ranks(self._options, host)
            os.ftruncate(self._board_file, file_size(self._plan.world_size))
            self.board = Board(self._board_file, self._plan.world_size)
            infos = self._launch(range(self._plan.world_size), deadline)
            self._start_controller()
            return infos
        except LaunchTimeoutError as error:
            raise LaunchTimeoutError(
                f"the ranks did not start within start_timeout={self._options.start_timeout:g} s: "
                f"{error}{self._close_with_log()}"
            ) from None
        except LaunchError as error:
            raise type(error)(f"{error}{self._close_with_log()}") from None
        except OSError as error:
            self.close()
            raise LaunchError(
                f"the session could not be set up: {error}. `distsession doctor` says what this "
                "machine lacks."
            ) from error
        except BaseException:  # also Ctrl-C: nothing stays
            self.close()
            raise

    def _start_agents(self, nodes: Sequence[int], deadline: float) -> HostInfo:
        """Start the agents of some nodes and wait until they can fork."""
        for node in nodes:
            self._monitor.expect(node)
            self._gauges_asked.pop(node, None)
            self._agents.start(node)
        for node, link in self._agents.accept(deadline).items():
            self.channel.hear_agent(node, link)
            self._agents.send(node, PrepareAgent(self._options.preload, tuple(sys.path)))
        hosts = [
            self._monitor.wait_host(node, partial(self._agents.runs, node), deadline)
            for node in nodes
        ]
        return hosts[0]

    def _hear(self, event: object) -> None:
        self._monitor.hear(event)
        if event is None:  # the store is gone with the first agent: no rank can go on without it
            self._agents.terminate()

    def _close_with_log(self) -> str:
        """End everything; gives what the agents wrote, for the message."""
        tails = self._agents.log_tails()
        self.close()
        return tails

    def _launch(self, ranks: Sequence[int], deadline: float) -> tuple[RankInfo, ...]:
        """Fork these ranks into the present generation and wait for the whole world."""
        plan = self._plan
        assert plan is not None
        world = range(plan.world_size)
        self._monitor.forget(ranks)
        for rank in ranks:
            self.channel.set_identity(rank, self._generation, plan.node_of(rank))
            self._forked_in[rank] = self._generation
        self._fork(ranks, deadline)
        rejoining = [rank for rank in world if rank not in ranks]
        pending = None
        if rejoining:
            pending = self.channel.submit(
                rejoining, lambda number: RejoinRequest(number, self._generation), []
            )
        try:
            self._monitor.wait_ready(
                world, self._generation, deadline, lambda: _failure_of(pending)
            )
        finally:
            if pending is not None:
                self.channel.forget(pending)
        self.channel.payloads.link(ranks)
        self.is_broken = False
        return self.infos

    def _fork(self, ranks: Sequence[int], deadline: float) -> None:
        """Have the agents fork these ranks; that of the first node, which has the store, first."""
        plan = self._plan
        assert plan is not None
        start = StartRanks(
            ranks=(),
            world_size=plan.world_size,
            generation=self._generation,
            devices=(),
            backend=plan.backend,
            timeout=self._options.timeout,
            seed=self._options.seed,
            seed_per_rank=self._options.seed_per_rank,
            threads=plan.threads,
            check=self._options.check,
            board=self._board_file,
            folder=self._folder,
            cwd=os.getcwd(),
            sys_path=tuple(sys.path),
            environ=dict(os.environ),
            is_whole=len(ranks) == plan.world_size,
            nodes=plan.nodes,
        )
        self._monitor.store_port = port = 0
        for node in range(plan.nodes):
            here = plan.ranks_of(node)
            wanted = tuple(rank for rank in ranks if rank in here)
            if node and not wanted:
                continue
            if node:
                port = port or self._monitor.wait_store(deadline)
            devices = tuple(plan.devices[rank] for rank in here)
            self._agents.send(
                node, replace(start, ranks=wanted, devices=devices, node=node, store_port=port)
            )
            if node and not self.channel.payloads.relays.wait_up(
                node, partial(self._agents.runs, node), deadline
            ):
                raise LaunchError(f"the relay of node {node} did not come up.")

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        assert self._plan is not None
        return tuple(self._monitor.ready[rank] for rank in range(self._plan.world_size))

    # --- the process group ------------------------------------------------------------------------

    def abort(
        self, kind: str, text: str, *, interrupt: int = 0, refuse: Sequence[int] = ()
    ) -> None:
        self.is_broken = True
        message = Abort(kind, text, self._generation, interrupt, tuple(refuse))
        for rank in self._living():
            self.channel.send_control(rank, message)

    def refuse(self, requests: Sequence[int]) -> None:
        message = Abort("refused", "", -1, 0, tuple(requests))
        for rank in self._living():
            self.channel.send_control(rank, message)

    def rejoin(self, timeout: float) -> str:
        dead = self.dead_ranks()
        if dead:
            have = "has" if len(dead) == 1 else "have"
            return f"{ranks_text(sorted(dead))} died and {have} to be replaced first"
        ranks = self._living()
        if self._mending is not None:  # an earlier attempt may still wait somewhere
            self.abort("failed", "connecting the process group anew took too long")
            self._mending = None
        deadline = time.monotonic() + SETTLE_BEFORE_REJOIN
        while busy := [rank for rank in ranks if self.channel.is_busy(rank)]:
            if time.monotonic() > deadline:
                return (
                    f"{ranks_text(busy)} is still busy"
                    if len(busy) == 1
                    else (f"{ranks_text(busy)} are still busy")
                )
            time.sleep(0.002)
        self._generation += 1
        pending = self._mending = self.channel.submit(
            ranks, lambda number: RejoinRequest(number, self._generation), []
        )
        try:
            pending.wait(lambda _: None, timeout)
        except RunTimeoutError as error:
            return str(error)
        finally:
            self.channel.forget(pending)
        self._mending = None
        problem = _failure_of(pending)
        self.is_broken = bool(problem)
        return problem

    def log_path(self, rank: int, stream: str) -> Path | None:
        generation = self._forked_in[rank]
        return Path(self._folder, "logs", f"rank{rank}-{generation}.{stream.removeprefix('std')}")

    def waits_for(self) -> str:
        if self._plan is None:
            modules = ", ".join(("torch", *self._options.preload))
            return f"{modules} to be imported"
        late = self._monitor.late(range(self._plan.world_size), self._generation)
        return f"{ranks_text(late)} to join the process group" if late else ""

    def trouble(self) -> str:
        has_died = self._controller is not None and self._controller.has_died
        parts = [
            CONTROLLER_GONE if has_died else "",
            self.channel.payloads.relays.trouble(),
            *self._stopped_agents(),
        ]
        return " ".join(filter(None, parts))

    def _stopped_agents(self) -> Iterator[str]:
        for node in range(self._options.nodes):
            if self._agents.runs(node) and process_state(pid := self._agents.pid(node)) in STOPPED:
                who = agent_text(node)
                yield (
                    f"{who[0].upper()}{who[1:]} (pid {pid}) is stopped by SIGSTOP or a debugger: "
                    "no rank can be replaced, and none that ends is reported. "
                    f"`kill -CONT {pid}` lets it go on."
                )

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank that was ready is gone, told or not."""
        info = self._monitor.ready.get(rank)
        if info is None or info.generation < self._forked_in[rank]:  # of the one before
            return False
        return process_state(info.pid) in GONE and process_state(os.getpid()) not in GONE

    def unreported(self, rank: int) -> str:
        node = self.infos[rank].node_rank
        pid = self._agents.pid(node)
        who = f"{agent_text(node)} (pid {pid})"
        if process_state(pid) in STOPPED:
            return f"{who} cannot say how, since it is stopped: `kill -CONT {pid}` lets it go on"
        return f"{who} has not said how"

    def note_unreported(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_FOR_ENDS_S:
            return
        self._looked_at = now
        for info in self.infos:
            rank = info.rank
            is_late = rank not in self._monitor.dead and has_ended(info.pid)
            if not is_late or self._closed:
                self._unreported.pop(info.pid, None)
                continue
            since = self._unreported.setdefault(info.pid, now)
            is_stopped = process_state(self._agents.pid(info.node_rank)) in STOPPED
            if now - since > (STOPPED_AGENT_S if is_stopped else SILENT_AGENT_S):
                self._monitor.hear(RankUnreported(rank, info.pid, self.unreported(rank)))

    def ask_stacks(self, ranks: Sequence[int], timeout: float) -> dict[int, StackReply]:
        return self.channel.ask_stacks(ranks, timeout)

    def look(
        self, ranks: Sequence[int], code: str, inspect: bool, timeout: float
    ) -> dict[int, LookReply]:
        return self.channel.ask(ranks, lambda number: AskLook(number, code, inspect), timeout)

    def gauges(self, timeout: float) -> Gauges | None:
        assert self._plan is not None
        gpus = {info.rank: info.device.uuid for info in self.infos if info.device.uuid}
        nodes = [node for node in range(self._plan.nodes) if self._agents.runs(node)]
        for node in nodes:
            last = self._gauges_asked.get(node, 0)
            # A stopped agent must not be sent questions until there is no room for them.
            if not last or self._monitor.has_gauges(node, last):
                self._gauges_asked[node] = last + 1
                self._agents.send(node, AskGauges(last + 1, gpus, node))
        asked = {node: self._gauges_asked[node] for node in nodes}
        return self._monitor.wait_gauges(asked, timeout)

    def _living(self) -> list[int]:
        assert self._plan is not None
        return [r for r in range(self._plan.world_size) if r not in self._monitor.dead]

    # --- ipyparallel ------------------------------------------------------------------------------

    def _start_controller(self) -> None:
        self._controller = Controller(self._folder, self._agents.pid())
        self._controller.start(self._register_all)

    def _register_all(self, info: ControllerInfo) -> None:
        assert self._plan is not None
        for rank in range(self._plan.world_size):
            self.channel.send_control(rank, info)

    def client(self, timeout: float) -> Any:
        assert self._controller is not None
        assert self._plan is not None
        world = range(self._plan.world_size)
        return self._controller.client(
            lambda limit: self._monitor.wait_registered(world, limit), len(world), timeout
        )

    # --- restart ----------------------------------------------------------------------------------

    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        assert self._plan is not None
        deadline = time.monotonic() + self._options.start_timeout
        wanted = tuple(range(self._plan.world_size)) if ranks is None else tuple(ranks)
        # A rank that is dead now must come back too: the group needs all of them.
        wanted = tuple(sorted({*wanted, *self._monitor.dead}))
        if ranks is not None:
            others = [rank for rank in self._living() if rank not in wanted]
            self.abort("replaced", f"{ranks_text(wanted)} is being replaced by a fresh process")
            self._wait_idle(others)
        if stopped := list(self._stopped_agents()):
            raise SessionStateError(stopped[0])
        engine_ids = [self._monitor.engine_ids.get(rank, rank) for rank in wanted]
        living = [rank for rank in wanted if rank not in self._monitor.dead]
        gone = [node for node in range(self._plan.nodes) if not self._agents.runs(node)]
        if gone:
            self._start_agents(gone, deadline)
        for node in range(self._plan.nodes):
            if here := tuple(rank for rank in living if rank in self._plan.ranks_of(node)):
                self._agents.send(node, StopRanks(here))
        if living:
            self._monitor.wait_exited(living, self._options.start_timeout)
        self._generation += 1
        infos = self._launch(wanted, deadline)
        self._register_anew(wanted, engine_ids)
        return infos

    def _wait_idle(self, ranks: Sequence[int]) -> None:
        """Ranks that are to join a new group must have nothing else to do."""
        deadline = time.monotonic() + SETTLE
        while busy := [rank for rank in ranks if self.channel.is_busy(rank)]:
            if time.monotonic() > deadline:
                raise SessionStateError(
                    f"{ranks_text(busy)} still run{'s' if len(busy) == 1 else ''} something, and "
                    "the new process group needs all ranks: stop it first with "
                    "session.interrupt(), or replace all of them with session.restart()."
                )
            time.sleep(0.005)

    def _register_anew(self, wanted: Sequence[int], engine_ids: Sequence[int]) -> None:
        controller = self._controller
        if controller is not None and controller.has_died:
            log.warning("ipyparallel's controller is gone; a new one is started")
            controller.close()
            self._start_controller()
            return
        if controller is not None and controller.is_ready:
            for engine_id in engine_ids:
                controller.unregister(engine_id)
            for rank in wanted:
                self.channel.send_control(rank, controller.info())

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

    def _on_death(self, error: EngineDiedError) -> None:
        if self.board is not None:
            self.board.regions[error.rank].ask_nothing()
        self.channel.bury(error)

    # --- close ------------------------------------------------------------------------------------

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child of the kernel owns nothing of this
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._monitor.closing = True
        self.channel.close()
        self._agents.release()
        if self._controller is not None:
            self._controller.close()
        self._agents.close()
        self._monitor.hear(None)
        self._background.put_death(EngineDiedError("", rank=-1, pid=0, returncode=0))
        os.close(self._board_file)
        shutil.rmtree(self._folder, ignore_errors=True)


def _failure_of(pending: Pending | None) -> str:
    """The first error among the answers to a request; empty if there is none."""
    replies = {} if pending is None else dict(pending.replies)
    for rank, (reply, _) in sorted(replies.items()):
        if reply.error is not None:
            return f"rank {rank} could not join it: {reply.error.ename}: {reply.error.evalue}"
    return ""
