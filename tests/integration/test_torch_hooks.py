"""Hooks that newer torch releases attach to process groups, and what they find on ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distsession import CollectiveHangError, RunError, RunTimeoutError, Session
from distsession.engine.collectives import torch_changes

ASK = """
from torch.distributed import distributed_c10d as c10d
from distsession.engine.collectives.group import SwappableGroup

asked, native = [], SwappableGroup._set_group_desc
def describe(group, text):  # torch 2.15 attaches its flight recorder right after this
    asked.append([device.type for device in group._device_types])
    native(group, text)

SwappableGroup._set_group_desc = describe
pair = dist.new_group([0, 1])
SwappableGroup._set_group_desc = native
asked, [device.type for device in pair._device_types]
"""


def test_a_group_has_no_devices_until_torch_has_made_it(start: Callable[..., Session]) -> None:
    session = start(2)
    assert dict(session.execute(ASK, fetch=True) or {}) == dict.fromkeys(
        (0, 1), ([[]], ["cpu", "cuda"])
    )
    hooks = "len(getattr(c10d._world, 'pg_flight_recorder_hooks', ()))"
    assert dict(session.evaluate(hooks)) == {0: 0, 1: 0}


@pytest.mark.skipif(not hasattr(c10d, "NanCheckHook"), reason="torch 2.14 and newer can check")
def test_torchs_check_for_nan_reaches_the_group_inside(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    session = start(2)
    with pytest.raises(RunError, match="NaN found in input tensor"):
        session.execute("dist.all_reduce(torch.tensor([float('nan')]))")
    session.execute("dist.all_reduce(torch.ones(1))")
    session.restart()
    with pytest.raises(RunError, match="NaN found in input tensor"):
        session.execute("dist.all_reduce(torch.tensor([float('nan')]), group=dist.new_group())")


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="torch 2.15 and newer have hooks"
)
def test_hooks_of_code_see_each_operation_also_after_a_reconnect(
    start: Callable[..., Session],
) -> None:
    session = start(2)
    session.execute(
        "seen = []\n"
        "dist.group.WORLD.register_pre_hook(7, lambda told: seen.append('begins'))\n"
        "dist.group.WORLD.register_post_hook(7, lambda told: seen.append('is issued'))\n"
        "dist.all_reduce(torch.ones(1))"
    )
    assert session.evaluate("seen")[1] == ["begins", "is issued"]
    session.reconnect()
    session.execute("dist.barrier(); dist.group.WORLD.unregister_pre_hook(7); dist.barrier()")
    assert session.evaluate("seen")[0] == ["begins", "is issued"] * 2 + ["is issued"]


# --- groups of torch's own ------------------------------------------------------------------------

hooked = pytest.mark.skipif(
    not torch_changes.has_hooks(), reason="this torch has no hooks for its groups"
)
DDP = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
(model(torch.ones(1, 2)).sum() * (rank + 1)).backward()
model.module.weight.grad.tolist()
"""
GROUPS = """
pair = dist.new_group([0, 1])
t = torch.full((2,), float(rank))
dist.all_reduce(t, group=pair)
work = dist.all_reduce(t, async_op=True)
work.wait()
parts = [torch.empty(2) for _ in range(2)]
dist.all_gather(parts, t)
dist.reduce_scatter_tensor(torch.empty(1), t)
dist.scatter(torch.empty(2), parts if rank == 1 else None, 1)
dist.barrier()
if rank == 0:
    dist.send(t, 1, tag=5)
    dist.send(torch.ones(3), 1, tag=4)
else:
    late = torch.empty(3)
    wait_for = dist.irecv(late, 0, tag=4)
    dist.recv(torch.empty(2), 0, tag=5)
    wait_for.wait()
t.tolist()
"""


@pytest.fixture
def native(start: Callable[..., Session]) -> Session:
    return start(2, backend="gloo", groups="torch", threads=1)


