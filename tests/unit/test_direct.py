"""The sockets on which a rank gets a request, and answers it, with nobody in between."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator

import pytest

from distsession.cluster.direct import DirectSockets
from distsession.protocol.direct import LARGEST, direct_path, open_socket


class Ends:
    """The kernel's ends, and those of some ranks."""

    def __init__(self, folder: str):
        self.folder = folder
        self.kernel = DirectSockets(folder, 1)
        self._ranks: list[socket.socket] = []

    def connect(self, name: bytes) -> socket.socket:
        rank = open_socket()
        rank.connect(direct_path(self.folder, 1))
        rank.send(name)
        self._ranks.append(rank)
        return rank

    def received(self) -> list[tuple[bytes, bytes]]:
        return [(name, bytes(data)) for name, data in self.kernel.receive()]

    def close(self) -> None:
        self.kernel.close()
        for rank in self._ranks:
            rank.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with tempfile.TemporaryDirectory() as folder:
        ends = Ends(folder)
        yield ends
        ends.close()


def test_messages_go_to_and_come_from_who_has_said_its_name(ends: Ends) -> None:
    first, second = ends.connect(b"0.0"), ends.connect(b"0.1")
    assert ends.received() == []
    assert ends.kernel.send(b"0.1", b"a request")
    assert second.recv(100) == b"a request"
    first.send(b"one")
    second.send(b"two")
    assert set(ends.received()) == {(b"0.0", b"one"), (b"0.1", b"two")}


def test_all_that_has_come_is_received_at_once(ends: Ends) -> None:
    rank = ends.connect(b"0.0")
    for number in range(5):
        rank.send(b"%d" % number)
    assert ends.received() == [(b"0.0", b"%d" % number) for number in range(5)]
    assert ends.received() == []


def test_who_has_not_connected_is_sent_nothing(ends: Ends) -> None:
    assert not ends.kernel.send(b"0.0", b"x")
    ends.connect(b"0.0")
    assert not ends.kernel.send(b"0.0", b"x")  # it has not been taken in
    ends.received()
    assert ends.kernel.send(b"0.0", b"x")


def test_what_is_too_large_goes_another_way(ends: Ends) -> None:
    rank = ends.connect(b"0.0")
    ends.received()
    assert not ends.kernel.send(b"0.0", bytes(LARGEST + 1))
    assert ends.kernel.send(b"0.0", bytes(LARGEST))
    assert len(rank.recv(2 * LARGEST)) == LARGEST


def test_who_does_not_read_holds_nobody_up(ends: Ends) -> None:
    ends.connect(b"0.0")
    ends.received()
    assert not all(ends.kernel.send(b"0.0", bytes(LARGEST)) for _ in range(1000))


def test_who_is_gone_is_told_once_and_dropped(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rank = ends.connect(b"0.0")
    rank.send(b"the last")
    rank.close()
    seen = []
    for name, data in ends.kernel.receive():
        seen.append(bytes(data))
        if not data:
            ends.kernel.drop(name)
    assert seen == [b"the last", b""]
    assert not ends.kernel.send(b"0.0", b"x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_says_nothing_and_goes_leaves_nothing(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    rank = open_socket()
    rank.connect(direct_path(ends.folder, 1))
    assert ends.received() == []
    rank.close()
    assert ends.received() == []
    assert len(os.listdir("/proc/self/fd")) == before
