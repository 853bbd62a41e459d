"""Sessions on the hosts of a lab, for tests: starting them, and finding their processes."""

from __future__ import annotations

from typing import Any

import psutil

from distsession import Session
from distsession.cluster.host_agents import FIRST
from tests.integration.host_lab import HostLab
from tests.until import until

__all__ = ["nothing_left", "options_of", "processes", "reduced", "start"]

REDUCE = "t = torch.ones(())\ndist.all_reduce(t)"


def options_of(lab: HostLab, *hosts: str, **options: Any) -> dict[str, Any]:
    """The options of a session with two ranks on each of these hosts."""
    given: dict[str, Any] = {
        "launcher": "ssh",
        "hosts": list(hosts),
        "ranks_per_host": [2] * len(hosts),
        "folder": str(lab.folder),
        "launcher_options": {"config": lab.ssh_config},
    }
    return {**given, **options}


def start(lab: HostLab, *hosts: str, **options: Any) -> Session:
    """Start such a session."""
    return Session(**options_of(lab, *hosts, **options))


def processes(session: Session, host: str) -> dict[str, psutil.Process]:
    """What runs on a host beside its ranks, by what it is."""
    node = next(each.node for each in session.hosts if each.name == host)
    launcher: Any = session._launcher
    agent = psutil.Process(launcher._agents.pid(FIRST + node))
    ranks = {info.pid for info in session.infos}
    (relay,) = [child for child in agent.children() if child.pid not in ranks]
    process = psutil.Process(launcher._hosts.links[node].pid)
    return {"agent": agent, "relay": relay, "host": process}


def reduced(session: Session) -> set[float]:
    """What an all_reduce of ones gives."""
    session.execute(REDUCE)
    return {float(value) for value in session.pull("t").values()}


def nothing_left(lab: HostLab) -> None:
    """No process, no folder and no memory of a session is on any host."""
    until(lambda: not lab.processes(), "the end of all processes on the hosts")
    left = [f"{host.name}:{path}" for host in lab.hosts for path in host.left()]
    assert not left, left
