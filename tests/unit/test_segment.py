"""Memory that processes share."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession import segment
from distsession.errors import SerializationError
from distsession.messages import Shared
from distsession.segment import Link, LinkListener, Segment, map_private, map_shared, offer


def written(frames: list[bytes]) -> Segment:
    made = Segment([len(frame) for frame in frames])
    made.write(frames)
    return made


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:distsession")


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_frames_are_read_as_they_were_written(frames: list[bytes]) -> None:
    with written(frames) as made:
        assert [bytes(view) for view in map_private(made.descriptor, made.sizes)] == frames


def test_every_frame_is_aligned_for_any_dtype() -> None:
    with written([b"abc", b"d" * 65, b"e"]) as made:
        base, *_ = views = map_private(made.descriptor, made.sizes)
        whole = base.obj
        assert isinstance(whole, mmap.mmap)
        found = [bytes(whole).index(bytes(view)) for view in views]
        assert found == [0, 64, 192]


def test_what_a_receiver_changes_nobody_else_sees() -> None:
    with written([b"abc"]) as made:
        (one,) = map_private(made.descriptor, made.sizes)
        (other,) = map_private(made.descriptor, made.sizes)
        one[0] = ord("x")
        assert (bytes(one), bytes(other)) == (b"xbc", b"abc")


def test_what_has_been_written_cannot_be_changed_by_its_sender() -> None:
    with written([b"abc"]) as made:
        with pytest.raises(PermissionError):
            os.pwrite(made.descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(made.descriptor, 0)
        with pytest.raises(PermissionError):
            map_shared(made.descriptor, made.sizes)


def test_several_processes_can_write_into_one_that_is_shared() -> None:
    with Segment([4]) as made:
        (one,) = map_shared(made.descriptor, made.sizes)
        one[1:3] = b"xy"
        (other,) = map_private(made.descriptor, made.sizes)
        assert bytes(other) == b"\0xy\0"


def test_nothing_of_it_stays_once_the_last_view_is_gone() -> None:
    before = descriptors(), mappings()
    with written([b"a" * 100_000]) as made:
        views = map_private(made.descriptor, made.sizes)
    part = views[0][:10]
    del views
    assert mappings() == before[1] + 1
    del part
    gc.collect()
    assert (descriptors(), mappings()) == before


def test_it_cannot_be_opened_by_name() -> None:
    before = set(os.listdir("/dev/shm"))
    with written([b"a" * 100_000]):
        assert set(os.listdir("/dev/shm")) == before


# --- offering -------------------------------------------------------------------------------------


def test_a_small_payload_is_better_sent_by_itself() -> None:
    assert offer([b"x" * 1000]) is None


def test_a_large_one_is_offered_and_its_progress_told() -> None:
    told: list[tuple[int, int]] = []
    data = b"x" * (segment.CHUNK + 5)
    made = offer([b"head", data], lambda done, total: told.append((done, total)))
    assert made is not None
    with made:
        assert bytes(map_private(made.descriptor, made.sizes)[1]) == data
    total = len(data) + 4
    assert told == [(4, total), (4 + segment.CHUNK, total), (total, total)]


def test_a_payload_beyond_all_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "ASK_MEMORY", 1000)
    monkeypatch.setattr(segment, "available_memory", lambda: 99_000)
    before = descriptors()
    with pytest.raises(SerializationError, match=r"100 kB cannot be sent: only 99 kB of memory"):
        offer([bytes(100_000)])
    assert descriptors() == before


def test_the_memory_that_is_free_is_a_plausible_number() -> None:
    assert 1 << 20 < segment.available_memory() < 1 << 50


def test_without_shared_memory_it_is_said_once_and_frames_go_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(segment, "_has_warned", False)
    assert offer([bytes(1_000_000)]) is None
    assert offer([bytes(1_000_000)]) is None
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "shared memory cannot be had ([Errno 28] No space left on device)"
    ]


def test_a_stop_while_it_is_written_leaves_nothing() -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        offer([bytes(1_000_000)], stop)
    assert descriptors() == before


# --- links ----------------------------------------------------------------------------------------


@pytest.fixture
def ends(tmp_path: Path) -> Any:
    listener = LinkListener(str(tmp_path / "s"))
    theirs = Link.connect(str(tmp_path / "s"), "0.3")
    yield listener.link("0.3"), theirs
    theirs.close()
    listener.close()


def test_a_segment_is_handed_over_in_both_directions(ends: Any) -> None:
    for sender, receiver in (ends, ends[::-1]):
        with written([b"hello"]) as made:
            shared = sender.send(made)
        assert shared == Shared("0.3", 1, (5,))
        with receiver.receive(shared) as descriptor:
            (view,) = map_private(descriptor, shared.sizes)
        assert bytes(view) == b"hello"


def test_what_nobody_asked_for_is_let_go(ends: Any) -> None:
    ours, theirs = ends
    before = descriptors()
    with written([b"first"]) as first, written([b"second"]) as second:
        theirs.send(first)
        shared = theirs.send(second)
    with ours.receive(shared) as descriptor:
        (view,) = map_private(descriptor, shared.sizes)
    assert bytes(view) == b"second"
    del view
    assert descriptors() == before


def test_what_a_sender_left_behind_can_still_be_taken(ends: Any) -> None:
    ours, theirs = ends
    with written([b"last words"]) as made:
        shared = theirs.send(made)
    theirs.close()
    with ours.receive(shared) as descriptor:
        (view,) = map_private(descriptor, shared.sizes)
    assert bytes(view) == b"last words"
    with pytest.raises(ConnectionError), ours.receive(Shared("0.3", 2, (1,))):
        pass


def test_a_number_that_has_passed_is_an_error(ends: Any) -> None:
    ours, theirs = ends
    with written([b"a"]) as made:
        shared = theirs.send(made)
    ours.discard(shared)
    with pytest.raises(ConnectionError, match="nothing of that number"), ours.receive(shared):
        pass


def test_a_listener_takes_those_who_come_later(tmp_path: Path) -> None:
    listener = LinkListener(str(tmp_path / "s"))
    links: list[Link] = []

    def come() -> None:
        links.extend(Link.connect(str(tmp_path / "s"), name) for name in ("0.0", "0.1"))

    thread = threading.Timer(0.1, come)
    thread.start()
    listener.link("0.1").close()
    thread.join(5)
    assert len(links) == 2
    with pytest.raises(OSError, match="timed out"):
        listener.link("0.7", patience=0.05)
    for link in links:
        link.close()
    listener.close()
