"""Sessions on the hosts of a lab, for tests: starting them, and finding their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

import distsession
from distsession import Session
from distsession.cluster.host_agents import FIRST
from tests.integration.agent_children import relay_of
from tests.integration.host_lab import HostLab
from tests.until import until

__all__ = [
    "attached",
    "count",
    "interrupt_start",
    "kill_kernel",
    "nothing_left",
    "options_of",
    "processes",
    "python",
    "reduced",
    "start",
]

ROOT = Path(distsession.__file__).parents[1]
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
    launcher: Any = session.launcher
    agent = psutil.Process(launcher._agents.pid(FIRST + node))
    process = psutil.Process(launcher._hosts.links[node].pid)
    return {"agent": agent, "relay": relay_of(agent), "host": process}


def python(code: str, *before: str, **streams: Any) -> subprocess.Popen[str]:
    """Another process that runs this, with pipes unless these are given.

    Args:
        code: Of Python.
        before: The command that it is run by.
        streams: As those of :class:`subprocess.Popen`.
    """
    pipes = {name: streams.get(name, subprocess.PIPE) for name in ("stdin", "stdout", "stderr")}
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*before, sys.executable, "-c", code], env=environ, text=True, **pipes)


def interrupt_start(is_waiting: Callable[[], object], **options: Any) -> None:
    """Interrupt the start of a session while its job waits."""
    starts = python(f"from distsession import Session\nSession(**{options!r})")
    until(is_waiting, "a job that waits")
    starts.send_signal(signal.SIGINT)
    _, written = starts.communicate(timeout=60)
    assert "the start was stopped; job " in written.splitlines()[-1], written
    assert "was given back" in written.splitlines()[-1], written


def kill_kernel(**options: Any) -> None:
    """Kill a kernel that has started a session."""
    code = f"from distsession import Session\nsession = Session(**{options!r})\n"
    kernel = python(f"{code}print('ready', flush=True)\nimport time\ntime.sleep(600)")
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == "ready\n"
    kernel.kill()
    kernel.communicate()


KEPT = """
import os, time
from distsession import Session
session = Session(**{options!r}, name={name!r}, keep=60)
session.execute("value = rank + 1")
session.submit(lambda: time.sleep(2) or 41)
while not all(region.request for region in session.launcher.board.regions):
    time.sleep(0.01)  # what has not been sent to all ranks is dropped
print("ready", os.getpid(), session.job, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def attached(name: str, *before: str, **options: Any) -> Iterator[Session]:
    """A session that another kernel has started and that has outlived it, in the same job.

    Args:
        name: The session's.
        before: The command that the other kernel is run by.
        options: Of the session.
    """
    code = KEPT.format(options=options, name=name)
    with python(code, *before, stderr=None) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            _, pid, job = next(line for line in lines if line.startswith("ready")).split(" ")
            os.kill(int(pid), signal.SIGKILL)
            until(lambda: process.poll() or not psutil.pid_exists(int(pid)), "the kernel's end")
            with Session.attach(name) as session:
                assert session.job == job.strip()
                (future,) = session.pending()
                assert set(future.result(60).values()) == {41}
                assert session.evaluate("value - rank") == dict.fromkeys(session.ranks, 1)
                yield session
        finally:
            process.stdin.close()  # the shell of an allocation waits for that
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def reduced(session: Session) -> set[float]:
    """What an all_reduce of ones gives."""
    session.execute(REDUCE)
    return {float(value) for value in session.pull("t").values()}


def count(times: int) -> float:
    """Run on ranks: their number, that many times, in that many tenths of a second."""
    import torch

    total = torch.zeros(())
    for _ in range(times):
        one = torch.ones(())
        torch.distributed.all_reduce(one)
        total += one
        time.sleep(0.1)
    return float(total)


def nothing_left(lab: HostLab) -> None:
    """No process, no folder and no memory of a session is on any host."""
    until(lambda: not lab.processes(), "the end of all processes on the hosts")
    left = [f"{host.name}:{path}" for host in lab.hosts for path in host.left()]
    assert not left, left
