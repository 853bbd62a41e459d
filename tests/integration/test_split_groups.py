"""Groups of some of the ranks, where a communicator can be split from that of all ranks.

A split waits until every rank of the parent has called. torch begins one where the default group is
bound to a device: by ``device_id=``, or by itself with the class that is behind ``"nccl"`` from
torch 2.15 on. So each test runs with both, and without.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from distsession import RunError, RunInterrupt, Session
from distsession.engine.host_info import torch_release
from distsession.errors import CollectiveHangError, RunTimeoutError
from tests.backends import BACKENDS, STANDIN, STANDIN2, STANDIN_LAZY, Place, only
from tests.until import LIMIT_S, Press

pytestmark = [pytest.mark.timeout(180), pytest.mark.whole_on_each_backend]

RANKS = 4
BIND = """
if dist.group.WORLD.bound_device_id is None:
    dist.destroy_process_group()
    dist.init_process_group(device_id=device)
assert dist.group.WORLD.bound_device_id == device
"""


@dataclass(frozen=True)
class Leg(Place):
    """A backend, and whether its default group is bound to a device."""

    is_bound: bool = False

    def __str__(self) -> str:
        return f"{self.backend}, bound" if self.is_bound else str(self.backend)


BIND_THEMSELVES = (STANDIN2, STANDIN_LAZY)
LEGS = [
    *[Leg(backend, RANKS) for backend in BACKENDS if backend not in BIND_THEMSELVES],
    *[Leg(backend, RANKS, is_bound=True) for backend in BACKENDS if backend.is_device],
]
only_device = only("device", "it is bound to no device")


@pytest.fixture(scope="module", params=LEGS, ids=str)
def leg(request: pytest.FixtureRequest) -> Leg:
    found: Leg = request.param
    return found


@pytest.fixture(scope="module")
def _shared(leg: Leg) -> Iterator[Session]:
    with leg.session(threads=1, hang_grace=0.5) as session:
        yield session


@pytest.fixture
def session(_shared: Session, leg: Leg) -> Session:
    if leg.is_bound:
        _shared.execute(BIND)
    return _shared


def values(session: Session, code: str, expression: str = "found") -> dict[int, Any]:
    """Of each rank, after this code; what hangs ends."""
    session.execute(code, timeout=LIMIT_S)
    return dict(session.evaluate(expression))


PAIRS = """
pairs = [dist.new_group(pair) for pair in ([1, 2], [0, 3], [0, 2, 3], [2, 1])]
def use():
    for group in pairs:
        t = torch.full((3,), rank + 1.0)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(t, group=group)
        yield t[0].item()
found = list(use())
"""
IN_PAIRS = {
    0: [1.0, 5.0, 8.0, 1.0],
    1: [5.0, 2.0, 2.0, 5.0],
    2: [5.0, 3.0, 8.0, 5.0],
    3: [4.0, 5.0, 8.0, 4.0],
}


def test_members_alone_use_their_group(session: Session) -> None:
    assert values(session, PAIRS) == IN_PAIRS


def test_members_alone_make_their_group(session: Session) -> None:
    """No other rank calls anything."""
    code = """
    found = 0.0
    if rank in (1, 2):
        group = dist.new_group([1, 2], use_local_synchronization=True)
        t = torch.full((3,), rank + 1.0)
        dist.all_reduce(t, group=group)
        found = t[0].item()
    """
    assert values(session, code) == {0: 0.0, 1: 5.0, 2: 5.0, 3: 0.0}


def test_members_divide_their_group(session: Session) -> None:
    code = """
found = 0.0
outer = dist.new_group([1, 3])
if rank in (1, 3):
    group, _ = dist.new_subgroups(2, group=outer)
    t = torch.full((3,), rank + 1.0)
    dist.all_reduce(t, group=group)
    found = t[0].item()
"""
    assert values(session, code) == {0: 0.0, 1: 6.0, 2: 0.0, 3: 6.0}
    assert values(session, PAIRS) == IN_PAIRS  # torch 2.15 counts the others on their members alone


def test_ranks_of_a_group_send_to_each_other(session: Session) -> None:
    code = """