@hooked
@pytest.mark.timeout(120)
def test_operations_of_torchs_groups_are_recorded(native: Session) -> None:
    assert dict(native.execute(GROUPS, fetch=True) or {}) == {0: [2.0] * 2, 1: [2.0] * 2}
    steps = native.timeline().merged.steps
    called = {rank: [step.record.name for step in steps[rank]] for rank in (0, 1)}
    both = ["all_reduce", "all_reduce", "all_gather", "reduce_scatter_tensor", "scatter", "barrier"]
    assert called == {0: [*both, "send", "send"], 1: [*both, "recv", "recv"]}
    assert steps[0][0].record.place == "In[1] line 4"
    assert dict(native.execute(DDP, fetch=True) or {}) == {0: [[1.5] * 2], 1: [[1.5] * 2]}
    called_by_cpp = [step.record.name for step in native.timeline().merged.steps[0]]
    assert called_by_cpp[-1] == "all_reduce"
    assert "broadcast" in called_by_cpp


@hooked
@pytest.mark.timeout(120)
def test_a_mismatch_in_torchs_groups_is_refused_before_it_begins(native: Session) -> None:
    native.execute("x = torch.ones(2 + rank)")
    with pytest.raises(RunError, match=r"CollectiveMismatchError: .*\[2\].*\[3\], at In\[2\]"):
        native.execute("dist.all_reduce(x)")
    assert dict(native.evaluate("x.tolist()")) == {0: [1.0] * 2, 1: [1.0] * 3}
    with pytest.raises(RunError, match=r"rank 0 called barrier, rank 1 .*all_reduce"):
        native.execute("dist.all_reduce(x) if rank else dist.barrier()")
    native.execute("dist.barrier()")


@hooked
@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", ["dist.all_reduce(x)", "w = dist.all_reduce(x, async_op=True)"])
def test_a_deadlock_in_torchs_groups_is_ended(native: Session, call: str) -> None:
    native.execute("x, w = torch.ones(1), dist.barrier(async_op=True)\nw.wait()")
    with pytest.raises(CollectiveHangError) as raised:
        native.execute(f"if rank == 0:\n    {call}\n    w.wait()")
    assert "rank 1 did not come to all_reduce #2 (float32 [1]) at In[2] line 2" in str(raised.value)
    assert "device" not in str(raised.value)
    native.execute("dist.barrier()")


@hooked
@pytest.mark.timeout(120)
def test_an_error_frees_who_waits_in_torchs_groups(native: Session) -> None:
    with pytest.raises(RunError) as raised:
        native.execute("if rank == 1:\n    1 / 0\ndist.barrier()")
    assert str(raised.value).startswith("ZeroDivisionError on rank 1 at In[1] line 2")
    assert "Rank 0 waited in barrier #1 at In[1] line 3 and was freed" in str(raised.value)
    native.execute("dist.barrier()")


@hooked
@pytest.mark.timeout(120)
def test_a_message_of_torchs_groups_is_named_and_no_deadlock_for_certain(native: Session) -> None:
    """Its tag is not told to the hook, so which message it waits for is not known."""
    with pytest.raises(RunTimeoutError) as raised:
        native.execute("if rank == 1:\n    dist.recv(torch.ones(2), 0)", timeout=4)
    assert "rank 1 was in recv #1 (float32, 2 elements, from rank 0) at In[1] line 2" in str(
        raised.value
    )
    assert "device" not in str(raised.value)
    native.execute("dist.barrier()")


@hooked
@pytest.mark.timeout(120)
def test_an_operation_that_torch_refuses_leaves_nothing_behind(native: Session) -> None:
    with pytest.raises(RunError, match="on ranks 0-1 at In"):
        native.execute("dist.reduce_scatter_tensor(torch.empty(1), torch.ones(3))")
    native.execute("t = torch.ones(1)\ndist.all_reduce(t)")
    assert dict(native.evaluate("t.item()")) == {0: 2.0, 1: 2.0}
    assert not native.recovery.reports(ask=True, timeout=10)[0].operations
