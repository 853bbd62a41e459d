"""What the user says of the hosts that a session is to run on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distsession.errors import OptionsError

__all__ = ["HOST_LAUNCHERS", "HostPlan", "SshTarget", "flag", "ssh_target"]

HOST_LAUNCHERS = ("ssh", "slurm", "mpi", "sge", "pbs", "lsf", "htcondor", "command")
"""Ways to start a process on each host."""

START_TIMEOUT_S = 60.0
"""Seconds that agents have to come once they run. A job may wait in its queue for as long as it
takes."""

DEFAULT_FOLDER = "~/.distsession"
"""Where each start has a folder of its own. On most clusters all hosts share home directories."""

OPTIONS_OF: Mapping[str, Sequence[str]] = {"mpi": ("command", "args"), "command": ()}
"""What launchers take whose options are not those of a program, which knows its own."""

PLACEHOLDERS = ("{agent}", "{host}", "{keys}")


def flag(name: str, value: str) -> str:
    """An option as programs take it; one without a value, such as ``exclusive``, stands alone."""
    return f"--{name}={value}" if value else f"--{name}"


@dataclass(frozen=True)
class SshTarget:
    """Where ssh goes: ``user@host:port``, or a name of the user's ssh configuration."""

    destination: str
    port: int | None = None

    @property
    def words(self) -> str:
        """As it stands in a command line of ssh."""
        return f"-p {self.port} {self.destination}" if self.port else self.destination


def ssh_target(text: str) -> SshTarget:
    """Read ``host``, ``user@host`` or ``user@host:port``.

    Raises:
        OptionsError: It is none of these.
    """
    found = re.fullmatch(
        r"(?P<destination>(?:[^@\s:-][^@\s:]*@)?[^@\s:-][^@\s:]*)(?::(?P<port>\d+))?", text
    )
    if found is None or not 0 < int(found["port"] or 22) < 65536:
        raise OptionsError(f"{text!r} is no host: it takes host, user@host or user@host:port.")
    return SshTarget(found["destination"], int(found["port"]) if found["port"] else None)


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Which hosts, and how a process is started on each.

    Attributes:
        launcher: One of ``HOST_LAUNCHERS``.
        hosts: For ssh and ``command``, in the order of their ranks.
        nodes: For the others: how many hosts.
        options: What the launcher takes: for schedulers, options of ``sbatch``, ``qsub`` or
            ``bsub``, or lines of a submit description; for ssh those of ``ssh -o``, and its
            ``config``; for MPI ``command`` and ``args``.
        command: For ``command``: what starts the agents, with ``{agent}`` for an agent's command
            line. It is run once for each of ``hosts``, whose name is ``{host}``, or once for all of
            ``nodes``. With ``{keys}``, the path of the file with the keys, agents read them from
            their standard input.
        folder: A folder that all hosts share, where the launcher needs one.
        python: The Python of the other hosts. Default: the path of the one here.
        addresses: At which agents reach this process. Default: those of all interfaces.
        timeout: Seconds that agents have to come, once they run.
    """

    launcher: str
    hosts: tuple[str, ...] = ()
    nodes: int = 0
    options: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    folder: str = DEFAULT_FOLDER
    python: str = ""
    addresses: tuple[str, ...] = ()
    timeout: float = START_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.launcher not in HOST_LAUNCHERS:
            known = ", ".join(HOST_LAUNCHERS)
            raise OptionsError(f"launcher={self.launcher!r} is none of {known}.")
        if self.launcher == "ssh" and not self.hosts:
            raise OptionsError("launcher='ssh' needs hosts=: hosts=['gpu1', 'user@gpu2:2222'].")
        if self.hosts:
            self._check_hosts()
        elif self.nodes < 1 and not self.in_allocation:
            raise OptionsError(f"launcher={self.launcher!r} needs the number of hosts: nodes=2.")
        if (self.launcher == "command") != bool(self.command):
            raise OptionsError("launcher='command' and command='srun -N2 {agent}' need each other.")
        if self.command and "{agent}" not in self.command:
            raise OptionsError(
                f"command={self.command!r} has no {{agent}}, which stands for what is to be "
                "started on each host."
            )
        takes = OPTIONS_OF.get(self.launcher, self.options)
        unknown = [name for name in self.options if name not in takes]
        if unknown:
            listed = " and ".join(takes or ["none: what it needs stands in command="])
            raise OptionsError(
                f"launcher={self.launcher!r} has no option {unknown[0]!r}; it takes {listed}."
            )
        for placeholder in re.findall(r"\{\w*\}", self.command):
            if placeholder not in PLACEHOLDERS:
                known = ", ".join(PLACEHOLDERS)
                raise OptionsError(f"command= has {placeholder}; it knows {known}.")
        if "{host}" in self.command and not self.hosts:
            raise OptionsError("command= has {host}, so it needs hosts=: hosts=['pod-0', 'pod-1'].")

    def _check_hosts(self) -> None:
        if self.launcher not in ("ssh", "command"):
            raise OptionsError(
                f"hosts= are for launcher='ssh' and 'command'; {self.launcher} chooses its own: "
                "give nodes=."
            )
        if self.nodes not in (0, len(self.hosts)):
            raise OptionsError(f"nodes={self.nodes}, but {len(self.hosts)} hosts are named.")
        for host in self.hosts:
            if self.launcher == "ssh":
                ssh_target(host)
            if self.hosts.count(host) > 1:
                raise OptionsError(f"the host {host} is named {self.hosts.count(host)} times.")

    def with_another(self, name: str, instead: str) -> HostPlan:
        """The same with one host in the place of another one.

        Raises:
            OptionsError: The launcher chooses the hosts itself, or there can be none of this name.
        """
        if not self.hosts:
            raise OptionsError(
                f"launcher={self.launcher!r} chooses the hosts itself: name those that are to be "
                "replaced, as restart(hosts=['gpu2'])."
            )
        hosts = tuple(name if host == instead else host for host in self.hosts)
        return replace(self, hosts=hosts)

    @property
    def starts_hosts_alone(self) -> bool:
        """Whether the agent of one host can be started in the place of one that has ended."""
        return bool(self.hosts)

    @property
    def in_allocation(self) -> bool:
        """Whether this process runs in a job of Slurm's, in which agents are started as a step."""
        return self.launcher == "slurm" and "SLURM_JOB_ID" in os.environ

    @property
    def count(self) -> int:
        """How many hosts."""
        if self.hosts:
            return len(self.hosts)
        if self.in_allocation and not self.nodes:
            return int(os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", "1")))
        return self.nodes