group = dist.new_group([3, 1])
found = None
if rank in (1, 3):
    other = 4 - rank
    here = dist.get_rank(group)
    first, second, third = (torch.full((2,), float(rank)) for _ in range(3))
    if rank == 1:
        dist.send(first, dst=3, group=group)
        dist.recv(second, group_src=1 - here, group=group)
    else:
        dist.recv(first, src=1, group=group)
        dist.send(second, group_dst=1 - here, group=group)
    got = torch.zeros(2)
    operations = [dist.P2POp(dist.isend, third, other, group),
                  dist.P2POp(dist.irecv, got, other, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.barrier(group=group)
    found = here, first[0].item(), second[0].item(), got[0].item()
"""
    assert values(session, code) == {
        0: None,
        1: (0, 1.0, 3.0, 3.0),
        2: None,
        3: (1, 1.0, 3.0, 1.0),
    }


MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("rows", "columns"))
whole = torch.arange(16.0).reshape(4, 4)
def use():
    for dim in ("rows", "columns"):
        t = torch.full((3,), rank + 1.0)
        dist.all_reduce(t, group=mesh.get_group(dim))
        yield t[0].item()
    parts = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    yield parts.to_local().sum().item()
    yield parts.redistribute(mesh, [Replicate(), Shard(0)]).to_local().sum().item()
    yield torch.equal(parts.full_tensor(), whole)
found = list(use())
"""
IN_MESH = {
    0: [4.0, 3.0, 10.0, 28.0, True],
    1: [6.0, 3.0, 18.0, 92.0, True],
    2: [4.0, 7.0, 42.0, 28.0, True],
    3: [6.0, 7.0, 50.0, 92.0, True],
}


def test_a_mesh_of_two_dimensions_works_in_each(session: Session) -> None:
    assert values(session, MESH) == IN_MESH


TRAINING = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
mesh = init_device_mesh(device.type, {shape}, mesh_dim_names={names})
def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

def trained(model, batches):
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches:
        sgd.zero_grad()
        model(batch).square().mean().backward()
        sgd.step()
    return model

batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(n), device="cpu").to(device)
           for n in range(3)]
alone = trained(net(), batches)
{build}
trained(model, [batch.tensor_split({parts})[{part}] for batch in batches])
found = all(torch.allclose(p.full_tensor(), q, atol=1e-5)
            for p, q in zip(model.parameters(), alone.parameters(), strict=True))
