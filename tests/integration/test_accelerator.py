"""Ranks on an accelerator that has streams: the stand-in for one, where it can be built."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from distsession import Session

standin = pytest.importorskip("tests.standin", reason="there is no stand-in")
REASON = standin.required_or_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

COUNT = 10_000_000
"""Elements of a tensor that takes more pieces than there are buffers."""


@pytest.fixture(scope="module")
def session():
    importlib.import_module("tests.standin.build").build()
    with Session(2, backend="standin", preload=["tests.standin.register"]) as session:
        yield session


def _buffers() -> tuple[int, bool]:
    from distsession.engine import pinned

    staging: Any = pinned._staging
    return len(staging._buffers), staging._has_failed


def test_collectives_run_on_the_ranks_own_devices(session: Session) -> None:
    session.execute("t = torch.full((4,), rank + 1., device=device)\ndist.all_reduce(t)")
    assert session.evaluate("(str(device), t.tolist())")[1] == ("standin:1", [3.0] * 4)


def test_a_result_waits_for_what_the_device_has_to_do(session: Session) -> None:
    session.execute(
        f"big = torch.arange({COUNT}, dtype=torch.float32).to(device)\n"
        "for _ in range(20):\n    big += 1"
    )
    for back in session.pull("big").values():
        assert back.device.type == "cpu"
        assert torch.equal(back, torch.arange(COUNT, dtype=torch.float32) + 20)
    assert list(session.run(_buffers).values()) == [(2, False)] * 2


def test_parts_on_devices_are_gathered(session: Session) -> None:
    session.execute("part = torch.full((600, 1000), float(rank), device=device)")
    whole = session.gather("part")
    assert whole.device.type == "cpu"
    assert torch.equal(whole[:, 0], torch.tensor([0.0, 1.0]).repeat_interleave(600))


def test_helpers_for_ranks_use_the_device(session: Session) -> None:
    session.execute("import distsession.distributed as D")
    assert list(session.evaluate("str(D.device())").values()) == ["standin:0", "standin:1"]
    gathered = session.evaluate("D.all_gather({'rank': rank})")[0]
    assert gathered == [{"rank": 0}, {"rank": 1}]
    session.execute("x = D.broadcast(torch.ones(3, device=device) * rank, 1)\nD.barrier()")
    assert session.evaluate("(str(x.device), x.tolist())")[0] == ("standin:0", [1.0] * 3)
    assert session.evaluate("D.synchronize()")[0] is None
