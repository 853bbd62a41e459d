"""A push sets its names on all ranks or on none, whatever comes in between."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distsession import Session
from distsession.errors import DistsessionError, RunError, RunInterrupt
from tests.until import LIMIT_S, Press, until

LARGE = 300_000  # elements, well above what goes through the buffer
BUFFERED = 50_000  # and above what goes with a message

LATE = "the variables are set"


def value(number: int) -> dict[str, Any]:
    """What is pushed: one small, one large, of which every other goes through the buffer."""
    return {"x": number, "y": torch.full((BUFFERED if number % 2 else LARGE,), number)}


def held(session: Session) -> set[tuple[int, int]]:
    """What the ranks have of it."""
    return set(session.evaluate("(x, int(y[-1]))").values())


def test_what_is_pushed_is_there_for_whatever_follows(session: Session) -> None:
    for number in range(50):
        session.push(value(number))
        assert held(session) == {(number, number)}


def test_a_stop_at_any_moment_sets_the_names_on_all_ranks_or_on_none(session: Session) -> None:
    moment = random.Random(1)
    session.push(value(0))
    has, told_unset = 0, 0
    for number in range(1, 80):
        timer = threading.Timer(
            moment.uniform(0.0, 0.008), signal.raise_signal, args=[signal.SIGINT]
        )
        is_set: bool | None = None
        try:
            timer.start()
            session.push(value(number))
            is_set = True
            timer.join()
            time.sleep(0.001)
        except RunInterrupt as stopped:
            is_set = LATE in str(stopped)
            told_unset += not is_set
        except KeyboardInterrupt:  # before or behind what looks after it
            pass
        timer.join()
        found = held(session)
        assert found in ({(has, has)}, {(number, number)})
        assert is_set is None or (found == {(number, number)}) == is_set
        ((has, _),) = found
    assert told_unset


def test_a_rank_that_is_killed_at_any_moment_leaves_the_others_alike(
    start: Callable[..., Session],
) -> None:
    moment = random.Random(2)
    session = start(3)
    session.push(value(0))
    for number in range(1, 9):
        timer = threading.Timer(
            moment.uniform(0.0, 0.006), os.kill, args=[session.infos[1].pid, signal.SIGKILL]
        )
        try:
            timer.start()
            session.push(value(number))
        except DistsessionError:
            pass
        timer.join()
        until(lambda: 1 in session.recovery.launcher.dead_ranks())
        session.restart([1])
        found = set(session[[0, 2]].evaluate("(x, int(y[-1]))").values())
        assert found in ({(number - 1, number - 1)}, {(number, number)})
        session.push(value(number))
        assert held(session) == {(number, number)}


def test_what_runs_beside_a_push_sees_the_same_on_all_ranks(session: Session) -> None:
    session.push(value(0))
    is_over = threading.Event()
    mixed: list[set[tuple[int, int]]] = []

    def look() -> None:
        while not is_over.is_set():
            found = held(session)
            if len(found) > 1:
                mixed.append(found)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(1, 150):
            session.push(value(number))
    finally:
        is_over.set()
        thread.join()
    assert not mixed


def test_what_was_there_before_is_let_go_though_nothing_follows(session: Session) -> None:
    def mapped() -> int:
        with open(f"/proc/{session.infos[0].pid}/maps") as maps:
            return maps.read().count("memfd:distsession (")

    session.push(value(0))
    session.execute("import gc; gc.collect()")
    until(lambda: mapped() == 1)  # the value's own, once the sender has closed what it kept
    session.push(value(2))
    until(lambda: mapped() == 1)  # the new one's; with the old one it would be two


def test_what_fails_on_one_rank_is_let_go_on_the_others(session: Session) -> None:
    class Fragile:
        def __reduce__(self) -> Any:
            return eval, ("1 / (int(__import__('os').environ['RANK']) == 0)",)

    session.push(value(0))
    with pytest.raises(RunError, match="what was pushed cannot be rebuilt"):
        session.push(value(1), fragile=Fragile())
    board = session.recovery.launcher.board
    assert board is not None
    until(lambda: not any(region.staged for region in board.regions))
    assert held(session) == {(0, 0)}


def test_a_stop_reaches_the_end_of_what_is_replaced(session: Session) -> None:
    session.execute(
        "import time\n"
        "class Clinging:\n"
        "    def __del__(self):\n"
        "        time.sleep(600)\n"
        "x = Clinging()"
    )
    with Press(session, lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(RunInterrupt):
        session.push(x=5)
    assert dict(session.pull("x")) == {0: 5, 1: 5}


def test_completion_knows_what_was_just_pushed(session: Session) -> None:
    launcher = session.recovery.launcher
    for number in range(30):
        session.push({f"pushed_{number}": number})
        replies = launcher.complete([0, 1], f"pushed_{number}", False, LIMIT_S)
        assert [[text for text, _ in reply.matches] for reply in replies.values()] == [
            [f"pushed_{number}"],
            [f"pushed_{number}"],
        ]
    session.execute("[globals().pop(n) for n in list(globals()) if n.startswith('pushed_')]")


def test_ipyparallel_finds_what_was_just_pushed(start: Callable[..., Session]) -> None:
    session = start(2)
    peers = session.client[:]
    for number in range(20):
        session.push(x=number)
        assert peers.pull("x", block=True) == [number, number]
