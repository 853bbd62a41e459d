"""Ranks on other hosts: whatever starts a process there starts their agents."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from distsession.cluster.agents import Agents
from distsession.cluster.attachment import Attachment, FarHosts
from distsession.cluster.deaths import JobEnd, SilentHost
from distsession.cluster.host_agents import FIRST, HostAgents
from distsession.cluster.host_links import LinkedHost
from distsession.cluster.hosts import LOST_S, SILENT_S, Hosts, kernel_facts
from distsession.cluster.kept_hosts import KeptHosts
from distsession.cluster.local import LocalLauncher
from distsession.cluster.pending import OutputMessage
from distsession.errors import DistsessionError, LaunchError, SessionStateError
from distsession.host_plan import HostPlan
from distsession.options import SessionOptions
from distsession.protocol.agent_messages import StartRanks
from distsession.protocol.host_checks import (
    TORCH,
    HostProblem,
    check_hosts,
    choose_addresses,
    differing,
)
from distsession.ranks import HostInfo, RankInfo

__all__ = ["HostsLauncher"]

log = logging.getLogger(__name__)

SCHEDULERS = {
    "slurm": "Slurm", "sge": "Grid Engine", "pbs": "PBS", "lsf": "LSF", "htcondor": "HTCondor",
}  # fmt: skip
"""What people call them."""

CARRIED = ("NCCL_", "GLOO_", "TORCH", "OMP_", "MKL_", "PYTORCH_", "CUDA_LAUNCH_", "CUDA_MODULE_",
           "CUDA_DEVICE_MAX_", "HF_", "TOKENIZERS_", "WANDB_", "DISTSESSION_")  # fmt: skip
"""How the names of variables begin that ranks on other hosts get from this process. What says where
things are, or which GPUs there are to be seen, differs from host to host."""

TELL_LEFT_S = 600.0, 60.0
"""Seconds before the time limit of the job at which it is told."""
JOB_LOOK_S = 60.0
"""Seconds between two looks at how much time the job has left, which may be changed, too."""
MOVE_TIMEOUT_S = 5.0
"""Seconds in which it is known that a host is gone whose streams were cut."""


class HostsLauncher(LocalLauncher):
    """Starts agents on other hosts and, through them, ranks.

    Args:
        options: What to start.
        plan: On which hosts, and how an agent comes there.
        on_background: Takes output that belongs to no run, in a thread of its own.
        attachment: To a session that another process has started, and whose ranks are there.
    """

    name = "hosts"
    shares_board = False
    first_node = FIRST
    _agents: HostAgents

    def __init__(
        self,
        options: SessionOptions,
        plan: HostPlan,
        on_background: Callable[[OutputMessage], None],
        attachment: Attachment | None = None,
    ):
        self._hosts: Hosts | KeptHosts = (
            KeptHosts(plan, self._note_waiting) if options.keep else Hosts(plan, self._note_waiting)
        )
        self._waits_for = ""
        self._is_over = threading.Event()
        self._job_ends = float("inf")
        """When the job is at its time limit, by the monotonic clock, as far as that is known."""
        self._interfaces: dict[int, str] = {}
        self._addresses: dict[int, str] = {}
        try:
            super().__init__(options, on_background, attachment)
        except BaseException:
            if isinstance(self._hosts, KeptHosts) and attachment is not None:
                self._hosts.release()  # it goes on without this process, as it was
            self._hosts.close()
            raise
        if attachment is not None and attachment.state.hosts is not None:
            self._recall(attachment.state.hosts)
        self._monitor.may_end_with_job = self._may_end_with_job
        self._monitor.starts_hosts_alone = self._hosts.plan.starts_hosts_alone
        self._hosts.on_notice(self._note_end)

    def _make_agents(self) -> Agents:
        if self._attachment is None:
            self._hosts.carry(self.folder)
        else:
            assert isinstance(self._hosts, KeptHosts)
            self._hosts.take(self.folder, self._epoch)
        return HostAgents(self._hosts, self.folder, self._board_file, epoch=self._epoch)

    def _recall(self, hosts: FarHosts) -> None:
        """Know of hosts what the kernel knew that has started them."""
        self._interfaces, self._addresses = dict(hosts.interfaces), dict(hosts.addresses)
        self._monitor.host_names.update(hosts.names)
        self._agents.recall()
        self._watch_job_if_any()

    def _note_waiting(self, text: str) -> None:
        self._waits_for = text

    def waits_for(self) -> str:
        return self._waits_for or super().waits_for()

    # --- start ------------------------------------------------------------------------------------

    def _start_all(self) -> tuple[RankInfo, ...]:
        try:
            return super()._start_all()
        except (DistsessionError, OSError):
            if isinstance(self._hosts, KeptHosts):
                self._hosts.check_runs()  # all hosts seem to be gone with it
            raise

    def _prepare(self) -> int:
        """Have agents on all hosts; gives how many there are, with the one here.

        Raises:
            LaunchError: No session can start on these hosts.
        """
        self._hosts.start()
        self._waits_for = ""
        self._refuse(self._hosts.problems)
        self._agents.begin()
        self._compare()
        self._watch_job_if_any()
        return FIRST + len(self._agents.facts)

    def _watch_job_if_any(self) -> None:
        if self.job:
            watch = threading.Thread(target=self._watch_job, name="distsession-job", daemon=True)
            watch.start()

    def _compare(self) -> None:
        """See what keeps these hosts from being in one session, and by which way they meet."""
        self._refuse(self._hosts.problems)
        facts = list(self._agents.facts.values())
        reach = self._hosts.reach(facts) if len(facts) > 1 else {}
        found = check_hosts(kernel_facts(), facts, self._hosts.offsets(), reach)
        self._refuse([*self._hosts.problems, *found])
        chosen = choose_addresses(facts, reach)
        for node, one in self._agents.facts.items():
            self._monitor.host_names[node] = one.name
            way = chosen.get(one.name, ("", ""))
            self._interfaces[node], self._addresses[node] = way

    def host_name(self, node: int) -> str:
        return self._agents.name(FIRST + node)

    def folder_on(self, node: int) -> str:
        return self._agents.folder_on(node)

    def host_address(self, node: int) -> str:
        return self._addresses.get(FIRST + node, "")

    def _start_agents(self, nodes: Sequence[int], deadline: float) -> list[HostInfo]:
        before = dict(self._agents.facts)
        hosts = super()._start_agents(nodes, deadline)
        if self._agents.facts != before:
            self._hosts.forget_problems()
            self._compare()
        # The exact build of torch is known only once a host has imported it. The installed
        # packages say less, and this host may have no torch to compare it with.
        builds = {
            self._agents.name(node): host.torch_version
            for node, host in sorted(self._monitor.hosts.items())
            if node >= FIRST
        }
        self._refuse(list(differing(TORCH, builds)))
        return hosts

    def check_moves(self, moves: Mapping[int, str]) -> None:
        for node, name in moves.items():
            self._hosts.plan.with_another(name, self._agents.name(FIRST + node))

    def move_hosts(self, moves: Mapping[int, str]) -> None:
        for node, name in moves.items():
            self._agents.move(FIRST + node, name)
            self._monitor.wait_lost(FIRST + node, MOVE_TIMEOUT_S)

    def must_start_anew(self, ranks: Sequence[int]) -> bool:
        is_whole = len(ranks) == len(self.infos)
        if is_whole and self._keeper_problem():
            return True
        return super().must_start_anew(ranks) or (is_whole and bool(self._lost_for_good()))

    def check_restart(self, ranks: Sequence[int] | None) -> None:
        if problem := self._keeper_problem():
            raise SessionStateError(problem)
        if lost := self._lost_for_good():
            names = ", ".join(link.name for link in lost)
            raise SessionStateError(
                f"launcher={self._hosts.plan.launcher!r} starts all hosts together, so {names} "
                "cannot be started alone: session.restart() starts all of them anew, with all "
                "ranks."
            )
        super().check_restart(ranks)

    def _lost_for_good(self) -> list[LinkedHost]:
        nodes = sorted(self._monitor.lost_nodes)
        return self._hosts.lost_for_good([self._hosts.links[node - FIRST] for node in nodes])

    def _keeper_problem(self) -> str:
        """What is wrong with the process that keeps the hosts, if there is one."""
        if self.taken or not isinstance(self._hosts, KeptHosts):
            return ""
        return self._hosts.problem()

    def _refuse(self, problems: Sequence[HostProblem]) -> None:
        """Say what keeps a session from starting."""
        if not (fatal := [problem for problem in problems if problem.fatal]):
            return
        lines = [
            f"{one.what}: {one.value}.{f' Try: {one.mend}.' if one.mend else ''}" for one in fatal
        ]
        details = [f"\n{one.details}" for one in fatal if one.details]
        raise LaunchError("\n".join((*lines, *details)))

    def _for_node(self, node: int, start: StartRanks) -> StartRanks:
        if node < FIRST:
            return start
        environ = {name: value for name, value in os.environ.items() if name.startswith(CARRIED)}
        self._hosts.set_store_port(start.store_port)
        return replace(
            start,
            board=-1,
            environ=environ,
            interface=self._interfaces.get(node, ""),
            store_port=self._agents.store_ports[node],
        )

    def kernel_address(self, rank: int) -> str:
        node = self.node_of(rank)
        if address := self._agents.kernel_address(node):
            if ":" in address:
                raise SessionStateError(
                    f"{self._agents.name(node)} reaches this host by IPv6 only, and ipyparallel's "
                    "controller listens at IPv4 addresses: %px and session.client do not work. "
                    "Cells and calls do."
                )
            return address
        raise SessionStateError(
            f"{self._agents.name(node)} cannot connect to this host, so its ranks cannot register "
            "with ipyparallel's controller: %px and session.client do not work. Cells and calls do."
        )

    @property
    def job(self) -> str:
        """The id of the job that the agents are in; empty without one."""
        return self._hosts.job

    # --- a session that is kept -------------------------------------------------------------------

    def _far_hosts(self) -> FarHosts:
        names = {node: facts.name for node, facts in self._agents.facts.items()}
        return FarHosts(self._hosts.plan, dict(self._interfaces), dict(self._addresses), names)

    def _keeper(self) -> int:
        return self._hosts.pid if isinstance(self._hosts, KeptHosts) else 0

    def _write_state(self) -> None:
        if isinstance(self._hosts, KeptHosts):
            ranks = {node: self._ranks_on(node) for node in self.nodes}
            board = f"/proc/{self._agents.pid()}/fd/{self._board_in_agent}"
            self._hosts.keep(self._agents.pid(), board, ranks)
        super()._write_state()

    def detach(self) -> None:
        self._is_over.set()
        super().detach()
        if isinstance(self._hosts, KeptHosts):
            self._hosts.release()

    # --- what a scheduler does --------------------------------------------------------------------

    def _note_end(self, link: LinkedHost, what: str) -> None:
        """A host's process has been told to end, and its ranks end with it."""
        plan = self._hosts.plan
        if self._may_end_with_job():
            name = SCHEDULERS.get(plan.launcher, plan.launcher)
            self._monitor.note_job_end(JobEnd(name, self.job, is_own=not plan.in_allocation))
        for node, one in enumerate(self._hosts.links, FIRST):
            if one is link:
                self._monitor.why_gone[node] = f"{what}, which this session has not sent"

    def _may_end_with_job(self) -> bool:
        return bool(self.job) and not self._hosts.plan.starts_hosts_alone

    def _watch_job(self) -> None:
        """Tell of the job's time limit some time before it strikes."""
        told, pause = float("inf"), 0.0
        while not self._is_over.wait(pause):
            pause = JOB_LOOK_S
            left = self._hosts.seconds_left()
            if left is None:  # it has none, or the scheduler does not answer just now
                continue
            self._job_ends = time.monotonic() + left
            if due := [limit for limit in TELL_LEFT_S if left <= limit < told]:
                log.warning("%s", self._job_problem())
                told = min(due)
            ahead = [left - limit for limit in TELL_LEFT_S if limit < min(left, told)]
            pause = min([JOB_LOOK_S, *ahead])

    def _job_problem(self) -> str:
        """What to say of the job's time limit, once it is near."""
        left = self._job_ends - time.monotonic()
        if left > max(TELL_LEFT_S):
            return ""
        minutes = max(1, round(left / 60))
        return (
            f"Job {self.job} ends in {minutes} minute{'s' * (minutes != 1)}, at its time limit, "
            "and all ranks with it: save what you need."
        )

    def problems(self) -> str:
        silent = [f"{host.text}." for host in self.silent_hosts()]
        own = self._job_problem(), self._keeper_problem(), *silent
        return " ".join(filter(None, (*own, super().problems())))

    def silent_hosts(self) -> tuple[SilentHost, ...]:
        return tuple(self._find_silent())

    def _find_silent(self) -> Iterator[SilentHost]:
        if self._plan is None:
            return
        for node, link in enumerate(self._hosts.links, FIRST):
            seconds = self._hosts.silent_s(link)
            if seconds > SILENT_S and not self._hosts.is_lost(link):
                ranks = tuple(self._ranks_on(node))
                is_cut_off = self._hosts.is_cut_off(link)
                yield SilentHost(link.name, ranks, seconds, is_cut_off, LOST_S)

    # --- close ------------------------------------------------------------------------------------

    def close(self) -> None:
        self._is_over.set()
        try:
            super().close()
        finally:
            if os.getpid() == self._owner:
                self._hosts.close()  # nothing where another process owns the session
