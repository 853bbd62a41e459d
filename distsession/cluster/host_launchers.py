"""What starts one agent on each host: the seam.

Behind it are ipyparallel's launchers, which know the schedulers, in ``host_processes``,
``host_jobs`` and ``array_jobs``. ipyparallel's controller takes no part.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from distsession.engine import log_file
from distsession.engine.process import module_command
from distsession.errors import LaunchError
from distsession.host_plan import HostPlan

__all__ = ["STOP_S", "Failure", "HostLauncher", "check_program", "read_output"]

STOP_S = 5.0
"""Seconds that processes have to end by themselves before they are told to, and then killed."""
READ_BYTES = 128 << 10
"""The most bytes of output that are read from its beginning, and as many from its end."""
OUTPUT_MAX_BYTES = 16 << 20
"""Who has written more before an agent has come is ended: it would fill the disk. Later a file that
takes more of the disk loses its middle."""


@dataclass(frozen=True)
class Failure:
    """A launcher's process, or its job, that has ended.

    Attributes:
        host: Whose; empty where it was to start all of them.
        how: ``"ssh ended with exit code 255"``.
        output: What it wrote.
    """

    host: str
    how: str
    output: str


class HostLauncher(ABC):
    """Starts an agent on each host.

    Args:
        plan: Which hosts, and how.
        folder: Of this start, private to the user. It has the keys in ``keys``.
    """

    job = ""
    """The id of the job, where the launcher has one."""
    stops_at_once = False
    """Something writes without an end, so nothing is waited for when all is stopped."""
    come: Collection[str] = ()
    """Hosts with an agent that has connected. They end by themselves when all is stopped."""

    def __init__(self, plan: HostPlan, folder: str):
        self.plan, self.folder = plan, folder
        self.tunnel = ""
        """How the paths begin of sockets on hosts that lead to ports of this one."""
        self.tunnelled: dict[str, int] = {}
        """These ports, by what they are for. ssh alone carries them."""
        self.keys = os.path.join(folder, "keys")

    def agent(self, source: str, *name: str) -> list[str]:
        """The command line of an agent."""
        return [*module_command("distsession.engine.host", self.plan.python), source, *name]

    @abstractmethod
    def start(self) -> None:
        """Start them, without waiting for them.

        Raises:
            LaunchError: It cannot be done.
        """

    @abstractmethod
    def failures(self) -> list[Failure]:
        """What has ended."""

    def ended(self) -> set[str]:
        """The hosts whose processes have ended, as far as each has one of its own."""
        return set()

    @abstractmethod
    def output_files(self) -> dict[str, str]:
        """Where the processes of each host write; under ``""`` those of all."""

    def outputs(self) -> dict[str, str]:
        """What was written by the processes of each host; of very much the begin and the end."""
        return {host: read_output(path) for host, path in self.output_files().items()}

    def floods(self) -> list[Failure]:
        """What writes so much that it is no start."""
        return [
            Failure(
                host,
                f"the started program has written more than {OUTPUT_MAX_BYTES >> 20} MiB, and no "
                "agent has come",
                read_output(path),
            )
            for host, path in self.output_files().items()
            if _size(path) > OUTPUT_MAX_BYTES
        ]

    def trim_outputs(self) -> None:
        """Give the middle of long output files back to the disk, once the agents are there."""
        for path in self.output_files().values():
            with contextlib.suppress(OSError):
                trim_output(path)

    def start_host(self, host: str) -> None:
        """Start the agent of one host anew, in the place of one that has ended."""
        raise NotImplementedError

    def seconds_left(self) -> float | None:
        """Until the time limit of the job; None without one, or where it is not known."""
        return None

    def is_waiting(self) -> bool:
        """Whether nothing runs yet, since a queue is before it."""
        return False

    def waits_for(self) -> str:
        """What is waited for, in a few words."""
        return f"{self.plan.launcher} to start {self.plan.count} agents"

    @abstractmethod
    def stop(self) -> None:
        """End what still runs, and give a job back; returns when nothing is left of it."""


_INSTALL = {
    "ssh": "Install OpenSSH's client.",
    "srun": "Load Slurm's module, or work on a host that has its commands.",
    "sbatch": "Load Slurm's module, or work on a host that submits jobs (a login node).",
    "qsub": "Work on a host that submits jobs, with the scheduler's settings loaded.",
    "bsub": "Work on a host that submits jobs, with LSF's settings loaded (profile.lsf).",
    "condor_submit": "Work on a host that submits jobs (an access point).",
    "mpiexec": "Install an MPI, or load its module.",
}


def check_program(program: str, launcher: str) -> None:
    """See whether a launcher's program is there.

    Raises:
        LaunchError: It is not.
    """
    if shutil.which(program) is None:
        raise LaunchError(
            f"the program {program} is not there, by which launcher={launcher!r} starts agents.",
            remedy=_INSTALL.get(program, f"Put {program} on the PATH."),
        )


def read_output(path: str) -> str:
    """What has been written to a file, without colours; nothing where there is none.

    Of a long file the begin and the end.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        data = file.read(READ_BYTES)
        left_out = os.fstat(file.fileno()).st_size - 2 * READ_BYTES
        if left_out > 0:
            data += f"\n... {left_out:,} bytes are left out ...\n".encode()
            file.seek(-READ_BYTES, os.SEEK_END)
        data += file.read(READ_BYTES)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode("utf-8", "replace"))
    return ""


def trim_output(path: str) -> None:
    """Give the middle of a file back to the disk where it takes more than ``OUTPUT_MAX_BYTES``.

    Raises:
        OSError: There is no such file.
    """
    status = os.stat(path)
    if 512 * status.st_blocks <= OUTPUT_MAX_BYTES:
        return
    with open(path, "r+b") as file:
        log_file.punch_hole(file.fileno(), READ_BYTES, status.st_size - OUTPUT_MAX_BYTES // 2)


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.path.getsize(path)
    return 0
