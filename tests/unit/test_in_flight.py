"""What a device was given: when it is seen to be over, and who waits for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

from distsession.engine.collectives.in_flight import InFlight, instruction, is_device_wait
from distsession.engine.collectives.operation_log import BLOCKED, ENDED, Entry
from distsession.protocol import board as layout
from tests.until import until


class Work:
    """A handle of an operation."""

    def __init__(self) -> None:
        self.is_over = False
        self.error: Exception | None = None
        self.asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.is_over


@pytest.fixture
def words() -> memoryview:
    """Those of a stream, with an operation at each slot."""
    words = memoryview(bytearray(8 * layout.SLOT * 100)).cast("Q")
    for number in range(100):
        words[number * layout.SLOT] = number + 1
    return words


@dataclass
class Stream:
    """Where operations are posted."""

    words: memoryview
    name: str = "world"


@pytest.fixture
def in_flight(words: memoryview) -> Callable[[int], Work]:
    flight, stream = InFlight(), Stream(words)

    def add(number: int) -> Work:
        work, at = Work(), number * layout.SLOT
        words[at + layout.STATE] = layout.ENQUEUED
        flight.add((work, stream, at, number + 1, None, 0, 60.0))
        return work

    add.flight = flight  # type: ignore[attr-defined]
    return add


def state(words: memoryview, number: int) -> int:
    return words[number * layout.SLOT + layout.STATE]


def test_what_a_device_was_given_is_enqueued_until_it_is_seen_to_be_complete(
    in_flight: Any, words: memoryview
) -> None:
    first, second = in_flight(0), in_flight(1)
    assert (state(words, 0), state(words, 1)) == (layout.ENQUEUED,) * 2
    second.is_over = True
    in_flight.flight.note_completed()
    assert (state(words, 0), state(words, 1)) == (layout.ENQUEUED, layout.DONE)
    first.is_over = True
    in_flight.flight.note_completed()
    assert state(words, 0) == layout.DONE
    assert len(in_flight.flight) == 0


def test_the_oldest_are_asked_whenever_another_is_issued_so_that_few_are_kept(
    in_flight: Any, words: memoryview
) -> None:
    for number in range(100):
        in_flight(number).is_over = True
    assert len(in_flight.flight) <= 2


def test_of_many_that_cannot_go_on_only_the_oldest_is_asked(in_flight: Any) -> None:
    works = [in_flight(number) for number in range(100)]
    assert sum(work.asked for work in works[1:]) == 0
    assert len(in_flight.flight) == 100


def test_an_operation_that_has_failed_is_over(in_flight: Any, words: memoryview) -> None:
    in_flight(0).error = RuntimeError("NCCL communicator was aborted on rank 0.")
    in_flight.flight.note_completed()
    assert state(words, 0) == layout.DONE


def test_a_slot_that_is_anothers_by_now_is_left_alone(in_flight: Any, words: memoryview) -> None:
    work = in_flight(0)
    words[0], words[layout.STATE] = 65, layout.ISSUED
    work.is_over = True
    in_flight.flight.note_completed()
    assert state(words, 0) == layout.ISSUED


def test_nothing_is_asked_while_a_graph_is_captured(in_flight: Any) -> None:
    work = in_flight(0)
    in_flight.flight.begin_capture()
    in_flight.flight.note_completed()
    assert work.asked == 0
    in_flight.flight.end_capture()
    in_flight.flight.note_completed()
    assert work.asked == 1


def test_a_limit_counts_from_when_an_operation_began_or_from_later(in_flight: Any) -> None:
    work = in_flight(0)  # long ago, and it may take a minute
    flight, now = in_flight.flight, 10**20
    assert flight.overdue(0, now)[0] is work
    assert flight.overdue(now - 10**9, now) is None
    work.is_over = True
    assert flight.overdue(0, now) is None


# --- who waits ------------------------------------------------------------------------------------


class Tensor:
    """Its methods are C functions that wait without the interpreter's lock."""

    def __init__(self, lock: threading.Lock):
        self.item = self.matmul = self.synchronize_all = self.sleep = lock.acquire


def waits(x: Tensor) -> None:
    x.item()


def waits_within(x: Tensor) -> None:
    str(
        [
            # on lines of its own
            x.item()
        ]
    )


def synchronizes(x: Tensor) -> None:
    x.synchronize_all()


