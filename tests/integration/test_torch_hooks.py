"""Hooks that newer torch releases attach to process groups, and what they find on ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distsession import RunError, Session

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
