"""Calls that are over at once: who waits receives the answers, whatever happens meanwhile."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distsession import (
    DistsessionError,
    EngineDiedError,
    RunError,
    RunInterrupt,
    Session,
    SessionStateError,
)
from tests.until import LIMIT_S

pytestmark = pytest.mark.timeout(120)

RANKS = 2


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(RANKS, threads=1) as session:
        yield session


def wake_ups(name: str) -> int:
    """How often a thread of this process has waited for something."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("voluntary"))
    return int(line.split()[1])


def test_no_other_thread_of_the_kernel_is_woken(session: Session) -> None:
    session.run(int)
    before = wake_ups("distsession-channel")
    for _ in range(200):
        session.run(int)
    assert wake_ups("distsession-channel") - before < 50


def test_what_it_prints_is_there_when_it_is_over(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(50):
        session.run(lambda number=number: print(f"number {number}"))
        lines = sorted(capsys.readouterr().out.splitlines())
        assert lines == [f"[{rank}] number {number}" for rank in range(RANKS)]


def test_a_stop_at_any_moment_is_heeded_at_once(session: Session) -> None:
    chance = random.Random(17)
    took = []
    for _ in range(40):
        pause, pressed = chance.uniform(0.0, 0.07), []

        def press(pause: float = pause, pressed: list[float] = pressed) -> None:
            time.sleep(pause)
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)

        def stopped(thread: threading.Thread = thread) -> None:
            thread.start()
            session.run(time.sleep, LIMIT_S)

        with pytest.raises(KeyboardInterrupt):
            stopped()
        took.append(time.monotonic() - pressed[0])
        thread.join()
        assert set(session.evaluate("rank + 1").values()) == {1, 2}
    assert max(took) < LIMIT_S / 2


def test_an_alarm_that_raises_at_any_moment_loses_no_answer(session: Session) -> None:
    class Over(Exception):
        pass

    def ring(*_: object) -> None:
        raise Over

    def again_and_again() -> None:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.02))
        deadline = (
            time.monotonic() + 0.1
        )  # code that it rings in may take it for an error of its own
        while time.monotonic() < deadline:
            session.run(int)

    chance, rang = random.Random(3), 0
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(50):
            try:
                again_and_again()
            except (Over, DistsessionError):
                rang += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert dict(session.run(int)) == dict.fromkeys(range(RANKS), 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rang > 25
    assert not any(session.channel.is_busy(rank) for rank in session.ranks)


def test_an_error_is_told_like_any_other(session: Session) -> None:
    for _ in range(20):
        with pytest.raises(RunError, match="ZeroDivisionError"):
            session.run(lambda: 1 // 0)


def test_threads_that_call_at_the_same_time_get_their_own_answers(session: Session) -> None:
    def call(number: int) -> list[int]:
        return list(session.run(lambda: number).values())

    numbers = range(400)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(call, number) for number in numbers]
        here = [call(-number) for number in numbers]
        assert [future.result() for future in futures] == [[n] * RANKS for n in numbers]
    assert here == [[-n] * RANKS for n in numbers]


def test_a_short_call_beside_a_long_one_of_other_ranks_is_over_first(session: Session) -> None:
    future = session[0].submit(time.sleep, 1.0)
    for _ in range(20):
        assert dict(session[1].run(lambda: 1)) == {1: 1}
    assert not future.done()
    future.result(LIMIT_S)


def test_after_ten_thousand_nothing_more_is_open(session: Session) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    session.run(int)
    before = open_files()
    for _ in range(10_000):
        session.run(int)
    assert open_files() <= before + 2


def test_a_rank_that_dies_at_once_is_named(session: Session) -> None:
    for _ in range(3):
        with pytest.raises(RunError, match=r"rank 1 .*killed by SIGKILL") as caught:
            session[1].run(lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert isinstance(caught.value.by_rank[1], EngineDiedError)
        session.restart([1])


def test_a_close_by_another_thread_ends_it() -> None:
    for pause in (0.0, 0.005, 0.02, 0.1):
        with Session(RANKS, threads=1) as closed:
            closed.run(int)
            closing = threading.Timer(pause, closed.close)
            closing.start()
            with pytest.raises((RunError, SessionStateError, RunInterrupt)):
                closed.run(time.sleep, LIMIT_S)
            closing.join()
