"""Payloads that ranks copy out of memory which they have mapped once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsession.protocol import shared_buffer
from distsession.protocol.messages import INLINE
from distsession.protocol.shared_buffer import CAPACITY, LARGEST, Place, SharedBuffer
from distsession.protocol.shared_memory import Link, LinkListener, Segment

SIZE = 100_000


class Ends:
    """A sender, and the links of two receivers."""

    def __init__(self, folder: Path):
        self.buffer = SharedBuffer()
        path = str(folder / "memory.sock")
        self._listener = LinkListener(path)
        self.receivers = [Link.connect(path, name) for name in "ab"]
        self.senders = [self._listener.link(name) for name in "ab"]

    def put(self, *frames: bytes) -> Place:
        place = self.buffer.put(frames)
        assert place is not None
        return place

    def read(self, place: Place, receiver: int = 0) -> list[memoryview]:
        place.hand(self.senders[receiver])
        return self.receivers[receiver].copy(place.buffered)

    def close(self) -> None:
        for link in self.receivers:
            link.close()
        self._listener.close()
        self.buffer.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    yield ends
    ends.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_each_receiver_gets_a_copy_of_its_own(ends: Ends) -> None:
    place = ends.put(b"head", b"x" * SIZE)
    first, second = ends.read(place, 0), ends.read(place, 1)
    first[1][:1] = b"y"
    assert [bytes(first[1][:2]), bytes(second[1][:2])] == [b"yx", b"xx"]
    assert bytes(second[0]) == b"head"
    assert place.frames() == second


def test_every_frame_is_aligned_for_any_dtype(ends: Ends) -> None:
    ends.put(b"x" * (INLINE + 1))
    place = ends.put(b"h", b"x" * SIZE, b"y")
    assert place.buffered.at % 64 == 0
    assert [bytes(frame[:1]) for frame in ends.read(place)] == [b"h", b"x", b"y"]


def test_what_comes_next_leaves_a_copy_as_it_was(ends: Ends) -> None:
    for fill in (b"a", b"b", b"c"):
        place = ends.put(fill * SIZE)
        (copy,) = ends.read(place)
        place.release(taken=True)
        ends.put(b"z" * SIZE).release(taken=True)
        assert bytes(copy) == fill * SIZE


def test_a_place_is_written_to_again_only_when_all_have_answered(ends: Ends) -> None:
    first, second = ends.put(b"1" * SIZE), ends.put(b"2" * SIZE)
    second.release(taken=True)
    third = ends.put(b"3" * SIZE)
    assert [bytes(ends.read(p)[0][:1]) for p in (first, second, third)] == [b"1", b"2", b"3"]
    first.release(taken=True)
    third.release(taken=True)
    assert ends.put(b"4" * SIZE).buffered.at == 0


def test_the_memory_is_given_up_where_a_receiver_may_still_come(ends: Ends) -> None:
    late = ends.put(b"1" * SIZE)
    ends.read(late)
    late.release(taken=False)
    after = ends.put(b"2" * SIZE)
    assert after.buffered.number == late.buffered.number + 1
    assert bytes(ends.receivers[0].copy(late.buffered)[0]) == b"1" * SIZE
    assert bytes(ends.read(after)[0]) == b"2" * SIZE
    late.release(taken=True)  # of memory that is another one by now
    assert ends.put(b"3" * SIZE).buffered.at > 0
    with pytest.raises(OSError, match="another one by now"):
        ends.receivers[0].copy(late.buffered)


def test_what_was_perhaps_sent_when_a_submit_failed_is_left_alone(ends: Ends) -> None:
    with ends.put(b"1" * SIZE) as place:
        ends.read(place)
    ends.put(b"2" * SIZE)
    assert bytes(ends.receivers[0].copy(place.buffered)[0]) == b"1" * SIZE


def test_its_descriptor_is_sent_once_and_kept_by_nobody(ends: Ends) -> None:
    ends.put(b"1" * SIZE).release(taken=True)
    before = descriptors()
    for _ in range(1000):
        place = ends.put(b"1" * SIZE)
        ends.read(place)
        place.release(taken=True)
    assert descriptors() <= before + 1  # one of a mapping, before Python 3.13


def test_it_comes_between_the_segments_of_other_messages(ends: Ends) -> None:
    sender, receiver = ends.senders[0], ends.receivers[0]
    with Segment([1]) as made:
        made.write([b"s"])
        skipped, place, shared = sender.send(made), ends.put(b"1" * SIZE), None
        place.hand(sender)
        shared = sender.send(made)
    assert bytes(receiver.copy(place.buffered)[0][:1]) == b"1"
    with receiver.receive(shared) as handed:
        assert os.pread(handed.descriptor, 1, 0) == b"s"
    with pytest.raises(OSError, match="nothing of that number"), receiver.receive(skipped):
        pass


def test_it_is_kept_by_who_takes_a_later_segment_first(ends: Ends) -> None:
    sender, receiver = ends.senders[0], ends.receivers[0]
    place = ends.put(b"1" * SIZE)
    place.hand(sender)  # for a request that is not run
    with Segment([1]) as made:
        made.write([b"s"])
        receiver.discard(sender.send(made))
    assert bytes(ends.read(place)[0]) == b"1" * SIZE


@pytest.mark.parametrize("size", [INLINE, LARGEST + 1])
def test_other_sizes_go_another_way(ends: Ends, size: int) -> None:
    assert ends.buffer.put([b"x" * size]) is None


def test_what_finds_no_room_goes_another_way(ends: Ends) -> None:
    places = [ends.put(b"x" * LARGEST) for _ in range(CAPACITY // LARGEST)]
    assert ends.buffer.put([b"x" * SIZE]) is None
    for place in places:
        place.release(taken=True)
    assert ends.buffer.put([b"x" * SIZE]) is not None


def test_a_stop_while_it_is_written_leaves_the_place_free(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shared_buffer.Segment, "put", stopped)
        with pytest.raises(KeyboardInterrupt):
            ends.buffer.put([b"x" * SIZE])
    assert ends.put(b"x" * SIZE).buffered.at == 0


def test_a_receiver_cannot_write_to_it(ends: Ends) -> None:
    ends.read(ends.put(b"1" * SIZE))
    assert ends.receivers[0]._buffer[1].readonly
