"""The command line: ``distsession doctor`` and ``distsession run``."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distsession.display import render
from distsession.errors import DOCTOR_REMEDY, DistsessionError
from distsession.options import add_arguments
from distsession.protocol import shared_memory
from distsession.ranks import RankInfo
from distsession.scripts.run import add_run_arguments, run

__all__ = ["main"]

PACKAGES = (
    "torch",
    "ipyparallel",
    "ipykernel",
    "ipython",
    "ipywidgets",
    "pyzmq",
    "cloudpickle",
)
SHM_ENOUGH = 1 << 30
FILES_ENOUGH = 1024
PROCESSES_ENOUGH = 512


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        mend: What to do about it; empty where nothing is wrong.
        fatal: A session cannot run like this.
    """

    what: str
    value: str
    mend: str = ""
    fatal: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    parser = argparse.ArgumentParser(prog="distsession", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=_version("distsession"))
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser(
        "doctor", help="say what this machine has, what would go wrong, and the mend"
    )
    add_arguments(doctor)
    runner = commands.add_parser("run", help="run a script on ranks of this machine")
    add_run_arguments(runner)
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    command = given.pop("command", None)
    if command is None:
        parser.print_help()
        return 0
    if command == "doctor":
        return _doctor(given)
    script, rest, plain = (given.pop(name) for name in ("script", "arguments", "plain"))
    return run(script, rest, given, plain=plain)


def _doctor(options: dict[str, object]) -> int:
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        _memory,
        _shared_memory,
        _limits,
        _interfaces,
        _folder,
        lambda: _trial(options),
    ]
    findings = []
    for check in checks:
        for finding in check():
            findings.append(finding)
            mark = "FAIL" if finding.fatal else "warn" if finding.mend else "ok"
            print(f"{mark:>4}  {finding.what:<22} {finding.value}", flush=True)
            if finding.mend:
                print(f"{'':30}-> {finding.mend}", flush=True)
    fatal = sum(finding.fatal for finding in findings)
    mends = sum(bool(finding.mend) and not finding.fatal for finding in findings)
    print(f"\n{fatal} that stop a session, {mends} that may limit one.")
    return 1 if fatal else 0


def _versions() -> Iterator[Finding]:
    old = sys.version_info < (3, 11)
    yield Finding("python", platform.python_version(), "use Python 3.11 or newer" * old, fatal=old)
    yield Finding("distsession", _version("distsession"))
    for package in PACKAGES:
        try:
            yield Finding(package, _version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "not installed", f"pip install {package}", fatal=True)
    if sys.platform != "linux":
        yield Finding(
            "system", platform.system(), "ranks are forked, which is tested on Linux only"
        )


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _memory() -> Iterator[Finding]:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        yield Finding("/dev/shm", "missing", "mount a tmpfs there; DataLoader workers need it")
        return
    size, free = facts.f_frsize * facts.f_blocks, facts.f_frsize * facts.f_bavail
    mend = ""
    if size < SHM_ENOUGH:
        mend = "DataLoader workers and NCCL need more: docker run --shm-size=8g (or --ipc=host)"
    elif free < SHM_ENOUGH // 10:
        mend = "it is full: remove what other programs have left in it (ls -l /dev/shm)"
    yield Finding("/dev/shm", f"{free / 2**20:,.0f} of {size / 2**20:,.0f} MiB free", mend)


def _shared_memory() -> Iterator[Finding]:
    data = bytes(shared_memory.THRESHOLD)
    try:
        with shared_memory.Segment([len(data)]) as made:
            made.write([data])
            arrived = bytes(shared_memory.map_private(made.descriptor, made.sizes)[0]) == data
    except (OSError, AttributeError) as error:
        yield Finding(
            "shared memory",
            f"cannot be had: {error}",
            "tensors go through sockets, which is slower; memfd_create(2) must be allowed (in a "
            "container: by its seccomp profile)",
        )
        return
    mend = "" if arrived else "what was read is not what was written: use another kernel"
    room = shared_memory.available_memory() / 2**30
    yield Finding("shared memory", f"{room:.1f} GiB free", mend, fatal=not arrived)


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < FILES_ENOUGH
    yield Finding("open files", _limit(files), "ulimit -n 4096" * few)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = 0 <= processes < PROCESSES_ENOUGH
    yield Finding("processes and threads", _limit(processes), "ulimit -u 4096" * few)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _interfaces() -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    has_loopback = bool({"lo", "lo0"} & set(names))
    mend = "" if has_loopback else "bring up the loopback interface: ip link set lo up"
    yield Finding("network interfaces", ", ".join(names) or "none", mend, fatal=not has_loopback)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        if value is not None:
            wrong = value not in names and not value.startswith(("^", "="))
            yield Finding(variable, value, f"no such interface: unset {variable}" * wrong)


def _folder() -> Iterator[Finding]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    mend = "the ranks' logs go here: free some space, or set TMPDIR" if free < 1 << 28 else ""
    yield Finding("temporary files", f"{folder}, {free / 2**30:.1f} GiB free", mend)


"""Advice that is of no use to who is asking the doctor."""


def _trial(options: dict[str, object]) -> Iterator[Finding]:
    """Start a session as the user would, and run something on it."""
    from distsession.session import Session

    began = time.perf_counter()
    try:
        with Session(**options) as session:  # type: ignore[arg-type]
            yield from _ranks(session.infos)
            started = time.perf_counter() - began
            session.execute("dist.barrier()", timeout=60)
            total = session.evaluate("(lambda t: (dist.all_reduce(t), t.item())[1])"
                                     "(torch.ones((), device=device))")  # fmt: skip
            right = all(value == len(session.ranks) for value in total.values())
            mend = "" if right else f"an all_reduce of ones gave {dict(total)}"
            yield Finding("all_reduce", f"{'right' if right else 'wrong'}, start {started:.1f} s",
                          mend, fatal=not right)  # fmt: skip
    except DistsessionError as error:
        if error.remedy == DOCTOR_REMEDY:
            error.remedy = ""
        yield Finding("trial session", "failed", str(error), fatal=True)


def _ranks(infos: Sequence[RankInfo]) -> Iterator[Finding]:
    yield Finding("backend", infos[0].backend)
    if infos[0].nodes > 1:
        each = infos[0].local_world_size
        yield Finding("nodes", f"{infos[0].nodes}, {each} rank{'s' * (each > 1)} on each")
    for rank, *device in render.device_rows(infos):
        yield Finding(f"rank {rank}", " ".join(device))
