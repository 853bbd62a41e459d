"""Fitting the options to a host."""

from __future__ import annotations

import pytest

from distsession.errors import OptionsError
from distsession.options import RankPlan, SessionOptions, plan_ranks
from distsession.ranks import HostInfo

BACKENDS = (("gloo", ("cpu", "cuda")), ("mpi", ("cpu", "cuda")), ("nccl", ("cuda",)))


def host(gpus: int = 0, cpus: int = 16) -> HostInfo:
    names = tuple(f"GPU {number}" for number in range(gpus))
    return HostInfo("alpha", 1, names, BACKENDS, "2.9.0", cpus)


def plan(gpus: int = 0, cpus: int = 16, **options: object) -> RankPlan:
    return plan_ranks(SessionOptions(**options), host(gpus, cpus))  # type: ignore[arg-type]


def test_two_ranks_on_the_cpu_are_the_default_without_gpus() -> None:
    assert plan() == RankPlan(2, ("cpu", "cpu"), "gloo", 8)


def test_one_rank_for_each_gpu_is_the_default_with_gpus() -> None:
    assert plan(gpus=3) == RankPlan(3, ("cuda:0", "cuda:1", "cuda:2"), "nccl", 5)


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


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_a_backend_for_each_device_type_puts_the_ranks_on_gpus(backend: str) -> None:
    assert plan(gpus=2, backend=backend) == RankPlan(2, ("cuda:0", "cuda:1"), backend, 8)


@pytest.mark.parametrize("backend", ["cuda:gloo", "cpu:gloo,cuda:gloo", "cuda:gloo,cpu:gloo"])
def test_gloo_for_cuda_puts_the_ranks_on_gpus(backend: str) -> None:
    assert plan(gpus=2, backend=backend) == RankPlan(2, ("cuda:0", "cuda:1"), backend, 8)
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
    assert plan(ranks=4, cpus=16).threads == 4
    assert plan(ranks=3, cpus=16).threads == 5
    assert plan(ranks=8, cpus=2).threads == 1
    assert plan(ranks=8, cpus=2, threads=6).threads == 6
