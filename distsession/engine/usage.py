"""What ranks use of their host and their GPUs, as the agent reads it.

Processor time and memory stand in /proc. GPUs are asked by NVML, which creates no CUDA context; it
is loaded in a process that the agent forks for it when it is first asked. So ranks that are forked
later inherit nothing of it, and a driver that does not answer blocks nobody else.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pwd
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from distsession.engine.process import die_with_parent
from distsession.protocol.agent_messages import (
    GpuHolder,
    GpuMemory,
    GpuReply,
    GpuRequest,
    RankUsage,
    UsageReply,
    UsageRequest,
)

__all__ = [
    "GpuReader",
    "ListedGpu",
    "gpu_uuid",
    "process_usage",
    "read",
    "serve",
    "visible_gpus",
]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def process_usage(pid: int) -> tuple[float, int]:
    """Seconds of processor time that a process has used, and bytes of memory that it holds.

    Raises:
        OSError: There is no such process, or no /proc.
    """
    with open(f"/proc/{pid}/stat") as stat:
        # Behind the name, which is in parentheses and may hold anything: state is the first.
        fields = stat.read().rpartition(")")[2].split()
    with open(f"/proc/{pid}/statm") as statm:
        resident = int(statm.read().split()[1])
    return (int(fields[11]) + int(fields[12])) / _TICKS, resident * _PAGE


def read(
    message: UsageRequest, pids: Mapping[int, int], gpus: GpuReader | None = None
) -> UsageReply:
    """What ranks use now; those that have ended meanwhile are left out.

    Args:
        message: The question.
        pids: Of the ranks.
        gpus: Asks about GPUs; without it they are not known.
    """
    uses = []
    for rank, pid in sorted(pids.items()):
        with contextlib.suppress(OSError):
            cpu_seconds, rss = process_usage(pid)
            uuid = message.gpus.get(rank)
            known = gpus.usage(uuid) if gpus is not None and uuid else {}
            uses.append(RankUsage(rank, pid, time.monotonic(), cpu_seconds, rss, **known))
    return UsageReply(message.number, tuple(uses), message.node)


def serve(link: Connection, agent: int) -> None:
    """Answer the agent's questions until it ends; the whole life of the process beside it."""
    die_with_parent(agent)
    gpus = GpuReader()
    with contextlib.suppress(EOFError, OSError):
        while True:
            message, pids = link.recv()
            if isinstance(message, GpuRequest):
                link.send(GpuReply(message.node, gpus.memory()))
            else:
                link.send(read(message, pids, gpus))


def _user_of(pid: int) -> str:
    """Whose a process is; empty if there is none such here."""
    try:
        number = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


# --- GPUs -----------------------------------------------------------------------------------------


def gpu_uuid(index: int, visible: str, uuid: str) -> str:
    """By which UUID NVML knows a GPU of torch's.

    Args:
        index: torch's number of it, which counts what ``CUDA_VISIBLE_DEVICES`` shows.
        visible: The value of that variable.
        uuid: The UUID that CUDA tells; for a part of a GPU (MIG) it may be that of the whole.
    """
    names = [name.strip() for name in visible.split(",")]
    if index < len(names) and names[index].startswith("MIG-"):
        return names[index]
    if not uuid or uuid.startswith(("GPU-", "MIG-")):
        return uuid
    return f"GPU-{uuid}"


@dataclass(frozen=True)
class ListedGpu:
    """A GPU as NVML lists it.

    Attributes:
        uuid: ``"GPU-..."``.
        is_divided: It is to be used in slices only (MIG).
        slices: UUIDs of these, ``"MIG-..."``.
    """

    uuid: str
    is_divided: bool = False
    slices: tuple[str, ...] = ()


def visible_gpus(listed: Sequence[ListedGpu], visible: str | None) -> list[ListedGpu]:
    """The GPUs that a process may see, with those of their slices that it may see.

    Args:
        listed: All of them.
        visible: The value of ``CUDA_VISIBLE_DEVICES``; None where it is not set.
    """
    if visible is None:
        return list(listed)
    found: dict[str, ListedGpu] = {}
    for entry in (part.strip() for part in visible.split(",")):
        gpu = _visible_gpu(listed, entry)
        if gpu is None:  # CUDA, too, goes no further
            break
        known = found.get(gpu.uuid)
        slices = (*known.slices, *gpu.slices) if known else gpu.slices
        found[gpu.uuid] = replace(gpu, slices=tuple(dict.fromkeys(slices)))
    return list(found.values())


