"""Which threads of the user's go on, beside the main thread and after its part of a run."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from distsession.engine.left_threads import LeftThreads
from distsession.protocol.messages import CellRequest, ReconnectRequest
from tests.until import until

OWN = "of the session"


@pytest.fixture
def end() -> Iterator[threading.Event]:
    """Ends the threads of a test."""
    event = threading.Event()
    yield event
    event.set()


def run(left: LeftThreads) -> None:
    left.begin_request(CellRequest(1, "", "In[1]"))


def beside_the_tests() -> LeftThreads:
    """One for which those do not count that run the tests: their time limit has a timer."""
    return LeftThreads(tuple(thread.name for thread in threading.enumerate()))


def test_what_counts_is_a_thread_that_the_request_has_started(end: threading.Event) -> None:
    left = LeftThreads((OWN,))
    run(left)
    assert not left.are_at_work()
    thread = threading.Thread(target=lambda: end.wait())
    thread.start()
    until(left.are_at_work)
    run(left)  # from here on it is an earlier one
    assert not left.are_at_work()
    threading.Thread(target=lambda: end.wait(), name=OWN).start()
    assert not left.are_at_work()
    end.set()
    thread.join()
    run(left)
    assert not left.are_at_work()


def test_a_thread_without_code_of_the_user_counts_for_nothing() -> None:
    left = LeftThreads(())
    run(left)
    thread = threading.Thread(target=time.sleep, args=(0.3,))
    thread.start()
    assert not left.are_at_work()
    thread.join()


def test_a_timer_counts_before_it_calls_anything() -> None:
    left = LeftThreads(())
    run(left)
    timer = threading.Timer(60, print)
    timer.start()
    assert left.are_at_work()
    timer.cancel()
    timer.join()
    assert not left.are_at_work()


def test_a_thread_of_a_pool_counts_while_it_has_work_of_the_request(end: threading.Event) -> None:
    left = LeftThreads(())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        run(left)
        assert not left.are_at_work()
        work = pool.submit(lambda: end.wait())
        until(left.are_at_work)
        left.begin_request(ReconnectRequest(2, 0))  # which runs nothing
        assert left.are_at_work()
        end.set()
        work.result()
        until(lambda: not left.are_at_work())


def test_while_the_main_thread_waits_an_earlier_thread_counts(end: threading.Event) -> None:
    left = beside_the_tests()
    thread = threading.Thread(target=lambda: end.wait())
    thread.start()
    until(left.any_at_work)
    run(left)
    assert left.any_at_work()
    end.set()
    thread.join()
    assert not left.any_at_work()


def test_while_the_main_thread_waits_a_pool_without_work_counts_for_nothing() -> None:
    left = beside_the_tests()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        until(lambda: not left.any_at_work())


def test_a_thread_that_is_no_object_of_pythons_counts(end: threading.Event) -> None:
    left = beside_the_tests()
    over = threading.Event()
    _thread.start_new_thread(lambda: (end.wait(), over.set()), ())
    until(left.any_at_work)
    end.set()
    assert over.wait(10)
    until(lambda: not left.any_at_work())
