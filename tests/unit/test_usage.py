"""What a process uses, and which of NVML's GPUs is a rank's."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from distsession.engine import host_info
from distsession.engine.usage import (
    GpuReader,
    ListedGpu,
    gpu_uuid,
    process_usage,
    read,
    visible_gpus,
)
from distsession.protocol.agent_messages import GpuHolder, UsageRequest
from distsession.ranks import GpuSlice

GIB = 2**30
SPIN = """
import sys, time
held = bytearray(b"x" * (64 << 20))
while time.process_time() < 0.5:
    pass
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy():
    """A process that has used half a second and holds 64 MiB."""
    with subprocess.Popen(
        [sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate()


def test_time_and_memory_are_those_of_the_process(busy: subprocess.Popen[str]) -> None:
    seconds, resident = process_usage(busy.pid)
    known = psutil.Process(busy.pid)
    assert 0.4 < seconds < 5
    assert resident > 64 << 20
    assert abs(resident - known.memory_info().rss) < 8 << 20


def test_a_process_that_has_ended_is_left_out(busy: subprocess.Popen[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    gauges = read(UsageRequest(7, {}), {1: ended.pid, 0: busy.pid})
    assert gauges.number == 7
    assert [use.rank for use in gauges.uses] == [0]
    assert (gauges.uses[0].gpu_memory, gauges.uses[0].gpu_percent) == (-1, -1)


# --- GPUs: NVML is played here, since what matters is whom it is asked about ----------------------


@pytest.mark.parametrize(
    ("index", "visible", "told", "uuid"),
    [
        (0, "", "aa-0", "GPU-aa-0"),
        (1, "3,1", "bb-1", "GPU-bb-1"),  # CUDA has counted already
        (0, "GPU-cc", "cc-long", "GPU-cc-long"),
        (0, "", "GPU-aa-0", "GPU-aa-0"),
        (1, "MIG-x, MIG-y", "aa-0", "MIG-y"),
        (2, "MIG-x,MIG-y", "aa-0", "GPU-aa-0"),
        (0, "", "", ""),
    ],
)
def test_a_gpu_is_known_by_its_uuid(index: int, visible: str, told: str, uuid: str) -> None:
    assert gpu_uuid(index, visible, told) == uuid


@dataclass
class Nvml:
    """Two GPUs, the second in parts; handles are texts."""

    uuids: tuple[str, ...] = ("GPU-a", "GPU-b")

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.uuids[index]

    def nvmlDeviceGetUUID(self, handle: str) -> Any:
        return handle.encode() if handle == "GPU-a" else handle

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "GPU-a":
            raise RuntimeError("not supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index == 1:
            raise RuntimeError("not found")
        return "MIG-b0"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used={"GPU-a": 3, "MIG-b0": 1}[handle] * GIB, total=8 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle.startswith("MIG"):
            raise RuntimeError("not supported")
        return SimpleNamespace(gpu=97)


def test_each_rank_gets_the_numbers_of_its_own_gpu(busy: subprocess.Popen[str]) -> None:
    question = UsageRequest(1, {0: "MIG-b0", 1: "GPU-a", 2: "GPU-elsewhere"})
    pids = dict.fromkeys(range(3), busy.pid)
    part, whole, other = read(question, pids, GpuReader(Nvml())).uses
    assert (whole.gpu_memory, whole.gpu_total, whole.gpu_percent) == (3 * GIB, 8 * GIB, 97)
    assert (part.gpu_memory, part.gpu_total, part.gpu_percent) == (GIB, 8 * GIB, -1)
    assert (other.gpu_memory, other.gpu_percent) == (-1, -1)


def test_without_a_driver_nothing_is_known_of_gpus() -> None:
    class NoDriver:
        def nvmlInit(self) -> None:
            raise RuntimeError("no driver")

    assert GpuReader(NoDriver()).usage("GPU-a") == {}


def test_gpus_are_listed_with_the_slices_of_those_that_are_divided() -> None:
    assert GpuReader(Nvml()).listing() == [
        ListedGpu("GPU-a"),
        ListedGpu("GPU-b", True, ("MIG-b0",)),
    ]


LISTED = [
    ListedGpu("GPU-a1", True, ("MIG-a", "MIG-b")),
    ListedGpu("GPU-a2"),
    ListedGpu("GPU-c", True, ("MIG-c",)),
]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, LISTED),
        ("", []),
        ("2,1", [LISTED[2], LISTED[1]]),
        ("1,7,0", [LISTED[1]]),
        ("-1", []),
        ("GPU-a2, GPU-c", [LISTED[1], LISTED[2]]),
        ("gpu-A", [LISTED[0]]),
        ("MIG-b", [ListedGpu("GPU-a1", True, ("MIG-b",))]),
        ("MIG-c,MIG-b,MIG-a", [LISTED[2], ListedGpu("GPU-a1", True, ("MIG-b", "MIG-a"))]),
    ],
)
def test_a_process_may_see_what_the_variable_shows(
    visible: str | None, expected: list[ListedGpu]
) -> None:
    assert visible_gpus(LISTED, visible) == expected


# --- and so is CUDA, of which the agent's child asks ----------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs; CUDA has them in another order than NVML."""
    played = SimpleNamespace(listed=[ListedGpu("GPU-a"), ListedGpu("GPU-b")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid="ba"[number])
    )
    monkeypatch.setattr(
        host_info, "GpuReader", lambda: SimpleNamespace(listing=lambda: played.listed)
    )
    return played


def test_the_order_of_gpus_is_that_of_cuda(cuda: SimpleNamespace) -> None:
    known = host_info.host_info(identify=True)
    assert (known.gpus, known.gpu_uuids) == (("cuda:0", "cuda:1"), ("GPU-b", "GPU-a"))
    assert (known.divided, known.slices) == ((), ())
    assert host_info.host_info().gpu_uuids == ()


def test_a_driver_that_tells_no_uuids_still_has_gpus(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("no context can be made")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    known = host_info.host_info(identify=True)
    assert (len(known.gpus), known.gpu_uuids) == (2, ())


def test_of_divided_gpus_the_slices_are_known(cuda: SimpleNamespace) -> None:
    cuda.listed = LISTED
    known = host_info.host_info()
    assert known.gpus == ("cuda:0", "cuda:1", "cuda:2")
    assert known.gpu_uuids == ("GPU-a1", "GPU-a2", "GPU-c")
    assert known.divided == (0, 2)
    assert known.slices == (GpuSlice("MIG-a", 0), GpuSlice("MIG-b", 0), GpuSlice("MIG-c", 2))


# --- whose the memory of a GPU is -----------------------------------------------------------------


class BusyNvml(Nvml):
    """Who holds the memory: one process computes and draws, of one the driver tells no amount."""

    def __init__(self, pid: int):
        super().__init__()
        self.pid = pid

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "A GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle == "GPU-b":
            raise RuntimeError("not for one that is divided")
        return SimpleNamespace(free=GIB, used=7 * GIB, total=8 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        processes = [(self.pid, 2 * GIB), (NOBODY, None)]
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> Any:
        return [SimpleNamespace(pid=self.pid, usedGpuMemory=GIB)]


NOBODY = 1 << 30
"""No pid, since it is larger than any can be."""


def test_who_holds_the_memory_of_a_gpu_is_known(busy: subprocess.Popen[str]) -> None:
    whole, part = GpuReader(BusyNvml(busy.pid)).memory()
    assert (whole.number, whole.uuid, whole.free, whole.total) == (0, "GPU-a", GIB, 8 * GIB)
    assert (part.number, part.uuid, part.name) == (1, "MIG-b0", "A GPU")
    me = pwd.getpwuid(os.getuid()).pw_name
    assert whole.holders == (GpuHolder(busy.pid, me, 2 * GIB), GpuHolder(NOBODY, "", -1))
