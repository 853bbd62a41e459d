"""What is said at the start of GPUs that other processes fill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsession.cluster.gpu_notes import full_gpus
from distsession.protocol.agent_messages import GpuHolder, GpuMemory
from distsession.ranks import DeviceInfo, RankInfo

GIB = 2**30
ALICE = GpuHolder(4711, "alice", 78 * GIB)
FULL = GpuMemory(0, "GPU-a", "NVIDIA H100", int(1.2 * GIB), 80 * GIB, (ALICE,))
FREE = GpuMemory(1, "GPU-b", "NVIDIA H100", 79 * GIB, 80 * GIB)


def rank(number: int, uuid: str, node: int = 0) -> RankInfo:
    device = DeviceInfo("cuda:0", "NVIDIA H100", 80 * GIB, uuid=uuid)
    return RankInfo(number, number, 2, 2, node, 1, "alpha", 100 + number, "nccl", device)


def test_who_fills_a_gpu_is_said() -> None:
    [text] = full_gpus({0: [FULL, FREE]}, [rank(0, "GPU-a"), rank(1, "GPU-b")])
    assert text == (
        "GPU 0 (NVIDIA H100) of rank 0 has 1.2 of 80 GiB free: pid 4711 of alice holds 78 GiB."
    )


def test_a_gpu_without_ranks_does_not_matter() -> None:
    assert full_gpus({0: [FULL, FREE]}, [rank(0, "GPU-b"), rank(1, "GPU-b")]) == ()
    assert full_gpus({0: [FULL]}, [rank(0, "GPU-a", node=1)]) == ()


def test_where_no_rank_came_up_each_full_gpu_is_named_once() -> None:
    [text] = full_gpus({0: [FULL, FREE], 1: [FULL, FREE]}, [])
    assert text.startswith("GPU 0 (NVIDIA H100) has 1.2 of 80 GiB free: ")


def test_what_the_ranks_hold_themselves_does_not_count() -> None:
    own = replace(FULL, holders=(GpuHolder(100, "bob", 78 * GIB),))
    assert full_gpus({0: [own]}, [rank(0, "GPU-a")], {0: {100}}) == ()
    # On another host, a process of that number is somebody else's.
    assert full_gpus({0: [own]}, [rank(0, "GPU-a")], {1: {100}}) != ()
    both = replace(FULL, holders=(ALICE, GpuHolder(100, "bob", GIB)))
    [text] = full_gpus({0: [both]}, [rank(0, "GPU-a")], {0: {100}})
    assert text.endswith("has 2.2 of 80 GiB free: pid 4711 of alice holds 78 GiB.")


def test_the_largest_of_many_are_named() -> None:
    many = tuple(GpuHolder(pid, "", pid * GIB) for pid in (5, 30, 9, 20, 1))
    [text] = full_gpus({0: [replace(FULL, holders=many)]}, [rank(0, "GPU-a")])
    assert "pid 30 holds 30 GiB, pid 20 holds 20 GiB, pid 9 holds 9.0 GiB, 2 more hold" in text


@pytest.mark.parametrize(
    ("holders", "said"),
    [
        ((), "the driver names no process that holds the rest."),
        ((GpuHolder(9, "eve", -1),), "pid 9 of eve holds some of it."),
    ],
)
def test_what_the_driver_does_not_tell_is_not_made_up(
    holders: tuple[GpuHolder, ...], said: str
) -> None:
    [text] = full_gpus({0: [replace(FULL, holders=holders)]}, [rank(0, "GPU-a")])
    assert text.endswith(said)


def test_a_slice_is_named_as_such() -> None:
    part = replace(FULL, uuid="MIG-a")
    [text] = full_gpus({0: [part]}, [rank(0, "MIG-a"), rank(1, "MIG-a")])
    assert text.startswith("Slice MIG-a of GPU 0 (NVIDIA H100) of ranks 0-1 has 1.2 of 80 GiB")
