"""Slurm on one machine: munged, slurmctld and two slurmd, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.host_lab import ENDS_WITH_TESTS, PATH, make_folder, need, remove_stale, run
from tests.until import until

__all__ = ["SlurmLab", "slurm_lab"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "squeue", "scancel")
NODES = ("n1", "n2")

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=2
MinJobAge=60
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={hostname} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={hostname} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""

CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\n"


@dataclass(frozen=True)
class SlurmLab:
    """It.

    Attributes:
        folder: What all of it sees.
        private: A folder that n2 does not share.
    """

    folder: Path
    private: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def queue(self) -> str:
        """The jobs that have not ended."""
        return subprocess.run(
            ["squeue", "--noheader"], env={**os.environ, **self.environment}, capture_output=True,
            text=True, check=True,
        ).stdout.strip()  # fmt: skip


@contextlib.contextmanager
def slurm_lab() -> Iterator[SlurmLab]:
    """Start it; in the end nothing is left of it."""
    need(*PROGRAMS, "unshare", "setpriv", "ip")
    remove_stale()
    folder = make_folder()
    folder.chmod(0o755)  # munge asks for it
    lab = SlurmLab(folder, folder / "private")
    started: list[subprocess.Popen[bytes]] = []
    try:
        _configure(lab)
        for command in _commands(lab):
            if command[0] == "slurmctld":
                until(lambda: _can_sign(lab), "munged")
            log = open(folder / f"{len(started)}.log", "wb")
            process = subprocess.Popen(
                [*ENDS_WITH_TESTS, *command], env={**os.environ, **lab.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            started.append(process)
        until(lambda: _idle(lab) == len(NODES), "the nodes of Slurm")
        yield lab
    finally:
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in _left(folder):  # what starts the steps of a job, and sees to their end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not _left(folder), "the end of Slurm")
        shutil.rmtree(folder)


def _configure(lab: SlurmLab) -> None:
    for name in ("state", "private", *(f"spool-{node}" for node in NODES)):
        (lab.folder / name).mkdir()
    key = lab.folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in held]
    hostname = run("hostname", "-s").strip()
    text = CONFIGURATION.format(folder=lab.folder, hostname=hostname, ports=ports)
    (lab.folder / "slurm.conf").write_text(text)
    (lab.folder / "cgroup.conf").write_text(CGROUPS)


def _commands(lab: SlurmLab) -> Iterator[list[str]]:
    f = lab.folder
    yield [
        "munged", "--foreground", "--force", f"--key-file={f}/munge.key",
        f"--socket={f}/munge.socket", f"--pid-file={f}/munged.pid",
        f"--log-file={f}/munged.log", f"--seed-file={f}/munge.seed",
    ]  # fmt: skip
    yield ["slurmctld", "-D", "-c", "-f", f"{f}/slurm.conf"]
    yield ["slurmd", "-D", "-N", "n1", "-f", f"{f}/slurm.conf"]
    script = f"mount -t tmpfs tmpfs {lab.private} && exec slurmd -D -N n2 -f {f}/slurm.conf"
    yield ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]


def _can_sign(lab: SlurmLab) -> bool:
    socket_path = f"--socket={lab.folder}/munge.socket"
    done = subprocess.run(["munge", socket_path, "-n"], capture_output=True, check=False)
    return done.returncode == 0


def _idle(lab: SlurmLab) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--states=idle", "-o", "%D"], check=False, text=True,
        env={**os.environ, **lab.environment}, capture_output=True,
    )  # fmt: skip
    return sum(int(line) for line in done.stdout.split() if line.isdigit())


def _left(folder: Path) -> list[int]:
    """Processes that were started from this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_bytes()
            name = (path / "comm").read_text()
            if f"SLURM_CONF={folder}/".encode() in environment and name.startswith("slurm"):
                found.append(int(path.name))
    return found
