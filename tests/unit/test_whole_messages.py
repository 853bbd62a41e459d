"""A message of a connection comes whole within its time, or is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from distsession.protocol import whole_messages
from distsession.protocol.attach import EndSession


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = Pipe()
    yield one, other
    one.close()
    other.close()


Ends = tuple[Connection, Connection]


@pytest.mark.parametrize("size", [0, 10, 20_000, 3 << 20])
def test_they_are_those_of_multiprocessing(ends: Ends, size: int) -> None:
    one, other = ends
    for send, receive in (
        (one.send, lambda: whole_messages.receive(other, 10)),
        (lambda data: whole_messages.send(one, data, 10), other.recv),
    ):
        thread = threading.Thread(target=send, args=(b"x" * size,))
        thread.start()
        assert receive() == b"x" * size
        thread.join()


def test_one_who_trickles_has_no_more_time_than_one_who_is_silent(ends: Ends) -> None:
    one, other = ends
    is_over = threading.Event()

    def trickle() -> None:
        data = whole_messages._HEAD.pack(1000) + bytes(1000)
        for at in range(len(data)):
            one._send(data[at : at + 1])  # type: ignore[attr-defined]
            if is_over.wait(0.02):
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        whole_messages.receive(other, 0.3)
    assert 0.2 < time.monotonic() - began < 2
    is_over.set()
    thread.join()


def test_one_who_reads_slowly_has_so_much_time_and_no_more(ends: Ends) -> None:
    one, _ = ends
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        whole_messages.send(one, bytes(16 << 20), 0.3)
    assert 0.2 < time.monotonic() - began < 2


@pytest.mark.parametrize("head", [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
def test_one_who_announces_too_much_is_refused_at_once(ends: Ends, head: bytes) -> None:
    ends[0]._send(head)  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError, match="no message"):
        whole_messages.receive(ends[1], 10)


def test_one_who_is_gone_is_the_end(ends: Ends) -> None:
    one, other = ends
    one._send(b"\0\0")  # type: ignore[attr-defined]
    one.close()
    with pytest.raises(EOFError):
        whole_messages.receive(other, 10)


def test_it_stays_as_it_was_for_recv_and_send(ends: Ends) -> None:
    one, other = ends
    whole_messages.send(one, EndSession("x"), 1)
    assert whole_messages.receive(other, 1) == EndSession("x")
    other.send(1)
    assert one.recv() == 1
