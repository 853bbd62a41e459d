"""What has to hold on a backend that waits on a device, each as a function of a session.

A check returns what there is to say of it, and raises where something does not hold. It leaves the
session as it would be used: the next one goes on with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from distsession import RunError, RunInterrupt, Session
from distsession.display.render import Bundle
from distsession.errors import CollectiveHangError, CollectiveMismatchError
from distsession.kernel.output import Output
from tests.gpu import gpt
from tests.gpu.target import Target
from tests.until import Press, until

LABEL = "In[7]"
"""The cell that every check's code seems to be."""
GRACE_S = 1.0
"""Seconds after which a deadlock is said to be one; the default waits longer."""
END_S = 5.0
"""Seconds that processes may take to be gone."""


class SkippedError(Exception):
    """Why something is not tried here."""


class FailedError(AssertionError):
    """What does not hold."""


class Shown(Output):
    """Keeps what runs show, so that the report has only what is looked at.

    Attributes:
        values: Of a cell's last expression, by rank, as text.
    """

    def __init__(self) -> None:
        self.values: dict[int, str] = {}

    def show(self, shown: dict[int, Bundle]) -> None:
        self.values = {rank: str(data["text/plain"]) for rank, (data, _) in shown.items()}


class Heard(logging.Handler):
    """What a logger is told within a block.

    Args:
        name: Of the logger.
    """

    def __init__(self, name: str):
        super().__init__()
        self._logger = logging.getLogger(name)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()

    def __enter__(self) -> Heard:
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


class Bed:
    """A session on a target, started when it is first needed.

    Args:
        target: Where.
        steps: For how long programs train.

    Attributes:
        kind: torch's class of the backend, once there was a session.
        shown: What the last run of :meth:`run` has shown.
    """

    def __init__(self, target: Target, steps: int = 200):
        self.target = target
        self.steps = steps
        self.current: Session | None = None
        self.kind = ""
        self.shown = Shown()

    @property
    def session(self) -> Session:
        if self.current is None:
            self.current = self.start()
            self.kind = self.current.infos[0].backend_class
        return self.current

    def start(self, ranks: int | None = None, **options: Any) -> Session:
        """Another session on the target."""
        given = {"hang_grace": GRACE_S, "threads": 1, **self.target.options, **options}
        given["output"] = lambda: self.shown
        if ranks is not None and "devices" in given:
            given["devices"] = given["devices"][:ranks]
        return Session(self.target.ranks if ranks is None else ranks, **given)

    def close(self) -> None:
        """End the session; the next check starts another."""
        session, self.current = self.current, None
        if session is not None:
            session.close()

    def run(self, code: str) -> None:
        """On all ranks."""
        self.shown.values = {}
        self.session.execute(code, label=LABEL)

    def stop(self, code: str) -> float:
        """Run what never ends, and stop it once no rank gets further.

        Returns:
            Seconds from there until a collective has worked.
        """
        with (
            Press(self.session, self.session.interrupt) as pressed,
            contextlib.suppress(RunInterrupt),
        ):
            self.run(code)
            raise FailedError("what never ends has ended")
        self.works()
        return time.monotonic() - pressed.pressed_at

    def fails(self, code: str) -> RunError:
        """Run what fails; nobody shows what was computed of it."""
        try:
            self.run(code)
        except RunError as error:
            expect(not self.shown.values, f"cut off, and yet a value: {self.shown.values}")
            return error
        raise FailedError("what should fail has gone through")

    def works(self) -> None:
        """A collective comes to the right number on all ranks."""
        self.session.execute(PROBE)
        values = dict(self.session.evaluate("_probe"))
        right = set(values.values()) == {float(self.session.world_size)}
        expect(right, f"the next all_reduce gave {values}")


PROBE = """
_probe = torch.ones(4, device=device)
dist.all_reduce(_probe)
_probe = _probe[0].item()
"""


def expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise FailedError(otherwise)


def expect_text(text: object, *parts: str) -> None:
    for part in parts:
        expect(re.search(part, str(text)), f"no {part!r} in: {text}")


Function = Callable[[Bed], str]


@dataclass(frozen=True)
class Check:
    """One thing that has to hold.

    Attributes:
        name: In a few words.
        run: Tries it.
        ranks: How many it takes.
        limit_s: Seconds after which it counts as stuck.
        needs_device: It is of no use where ranks wait on the CPU.
    """

    name: str
    run: Function
    ranks: int = 2
    limit_s: float = 60.0
    needs_device: bool = True


