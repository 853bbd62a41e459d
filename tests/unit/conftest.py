"""What several unit tests need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest

from distsession.ranks import DeviceInfo, RankInfo

hypothesis.settings.register_profile("unit", deadline=None, max_examples=60)
hypothesis.settings.load_profile("unit")

MODEL = RankInfo(
    rank=0,
    local_rank=0,
    world_size=4,
    local_world_size=4,
    node_rank=0,
    nodes=1,
    host="alpha",
    pid=1000,
    backend="gloo",
    device=DeviceInfo("cpu", "a processor", 8 << 30, 2),
    torch_version="2.9.0",
    python_version="3.11.9",
)


@pytest.fixture
def rank_info() -> Callable[..., RankInfo]:
    """Makes the facts about a rank: like those of the others, but for what is given."""

    def make(rank: int, **changes: Any) -> RankInfo:
        facts = {"rank": rank, "local_rank": rank, "pid": 1000 + rank, **changes}
        return replace(MODEL, **facts)

    return make


@pytest.fixture
def fresh_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No earlier cell has run: no ``from __future__`` is in force, and there is no event loop."""
    from distsession.engine import execute

    monkeypatch.setattr(execute, "_compile", execute._Compiler())
    runner = asyncio.Runner()
    monkeypatch.setattr(execute, "_runner", runner)
    yield
    runner.close()
