"""Fitting the options to a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsession.devices import NCCL_NAMES
from distsession.errors import OptionsError
from distsession.options import SessionOptions
from distsession.rank_plan import RankPlan, plan_ranks
from distsession.ranks import GpuSlice, HostInfo

BACKENDS = (("gloo", ("cpu", "cuda")), ("mpi", ("cpu", "cuda")), ("nccl", ("cuda",)))
CLASSES = tuple((name, ("cuda",)) for name in NCCL_NAMES[1:])
NCCL = [*NCCL_NAMES, "cpu:gloo,cuda:nccl2", "cpu:gloo,cuda:nccl-lazy"]


def host(gpus: int = 0, cpus: int = 16) -> HostInfo:
    names = tuple(f"GPU {number}" for number in range(gpus))
    return HostInfo("alpha", 1, names, BACKENDS, "2.9.0", cpus)


def newer(gpus: int = 0, **changes: object) -> HostInfo:
    """A host whose torch has a name for each of its classes for NCCL."""
    made = replace(host(gpus), backends=(*BACKENDS, *CLASSES), torch_version="2.15.0")
    return replace(made, **changes)  # type: ignore[arg-type]


def plan(gpus: int = 0, cpus: int = 16, **options: object) -> RankPlan:
    return plan_ranks(SessionOptions(**options), [host(gpus, cpus)])  # type: ignore[arg-type]


def test_two_ranks_on_the_cpu_are_the_default_without_gpus() -> None:
    assert plan() == RankPlan(("cpu", "cpu"), "gloo", (8,), (2,))


def test_one_rank_for_each_gpu_is_the_default_with_gpus() -> None:
    assert plan(gpus=3) == RankPlan(("cuda:0", "cuda:1", "cuda:2"), "nccl", (5,), (3,))


def test_fewer_ranks_take_the_first_gpus() -> None:
    assert plan(gpus=4, ranks=2).devices == ("cuda:0", "cuda:1")


def test_any_number_of_ranks_fits_the_cpu() -> None:
    assert plan(ranks=5).devices == ("cpu",) * 5


def test_each_node_has_a_block_of_ranks() -> None:
    made = plan(ranks=6, nodes=3)
    assert [list(made.ranks_of(node)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [made.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert plan(ranks=4).ranks_of(0) == range(4)


def test_without_a_number_of_ranks_each_node_has_one_at_least() -> None:
    assert plan(nodes=2).world_size == 2
    assert plan(nodes=3).world_size == 3
    assert plan(gpus=4, nodes=2).devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    with pytest.raises(OptionsError, match="ranks=3 cannot be shared out over nodes=2"):
        plan(gpus=3, nodes=2)


@pytest.mark.parametrize("options", [{}, {"backend": "nccl"}, {"backend": "cpu:gloo,cuda:nccl"}])
def test_more_ranks_than_gpus_are_refused_with_what_would_work(options: dict[str, str]) -> None:
    with pytest.raises(OptionsError, match=r"alpha shows 2 .*at most 2 ranks, .*backend='gloo'"):
        plan(gpus=2, ranks=3, **options)


def test_devices_are_used_in_their_order() -> None:
    assert plan(gpus=3, devices=[0, 2]).devices == ("cuda:0", "cuda:2")
    assert plan(gpus=3, devices=[2, 0], ranks=2).devices == ("cuda:2", "cuda:0")


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(OptionsError, match="there is no GPU 2"):
        plan(gpus=2, devices=[0, 2])


def test_devices_on_a_host_without_gpus_are_refused() -> None:
    with pytest.raises(OptionsError, match=r"devices=\[0\] names GPUs, but alpha shows none"):
        plan(devices=[0])


def test_devices_with_a_backend_for_the_cpu_are_refused() -> None:
    with pytest.raises(OptionsError, match="backend 'gloo' runs on the CPU"):
        plan(gpus=2, devices=[0], backend="gloo")


def test_an_unknown_backend_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(OptionsError, match=r"'glo' is not .*2\.9\.0.* it has gloo, mpi, nccl"):
        plan(backend="glo")
    with pytest.raises(OptionsError, match="'hccl' is not"):
        plan(gpus=1, backend="cpu:gloo,cuda:hccl")


@pytest.mark.parametrize("backend", ["nccl", "NCCL", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_backend_for_gpus_without_any_is_refused(backend: str) -> None:
    with pytest.raises(OptionsError, match="needs a GPU, and alpha shows none: use backend='gloo'"):
        plan(backend=backend)


@pytest.mark.parametrize("backend", NCCL)
def test_each_name_of_nccl_means_gpus(backend: str) -> None:
    made = plan_ranks(SessionOptions(backend=backend), [newer(2)])
    assert made == RankPlan(("cuda:0", "cuda:1"), backend, (8,), (2,))
    with pytest.raises(OptionsError, match="needs a GPU, and alpha shows none: use backend='gloo'"):
        plan_ranks(SessionOptions(backend=backend), [newer()])
    with pytest.raises(OptionsError, match=r"nccl\S* serves cuda, not 'cpu'"):
        plan_ranks(SessionOptions(backend=f"cpu:{backend.rpartition(':')[2]}"), [newer(2)])


@pytest.mark.parametrize("backend", ["nccl2", "NCCL-Lazy", "nccl-legacy", "cpu:gloo,cuda:nccl2"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_class_of_nccl_that_torch_does_not_have_yet_is_refused(backend: str, gpus: int) -> None:
    name = backend.lower().rpartition(":")[2]
    message = rf"'{name}' names a class .* from 2\.15 on, .* is 2\.9\.0: use backend='nccl'"
    with pytest.raises(OptionsError, match=message):
        plan(gpus=gpus, backend=backend)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_a_backend_for_each_device_type_puts_the_ranks_on_gpus(backend: str) -> None:
    assert plan(gpus=2, backend=backend) == RankPlan(("cuda:0", "cuda:1"), backend, (8,), (2,))


@pytest.mark.parametrize("backend", ["cuda:gloo", "cpu:gloo,cuda:gloo", "cuda:gloo,cpu:gloo"])
def test_gloo_for_cuda_puts_the_ranks_on_gpus(backend: str) -> None:
    assert plan(gpus=2, backend=backend) == RankPlan(("cuda:0", "cuda:1"), backend, (8,), (2,))
    with pytest.raises(OptionsError, match="needs a GPU, and alpha shows none"):
        plan(backend=backend)


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("cpu:nccl", "nccl serves cuda, not 'cpu'"),
        ("cuda:gloo,cpu:nccl", "nccl serves cuda, not 'cpu'"),
        ("mps:gloo", "gloo serves cpu and cuda, not 'mps'"),
        (":gloo", "gloo serves cpu and cuda, not ''"),
        ("gloo,nccl", "it takes one name, or one for each type"),
        ("cpu:gloo,nccl", "it takes one name, or one for each type"),
        ("cpu:gloo,cpu:mpi", "it takes one name, or one for each type"),
        ("cpu:gloo,", "backend '' is not one"),
    ],
)
def test_pairs_that_torch_cannot_build_are_refused(backend: str, problem: str) -> None:
    with pytest.raises(OptionsError, match=problem):
        plan(gpus=2, backend=backend)


def test_torch_gets_the_backend_as_it_reads_it() -> None:
    assert plan(gpus=1, backend=" CPU:gloo, CUDA : nccl ").backend == "cpu:gloo,cuda:nccl"
    assert plan(backend="cpu: gloo").backend == "cpu:gloo"


@pytest.mark.parametrize("cpu", ["gloo", "mpi", ""])
@pytest.mark.parametrize("cuda", ["gloo", "mpi", "nccl", ""])
def test_a_backend_named_for_cuda_is_what_puts_ranks_on_gpus(cpu: str, cuda: str) -> None:
    pairs = [f"{device}:{name}" for device, name in (("cpu", cpu), ("cuda", cuda)) if name]
    for order in (pairs, pairs[::-1]):
        if order:
            device = "cuda:0" if cuda else "cpu"
            assert plan(gpus=1, ranks=1, backend=",".join(order)).devices == (device,)


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo"])
def test_gloo_means_the_cpu_also_where_there_are_gpus(backend: str) -> None:
    assert plan(gpus=4, backend=backend).devices == ("cpu", "cpu")


def test_processors_are_shared_out_as_threads() -> None:
    assert plan(ranks=4, cpus=16).threads == (4,)
    assert plan(ranks=3, cpus=16).threads == (5,)
    assert plan(ranks=8, cpus=2).threads == (1,)
    assert plan(ranks=8, cpus=2, threads=6).threads == (6,)


# --- GPUs by their UUIDs, and slices of them ------------------------------------------------------

UUIDS = ("GPU-5f2a11", "GPU-5f3b22", "GPU-77cc33")


def named(**options: object) -> RankPlan:
    return plan_ranks(SessionOptions(**options), [replace(host(3), gpu_uuids=UUIDS)])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["GPU-77cc33", "GPU-77", "gpu-77CC", "GPU-7"])
def test_a_gpu_is_named_by_the_beginning_of_its_uuid(name: str) -> None:
    made = named(devices=[name, 0])
    assert (made.devices, made.visible) == (("cuda:2", "cuda:0"), ())


def test_a_whole_uuid_is_meant_though_another_goes_on_behind_it() -> None:
    both = replace(host(2), gpu_uuids=("GPU-5f2a", "GPU-5f2a11"))
    assert plan_ranks(SessionOptions(devices=("GPU-5f2a",)), [both]).devices == ("cuda:0",)


def test_a_uuid_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(OptionsError, match=r"no GPU 'GPU-9': alpha shows GPU-5f2a11, GPU-5f3b22"):
        named(devices=["GPU-9"])
    with pytest.raises(OptionsError, match="no slice of a GPU 'MIG-1': alpha shows none"):
        named(devices=["MIG-1"])
    with pytest.raises(OptionsError, match="does not tell the UUIDs of its 2 GPUs"):
        plan(gpus=2, devices=["GPU-5"])


def test_a_beginning_of_several_uuids_is_refused_with_these() -> None:
    with pytest.raises(OptionsError, match=r"but 2 of alpha: GPU-5f2a11, GPU-5f3b22\. Write more"):
        named(devices=["GPU-5f"])


def test_only_some_of_many_uuids_are_named() -> None:
    many = replace(host(12), gpu_uuids=tuple(f"GPU-{n:02}" for n in range(12)))
    with pytest.raises(OptionsError, match=r"GPU-07 and 4 more\. "):
        plan_ranks(SessionOptions(devices=("GPU-x",)), [many])


def divided(nccl: tuple[int, ...] = (2, 30, 7), **options: object) -> RankPlan:
    """On a host whose first GPU has two slices, the second none, the third is whole."""
    slices = (GpuSlice("MIG-a1", 0), GpuSlice("MIG-a2", 0), GpuSlice("MIG-c1", 3))
    there = replace(
        host(4), gpu_uuids=(*UUIDS, "GPU-ff"), divided=(0, 1, 3), slices=slices, nccl=nccl
    )
    return plan_ranks(SessionOptions(**options), [there])  # type: ignore[arg-type]


def test_a_slice_is_the_only_device_that_its_rank_sees() -> None:
    made = divided(devices=["MIG-a2", "MIG-a1"])
    assert (made.devices, made.visible) == (("cuda:0", "cuda:0"), ("MIG-a2", "MIG-a1"))
    assert made.is_shared
    assert made.notes == ()  # each has a memory of its own


def test_beside_slices_a_whole_gpu_is_seen_by_its_uuid() -> None:
    made = divided(devices=[2, "MIG-c"])
    assert (made.devices, made.visible) == (("cuda:0", "cuda:0"), ("GPU-77cc33", "MIG-c1"))
    assert not made.is_shared


def test_by_default_each_slice_and_each_whole_gpu_has_a_rank() -> None:
    assert divided().visible == ("MIG-a1", "MIG-a2", "GPU-77cc33", "MIG-c1")
    assert divided(ranks=2).visible == ("MIG-a1", "MIG-a2")
    with pytest.raises(
        OptionsError, match=r"5 ranks need a GPU or a slice of one each, .* shows 4"
    ):
        divided(ranks=5)


def test_of_each_gpu_an_older_nccl_has_one_slice_by_default() -> None:
    assert divided(nccl=(2, 29)).visible == ("MIG-a1", "GPU-77cc33", "MIG-c1")
    assert divided(nccl=(2, 29), backend="cuda:gloo").world_size == 4
    with pytest.raises(OptionsError, match="ranks 0-1 are on GPU 0: NCCL takes several"):
        divided(nccl=(2, 29), ranks=2)


@pytest.mark.parametrize("backend", [None, *NCCL])
def test_each_class_of_nccl_has_the_same_devices(backend: str | None) -> None:
    """Which GPU or slice a rank gets, and what it sees of others, depends on no class."""

    def planned(there: HostInfo, **options: object) -> RankPlan:
        return plan_ranks(SessionOptions(backend=backend, **options), [there])  # type: ignore[arg-type]

    whole = newer(4, gpu_uuids=(*UUIDS, "GPU-ff"))
    made = planned(whole, devices=(3, 1))
    assert (made.devices, made.visible) == (("cuda:3", "cuda:1"), ())
    slices = (GpuSlice("MIG-a1", 0), GpuSlice("MIG-a2", 0), GpuSlice("MIG-c1", 3))
    parts = replace(whole, divided=(0, 1, 3), slices=slices, nccl=(2, 30, 7))
    made = planned(parts, devices=("MIG-c1", 2, "MIG-a2"))
    assert (made.devices, made.visible) == (("cuda:0",) * 3, ("MIG-c1", "GPU-77cc33", "MIG-a2"))
    made = planned(replace(parts, nccl=(2, 29)))
    assert made.visible == ("MIG-a1", "GPU-77cc33", "MIG-c1")  # a GPU has one rank


@pytest.mark.parametrize("name", [0, "GPU-5f2a"])
def test_a_divided_gpu_is_refused_with_its_slices(name: int | str) -> None:
    with pytest.raises(OptionsError, match=r"is divided into 2 slices .* of MIG-a1, MIG-a2"):
        divided(devices=[name])


def test_a_divided_gpu_with_one_slice_is_that_slice() -> None:
    assert divided(devices=[3]).visible == ("MIG-c1",)


def test_a_gpu_without_the_slices_that_it_is_to_have_is_refused() -> None:
    with pytest.raises(
        OptionsError, match=r"GPU 1 of alpha is to be divided .* none has been made"
    ):
        divided(devices=[1])
    empty = replace(host(1), gpu_uuids=("GPU-a",), divided=(0,))
    with pytest.raises(OptionsError, match="GPU 0 of alpha is to be divided"):
        plan_ranks(SessionOptions(), [empty])


# --- several ranks on one GPU ---------------------------------------------------------------------


def crowded(nccl: tuple[int, ...], **options: object) -> RankPlan:
    return plan_ranks(SessionOptions(**options), [replace(host(2), nccl=nccl)])  # type: ignore[arg-type]


@pytest.mark.parametrize("nccl", [(2, 30, 1), (2, 31, 0), (3, 0)])
def test_a_newer_nccl_takes_several_ranks_on_one_gpu(nccl: tuple[int, ...]) -> None:
    made = crowded(nccl, devices=[0, 1, 0, 0])
    assert made.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:0")
    assert made.is_shared
    [note] = made.notes
    assert note.startswith("Ranks 0,2-3 share GPU 0, its memory")
    assert "for trying things" in note


@pytest.mark.parametrize(("nccl", "told"), [((2, 29, 7), "2.29.7"), ((), "unknown")])
@pytest.mark.parametrize("backend", [None, *NCCL])
def test_an_older_nccl_does_not(nccl: tuple[int, ...], told: str, backend: str | None) -> None:
    message = (
        rf"ranks 0-1 are on GPU 0: NCCL .* from version 2\.30 on, .* has {told}\. backend='cuda"
    )
    with pytest.raises(OptionsError, match=message):
        plan_ranks(SessionOptions(devices=(0, 0), backend=backend), [newer(2, nccl=nccl)])


def test_gloo_takes_several_ranks_on_one_gpu_with_any_nccl() -> None:
    made = crowded((2, 20), ranks=3, devices=[1, 1, 1], backend="cuda:gloo")
    assert made.devices == ("cuda:1",) * 3
    assert len(made.notes) == 1


def test_nothing_is_said_where_each_rank_has_a_gpu_of_its_own() -> None:
    made = crowded((2, 20), devices=[1, 0])
    assert (made.is_shared, made.notes, made.visible) == (False, (), ())
    assert not plan(ranks=4).is_shared


# --- other accelerators ---------------------------------------------------------------------------


def accelerated(gpus: int = 0, **options: object) -> RankPlan:
    there = replace(
        host(gpus),
        backends=(*BACKENDS, ("toyccl", ("toy",)), ("xccl", ("xpu",))),
        accelerators=(("toy", 3), ("zpu", 1)),
    )
    return plan_ranks(SessionOptions(**options), [there])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["toyccl", "toy:toyccl", "cpu:gloo,toy:toyccl"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_backend_for_another_type_of_device_puts_the_ranks_there(backend: str, gpus: int) -> None:
    assert accelerated(gpus, backend=backend).devices == ("toy:0", "toy:1", "toy:2")
    assert accelerated(gpus, backend=backend, ranks=2).devices == ("toy:0", "toy:1")
    assert accelerated(gpus, backend=backend, devices=[2, 1]).devices == ("toy:2", "toy:1")


def test_more_ranks_than_accelerators_are_refused() -> None:
    with pytest.raises(OptionsError, match=r"alpha shows 3 \(there is no toy:3\): .* at most 3"):
        accelerated(backend="toyccl", ranks=4)
    with pytest.raises(OptionsError, match=r"there is no toy:5"):
        accelerated(backend="toyccl", devices=[0, 5])


def test_a_type_of_device_that_is_not_there_is_named() -> None:
    with pytest.raises(OptionsError, match="devices of the type xpu, and alpha shows none"):
        accelerated(gpus=2, backend="xccl")


def test_names_of_gpus_are_none_of_other_accelerators() -> None:
    with pytest.raises(OptionsError, match="give their numbers, 0 to 2"):
        accelerated(backend="toyccl", devices=["GPU-5f"])


@pytest.mark.parametrize("backend", ["cuda:nccl,toy:toyccl", "toy:toyccl,xpu:xccl"])
def test_a_rank_has_one_accelerator(backend: str) -> None:
    with pytest.raises(OptionsError, match="a rank has one device, of one type"):
        accelerated(gpus=2, backend=backend)


# --- several hosts --------------------------------------------------------------------------------


def test_nodes_may_have_different_numbers_of_ranks() -> None:
    made = plan(ranks_per_host=(2, 1, 3))
    assert made.counts == (2, 1, 3)
    assert (made.world_size, made.nodes, made.threads) == (6, 3, (2, 2, 2))
    assert [list(made.ranks_of(node)) for node in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert [made.node_of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert plan(gpus=3, ranks_per_host=(2, 1)).devices == ("cuda:0", "cuda:1", "cuda:2")


def on_hosts(*hosts: HostInfo, **options: object) -> RankPlan:
    names = tuple(each.host for each in hosts)
    return plan_ranks(SessionOptions(launcher="ssh", hosts=names, **options), hosts)  # type: ignore[arg-type]


BIG = replace(host(4, cpus=64), host="big")
SMALL = replace(host(2, cpus=8), host="small")
BARE = replace(host(0, cpus=4), host="bare")


def test_each_gpu_of_each_host_has_a_rank() -> None:
    made = on_hosts(BIG, SMALL)
    assert made.counts == (4, 2)
    assert made.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1")
    assert (made.backend, made.threads, made.is_shared) == ("nccl", (16, 4), False)
    assert on_hosts(BIG, SMALL, ranks=4).devices == ("cuda:0", "cuda:1") * 2
    assert on_hosts(BIG, SMALL, ranks_per_host=(3, 1)).counts == (3, 1)
    assert on_hosts(BIG, SMALL, threads=3).threads == (3, 3)


def test_hosts_without_gpus_have_as_many_ranks_as_one_machine() -> None:
    other = replace(BARE, host="other")
    assert on_hosts(BARE, other).counts == (2, 2)
    assert on_hosts(BARE, other, ranks=6).threads == (1, 1)
    assert on_hosts(BIG, BARE, backend="gloo", ranks=2).devices == ("cpu", "cpu")


def test_the_devices_that_are_named_are_those_of_each_host() -> None:
    assert on_hosts(BIG, SMALL, devices=(1, 0)).devices == ("cuda:1", "cuda:0") * 2
    with pytest.raises(OptionsError, match=r"small shows 2 \(there is no GPU 3\)"):
        on_hosts(BIG, SMALL, devices=(3,))


def test_hosts_with_and_without_gpus_are_no_group() -> None:
    with pytest.raises(OptionsError, match=r"big, small have GPUs and bare has none.*'gloo'"):
        on_hosts(BIG, SMALL, BARE)
    with pytest.raises(OptionsError, match="needs a GPU, and bare shows none"):
        on_hosts(BIG, BARE, backend="nccl")


def test_hosts_whose_gpus_differ_are_told_how_to_have_all() -> None:
    with pytest.raises(
        OptionsError, match=r"3 on each of 2 hosts.* \(big 4, small 2\).*ranks_per_host=\[4, 2\]"
    ):
        on_hosts(BIG, SMALL, ranks=6)
    with pytest.raises(OptionsError, match=r"^3 ranks need a GPU each, but small shows 2"):
        on_hosts(SMALL, replace(SMALL, host="b"), ranks=6)


def test_a_gpu_that_ranks_share_is_named_with_its_host() -> None:
    new = [replace(each, nccl=(2, 30)) for each in (BIG, SMALL)]
    made = on_hosts(*new, devices=(1, 1))
    assert made.is_shared
    assert [note.partition(",")[0] for note in made.notes] == [
        "Ranks 0-1 share GPU 1 of big",
        "Ranks 2-3 share GPU 1 of small",
    ]
