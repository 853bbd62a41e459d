"""Facts about a host and a device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import platform
import re
import socket
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from distsession.devices import is_nccl
from distsession.distributed.accelerator import nccl_names
from distsession.engine.process import die_with_parent
from distsession.engine.usage import GpuReader, gpu_uuid, visible_gpus
from distsession.ranks import DeviceInfo, GpuSlice, HostInfo

__all__ = [
    "OLDEST_TORCH",
    "device_info",
    "fork_problem",
    "host_info",
    "nccl_version",
    "torch_problem",
    "torch_release",
]

OLDEST_TORCH = (2, 8)
"""What ``pyproject.toml`` asks for. With older ones the store does not serve on the socket that it
is handed, and ranks would wait for it until the start is given up."""


def host_info(identify: bool = False) -> HostInfo:
    """What this host offers, without creating a CUDA context.

    Args:
        identify: Ask CUDA for the UUIDs of its GPUs, too, which takes it a moment.
    """
    backends = _backends()
    modules = _accelerator_modules(backends)
    return HostInfo(
        host=socket.gethostname(),
        pid=os.getpid(),
        backends=backends,
        torch_version=str(torch.__version__),
        cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        nccl=nccl_version(),
        **_ask_drivers(modules, identify),
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
    for kind, module in _accelerator_modules(_backends()).items():
        if getattr(module, "is_initialized", bool)():
            return f"torch.{kind} is initialised already"
    others = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    if others:
        return f"threads are running ({', '.join(others)})"
    return ""


def _ask_drivers(modules: dict[str, Any], identify: bool) -> dict[str, Any]:
    """Ask in a child: where NVML is missing, torch asks CUDA itself, which spoils any fork."""
    if not torch.backends.cuda.is_built() and not modules:
        return {"gpus": ()}
    reader, writer = os.pipe()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(agent)  # a driver that does not answer would keep it
            counts = {kind: _count(module) for kind, module in modules.items()}
            found = {"accelerators": tuple((kind, n) for kind, n in counts.items() if n)}
            with open(writer, "wb") as pipe:
                pipe.write(pickle.dumps(found | _gpu_facts(identify)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    facts: dict[str, Any] = pickle.loads(answer) if answer else {"gpus": ()}
    return facts


def _count(module: Any) -> int:
    with contextlib.suppress(Exception):  # its driver is not there, or does not work
        return int(module.device_count())
    return 0


def _gpu_facts(identify: bool) -> dict[str, Any]:
    """What is known of the GPUs, as fields of a ``HostInfo``; this process is spoilt by it."""
    count = torch.cuda.device_count() if torch.backends.cuda.is_built() else 0
    if not count:
        return {"gpus": ()}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = visible_gpus(GpuReader().listing(), visible)
    divided = tuple(number for number, gpu in enumerate(listed) if gpu.is_divided)
    uuids: tuple[str, ...] = ()
    if divided:  # CUDA shows but one slice then, and none of the other GPUs
        count, uuids = len(listed), tuple(gpu.uuid for gpu in listed)
    elif identify:
        # From CUDA itself: its order need not be that of NVML (CUDA_DEVICE_ORDER).
        with contextlib.suppress(Exception):  # it does not work; the ranks will say how
            told = [torch.cuda.get_device_properties(number) for number in range(count)]
            uuids = tuple(
                gpu_uuid(number, visible or "", str(getattr(properties, "uuid", "")))
                for number, properties in enumerate(told)
            )
    return {
        "gpus": tuple(f"cuda:{number}" for number in range(count)),
        "gpu_uuids": uuids,
        "divided": divided,
        "slices": tuple(
            GpuSlice(uuid, number) for number in divided for uuid in listed[number].slices
        ),
    }


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that torch has loaded; empty without one.

    torch itself says which one it was compiled with, and takes a newer one that is installed in its
    place. Only where torch contains NCCL, the two cannot differ.
    """
    if not dist.is_nccl_available():
        return ()
    code = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
        if loaded.ncclGetVersion(ctypes.byref(code)) == 0:
            return code.value // 10_000, code.value // 100 % 100, code.value % 100
    with contextlib.suppress(Exception):
        from torch.cuda import nccl

        return tuple(part for part in nccl.version() if isinstance(part, int))
    return ()


def _accelerator_modules(backends: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, Any]:
    """The modules of torch for types of device, beside CPU and CUDA, that a backend serves."""
    kinds = {kind for _, served in backends for kind in served} - {"cpu", "cuda"}
    modules = {}
    for kind in sorted(kinds):
        with contextlib.suppress(Exception):  # torch does not know the type, or has no module
            module: Any = torch.get_device_module(kind)
            if hasattr(module, "device_count") and getattr(module, "_is_compiled", lambda: True)():
                modules[kind] = module
    return modules


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
        if is_nccl(name) or built.get(name, lambda: True)()
    }
    # torch registers a class of NCCL's when its name is first used.
    names |= {name: names["nccl"] for name in nccl_names() if "nccl" in names}
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
    if device.type != "cpu":
        name, memory = _accelerator_facts(device)
        return DeviceInfo(str(device), name, memory, torch.get_num_threads())
    return DeviceInfo(
        device=str(device),
        name=_cpu_name(),
        memory_bytes=_host_memory(),
        threads=torch.get_num_threads(),
    )


def _accelerator_facts(device: torch.device) -> tuple[str, int]:
    """The model of a device, and the bytes of its memory; what its module does not tell is not."""
    module: Any = torch.get_device_module(device)
    name, memory = "", 0
    with contextlib.suppress(Exception):
        properties = module.get_device_properties(device)
        name = str(getattr(properties, "name", ""))
        memory = int(getattr(properties, "total_memory", 0))
    with contextlib.suppress(Exception):
        name = name or str(module.get_device_name(device))
    with contextlib.suppress(Exception):
        memory = memory or int(module.mem_get_info(device)[1])
    return name or device.type, memory


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
