"""Facts about a host and a device."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import threading

import torch
import torch.distributed as dist

from distsession.engine.process import die_with_parent
from distsession.engine.usage import gpu_uuid
from distsession.ranks import DeviceInfo, HostInfo

__all__ = [
    "OLDEST_TORCH",
    "device_info",
    "fork_problem",
    "host_info",
    "torch_problem",
    "torch_release",
]

OLDEST_TORCH = (2, 8)
"""What ``pyproject.toml`` asks for. With older ones the store does not serve on the socket that it
is handed, and ranks would wait for it until the start is given up."""


def host_info() -> HostInfo:
    """What this host offers, without creating a CUDA context."""
    return HostInfo(
        host=socket.gethostname(),
        pid=os.getpid(),
        gpus=tuple(f"cuda:{number}" for number in range(_count_gpus())),
        backends=_backends(),
        torch_version=str(torch.__version__),
        cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
    )


def torch_release() -> tuple[int, ...]:
    """The first two numbers of torch's version."""
    return tuple(int(part) for part in re.findall(r"\d+", str(torch.__version__))[:2])


def torch_problem() -> str:
    """Why no session can run with this torch; empty if one can."""
    found = str(torch.__version__)
    if torch_release() >= OLDEST_TORCH:
        return ""
    needed = ".".join(map(str, OLDEST_TORCH))
    return (
        f"torch {found} is too old, distsession needs {needed} or newer. "
        f"Upgrade it, for this Python: {sys.executable} -m pip install 'torch>={needed}'"
    )


def fork_problem() -> str:
    """Why a child forked from this process would be broken; empty if it would not."""
    if torch.cuda.is_initialized():
        return "CUDA is initialised already"
    others = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    if others:
        return f"threads are running ({', '.join(others)})"
    return ""


def _count_gpus() -> int:
    """Count in a child: where NVML is missing, torch asks CUDA itself, which spoils any fork."""
    if not torch.backends.cuda.is_built():
        return 0
    reader, writer = os.pipe()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(agent)  # a driver that does not answer would keep it
            os.write(writer, str(torch.cuda.device_count()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return int(answer or b"0")


def _backends() -> tuple[tuple[str, tuple[str, ...]], ...]:
    built = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    # A torch without NCCL still knows the name; it stays in the list so that the error about it
    # can say what is missing (a GPU) rather than that the name is unknown.
    names = {
        name: tuple(devices)
        for name, devices in dist.Backend.backend_capability.items()
        if name == "nccl" or built.get(name, lambda: True)()
    }
    return tuple(sorted(names.items()))


def device_info(device: torch.device) -> DeviceInfo:
    """The device of this rank, asked from the rank itself."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            device=str(device),
            name=properties.name,
            memory_bytes=properties.total_memory,
            threads=torch.get_num_threads(),
            uuid=gpu_uuid(
                device.index or 0,
                os.environ.get("CUDA_VISIBLE_DEVICES", ""),
                str(getattr(properties, "uuid", "")),
            ),
        )
    return DeviceInfo(
        device=str(device),
        name=_cpu_name(),
        memory_bytes=_host_memory(),
        threads=torch.get_num_threads(),
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
