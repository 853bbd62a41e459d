"""Which folders a start removes, and which it never touches."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distsession.protocol import folder_lock


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


def folder(base: Path, name: str = "distsession-one") -> Path:
    made = base / name
    made.mkdir(mode=0o700)
    return made


def left_behind(base: Path, name: str = "distsession-one") -> Path:
    """A session's folder whose processes have all been killed."""
    made = folder(base, name)
    (made / "logs").mkdir()
    (made / "logs" / "rank0-0.out").write_text("the last words")
    (made / "agent.log").write_text("")
    code = f"from distsession.protocol import folder_lock; folder_lock.make({str(made)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    return made


def sweep(base: Path) -> list[str]:
    return folder_lock.sweep(str(base))


def test_a_folder_whose_process_has_ended_is_removed(base: Path) -> None:
    made = left_behind(base)
    assert sweep(base) == [str(made)]
    assert not made.exists()


def test_a_folder_that_somebody_holds_stays(base: Path) -> None:
    made = folder(base)
    lock = folder_lock.make(str(made))
    assert sweep(base) == []
    second = folder_lock.hold(str(made))
    folder_lock.release(lock)
    assert sweep(base) == []
    folder_lock.release(second)
    assert sweep(base) == [str(made)]


def test_a_folder_that_another_process_holds_stays_until_that_is_killed(base: Path) -> None:
    made = folder(base)
    code = f"""
        import time
        from distsession.protocol import folder_lock
        folder_lock.make({str(made)!r})
        print("held", flush=True)
        time.sleep(60)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert sweep(base) == []
        holder.kill()
    assert sweep(base) == [str(made)]


def test_a_forked_child_holds_nothing(base: Path) -> None:
    made = folder(base)
    lock = folder_lock.make(str(made))
    mine, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        mine.close()
        its.send(b"x")
        its.recv(1)  # until the parent has looked
        os._exit(0)
    its.close()
    mine.recv(1)
    folder_lock.release(lock)
    removed = sweep(base)
    mine.close()
    os.waitpid(pid, 0)
    assert removed == [str(made)]


def test_a_folder_that_is_being_made_stays(base: Path) -> None:
    empty = folder(base)
    unlocked = folder(base, "distsession-two")
    (unlocked / "lock").touch()
    assert sweep(base) == []
    assert empty.exists()
    assert unlocked.exists()


def test_what_a_start_left_that_was_killed_at_once_goes_when_it_is_old(base: Path) -> None:
    empty = folder(base)
    unlocked = folder(base, "distsession-two")
    (unlocked / "lock").touch()
    for path in (empty, unlocked):
        os.utime(path, (0, 0))
    assert sorted(sweep(base)) == [str(empty), str(unlocked)]


def test_a_folder_that_no_lock_of_ours_is_in_stays(base: Path) -> None:
    other = folder(base)
    (other / "agent.sock").touch()  # as of an earlier version, which may well live
    os.utime(other, (0, 0))
    named = base / "something"
    shutil.copytree(left_behind(base, "distsession-two"), named)
    assert sweep(base) == [str(base / "distsession-two")]
    assert other.exists()
    assert named.exists()


def test_a_link_is_not_followed(base: Path, tmp_path: Path) -> None:
    made = left_behind(tmp_path, "distsession-elsewhere")
    (base / "distsession-link").symlink_to(made)
    lock_is_a_link = folder(base)
    (lock_is_a_link / "lock").symlink_to(made / "lock")
    assert sweep(base) == []
    assert (made / "logs" / "rank0-0.out").exists()


def test_a_folder_of_another_host_or_boot_stays(base: Path) -> None:
    made = left_behind(base)
    (made / "lock").write_text("1234 some-other-boot\n")
    assert sweep(base) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_folder_of_another_user_stays(base: Path) -> None:
    made = left_behind(base)
    os.chown(made, 12345, 12345)
    assert sweep(base) == []
    assert (made / "logs" / "rank0-0.out").exists()


def test_two_starts_at_once_do_not_disturb_each_other(base: Path) -> None:
    made = [left_behind(base, f"distsession-{number}") for number in range(5)]
    code = f"from distsession.protocol import folder_lock; print(folder_lock.sweep({str(base)!r}))"
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert not any(path.exists() for path in made)


def test_nobody_holds_a_folder_that_has_been_removed(base: Path) -> None:
    made = left_behind(base)
    lock = folder_lock.hold(str(made))
    assert folder_lock.remove_unused(str(made), lock, lambda: True)
    assert not made.exists()
    with pytest.raises(FileNotFoundError):
        folder_lock.hold(str(made))


def test_the_last_who_uses_a_folder_removes_it(base: Path) -> None:
    made = folder(base)
    first = folder_lock.make(str(made))
    second = folder_lock.hold(str(made))
    assert not folder_lock.remove_unused(str(made), second, lambda: True)
    assert made.exists()
    assert folder_lock.remove_unused(str(made), first, lambda: True)
    assert not made.exists()
