"""An agent that ends while the session starts is named, with how it ended and no other advice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from distsession import LaunchError, Session
from tests.conftest import assert_nothing_left, traces

pytestmark = pytest.mark.timeout(120)

ENDS_ITS_AGENT = """
import os
agent, forks = os.getpid(), 0

def count():
    global forks
    forks += 1
    if forks == {number} and not {of_child}:
        os.kill(agent, {signal})

def in_child():
    if forks == {number} - 1 and {of_child}:
        os.kill(agent, {signal})

os.register_at_fork(after_in_parent=count, after_in_child=in_child)
"""
"""A module that ends the agent as it forks for the so manieth time, before or in the child."""
FORKS = 3
"""A store for scripts and two ranks; the session's own store comes before what is preloaded."""


@pytest.mark.parametrize("of_child", [False, True])
@pytest.mark.parametrize("number", range(1, FORKS + 1))
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_that_ends_during_a_start_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by: signal.Signals,
    number: int,
    of_child: bool,
) -> None:
    before = traces()
    code = ENDS_ITS_AGENT.format(number=number, of_child=of_child, signal=int(by))
    (tmp_path / "ends_its_agent.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaunchError) as caught:
        Session(2, preload=["ends_its_agent"], start_timeout=60)
    text = str(caught.value)
    assert "agent" in text.splitlines()[0], text
    assert ("was killed by SIGKILL" in text) is (by is signal.SIGKILL), text
    assert "session.restart" not in text, text
    # What such a hook is interrupted in, Python writes itself.
    assert "Traceback" not in text.partition("The agent's last lines")[0], text
    assert_nothing_left(before)
