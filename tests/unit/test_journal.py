"""The journal of a session: what was written is there, whole or not at all."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from distsession.kernel import journal as module
from distsession.kernel.journal import Journal, journal_path, read_journal


class Owner:
    """Appends to a journal what it knows."""

    def __init__(self, folder: Path, epoch: int = 1, known: Iterable[Any] = ()):
        self.known = list(known)
        self.journal = Journal(str(folder), epoch, lambda: list(self.known))

    def learn(self, record: Any) -> None:
        self.known.append(record)
        self.journal.append(record)


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    for number in range(100):
        owner.learn(("run", number, "x" * number))
    code = f"from distsession.kernel.journal import read_journal as r; print(r({str(tmp_path)!r}))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == repr(owner.known)


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    path = Owner(tmp_path).journal.path
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_record_that_was_cut_off_is_dropped_whole(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    for number in range(3):
        owner.learn(("run", number))
    path = Path(owner.journal.path)
    data = path.read_bytes()
    sizes = {len(data)}
    for end in range(len(data)):
        path.write_bytes(data[:end])
        found = read_journal(str(tmp_path))
        assert found == owner.known[: len(found)]
        sizes.add(len(found))
    assert sizes >= {0, 1, 2}


@pytest.mark.parametrize("at", [0, 4, 9, -1])
def test_a_damaged_record_ends_what_is_read_and_nothing_before_it(tmp_path: Path, at: int) -> None:
    owner = Owner(tmp_path)
    owner.learn("first")
    path = Path(owner.journal.path)
    begin = path.stat().st_size
    owner.learn("second")
    data = bytearray(path.read_bytes())
    data[begin + at if at >= 0 else at] ^= 0xFF
    path.write_bytes(data)
    assert read_journal(str(tmp_path)) == ["first"]


def test_a_record_that_cannot_be_rebuilt_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path)
    owner.journal.append(Unknown())
    owner.learn("next")
    assert read_journal(str(tmp_path)) == ["next"]
    assert "is left out" in caplog.text


class Unknown:
    def __reduce__(self) -> Any:
        return os.stat, ("/there/is/no/such/file",)


def test_a_record_that_cannot_be_written_fails_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path)
    owner.journal.append(threading.Lock())
    owner.learn("next")
    assert read_journal(str(tmp_path)) == ["next"]
    assert "cannot be written" in caplog.text


def test_there_is_nothing_to_read_where_nobody_wrote(tmp_path: Path) -> None:
    assert read_journal(str(tmp_path)) == []
    assert read_journal(str(tmp_path / "gone")) == []


def test_it_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REWRITE_BYTES", 10_000)
    owner = Owner(tmp_path)
    for number in range(10_000):
        owner.known = [("last", number)]
        owner.journal.append(owner.known[0])
        owner.journal.tidy()
        assert os.stat(owner.journal.path).st_size < 11_000
    assert read_journal(str(tmp_path))[-1] == ("last", 9_999)
    assert os.listdir(tmp_path) == ["journal-1"]


# --- owners ---------------------------------------------------------------------------------------


def test_a_new_owner_has_a_file_of_its_own_and_the_former_one_writes_to_none_that_is_read(
    tmp_path: Path,
) -> None:
    former = Owner(tmp_path)
    former.learn("of the first")
    new = Owner(tmp_path, 2, read_journal(str(tmp_path)))
    assert os.listdir(tmp_path) == ["journal-2"]
    former.learn("too late")
    former.journal._limit = 0
    former.journal.tidy()
    new.learn("of the second")
    assert read_journal(str(tmp_path)) == ["of the first", "of the second"]


def test_a_part_that_a_dead_owner_has_left_is_not_read(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.learn("whole")
    Path(f"{journal_path(str(tmp_path), 2)}.part").write_bytes(b"cut")
    assert read_journal(str(tmp_path)) == ["whole"]
    again = Owner(tmp_path, 2, ["whole"])
    assert again.journal.path.endswith("journal-2")
    assert read_journal(str(tmp_path)) == ["whole"]


# --- a full disk ----------------------------------------------------------------------------------


class Disk:
    """Takes so many bytes more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.room: float = float("inf")
        self._write: Callable[[int, Any], int] = os.write
        monkeypatch.setattr(module.os, "write", self.write)
        monkeypatch.setattr(module, "TRY_AGAIN_S", 0.0)

    def write(self, file: int, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(file, bytes(data)[: int(min(self.room, len(data)))])
        self.room -= done
        return done


@pytest.mark.parametrize("room", [0, 1, 7, 20])
def test_a_full_disk_fails_nobody_is_told_once_and_nothing_is_missing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    disk = Disk(monkeypatch)
    owner = Owner(tmp_path)
    owner.learn("before")
    disk.room = room
    for number in range(5):
        owner.learn(("during", number))
        disk.room = 0
    assert read_journal(str(tmp_path)) == ["before"]
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "Cells run as ever" in record.getMessage()
    disk.room = float("inf")
    owner.learn("after")
    owner.learn("then")
    assert read_journal(str(tmp_path)) == owner.known
    assert [each.levelno for each in caplog.records] == [logging.WARNING] * 2
    assert sorted(os.listdir(tmp_path)) == ["journal-1"]


def test_a_disk_that_is_full_at_first_is_written_to_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Owner(tmp_path)
    before.learn("of the first")
    disk = Disk(monkeypatch)
    disk.room = 3
    owner = Owner(tmp_path, 2, ["of the first"])
    assert read_journal(str(tmp_path)) == ["of the first"]
    disk.room = float("inf")
    owner.learn("of the second")
    assert read_journal(str(tmp_path)) == ["of the first", "of the second"]
    assert os.listdir(tmp_path) == ["journal-2"]


def test_threads_write_whole_records(tmp_path: Path) -> None:
    owner = Owner(tmp_path)

    def write(name: int) -> None:
        for number in range(500):
            owner.journal.append((name, number, "x" * number))

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_journal(str(tmp_path))
    for name in range(4):
        assert [number for who, number, _ in found if who == name] == list(range(500))