def computes(x: Tensor) -> None:
    x.matmul()


def sleeps(x: Tensor) -> None:
    x.sleep()


@pytest.fixture
def frame_of() -> Iterator[Callable[[Callable[[Tensor], None]], Callable[[], FrameType | None]]]:
    """The innermost frame of a thread that is within such a call."""
    threads: list[tuple[threading.Thread, threading.Lock]] = []

    def start(program: Callable[[Tensor], None]) -> Callable[[], FrameType | None]:
        lock = threading.Lock()
        lock.acquire()
        thread = threading.Thread(target=program, args=(Tensor(lock),))
        thread.start()
        threads.append((thread, lock))

        def innermost() -> FrameType | None:
            return sys._current_frames().get(thread.ident or 0)

        def is_there() -> bool:
            frame = innermost()
            return frame is not None and frame.f_code is program.__code__ and frame.f_lasti > 2

        until(is_there)
        until(lambda: instruction(innermost()) == instruction(innermost()))
        return innermost

    yield start
    for thread, lock in threads:
        lock.release()
        thread.join()


@pytest.mark.parametrize(
    ("program", "is_wait"),
    [(waits, True), (waits_within, True), (synchronizes, True), (computes, False), (sleeps, False)],
)
def test_what_is_called_says_whether_a_thread_waits_for_the_device(
    frame_of: Any, program: Callable[[Tensor], None], is_wait: bool
) -> None:
    innermost = frame_of(program)
    until(lambda: is_device_wait(innermost()) == is_wait)


def test_a_thread_waits_only_while_something_is_in_flight(in_flight: Any, frame_of: Any) -> None:
    innermost = frame_of(waits)
    flight = in_flight.flight
    until(lambda: is_device_wait(innermost()))
    assert not flight.is_waited_for(innermost)
    work = in_flight(0)
    assert flight.is_waited_for(innermost)
    work.is_over = True
    assert not flight.is_waited_for(innermost)


def test_a_call_has_one_number_unless_it_waits_for_something_else(frame_of: Any) -> None:
    innermost = frame_of(computes)
    until(lambda: instruction(innermost()) != 0)
    assert instruction(innermost()) == instruction(innermost())
    sleeper = frame_of(sleeps)
    until(lambda: instruction(sleeper()) == 0)
    assert instruction(None) == 0


def test_a_loop_in_python_is_no_call() -> None:
    goes_on = [True]

    def work() -> None:
        total = 0
        while goes_on[0]:
            total += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        seen = {instruction(sys._current_frames().get(thread.ident or 0)) for _ in range(50)}
    finally:
        goes_on[0] = False
        thread.join()
    assert seen == {0}


# --- what is noted of waits -----------------------------------------------------------------------


def logged(flight: InFlight, words: memoryview, number: int) -> tuple[Work, Entry]:
    """An operation that is under way, with its entry in the log of a cell."""
    work, entry = Work(), [None, number + 1, (), 0, 1, 0, 0, 0]
    flight.add((work, Stream(words), number * layout.SLOT, number + 1, entry, 1, 60.0))
    return work, entry


def test_a_wait_is_noted_of_what_is_under_way_meanwhile(words: memoryview, frame_of: Any) -> None:
    innermost, flight = frame_of(waits), InFlight()
    until(lambda: is_device_wait(innermost()))
    work, first = logged(flight, words, 0)
    _, second = logged(flight, words, 1)
    flight.note_wait(innermost)
    assert first[BLOCKED] == 0  # the device may be getting on
    flight.note_wait(innermost)
    began = first[BLOCKED]
    assert 0 < began == second[BLOCKED]
    flight.note_wait(innermost)
    assert first[BLOCKED] == began
    work.is_over = True
    flight.note_wait(innermost)
    assert began < first[ENDED]
    assert not second[ENDED]


def test_what_a_rank_has_gone_on_without_was_not_waited_for(
    words: memoryview, frame_of: Any
) -> None:
    waiting, flight = frame_of(waits), InFlight()
    until(lambda: is_device_wait(waiting()))
    work, came = logged(flight, words, 0)
    _, never = logged(flight, words, 1)
    for _ in range(2):
        flight.note_wait(waiting)
    work.is_over = True
    flight.note_wait(frame_of(computes))
    assert came[BLOCKED] > 0
    assert never[BLOCKED] == 0
