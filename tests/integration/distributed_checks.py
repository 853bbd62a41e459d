"""What the helpers have to do, on any number of ranks.

Each function named ``check_...`` runs on every rank of a world, in step, and raises where something
is wrong. ``test_distributed.py`` runs them on a session's ranks, under torchrun (this module is the
script), and in one process without a group. They expect nothing but the helpers' own answers to
know how many ranks there are.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distsession.distributed as dd
from distsession.errors import (
    CollectiveError,
    CollectiveMismatchError,
    OptionsError,
    ProcessGroupError,
)
from tests.integration import distributed_sources
from tests.integration.distributed_marks import here, raises

LIMIT = float(os.environ.get("CHECKS_LIMIT", "80"))
"""Seconds after which a rank that hangs says where, and ends."""

Point = collections.namedtuple("Point", "x y")


def equal(found: torch.Tensor, wanted: Any) -> None:
    wanted = torch.as_tensor(wanted)
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert torch.equal(found, wanted), (found, wanted)


# --- where am I ---------------------------------------------------------------------------------


def check_place() -> None:
    rank, n = here()
    grouped = dist.is_initialized()
    assert dd.is_available()
    assert dd.is_initialized() is grouped
    if grouped:
        assert (rank, n) == (dist.get_rank(), dist.get_world_size())
        assert dd.backend() == "gloo"
        assert dd.model_name() == "native-dist"
    else:
        assert (rank, n, dd.backend(), dd.model_name()) == (0, 1, None, "serial")
    assert dd.get_global_rank() == rank
    assert (dd.get_local_rank(), dd.get_local_world_size()) == (rank, n)
    assert (dd.get_nproc_per_node(), dd.get_nnodes(), dd.get_node_rank()) == (n, 1, 0)
    assert dd.device() == torch.device("cpu")
    assert "gloo" in dd.available_backends()
    assert dd.hostname()


def check_show_config() -> None:
    rank, n = here()
    lines = dict(line.split(": ", 1) for line in dd.show_config().splitlines())
    assert (lines["rank"], lines["world size"]) == (str(rank), str(n))
    assert lines["backend"] == str(dd.backend())


def check_local_rank_by_hand() -> None:
    rank, _n = here()
    try:
        dd.set_local_rank(7)
        assert dd.get_local_rank() == (7 if dist.is_initialized() else 0)
    finally:
        dd.sync()
    assert dd.get_local_rank() == rank
    with raises(OptionsError, "-1"):
        dd.set_local_rank(-1)


def check_hosts_are_found_without_variables() -> None:
    rank, n = here()
    saved = {k: os.environ.pop(k) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if k in os.environ}
    try:
        dd.sync()
        assert (dd.get_local_rank(), dd.get_local_world_size(), dd.get_nnodes()) == (rank, n, 1)
    finally:
        os.environ.update(saved)
        dd.sync()


# --- begin and end ------------------------------------------------------------------------------


def check_initialize_keeps_a_group_that_is_there() -> None:
    if not dist.is_initialized():
        return
    world = dist.group.WORLD
    dd.initialize("gloo")
    dd.finalize()
    assert dist.group.WORLD is world
    with raises(ProcessGroupError, "world_size"):
        dd.initialize(world_size=dd.get_world_size() + 1)


def check_process_group_gives_the_value_and_ends() -> None:
    grouped = dist.is_initialized()

    @dd.process_group("gloo")
    def work(x: int) -> int:
        assert dist.is_initialized()
        if x < 0:
            raise LookupError("negative")
        return dd.all_reduce(x)

    assert work(2) == 2 * dd.get_world_size()
    assert dist.is_initialized() is grouped
    with raises(LookupError, "negative"):
        work(-1)
    assert dist.is_initialized() is grouped
    with dd.process_group(timeout=30):
        assert dd.all_gather(dd.get_rank()) == list(range(dd.get_world_size()))
    assert dist.is_initialized() is grouped


# --- reductions ---------------------------------------------------------------------------------


def check_all_reduce_tensors() -> None:
    rank, n = here()
    results = {
        "sum": n * (n + 1) // 2,
        "PRODUCT": [1, 1, 2, 6, 24][n],
        "min": 1,
        "Max": n,
        "avg": (n + 1) / 2,
    }
    for op, value in results.items():
        x = torch.full((2, 3), rank + 1.0)
        assert dd.all_reduce(x, op) is x
        equal(x, torch.full((2, 3), float(value)))
    x = torch.tensor(rank + 1)
    equal(dd.all_reduce(x, dist.ReduceOp.SUM), n * (n + 1) // 2)


def check_all_reduce_bits_and_bools() -> None:
    rank, n = here()
    x = torch.tensor([1 << rank, 0b1000 | rank])
    equal(dd.all_reduce(x.clone(), "or")[0], (1 << n) - 1)
    equal(dd.all_reduce(x.clone(), "and")[1], 0b1000)
    equal(dd.all_reduce(torch.tensor([True, rank == 0]), "AND"), [True, n == 1])
    equal(dd.all_reduce(torch.tensor([False, rank == n - 1]), "or"), [False, True])


def check_all_reduce_dtypes() -> None:
    _rank, n = here()
    names = "float16 bfloat16 float32 float64 int8 uint8 int16 int32 int64 complex64 uint16"
    for name in names.split():
        x = torch.tensor([1, 2]).to(getattr(torch, name))
        want = torch.tensor([n, 2 * n]).to(x.dtype)
        equal(dd.all_reduce(x).to(torch.complex64), want.to(torch.complex64))


def check_all_reduce_strides_and_grad() -> None:
    _rank, n = here()
    base = torch.arange(6.0).view(2, 3)
    turned = base.t()
    dd.all_reduce(turned)
    equal(base, torch.arange(6.0).view(2, 3) * n)
    every_other = torch.arange(6.0)
    dd.all_reduce(every_other[::2])
    equal(every_other, torch.arange(6.0) * torch.tensor([n, 1.0, n, 1, n, 1]))
    leaf = torch.ones(3, requires_grad=True)
    dd.all_reduce(leaf, "avg")
    assert leaf.requires_grad
    equal(leaf.detach(), torch.ones(3))


def check_all_reduce_numbers() -> None:
    rank, n = here()
    total = dd.all_reduce(rank + 1)
    assert (total, type(total)) == (n * (n + 1) // 2, int)
    assert dd.all_reduce(0.1 * rank, "max") == 0.1 * (n - 1)
    assert dd.all_reduce(2**62 + rank, "min") == 2**62
    assert dd.all_reduce(2**70) == n * 2**70
    assert dd.all_reduce(rank, "AVG") == (n - 1) / 2
    assert dd.all_reduce(rank == 0, "or") is True
    assert dd.all_reduce(1j) == n * 1j
    with raises(TypeError, "str"):
        dd.all_reduce("text")


def check_all_reduce_async() -> None:
    rank, n = here()
    x = torch.full((3,), float(rank))
    pending = dd.all_reduce(x, "avg", async_op=True)
    assert pending.wait() is x
    assert pending.is_completed()
    equal(pending.wait(), torch.full((3,), (n - 1) / 2))
    assert dd.all_reduce(rank, async_op=True).wait() == n * (n - 1) // 2


def check_all_reduce_containers() -> None:
    rank, n = here()
    values = {"b": [torch.ones(2), rank], "a": Point(1.5, (torch.tensor(rank),))}
    if rank % 2:
        values = dict(reversed(values.items()))
    got = dd.all_reduce(values)
    assert list(got) == list(values)
    equal(got["b"][0], torch.full((2,), float(n)))
    assert got["b"][0] is values["b"][0]
    assert got["b"][1] == n * (n - 1) // 2
    assert isinstance(got["a"], Point)
    assert got["a"].x == 1.5 * n
    equal(got["a"].y[0], n * (n - 1) // 2)
    again = dd.all_reduce([torch.ones(1), 1], "avg", async_op=True).wait()
    assert again[1] == 1.0
    if n > 1:
        with raises(CollectiveMismatchError, "structure", "rank 1"):
            dd.all_reduce({"a": 1} if rank else {"b": 1})


def check_what_cannot_be_reduced_is_said_before_anyone_waits() -> None:
    if dd.get_rank() == 0:  # on one rank alone: it would wait for ever
        with raises(OptionsError, "bitwise", "float32"):
            dd.all_reduce(torch.ones(2), "and")
        with raises(OptionsError, "'median'"):
            dd.all_reduce(torch.ones(2), "median")
        with raises(OptionsError, "whole"):
            dd.all_reduce(torch.ones(2, dtype=torch.int32), "avg")
        with raises(OptionsError, "complex64"):
            dd.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
        with raises(OptionsError, "bool"):
            dd.all_reduce([torch.tensor([True])], "sum")
        with raises(OptionsError, "1.5"):
            dd.all_reduce(1.5, "or")
        if dist.is_initialized():
            with raises(OptionsError, "float8"):
                dd.all_reduce(torch.ones(2).to(torch.float8_e5m2))
            with raises(OptionsError, "99"):
                dd.broadcast(1, src=99)
    dd.barrier()


def check_reduce() -> None:
    rank, n = here()
    dst = n - 1
    x = torch.full((2,), rank + 1.0)
    got = dd.reduce(x, dst, "sum")
    if rank == dst:
        assert got is x
        equal(x, torch.full((2,), n * (n + 1) / 2))
    else:
        assert got is None
        equal(x, torch.full((2,), rank + 1.0))
    assert dd.reduce(rank + 1, dst, "max") == (n if rank == dst else None)
    got = dd.reduce({"x": torch.ones(1), "y": 2}, 0, "avg")
    assert (got is None) == (rank != 0)
    if rank == 0:
        equal(got["x"], torch.ones(1))
        assert got["y"] == 2.0


def check_numbers_reduced_differently_are_an_error() -> None:
    rank, n = here()
    if n > 1:
        with raises(CollectiveMismatchError, "different"):
            dd.all_reduce(1, "max" if rank else "sum")
        with raises(CollectiveMismatchError, "all_reduce", "all_gather"):
            dd.all_reduce(1) if rank else dd.all_gather(1)


# --- moving values ------------------------------------------------------------------------------


def check_all_gather_tensors() -> None:
    rank, n = here()
    equal(
        dd.all_gather(torch.full((2, 3), rank)),
        torch.arange(n).repeat_interleave(2)[:, None].expand(-1, 3),
    )
    x = dd.all_gather(torch.tensor(float(rank)))
    equal(x if dist.is_initialized() else x.unsqueeze(0), torch.arange(float(n)))
    for name in ["int16", "bool", "complex64", "float8_e5m2", "uint64", "bfloat16"]:
        x = torch.tensor([1, 0, 1]).to(getattr(torch, name))
        got = dd.all_gather(x)
        assert got.dtype == x.dtype
        equal(got.to(torch.complex64), torch.tensor([1, 0, 1] * n).to(torch.complex64))
    assert not dd.all_gather(torch.ones(1, requires_grad=True) * 2).requires_grad or n == 1


def check_all_gather_ragged() -> None:
    rank, n = here()
    got = dd.all_gather(torch.full((rank, 2), float(rank)))
    rows = [float(r) for r in range(n) for _ in range(r)]
    equal(got, torch.tensor(rows).view(-1, 1).expand(-1, 2).clone())
    parts = dd.all_gather(torch.full((rank + 1,), rank, dtype=torch.int8), as_list=True)
    assert [part.tolist() for part in parts] == [[r] * (r + 1) for r in range(n)]
    parts = dd.all_gather(
        torch.ones([2] * (rank + 1)).to([torch.float32, torch.int16][rank % 2]), as_list=True
    )
    assert [part.dim() for part in parts] == [r + 1 for r in range(n)]
    assert [part.dtype for part in parts][:2] == [torch.float32, torch.int16][:n]


def check_all_gather_others() -> None:
    rank, n = here()
    assert dd.all_gather(rank) == list(range(n))
    assert dd.all_gather(rank / 3) == [r / 3 for r in range(n)]
    assert dd.all_gather("ü" * rank) == ["ü" * r for r in range(n)]
    assert dd.all_gather({"rank": rank}) == [{"rank": r} for r in range(n)]
    assert dd.all_gather([rank, 1]) == [[r, 1] for r in range(n)]
    assert dd.all_gather(None) == [None] * n
    assert dd.all_gather(rank == 0)[0] is True
    got = dd.all_gather({"x": torch.full((rank,), 1.0)})
    assert [item["x"].numel() for item in got] == list(range(n))


def check_what_does_not_fit_is_an_error_everywhere() -> None:
    rank, n = here()
    if n == 1:
        return
    with raises(CollectiveMismatchError, "rank 0: a float32", "rank 1: a float64"):
        dd.all_gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    with raises(CollectiveMismatchError, "[2, 3]", "[2, 4]"):
        dd.all_gather(torch.ones(2, 4 if rank else 3))
    with raises(CollectiveMismatchError, "a whole number"):
        dd.all_gather(1 if rank else torch.ones(1))
    with raises(CollectiveError, "rank 1", "pickled"):
        dd.all_gather_object((lambda: 0) if rank == 1 else 1)
    with raises(CollectiveError, "rank 0", "pickled"):
        dd.scatter([lambda: 0] * n)
    with raises(CollectiveError, "pickled"):
        dd.all_to_all([lambda: 0] * n)
    with raises(CollectiveMismatchError, "roots"):
        dd.broadcast(1, src=min(rank, 1))
    assert dd.all_gather(rank) == list(range(n))


def check_objects() -> None:
    rank, n = here()
    every = dd.all_gather_object({"rank": rank, "t": torch.tensor([rank])})
    assert [item["rank"] for item in every] == list(range(n))
    assert [item["t"].item() for item in every] == list(range(n))
    src = n - 1
    items: list[Any] = [rank, "x", {"y": rank}]
    assert dd.broadcast_object_list(items, src) is None
    assert items == [src, "x", {"y": src}]
    if n > 1:
        with raises(CollectiveMismatchError, "length"):
            dd.broadcast_object_list([0] * (rank + 1))
        with raises(CollectiveError, "rank 0", "pickled"):
            dd.broadcast_object_list([lambda: 0])


def check_broadcast_tensors() -> None:
    rank, n = here()
    src = n - 1
    x = torch.full((2, 2), float(rank))
    assert dd.broadcast(x, src) is x
    equal(x, torch.full((2, 2), float(src)))
    turned = torch.full((2, 3), rank).t()
    assert dd.broadcast(turned, src) is turned
    equal(turned, torch.full((3, 2), src))
    flag = torch.tensor(rank == src)
    equal(dd.broadcast(flag, src), True)
    got = dd.broadcast(torch.arange(3, dtype=torch.int16) if rank == src else None, src)
    equal(got, torch.arange(3, dtype=torch.int16))
    got = dd.broadcast(torch.ones(2, 0) if rank == src else "?", src, safe_mode=True)
    equal(got, torch.ones(2, 0))
    got = dd.broadcast(x if rank == src else torch.ones(9), src, safe_mode=True)
    equal(got, torch.full((2, 2), float(src)))
    if n > 1:
        with raises(CollectiveMismatchError, "[4]", "[3]"):
            dd.broadcast(torch.ones(3 if rank else 4))


def check_broadcast_others() -> None:
    rank, n = here()
    src = n - 1
    assert dd.broadcast(rank + 0.5, src) == src + 0.5
    assert dd.broadcast(rank if rank == src else None, src) == src
    assert dd.broadcast("text" * rank, src) == "text" * src
    assert dd.broadcast({"r": [rank, (rank,)]}, src) == {"r": [src, (src,)]}
    assert dd.broadcast(1 if rank == src else (lambda: 0), src) == 1
    if dist.is_initialized():
        with raises(OptionsError, f"rank {src}"):
            dd.broadcast(None, src)


def check_gather() -> None:
    rank, n = here()
    dst = n - 1
    got = dd.gather(torch.full((rank + 1,), rank), dst)
    assert (got is None) == (rank != dst)
    if rank == dst:
        assert [part.tolist() for part in got] == [[r] * (r + 1) for r in range(n)]
    got = dd.gather(torch.full((2,), rank), dst, as_list=False)
    if rank == dst:
        equal(got, torch.arange(n).repeat_interleave(2))
    assert dd.gather(f"r{rank}", dst) == ([f"r{r}" for r in range(n)] if rank == dst else None)
    assert dd.gather(rank, dst) == (list(range(n)) if rank == dst else None)


def check_scatter() -> None:
    rank, n = here()
    src = n - 1
    mine = rank == src
    got = dd.scatter(
        [torch.full((r,), r, dtype=torch.int16) for r in range(n)] if mine else None, src
    )
    equal(got, torch.full((rank,), rank, dtype=torch.int16))
    assert dd.scatter([f"to {r}" for r in range(n)] if mine else None, src) == f"to {rank}"
    assert dd.scatter(list(range(n)) if mine else None, src) == rank
    got = dd.scatter([{"r": r} for r in range(n)] if mine else None, src)
    assert got == {"r": rank}
    equal(dd.scatter(torch.arange(2 * n) if mine else None, src), [2 * rank, 2 * rank + 1])
    with raises(OptionsError, "one value"):
        dd.scatter([0] * (n + 1) if mine else None, src)


def check_all_to_all() -> None:
    rank, n = here()
    got = dd.all_to_all([f"{rank}>{r}" for r in range(n)])
    assert got == [f"{r}>{rank}" for r in range(n)]
    got = dd.all_to_all([torch.full((r + 1,), rank, dtype=torch.int8) for r in range(n)])
    assert [part.tolist() for part in got] == [[r] * (rank + 1) for r in range(n)]
    got = dd.all_to_all(
        [torch.full((r,), rank + 0.5, dtype=torch.float64) if r % 2 else rank for r in range(n)]
    )
    assert (got[0].tolist() if rank % 2 else got[0]) == ([0.5] * rank if rank % 2 else 0)
    equal(dd.all_to_all(torch.arange(n) + 10 * rank), torch.arange(n) * 10 + rank)
    if dist.is_initialized():
        with raises(OptionsError, "rank 0"):
            dd.all_to_all([0] * (n + (rank == 0)))


def check_barrier_and_synchronize() -> None:
    rank, n = here()
    began = time.monotonic()
    if rank == 0 and n > 1:
        time.sleep(0.2)
    dd.barrier()
    assert n == 1 or time.monotonic() - began > 0.1
    work = dd.barrier(async_op=True)
    assert work is None or work.wait() is not False
    dd.synchronize()


# --- groups -------------------------------------------------------------------------------------


def check_new_group() -> None:
    rank, n = here()
    members = [n - 1, 0] if n > 1 else [0]
    group = dd.new_group(sorted(members))
    got = dd.all_reduce(torch.tensor([rank + 1]), group=group)
    equal(got, [1 + n if n > 1 else 1] if rank in members else [rank + 1])
    if rank in members:
        assert dd.all_gather(rank, group) == sorted(members)
        assert dd.broadcast(rank, n - 1, group) == n - 1
        assert dd.gather(rank, 0, group) == (sorted(members) if rank == 0 else None)
        assert dd.scatter([7] * len(members), n - 1, group) == 7
        assert dd.all_to_all([rank] * len(members), group) == sorted(members)
    else:
        assert dd.all_gather(rank, group) == rank
    dd.barrier(group)
    with raises(OptionsError, "none twice"):
        dd.new_group([0, 0])
    with raises(ValueError, "list of ranks"):
        dd.new_group("01")
    if dist.is_initialized():
        with raises(OptionsError, "99"):
            dd.new_group([0, 99])


def check_a_list_of_ranks_is_a_group() -> None:
    rank, n = here()
    for _ in range(2):
        for half in (list(range(0, n, 2)), list(range(1, n, 2)) or [0]):
            equal(
                dd.all_reduce(torch.tensor(rank), group=half), sum(half) if rank in half else rank
            )
            assert dd.all_gather(rank, group=half) == (half if rank in half else rank)
    assert dd.all_reduce(rank, group=[0]) == rank
    dd.barrier()


def check_split_group() -> None:
    rank, n = here()
    pairs = dd.get_group(2 if n % 2 == 0 else 1)
    size = 2 if n % 2 == 0 else 1
    first = rank - rank % size
    assert dd.all_gather(rank, pairs) == list(range(first, first + size))
    assert dd.all_gather(rank, dd.split_group(1)) == list(range(n))
    assert dd.all_gather(rank, dd.get_group()) == list(range(n))
    assert dd.all_gather(rank, dd.split_group(n)) == [rank]
    with raises(OptionsError, f"{n} ranks", "3"):
        dd.split_group(3)
    with raises(OptionsError, f"{n} ranks", "3"):
        dd.get_group(3)


def check_device_mesh() -> None:
    rank, n = here()
    with raises(OptionsError, f"{n} ranks", "data=3"):
        dd.device_mesh(data=3)
    if not dist.is_initialized():
        with raises(ProcessGroupError, "initialize"):
            dd.device_mesh(data=1)
        return
    mesh = dd.device_mesh(data=-1, model=2 if n % 2 == 0 else 1)
    assert mesh.mesh_dim_names == ("data", "model")
    assert mesh.size() == n
    size = 2 if n % 2 == 0 else 1
    assert dd.all_gather(rank, mesh.get_group("model")) == [
        rank - rank % size + i for i in range(size)
    ]


# --- guards -------------------------------------------------------------------------------------


def check_one_rank_only() -> None:
    rank, n = here()
    ran = []

    @dd.one_rank_only(rank=n - 1, with_barrier=True)
    def last(x: int) -> int:
        ran.append(x)
        return x + 1

    assert last(1) == (2 if rank == n - 1 else None)
    assert ran == ([1] if rank == n - 1 else [])
    with dd.one_rank_only() as mine:
        assert mine == (rank == 0)


def check_one_rank_only_tells_of_its_error() -> None:
    rank, n = here()

    @dd.one_rank_only(with_barrier=True)
    def fails() -> None:
        raise LookupError("no such file")

    kind = LookupError if rank == 0 else CollectiveError
    words = ("no such file",) if rank == 0 else ("rank 0", "LookupError", "no such file")
    with raises(kind, *words):
        fails()
    assert dd.all_gather(rank) == list(range(n))


def check_one_rank_first() -> None:
    rank, n = here()
    first = n - 1
    with dd.one_rank_first(first):
        before = time.time()
        if rank == first:
            time.sleep(0.05)
        after = time.time()
    starts, ends = dd.all_gather(before), dd.all_gather(after)
    assert all(starts[r] >= ends[first] - 0.01 for r in range(n) if r != first)

    @dd.one_rank_first(local=True)
    def value() -> int:
        return rank

    assert value() == rank
    with dd.run_local_rank_zero_first():
        pass
    with raises(OptionsError, str(n)), dd.one_rank_first(n):
        pass


def check_one_rank_first_tells_of_its_error() -> None:
    rank, n = here()
    ran = []
    kind, words = (CollectiveError, ("rank 0", "KeyError")) if rank else (KeyError, ())
    with raises(kind, *words), dd.one_rank_first():
        ran.append(rank)
        raise KeyError("gone")
    assert ran == ([0] if rank == 0 else [])
    assert dd.all_gather(rank) == list(range(n))


# --- data and model -----------------------------------------------------------------------------


def check_samplers() -> None:
    rank, n = here()
    data = list(range(10))
    exact = dd.get_sampler(data, exact=True, shuffle=True)
    every = dd.all_gather_object(list(exact))
    assert sorted(index for share in every for index in share) == data
    assert len(exact) == len(every[rank])
    padded = dd.get_sampler(data)
    assert len(padded) == -(-10 // n)
    assert len(dd.get_sampler(data, drop_last=True)) == 10 // n
    drawn = dd.DistributedProxySampler(torch.utils.data.RandomSampler(data))
    state = torch.get_rng_state()
    every = dd.all_gather_object(list(drawn))
    assert torch.equal(state, torch.get_rng_state())
    assert sorted({index for share in every for index in share}) == data


def check_auto_dataloader() -> None:
    rank, n = here()
    data = torch.arange(16)
    loader = dd.auto_dataloader(data, batch_size=8, shuffle=False)
    assert loader.batch_size == 8 // n
    assert next(iter(loader)).tolist() == list(range(rank, 16, n))[: 8 // n]
    exact = dd.auto_dataloader(torch.arange(9), batch_size=n, exact=True)
    assert sorted(dd.all_gather(torch.cat(list(exact))).tolist()) == list(range(9))


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    optimizer = dd.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def check_auto_model_trains_like_one_process() -> None:
    rank, n = here()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 4, generator=generator) for _ in range(2))
    mine = slice(rank * 8 // n, (rank + 1) * 8 // n)

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        return torch.nn.Sequential(*layers)

    wanted = train(build(), x, y)
    for strategy in ("ddp", "fsdp"):
        more = {"units": (torch.nn.Linear,)} if strategy == "fsdp" else {}
        model = dd.auto_model(build(), strategy=strategy, **more)
        wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        assert wrapped == (strategy == "ddp" and n > 1)
        for got, want in zip(train(model, x[mine], y[mine]), wanted, strict=True):
            torch.testing.assert_close(got, want)
    with raises(OptionsError, "device_ids"):
        dd.auto_model(build(), device_ids=[0])


def check_seed_everything() -> None:
    rank, n = here()
    assert dd.seed_everything(5) == 5
    same = dd.all_gather((torch.rand(1).item(), random.random()))
    assert len(set(same)) == 1
    assert dd.seed_everything(5, per_rank=True) == 5 + rank
    assert len(set(dd.all_gather(torch.rand(1).item()))) == n


def check_small_values_come_along_whatever_came_before() -> None:
    """What fits with the headers and what does not follow each other, and differ over ranks."""
    if not dist.is_initialized():
        return
    rank, size = here()
    kinds = [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int16, torch.uint8]
    for length in (0, 1, 3, 63, 64, 65, 511, 512, 513, 3):
        for dtype in kinds:
            mine = (torch.arange(length) % 7 + rank).to(dtype)
            theirs = [(torch.arange(length) % 7 + other).to(dtype) for other in range(size)]
            joined = dd.all_gather(mine)
            assert torch.equal(joined, torch.cat(theirs))
            joined.resize_(1)
            assert joined.storage_offset() == 0
            for got, expected in zip(dd.all_gather(mine, as_list=True), theirs, strict=True):
                assert torch.equal(got, expected)
                got.zero_()
            assert torch.equal(dd.broadcast(mine.clone()), theirs[0])
            assert torch.equal(dd.broadcast(mine if rank == 0 else None), theirs[0])
            assert torch.equal(dd.scatter(theirs), mine)
            got = dd.gather(mine, as_list=False)
            assert rank or torch.equal(got, torch.cat(theirs))
    for length in (10, 511, 512, 513):
        ragged = torch.full((length if rank == 0 else 1,), float(rank))
        assert dd.all_gather(ragged).tolist() == [0.0] * length + [float(r) for r in range(1, size)]
        texts = dd.all_gather_object("x" * (length + rank))
        assert texts == ["x" * (length + other) for other in range(size)]
    scalars = dd.all_gather(torch.tensor(rank, requires_grad=False))
    assert scalars.tolist() == list(range(size))
    turned = torch.arange(6.0).view(2, 3).t().requires_grad_()
    got = dd.all_gather(turned)
    assert torch.equal(got, torch.cat([turned.detach()] * size))
    assert not got.requires_grad
    conjugate = torch.full((2,), 1 + 2j).conj()
    assert torch.equal(dd.broadcast(conjugate if rank == 0 else None), conjugate.resolve_conj())
    with torch.inference_mode():
        assert dd.all_gather(torch.ones(2)).sum() == 2 * size
    assert dd.all_gather(torch.ones(2)).sum() == 2 * size


def check_small_values_that_do_not_fit_raise_and_the_next_call_works() -> None:
    rank, size = here()
    if size == 1:
        return
    for _ in range(3):
        for mine in (torch.ones(2, 1 + rank), torch.ones(2, dtype=torch.int8) if rank else [1]):
            with raises(CollectiveMismatchError):
                dd.all_gather(mine)
        with raises(CollectiveMismatchError):
            dd.broadcast(torch.ones(2 + rank))
        with raises(CollectiveMismatchError):
            dd.all_gather(torch.ones(2)) if rank else dd.gather(torch.ones(2))
        assert dd.all_gather(torch.ones(2)).sum() == 2 * size


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}
CHECKS |= distributed_sources.CHECKS


def main(folder: str) -> None:
    """Run every check, and write what each has raised; the rest is useless after the first."""
    outcome: dict[str, str] = {}
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    dd.initialize("gloo", timeout=30)
    rank = dd.get_rank()
    for name, check in CHECKS.items():
        try:
            check()
            outcome[name] = "ok"
        except Exception:
            outcome[name] = traceback.format_exc()
            break
    Path(folder, f"{rank}.json").write_text(json.dumps(outcome))
    dd.finalize()
    # Once more at the same address: what the first group has left there is not in the way.
    dd.initialize("gloo", timeout=30)
    assert dd.all_gather(rank) == list(range(dd.get_world_size()))
    dd.finalize()
    Path(folder, f"{rank}.done").touch()


if __name__ == "__main__":
    main(sys.argv[1])
