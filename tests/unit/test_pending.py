"""Waiting for the answers of ranks, and the output on the way."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from distsession.cluster.pending import OutputBudget, PendingRequest
from distsession.errors import EngineDiedError, RunTimeoutError
from distsession.protocol.messages import ClearOutput, Display, ErrorInfo, OutputEnd, Reply, Text
from tests.until import until


def text(rank: int, what: str = "x") -> Text:
    return Text(rank, 1, "stdout", what)


def reply(rank: int, has_output: bool = False) -> Reply:
    return Reply(1, rank, has_output=has_output)


def failure(rank: int) -> Reply:
    return Reply(1, rank, error=ErrorInfo("ValueError", "on purpose"))


def death(rank: int) -> EngineDiedError:
    return EngineDiedError(f"rank {rank} is gone", rank=rank, pid=1, returncode=-9)


def is_done(pending: PendingRequest) -> bool:
    """Whether a wait ends at once, dropping the output."""
    try:
        pending.wait(lambda message: None, timeout=0.02)
    except RunTimeoutError:
        return False
    return True


def test_a_request_is_done_when_every_rank_has_answered() -> None:
    pending = PendingRequest(1, (0, 2))
    pending.put_reply(reply(2), [b"two"])
    assert pending.missing == (0,)
    assert not is_done(pending)
    pending.put_reply(reply(0), [b"zero"])
    assert pending.missing == ()
    assert is_done(pending)
    assert {rank: payload for rank, (_, payload) in pending.replies.items()} == {
        0: [b"zero"],
        2: [b"two"],
    }


def test_output_is_handed_on_in_the_order_in_which_it_came() -> None:
    pending = PendingRequest(1, (0, 1))
    sent: list[Any] = [
        text(0, "a"),
        text(1, "b"),
        Display(0, 1, {"text/plain": "c"}, {}),
        ClearOutput(1, 1, False),
        text(0, "d"),
    ]
    for message in sent:
        pending.put_output(message)
    pending.put_reply(reply(0), [])
    pending.put_reply(reply(1), [])
    seen: list[Any] = []
    pending.wait(seen.append)
    assert seen == sent


def test_a_ctrl_c_loses_no_output_and_shows_none_twice() -> None:
    pending = PendingRequest(1, (0,))
    sent = [text(0, str(number)) for number in range(600)]
    seen: list[Any] = []
    is_waiting = threading.Event()

    def put() -> None:
        is_waiting.wait()
        for message in sent:
            pending.put_output(message)
            signal.pthread_kill(main, signal.SIGINT)
            until(lambda message=message: seen[-1:] == [message])
        pending.put_reply(reply(0), [])

    main = threading.get_ident()
    thread = threading.Thread(target=put)
    thread.start()
    presses = 0
    while True:
        try:
            is_waiting.set()
            pending.wait(seen.append)
            break
        except KeyboardInterrupt:
            presses += 1
    thread.join()
    assert seen == sent
    assert presses > len(sent) / 2


def test_the_second_ctrl_c_ends_output_that_is_not_taken() -> None:
    pending = PendingRequest(1, (0,))
    pending.put_output(text(0))

    def is_full(message: Any) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was not ended")

    with pytest.raises(KeyboardInterrupt):
        pending.wait(is_full)


def test_a_reply_with_output_waits_for_the_end_of_that_output() -> None:
    pending = PendingRequest(1, (0,))
    pending.put_reply(reply(0, has_output=True), [])
    assert not is_done(pending)
    pending.put_output(text(0, "late"))
    pending.put_output(OutputEnd(0, 1))
    seen: list[Any] = []
    pending.wait(seen.append, timeout=5)
    assert seen == [text(0, "late")]


def test_the_end_of_the_output_may_come_before_the_reply() -> None:
    pending = PendingRequest(1, (0,))
    pending.put_output(OutputEnd(0, 1))
    assert not is_done(pending)
    pending.put_reply(reply(0, has_output=True), [])
    assert is_done(pending)


def test_one_ranks_output_does_not_end_anothers() -> None:
    pending = PendingRequest(1, (0, 1))
    pending.put_reply(reply(0, has_output=True), [])
    pending.put_reply(reply(1, has_output=True), [])
    pending.put_output(OutputEnd(1, 1))
    assert not is_done(pending)
    pending.put_output(OutputEnd(0, 1))
    assert is_done(pending)


def test_a_death_counts_as_an_answer() -> None:
    pending = PendingRequest(1, (0, 1))
    pending.put_death(death(1))
    assert pending.missing == (0,)
    assert not is_done(pending)
    pending.put_reply(reply(0), [])
    assert is_done(pending)
    assert pending.deaths[1].returncode == -9


def test_a_rank_that_is_gone_before_the_end_of_its_output_cuts_the_run_short() -> None:
    pending = PendingRequest(1, (0, 1))
    for rank in pending.ranks:
        pending.put_reply(reply(rank, has_output=True), [])
    pending.put_output(OutputEnd(0, 1))
    pending.put_death(death(0))
    assert not pending.is_cut_short
    pending.put_death(death(1))
    assert pending.is_cut_short
    assert not pending.deaths
    assert is_done(pending)


def test_a_rank_that_answered_and_then_died_has_answered() -> None:
    pending = PendingRequest(1, (0,))
    pending.put_reply(reply(0, has_output=True), [b"value"])
    pending.put_death(death(0))
    assert is_done(pending)
    assert pending.deaths == {}
    assert pending.replies[0][1] == [b"value"]


def test_the_death_of_a_rank_that_takes_no_part_does_not_matter() -> None:
    pending = PendingRequest(1, (0,))
    pending.put_death(death(3))
    assert pending.deaths == {}
    assert pending.missing == (0,)


def test_a_wait_that_takes_too_long_names_the_ranks_that_are_missing() -> None:
    pending = PendingRequest(1, (0, 1, 2, 3))
    pending.put_reply(reply(1), [])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^ranks 0,2-3 did not finish within 0\.1 s\.$"):
        pending.wait(lambda message: None, timeout=0.1)
    assert 0.09 < time.monotonic() - began < 5


def test_a_wait_can_be_taken_up_again_after_it_took_too_long() -> None:
    pending = PendingRequest(1, (0,))
    assert not is_done(pending)
    pending.put_reply(reply(0), [])
    assert is_done(pending)


def test_a_waiting_thread_is_woken_by_the_last_answer() -> None:
    pending = PendingRequest(1, (0,))
    waiting = threading.Thread(target=pending.wait, args=(lambda message: None,), daemon=True)
    waiting.start()
    assert waiting.is_alive()
    pending.put_reply(reply(0), [])
    waiting.join(10)
    assert not waiting.is_alive()


# --- the budget -----------------------------------------------------------------------------------


def test_output_that_waits_is_counted_until_it_is_taken() -> None:
    budget = OutputBudget(limit=10)
    pending = PendingRequest(1, (0,), budget)
    pending.put_output(text(0, "x" * 10))
    assert not budget.is_over
    pending.put_output(text(0, "x"))
    assert budget.is_over
    assert not is_done(pending)
    assert not budget.is_over


def test_requests_share_a_budget() -> None:
    budget = OutputBudget(limit=10)
    first, second = PendingRequest(1, (0,), budget), PendingRequest(2, (0,), budget)
    first.put_output(text(0, "x" * 6))
    second.put_output(text(0, "x" * 6))
    assert budget.is_over
    assert not is_done(first)
    assert not budget.is_over


def test_a_picture_weighs_as_much_as_its_data() -> None:
    budget = OutputBudget(limit=1_000_000)
    PendingRequest(1, (0,), budget).put_output(Display(0, 1, {"image/png": b"x" * 1_000_001}, {}))
    assert budget.is_over


def test_what_is_over_the_budget_is_handed_on_all_the_same() -> None:
    pending = PendingRequest(1, (0,), OutputBudget(limit=1))
    for number in range(100):
        pending.put_output(text(0, str(number)))
    pending.put_reply(reply(0), [])
    seen: list[Any] = []
    pending.wait(seen.append)
    assert [message.text for message in seen] == [str(number) for number in range(100)]


def test_who_waits_behind_others_is_looked_after_when_its_turn_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distsession.cluster.pending.CHECK_QUEUED_EVERY_S", 1000.0)
    pending = PendingRequest(2, (0, 1), queued=True)
    checks: list[float] = []
    thread = threading.Thread(
        target=pending.wait, args=(lambda message: None, None, lambda: checks.append(1.0))
    )
    thread.start()
    try:
        time.sleep(0.3)
        assert not checks
        pending.come_next()
        until(lambda: bool(checks))
    finally:
        pending.put_reply(Reply(2, 0), [])
        pending.put_reply(Reply(2, 1), [])
        thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("is_due", "most"), [(False, 1), (True, 5)], ids=["by themselves", "that are asked for"]
)
def test_checks_that_take_long_are_the_more_seldom(
    is_due: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending, checks = PendingRequest(1, [0]), 0
    monkeypatch.setattr(time, "thread_time", lambda: 0.1 * checks)

    def check() -> float | None:
        nonlocal checks
        checks += 1
        return time.monotonic() if is_due else None

    with pytest.raises(RunTimeoutError):
        pending.wait(lambda _: None, timeout=0.5, check=check)
    assert 1 <= checks <= most


@contextlib.contextmanager
def checked(pending: PendingRequest, due: float | None = None) -> Iterator[list[float]]:
    """Somebody waits within, who would have no check for very long; gives when there was one."""
    checks: list[float] = []

    def check() -> float | None:
        checks.append(time.monotonic())
        return due

    thread = threading.Thread(target=pending.wait, args=(lambda message: None, None, check))
    thread.start()
    try:
        yield checks
    finally:
        for rank in pending.missing:
            pending.put_reply(reply(rank), [])
        thread.join(5)
    assert not thread.is_alive()


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distsession.cluster.pending.CHECKS", ((math.inf, 1000.0),))


@pytest.mark.usefixtures("seldom")
@pytest.mark.parametrize("how", ["error", "death"])
def test_the_first_rank_that_fails_is_looked_at_without_waiting(how: str) -> None:
    pending = PendingRequest(1, (0, 1, 2, 3))
    with checked(pending) as checks:
        pending.put_reply(reply(0), [])
        time.sleep(0.1)
        assert not checks
        if how == "error":
            pending.put_reply(failure(1), [])
        else:
            pending.put_death(death(1))
        until(lambda: checks)
        pending.put_reply(failure(2), [])  # of which the next check hears
        time.sleep(0.1)
        assert len(checks) == 1


@pytest.mark.usefixtures("seldom")
def test_a_check_says_when_the_next_one_has_to_be() -> None:
    pending = PendingRequest(1, (0, 1))
    due = time.monotonic() + 0.3
    with checked(pending, due) as checks:
        pending.put_reply(failure(0), [])
        until(lambda: len(checks) > 1)
        assert checks[0] < due <= checks[1]
