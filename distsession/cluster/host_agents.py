"""The agents of a session on other hosts, and the streams that come from there.

The first agent is on the kernel's own host. It has no ranks: it holds the stores at which ranks
meet, so that no other host's end takes them along.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from distsession.cluster.agents import AgentProcess, Agents
from distsession.cluster.host_links import LinkedHost
from distsession.cluster.hosts import FIRST, Hosts
from distsession.cluster.kept_hosts import KeptHosts
from distsession.errors import LaunchError
from distsession.protocol.host_facts import HostFacts, facts_of
from distsession.protocol.host_link import TUNNEL

__all__ = ["FIRST", "HostAgents"]

POLL_S = 0.01


class RemoteAgent:
    """The agent's process on another host.

    Args:
        hosts: By which it is asked for.
        link: To its host.
    """

    def __init__(self, hosts: Hosts | KeptHosts, link: LinkedHost):
        self._hosts, self.link = hosts, link

    @property
    def _state(self) -> Mapping[str, Any]:
        return self.link.replies.get("agent", {})

    @property
    def pid(self) -> int:
        return int(self._state.get("pid") or 0)

    @property
    def log(self) -> str:
        """What it wrote last, once it has ended."""
        return str(self._state.get("log", ""))

    @property
    def oom(self) -> str:
        """What its host says if the system there has ended it for want of memory."""
        return str(self._state.get("oom", ""))

    @property
    def signs_of_life(self) -> tuple[str, ...]:
        """What changes while it is not stuck: as its host says once it was told to end."""
        return tuple(self._state.get("signs") or (str(self.link.heard),))

    def poll(self) -> int | None:
        if self._hosts.is_lost(self.link):
            return -1
        code = self._state.get("code")
        return None if code is None else int(code)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def start(self) -> None:
        """Start another one in its place."""
        self._hosts.start_agent(self.link)

    def terminate(self) -> None:
        self._hosts.tell(self.link, "end-agent", {"at_once": False})

    def kill(self) -> None:
        self._hosts.tell(self.link, "end-agent", {"at_once": True})


class HostAgents(Agents):
    """Agents on other hosts, and one here.

    Args:
        hosts: The hosts; started later.
        folder: As for :class:`Agents`, as those that follow.

    Attributes:
        facts: What is known of each host, by the number of its agent.
        store_ports: Where torch's TCP store is reached from each host itself.
    """

    def __init__(self, hosts: Hosts | KeptHosts, folder: str, board: int, *, epoch: int = 1):
        super().__init__(folder, board, lambda node: [], epoch)
        self._hosts = hosts
        self.facts: dict[int, HostFacts] = {}
        self.store_ports: dict[int, int] = {}
        self._moved: dict[int, str] = {}

    # --- starting ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have all hosts start their agents; who does not is in the hosts' problems."""
        self._processes.update(self._begin(dict(enumerate(self._hosts.links, FIRST))))

    def _begin(self, links: Mapping[int, LinkedHost]) -> dict[int, RemoteAgent]:
        facts = {one.name: one for one in self._hosts.begin(links, self._epoch)}
        found = {}
        for node, link in links.items():
            if link.name in facts:
                self.facts[node] = facts[link.name]
                self.store_ports[node] = int(link.replies["begun"]["store"])
                found[node] = RemoteAgent(self._hosts, link)
        return found

    def recall(self) -> None:
        """Know of the hosts what another kernel has learnt that has started them."""
        for node, link in enumerate(self._hosts.links, FIRST):
            begun = link.replies["begun"]
            self.facts[node], self.store_ports[node] = facts_of(begun), int(begun["store"])

    def adopt(self, node: int, pid: int, link: Connection) -> None:
        super().adopt(node, pid, link)
        if node >= FIRST:
            self._processes[node] = RemoteAgent(self._hosts, self._hosts.links[node - FIRST])

    def start(self, node: int) -> None:
        process = self._processes.get(node)
        if isinstance(process, RemoteAgent) and node not in self._links and process.poll() is None:
            return  # it has been started with all others
        super().start(node)

    def _start_process(self, node: int) -> AgentProcess:
        if node < FIRST:
            return super()._start_process(node)
        link = self._hosts.links[node - FIRST]
        if self._hosts.is_lost(link):
            return self._replace(node)
        process = RemoteAgent(self._hosts, link)
        process.start()
        return process

    def _replace(self, node: int) -> RemoteAgent:
        """Start the process of a host that is gone, or of another in its place, and its agent."""
        link = self._hosts.replace(node - FIRST, self._moved.pop(node, ""))
        begun = self._begin({node: link})
        if node not in begun:
            raise LaunchError(f"{link.name} has come, but does not answer.")
        return begun[node]

    def move(self, node: int, name: str) -> None:
        """Give up a host; another one takes its place with the next start of its agent."""
        self._moved[node] = name
        self._hosts.give_up(self._hosts.links[node - FIRST])

    def folder_on(self, node: int) -> str:
        """The session's folder on a host."""
        return str(self._hosts.links[node - FIRST].replies.get("begun", {}).get("folder", ""))

    def kernel_address(self, node: int) -> str:
        """Of this host, by which a host has come here."""
        address = self._hosts.links[node - FIRST].address
        return "" if address == TUNNEL else address

    def name(self, node: int) -> str:
        links = self._hosts.links
        return links[node - FIRST].name if FIRST <= node < FIRST + len(links) else ""

    # --- the end ----------------------------------------------------------------------------------

    def log_tails(self) -> str:
        tails = [super().log_tails()]
        for node, process in self._processes.items():
            if isinstance(process, RemoteAgent) and process.log:
                tails.append(f"\nThe last lines of the agent on {self.name(node)}:\n{process.log}")
        return "".join(tails)

    def _oom_text(self, process: AgentProcess, code: int) -> str:
        return process.oom if isinstance(process, RemoteAgent) else super()._oom_text(process, code)

    def _kill_ranks(self, node: int) -> None:
        """Their host does, with the agent."""

    def _activity(self, process: AgentProcess) -> tuple[str, ...]:
        if isinstance(process, RemoteAgent):
            return process.signs_of_life
        return super()._activity(process)
