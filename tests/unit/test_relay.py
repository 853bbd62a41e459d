"""Payloads between the kernel and the relay of another node."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsession.cluster import relay as kernel
from distsession.engine import relay as engine
from distsession.errors import SerializationError, SessionStateError
from distsession.kernel.transfer import _pieces
from distsession.protocol import shared_memory, wire
from distsession.protocol.messages import Shared
from distsession.protocol.shared_memory import Link, LinkListener, Segment, map_private

LARGE = 3 * wire.CHUNK + 5


class Pair:
    """Both ends of a stream, and ranks on the further one."""

    def __init__(self, folder: str):
        ours, theirs = socket.socketpair()
        wire.make_node_folder(folder, 1)
        self.path = wire.memory_path(folder, 1)
        self.links = LinkListener(self.path)
        self.far = engine.Relay(wire.Wire(theirs), self.links, 1)
        self._thread = threading.Thread(target=self.far.serve)
        self._thread.start()
        self.lost: list[kernel.Relay] = []
        self.near = kernel.Relay(1, wire.Wire(ours), self.lost.append)
        self._theirs = theirs
        self.ranks: dict[str, Link] = {}

    def rank(self, name: str) -> Link:
        self.ranks[name] = Link.connect(self.path, name)
        self.near.link([name], 5)
        assert name in self.near.linked
        return self.ranks[name]

    def fetch(self, shared: Shared, **how: Any) -> Fetched:
        fetched = Fetched()
        self.near.fetch(
            shared, how.get("is_wanted", lambda: True), how.get("note", lambda *_: None), fetched
        )
        return fetched

    def end(self) -> None:
        """The relay's process ends."""
        self._theirs.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.near.close()
        self.end()
        for link in self.ranks.values():
            link.close()
        self.links.close()
        self._theirs.close()
        self.far._pool.close()
        os.unlink(self.path)


