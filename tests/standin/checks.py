"""What the stand-in has to do, as programs of ranks.

``python -m tests.standin.checks NAME RANKS BACKEND`` forks the ranks after registration, as an
agent does, and ends with their first failure. A rank that hangs is killed when the time is over.
What the classes differ in is in ``class_checks``.
"""

from __future__ import annotations

import copy
import datetime
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tests.standin.register  # noqa: F401

TIMEOUT_S = 100
FOREVER_S = 30
PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT
CHECKS: dict[str, Callable[[int, int], None]] = {}
ENDS: dict[str, int] = {}
"""How rank 0's process has to end, where that is not as usual."""


def check(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CHECKS[function.__name__] = function
    return function


def main(name: str, ranks: int, backend: str = "standin") -> int:
    os.environ["BACKEND"] = backend
    server, port = serve()
    children = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            return run_rank(name, rank, ranks, port)
        children[pid] = rank
    failed = wait_for(children, ENDS.get(name))
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    for rank, reason in failed.items():
        print(f"rank {rank}: {reason}", flush=True)
    return 1 if failed else 0


def serve() -> tuple[int, int]:
    """A store in a process of its own, whose threads no rank inherits: its pid and port."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        signal.alarm(2 * TIMEOUT_S)
        while True:
            signal.pause()
    port = int(os.read(read, 10))
    os.close(read)
    os.close(write)
    return pid, port


def run_rank(name: str, rank: int, ranks: int, port: int) -> int:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), PORT=str(port))
    try:
        torch.standin.set_device(rank)
        CHECKS[name](rank, ranks)
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
        return 1
    return 0


def wait_for(children: dict[int, int], end: int | None = None) -> dict[int, str]:
    deadline = time.monotonic() + TIMEOUT_S
    failed = {}
    while children:
        ended = [pid for pid in children if os.waitid(os.P_PID, pid, PEEK)]
        for pid in ended:
            rank = children.pop(pid)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            right = (0, -signal.SIGKILL) if rank or end is None else (end,)
            if code not in right:
                failed[rank] = f"ended with {code}"
        if time.monotonic() > deadline:
            for pid, rank in children.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                failed[rank] = "hung"
            break
        time.sleep(0.01)
    return failed


def join() -> dist.TCPStore:
    """Init the default group of all ranks; give a store that they share."""
    port, rank, size = (int(os.environ[name]) for name in ("PORT", "RANK", "WORLD_SIZE"))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = os.environ["BACKEND"]
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size
    )
    return store


def new_gloo_group() -> Any:
    """A group of gloo. torch would bind it to the device of the default group."""
    world = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(backend="gloo")
    finally:
        world.bound_device_id = bound


def close(a: torch.Tensor, b: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(a.cpu(), b.cpu(), **tolerance)


def say(store: dist.TCPStore, what: str) -> None:
    store.set(what, "1")


def hear(store: dist.TCPStore, what: str) -> None:
    store.wait([what], datetime.timedelta(seconds=FOREVER_S))


# ---- Numbers ----


def all_collectives(
    group: Any, device: str, rank: int, size: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Every collective of torch, once, on numbers that any type can hold."""

    def make(*shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        values = torch.randint(1, 4, shape, generator=generator)
        return values.to(dtype).to(device)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    results = {}
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    if dtype is not torch.bool:
        ops["product"] = dist.ReduceOp.PRODUCT
    for name, op in ops.items():
        results[f"all_reduce {name}"] = x = make(5, 3)
        dist.all_reduce(x, op, group=group)
    for root in range(size):
        results[f"broadcast {root}"] = x = make(70_000, seed=root)
        dist.broadcast(x, root, group=group)
        x = make(7)
        dist.reduce(x, root, group=group)
        if root == rank:
            results[f"reduce {root}"] = x
        parts = [empty(4) for _ in range(size)] if root == rank else None
        dist.gather(make(4), parts, dst=root, group=group)
        if parts:
            results[f"gather {root}"] = torch.cat(parts)
        parts = [make(3, seed=i) for i in range(size)] if root == rank else None
        results[f"scatter {root}"] = x = empty(3)
        dist.scatter(x, parts, src=root, group=group)
    parts = [empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, make(2, 3), group=group)
    results["all_gather"] = torch.cat(parts)
    results["all_gather_into_tensor"] = x = empty(size * 6)
    dist.all_gather_into_tensor(x, make(6), group=group)
    results["reduce_scatter"] = x = empty(4)
    dist.reduce_scatter(x, [make(4, seed=i) for i in range(size)], group=group)
    results["reduce_scatter_tensor"] = x = empty(5)
    dist.reduce_scatter_tensor(x, make(5 * size), group=group)
    results["all_to_all_single"] = x = empty(2 * size)
    dist.all_to_all_single(x, make(2 * size), group=group)
    results["uneven"] = x = empty(size * (rank + 1), 2)
    dist.all_to_all_single(
        x,
        make(size * (size + 1) // 2, 2),
        [rank + 1] * size,
        [i + 1 for i in range(size)],
        group=group,
    )
    parts = [empty(2) for _ in range(size)]
    dist.all_to_all(parts, [make(2, seed=i) for i in range(size)], group=group)
    results["all_to_all"] = torch.cat(parts)
    results["big"] = x = make(300_001)
    dist.all_reduce(x, group=group)
    return results


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@check
def numbers(rank: int, size: int) -> None:
    """The collectives give what gloo gives."""
    join()
    gloo = new_gloo_group()
    for dtype in DTYPES:
        # gloo has neither a bool nor reduce_scatter and all_to_all for all types.
        through = torch.float64 if dtype.is_floating_point else torch.int64
        got = all_collectives(None, "standin", rank, size, dtype)
        wanted = all_collectives(gloo, "cpu", rank, size, through)
        for name, value in got.items():
            if dtype is torch.bool:
                assert value.dtype is dtype
            else:
                assert value.dtype is dtype
                close(value, wanted[name].to(dtype), msg=f"{name} {dtype}")  # type: ignore[arg-type]
    x = torch.full((3,), float(rank), device="standin")
    dist.all_reduce(x, dist.ReduceOp.AVG)
    close(x, torch.full((3,), (size - 1) / 2))
    x = torch.ones(3, device="standin")
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    close(x, torch.full((3,), size / 2))
    x = torch.tensor([rank == 0], device="standin")
    dist.all_reduce(x)
    assert x.item() is True
    dist.barrier()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": i} for i in range(size)]
    dist.destroy_process_group()


@check
def asynchronous(rank: int, size: int) -> None:
    """Works, futures, coalescing, rings, groups of some ranks."""
    join()
    tensors = [torch.full((1000,), float(rank + i), device="standin") for i in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    base = sum(range(size))
    for i, tensor in enumerate(tensors):
        close(tensor, torch.full((1000,), float(base + i * size)))
    assert all(work.is_completed() and work.is_success() for work in works)

    # ProcessGroupNCCL has no work for what is on the current stream already; the others have one.
    options = dist.AllreduceOptions()
    options.asyncOp = False
    x = torch.ones(10, device="standin")
    given = dist.distributed_c10d._get_default_group().allreduce([x], options)
    if os.environ["BACKEND"] == "standin":
        assert given is None
    else:
        given.wait()
    close(x, torch.full((10,), float(size)))

    x = torch.ones(10, device="standin")
    work = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    close(doubled.wait(), torch.full((10,), 2.0 * size))

    following, previous = (rank + 1) % size, (rank - 1) % size
    out = torch.full((100_000,), float(rank), device="standin")
    into = torch.zeros(100_000, device="standin")
    ops = [dist.P2POp(dist.isend, out, following), dist.P2POp(dist.irecv, into, previous)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    close(into, torch.full((100_000,), float(previous)))
    if size > 1:
        for _ in range(3):
            into.zero_()
            if rank == 0:
                dist.send(out, following)
                dist.recv(into, previous)
            else:
                dist.recv(into, previous)
                dist.send(out, following)
            close(into, torch.full((100_000,), float(previous)))

    many = [torch.full((i + 1,), float(rank), device="standin") for i in range(4)]
    with dist._coalescing_manager(device=torch.device("standin", rank), async_ops=True) as manager:
        for tensor in many:
            dist.all_reduce(tensor)
    manager.wait()
    for i, tensor in enumerate(many):
        close(tensor, torch.full((i + 1,), float(base)))
    pieces = [torch.zeros(2 * size, device="standin") for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("standin", rank)):
        for i, piece in enumerate(pieces):
            dist.all_gather_into_tensor(piece, torch.full((2,), float(rank + i), device="standin"))
    for i, piece in enumerate(pieces):
        close(piece, torch.arange(size).repeat_interleave(2).float() + i)
    with dist._coalescing_manager(device=torch.device("standin", rank)):
        for piece in pieces:
            dist.broadcast(piece, 0)

    evens = list(range(0, size, 2))
    group = dist.new_group(evens)
    if rank in evens:
        x = torch.ones(4, device="standin")
        dist.all_reduce(x, group=group)
        close(x, torch.full((4,), float(len(evens))))
    dist.barrier()
    dist.destroy_process_group()


@check
def split(rank: int, size: int) -> None:
    """A group of half the ranks, of the group that is there."""
    port = int(os.environ["PORT"])
    dist.init_process_group(
        os.environ["BACKEND"],
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=size,
        device_id=torch.device("standin", rank),
    )
    half = size // 2
    halves = [list(range(half)), list(range(half, size))]
    group = dist.split_group(split_ranks=halves)
    x = torch.full((3,), float(rank), device="standin")
    dist.all_reduce(x, group=group)
    close(x, torch.full((3,), float(sum(halves[rank >= half]))))
    dist.destroy_process_group()


# ---- The device ----


@check
def tensors(rank: int, size: int) -> None:
    """What programs do with tensors gives what it gives on the CPU."""
    import io

    torch.manual_seed(0)
    x = torch.randn(6, 5)
    y = x.to("standin")
    same: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t @ t.t(),
        lambda t: t[t > 0],
        lambda t: t[1:, ::2].contiguous(),
        lambda t: torch.nonzero(t > 0),
        lambda t: t.softmax(-1).log().sum(0, keepdim=True),
        lambda t: t[torch.tensor([0, 2]).to(t.device)],
        lambda t: torch.cat([t, t.t().reshape(6, 5)]).view(-1).sort()[0],
        lambda t: torch.stack(t.chunk(2)).to(torch.bfloat16).float(),
        lambda t: torch.where(t > 0, t, 0.5),
        lambda t: t.clone().index_add_(0, torch.tensor([1, 1]).to(t.device), t[:2]),
        lambda t: torch.add(t, 1, out=torch.empty(0, device=t.device)),
        lambda t: t.unfold(1, 2, 1).double(),
        lambda t: torch.view_as_real(torch.view_as_complex(t.reshape(5, 3, 2)) * 1j),
        lambda t: torch.arange(5, device=t.device) + t.new_full((5,), 2),
        lambda t: torch.linalg.svdvals(t),
        lambda t: t.view(torch.int32) + 1,
        lambda t: t.std() + t.var(0).max() + t.mean(),
    ]
    for i, function in enumerate(same):
        torch.testing.assert_close(function(y).cpu(), function(x), msg=str(i))
    assert y.is_standin
    assert y.device == torch.device("standin", 0)
    assert "device='standin:0'" in repr(y)
    assert y.to("standin:1").device.index == 1
    file = io.BytesIO()
    torch.save({"y": y}, file)
    file.seek(0)
    close(torch.load(file)["y"], x)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    close(pinned.to("standin", non_blocking=True), x)
    pinned.zero_().copy_(y, non_blocking=True)
    torch.accelerator.synchronize()
    close(pinned, x)
    torch.manual_seed(7)
    first = torch.rand(4, device="standin")
    assert not torch.equal(first, torch.rand(4, device="standin"))
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(4, device="standin"))
    state = torch.standin.get_rng_state()
    dropped = F.dropout(torch.ones(100, device="standin"))
    torch.standin.set_rng_state(state)
    assert torch.equal(dropped, F.dropout(torch.ones(100, device="standin")))
    q = torch.randn(2, 4, 8, 16, device="standin", requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert q.grad is not None
    before = torch.standin.memory_allocated()
    z = torch.empty(1 << 20, device="standin")
    assert torch.standin.memory_allocated() - before == 4 << 20
    del z
    assert torch.standin.memory_allocated() == before
    assert torch.standin.max_memory_allocated() >= before + (4 << 20)
    torch.standin.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 62, dtype=torch.int8, device="standin")


@check
def streams(rank: int, size: int) -> None:
    """Streams, events, and the generic interface for accelerators."""
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("standin")
    assert torch.accelerator.device_count() == 8
    torch.accelerator.set_device_index(3)
    assert torch.standin.current_device() == 3
    assert torch.ones(1, device="standin").device.index == 3
    side = torch.standin.Stream()
    done = torch.standin.Event(enable_timing=True)
    start = torch.standin.Event(enable_timing=True)
    start.record()
    with torch.standin.stream(side):
        assert torch.standin.current_stream() == side
        x = torch.ones(1000, device="standin")
        for _ in range(100):
            x.mul_(1.01)
        done.record()
    torch.standin.current_stream().wait_event(done)
    x.record_stream(torch.standin.current_stream())
    assert abs((x + 0).mean().item() - 1.01**100) < 1e-3
    done.synchronize()
    assert done.query()
    assert start.elapsed_time(done) > 0
    side.synchronize()
    with torch.Stream("standin"):
        assert torch.standin.current_stream() != torch.standin.default_stream()
    with torch.standin.device(5):
        assert torch.standin.current_device() == 5
    assert torch.standin.current_device() == 3


# ---- Training ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(4 * 36, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def trained(model: nn.Module, device: str, rank: int, steps: int = 5) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(8, 1, 8, 8, generator=generator).to(device)
        y = torch.randint(0, 10, (8,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


@check
def ddp(rank: int, size: int) -> None:
    """DDP trains as it does with gloo."""
    join()
    gloo = new_gloo_group()
    torch.manual_seed(0)
    ours = Net()
    theirs = copy.deepcopy(ours)
    on_standin = nn.parallel.DistributedDataParallel(
        ours.to("standin"), device_ids=[rank], bucket_cap_mb=0.005
    )
    on_cpu = nn.parallel.DistributedDataParallel(theirs, process_group=gloo, bucket_cap_mb=0.005)
    losses = trained(on_standin, "standin", rank), trained(on_cpu, "cpu", rank)
    assert abs(losses[0] - losses[1]) < 1e-5, losses
    for a, b in zip(on_standin.parameters(), on_cpu.parameters(), strict=True):
        close(a.detach(), b.detach(), atol=1e-5, rtol=1e-5)
    dist.destroy_process_group()


@check
def fsdp(rank: int, size: int) -> None:
    """FSDP2 trains as DDP on gloo does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join()
    gloo = new_gloo_group()
    mesh = init_device_mesh("standin", (size,))
    torch.manual_seed(0)
    model = Net()
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=gloo)
    model.to("standin")
    fully_shard(model.features, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = trained(model, "standin", rank), trained(reference, "cpu", rank)
    assert abs(losses[0] - losses[1]) < 1e-4, losses
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        close(a.full_tensor().detach(), b.detach(), atol=1e-4, rtol=1e-4)  # type: ignore[attr-defined]
    dist.destroy_process_group()


# ---- Waiting, and being freed ----


class Counter:
    """Another thread of Python, which shows that the interpreter's lock is free."""

    def __init__(self) -> None:
        self.count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.count += 1
            time.sleep(0.001)


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, outcome


def warm_up() -> None:
    dist.all_reduce(torch.ones(1, device="standin"))
    torch.standin.synchronize()


@check
def missing_peer(rank: int, size: int) -> None:
    """wait() returns, .item() blocks without the lock, abort() frees it, the device goes on."""
    store = join()
    warm_up()
    if rank > 0:
        hear(store, "done")
        return
    x = torch.ones(4, device="standin")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert not work.is_completed()
    y = x * 2  # enqueued behind it
    counter = Counter()
    thread, outcome = in_thread(lambda: y.sum().item())
    before = counter.count
    deadline = time.monotonic() + FOREVER_S
    while counter.count < before + 100:
        assert time.monotonic() < deadline, "the interpreter's lock is held"
        time.sleep(0.01)
    assert thread.is_alive()
    assert not work.is_completed()
    dist.distributed_c10d._get_default_group().abort()
    thread.join(FOREVER_S)
    assert not thread.is_alive()
    assert isinstance(outcome[0], float), outcome
    assert work.is_completed()
    assert not work.is_success()
    assert (torch.ones(3, device="standin") + 1).sum().item() == 6
    torch.standin.synchronize()
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="communicator was aborted on rank 0"):
            dist.all_reduce(x)
    say(store, "done")


@check
def synchronous_hang(rank: int, size: int) -> None:
    """A collective that is not async runs on the current stream; a fallback on it waits, too."""
    store = join()
    warm_up()
    if rank > 0:
        hear(store, "done")
        return
    x = torch.ones(4, device="standin")
    dist.all_reduce(x)  # returns at once
    threads = []
    for blocks in (torch.standin.synchronize, lambda: x.cpu(), lambda: torch.nonzero(x), x.tolist):
        threads.append(in_thread(blocks)[0])
        threads[-1].join(0.2)
        assert threads[-1].is_alive(), blocks
    other = torch.standin.Stream()
    with torch.standin.stream(other):
        assert torch.ones(2, device="standin").sum().item() == 2  # other streams go on
    dist.distributed_c10d._abort_process_group()
    torch.standin.synchronize()
    assert torch.ones(2, device="standin").sum().item() == 2
    for thread in threads:  # one that comes out of C++ when Python ends would end the process
        thread.join(FOREVER_S)
        assert not thread.is_alive()
    say(store, "done")


@check
def lonely_init(rank: int, size: int) -> None:
    """A communicator whose members do not come: the call blocks, abort() ends it."""
    store = join()
    if rank > 0:
        hear(store, "done")
        return
    counter = Counter()
    thread, outcome = in_thread(lambda: dist.all_reduce(torch.ones(1, device="standin")))
    before = counter.count
    deadline = time.monotonic() + FOREVER_S
    while counter.count < before + 200:
        assert time.monotonic() < deadline, "the interpreter's lock is held"
        time.sleep(0.01)
    assert thread.is_alive()
    dist.distributed_c10d._get_default_group().abort()
    thread.join(FOREVER_S)
    assert "NCCL communicator was aborted on rank 0." in str(outcome[0]), outcome
    say(store, "done")


@check
def first_of_its_kind(rank: int, size: int) -> None:
    """The members are connected for each kind of operation: that call blocks, abort() ends it."""
    store = join()
    warm_up()
    if rank > 0:
        hear(store, "done")
        return
    thread, outcome = in_thread(lambda: dist.broadcast(torch.ones(1, device="standin"), 0))
    thread.join(0.3)
    assert thread.is_alive()
    dist.distributed_c10d._get_default_group().abort()
    thread.join(FOREVER_S)
    assert "NCCL communicator was aborted on rank 0." in str(outcome[0]), outcome
    say(store, "done")


@check
def abort_of_another(rank: int, size: int) -> None:
    """An abort waits for what other communicators have on the device, until that is aborted."""
    store = join()
    warm_up()
    other = dist.new_group()
    dist.all_reduce(torch.ones(1, device="standin"), group=other)
    torch.standin.synchronize()
    if rank > 0:
        hear(store, "done")
        return
    dist.all_reduce(torch.ones(1, device="standin"), group=other)
    thread, _ = in_thread(dist.distributed_c10d._get_default_group().abort)
    thread.join(0.3)
    assert thread.is_alive()
    other.abort()
    thread.join(FOREVER_S)
    assert not thread.is_alive()
    say(store, "done")


@check
def time_limit(rank: int, size: int) -> None:
    """A work past its limit is said to be over, and the device goes on waiting."""
    store = join()
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.2))
    dist.all_reduce(torch.ones(1, device="standin"), group=group)
    torch.standin.synchronize()
    if rank > 0:
        hear(store, "done")
        dist.all_reduce(torch.ones(1, device="standin"), group=group)
        torch.standin.synchronize()
        return
    x = torch.ones(1, device="standin")
    work = dist.all_reduce(x, group=group, async_op=True)
    assert not work.is_completed()
    time.sleep(0.4)
    assert work.is_completed()
    assert "Watchdog caught collective operation timeout" in str(work.exception())
    thread, outcome = in_thread(lambda: torch.standin.synchronize())
    thread.join(0.2)
    assert thread.is_alive()
    say(store, "done")
    thread.join(FOREVER_S)
    assert outcome == [None], outcome  # it has waited, and nothing was raised
    assert x.item() == size


@check
def mismatch(rank: int, size: int) -> None:
    """Sizes and kinds that differ give rubbish or a hang, and break nothing else."""
    store = join()
    warm_up()
    x = torch.ones(1000 * (rank + 1), device="standin")
    y = torch.ones(200_000, device="standin")
    dist.broadcast(y, 0)  # or the calls themselves would wait
    dist.all_gather_into_tensor(torch.ones(200_000 * size, device="standin"), y)
    torch.standin.synchronize()
    dist.all_reduce(x, async_op=True)
    if rank:
        dist.broadcast(y, 0, async_op=True)
    else:
        dist.all_gather_into_tensor(torch.ones(200_000 * size, device="standin"), y, async_op=True)
    time.sleep(0.5)
    store.add("waited", 1)
    while int(store.add("waited", 0)) < size:
        time.sleep(0.01)
    dist.distributed_c10d._abort_process_group()
    torch.standin.synchronize()
    assert torch.ones(2, device="standin").sum().item() == 2


@check
def dead_peer(rank: int, size: int) -> None:
    """A death is not noticed, unless asked for; the error frees nothing."""
    store = join()
    warm_up()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(1, device="standin"), async_op=True)
    time.sleep(0.5)
    assert not work.is_completed()
    os.environ["DISTSESSION_STANDIN_REMOTE_ERROR_S"] = "0.2"
    deadline = time.monotonic() + FOREVER_S
    while not work.is_completed():
        assert time.monotonic() < deadline, "no remote error"
        time.sleep(0.01)
    with pytest.raises(dist.DistBackendError, match="ncclRemoteError"):
        work.wait(datetime.timedelta(seconds=FOREVER_S))
    store.set(f"over {rank}", "1")
    torch.standin.synchronize()


@check
def order(rank: int, size: int) -> None:
    """Two groups on one stream, used in another order on another rank: a deadlock, as NCCL's."""
    os.environ["DISTSESSION_STANDIN_ONE_STREAM"] = "1"
    store = join()
    other = dist.new_group()
    warm_up()
    for group in (None, other):
        dist.all_reduce(torch.ones(1, device="standin"), group=group)
    torch.standin.synchronize()
    groups = [None, other] if rank == 0 else [other, None]
    big = [torch.ones(1_000_000, device="standin") for _ in range(2)]
    works = [
        dist.all_reduce(x, group=group, async_op=True) for x, group in zip(big, groups, strict=True)
    ]
    time.sleep(1)
    assert not any(work.is_completed() for work in works)
    store.add("seen", 1)
    while int(store.add("seen", 0)) < size:
        time.sleep(0.01)
    for group in (dist.distributed_c10d._get_default_group(), other):
        group.abort()
    torch.standin.synchronize()


@check
def time_out(rank: int, size: int) -> None:
    """Only a wait with a time-out of its own raises; nothing ends the process."""
    store = join()
    warm_up()
    if rank > 0:
        hear(store, "done")
        return
    work = dist.all_reduce(torch.ones(1, device="standin"), async_op=True)
    with pytest.raises(dist.DistBackendError, match="timed out"):
        work.wait(datetime.timedelta(seconds=0.3))
    torch.standin.synchronize()
    say(store, "done")


@check
def exit_while_hung(rank: int, size: int) -> None:
    """A process ends at once, whatever its streams wait for."""
    store = join()
    warm_up()
    if rank == 0:
        dist.all_reduce(torch.ones(4, device="standin"))
        y = torch.ones(4, device="standin") * 2
        in_thread(lambda: y.cpu())
        time.sleep(0.2)
        say(store, "done")
        return
    hear(store, "done")


@check
def broken(rank: int, size: int) -> None:
    """A device-side error is sticky."""
    x = torch.ones(3, device="standin")
    index = torch.tensor([7], device="standin")
    torch.standin.synchronize()
    x.index_select(0, index)  # as on a GPU: the kernel finds it, not the call
    for use in (torch.standin.synchronize, lambda: x + 1, x.cpu, lambda: x.sum().item()):
        with pytest.raises(torch.AcceleratorError, match="sticky"):
            use()
    other = torch.ones(3, device="standin:7")
    assert other.sum().item() == 3
    torch.standin._break("standin:7")
    with pytest.raises(torch.AcceleratorError):
        other.cpu()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
