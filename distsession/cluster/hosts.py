"""Several hosts: an agent on each, a link to each, and what is known of them before a start.

A launcher starts the agents, which come to the kernel by themselves. What prevents one from coming
is found in what the launcher's processes have written, and named with its remedy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from distsession.cluster.array_jobs import CondorLauncher, LsfLauncher, PbsLauncher, SgeLauncher
from distsession.cluster.host_failures import complaints, explain, noise
from distsession.cluster.host_jobs import SlurmLauncher
from distsession.cluster.host_launchers import Failure, HostLauncher
from distsession.cluster.host_links import Dial, HostLinks, LinkedHost
from distsession.cluster.host_processes import (
    CommandLauncher,
    EachCommandLauncher,
    MpiLauncher,
    SlurmStepLauncher,
    SshLauncher,
)
from distsession.cluster.host_streams import HostStreams
from distsession.engine.host_facts import installed_facts
from distsession.engine.reach import own_addresses
from distsession.errors import LaunchError
from distsession.host_plan import HostPlan, ssh_target
from distsession.protocol import folder_lock, places
from distsession.protocol.host_checks import HostProblem, Reach
from distsession.protocol.host_facts import HostFacts, facts_of
from distsession.protocol.host_link import LISTENS, STARTS, write_keys

__all__ = ["FIRST", "Hosts", "kernel_facts"]

log = logging.getLogger(__name__)

FIRST = 1
"""The number of the first host's agent."""
LOOK_S = 0.1
"""Seconds between two looks at what launchers' processes do."""
TELL_S = 1.0
"""Seconds between two words on what is waited for."""
FACTS_TIMEOUT_S = 120.0
"""Seconds that a host has to import torch, perhaps from a network's disk that is cold."""
SILENT_S = 1.7
"""Seconds without a word after which a host is said not to answer. It may only be busy."""
ANSWER_S = 0.85
"""Seconds that a silent host's system has to answer a new connection, which may be a far one on a
slow network, or asked late by a busy machine. They fit between its first and ``SILENT_S``."""
LOST_S = 5.0
"""Seconds without a word from a host after which it counts as gone."""
SLOW_LOST_S = 10.0
"""The same where its system answers: its processes are slow, or its network has just come back and
what was sent meanwhile is sent again in some seconds only, for TCP waits ever longer."""
BEGIN_TIMEOUT_S = 20.0
"""Seconds that a host has to make a folder."""
OWNER_TIMEOUT_S = 5.0
"""Seconds that a host has to make sockets for another owner."""
REACH_TIMEOUT_S = 30.0
"""Seconds that the trial of all addresses between hosts has."""