class Fetched:
    """What has become of a payload."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.frames: list[bytes] = []
        self.error: Exception | None = None

    def __call__(self, frames: Any, error: Exception | None) -> None:
        self.frames, self.error = [bytes(frame) for frame in frames], error
        self._event.set()

    def wait(self) -> Fetched:
        assert self._event.wait(10)
        return self


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(str(tmp_path_factory.mktemp("relay")))
    pair.rank("0.2")
    pair.rank("0.3")
    yield pair
    pair.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(str(tmp_path))
    yield pair
    pair.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def taken(link: Link, shared: Shared) -> list[bytes]:
    with link.receive(shared) as handed:
        return [bytes(view) for view in map_private(handed.descriptor, shared.sizes)]


def offered(link: Link, frames: list[bytes]) -> Shared:
    with Segment([len(frame) for frame in frames]) as made:
        made.write(frames)
        return link.send(made)


def put(pair: Pair, frames: list[bytes]) -> kernel.Upload:
    upload = pair.near.put(frames)
    assert upload.wait(lambda: None)
    return upload


frames_of_any_size = st.lists(st.binary(max_size=300), min_size=1, max_size=5).filter(any)

# --- from the kernel ------------------------------------------------------------------------------


@settings(max_examples=40)
@given(frames_of_any_size)
def test_what_is_sent_once_every_rank_of_the_node_reads(lasting: Pair, frames: list[bytes]) -> None:
    before = lasting.near.wire.sent
    upload = put(lasting, frames)
    shared = lasting.near.hand(upload, list(lasting.ranks))
    for link in lasting.ranks.values():
        assert taken(link, shared) == frames
    assert lasting.near.wire.sent - before == sum(map(len, frames))
    upload.release(reuse=True)


def test_a_large_payload_arrives_in_new_memory_and_in_memory_that_is_reused(pair: Pair) -> None:
    link = pair.rank("0.2")
    for fill in (b"a", b"b"):
        frames = [b"head", fill * LARGE, b"tail"]
        upload = put(pair, frames)
        assert taken(link, pair.near.hand(upload, ["0.2"])) == frames
        upload.release(reuse=True)
        until(lambda: not pair.far._payloads)
    assert len(pair.far._pool._kept) == 1


def test_a_payload_that_is_given_up_leaves_the_stream_usable(pair: Pair) -> None:
    link = pair.rank("0.2")
    with pair.near.put([bytes(LARGE)]):
        pass
    with pytest.raises(KeyboardInterrupt), pair.near.put([bytes(LARGE)]) as upload:
        upload.wait(_interrupt)
    frames = [b"what comes next"]
    assert taken(link, pair.near.hand(put(pair, frames), ["0.2"])) == frames
    assert len(pair.far._payloads) == 1
    assert not pair.near._uploads


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_orders_are_not_kept_waiting_by_a_large_payload(pair: Pair) -> None:
    link = pair.rank("0.2")
    small = put(pair, [b"small"])
    pair.near.put([bytes(20 * wire.CHUNK)])
    began = pair.near.wire.sent
    assert taken(link, pair.near.hand(small, ["0.2"])) == [b"small"]
    assert pair.near.wire.sent - began < 20 * wire.CHUNK


def test_several_threads_may_send_at_the_same_time(pair: Pair) -> None:
    link = pair.rank("0.2")
    uploads: dict[int, kernel.Upload] = {}

    def send(number: int) -> None:
        uploads[number] = put(pair, [bytes([number]) * 100_000])

    threads = [threading.Thread(target=send, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for number, upload in uploads.items():
        assert taken(link, pair.near.hand(upload, ["0.2"])) == [bytes([number]) * 100_000]


def test_a_node_without_room_refuses(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "ASK_MEMORY", 1000)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 99_000)
    upload = pair.near.put([bytes(100_000)])
    with pytest.raises(SerializationError, match=r"only 99 kB .* free on the host of node 1"):
        upload.wait(lambda: None)


def test_a_node_without_shared_memory_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert not pair.near.put([bytes(100_000)]).wait(lambda: None)
    assert "node 1 takes no payload in shared memory" in caplog.text


# --- to the kernel --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(frames_of_any_size)
def test_what_a_rank_hands_over_can_be_fetched(lasting: Pair, frames: list[bytes]) -> None:
    shared = offered(lasting.ranks["0.3"], frames)
    assert lasting.fetch(shared).wait().frames == frames


def test_a_large_result_is_fetched_and_its_progress_told(pair: Pair) -> None:
    link = pair.rank("0.2")
    notes: list[tuple[int, int]] = []
    frames = [b"head", b"x" * LARGE]
    shared = offered(link, frames)
    fetched = pair.fetch(shared, note=lambda done, total: notes.append((done, total))).wait()
    assert fetched.frames == frames
    assert [done for done, _ in notes] == sorted({done for done, _ in notes})
    assert notes[-1] == (shared_memory.length_of(shared.sizes),) * 2
    assert len(notes) == math.ceil(notes[-1][0] / wire.CHUNK)


def test_a_result_of_no_interest_is_not_sent(pair: Pair) -> None:
    link = pair.rank("0.2")
    pair.near.discard(offered(link, [bytes(LARGE)]))
    frames = [b"wanted"]
    assert pair.fetch(offered(link, frames)).wait().frames == frames
    assert pair.near.wire.received == len(frames[0])


def test_a_result_can_be_given_up_in_the_middle(pair: Pair) -> None:
    link = pair.rank("0.2")
    wanted = [True, True, False]
    size = 100 * wire.CHUNK
    fetched = pair.fetch(
        offered(link, [bytes(size)]), is_wanted=lambda: wanted.pop(0) if wanted else False
    ).wait()
    assert isinstance(fetched.error, SessionStateError)
    assert "did not arrive: it was stopped" in str(fetched.error)
    assert pair.near.wire.received == 2 * wire.CHUNK
    assert pair.fetch(offered(link, [b"next"])).wait().frames == [b"next"]


def test_what_no_rank_has_handed_over_is_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LINK_TIMEOUT_S", 0.05)
    error = pair.fetch(Shared("0.7", 1, (100,))).wait().error
    assert "its rank has not handed it over" in str(error)


def test_a_result_for_which_there_is_no_room_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = offered(pair.rank("0.2"), [bytes(100_000)])
    monkeypatch.setattr(shared_memory, "ASK_MEMORY", 1000)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 99_000)
    error = pair.fetch(shared).wait().error
    assert isinstance(error, SerializationError)
    assert "100 kB cannot be brought: only 99 kB of memory are free on this machine" in str(error)


# --- the end of a relay ---------------------------------------------------------------------------


def test_whoever_waits_for_a_relay_that_ends_is_told(pair: Pair) -> None:
    link = pair.rank("0.2")
    halted = threading.Event()

    def halt(*_: Any) -> None:
        halted.wait(10)

    fetched = pair.fetch(offered(link, [bytes(LARGE)]), note=halt)
    upload = pair.near.put([bytes(100 * wire.CHUNK)])
    pair.end()
    halted.set()
    assert not upload.wait(lambda: None)
    error = fetched.wait().error
    assert isinstance(error, SessionStateError)
    assert "the relay of node 1" in str(error)
    assert pair.lost == [pair.near]
    assert not pair.near.is_up
    assert pair.near.linked == frozenset()
    assert not pair.near.put([bytes(10)]).wait(lambda: None)
    assert pair.fetch(Shared("0.2", 9, (5,))).wait().error is not None


# --- pieces ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 50))
def test_pieces_cover_a_shape_once_and_keep_to_the_limit(shape: list[int], limit: int) -> None:
    seen: set[tuple[int, ...]] = set()
    for begin, size in _pieces(shape, limit):
        assert len(begin) == len(size) == len(shape)
        assert math.prod(size) <= limit
        for offset in _indices(size):
            index = tuple(b + o for b, o in zip(begin, offset, strict=True))
            assert index not in seen
            seen.add(index)
    assert seen == set(_indices(shape))


def _indices(shape: Any) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def test_what_a_node_has_is_sent_though_the_sender_has_not_counted_it_yet(pair: Pair) -> None:
    upload = kernel.Upload(pair.near, 1, [b"12345"])
    assert upload.sent == 0
    upload.answer = wire.Stored(1)
    assert upload.sent == 5
    upload.answer = wire.Stored(1, problem="there is no memory")
    assert upload.sent == 0