CHECKS: list[Check] = []
PROGRAM: dict[str, Any] = {"ranks": 4, "limit_s": 400.0, "needs_device": False}


def check(name: str, **about: Any) -> Callable[[Function], Function]:
    """Let a function be one of the checks."""

    def add(function: Function) -> Function:
        CHECKS.append(Check(name, function, **about))
        return function

    return add


# --- start, and what goes right -------------------------------------------------------------------


@check("start", ranks=1, limit_s=120.0)
def start(bed: Bed) -> str:
    began = time.monotonic()
    infos = bed.session.infos
    took = time.monotonic() - began
    expect({i.backend for i in infos} == {bed.target.backend}, f"backends {infos}")
    expect({i.device.device.partition(":")[0] for i in infos} == {bed.target.device}, f"{infos}")
    bed.works()
    kinds = bed.session.evaluate("type(dist.group.WORLD).__name__")
    expect(set(dict(kinds).values()) == {"SwappableGroup"}, f"the world is a {kinds}")
    places = ", ".join(info.device.device for info in infos)
    return f"{len(infos)} ranks in {took:.1f} s, on {places}"


COLLECTIVES = """
import warnings; warnings.simplefilter("ignore")  # newer torch has other names for two of them
n = world_size
mine = torch.arange(4., device=device) + rank
total = mine.clone(); dist.all_reduce(total)
wide = torch.empty(4 * n, device=device); dist.all_gather_into_tensor(wide, mine)
part = torch.empty(4, device=device); dist.reduce_scatter_tensor(part, wide)
first = mine.clone(); dist.broadcast(first, 0)
turned = torch.empty(n, device=device)
dist.all_to_all_single(turned, torch.arange(float(n), device=device) + 10 * rank)
handles = [dist.all_reduce(torch.ones(1000, device=device), async_op=True) for _ in range(200)]
for handle in handles:
    handle.wait()
dist.barrier()
torch.accelerator.synchronize()
numbers = [t.tolist() for t in (total, wide, part, first, turned)]
"""


@check("collectives give the right numbers", ranks=1)
def collectives(bed: Bed) -> str:
    n = bed.session.world_size
    bed.run(COLLECTIVES)
    for rank, numbers in bed.session.evaluate("numbers").items():
        wide = [float(i + r) for r in range(n) for i in range(4)]
        expected = [
            [float(n * i + sum(range(n))) for i in range(4)],
            wide,
            [n * value for value in wide[4 * rank : 4 * rank + 4]],
            [0.0, 1.0, 2.0, 3.0],
            [float(10 * other + rank) for other in range(n)],
        ]
        expect(numbers == expected, f"rank {rank} has {numbers}, expected {expected}")
    return "all_reduce, gather, scatter, broadcast, all_to_all, 200 asynchronous ones, barrier"


@check("an asynchronous handle is torch's own, and nobody waits for it")
def handles(bed: Bed) -> str:
    bed.run(
        "import time, os\n"
        "if rank == 1: time.sleep(0.5)\n"
        "t = torch.ones(4, device=device)\n"
        "began = time.monotonic(); work = dist.all_reduce(t, async_op=True); work.wait()\n"
        "issued = time.monotonic() - began\n"
        "done = t[0].item()"
    )
    kinds = set(dict(bed.session.evaluate("type(work).__module__")).values())
    expect(not any("distsession" in kind for kind in kinds), f"handles are of {kinds}")
    issued = max(dict(bed.session.evaluate("issued")).values())
    expect(issued < 0.4, f"to issue and order it took {issued:.2f} s")
    return f"issued and ordered in at most {1e3 * issued:.1f} ms while rank 1 slept 500 ms"


@check("tensors of the device as results, pushes and between ranks", ranks=1)
def moving(bed: Bed) -> str:
    session = bed.session
    session.execute("big = torch.arange(10_000_000., device=device) + rank; mix = {'a': [big[:3]]}")
    for rank, big in session.pull("big").items():
        expect(big.device.type == "cpu" and big.numel() == 10_000_000, f"rank {rank}: {big.device}")
        expect(big[-1].item() == 9_999_999.0 + rank, f"rank {rank}: the end is {big[-1]}")
    mixed = session.evaluate("mix")[0]["a"][0]
    expect(mixed.tolist() == [0.0, 1.0, 2.0], f"a nested one arrived as {mixed}")
    session.push(weights=torch.arange(1_000_000.0))
    sums = session.evaluate("weights.to(device).sum().item() == weights.sum().item()")
    expect(set(dict(sums).values()) == {True}, "what was pushed is another on the device")
    session.execute("part = torch.full((3, 2), float(rank), device=device)")
    whole = session.gather("part")
    expect(whole.shape == (3 * session.world_size, 2), f"gathered {whole.shape}")
    expect(whole[-1].tolist() == [session.world_size - 1.0] * 2, f"gathered {whole}")
    session.execute("del big, mix, weights, part")
    return "40 MB from each rank, 4 MB to each, gathered"


