"""Agents that are started by processes here: ssh, mpiexec, srun, and the user's own command.

ssh is a plain process of ipyparallel's, which takes one round trip for each host; its SSHLauncher
takes seven, and leaves a profile behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from distsession.cluster.host_launchers import (
    STOP_S,
    Failure,
    HostLauncher,
    check_program,
    read_output,
)
from distsession.cluster.slurm_jobs import SlurmJob
from distsession.host_plan import HostPlan, flag, ssh_target
from distsession.protocol.host_link import STARTS, tunnel_path

__all__ = [
    "CommandLauncher",
    "EachCommandLauncher",
    "MpiLauncher",
    "SlurmStepLauncher",
    "SshLauncher",
]


class _Loop:
    """The event loop that ipyparallel's launchers ask for, in a thread of its own."""

    def __init__(self) -> None:
        from tornado.ioloop import IOLoop

        self._loop = asyncio.new_event_loop()
        self.tornado: Any = None
        ready = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self.tornado = IOLoop.current()
            ready.set()
            self._loop.run_forever()
            self._loop.close()

        self._thread = threading.Thread(target=run, name="distsession-launcher", daemon=True)
        self._thread.start()
        ready.wait()

    def run(self, awaitable: Any) -> None:
        asyncio.run_coroutine_threadsafe(awaitable, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class _Processes(HostLauncher):
    """Agents that are started by processes here, which last as long as they do."""

    program = ""

    def __init__(self, plan: HostPlan, folder: str):
        super().__init__(plan, folder)
        self._loop: _Loop | None = None
        self._launchers: dict[str, Any] = {}
        self._numbers = itertools.count()

    def start(self) -> None:
        check_program(self.program, self.plan.launcher)
        self._loop = _Loop()
        for host, launcher in self.launchers(self._loop.tornado):
            self._add(host, launcher)

    def _add(self, host: str, launcher: Any) -> None:
        launcher.output_file = os.path.join(self.folder, f"output-{next(self._numbers)}")
        self._launchers[host] = launcher
        self._start_one(launcher)

    def _start_one(self, launcher: Any) -> None:
        launcher.start()

    @abstractmethod
    def launchers(self, loop: Any) -> Iterator[tuple[str, Any]]:
        """The launchers of ipyparallel, with the host of each."""

    def failures(self) -> list[Failure]:
        return [
            Failure(host, f"{self.program} ended with exit code {code}", self.outputs()[host])
            for host, code in self._exit_codes().items()
        ]

    def _exit_codes(self) -> dict[str, int | None]:
        """Of the processes that have ended."""
        return {
            host: (launcher.stop_data or {}).get("exit_code")
            for host, launcher in self._launchers.items()
            if launcher.state == "after"
        }

    def ended(self) -> set[str]:
        return self._exit_codes().keys() - {""}

    def output_files(self) -> dict[str, str]:
        return {host: one.output_file for host, one in self._launchers.items()}

    def stop(self) -> None:
        if self._loop is None:
            return
        deadline = time.monotonic() + (0.0 if self.stops_at_once else STOP_S)
        while time.monotonic() < deadline and any(
            launcher.state == "running" and self._ends_by_itself(host, launcher)
            for host, launcher in self._launchers.items()
        ):
            time.sleep(0.01)
        for launcher in self._launchers.values():
            if launcher.state == "running":
                with contextlib.suppress(ProcessLookupError):  # with what it has started
                    os.killpg(launcher.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    self._loop.run(launcher.stop())
        self._loop.close()
        self._loop = None

    def _ends_by_itself(self, host: str, launcher: Any) -> bool:
        """Whether a process has to be waited for when all is stopped."""
        if not host or host in self.come:
            return True
        # What has begun and not come ends with its process here. But ssh would leave its sockets on
        # the host if it ended between making them and having the agent started, who removes them.
        return STARTS not in read_output(launcher.output_file)


class _Quiet:
    """What is mixed into launchers of ipyparallel whose processes' output is ours to read."""

    def _log_output(self, stop_data: Any = None) -> None:
        """Without this it would go to a log of the notebook, and its file away."""

    def _start_streaming(self) -> None:
        """Without this it would go to stderr, too, where the level of a log is that of a kernel."""


def _process(command: Sequence[str], loop: Any) -> Any:
    """The launcher of ipyparallel for a process, which keeps what it writes."""
    from ipyparallel.cluster.launcher import LocalProcessLauncher

    class Process(_Quiet, LocalProcessLauncher):  # type: ignore[misc]
        pass

    return Process(cmd_and_args=list(command), loop=loop)


class _EachHost(_Processes):
    """A process here for each of the hosts that were named."""

    @abstractmethod
    def _launcher(self, host: str, loop: Any) -> Any:
        """The launcher of ipyparallel for one of them."""

    def launchers(self, loop: Any) -> Iterator[tuple[str, Any]]:
        for host in self.plan.hosts:
            yield host, self._launcher(host, loop)

    def start_host(self, host: str) -> None:
        assert self._loop is not None
        before = self._launchers.pop(host, None)
        if before is not None and before.state == "running":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(before.pid, signal.SIGTERM)
        self._add(host, self._launcher(host, self._loop.tornado))


class SshLauncher(_EachHost):
    """One ssh for each host, with the keys as its standard input."""

    program = "ssh"

    def _launcher(self, host: str, loop: Any) -> Any:
        target = ssh_target(host)
        command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        for name, value in self.plan.options.items():
            command += ["-F", value] if name == "config" else ["-o", f"{name}={value}"]
        if target.port is not None:
            command += ["-p", str(target.port)]
        sockets = {what: tunnel_path(self.tunnel, host, what) for what in self.tunnelled}
        for what, port in self.tunnelled.items():
            command += ["-R", f"{sockets[what]}:127.0.0.1:{port}"]
        remote = self.agent("-", host)
        if sockets:  # sshd leaves them where they are, also if no agent starts
            remove = shlex.join(["rm", "-f", *sockets.values()])
            remote = ["sh", "-c", f'"$@"; code=$?; {remove}; exit $code', "sh", *remote]
        command += ["--", target.destination, f"exec {shlex.join(remote)}"]
        return _process(_with_input(command, self.keys), loop)


def _with_input(command: Sequence[str], path: str) -> list[str]:
    """A command with a file as its standard input, which ipyparallel's launchers do not give."""
    return ["sh", "-c", 'input=$1; shift; exec "$@" < "$input"', "sh", path, *command]


class CommandLauncher(_Processes):
    """The user's own command, for whatever else starts processes on hosts."""

    def __init__(self, plan: HostPlan, folder: str):
        super().__init__(plan, folder)
        self.program = _program(self)

    def failures(self) -> list[Failure]:
        # It may start agents in the background, and be done with it.
        return [] if self._exit_codes() == {"": 0} else super().failures()

    def launchers(self, loop: Any) -> Iterator[tuple[str, Any]]:
        yield "", _process(_command(self), loop)


def _program(launcher: HostLauncher) -> str:
    first = shlex.split(launcher.plan.command)[0]
    return launcher.agent("-")[0] if first == "{agent}" else first


def _command(launcher: HostLauncher, *host: str) -> list[str]:
    """The user's command, for all hosts or for one."""
    given = launcher.plan.command
    agent = shlex.join(launcher.agent("-" if "{keys}" in given else launcher.keys, *host))
    values = {"agent": agent, "keys": shlex.quote(launcher.keys), "host": shlex.join(host)}
    text = re.sub(r"\{(\w+)\}", lambda found: values[found[1]], given)
    return ["sh", "-c", text]  # not by `exec`, for it may be several commands


class EachCommandLauncher(_EachHost):
    """The user's own command, once for each host."""

    def __init__(self, plan: HostPlan, folder: str):
        super().__init__(plan, folder)
        self.program = _program(self)

    def _exit_codes(self) -> dict[str, int | None]:
        # It may start an agent in the background, and be done with it.
        return {host: code for host, code in super()._exit_codes().items() if code != 0}

    def _launcher(self, host: str, loop: Any) -> Any:
        return _process(_command(self, host), loop)


class MpiLauncher(_Processes):
    """ipyparallel's launcher for MPI: one mpiexec for all hosts."""

    def __init__(self, plan: HostPlan, folder: str):
        super().__init__(plan, folder)
        self._command = shlex.split(plan.options.get("command", "mpiexec"))
        self.program = self._command[0]

    def arguments(self) -> list[str]:
        """What makes it start one process on each host."""
        if "args" in self.plan.options:
            return shlex.split(self.plan.options["args"])
        said = subprocess.run(
            [self.program, "--version"], capture_output=True, text=True, check=False
        ).stdout
        if "Open MPI" not in said and "OpenRTE" not in said:
            return ["-ppn", "1"]
        # It would otherwise give an agent, and with it all ranks of its host, one core.
        return ["--map-by", "ppr:1:node", "--bind-to", "none"]

    def launchers(self, loop: Any) -> Iterator[tuple[str, Any]]:
        from ipyparallel.cluster.launcher import MPILauncher

        class Mpi(_Quiet, MPILauncher):  # type: ignore[misc]
            pass

        yield "", Mpi(
            mpi_cmd=self._command, mpi_args=self.arguments(), program=self.agent(self.keys),
            loop=loop,
        )  # fmt: skip

    def _start_one(self, launcher: Any) -> None:
        launcher.start(self.plan.count)


class SlurmStepLauncher(MpiLauncher):
    """``srun`` in the job that this process is in."""

    def __init__(self, plan: HostPlan, folder: str):
        super().__init__(plan, folder)
        self._command, self.program = ["srun"], "srun"
        self.job = os.environ["SLURM_JOB_ID"]

    def arguments(self) -> list[str]:
        given = [flag(name, value) for name, value in self.plan.options.items()]
        nodes = f"--nodes={self.plan.count}"
        return [nodes, "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0", *given]

    def seconds_left(self) -> float | None:
        return SlurmJob(self.job).seconds_left()

    def waits_for(self) -> str:
        return f"a step of job {self.job} on {self.plan.count} hosts"
