"""What several unit tests need."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from distsession.cluster import kept
from distsession.ranks import DeviceInfo, RankInfo
from tests.kept_agents import PlayedAgent

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
def kept_base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place where sessions that are kept are looked for; a short one, for sockets."""
    monkeypatch.setattr(kept, "_bases", lambda: [folder])
    with tempfile.TemporaryDirectory(prefix="kept-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def play(kept_base: Path) -> Iterator[Callable[..., PlayedAgent]]:
    """Plays a session that is kept, see :class:`PlayedAgent`."""
    played: list[PlayedAgent] = []

    def start(name: str | None = "digits", **more: Any) -> PlayedAgent:
        played.append(PlayedAgent(kept_base, name, folder=f"number{len(played)}", **more))
        return played[-1]

    yield start
    for each in played:
        each.close()


@pytest.fixture
def fresh_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No earlier cell has run: no ``from __future__`` is in force, and there is no event loop."""
    from distsession.engine import execute

    monkeypatch.setattr(execute, "_compile", execute._Compiler())
    runner = asyncio.Runner()
    monkeypatch.setattr(execute, "_runner", runner)
    yield
    runner.close()
