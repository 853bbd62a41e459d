"""When a rank's control thread sleeps, and what wakes it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from distsession.engine.control import CHECK_EVERY_MS, Control, Interrupter
from distsession.protocol.messages import StackRequest, encode
from tests.until import until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""For the end of the thread."""
LONG_S = 60.0
REQUEST = 7


class Bed:
    """A control thread, and what it is to see."""

    def __init__(self) -> None:
        context = zmq.Context.instance()
        self.kernel = context.socket(zmq.PAIR)
        place = f"inproc://{id(self)}"
        self.kernel.bind(place)
        rank = context.socket(zmq.PAIR)
        rank.connect(place)
        self.is_limited = False
        self.checks = 0
        self.checked, self.is_over = threading.Event(), threading.Event()
        self.control = Control(
            rank,
            Interrupter(),
            self._handle,
            lambda: False,
            lambda abort: None,
            lambda request: None,
            self._check,
            lambda: self.is_limited,
        )

    def _check(self) -> None:
        self.checks += 1
        self.checked.set()

    def _handle(self, message: Any) -> None:
        if message.number < 0:
            self.is_over.set()
            raise SystemExit  # the only end that the thread has

    def send(self, number: int) -> None:
        self.kernel.send_multipart(encode(StackRequest(number)))


@pytest.fixture
def bed() -> Iterator[Bed]:
    before = signal.getsignal(signal.SIGINT)
    bed = Bed()
    bed.control.start()
    yield bed
    bed.send(-1)
    assert bed.is_over.wait(LONG_S)
    bed.kernel.close(0)
    signal.signal(signal.SIGINT, before)


def test_it_sleeps_while_nothing_has_a_limit(bed: Bed) -> None:
    until(lambda: bed.control._is_at_rest)
    assert not bed.checked.wait(3 * CHECK_EVERY_MS / 1000)


def test_who_begins_something_that_has_one_wakes_it(bed: Bed) -> None:
    until(lambda: bed.control._is_at_rest)
    bed.is_limited = True
    bed.control.watch()
    until(lambda: bed.checks >= 3)  # and so it goes on
    bed.is_limited = False
    until(lambda: bed.control._is_at_rest)


def test_it_repeats_an_interrupt_that_was_let_pass(bed: Bed) -> None:
    """Where the main thread sleeps, it does not come again by itself."""
    until(lambda: bed.control._is_at_rest)
    interrupter = bed.control._interrupter
    interrupter.target(REQUEST)
    sends = threading.Timer(0.1, interrupter.interrupt, [REQUEST])
    sends.start()
    with pytest.raises(KeyboardInterrupt), interrupter.user_code(REQUEST):
        time.sleep(LONG_S)
    sends.join()


def test_it_sleeps_until_something_is_due(bed: Bed) -> None:
    until(lambda: bed.control._is_at_rest)
    for seconds, least, most in ((100.0, CHECK_EVERY_MS, CHECK_EVERY_MS), (0.3, 200, 300)):
        bed.control._timers = [(time.monotonic() + seconds, lambda: None)]
        assert least <= (bed.control._timeout_ms() or 0) <= most
    bed.control._timers = [(time.monotonic() - 1.0, lambda: None)]
    assert bed.control._timeout_ms() == 0
