"""Where the other helpers differ; see ``distributed_sources.py``."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import distsession.distributed as dd
from distsession.errors import (
    CollectiveError,
    CollectiveMismatchError,
    OptionsError,
    ProcessGroupError,
)
from tests.integration.distributed_marks import (
    here,
    logged,
    parameters,
    raises,
    shows,
    silent,
)

# --- reductions ---------------------------------------------------------------------------------


@shows(
    "ignite",
    "all_reduce",
    "Names in either case; `avg`, `xor`, `async_op`, containers.",
    "Whole numbers of any size.",
    "Refuses texts alone, too.",
)
@shows("composer", "all_reduce", "Returns the tensor, too; `op` for `reduce_operation`.")
@shows("composer", "all_reduce", "An unknown operation is a `ValueError`.")
@shows("DI-engine", "allreduce", "An unknown operation is a `ValueError`.")
@shows(
    "DI-engine",
    "allreduce",
    'Its `"sum"` divides by the world size: that is `"avg"` here.',
)
@shows(
    "DI-engine",
    "allreduce_async",
    '`"avg"` and `async_op=True`; there is something to wait for.',
)
@shows("torch", "all_reduce", "Returns the value; a handle's `wait()` does, too.")
@shows("torch", "all_reduce", "Such a handle has `wait` and `is_completed` only.")
@shows("torch", "all_reduce", "Takes numbers and containers, and names of operations.")
def check_ways_to_reduce() -> None:
    rank, n = here()
    for op in ("sum", "SUM", "Sum", dist.ReduceOp.SUM):
        x = torch.tensor([1.0])
        assert dd.all_reduce(x, op=op) is x
        assert x.item() == n
    assert dd.all_reduce(torch.tensor([1.0]), "avg").item() == 1.0
    assert dd.all_reduce(5, "BXOR") == (5 if n % 2 else 0)
    assert dd.all_reduce(2**80) == n * 2**80
    assert dd.all_reduce({"a": [rank, torch.ones(1)]})["a"][0] == n * (n - 1) // 2
    pending = dd.all_reduce(torch.tensor([2.0]), "avg", async_op=True)
    assert pending.wait().item() == 2.0
    assert pending.is_completed()
    public = {name for name in dir(pending) if not name.startswith("_")}
    assert public == {"wait", "is_completed"}
    with raises(TypeError, "str"):
        dd.all_reduce("abc")
    with raises(OptionsError, "'abc'"):
        dd.all_reduce(torch.ones(1), "abc")
    with raises(OptionsError, "'ABC'"):
        dd.all_reduce(10, op="ABC")


@shows(
    "torch",
    "all_reduce",
    "Refuses sparse tensors, sums of bools and averages of whole numbers.",
    "What cannot be done with a dtype is a `ValueError`.",
)
def check_what_is_not_reduced() -> None:
    with raises(OptionsError, "bool"):
        dd.all_reduce(torch.tensor([True]))
    with raises(OptionsError, "avg"):
        dd.all_reduce(torch.tensor([1]), dist.ReduceOp.AVG)
    with raises(OptionsError, "float32"):
        dd.all_reduce(torch.ones(1), dist.ReduceOp.BAND)
    with raises(OptionsError, "complex64"):
        dd.all_reduce(torch.ones(1, dtype=torch.complex64), dist.ReduceOp.MAX)
    if dist.is_initialized():
        with raises(TypeError, "sparse"):
            dd.all_reduce(torch.ones(2).to_sparse())


@shows("torch", "reduce", "None, and nothing changed, elsewhere.")
@shows("torch", "reduce", "The root is 0 if none is named; no `async_op`.")
def check_reduce_to_the_first() -> None:
    rank, n = here()
    x = torch.tensor([1.0])
    assert (dd.reduce(x) is x) == (rank == 0)
    assert x.item() == (n if rank == 0 else 1)
    assert parameters(dd.reduce) == {"tensor", "dst", "op", "group"}


# --- moving values ------------------------------------------------------------------------------


@shows("ignite", "all_gather", "Ragged first dimensions; `as_list`.")
@shows(
    "ignite",
    "all_gather_tensors_with_shapes",
    "With `as_list=True`; shapes need not be known.",
)
@shows("composer", "all_gather", "Concatenates; a list with `as_list=True`.")
@shows("torch", "all_gather", "Returns; no list to fill.")
@shows("torch", "all_gather", "Concatenates; a list with `as_list=True`.", "No `async_op`.")
def check_gathering_tensors() -> None:
    rank, n = here()
    assert dd.all_gather(torch.full((rank + 1, 2), rank)).shape == (n * (n + 1) // 2, 2)
    parts = dd.all_gather(torch.full((rank + 1, rank + 2, rank + 3), rank), as_list=True)
    assert [list(part.shape) for part in parts] == [[r + 1, r + 2, r + 3] for r in range(n)]
    assert parameters(dd.all_gather) == {"tensor", "group", "as_list"}


@shows(
    "all of them",
    "",
    "A process that is no member of a group is told nothing and warned of nothing: it goes on "
    "with what it has.",
)
@shows("composer", "all_gather_object", "Who is no member gets a list of the own object.")
@shows("torch", "all_gather_object", "Returns; no list to fill.")
def check_who_is_no_member_keeps_what_it_has() -> None:
    rank, n = here()
    if n == 1:
        return
    for group in (dd.new_group([0]), [0]):
        thing = {"rank": rank}
        x = torch.tensor([rank])
        with silent():
            got = dd.all_gather(thing, group)
            tensors = dd.all_gather(x, group)
            assert dd.all_gather(x, group, as_list=True)[0].equal(x)
            assert dd.all_gather_object(thing, group) == [thing]
            assert dd.all_gather(rank, group) == ([0] if rank == 0 else rank)
            assert dd.all_reduce(x, group=group) is x
            assert dd.broadcast(thing, 0, group) == thing
            assert dd.gather(rank, 0, group) == ([0] if rank == 0 else None)
            assert dd.scatter([rank], 0, group) == (0 if rank == 0 else None)
        assert (got is thing) == (rank != 0)
        assert rank or got == [thing]
        assert (tensors is x) == (rank != 0)


@shows("all of them", "", "This costs one small `all_gather`.")
def check_one_small_all_gather_is_added() -> None:
    if not dist.is_initialized():
        return
    asked: list[int] = []
    real = dist.all_gather

    def counted(parts: Any, mine: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.append(mine.numel() * mine.element_size())
        return real(parts, mine, *args, **kwargs)

    with patch.object(dist, "all_gather", counted):
        dd.broadcast(torch.ones(10_000))
        dd.gather(torch.ones(10_000))
    assert len(asked) == 2
    assert max(asked) < 1000


@shows("all of them", "", "A value of up to 512 bytes on the CPU goes along with it.")
def check_small_values_take_one_operation() -> None:
    if not dist.is_initialized():
        return
    asked: list[str] = []

    def counting(name: str) -> Any:
        real = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return real(*args, **kwargs)

        return patch.object(dist, name, counted)

    with counting("all_gather"), counting("broadcast"), counting("gather"), counting("scatter"):
        dd.all_gather(torch.ones(8))
        dd.broadcast(torch.ones(8))
        dd.gather(torch.ones(8))
        dd.scatter([torch.ones(8)] * dd.get_world_size())
        dd.all_gather_object({"x": 1})
    assert asked == ["all_gather"] * 5


@shows(
    "all of them",
    "",
    "`group=` takes a process group, or a list of ranks; of a list a group is made at its first "
    "use, in which every rank of the world takes part.",
)
def check_what_is_no_group_is_named() -> None:
    x = torch.ones(1)
    calls: list[Callable[[Any], Any]] = [
        lambda group: dd.all_reduce(x, group=group),
        lambda group: dd.all_reduce(1, group=group),
        lambda group: dd.reduce(x, group=group),
        lambda group: dd.all_gather(x, group),
        lambda group: dd.all_gather({}, group),
        lambda group: dd.all_gather_object({}, group),
        lambda group: dd.gather(x, group=group),
        lambda group: dd.broadcast(x, group=group),
        lambda group: dd.broadcast_object_list([1], group=group),
        lambda group: dd.scatter([x], group=group),
        lambda group: dd.all_to_all([x], group),
        lambda group: dd.barrier(group),
    ]
    for call in calls:
        for wrong in ("abc", 5, ["a"], {0}, True):
            with raises(OptionsError, repr(wrong)):
                call(wrong)
        if dist.is_initialized():
            with raises(OptionsError, "[99]"):
                call([99])
            with raises(OptionsError, "one rank at least"):
                call([])
            with raises(OptionsError, "no group of this world"):
                call(destroyed())


def destroyed() -> Any:
    """A group that this world does not know."""
    return dist.ProcessGroup(0, 1)


@shows("ignite", "broadcast", "None for receivers without `safe_mode`, too; any object.")
@shows("ignite", "broadcast", "Floats keep all their digits.")
@shows("ignite", "broadcast", "`safe_mode` comes after `group`.")
@shows("composer", "broadcast", "`src` has a default; returns the tensor, too.")
@shows("DI-engine", "broadcast", "`src` for `rank`.", "Alone it gives the value back.")
@shows("torch", "broadcast", "Receivers need not know the shape.")
@shows("torch", "broadcast", "The root is 0 if none is named; no `async_op`.")
def check_broadcasting() -> None:
    rank, _n = here()
    x = torch.ones(2)
    assert dd.broadcast(x) is x
    assert dd.broadcast([0, 1, 2]) == [0, 1, 2]
    path = Path("a", "b")
    for value in (0.1, "abc", path, 10):
        assert dd.broadcast(value if rank == 0 else None) == value
        got = dd.broadcast(value if rank == 0 else 1.2, safe_mode=True)
        assert (got, type(got)) == (value, type(value))
    assert dd.broadcast(torch.ones(2, 3) if rank == 0 else None).shape == (2, 3)
    assert list(inspect.signature(dd.broadcast).parameters) == ["tensor", "src", "group",
                                                               "safe_mode"]  # fmt: skip
    with raises(OptionsError, "group=True"):
        dd.broadcast(x, 0, True)
    with raises(OptionsError, "None"):
        dd.broadcast(None)
    with raises(OptionsError, "None"):
        dd.broadcast(None, safe_mode=True)


@shows("composer", "broadcast_object_list", "Lists that differ in length are an error.")
@shows(
    "torch",
    "broadcast_object_list",
    "The root is 0 if none is named; no `device`.",
    "Takes lists only, all of one length.",
)
def check_lists_of_objects() -> None:
    rank, n = here()
    items = [rank]
    dd.broadcast_object_list(items)
    assert items == [0]
    assert parameters(dd.broadcast_object_list) == {"object_list", "src", "group"}
    with raises(OptionsError, "tuple"):
        dd.broadcast_object_list((1, 2))  # type: ignore[arg-type]
    if n > 1:
        with raises(CollectiveMismatchError, "length"):
            dd.broadcast_object_list([0] * (rank + 1))


@shows("torch", "gather", "Returns; shapes may differ.", "No `async_op`.")
@shows("torch", "scatter", "Returns; shapes may differ.", "No `async_op`.")
@shows("torch", "all_to_all", "Returns; with gloo, too.", "No `async_op`.")
def check_other_ways_of_moving() -> None:
    rank, n = here()
    got = dd.gather(torch.ones(rank + 1))
    assert (got is None) == (rank != 0)
    assert rank or [part.numel() for part in got] == [r + 1 for r in range(n)]
    parts = [torch.ones(r + 1) for r in range(n)]
    assert dd.scatter(parts if rank == 0 else None).numel() == rank + 1
    assert dd.all_to_all([rank] * n) == list(range(n))
    for function in (dd.gather, dd.scatter, dd.all_to_all):
        assert "async_op" not in parameters(function)
    if dist.is_initialized():  # called as torch's are
        with raises(OptionsError, "dst="):
            dd.gather(torch.ones(1), [torch.ones(1)] * n)
        with raises(OptionsError, "group="):
            dd.all_to_all([torch.ones(1)] * n, [torch.ones(1)] * n)


@shows("ignite", "barrier", "Takes a group and `async_op`, too.")
@shows("torch", "barrier", "Nothing without a group.")
def check_barriers() -> None:
    assert dd.barrier([0]) is None
    work = dd.barrier(async_op=True)
    assert (work is None) != dist.is_initialized()
    if work is not None:
        work.wait()


@shows("DI-engine", "synchronize", "Nothing without a GPU.")
def check_synchronize_without_a_gpu() -> None:
    with patch.object(torch.cuda, "is_available", lambda: False):
        assert dd.synchronize() is None


# --- groups -------------------------------------------------------------------------------------


@shows("ignite", "new_group", "All ranks if none are named.", "Takes tuples and ranges, too.")
@shows("torch", "new_group", "Without a process group the list itself.")
@shows("torch", "new_group", "Takes seconds, too.")
@shows("torch", "new_group", "What is no list of ranks is a `ValueError`.")
def check_new_groups() -> None:
    rank, n = here()
    for ranks in (None, tuple(range(n)), range(n)):
        assert dd.all_gather(rank, dd.new_group(ranks)) == list(range(n))
    assert dd.all_gather(rank, dd.new_group(timeout=30)) == list(range(n))
    if not dist.is_initialized():
        assert (dd.new_group([]), dd.new_group([2, 1])) == ([], [2, 1])
        x = torch.ones(1)
        assert dd.all_reduce(x, group=dd.new_group([])) is x
    else:
        with raises(OptionsError, "one rank at least"):
            dd.new_group([])
        with raises(OptionsError, "timeout='soon'"):
            dd.new_group([0], timeout="soon")
        with raises(OptionsError, "[0, 99]"):
            dd.new_group([0, 99])
    for wrong in ("01", 1, ["a", "b"], [0.0], [True]):
        with raises(OptionsError, repr(wrong)):
            dd.new_group(wrong)  # type: ignore[arg-type]


@shows("torch", "split_group", "Another thing: equal parts of the world, by their number.")
@shows("DI-engine", "get_group", "An error with the sizes, not an assertion.")
@shows("DI-engine", "simple_group_split", "Knows rank and world size by itself.")
def check_equal_groups() -> None:
    rank, n = here()
    assert dd.all_gather(rank, dd.get_group(None)) == list(range(n))
    assert dd.all_gather(rank, dd.split_group(n)) == [rank]
    with raises(OptionsError, f"{n} ranks", "7"):
        dd.get_group(7)
    with raises(OptionsError, "split_group"):
        dd.split_group(dist.group.WORLD)  # type: ignore[arg-type]


@shows("torch", "init_device_mesh", "Dimensions by name; one may be -1.")
@shows("torch", "init_device_mesh", "Chooses the type of device.")
@shows("torch", "init_device_mesh", "Sizes that do not fit are a `ValueError`.")
@shows("torch", "init_device_mesh", "Needs a process group, all of which it covers.")
def check_meshes() -> None:
    n = dd.get_world_size()
    if not dist.is_initialized():
        with raises(ProcessGroupError, "initialize"):
            dd.device_mesh(data=1)
        return
    wrong: list[dict[str, Any]] = [{"data": n + 1}, {"data": 0}, {"data": -1, "model": -1}]
    for sizes in [*wrong, {}, {"data": "2"}]:
        with raises(OptionsError, "data="):
            dd.device_mesh(**sizes)
    mesh = dd.device_mesh(data=1, model=-1)
    assert (mesh.mesh_dim_names, mesh.device_type, mesh.size()) == (("data", "model"), "cpu", n)
    if n > 1:
        with raises(OptionsError, f"{n} ranks"):
            dd.device_mesh(data=1)


@shows("torch", "", "A root that is not in the group is a `ValueError` with every backend.")
def check_roots_outside_the_group() -> None:
    rank, n = here()
    if not dist.is_initialized():
        return
    x = torch.ones(1)
    calls: list[Callable[[Any, Any], Any]] = [
        lambda root, group: dd.broadcast(x, root, group),
        lambda root, group: dd.broadcast_object_list([1], root, group),
        lambda root, group: dd.reduce(x, root, group=group),
        lambda root, group: dd.gather(x, root, group),
        lambda root, group: dd.scatter([x] * n, root, group),
    ]
    for call in calls:
        for wrong in (99, -1, None, [x]):
            with raises(OptionsError, "not in the group"):
                call(wrong, None)
        if n > 1 and rank == 0:
            with raises(OptionsError, "=1 is not in the group"):
                call(1, [0])
        elif n > 1:
            call(1, [0])


# --- guards -------------------------------------------------------------------------------------


@shows(
    "all of them",
    "",
    "When the body of a guard raises, the other ranks get a `CollectiveError` that names the rank.",
    "Errors are distsession's own: an `OptionsError` is a `ValueError`, a `ProcessGroupError` and "
    "a `CollectiveError` are a `RuntimeError`.",
)
@shows("ignite", "one_rank_only", "Also a context manager; tells of errors.")
@shows("ignite", "one_rank_first", "Also a decorator; tells of errors.")
@shows("composer", "run_local_rank_zero_first", "Others are told when it raises.")
def check_guards_tell_of_errors() -> None:
    rank = dd.get_rank()
    guards: list[Any] = [
        dd.one_rank_only(with_barrier=True),
        dd.one_rank_first(),
        dd.run_local_rank_zero_first(),
    ]
    for guard in guards:

        @guard
        def fails() -> None:
            raise LookupError("gone")

        def fails_within(guard: Any = guard) -> None:
            with guard as mine:
                if mine is not False:
                    raise LookupError("gone")

        for attempt in (fails, fails_within):
            with raises(CollectiveError if rank else LookupError, "rank 0" if rank else "", "gone"):
                attempt()
    assert issubclass(OptionsError, ValueError)
    assert issubclass(ProcessGroupError, RuntimeError)
    assert issubclass(CollectiveError, RuntimeError)
    for factory in (dd.one_rank_only, dd.one_rank_first):
        with raises(OptionsError, f"@{factory.__name__}()"):
            factory(check_guards_tell_of_errors)  # type: ignore[arg-type]


@shows(
    "composer",
    "local_rank_zero_download_and_wait",
    "With `local=True`; needs a process group, and no file.",
)
@shows("composer", "busy_wait_for_local_rank_zero", "With `local=True`; no file either.")
@shows("composer", "busy_wait_for_local_rank_zero", "The others begin when it is done.")
def check_the_first_of_each_host_goes_ahead() -> None:
    rank, n = here()
    with dd.one_rank_first(local=True):
        before = time.monotonic()
        if rank == 0:
            time.sleep(0.02)
        after = time.monotonic()
    begun, ended = dd.all_gather(before), dd.all_gather(after)
    assert all(begun[r] >= ended[0] for r in range(1, n))


# --- data and model -----------------------------------------------------------------------------


@shows("composer", "get_sampler", "`exact=True`.")
@shows("ignite", "auto_dataloader", "`exact=True`; workers persist.")
@shows("ignite", "auto_dataloader", "Logs only a batch size that cannot be shared equally.")
@shows("ignite", "auto_dataloader", "One warning for a sampler of another place.")
def check_loaders_warn() -> None:
    rank, n = here()
    data = torch.arange(12)
    assert len(dd.get_sampler(data, exact=True)) == len(range(rank, 12, n))
    assert dd.auto_dataloader(data, exact=True, num_workers=2).persistent_workers
    batches = BatchSampler(SequentialSampler(data), 3, drop_last=False)
    with silent():
        own = DistributedSampler(data, num_replicas=n, rank=rank)
        assert n == 1 or dd.auto_dataloader(data, sampler=own).sampler is own
    with logged() as records:
        dd.auto_dataloader(data, batch_size=2 * n)
        dd.auto_dataloader(data, batch_size=2 * n + 1)
    assert len(records) == (n > 1)
    if n == 1:
        with silent():
            dd.auto_dataloader(data, batch_sampler=batches)
        return
    with pytest.warns(UserWarning, match="batch_sampler") as told:
        dd.auto_dataloader(data, batch_sampler=batches)
    assert told[0].filename == __file__
    for place in ((n, (rank + 1) % n), (n + 1, rank), (n + 1, rank + 1)):
        other = DistributedSampler(data, num_replicas=place[0], rank=place[1])
        words = f"rank={place[1]} of num_replicas={place[0]}.*rank {rank} of {n}"
        with pytest.warns(UserWarning, match=words) as told:
            assert dd.auto_dataloader(data, sampler=other).sampler is other
        assert [str(warning.filename) for warning in told] == [__file__]


@shows("ignite", "DistributedProxySampler", "Puts torch's generator back.", "Has a seed.")
@shows("ignite", "DistributedProxySampler", "Needs no process group.")
@shows("ignite", "DistributedProxySampler", "Repeats its first samples where some are missing.")
def check_proxy_samplers() -> None:
    data = list(range(5))
    shares = [dd.DistributedProxySampler(RandomSampler(data), 2, r, seed=1) for r in range(2)]
    state = torch.get_rng_state()
    first, second = (list(share) for share in shares)
    assert torch.equal(state, torch.get_rng_state())
    assert second[-1] == first[0]
    assert sorted([*first, *second[:-1]]) == data
    assert len(dd.DistributedProxySampler(SequentialSampler(data))) == -(-5 // dd.get_world_size())
    wrong: tuple[tuple[Any, str], ...] = (
        (None, "NoneType"),
        (Sampler(), "length"),
        (DistributedSampler(data, 2, 0), "already"),
    )
    for sampler, word in wrong:
        with raises(TypeError, word):
            dd.DistributedProxySampler(sampler, 2, 0)


@shows("ignite", "auto_model", '`strategy="fsdp"`; never `DataParallel`.')
@shows("ignite", "auto_model", "Logs nothing.")
@shows("ignite", "auto_model", "Refuses `device_ids` everywhere.")
def check_models() -> None:
    n = dd.get_world_size()
    with raises(OptionsError, "device_ids"):
        dd.auto_model(torch.nn.Linear(1, 1), device_ids=[0])
    if n == 1:
        model = torch.nn.Linear(1, 1)
        with patch.object(torch.cuda, "device_count", lambda: 2):
            assert dd.auto_model(model) is model
        return
    with logged() as records:
        wrapped = dd.auto_model(torch.nn.Linear(1, 1), find_unused_parameters=True)
    assert records == []
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    assert wrapped.find_unused_parameters
    sharded = dd.auto_model(torch.nn.Linear(4, 4), strategy="fsdp")
    assert not isinstance(sharded, torch.nn.parallel.DistributedDataParallel)
    norm = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with raises(ValueError, "SyncBatchNorm"):
        dd.auto_model(norm, sync_bn=True)