class Hosts:
    """Starts an agent on each host, and ends them all.

    Args:
        plan: Which hosts, and how.
        tell: Is told what is waited for, once a second.

    Attributes:
        links: The agents that have come, in the order of the hosts.
        problems: What was found to be wrong.
    """

    def __init__(self, plan: HostPlan, tell: Callable[[str], object] = lambda text: None):
        self.plan = plan
        self.links: tuple[LinkedHost, ...] = ()
        self.problems: list[HostProblem] = []
        self._tell = tell
        self._told_at = time.monotonic()
        self._dialled: dict[str, Dial] = {}
        self._nonce = ""
        self._streams: HostStreams | None = None
        self._is_cancelled = False
        self._folder, self._lock = _make_folder(plan.folder)
        self._launcher: HostLauncher | None = None
        try:
            addresses = plan.addresses or tuple(own_addresses().values())
            self._links = HostLinks(addresses, expected=plan.count)
        except BaseException:
            self._remove_folder()
            raise

    @property
    def job(self) -> str:
        """The id of the job that the agents are in; empty without one."""
        return self._launcher.job if self._launcher is not None else ""

    def carry(self, folder: str) -> None:
        """Take what hosts bring to the sockets in a session's folder."""
        self._streams = HostStreams(
            self._links,
            folder,
            self.is_lost,
            self._note_lost,
            self._address_of,
            self._trim_outputs,
        )

    def set_store_port(self, port: int) -> None:
        """Say where torch's TCP store is, on this host."""
        assert self._streams is not None
        self._streams.tcp_store_port = port

    def give_up(self, link: LinkedHost) -> None:
        """Nothing comes from this host any more, nor goes there; another may take its place."""
        link.is_given_up = True
        self.cut(link)

    def cut(self, link: LinkedHost) -> None:
        """Close all that a host has brought."""
        if self._streams is not None:
            self._streams.cut(link)

    def start_agent(self, link: LinkedHost) -> None:
        """Start another agent on a host, in the place of one that has ended."""
        link.replies.pop("agent", None)
        self.tell(link, "start-agent")

    def _trim_outputs(self) -> None:
        if self._launcher is not None:
            self._launcher.trim_outputs()

    def _address_of(self, link: LinkedHost) -> str:
        """Of a host that this process has gone to; empty for one that has come."""
        dials = [dial for dial in self._dialled.values() if dial.name == link.name]
        return dials[-1].address if dials and not link.address else ""

    def tell(self, link: LinkedHost, kind: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a host something that is not answered."""
        self._links.send(link, kind, body)

    def is_lost(self, link: LinkedHost) -> bool:
        """Whether a host's process has ended, or counts as gone since it is silent."""
        return (
            self._links.is_closed
            or link.is_given_up
            or self._is_silent_for_too_long(link)
            or (self._launcher is not None and link.name in self._launcher.ended())
        )

    def _note_lost(self, link: LinkedHost) -> None:
        """Warn that a host is silent; where only its process has ended, its ranks' death is told.

        A host that is cut off may count as gone before ``LOST_S``, for ``ssh`` ends by then.
        """
        if self.silent_s(link) > SILENT_S:
            log.warning("the host %s is silent: it counts as gone", link.name)

    def _is_silent_for_too_long(self, link: LinkedHost) -> bool:
        silent_s = self.silent_s(link)
        if silent_s <= LOST_S:
            return False
        return silent_s > SLOW_LOST_S or self._does_system_answer(link) is not True

    def is_cut_off(self, link: LinkedHost) -> bool:
        """Whether not even a host's system answers, as it does where processes are slow."""
        return self.silent_s(link) > SILENT_S and self._does_system_answer(link) is False

    def _does_system_answer(self, link: LinkedHost) -> bool | None:
        """Whether a host's system does; None where nobody knows, as where ssh carries all."""
        if self._streams is None or (unheard_s := self._streams.unheard_s(link)) is None:
            return None
        return unheard_s <= SILENT_S or self._streams.asked_s(link) < ANSWER_S

    def lost_for_good(self, suspects: Sequence[LinkedHost]) -> list[LinkedHost]:
        """Those of some hosts that are gone and cannot be started without all others.

        A host whose agent has ended may be gone as well, which turns out in ``LOST_S``.
        """
        if self._launcher is None or self.plan.starts_hosts_alone:
            return []
        since = time.monotonic()
        while any(not self.is_lost(one) and one.heard < since for one in suspects):
            time.sleep(LOOK_S)
        return [one for one in suspects if self.is_lost(one)]

    def silent_s(self, link: LinkedHost) -> float:
        """For how many seconds nothing has come from a host, which is asked all the time."""
        return self._links.silent_s(link)

    def replace(self, index: int, name: str = "") -> LinkedHost:
        """Start the process of a host anew, or that of another host in its place.

        Args:
            index: Which of the hosts.
            name: Of the other one. Default: the same.

        Returns:
            The link to it.

        Raises:
            LaunchError: It does not come.
        """
        before, launcher = self.links[index], self._launcher
        assert launcher is not None
        name = name or before.name
        if name != before.name:
            self.plan = launcher.plan = self.plan.with_another(name, before.name)
        before.is_given_up = True
        self._links.send(before, "end")  # it may only have been cut off for a while
        keys = os.path.join(self._folder, "keys")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(keys)
        write_keys(keys, self._links.keys)
        self.cut(before)
        try:
            launcher.start_host(name)
            link = self._wait_for(name, launcher)
        finally:
            os.unlink(keys)
        self.links = (*self.links[:index], link, *self.links[index + 1 :])
        return link

    def _wait_for(self, name: str, launcher: HostLauncher) -> LinkedHost:
        """A host's process that was started anew.

        Raises:
            LaunchError: It does not come.
        """

        def come() -> LinkedHost | None:
            fresh = (one for one in self._links.hosts.values() if not one.is_given_up)
            return next((one for one in fresh if one.name == name and one not in self.links), None)

        deadline = time.monotonic() + self.plan.timeout
        while not self._links.wait(lambda: come() is not None, LOOK_S):
            if self._is_cancelled:
                raise LaunchError(f"the start of {name} was given up.")
            self._dial_listeners(launcher.outputs().values())
            failed = [one for one in self._failures(launcher) if one.host == name]
            if failed or time.monotonic() > deadline:
                output = launcher.outputs().get(name, "")
                problem = explain(failed[0], self.plan) if failed else self._late(name, output)
                raise LaunchError(f"{problem.what}: {problem.value}.", remedy=problem.mend)
        link = come()
        assert link is not None
        return link

    def seconds_left(self) -> float | None:
        """Until the time limit of the job; None without one, or where it is not known."""
        return None if self._launcher is None else self._launcher.seconds_left()

    def on_notice(self, tell: Callable[[LinkedHost, str], None]) -> None:
        """Have something called when a host's process has been told to end, and by what."""
        self._links.on_notice = tell

    def snapshot(self) -> tuple[LinkedHost, ...]:
        """The links as they are now."""
        return self._links.snapshot(self.links)

    def wait_for_news(self, timeout: float) -> None:
        """Wait until something has come from a host."""
        self._links.wait_for_news(timeout)

    def forget_problems(self) -> None:
        """What was wrong is looked for anew."""
        self.problems.clear()

    def cancel(self) -> None:
        """From another thread: a start that goes on is given up."""
        self._is_cancelled = True

    # --- starting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the agents and wait for them; those that do not come are in ``problems``.

        Raises:
            LaunchError: The launcher cannot start any.
        """
        write_keys(os.path.join(self._folder, "keys"), self._links.keys)
        self._nonce = self._write_nonce()
        launcher = self._launcher = _make_launcher(self.plan, self._folder)
        launcher.tunnel = self._links.keys.tunnel
        launcher.tunnelled = {"link": self._links.keys.port}
        if self._streams is not None:
            launcher.tunnelled["streams"] = self._streams.port
        launcher.start()
        failed: list[HostProblem] = []
        deadline = time.monotonic() + self.plan.timeout
        while len(self._links.hosts) + len(failed) < self.plan.count:
            self._links.wait(lambda: len(self._links.hosts) >= self.plan.count, LOOK_S)
            if self._is_cancelled:
                break
            self._dial_listeners(launcher.outputs().values())
            come = {host.name for host in self._links.hosts.values()}
            failures = self._failures(launcher)
            failed = [explain(one, self.plan) for one in failures if one.host not in come]
            floods = launcher.floods()
            launcher.stops_at_once = bool(floods)
            if any(not one.host for one in (*launcher.failures(), *floods)):  # of all of them
                break
            if launcher.is_waiting():
                deadline = time.monotonic() + self.plan.timeout
            if time.monotonic() > deadline:
                break
            self._tell_waiting(launcher)
        self.links = tuple(sorted(self._links.hosts.values(), key=self._order))
        self.problems += failed
        self.problems += self._missing(launcher, {problem.what for problem in failed})
        if len(self.links) >= self.plan.count:  # nobody needs them any more
            os.unlink(os.path.join(self._folder, "keys"))
        for host, output in launcher.outputs().items():
            if self.plan.launcher == "ssh" and host in {link.name for link in self.links}:
                self.problems += noise(host, output)

    def _failures(self, launcher: HostLauncher) -> list[Failure]:
        """What has ended, one for each host; what an agent said of itself comes first."""
        said = [one for text in launcher.outputs().values() for one in complaints(text)]
        ended = (*launcher.floods(), *launcher.failures())
        by_host = {one.host: one for one in (*ended, *said)}
        if said:
            by_host.pop("", None)
        return list(by_host.values())

    def _write_nonce(self) -> str:
        nonce = os.urandom(16).hex()
        with open(os.path.join(self._folder, "nonce"), "x", encoding="utf-8") as file:
            file.write(nonce)
        return nonce

    def _order(self, link: LinkedHost) -> tuple[Any, ...]:
        if link.name in self.plan.hosts:
            return (self.plan.hosts.index(link.name),)
        return (link.place is None, link.place or 0, link.name)

    def _tell_waiting(self, launcher: HostLauncher) -> None:
        if time.monotonic() - self._told_at < TELL_S:
            return
        self._told_at = time.monotonic()
        come = len(self._links.hosts)
        self._tell(f"{launcher.waits_for()}{f', {come} of them here' if come else ''}")

    def _dial_listeners(self, outputs: Iterable[str]) -> None:
        """Go to agents that cannot come, to one address after the other."""
        for line in (line for output in outputs for line in output.splitlines()):
            _, found, text = line.partition(LISTENS)
            if not found or text in self._dialled:
                continue
            try:
                place = json.loads(text)
                addresses = tuple(str(one) for one in place["addresses"])
                self._dialled[text] = Dial(
                    self._links, place["name"], addresses, int(place["port"])
                )
            except (ValueError, KeyError, TypeError):
                continue  # it is not written to its end yet
        come = {host.name for host in self._links.hosts.values()}
        for dial in self._dialled.values():
            if dial.name not in come:
                dial.go_on()

    def _missing(self, launcher: HostLauncher, failed: Set[str]) -> list[HostProblem]:
        """Those of which nothing is known but that they did not come."""
        count = self.plan.count - len(self.links) - len(failed)
        # One process that was to start all of them speaks for all.
        if count <= 0 or (failed and any(not one.host for one in launcher.failures())):
            return []
        come = {link.name for link in self.links} | failed
        names = [host for host in self.plan.hosts if host not in come]
        late = names or [f"{count} of {self.plan.count} hosts"]
        outputs = launcher.outputs()
        return [self._late(host, outputs.get(host, outputs.get("", ""))) for host in late]

    def _late(self, host: str, output: str) -> HostProblem:
        """A host of which nothing is known but that it did not come."""
        within = f"within {self.plan.timeout:g} s"
        if self.plan.launcher == "ssh" and STARTS not in output:
            mend = (
                f"see how long `ssh {ssh_target(host).words} true` takes: a name server that does "
                "not answer holds it up, or a login shell that waits for something"
            )
            failure = Failure(host, f"ssh has not started anything there {within}", output)
            return explain(failure, self.plan, mend)
        mend = (
            f"it has to reach one of {', '.join(self._links.keys.addresses)} at port "
            f"{self._links.keys.port}, or be reached from here at a port of its own: open TCP "
            "ports one way, or name another address of this host with --address"
        )
        return explain(Failure(host, f"its agent has not come {within}", output), self.plan, mend)

    # --- asking -----------------------------------------------------------------------------------

    def facts(self) -> tuple[HostFacts, ...]:
        """What each host has; without those that do not say, which are in ``problems``."""
        bodies = {link.identity: self._shared() for link in self.links}
        return self._facts_of(self._ask("facts", "facts", bodies, FACTS_TIMEOUT_S))

    def begin(self, links: Mapping[int, LinkedHost], epoch: int) -> tuple[HostFacts, ...]:
        """Have hosts make room for a session's ranks and start their agents.

        Args:
            links: Of the hosts, by the numbers of their agents.
            epoch: Of the session's owner.

        Returns:
            What is known of each without torch; who did not answer is in ``problems``.
        """
        port = 0 if self._streams is None else self._streams.port
        bodies = {
            link.identity: {**self._shared(), "node": node, "epoch": epoch, "port": port}
            for node, link in links.items()
        }
        return self._facts_of(self._ask("begin", "begun", bodies, BEGIN_TIMEOUT_S))

    def set_owner(self, epoch: int) -> None:
        """Have hosts bring all to the sockets of another owner of the session; 0 for nobody's.

        Who is gone, or cannot, is seen by its streams that do not come.
        """
        links = [link for link in self.links if not self.is_lost(link)]
        for link in links:
            link.replies.pop("owner", None)
            self.tell(link, "owner", {"epoch": epoch})
        self._links.wait(
            lambda: all(
                link.replies.get("owner", {}).get("epoch") == epoch or self.is_lost(link)
                for link in links
            ),
            OWNER_TIMEOUT_S,
        )

    def call(self, link: LinkedHost, connection: socket.socket) -> None:
        """Have a host connect its agent to somebody who wants to attach; see ``HostStreams``."""
        assert self._streams is not None
        self._streams.call(link, connection)

    def _shared(self) -> dict[str, Any]:
        """By which hosts find out whether they share folders with this one."""
        path = os.path.join(self._folder, "nonce")
        return {"nonce": self._nonce, "path": path, "directory": os.getcwd()}

    def _facts_of(
        self, replies: Iterable[tuple[LinkedHost, dict[str, Any]]]
    ) -> tuple[HostFacts, ...]:
        found = []
        for link, reply in replies:
            if "name" not in reply and (problem := reply.get("problem")):
                mend = (
                    "free some room in /tmp there, or set TMPDIR there to a folder on its own disk"
                )
                self.problems.append(HostProblem(link.name, str(problem), mend))
                continue
            try:
                found.append(facts_of(reply))
            except ValueError as error:
                self.problems.append(
                    HostProblem(link.name, str(error), "install the same distsession there as here")
                )
        return tuple(found)

    def reach(self, facts: Sequence[HostFacts]) -> Reach:
        """Who reaches whom, at which addresses."""
        peers = {
            one.name: {"addresses": list(one.addresses.values()), "port": one.port} for one in facts
        }
        bodies = {
            link.identity: {"peers": {k: v for k, v in peers.items() if k != link.name}}
            for link in self.links
            if link.name in peers
        }
        replies = self._ask("reach", "reached", bodies, REACH_TIMEOUT_S)
        return {link.name: reply["peers"] for link, reply in replies}

    def offsets(self) -> dict[str, float]:
        """By how many seconds each host's clock is ahead of the one here."""
        return {link.name: link.offset for link in self.links}

    def _ask(
        self, kind: str, reply: str, bodies: Mapping[bytes, Mapping[str, Any]], timeout: float
    ) -> list[tuple[LinkedHost, dict[str, Any]]]:
        """Ask hosts, and give what they answer; who does not is a problem."""
        asked = [link for link in self.links if link.identity in bodies]
        for link in asked:
            link.replies.pop(reply, None)
            self._links.send(link, kind, bodies[link.identity])

        assert self._launcher is not None

        def is_settled() -> bool:
            return all(reply in link.replies or self._is_silent(link) for link in asked)

        deadline = time.monotonic() + timeout
        while not self._links.wait(is_settled, LOOK_S) and time.monotonic() < deadline:
            ended = {one.host for one in self._launcher.failures()}
            if "" in ended or ended >= {one.name for one in asked if reply not in one.replies}:
                break
        silent = [link for link in asked if reply not in link.replies]
        self._note_silent(silent, {one.host: one for one in self._launcher.failures()})
        return [(link, link.replies[reply]) for link in asked if reply in link.replies]

    def _note_silent(self, links: Sequence[LinkedHost], ended: Mapping[str, Failure]) -> None:
        for link in links:
            failure = ended.get(link.name) or ended.get("")
            seconds = self.silent_s(link)
            how = (
                failure.how
                if failure is not None
                else f"its agent (pid {link.pid}) has not answered for {seconds:.0f} s"
            )
            mend = "look whether the host is up, and what its system's log says of that process"
            assert self._launcher is not None
            outputs = self._launcher.outputs()
            output = outputs.get(link.name, outputs.get("", ""))
            self.problems.append(explain(Failure(link.name, how, output), self.plan, mend))

    def _is_silent(self, link: LinkedHost) -> bool:
        return self.silent_s(link) > self._links.keys.patience_s

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End all agents, give a job back, and leave nothing. Harmless when repeated."""
        with contextlib.ExitStack() as steps:  # from the last, whatever becomes of one of them
            steps.callback(self._remove_folder)
            if self._launcher is not None:
                self._launcher.come = {link.name for link in self._links.hosts.values()}
                steps.callback(self._launcher.stop)
            if self._streams is not None:
                steps.callback(self._streams.close)
            steps.callback(self._links.close)

    def _remove_folder(self) -> None:
        folder_lock.remove(self._folder)
        folder_lock.release(self._lock)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kernel_facts() -> HostFacts:
    """Those of this process, which does not import torch."""
    return facts_of({**installed_facts(), "name": "here", "addresses": own_addresses()})


def _make_launcher(plan: HostPlan, folder: str) -> HostLauncher:
    match plan.launcher:
        case "ssh":
            return SshLauncher(plan, folder)
        case "command" if plan.hosts:
            return EachCommandLauncher(plan, folder)
        case "command":
            return CommandLauncher(plan, folder)
        case "mpi":
            return MpiLauncher(plan, folder)
        case "sge":
            return SgeLauncher(plan, folder)
        case "pbs":
            return PbsLauncher(plan, folder)
        case "lsf":
            return LsfLauncher(plan, folder)
        case "htcondor":
            return CondorLauncher(plan, folder)
        case _ if plan.in_allocation:
            return SlurmStepLauncher(plan, folder)
        case _:
            return SlurmLauncher(plan, folder)


def _make_folder(parent: str) -> tuple[str, int]:
    """A folder of this start, for its user alone, and its lock; what was left there goes.

    Raises:
        LaunchError: It cannot be made.
    """
    parent = os.path.abspath(os.path.expanduser(parent))
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        if why := places.problem(parent):
            raise LaunchError(
                f"no folder for the keys of hosts can be made in {parent}: {why}.",
                remedy="Name one in which you alone can write: --folder.",
            )
        folder_lock.sweep(parent)  # of starts that were killed
        prefix, parent = f"{folder_lock.PREFIX}start-", os.path.realpath(parent)
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        return folder, folder_lock.make(folder)
    except OSError as error:
        raise LaunchError(
            f"no folder can be made in {parent}: {error.strerror}.",
            remedy="Name one that all hosts share and that you may write to: --folder.",
        ) from None