def _visible_gpu(listed: Sequence[ListedGpu], entry: str) -> ListedGpu | None:
    """The GPU that one entry shows; of the slices only the one that it names, if it does."""
    if entry.isdecimal():
        return listed[int(entry)] if int(entry) < len(listed) else None
    for gpu in listed if entry else ():
        if gpu.uuid.lower().startswith(entry.lower()):
            return gpu
        for uuid in gpu.slices:
            if uuid.lower().startswith(entry.lower()):
                return replace(gpu, slices=(uuid,))
    return None


class GpuReader:
    """Asks NVML about GPUs by their UUIDs; where there is no NVML, nothing is known.

    Args:
        nvml: The module that has NVML's functions. Default: pynvml, of nvidia-ml-py.
    """

    def __init__(self, nvml: Any = None):
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        try:
            found = nvml or importlib.import_module("pynvml")
            found.nvmlInit()
        except Exception:  # no module, no library, no driver, or one that does not fit it
            return
        self._nvml = found
        for handle in self._devices():
            if uuid := self._text("nvmlDeviceGetUUID", handle):
                self._handles[uuid] = handle

    def listing(self) -> list[ListedGpu]:
        """All GPUs, in the order of nvidia-smi's numbers."""
        return [
            ListedGpu(
                self._text("nvmlDeviceGetUUID", handle),
                self._is_divided(handle),
                tuple(self._text("nvmlDeviceGetUUID", part) for part in self._parts(handle)),
            )
            for handle in self._gpus()
        ]

    def memory(self) -> tuple[GpuMemory, ...]:
        """Of all GPUs, and of their slices, how much is free and who holds the rest."""
        return tuple(
            found
            for number, handle in enumerate(self._gpus())
            for part in (handle, *self._parts(handle))
            if (found := self._memory(number, handle, part)) is not None
        )

    def _memory(self, number: int, gpu: Any, handle: Any) -> GpuMemory | None:
        known = self._call("nvmlDeviceGetMemoryInfo", handle)
        if known is None:
            return None
        held: dict[int, int] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            for process in self._call(f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
                amount = process.usedGpuMemory  # None where the driver does not tell
                held[process.pid] = max(held.get(process.pid, -1), -1 if amount is None else amount)
        return GpuMemory(
            number,
            self._text("nvmlDeviceGetUUID", handle),
            self._text("nvmlDeviceGetName", gpu),
            int(known.free),
            int(known.total),
            tuple(GpuHolder(pid, _user_of(pid), nbytes) for pid, nbytes in held.items()),
        )

    def usage(self, uuid: str) -> dict[str, int]:
        """What is used of a GPU, as fields of a ``RankUsage``; without what is not known."""
        handle = self._handles.get(uuid)
        if handle is None:
            return {}
        known: dict[str, int] = {}
        memory = self._call("nvmlDeviceGetMemoryInfo", handle)
        if memory is not None:
            known |= {"gpu_memory": int(memory.used), "gpu_total": int(memory.total)}
        rates = self._call("nvmlDeviceGetUtilizationRates", handle)  # parts of a GPU have none
        if rates is not None:
            known["gpu_percent"] = int(rates.gpu)
        return known

    def memory_of(self, pids: Container[int]) -> int | None:
        """Bytes of the memory of all GPUs that some processes hold together.

        Returns:
            None where NVML does not know any of them. In a container it may know them by other
            pids, those of the host.
        """
        amounts = [
            int(process.usedGpuMemory or 0)  # None where the driver does not tell
            for handle in self._handles.values()
            for process in self._call("nvmlDeviceGetComputeRunningProcesses", handle) or ()
            if process.pid in pids
        ]
        return sum(amounts) if amounts else None

    def _devices(self) -> Iterator[Any]:
        """The GPUs, each followed by its parts if it is divided."""
        for handle in self._gpus():
            yield handle
            yield from self._parts(handle)

    def _gpus(self) -> Iterator[Any]:
        for number in range(self._call("nvmlDeviceGetCount") or 0):
            handle = self._call("nvmlDeviceGetHandleByIndex", number)
            if handle is not None:
                yield handle

    def _parts(self, handle: Any) -> Iterator[Any]:
        if self._is_divided(handle):
            for part in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
                inside = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, part)
                if inside is not None:
                    yield inside

    def _is_divided(self, handle: Any) -> bool:
        mode = self._call("nvmlDeviceGetMigMode", handle)  # now, and after the next restart
        return bool(mode and mode[0])

    def _text(self, name: str, handle: Any) -> str:
        value = self._call(name, handle)
        return value.decode() if isinstance(value, bytes) else str(value or "")

    def _call(self, name: str, *args: Any) -> Any:
        """What a function of NVML gives; None where it does not, or this NVML has none such."""
        try:
            return getattr(self._nvml, name)(*args)
        except Exception:
            return None
