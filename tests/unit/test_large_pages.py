"""Payloads in large pages, and in small ones where there are none."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession.protocol import large_pages, shared_memory
from distsession.protocol.large_pages import LARGE_PAGE, FileMemory
from distsession.protocol.shared_memory import HUGE, Segment, map_private
from tests.memory_pages import needs_large_pages

MB = 1 << 20


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes the system to find large pages."""
    monkeypatch.setattr(shared_memory, "SLOW_S", 60.0)


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("distsession")
    os.ftruncate(descriptor, 9 * MB + 5)
    yield descriptor
    os.close(descriptor)


def in_large_pages(kind: str) -> int:
    """Bytes of payloads that this process has mapped so: ``s`` for shared, ``p`` for private."""
    found, is_payload = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_payload = "memfd:distsession (" in line and f" rw-{kind} " in line
        elif is_payload and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1]) << 10
    return found


@needs_large_pages
def test_a_large_payload_lies_in_large_pages_at_both_ends(patient: None) -> None:
    data = os.urandom(MB) * 9 + b"end"
    with Segment([3, len(data)], may_return=True) as segment:
        segment.write([b"abc", data])
        assert in_large_pages("s") == 8 * MB
        small, large = map_private(segment.descriptor, segment.sizes)
        assert (bytes(small), bytes(large)) == (b"abc", data)
        assert in_large_pages("p") == 8 * MB
        large[5 * MB] ^= 255
        assert segment.copy(64, [len(data)])[0] == data


@needs_large_pages
def test_what_was_written_before_stays(file: int) -> None:
    os.pwrite(file, b"here", 0)
    os.pwrite(file, b"there", 3 * MB)
    memory = FileMemory(file, 9 * MB + 5, mmap.MAP_SHARED)
    assert all(memory.collapse(file, at) for at in range(0, 8 * MB, LARGE_PAGE))
    view = memory.view()
    assert (bytes(view[:5]), bytes(view[3 * MB : 3 * MB + 6])) == (b"here\0", b"there\0")
    assert not any(view[MB : 2 * MB])


@needs_large_pages
def test_memory_is_found_as_far_as_it_is_written_to(patient: None) -> None:
    with Segment([40 * MB]) as segment:
        looks: list[int] = []

        def found() -> int:
            return os.fstat(segment.descriptor).st_blocks * 512

        segment.find_memory(3 * MB, lambda: looks.append(found()))
        assert (found(), looks) == (4 * MB, [])
        segment.find_memory(33 * MB, lambda: looks.append(found()))
        assert (found(), looks) == (34 * MB, [16 * MB, 32 * MB])
        segment.receive(20 * MB, 5, lambda view: view.__setitem__(slice(None), b"above"))
        (data,) = map_private(segment.descriptor, segment.sizes)
        assert bytes(data[20 * MB - 1 : 20 * MB + 6]) == b"\0above\0"


def test_a_small_payload_has_small_pages() -> None:
    with Segment([HUGE - 1]) as segment:
        segment.write([bytes(HUGE - 1)])
        segment.put(b"a", 0)
        assert in_large_pages("s") == 0


@pytest.mark.parametrize("reason", ["refused", "slow"])
def test_without_large_pages_small_ones_are_taken(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def collapse(_: FileMemory, _descriptor: int, at: int) -> bool:
        asked.append(at)
        return reason == "slow"

    monkeypatch.setattr(FileMemory, "collapse", collapse)
    monkeypatch.setattr(shared_memory, "SLOW_S", -1.0)
    data = os.urandom(MB) * 20
    with Segment([len(data)]) as segment:
        segment.write([data])
        segment.write([data])
        assert asked == [0]
        assert map_private(segment.descriptor, segment.sizes)[0] == data


def test_what_may_not_be_mapped_is_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    data = os.urandom(MB) * 20
    with Segment([len(data)]) as segment:
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "FileMemory", refuse)
            segment.write([data])
        assert map_private(segment.descriptor, segment.sizes)[0] == data


def test_what_is_slow_later_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))  # each page takes a second of processor time
    monkeypatch.setattr(FileMemory, "collapse", lambda *_: True)
    monkeypatch.setattr(shared_memory, "SLOW_S", 1.5)
    monkeypatch.setattr(shared_memory, "PROBED", LARGE_PAGE)
    monkeypatch.setattr(time, "thread_time", lambda: next(now))
    with Segment([20 * MB]) as segment:
        segment.find_memory()
        assert next(now) == 20


@pytest.mark.parametrize(
    ("setting", "is_given"),
    [
        ("always within_size [advise] never deny force", True),
        ("always [within_size] advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        (None, False),
    ],
)
def test_they_are_asked_for_at_once_where_root_has_allowed_it(
    setting: str | None, is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "shmem_enabled"
    if setting is not None:
        said.write_text(setting)
    monkeypatch.setattr(large_pages, "SHARED_HUGE", str(said))
    data = os.urandom(MB) * 9
    with Segment([3, len(data)]) as segment:
        segment.write([b"abc", data])
        assert ("hg" in flags_of_payloads()) is is_given
        assert segment.copy(64, [len(data)])[0] == data
    with Segment([1000]) as segment:
        segment.write([bytes(1000)])
        segment.put(b"a", 0)
        assert "hg" not in flags_of_payloads()


def test_where_there_is_no_memory_it_is_an_error_and_no_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(os, "pwrite", refuse)
    with Segment([20 * MB]) as segment, pytest.raises(OSError, match="No space left"):
        segment.write([bytes(20 * MB)])


def flags_of_payloads() -> set[str]:
    """What the system notes of this process's mappings of payloads that can be written by all."""
    flags, is_payload = set[str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_payload = "memfd:distsession (" in line and " rw-s " in line
        elif is_payload and line.startswith("VmFlags:"):
            flags |= set(line.split()[1:])
    return flags


@pytest.mark.parametrize("length", [1, mmap.PAGESIZE, LARGE_PAGE - 1, LARGE_PAGE, 9 * MB + 5])
def test_a_file_is_seen_whole_and_where_a_large_page_may_begin(file: int, length: int) -> None:
    os.pwrite(file, b"x", length - 1)
    memory = FileMemory(file, length, mmap.MAP_PRIVATE)
    view = memory.view()
    assert len(view) == length
    assert view[-1] == ord("x")
    assert length < LARGE_PAGE or memory.address % LARGE_PAGE == 0
    view[-1] = ord("y")
    assert os.pread(file, 1, length - 1) == b"x"


def test_a_view_keeps_it_and_nothing_stays_after_the_last(file: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:distsession (")

    before = mapped()
    memory = FileMemory(file, 9 * MB, mmap.MAP_SHARED)
    view = memory.view()[5:]
    del memory
    assert mapped() == before + 1
    view[0] = 1
    del view
    assert mapped() == before


def test_what_the_system_refuses_is_an_error(file: int) -> None:
    reader = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    try:
        for length in (100, 9 * MB):
            with pytest.raises(OSError, match="ermission"):
                FileMemory(reader, length, mmap.MAP_SHARED)
    finally:
        os.close(reader)