BORROWED = "__import__('distsession.engine.device_ipc').engine.device_ipc.borrowed_bytes()"
"""The bytes that a rank has copied from the devices of others, past the host's memory."""


@check("a replaced rank gets tensors of another one, from device to device")
def restored(bed: Bed) -> str:
    session = bed.session
    session.execute("state = torch.arange(16_000_000., device=device) + rank; tail = state[-3:]")
    free = session[0].evaluate("torch.accelerator.memory_allocated()")[0]
    with Heard("distsession") as heard:
        began = time.monotonic()
        session.restart([1])
        plain = time.monotonic() - began
        session.restart([1], restore=["state", "tail"])
        took = time.monotonic() - began - 2 * plain
    same = "(state.device == device, state.double().sum().item(), tail.tolist())"
    expected, found = session[0].evaluate(same)[0], session[1].evaluate(same)[1]
    expect(found == expected, f"restored: {found}, of {expected}")
    borrowed = session[1].evaluate(BORROWED)[1]
    expect(borrowed == 64_000_000, f"it went through the host's memory. {heard.text}")
    kept = session[0].evaluate("torch.accelerator.memory_allocated()")[0]
    expect(kept <= free, f"rank 0 holds {kept - free} bytes more than before")
    session[:2].execute("del state, tail")
    bed.works()
    return f"64 MB from rank 0 to rank 1 in {1e3 * took:.0f} ms more than a restart without"


@check("what cannot go from device to device goes through the host's memory")
def restored_by_the_host(bed: Bed) -> str:
    session = bed.start(2, device_ipc="off")
    with contextlib.closing(session):
        session.execute("state = torch.full((300_000,), rank + 1., device=device)")
        session.restart([1], restore="state")
        found = session[1].evaluate(f"(state.device == device, state.sum().item(), {BORROWED})")[1]
    expect(found == (True, 300_000.0, 0), f"restored: {found}")
    return "1.2 MB from rank 0 to rank 1"


# --- what does not match --------------------------------------------------------------------------

MISMATCH = (
    "t = torch.ones(3 + (rank == 1), device=device)\ndist.all_reduce(t{group})\nt.sum().item()"
)


@check("a mismatch in a group's first operation: nothing begins")
def first_mismatch(bed: Bed) -> str:
    bed.run("fresh = dist.new_group()")
    error = bed.fails(MISMATCH.format(group=", group=fresh"))
    expect(isinstance(error.first, CollectiveMismatchError), f"it is {error.first!r}")
    expect_text(error, "rank 1 called all_reduce of group .* with float32 .4.", "line 2")
    values = bed.session.evaluate("t.sum().item()")
    expect(all(v == 3 + (r == 1) for r, v in values.items()), f"tensors changed: {values}")
    bed.works()
    return str(error).partition("\n")[0]


@check("a mismatch later: seen by who comes later, and no rank stays behind")
def later_mismatch(bed: Bed) -> str:
    bed.works()
    error = bed.fails(MISMATCH.format(group=""))
    expect(isinstance(error.first, CollectiveMismatchError), f"it is {error.first!r}")
    expect_text(error, "rank 1 called all_reduce with float32 .4.", "line 2")
    bed.works()
    return str(error).partition("\n")[0]


@check('check="strict": every mismatch before anything begins', limit_s=120.0)
def strict(bed: Bed) -> str:
    other = Bed(bed.target)
    with bed.start(check="strict") as session:
        other.current = session
        other.works()
        error = other.fails(MISMATCH.format(group=""))
        expect(isinstance(error.first, CollectiveMismatchError), f"it is {error.first!r}")
        values = session.evaluate("t.sum().item()")
        expect(all(v == 3 + (r == 1) for r, v in values.items()), f"tensors changed: {values}")
        other.works()
    return "no tensor changed"


