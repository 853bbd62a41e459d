"""By which road a payload goes to ranks and comes from them, and when it is let go."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsession.cluster import relays
from distsession.cluster.payloads import Part, Payloads
from distsession.cluster.relay import Upload
from distsession.cluster.relays import Relays
from distsession.engine.relay import Relay
from distsession.errors import DistsessionError, SessionStateError
from distsession.protocol import shared_memory, unix_socket, wire
from distsession.protocol.messages import PushRequest, Shared, decode, encode
from distsession.protocol.shared_buffer import LARGEST
from distsession.protocol.shared_memory import (
    Link,
    LinkListener,
    Segment,
    length_of,
    map_private,
)
from distsession.protocol.wire import (
    RelayHere,
    Wire,
    connect,
    make_node_folder,
    memory_path,
    socket_path,
)
from tests.until import until

REQUEST = PushRequest(1)
SIZE = LARGEST + 1
"""Of what goes through a segment."""
LARGE = b"x" * SIZE


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Roads:
    """The roads of a session, with the ranks at their other ends."""

    def __init__(self, folder: str):
        self.folder = folder
        self.payloads = Payloads(folder)
        self.stack = contextlib.ExitStack()
        self.ranks: dict[int, Link] = {}
        self._relay_thread: threading.Thread | None = None
        self._far: tuple[Relay, LinkListener] | None = None

    def add(self, rank: int, node: int = 0, generation: int = 0) -> Link:
        """A rank has started and has connected."""
        name = f"{generation}.{rank}"
        self.payloads.place(rank, name, node)
        self.ranks[rank] = Link.connect(memory_path(self.folder, node), name)
        self.payloads.link([rank])
        return self.ranks[rank]

    def add_relay(self, node: int) -> None:
        make_node_folder(self.folder, node)
        links = LinkListener(memory_path(self.folder, node))
        relay = Relay(connect(self.folder, node), links, node)
        self._far = relay, links
        self._relay_thread = threading.Thread(target=relay.serve)
        self._relay_thread.start()
        self.payloads.relays.accept()

    def prepare(self, ranks: Sequence[int], payload: Any, progress: Any = None) -> dict[int, Part]:
        return self.payloads.prepare(ranks, payload, progress, self.stack)

    def read(self, rank: int, part: Part) -> list[bytes]:
        """What a rank finds that gets the message of a request."""
        message, payload = decode(self.frames(rank, part))
        assert message == REQUEST
        if not isinstance(payload, Shared):
            return [bytes(frame) for frame in payload]
        with self.ranks[rank].receive(payload) as handed:
            return [bytes(view) for view in map_private(handed.descriptor, payload.sizes)]

    def frames(self, rank: int, part: Part) -> list[Any]:
        """The message of a request to a rank."""
        if isinstance(part, Segment):
            return self.payloads.encode(rank, REQUEST, part)
        if isinstance(part, Upload):
            return self.payloads.hand([rank], REQUEST, part)
        return encode(REQUEST, part)

    def offer(self, rank: int, frames: list[bytes]) -> Shared:
        """A rank hands something over."""
        with Segment([len(frame) for frame in frames]) as made:
            made.write(frames)
            return self.ranks[rank].send(made)

    def close(self) -> None:
        self.payloads.relays.is_expected = lambda node: True
        self.stack.close()
        self.payloads.close()
        for link in self.ranks.values():
            link.close()
        if self._relay_thread is not None and self._far is not None:
            self._relay_thread.join(10)
            assert not self._relay_thread.is_alive()
            self._far[0]._wire.close()
            self._far[0]._pool.close()
            self._far[1].close()


@pytest.fixture
def roads() -> Iterator[Roads]:
    with tempfile.TemporaryDirectory() as folder:
        roads = Roads(folder)
        yield roads
        roads.close()


# --- to ranks of this host ------------------------------------------------------------------------


def test_a_small_payload_goes_with_the_message(roads: Roads) -> None:
    roads.add(0)
    parts = roads.prepare([0], [b"head", b"tail"])
    _, payload = decode(roads.frames(0, parts[0]))
    assert payload == (b"head", b"tail")
    roads.payloads.keep(1, parts, roads.stack)
    assert roads.payloads._sent == {}


def test_a_large_one_is_written_once_for_all_ranks(roads: Roads) -> None:
    for rank in (0, 1):
        roads.add(rank)
    told: list[tuple[int, int]] = []
    parts = roads.prepare([0, 1], [b"head", LARGE], lambda *at: told.append(at))
    assert isinstance(parts[0], Segment)
    assert parts[0] is parts[1]
    assert [roads.read(rank, parts[rank]) for rank in (0, 1)] == [[b"head", LARGE]] * 2
    assert told[-1] == (SIZE + 4, SIZE + 4)


def test_each_rank_may_get_its_own_which_is_made_when_it_is_its_turn(roads: Roads) -> None:
    made: list[int] = []

    def maker(rank: int) -> Any:
        roads.add(rank)

        def make() -> list[bytes]:
            made.append(rank)
            return [bytes([rank]) * (SIZE if rank else 5)]

        return make

    makers = {rank: maker(rank) for rank in (2, 0, 1)}
    assert made == []
    parts = roads.prepare([0, 1, 2], makers)
    assert made == [0, 1, 2]
    assert [len(roads.read(rank, parts[rank])[0]) for rank in range(3)] == [5, SIZE, SIZE]
    assert roads.read(2, parts[2])[0][:1] == b"\2"


def test_memory_that_somebody_owns_is_handed_on_and_left_to_its_owner(roads: Roads) -> None:
    roads.add(0)
    roads.payloads.place(5, "0.5", 1)
    with Segment([3]) as made:
        made.write([b"abc"])
        parts = roads.prepare([0, 5], made)
        assert roads.read(0, parts[0]) == [b"abc"]
        assert parts[5] == []  # which cannot share it
        roads.stack.close()
        assert made.is_free


def test_a_rank_that_cannot_be_handed_memory_gets_the_bytes_themselves(
    roads: Roads, caplog: pytest.LogCaptureFixture
) -> None:
    roads.add(0).close()
    parts = roads.prepare([0], [LARGE])
    assert roads.read(0, parts[0]) == [LARGE]
    assert "rank 0 does not take shared memory" in caplog.text


def test_a_stop_before_the_request_is_sent_lets_the_memory_go(roads: Roads) -> None:
    roads.add(0)
    before = descriptors()
    roads.prepare([0], [LARGE])
    # Before 3.13 Python holds one more for the page in which ranks return it.
    assert descriptors() == before + 1 + (sys.version_info < (3, 13))
    roads.stack.close()
    assert descriptors() == before


def test_what_was_sent_is_held_until_the_request_is_over(roads: Roads) -> None:
    roads.add(0)
    before = descriptors()
    parts = roads.prepare([0], [LARGE])
    message = roads.payloads.encode(0, REQUEST, parts[0])
    roads.payloads.keep(1, parts, roads.stack)
    roads.stack.close()
    part = parts[0]
    assert isinstance(part, Segment)
    assert part.descriptor >= 0  # a rank that does not take it in time gets it all the same
    roads.payloads.forget(1, taken=False)
    assert part.descriptor == -1
    _, shared = decode(message)
    with roads.ranks[0].receive(shared) as handed:  # it has been sent
        assert map_private(handed.descriptor, shared.sizes) == [LARGE]
    assert descriptors() == before


def test_memory_that_all_ranks_have_read_is_written_to_again(
    roads: Roads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "KEEP", 60.0)
    roads.add(0)
    segments = []
    for number, fill in enumerate((b"a", b"b", b"c")):
        parts = roads.prepare([0], [fill * SIZE])
        assert roads.read(0, parts[0]) == [fill * SIZE]
        roads.payloads.keep(number, parts, roads.stack)
        segments.append(parts[0])
        roads.payloads.forget(number, taken=number == 0)
    assert segments[0] is segments[1]
    assert segments[2] is not segments[1]  # not every rank had taken it


def test_to_forget_what_is_not_held_is_harmless(roads: Roads) -> None:
    roads.payloads.forget(9, taken=True)
    roads.payloads.forget(9, taken=False)
    assert roads.payloads._pool._kept == []


# --- from ranks of this host ----------------------------------------------------------------------


def test_what_a_rank_hands_over_is_read_and_may_be_changed(roads: Roads) -> None:
    roads.add(0)
    shared = roads.offer(0, [b"head", LARGE])
    assert roads.payloads.is_here(shared)
    head, large = roads.payloads.open(shared)
    assert (bytes(head), bytes(large)) == (b"head", LARGE)
    large[:1] = b"y"
    assert bytes(large[:2]) == b"yx"


def test_what_nobody_opened_is_let_go_with_what_comes_next(roads: Roads) -> None:
    roads.add(0)
    before = descriptors()
    roads.offer(0, [b"of no interest"])
    views = roads.payloads.open(roads.offer(0, [b"wanted"]))
    assert [bytes(view) for view in views] == [b"wanted"]
    del views
    assert descriptors() == before


def test_a_rank_that_takes_the_place_of_another_has_a_link_of_its_own(roads: Roads) -> None:
    old = roads.add(0)
    new = roads.add(0, generation=1)
    assert roads.read(0, roads.prepare([0], [LARGE])[0]) == [LARGE]
    assert new is not old
    with Segment([1]) as made, pytest.raises(OSError, match="Broken pipe"):
        old.send(made)
    with pytest.raises(OSError, match="timed out"):
        roads.payloads.open(Shared("0.0", 1, (1,)))  # nobody waits for it


# --- other nodes ----------------------------------------------------------------------------------


def test_ranks_of_a_node_without_a_relay_get_the_bytes_with_the_message(roads: Roads) -> None:
    roads.add(0)
    roads.payloads.place(2, "0.2", 1)
    parts = roads.prepare([0, 2], [LARGE])
    assert isinstance(parts[0], Segment)
    assert roads.read(2, parts[2]) == [LARGE]


def test_a_large_payload_crosses_to_each_node_once(roads: Roads) -> None:
    roads.add_relay(1)
    for rank, node in ((0, 0), (2, 1), (3, 1)):
        roads.add(rank, node)
    roads.payloads.place(4, "0.4", 1)  # which has no connection to the relay
    told: list[tuple[int, int]] = []
    parts = roads.prepare([0, 2, 3, 4], [LARGE], lambda *at: told.append(at))
    assert isinstance(parts[0], Segment)
    assert isinstance(parts[2], Upload)
    assert parts[2] is parts[3]
    assert [roads.read(rank, parts[rank]) for rank in (0, 2, 3, 4)] == [[LARGE]] * 4
    relay = roads.payloads.relays.of(1)
    assert relay is not None
    assert relay.wire.sent == SIZE
    assert told[-1] == (2 * SIZE, 2 * SIZE)
    roads.payloads.keep(1, parts, roads.stack)
    far = roads._far
    assert far is not None
    assert len(far[0]._payloads) == 1
    roads.payloads.forget(1, taken=True)
    until(lambda: not far[0]._payloads, "the release of the payload")


def test_what_a_rank_of_another_node_hands_over_is_fetched(roads: Roads) -> None:
    roads.add_relay(1)
    roads.add(2, 1)
    shared = roads.offer(2, [b"head", LARGE])
    assert not roads.payloads.is_here(shared)
    arrived: list[tuple[list[bytes], DistsessionError | None]] = []
    notes: list[tuple[int, int]] = []
    roads.payloads.fetch(
        shared,
        lambda: True,
        lambda *at: notes.append(at),
        lambda frames, error: arrived.append(([bytes(frame) for frame in frames], error)),
    )
    until(lambda: arrived)
    assert arrived == [([b"head", LARGE], None)]
    assert notes[-1] == (length_of(shared.sizes),) * 2


def test_a_result_that_nobody_wants_is_discarded_where_it_is(
    roads: Roads, monkeypatch: pytest.MonkeyPatch
) -> None:
    roads.payloads.place(2, "0.2", 1)
    discarded: list[Shared] = []
    relay = SimpleNamespace(discard=discarded.append, fetch=None)
    monkeypatch.setattr(roads.payloads.relays, "of", lambda node, name="": relay)
    arrived: list[Any] = []
    shared = Shared("0.2", 1, (SIZE,))
    roads.payloads.fetch(shared, lambda: False, lambda *_: None, lambda *what: arrived.append(what))
    assert discarded == [shared]
    assert arrived == [([], None)]


def test_a_result_behind_a_relay_that_has_ended_is_an_error(roads: Roads) -> None:
    roads.payloads.place(2, "0.2", 1)
    arrived: list[Any] = []
    shared = Shared("0.2", 1, (SIZE,))
    roads.payloads.fetch(shared, lambda: True, lambda *_: None, lambda *what: arrived.append(what))
    [(frames, error)] = arrived
    assert frames == []
    assert isinstance(error, SessionStateError)
    assert "the relay of node 1" in str(error)


def test_a_rank_that_is_replaced_is_dropped_by_its_nodes_relay(roads: Roads) -> None:
    roads.add_relay(1)
    roads.add(2, 1)
    relay = roads.payloads.relays.of(1, "0.2")
    assert relay is not None
    roads.add(2, 1, generation=1)
    assert relay.linked == {"1.2"}
    assert roads.payloads.relays.of(1, "0.2") is None


# --- the end --------------------------------------------------------------------------------------


def test_closing_lets_everything_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEEP", 60.0)
    before = descriptors()
    with tempfile.TemporaryDirectory() as folder:
        roads = Roads(folder)
        roads.add(0)
        for number in (1, 2):
            parts = roads.prepare([0], [LARGE])
            roads.payloads.keep(number, parts, roads.stack)
        roads.payloads.forget(1, taken=True)  # kept for a moment; the other one is under way
        assert descriptors() > before
        roads.close()
    assert descriptors() == before


def test_one_who_trickles_instead_of_saying_to_be_a_relay_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold up all that comes from ranks."""
    monkeypatch.setattr(relays, "HELLO", 0.3)
    taken = Relays(str(tmp_path))
    connection = unix_socket.connect(socket_path(str(tmp_path), "relay", 1))
    connection.settimeout(10)
    is_over = threading.Event()

    def trickle() -> None:
        data = wire._HEAD.pack(wire._MESSAGE, 0, 0, 1000) + bytes(1000)
        with contextlib.suppress(OSError):
            for at in range(len(data)):
                connection.send(data[at : at + 1])
                if is_over.wait(0.02):
                    return

    thread = threading.Thread(target=trickle)
    thread.start()
    taken.accept()
    assert connection.recv(1) == b""
    is_over.set()
    thread.join()
    connection.close()
    taken.close()


def test_the_end_of_a_relay_is_told_though_another_one_has_come(tmp_path: Path) -> None:
    """The ranks of its node have no connection to the new one."""
    taken = Relays(str(tmp_path))
    lost: list[tuple[int, bool]] = []
    taken.on_lost = lambda *told: lost.append(told)

    def come(node: int) -> Wire:
        there = Wire(unix_socket.connect(socket_path(str(tmp_path), "relay", 1)))
        there.send(RelayHere(node, os.getpid()))
        taken.accept()
        return there

    first = come(1)
    first.close()
    second = come(1)
    until(lambda: lost == [(1, True)], "that it is told")
    taken.forget(1)  # another one is expected
    third = come(1)
    time.sleep(2 * relays.SETTLE)
    assert lost == [(1, True)]
    assert taken.of(1) is not None
    third.close()
    until(lambda: lost == [(1, True), (1, False)], "that the last one has ended")
    taken.close()
    second.close()
