"""What a session needs of the machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator

from distsession.cli.finding import Finding
from distsession.protocol import places, shared_memory

__all__ = ["CHECKS"]

SHM_ENOUGH = 1 << 30
FILES_ENOUGH = 1024
PROCESSES_ENOUGH = 512


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
    passed_over = places.refused()
    folder = next((place for place in places.places() if place not in passed_over), "")
    if not folder:
        why = "; ".join(passed_over.values())
        mend = "set TMPDIR to a short path that you alone can write to"
        yield Finding("temporary files", why, mend, fatal=True)
        return
    free = shutil.disk_usage(folder).free
    mend = "the ranks' logs go here: free some space, or set TMPDIR" if free < 1 << 28 else ""
    yield Finding("temporary files", f"{folder}, {free / 2**30:.1f} GiB free", mend)
    for why in passed_over.values():
        mend = "set TMPDIR to one that you alone can write to"
        yield Finding("a place passed over", why, mend)


CHECKS = (_memory, _shared_memory, _limits, _interfaces, _folder)
