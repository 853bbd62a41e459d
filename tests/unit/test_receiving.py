"""Who waits for answers receives them; nobody else does meanwhile."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from distsession.cluster.receiving import Receiving
from distsession.protocol.message_listener import MessageListener
from tests.message_ends import MessageEnd
from tests.until import LIMIT_S, until


class Ends:
    def __init__(self, folder: Path):
        self.listener = MessageListener(str(folder / "requests"))
        self.receiving = Receiving(self.listener)
        self.rank = MessageEnd(str(folder / "requests"), b"0.0")
        until(lambda: self.receiving.receive() or self.listener.find(b"0.0"))

    def is_ready(self) -> bool:
        """For the channel's thread."""
        return bool(select.select([self.receiving.descriptor], [], [], 0)[0])

    def take_all(self, seconds: float = LIMIT_S, most: int = 1) -> list[list[bytes]]:
        """As one that waits for so many messages does."""
        found: list[list[bytes]] = []
        deadline = time.monotonic() + seconds
        is_over = partial(lambda found: len(found) == most, found)
        for messages in self.receiving.receive_until(is_over, deadline):
            found += messages
        return found


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.rank.close()
    made.receiving.close()
    made.listener.close()


def test_the_channels_thread_receives_where_nobody_else_does(ends: Ends) -> None:
    ends.rank.send([b"a"])
    until(ends.is_ready)
    assert ends.receiving.receive() == [[b"a"]]
    assert ends.take_all() == []


def test_who_waits_receives_and_the_channels_thread_is_not_woken(ends: Ends) -> None:
    assert ends.receiving.take()
    ends.rank.send([b"a"])
    time.sleep(0.05)
    assert not ends.is_ready()
    assert ends.receiving.receive() == []
    assert ends.take_all() == [[b"a"]]


def test_what_comes_afterwards_is_the_channels_threads_again(ends: Ends) -> None:
    assert ends.receiving.take()
    ends.rank.send([b"a"])
    ends.receiving.give_back()
    ends.receiving.give_back()
    until(ends.is_ready)
    assert ends.receiving.receive() == [[b"a"]]


def test_only_one_thread_takes_the_right_and_only_it_gives_it_back(ends: Ends) -> None:
    assert ends.receiving.take()
    found: list[object] = []

    def other() -> None:
        found.append(ends.receiving.take())
        ends.receiving.give_back()
        found.append(list(ends.receiving.receive_until(lambda: False, time.monotonic() + LIMIT_S)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [False, []]
    assert not ends.receiving.take()


def test_nobody_takes_it_while_the_channels_thread_receives(ends: Ends) -> None:
    taken: list[bool] = []
    receive = ends.listener.receive

    def meanwhile() -> list[tuple[bytes, list[bytes]]]:
        thread = threading.Thread(target=lambda: taken.append(ends.receiving.take()))
        thread.start()
        thread.join()
        return receive()

    ends.listener.receive = meanwhile  # type: ignore[method-assign, assignment]
    assert ends.receiving.receive() == []
    assert taken == [False]


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_who_waits_is_woken_by_any_thread(ends: Ends, pause: float) -> None:
    def wake() -> None:
        time.sleep(pause)
        ends.receiving.wake()

    assert ends.receiving.take()
    thread = threading.Thread(target=wake)
    thread.start()
    began = time.monotonic()
    assert ends.take_all() == []
    assert time.monotonic() - began < LIMIT_S / 2
    thread.join()


def test_a_wake_before_the_wait_ends_it_but_not_the_next_one(ends: Ends) -> None:
    assert ends.receiving.take()
    ends.receiving.wake()
    assert ends.take_all() == []
    ends.receiving.give_back()
    assert ends.receiving.take()
    ends.rank.send([b"a"])
    assert ends.take_all() == [[b"a"]]


def test_the_wait_ends_when_its_time_is_up(ends: Ends) -> None:
    assert ends.receiving.take()
    assert ends.take_all(seconds=0.02) == []


def test_a_close_wakes_who_receives_and_waits_for_it(ends: Ends) -> None:
    began, over = threading.Event(), []

    def lead() -> None:
        assert ends.receiving.take()
        began.set()
        over.append(ends.take_all())
        time.sleep(0.05)
        over.append(True)
        ends.receiving.give_back()

    thread = threading.Thread(target=lead)
    thread.start()
    began.wait()
    ends.receiving.close()
    assert over == [[], True]
    thread.join()


def test_what_is_woken_when_all_is_closed_harms_nobody(ends: Ends) -> None:
    ends.receiving.close()
    ends.listener.close()
    ends.listener.wake()
    ends.receiving.wake()
    assert not ends.receiving.take()