# --- what never ends ------------------------------------------------------------------------------


@check("a certain deadlock: ranks in .item() wait for one that has finished")
def deadlock(bed: Bed) -> str:
    bed.works()
    began = time.monotonic()
    try:
        bed.run(
            "t = torch.ones(3, device=device)\nif rank != 1: dist.all_reduce(t)\nt.sum().item()"
        )
    except CollectiveHangError as error:
        took = time.monotonic() - began
        expect(set(bed.shown.values) <= {1}, f"cut off, and yet a value: {bed.shown.values}")
        expect_text(error, "rank 1 did not come to all_reduce.*it finished.*wait.* for .* device")
        bed.works()
        return f"ended after {took:.1f} s, {GRACE_S:g} s of them grace"
    raise FailedError("it went through")


HANG = """
import time
t = torch.ones(3, device=device)
if rank == 1: time.sleep(600)
dist.all_reduce(t)
t.sum().item()
"""


@check("who waits for whom is said while ranks wait for the device")
def diagnosis(bed: Bed) -> str:
    bed.works()
    said: list[str] = []

    def look() -> None:
        said.append(repr(bed.session.diagnose()).partition("\n\n")[0])
        bed.session.interrupt()

    with Press(bed.session, look), contextlib.suppress(RunInterrupt):
        bed.run(HANG)
    expect_text(said[0], "wait.* for .* device.* in all_reduce", "rank 1")
    bed.works()
    return " ".join(said[0].split())


@check("Stop in a hang, to the next collective")
def stop(bed: Bed) -> str:
    bed.works()
    bed.run("kept = [rank, 'from before']; own = torch.full((4,), float(rank), device=device)")
    times = [bed.stop(HANG) for _ in range(3)]
    kept = bed.session.evaluate("(kept, own.sum().item())")
    expect(all(v == ([r, "from before"], 4.0 * r) for r, v in kept.items()), f"kept: {kept}")
    return f"{', '.join(f'{t:.2f}' for t in sorted(times))} s"


@check("Stop where all ranks wait in another way: synchronize, barrier, a wait for an event")
def other_waits(bed: Bed) -> str:
    waits = {
        "synchronize": "dist.all_reduce(t); torch.accelerator.synchronize()",
        "barrier": "dist.barrier()",
        "cpu": "w = dist.all_reduce(t, async_op=True); w.wait(); t.cpu()",
    }
    took = []
    for name, wait in waits.items():
        head = "import time\nt = torch.ones(3, device=device)\nif rank == 1: time.sleep(600)\n"
        took.append(f"{name} {bed.stop(head + wait):.2f} s")
    return ", ".join(took)


@check("an error of one rank frees the others")
def failing(bed: Bed) -> str:
    bed.works()
    began = time.monotonic()
    error = bed.fails(
        "t = torch.ones(3, device=device)\n"
        "if rank == 1: raise ValueError('on purpose')\n"
        "dist.all_reduce(t); t.sum().item()"
    )
    took = time.monotonic() - began
    expect(error.first_rank == 1 and isinstance(error.first, ValueError), f"first: {error.first!r}")
    expect_text(error, "ValueError on rank 1 at .*line 2: on purpose")
    bed.works()
    return f"{took:.2f} s"


LATE = """
from datetime import timedelta
limited = dist.new_group(timeout=timedelta(seconds=2))
t = torch.ones(3, device=device)
dist.all_reduce(t, group=limited)
t.sum().item()
import time
if rank == 1: time.sleep(6)
dist.all_reduce(t, group=limited)
t.sum().item()
"""


@check("a group's time limit ends a wait for the device")
def limited(bed: Bed) -> str:
    bed.works()
    began = time.monotonic()
    error = bed.fails(LATE)
    expect_text(error, "rank 1 did not come to all_reduce.* within 2 s", "rank 1 was at .*line 8")
    bed.works()
    return f"{time.monotonic() - began:.2f} s"


# --- groups and modules over a Stop ---------------------------------------------------------------

SUBGROUPS = """
half = world_size // 2
low, high = dist.new_group(list(range(half))), dist.new_group(list(range(half, world_size)))
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh(device.type, (world_size,))

def in_groups():
    t = torch.full((2,), float(rank), device=device)
    dist.all_reduce(t, group=low if rank < half else high)
    u = torch.ones(2, device=device)
    dist.all_reduce(u, group=mesh.get_group())
    return t[0].item(), u[0].item()
"""