"""
SHARDED = (
    "model = net()\nfor layer in (model[0], model[2], model):\n    fully_shard(layer, mesh={})"
)
PARALLEL = """
model = parallelize_module(net(), {}, {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
"""
KINDS = {
    "FSDP": {
        "shape": "(4,)",
        "names": "('data',)",
        "build": SHARDED.format("mesh"),
        "parts": "4",
        "part": "rank",
    },
    "HSDP": {
        "shape": "(2, 2)",
        "names": "('copies', 'shards')",
        "build": SHARDED.format("mesh"),
        "parts": "4",
        "part": "rank",
    },
    "tensor parallel": {
        "shape": "(2, 2)",
        "names": "('data', 'tensor')",
        "build": PARALLEL.format("mesh['tensor']"),
        "parts": "1",
        "part": "0",
    },
    "FSDP with tensor parallel": {
        "shape": "(2, 2)",
        "names": "('data', 'tensor')",
        "build": PARALLEL.format("mesh['tensor']")
        + SHARDED.format("mesh['data']").removeprefix("model = net()\n"),
        "parts": "2",
        "part": "mesh.get_local_rank('data')",
    },
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_models_on_a_mesh_train_as_one_process_does(
    session: Session, leg: Leg, kind: dict[str, str]
) -> None:
    if torch_release() < (2, 9) and "fully_shard" in kind["build"] and not leg.backend.is_device:
        pytest.skip("FSDP2 on gloo adds up gradients in torch 2.8")
    found = values(session, TRAINING.format(**kind))
    assert found == dict.fromkeys(range(RANKS), True)


SPLIT = """
group = dist.split_group(split_ranks={})
t = torch.full((3,), rank + 1.0)
if group != dist.GroupMember.NON_GROUP_MEMBER and group is not None:
    dist.all_reduce(t, group=group)
found = t[0].item()
"""


@only_device
@pytest.mark.parametrize(
    ("parts", "right"),
    [
        ([[0, 1], [2, 3]], {0: 3.0, 1: 3.0, 2: 7.0, 3: 7.0}),
        ([[0, 3]], {0: 5.0, 1: 2.0, 2: 3.0, 3: 5.0}),
    ],
    ids=str,
)
def test_all_ranks_split_a_group(
    session: Session, leg: Leg, parts: list[list[int]], right: dict[int, float]
) -> None:
    code = SPLIT.format(parts)
    if leg.is_bound or torch_release() >= (2, 15):
        assert values(session, code) == right
        return
    with pytest.raises(RunError, match="No device associated with the default pg"):
        values(session, code)


def test_groups_go_on_after_a_stop_within_one(session: Session) -> None:
    """They are connected anew, each by its members."""
    values(session, PAIRS + MESH.replace("use()", "use_mesh()"))
    for group, last in (("pairs[0]", 2), ("mesh.get_group('rows')", 3)):
        code = (
            "import time\n"
            f"if rank == {last}: time.sleep(600)\n"
            f"if rank == {last} - {1 if last == 2 else 2}:\n"
            f"    t = torch.ones(3); dist.all_reduce(t, group={group}); t.sum().item()"
        )
        with (
            Press(session, session.interrupt),
            pytest.raises(RunInterrupt, match=rf"rank {last} did not|waits"),
        ):
            session.execute(code, timeout=LIMIT_S)
        assert values(session, "found = list(use())") == IN_PAIRS
        assert values(session, "found = list(use_mesh())") == IN_MESH


def test_a_deadlock_within_a_group_is_ended(session: Session) -> None:
    values(session, PAIRS)
    code = "t = torch.ones(3)\nif rank == 1: dist.all_reduce(t, group=pairs[0]); t.sum().item()"
    with pytest.raises(CollectiveHangError, match="rank 2 did not come to all_reduce"):
        session.execute(code, timeout=LIMIT_S)
    assert values(session, "found = list(use())") == IN_PAIRS


def test_the_death_of_a_member_is_named_and_the_session_recovers(
    session: Session, leg: Leg
) -> None:
    values(session, PAIRS)
    code = """
import time
kept = rank
if rank == 1: time.sleep(600)
if rank == 2:
    t = torch.ones(3); dist.all_reduce(t, group=pairs[0]); t.sum().item()
"""
    victim = session.infos[1].pid
    with (
        Press(session, lambda: os.kill(victim, signal.SIGKILL)),
        pytest.raises(RunError) as caught,
    ):
        session.execute(code, timeout=LIMIT_S)
    first = str(caught.value).splitlines()[0]
    assert "rank 1" in first.lower()
    assert "SIGKILL" in first
    session.restart([1])
    assert dict(session[[0, 2, 3]].evaluate("kept")) == {0: 0, 2: 2, 3: 3}
    assert values(session, (BIND if leg.is_bound else "") + PAIRS) == IN_PAIRS


standin2 = pytest.mark.skipif(
    STANDIN not in BACKENDS or STANDIN2.why_not() is not None,
    reason=STANDIN2.why_not() or "the stand-in is not tried",
)
SOME_SPLIT = """
if rank in (1, 2):
    group = dist.new_group([1, 2], use_local_synchronization=True)
"""


@standin2
def test_a_split_that_torch_begins_with_some_ranks_waits_for_all(
    start: Callable[..., Session],
) -> None:
    """Groups that are left to torch are split by it, and only a time limit ends the wait."""
    session = start(3, **STANDIN2.options(3), groups="torch", threads=1)
    where = r"ranks 1-2 were at register\.py line \d+ \(return parent\.split\("
    with pytest.raises(RunTimeoutError, match=where):
        session.execute(SOME_SPLIT, timeout=5)
    session.execute(
        "parent = dist.group.WORLD._get_backend(device)\n"
        "part = parent.split(None, [1, 2], None)",  # by all ranks
        timeout=LIMIT_S,
    )
    assert dict(session.evaluate("part is None")) == {0: True, 1: False, 2: False}


@standin2
def test_ours_would_wait_if_torch_could_split_them(start: Callable[..., Session]) -> None:
    session = start(3, **STANDIN2.options(3), threads=1)
    session.execute(SOME_SPLIT, timeout=LIMIT_S)
    session.execute(
        "import contextlib\n"
        "from distsession.engine.collectives import torch_private\n"
        "torch_private._without_splits = contextlib.nullcontext"
    )
    with pytest.raises((RunTimeoutError, CollectiveHangError)):
        session.execute(SOME_SPLIT, timeout=5)


DEVICES = [2, 3]
"""Not those that the local ranks of torchrun would have."""
ON_DEVICE = """
from torch.distributed.device_mesh import init_device_mesh
def places(group):
    t = torch.ones(3)
    dist.all_reduce(t, group=group)
    return [str(group.bound_device_id), str(t.device), t[0].item()]
def all_places():
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("rows", "columns"))
    for group in (dist.group.WORLD, pair, mesh.get_group("rows")):
        yield from places(group)
    yield torch.accelerator.current_device_index()
pair = dist.new_group([1, 0])
found = list(all_places())
"""


def on_devices(device_type: str) -> dict[int, list[Any]]:
    of = {rank: f"{device_type}:{index}" for rank, index in enumerate(DEVICES)}
    return {rank: [of[rank], of[rank], 2.0] * 3 + [DEVICES[rank]] for rank in of}


@standin2
def test_groups_are_bound_to_the_sessions_device(start: Callable[..., Session]) -> None:
    session = start(2, **STANDIN2.options(2), threads=1, devices=DEVICES)
    right = on_devices("standin")
    assert dict(session.evaluate("__import__('os').environ['LOCAL_RANK']")) == {0: "0", 1: "1"}
    assert values(session, ON_DEVICE) == right
    # Without us torch takes that of LOCAL_RANK.
    native = (
        "from types import SimpleNamespace\n"
        "choose = dist.distributed_c10d._nccl2_device.__wrapped__\n"
        "asked = SimpleNamespace(process_group=None, enable_reconfigure=False, group_rank=rank,\n"
        "                        global_ranks_in_group=[0, 1])\n"
        "found = choose(asked).index"
    )
    assert values(session, native) == {0: 0, 1: 1}
    session.reconnect()
    assert values(session, "found = list(all_places())") == right
    session.restart([1])
    assert values(session, ON_DEVICE) == right


@standin2
def test_a_device_that_code_chooses_counts(start: Callable[..., Session]) -> None:
    session = start(2, **STANDIN2.options(2), threads=1, devices=DEVICES)
    own = "dist.destroy_process_group()\n{}\nfound = str(dist.group.WORLD.bound_device_id)"
    by_id = "dist.init_process_group('standin2', device_id=torch.device('standin', rank + 5))"
    assert values(session, own.format(by_id)) == {0: "standin:5", 1: "standin:6"}
    current = "torch.standin.set_device(rank + 4)\ndist.init_process_group('standin2')"
    assert values(session, own.format(current)) == {0: "standin:4", 1: "standin:5"}
    total = "t = torch.ones(3)\ndist.all_reduce(t)\nfound = [str(t.device), t[0].item()]"
    right = {0: ["standin:4", 2.0], 1: ["standin:5", 2.0]}
    assert values(session, total) == right
    session.reconnect()
    assert values(session, total) == right


@pytest.mark.skipif(STANDIN.why_not() is not None, reason=STANDIN.why_not() or "")
def test_a_mesh_leaves_the_device_as_it_is(start: Callable[..., Session]) -> None:
    """It takes that of LOCAL_RANK, unless the rank has chosen one."""
    session = start(2, **STANDIN.options(2), threads=1, devices=DEVICES)
    unbound = {
        rank: ["None", *row[1:3]] * 3 + row[-1:] for rank, row in on_devices("standin").items()
    }
    assert values(session, ON_DEVICE) == unbound
