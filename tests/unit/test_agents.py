"""How the agents of a session are ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from distsession.cluster import agents as module
from distsession.cluster.agents import AgentProcess, Agents


class Played:
    """The process of an agent, which notes what is done to it.

    Args:
        events: Gets that.
        node: Its node.
        is_stuck: It ends only when it is killed.
    """

    pid = 0

    def __init__(self, events: list[tuple[str, int]], node: int, *, is_stuck: bool):
        self._events, self._node, self._is_stuck = events, node, is_stuck
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return self._code

    def terminate(self) -> None:
        self._events.append(("asked", self._node))
        if not self._is_stuck:
            self._code = 0

    def kill(self) -> None:
        self._events.append(("killed", self._node))
        self._code = -9


class PlayedAgents(Agents):
    def play(self, processes: dict[int, AgentProcess]) -> None:
        self._processes.update(processes)

    def _activity(self, process: AgentProcess) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("is_urgent", [False, True])
def test_stuck_agents_are_waited_for_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_urgent: bool,
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module.time, "monotonic", lambda: looks.append(0.0) or len(looks) * 1.0)
    events: list[tuple[str, int]] = []
    agents = PlayedAgents(str(tmp_path), -1, lambda node: [])
    agents.play({node: Played(events, node, is_stuck=node > 0) for node in range(4)})
    if is_urgent:
        agents.end_at_once()
    agents.close()
    assert [node for what, node in events if what == "killed"] == [1, 2, 3]
    first = events.index(("killed", 1))
    assert {node for _, node in events[:first]} == {0, 1, 2, 3}
    assert events[first:] == [("killed", 1), ("killed", 2), ("killed", 3)]
    assert len(looks) < 12  # a time for each round, not for each agent
    assert [f"of node {node} is stuck" in caplog.text or is_urgent for node in (1, 2, 3)] == [
        True
    ] * 3
