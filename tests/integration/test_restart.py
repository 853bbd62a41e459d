"""A restart that is stopped leaves ranks that work, or that are known to be gone."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import psutil
import pytest

from distsession import RunInterrupt, Session, errors
from distsession.engine.agent import PRELOAD_IDLE_S
from tests.backends import Backend
from tests.integration.conftest import Recorder
from tests.until import press_at, until

MOMENTS = 20
LARGE = 300_000
"""Numbers that go through shared memory rather than with a message."""


@pytest.fixture(scope="module")
def two(backend: Backend) -> Iterator[Session]:
    with backend.session(2, output=Recorder(), threads=1) as session:
        session.execute("kept = 40 + rank")
        yield session


def press_stop() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def check(session: Session) -> None:
    """All ranks meet, take what goes through shared memory, and rank 0 has its variables."""
    session.push(values=list(range(LARGE)), blob=bytes(LARGE))
    session.execute("total = torch.ones(1)\ndist.all_reduce(total)")
    found = session.evaluate("len(values), len(blob), int(total)")
    assert dict(found) == {0: (LARGE, LARGE, 2), 1: (LARGE, LARGE, 2)}
    assert session[0].evaluate("kept")[0] == 40


def press_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Stop is pressed once, just as something has returned."""
    function: Callable[..., Any] = getattr(owner, name)

    def pressed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        monkeypatch.setattr(owner, name, function)
        press_stop()
        return result

    monkeypatch.setattr(owner, name, pressed)


def test_a_stop_as_the_fresh_rank_is_ready_leaves_it_there(
    two: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_after(monkeypatch, two.launcher._monitor, "wait_ready")
    with pytest.raises(RunInterrupt, match="when the fresh ranks were there already"):
        two.restart([1])
    check(two)


@pytest.mark.parametrize("again", [[1], None])
def test_a_stop_while_a_rank_ends_says_that_it_is_gone(
    two: Session, monkeypatch: pytest.MonkeyPatch, again: list[int] | None
) -> None:
    press_after(monkeypatch, two.launcher._monitor, "wait_exited")
    text = "rank 1 has ended, and session.restart([1]) starts it. The other ranks keep"
    with pytest.raises(RunInterrupt, match=re.escape(text)):
        two.restart([1])
    assert "rank 1 is dead" in two.status()
    with pytest.raises(errors.EngineDiedError, match=re.escape("session.restart([1])")):
        two.execute("pass")
    two.restart(again)
    if again is None:
        two.execute("kept = 40 + rank")
    check(two)


def test_a_second_stop_while_the_first_is_taken_back_leaves_no_rank_between(
    two: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = two.launcher._monitor
    wait_exited = monitor.wait_exited
    presses = 0

    def pressed(*args: Any) -> bool:
        nonlocal presses
        has_ended = wait_exited(*args)
        presses += 1
        press_stop()
        return has_ended

    with monkeypatch.context() as patch:
        patch.setattr(monitor, "wait_exited", pressed)
        with pytest.raises(KeyboardInterrupt):
            two.restart([1])
    assert presses == 2
    assert "rank 1 is dead" in two.status()
    two.restart([1])
    check(two)


def test_a_stop_as_the_fresh_rank_meets_the_others_leaves_it_there(
    two: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_after(monkeypatch, two.launcher, "_fork")
    with pytest.raises(RunInterrupt, match="when the fresh ranks were there already"):
        two.restart([1])
    check(two)


def test_a_stop_of_the_restart_of_all_ranks_is_taken_back(
    two: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_after(monkeypatch, two.launcher, "_fork")
    with pytest.raises(RunInterrupt, match="all ranks have ended"):
        two.restart()
    assert "all ranks are dead (2 ranks, " in two.status()
    assert two.status().endswith("); session.restart() starts them again")
    text = "ranks 0-1 were to be replaced, but did not start. session.restart() starts all"
    with pytest.raises(errors.EngineDiedError, match=re.escape(text)):
        two.execute("pass")
    two.restart()
    two.execute("kept = 40 + rank")
    check(two)


def test_a_stop_while_a_lost_node_comes_back_is_taken_back(
    backend: Backend, start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(2, nodes=2, **backend.options(2))
    session.execute("kept = 40 + rank")
    agent = psutil.Process(session.infos[1].pid).parent()
    assert agent is not None
    agent.kill()
    until(lambda: "rank 1 is dead" in session.status())
    press_after(monkeypatch, session.launcher._agents, "accept")
    with pytest.raises(RunInterrupt, match="rank 1 has ended"):
        session.restart([1])
    session.restart([1])
    check(session)


@pytest.mark.parametrize("waits", ["_monitor.wait_store", "channel.payloads.relays.wait_up"])
def test_a_stop_while_ranks_of_another_node_are_started_waits_for_none_of_them(
    backend: Backend,
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    waits: str,
) -> None:
    session = start(2, nodes=2, **backend.options(2))
    session.execute("kept = 40 + rank")
    owner, _, name = waits.rpartition(".")
    press_after(monkeypatch, attrgetter(owner)(session.launcher), name)
    with pytest.raises(RunInterrupt, match="rank 1 has ended"):
        session.restart([1])
    session.restart([1])
    check(session)
    assert "is not connected" not in caplog.text


def test_stop_is_pressed_at_any_moment_of_a_restart(two: Session) -> None:
    dice = random.Random(0)
    check(two)
    descriptors = psutil.Process().num_fds()
    for _ in range(MOMENTS):
        pauses = [dice.uniform(0, 0.5), *(dice.uniform(0, 0.05) for _ in range(dice.randrange(3)))]
        press_at(pauses, press_stop, lambda: two.restart([1]))
        if two.launcher.dead_ranks():
            two.restart([1])
        check(two)
    assert psutil.Process().num_fds() <= descriptors + 2


@pytest.mark.usefixtures("cold_agents")
def test_what_the_agent_imports_later_is_no_rubbish_to_be_looked_through() -> None:
    """The agent of a test's session has imported all of it before, that of a user's has not."""
    with Session(1, threads=1) as session:
        session.execute("import sys")

        def restart() -> bool:
            time.sleep(2 * PRELOAD_IDLE_S)  # it imports when it has had nothing to do for a while
            session.restart()
            session.execute("import gc, sys")
            return bool(session.evaluate("'torch.onnx' in sys.modules")[0])

        until(restart)
        found = "[each.__name__ for each in gc.get_objects() if each is sys.modules['sympy']]"
        assert session.evaluate(found)[0] == []


def test_fresh_ranks_have_the_environment_that_the_kernel_has_by_now(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("DS_KEPT", "DS_CHANGED", "DS_GONE", "DS_NEW")
    for name in names[:3]:
        monkeypatch.setenv(name, "before")
    # What Python has of it, and what C libraries and programs see.
    look = "__import__('subprocess').check_output('env', text=True), dict(__import__('os').environ)"
    with backend.session(2) as session:
        monkeypatch.setenv("DS_CHANGED", "after")
        monkeypatch.delenv("DS_GONE")
        monkeypatch.setenv("DS_NEW", "after")
        session.restart()
        for rank, (seen, has) in session.evaluate(look).items():
            assert [has.get(n) for n in names] == ["before", "after", None, "after"]
            shown = dict(line.split("=", 1) for line in seen.splitlines() if "=" in line)
            assert [shown.get(n) for n in names] == ["before", "after", None, "after"]
            assert (has["RANK"], shown["RANK"]) == (str(rank), str(rank))
