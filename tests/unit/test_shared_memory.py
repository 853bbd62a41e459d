"""Memory that processes share."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.errors import SerializationError
from distsession.protocol import shared_memory
from distsession.protocol.messages import Shared
from distsession.protocol.shared_memory import (
    Link,
    LinkListener,
    Segment,
    map_private,
    map_shared,
    offer,
)


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


def test_its_size_can_never_change() -> None:
    with written([b"abc"]) as made:
        for size in (0, 100):
            with pytest.raises(PermissionError):
                os.ftruncate(made.descriptor, size)


def test_it_is_free_once_nobody_has_it_mapped_also_no_forked_child() -> None:
    with written([b"abc"]) as made:
        assert made.is_free
        views = map_private(made.descriptor, made.sizes)
        views[0][0] = 1
        assert not made.is_free
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        os.close(reader)
        del views
        gc.collect()
        assert not made.is_free
        os.close(writer)
        os.waitpid(child, 0)
        assert made.is_free


# --- written to again -----------------------------------------------------------------------------


def test_a_segment_that_nobody_holds_is_written_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEEP", 60.0)
    pool = shared_memory.Pool()
    first = offer([b"a" * 100_000], pool=pool)
    assert first is not None
    views = map_private(first.descriptor, first.sizes)
    pool.keep(first)
    second = offer([b"b" * 90_000], pool=pool)
    assert second is not None
    assert second is not first
    assert bytes(views[0]) == b"a" * 100_000
    del views
    third = offer([b"c" * 90_000], pool=pool)
    assert third is first
    assert bytes(map_private(third.descriptor, third.sizes)[0]) == b"c" * 90_000
    for made in (second, third):
        pool.keep(made)
    pool.close()


def test_a_much_larger_one_is_left_alone() -> None:
    pool = shared_memory.Pool()
    large = offer([b"a" * 1_000_000], pool=pool)
    assert large is not None
    pool.keep(large)
    small = offer([b"b" * 100_000], pool=pool)
    assert small is not None
    assert small is not large
    small.close()
    pool.close()


def test_what_is_kept_is_let_go_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEEP", 0.05)
    before = descriptors()
    pool = shared_memory.Pool()
    for _ in range(shared_memory.KEPT + 2):
        made = offer([b"a" * 100_000])
        assert made is not None
        pool.keep(made)
    assert descriptors() == before + shared_memory.KEPT
    deadline = time.monotonic() + 5
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert descriptors() == before
    pool.close()


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
    with written([b"a" * 100_000]) as made:
        facts = os.fstat(made.descriptor)
        assert facts.st_nlink == 0
        assert os.readlink(f"/proc/self/fd/{made.descriptor}").startswith("/memfd:")


# --- offering -------------------------------------------------------------------------------------


def test_a_small_payload_is_better_sent_by_itself() -> None:
    assert offer([b"x" * 1000]) is None


@pytest.mark.parametrize("has_large_pages", [True, False])
def test_a_large_one_is_offered_and_its_progress_told(
    has_large_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_large_pages:
        monkeypatch.setattr(shared_memory, "HUGE", 1 << 40)
    told: list[tuple[int, int]] = []
    data = b"x" * (shared_memory.CHUNK + 5)
    made = offer([b"head", data], lambda done, total: told.append((done, total)))
    assert made is not None
    with made:
        assert bytes(map_private(made.descriptor, made.sizes)[1]) == data
    total = len(data) + 4
    assert told == sorted(told)
    assert (4, total) in told
    assert told[-1] == (total, total)
    if not has_large_pages:
        assert told == [(4, total), (4 + shared_memory.CHUNK, total), (total, total)]


def test_a_payload_beyond_all_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "ASK_MEMORY", 1000)
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 99_000)
    before = descriptors()
    with pytest.raises(SerializationError, match=r"100 kB cannot be sent: only 99 kB of memory"):
        offer([bytes(100_000)])
    assert descriptors() == before


def test_the_memory_that_is_free_is_a_plausible_number() -> None:
    assert 1 << 20 < shared_memory.available_memory() < 1 << 50


def test_without_shared_memory_it_is_said_once_and_frames_go_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(shared_memory, "_has_warned", False)
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


def test_a_link_that_nobody_asked_for_is_closed_with_its_process(tmp_path: Path) -> None:
    listener = LinkListener(str(tmp_path / "s"))
    first, second = (Link.connect(str(tmp_path / "s"), name) for name in ("0.1", "1.1"))
    listener.drop("0.1")
    listener.drop("0.2")  # it never connected
    assert not first._socket.recv(1)  # the other end is closed
    listener.link("1.1")
    for link in (first, second, listener):
        link.close()


def test_a_segment_is_handed_over_in_both_directions(ends: Any) -> None:
    for sender, receiver in (ends, ends[::-1]):
        with written([b"hello"]) as made:
            shared = sender.send(made)
        assert shared == Shared("0.3", 1, (5,))
        with receiver.receive(shared) as handed:
            (view,) = map_private(handed.descriptor, shared.sizes)
        assert bytes(view) == b"hello"


def test_what_nobody_asked_for_is_let_go(ends: Any) -> None:
    ours, theirs = ends
    before = descriptors()
    with written([b"first"]) as first, written([b"second"]) as second:
        theirs.send(first)
        shared = theirs.send(second)
    with ours.receive(shared) as handed:
        (view,) = map_private(handed.descriptor, shared.sizes)
    assert bytes(view) == b"second"
    del view
    assert descriptors() == before


def test_what_a_sender_left_behind_can_still_be_taken(ends: Any) -> None:
    ours, theirs = ends
    with written([b"last words"]) as made:
        shared = theirs.send(made)
    theirs.close()
    with ours.receive(shared) as handed:
        (view,) = map_private(handed.descriptor, shared.sizes)
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
