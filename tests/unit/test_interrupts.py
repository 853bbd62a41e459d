"""A Ctrl-C waits until nothing is left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distsession.cluster.interrupts import InterruptHold, interrupts_held


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupts(work: Callable[[], object]) -> bool:
    """Whether a KeyboardInterrupt comes out of it."""
    try:
        work()
    except KeyboardInterrupt:
        return True
    return False


def test_a_held_block_is_finished_first() -> None:
    done = []

    def work() -> None:
        with interrupts_held():
            press()
            done.append(True)

    assert interrupts(work)
    assert done


def test_each_press_hurries_a_held_block() -> None:
    pressed = []

    def work() -> None:
        with interrupts_held(lambda: pressed.append(True)):
            press()
            press()

    assert interrupts(work)
    assert len(pressed) == 2


def test_what_is_forgotten_is_not_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupts_held(forget=True):
            press()
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupts(press)


def test_an_interrupt_between_sending_and_waiting_comes_where_it_is_waited() -> None:
    with InterruptHold() as hold:
        hold.hold()
        press()  # while it is sent
        with pytest.raises(KeyboardInterrupt):
            hold.release()
    assert interrupts(press)  # as ever


def test_what_is_taken_back_after_an_interrupt_is_held_again() -> None:
    taken_back = []

    def work() -> None:
        with InterruptHold() as hold:
            hold.hold()
            press()
            try:
                with hold.released():
                    pass
            except KeyboardInterrupt:
                press()
                taken_back.append(True)
                raise

    assert interrupts(work)
    assert taken_back


def test_a_hold_that_nobody_released_ends_with_its_block() -> None:
    sent = []

    def work() -> None:
        with InterruptHold() as hold:
            hold.hold()
            press()
            sent.append(True)

    assert interrupts(work)
    assert sent
    assert interrupts(press)


def test_holds_within_holds_let_go_with_the_outermost() -> None:
    done = []

    def work() -> None:
        with interrupts_held():
            with interrupts_held():
                press()
            done.append(True)

    assert interrupts(work)
    assert done


def test_a_hold_before_anything_is_sent_holds_nothing() -> None:
    with InterruptHold(), pytest.raises(KeyboardInterrupt):
        press()


def test_another_thread_holds_nothing() -> None:
    seen = []

    def look() -> None:
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize(
    "handler",
    [signal.default_int_handler, signal.SIG_IGN, signal.SIG_DFL, lambda number, frame: None],
    ids=["Python's own", "ignored", "the system's", "somebody's"],
)
def test_afterwards_the_handler_is_the_one_that_was_there(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
        with interrupts_held(lambda: None), interrupts_held():
            pass
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


class Rang(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[Callable[[int, object], None]]:
    """A handler that raises, as of programs that end what takes them too long."""

    def ring(number: int, frame: object) -> None:
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    yield ring
    signal.signal(signal.SIGALRM, before)


def test_an_alarm_waits_until_a_held_block_is_over(alarm: Callable[[int, object], None]) -> None:
    done = []

    def work() -> None:
        with interrupts_held(lambda: done.append("hurried")), interrupts_held():
            signal.raise_signal(signal.SIGALRM)
            done.append("over")

    with pytest.raises(Rang):
        work()
    assert done == ["hurried", "over"]
    assert signal.getsignal(signal.SIGALRM) is alarm


def test_an_alarm_does_not_take_the_place_of_a_ctrl_c(alarm: Callable[[int, object], None]) -> None:
    def work() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGALRM)
            press()

    before = signal.getsignal(signal.SIGINT)
    assert interrupts(work)
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGALRM) is alarm


def test_an_alarm_that_nobody_handles_is_left_alone() -> None:
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    with interrupts_held():
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