@check("groups and a mesh go on after a Stop")
def subgroups(bed: Bed) -> str:
    n = bed.session.world_size
    bed.run(SUBGROUPS)
    halves = [sum(range(n // 2)), sum(range(n // 2, n))]
    expected = {r: (float(halves[r >= n // 2]), float(n)) for r in range(n)}
    for when in ("before", "after"):
        values = dict(bed.session.evaluate("in_groups()"))
        expect(values == expected, f"{when} the Stop: {values}, expected {expected}")
        if when == "before":
            bed.stop(HANG)
    within = HANG.replace(
        "dist.all_reduce(t)", "dist.all_reduce(t, group=low if rank < half else high)"
    )
    took = bed.stop(within)
    values = dict(bed.session.evaluate("in_groups()"))
    expect(values == expected, f"after a Stop within a group: {values}, expected {expected}")
    return f"{n // 2 * 2} ranks in two groups and a mesh; {took:.2f} s for a Stop within a group"


SOME = """
some = dist.new_group([0, 1])
def in_some():
    t = torch.full((3,), rank + 1.0, device=device)
    if rank < 2:
        dist.all_reduce(t, group=some)
    return t[0].item()
"""
SOME_ALONE = """
if rank < 2:
    alone = dist.new_group([0, 1], use_local_synchronization=True)
    t = torch.ones(3, device=device)
    dist.all_reduce(t, group=alone)
    t.sum().item()
"""


@check("a group of some ranks, made by all and by its members alone")
def some_ranks(bed: Bed) -> str:
    n = bed.session.world_size
    bed.run(SOME)
    expected = {r: 3.0 if r < 2 else r + 1.0 for r in range(n)}
    for when in ("before", "after"):
        bed.run(SOME_ALONE)
        values = dict(bed.session.evaluate("in_some()"))
        expect(values == expected, f"{when} the Stop: {values}, expected {expected}")
        if when == "before":
            bed.stop(HANG)
    bed.works()
    return f"ranks 0 and 1 of {n}, before and after a Stop"


MESH = """
from torch.distributed.device_mesh import init_device_mesh
square = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("rows", "columns"))
sums = []
for dim in ("rows", "columns"):
    t = torch.full((3,), float(rank), device=device)
    dist.all_reduce(t, group=square.get_group(dim))
    sums.append(t[0].item())
"""


@check("a mesh of two dimensions", ranks=4)
def mesh(bed: Bed) -> str:
    n = bed.session.world_size
    width = n // 2
    bed.run(MESH)
    values = dict(bed.session.evaluate("sums"))
    for rank, found in values.items():
        row, column = divmod(rank, width)
        along_rows = sum(float(r * width + column) for r in range(2))
        along_columns = sum(float(row * width + c) for c in range(width))
        expect(found == [along_rows, along_columns], f"rank {rank} has {found}")
    return f"2 by {width} ranks"


PLACES = (
    "(str(device), str(dist.group.WORLD.bound_device_id), torch.accelerator.current_device_index())"
)


@check("the group is bound to the rank's device, and a mesh leaves that as it is", limit_s=120.0)
def bound_device(bed: Bed) -> str:
    said = _places(bed)
    if not bed.target.is_nccl or torch.cuda.device_count() > 1:
        other = Bed(bed.target)
        with bed.start(2, devices=[1, 0]) as session:  # other devices than those of the local ranks
            other.current = session
            said += f"; turned round: {_places(other)}"
    return said


def _places(bed: Bed) -> str:
    bed.works()
    bed.run("from torch.distributed.device_mesh import init_device_mesh")
    bed.run("line = init_device_mesh(device.type, (world_size, 1))")
    bed.works()
    places = dict(bed.session.evaluate(PLACES))
    for rank, (device, bound, current) in places.items():
        here = f"rank {rank} is on {device}, its group on {bound}, the current one is {current}"
        expect(device.endswith(f":{current}"), here)
        expect(bound == device or (bound == "None" and not bed.target.is_nccl), here)
    return ", ".join(device for device, _, _ in places.values())


RING = """
def ring():
    a = torch.full((1000,), float(rank), device=device); b = torch.zeros(1000, device=device)
    ops = [dist.P2POp(dist.isend, a, (rank + 1) % world_size),
           dist.P2POp(dist.irecv, b, (rank - 1) % world_size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return b[500].item()

def plain():
    t = torch.full((3,), float(rank), device=device)
    if rank == 0: dist.send(t, 1)
    if rank == 1: dist.recv(t, 0)
    return t[0].item()
"""


@check("sends and receives, in a batch and alone, before and after a Stop")
def messages(bed: Bed) -> str:
    n = bed.session.world_size
    bed.run(RING)
    for when in ("before", "after"):
        values = dict(bed.session.evaluate("(ring(), plain())"))
        expected = {r: (float((r - 1) % n), float(r if r != 1 else 0)) for r in range(n)}
        expect(values == expected, f"{when} the Stop: {values}, expected {expected}")
        if when == "before":
            bed.stop(HANG)
    return "a ring, and rank 0 to rank 1"


MODULES = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
torch.manual_seed(0)
def net():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
models = {"ddp": DistributedDataParallel(net())}
sharded = net()
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer, mesh=init_device_mesh(device.type, (world_size,)))
if hasattr(sharded, "reset_iter_state"):  # before torch 2.13 it has to be made again
    models["fsdp"] = sharded
optimizers = {k: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for k, m in models.items()}

def step(name, to_the_end=True):
    optimizers[name].zero_grad()
    loss = models[name](torch.ones(4, 8, device=device) * (rank + 1)).square().mean()
    if not to_the_end and rank == 1:
        import time; time.sleep(600)
    loss.backward()
    torch.accelerator.synchronize()  # what the device is given behind this would run after a Stop
    optimizers[name].step()
    return loss.item()

def steps(count):
    return {name: [step(name) for _ in range(count)] for name in models}

def weights():
    ddp = [p.detach().cpu() for p in models["ddp"].parameters()]
    return ddp + [p.full_tensor().detach().cpu() for p in sharded.parameters()]
"""


@check("DistributedDataParallel and FSDP2 train on after a Stop within a step", limit_s=120.0)
def modules(bed: Bed) -> str:
    bed.run(MODULES)
    bed.session.evaluate("steps(3)")
    before = bed.session.evaluate("weights()")
    names = bed.session.evaluate("list(models)")[0]
    for name in names:
        bed.stop(f"step({name!r}, to_the_end=False)")
    after = bed.session.evaluate("weights()")
    for rank in bed.session.ranks:
        same = all(map(torch.equal, before[rank], after[rank]))
        expect(same, f"rank {rank}: a Stop before the optimizer's step has changed parameters")
    bed.session.evaluate("steps(3)")
    last = bed.session.evaluate("weights()")
    for rank in bed.session.ranks:
        same = all(map(torch.equal, last[0], last[rank]))
        expect(same, f"ranks 0 and {rank} have different parameters")
    expect(all(p.isfinite().all() for p in last[0]), "parameters are no numbers any more")
    expect(not all(map(torch.equal, last[0], after[0])), "the steps after it change nothing")
    without = "" if "fsdp" in names else "; without FSDP2, which needs torch 2.13 for this"
    return f"3 steps, a Stop in each, 3 steps; equal parameters on all ranks{without}"


# --- deaths and broken devices --------------------------------------------------------------------


@check("the death of a rank ends the run, and a restart replaces it alone", limit_s=120.0)
def death(bed: Bed) -> str:
    bed.works()
    bed.run("kept = [rank, 'from before']; own = torch.full((4,), float(rank), device=device)")
    victim = bed.session.infos[1].pid
    began: list[float] = []

    def kill() -> None:
        began.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    with Press(bed.session, kill):
        error = bed.fails(HANG)
    ended = time.monotonic()
    expect_text(error, "[Rr]ank 1")
    bed.session.restart([1])
    bed.works()
    again = time.monotonic()
    others = [rank for rank in bed.session.ranks if rank != 1]
    kept = bed.session[others].evaluate("(kept, own.sum().item())")
    expect(all(v == ([r, "from before"], 4.0 * r) for r, v in kept.items()), f"kept: {kept}")
    return f"ended after {ended - began[0]:.2f} s, works again {again - ended:.2f} s later"


@check("a rank whose device is broken for good is replaced", limit_s=120.0)
def broken_device(bed: Bed) -> str:
    bed.works()
    error = bed.fails(
        f"t = torch.ones(3, device=device)\n"
        f"if rank == 1:\n    {bed.target.break_device}\n"
        "dist.all_reduce(t); t.sum().item()"
    )
    expect(error.first_rank == 1, f"the cause is said to be rank {error.first_rank}: {error}")
    bed.session.restart([1])
    bed.works()
    return str(error).partition("\n")[0][:160]


# --- a real program -------------------------------------------------------------------------------

AT = {"hang": 0.29, "mismatch": 0.52, "death": 0.76}
"""How far it is when rank 1 sleeps, calls for another shape, and is killed as it sleeps."""
SAVES = 10
SLEEPS_AT = 1 + Path(gpt.__file__).read_text().split("\n").index(" " * 12 + "time.sleep(600)")
TRAIN = """
def train(until, fault=""):
    global saved
    while training.at < until or fault and training.at == until:
        if training.at % {every} == 0:
            saved = training.state()
        at = training.at
        losses[at] = training.step(fault if at == until else "")

def begin(kind):
    global training
    training = gpt.Training(kind, device)

from tests.gpu import gpt
losses = {{}}
"""
SAME_ON_CPU, SAME_ON_GPU = 1e-4, 0.02
"""How far losses of two runs may be apart, as a share: a GPU adds in any order."""


@check("a small GPT with DistributedDataParallel: a hang, a mismatch, a death", **PROGRAM)
def gpt_with_ddp(bed: Bed) -> str:
    return _train_through_faults(bed, "ddp")


@check("a small GPT with FSDP2: a hang, a mismatch, a death", **PROGRAM)
def gpt_with_fsdp(bed: Bed) -> str:
    return _train_through_faults(bed, "fsdp")


def _train_through_faults(bed: Bed, kind: str) -> str:
    """Train twice, undisturbed and through the faults, and compare the loss of each step."""
    session, steps = bed.session, bed.steps
    at = {fault: int(share * steps) for fault, share in AT.items()}
    program = TRAIN.format(every=steps // SAVES)
    bed.run(program)
    began = time.monotonic()
    bed.run(f"begin({kind!r}); train({steps})")
    plain = session[0].evaluate("losses")[0]
    took = time.monotonic() - began
    bed.run(f"losses = {{}}; begin({kind!r})")

    def is_named() -> bool:
        said = repr(session.diagnose()).partition("\n\n")[0]
        return re.search(rf"rank 1,? (which )?runs gpt\.py line {SLEEPS_AT}\b", said) is not None

    def when() -> None:
        until(is_named, "a diagnosis that names rank 1")

    with Press(session, session.interrupt, when), contextlib.suppress(RunInterrupt):
        bed.run(f"train({at['hang']}, 'hang')")
        raise FailedError("what never ends has ended")
    _go_on(bed, kind)

    error = bed.fails(f"train({at['mismatch']}, 'mismatch')")
    expect(isinstance(error.first, CollectiveMismatchError), f"it is {error.first!r}")
    expect_text(error, r"rank 1 called all_reduce with float32 .2., .* gpt\.py line \d+")
    _go_on(bed, kind)

    victim = session.infos[1].pid
    with Press(session, lambda: os.kill(victim, signal.SIGKILL), when):
        error = bed.fails(f"train({at['death']}, 'hang')")
    expect_text(error, "[Rr]ank 1 .*SIGKILL")
    session.restart([1], restore=["saved"])
    session[1].execute(program)
    bed.run(f"begin({kind!r}); training.load(saved)")
    bed.run(f"train({steps})")
    _compare(plain, session[0].evaluate("losses")[0], bed)
    bed.run("del training, saved, losses")
    return (
        f"{steps} steps on {session.world_size} ranks ({took:.0f} s), and again through the three: "
        f"loss {plain[0]:.2f} to {plain[steps - 1]:.2f}, the same in each step"
    )


def _go_on(bed: Bed, kind: str) -> None:
    """With what the ranks have; where FSDP2 cannot, from the checkpoint."""
    if not all(dict(bed.session.evaluate("training.goes_on")).values()):
        bed.run(f"begin({kind!r}); training.load(saved)")


def _compare(plain: dict[int, float], found: dict[int, float], bed: Bed) -> None:
    most = SAME_ON_GPU if bed.target.is_nccl else SAME_ON_CPU
    expect(sorted(plain) == sorted(found) == list(range(bed.steps)), f"steps {sorted(found)}")
    for at, loss in plain.items():
        same = abs(found[at] - loss) <= most * loss
        expect(same, f"the loss of step {at} is {found[at]:.6f}, undisturbed it was {loss:.6f}")
    first, last = plain[0], plain[bed.steps - 1]
    expect(last < 0.9 * first, f"nothing was learnt: a loss of {first}, and then {last}")


# --- other sessions -------------------------------------------------------------------------------


@check("gloo for the CPU beside it, in one group", limit_s=120.0)
def mixed(bed: Bed) -> str:
    other = Bed(bed.target)
    backend = f"cpu:gloo,{bed.target.device}:{bed.target.backend}"
    both = "a = torch.ones(2); dist.all_reduce(a)\nb = torch.ones(2, device=device); "
    both += "dist.all_reduce(b)\nsums = a.sum().item(), b.sum().item()"
    with bed.start(backend=backend) as session:
        other.current = session
        n = session.world_size
        other.run(both)
        sums = dict(session.evaluate("sums"))
        expect(set(sums.values()) == {(2.0 * n, 2.0 * n)}, f"sums: {sums}")
        for where in ("cpu", "device"):
            place = "" if where == "cpu" else ", device=device"
            error = other.fails(
                f"t = torch.ones(3 + (rank == 1){place})\ndist.all_reduce(t)\nt[0].item()"
            )
            expect(isinstance(error.first, CollectiveMismatchError), f"{where}: {error.first!r}")
            hang = "import time\nif rank == 1: time.sleep(600)\n"
            other.stop(hang + f"t = torch.ones(3{place})\ndist.all_reduce(t)\nt[0].item()")
        other.run(both)
    return f"{backend}: both work, mismatch and Stop on each"


GRAPH = """
t = torch.zeros(4, device=device); u = t.clone()
dist.all_reduce(u)
side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(2): dist.all_reduce(u)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    u.copy_(t); dist.all_reduce(u)
found = []
for number in range(3):
    t.fill_(float(number)); graph.replay(); found.append(u[0].item())
"""


@check("a captured CUDA graph with a collective is replayed", ranks=1)
def graph(bed: Bed) -> str:
    if not bed.target.is_nccl:
        raise SkippedError("only CUDA has graphs")
    bed.run(GRAPH)
    n = bed.session.world_size
    found = dict(bed.session.evaluate("found"))
    expect(all(v == [0.0, n, 2.0 * n] for v in found.values()), f"replays gave {found}")
    bed.works()
    return "three replays, then a collective outside of it"


@check("the end leaves nothing", ranks=1)
def end(bed: Bed) -> str:
    pids = [info.pid for info in bed.session.infos]
    bed.close()
    deadline = time.monotonic() + END_S
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        expect(time.monotonic() < deadline, f"processes {left} are still there")
        time.sleep(0.05)
    return f"{len(pids)} processes are gone"


# --- running them ---------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of a check.

    Attributes:
        check: Which.
        word: ``held``, ``FAILED`` or ``skipped``.
        seconds: How long it took.
        text: What there is to say.
    """

    check: Check
    word: str
    seconds: float
    text: str = ""


@dataclass
class _Limit:
    """Ends what does not end: by a Stop, and then by killing the ranks."""

    bed: Bed
    seconds: float
    said: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            if over.wait(self.seconds):
                return
            session = self.bed.current
            self.said.append(f"did not end within {self.seconds:g} s")
            if session is None:
                return
            with contextlib.suppress(Exception):
                self.said.append(repr(session.diagnose(stacks=True)))
            with contextlib.suppress(Exception):
                session.interrupt()
            if over.wait(20.0):
                return
            self.said.append("Stop did not end it")
            for info in session.infos:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()


def attempt(bed: Bed, check: Check) -> Outcome:
    """Run a check within its time; after one that fails the next has a new session."""
    if check.ranks > bed.target.ranks:
        return Outcome(check, "skipped", 0.0, f"takes {check.ranks} ranks")
    if check.needs_device and bed.target.device == "cpu":
        return Outcome(check, "skipped", 0.0, "ranks wait on the CPU")
    began = time.monotonic()
    limit = _Limit(bed, check.limit_s)
    try:
        with limit():
            text = check.run(bed)
        if limit.said:
            raise FailedError("")
        return Outcome(check, "held", time.monotonic() - began, text)
    except SkippedError as why:
        return Outcome(check, "skipped", time.monotonic() - began, str(why))
    except (Exception, RunInterrupt) as error:
        said = "\n".join([*limit.said, f"{type(error).__name__}: {error}"])
        outcome = Outcome(check, "FAILED", time.monotonic() - began, said)
    with contextlib.suppress(Exception):
        bed.close()
    return outcome
