"""What ranks use of their host and their GPUs, as the agent reads it.

Processor time and memory stand in /proc. GPUs are asked by NVML, which creates no CUDA context; it
is loaded in a process that the agent forks for it when it is first asked. So ranks that are forked
later inherit nothing of it, and a driver that does not answer blocks nobody else.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Container, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from distsession.engine.process import die_with_parent
from distsession.protocol.messages import RankUsage, UsageReply, UsageRequest

__all__ = ["GpuReader", "gpu_uuid", "process_usage", "read", "serve"]

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
            link.send(read(message, pids, gpus))


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
            uuid = self._call("nvmlDeviceGetUUID", handle)
            if uuid is not None:
                self._handles[uuid.decode() if isinstance(uuid, bytes) else uuid] = handle

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
        for number in range(self._call("nvmlDeviceGetCount") or 0):
            handle = self._call("nvmlDeviceGetHandleByIndex", number)
            if handle is None:
                continue
            yield handle
            mode = self._call("nvmlDeviceGetMigMode", handle)
            if mode and mode[0]:
                for part in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
                    inside = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, part)
                    if inside is not None:
                        yield inside

    def _call(self, name: str, *args: Any) -> Any:
        """What a function of NVML gives; None where it does not, or this NVML has none such."""
        try:
            return getattr(self._nvml, name)(*args)
        except Exception:
            return None
