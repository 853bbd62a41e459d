"""Ranks on devices that are no GPUs, of a type that a preloaded module brings."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distsession import LaunchError, OptionsError, Session
from distsession.cluster import local
from distsession.cluster.local import LocalLauncher
from distsession.options import SessionOptions
from distsession.protocol.agent_messages import GpuRequest
from distsession.rank_plan import RankPlan, plan_ranks
from distsession.ranks import HostInfo

TOY = {"backend": "toyccl", "preload": ["tests.toy_accelerator"]}


@pytest.fixture(scope="module")
def session():
    with Session(2, **TOY) as session:
        yield session


def test_each_rank_has_a_device_of_its_own(session: Session) -> None:
    assert [info.device.device for info in session.infos] == ["toy:0", "toy:1"]
    assert list(session.evaluate("str(device)").values()) == ["toy:0", "toy:1"]
    assert list(session.evaluate("torch.toy.current_device()").values()) == [0, 1]


def test_what_the_module_tells_of_a_device_is_known(session: Session) -> None:
    first, second = (info.device for info in session.infos)
    assert (first.name, first.memory_bytes) == ("Toy 0", 1 << 30)
    assert (second.name, second.memory_bytes) == ("Toy 1", 2 << 30)
    assert "toy:1" in str(session.devices())


def test_the_helpers_for_ranks_know_the_device(session: Session) -> None:
    told = session.evaluate("str(__import__('distsession.distributed').distributed.device())")
    assert list(told.values()) == ["toy:0", "toy:1"]


def test_a_fresh_process_gets_the_device_again(session: Session) -> None:
    session.restart([1])
    assert list(session.evaluate("torch.toy.current_device()").values()) == [0, 1]


def test_without_a_number_there_is_a_rank_for_each_device() -> None:
    with Session(**TOY) as session:
        assert session.world_size == 3


def test_devices_are_taken_in_their_order() -> None:
    with Session(**TOY, devices=[2, 0]) as session:
        assert [info.device.device for info in session.infos] == ["toy:2", "toy:0"]


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(OptionsError, match=r"type toy each, but .* shows 3 .*at most 3 ranks"):
        Session(4, **TOY)


def test_no_device_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_DEVICES", "0")
    with pytest.raises(OptionsError, match=r"needs devices of the type toy, and .* shows none"):
        Session(2, **TOY)


def test_what_a_plan_says_of_gpus_comes_to_the_ranks_and_to_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan is one for GPUs, and the ranks are on the CPU."""

    def plan(options: SessionOptions, hosts: Sequence[HostInfo]) -> RankPlan:
        found = plan_ranks(options, hosts)
        return replace(found, visible=("MIG-a", ""), is_shared=True, notes=("They share it.",))

    monkeypatch.setattr(local, "plan_ranks", plan)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.warns(RuntimeWarning, match=r"They share it\."):
        session = Session(2, backend="gloo")
    with session:
        session.execute("import os")
        seen = session.evaluate("os.environ['CUDA_VISIBLE_DEVICES']")
        assert list(seen.values()) == ["MIG-a", "7"]
        told = session.evaluate("os.environ['NCCL_MULTI_RANK_GPU_ENABLE']")
        assert list(told.values()) == ["1", "1"]


NVML = """
import os
from types import SimpleNamespace

GIB = 1 << 30
nvmlInit = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda number: number
nvmlDeviceGetUUID = lambda handle: ""
nvmlDeviceGetName = lambda handle: "A GPU"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(free=GIB, used=79 * GIB, total=80 * GIB)
nvmlDeviceGetComputeRunningProcesses = lambda handle: [
    SimpleNamespace(pid=int(os.environ["BUSY_PID"]), usedGpuMemory=78 * GIB)
]
"""


@pytest.fixture
def full_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cold_agents: None) -> None:
    """NVML is played; its GPU has the UUID that ranks on the CPU have, which is none."""

    def ask(launcher: LocalLauncher) -> None:
        launcher._agents.send(0, GpuRequest(0))
        launcher._asked_gpus = True

    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(LocalLauncher, "_ask_gpus", ask)
    monkeypatch.setenv("BUSY_PID", str(os.getpid()))


ME = re.escape(f"pid {os.getpid()} of {pwd.getpwuid(os.getuid()).pw_name} holds 78 GiB.")


def test_who_fills_a_gpu_is_said_at_the_start(full_gpu: None) -> None:
    with pytest.warns(
        RuntimeWarning, match=rf"^GPU 0 \(A GPU\) of ranks 0-1 has 1\.0 of 80 .*{ME}"
    ):
        session = Session(2, backend="gloo")
    session.close()


def test_who_fills_a_gpu_is_said_where_no_rank_could_start(
    full_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_IS_FULL", "1")
    with pytest.raises(LaunchError, match=rf"GPU 0 \(A GPU\) has 1\.0 of 80 GiB free: {ME}"):
        Session(2, **TOY)


def test_gpus_are_not_asked_about_where_none_is_used() -> None:
    with Session(2, backend="gloo") as session:
        assert session.launcher.notes == ()
        assert not session.launcher._monitor.gpus
