"""Finding the sessions that outlive their kernels."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distsession
from distsession.cluster import kept as kept_module
from distsession.cluster.kept import (
    damaged_sessions,
    ended_sessions,
    find_kept,
    kept_sessions,
    read_kept,
    time_text,
)
from distsession.cluster.kept_session import KeptSession
from distsession.errors import KeptSessionError, SessionStateError
from distsession.protocol import folder_lock
from distsession.protocol.host_clock import host_clock
from distsession.protocol.kept_record import (
    ENDED,
    SESSION_FILE,
    WAS_ENDED,
    Owner,
    note_end,
    write_record,
)
from tests.kept_agents import PlayedAgent, write_owner

Play = Callable[..., PlayedAgent]


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def message(name: str | None = None) -> str:
    with pytest.raises(KeptSessionError) as raised:
        find_kept(name)
    return str(raised.value)


# --- the files ------------------------------------------------------------------------------------


def test_what_is_written_is_read_again_and_only_its_user_can_read_it(play: Play) -> None:
    agent = play(keep_s=43_200.0, keep_idle_s=60.0)
    path = agent.folder / "session.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (found,) = kept_sessions()
    assert found == agent.kept
    assert (found.name, found.world_size, found.keep_s, found.keep_idle_s) == (
        "digits", 2, 43_200.0, 60.0,
    )  # fmt: skip
    assert found.version == distsession.__version__
    assert str(found) == "session digits (2 ranks, gloo)"


def test_a_record_that_cannot_be_written_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(str(tmp_path), "session.json", {"name": "one"})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_record(str(tmp_path), "session.json", {"name": "two"})
    assert [path.name for path in tmp_path.iterdir()] == ["session.json"]
    assert json.loads((tmp_path / "session.json").read_text()) == {"name": "one"}


def test_a_session_without_a_name_is_called_as_its_folder(play: Play) -> None:
    agent = play(None)
    assert find_kept().name == agent.folder.name


# --- what is known of one -------------------------------------------------------------------------


def test_it_has_an_owner_as_long_as_that_process_lives(play: Play) -> None:
    agent = play()
    assert not find_kept().has_owner
    write_owner(agent.folder)
    found = find_kept()
    assert found.has_owner
    assert found.lease_left_s is None
    assert found.owner is not None
    assert (found.owner.epoch, found.owner.pid) == (1, os.getpid())
    write_owner(agent.folder, pid=ended_pid())
    assert not find_kept().has_owner


def test_without_an_owner_its_lease_runs(play: Play) -> None:
    agent = play()
    now = time.time()
    write_owner(agent.folder, gone_at=now, lease_ends_at=now + 600)
    found = find_kept()
    assert not found.has_owner
    assert found.lease_left_s == pytest.approx(600, abs=30)
    write_owner(agent.folder, gone_at=now - 60, lease_ends_at=now - 30)
    assert find_kept().lease_left_s == 0


def test_a_process_that_has_got_the_pid_of_its_agent_is_not_taken_for_it(play: Play) -> None:
    agent = play()
    agent.write(agents=[os.getpid()])
    assert not read_kept(str(agent.folder)).is_alive
    assert kept_sessions() == []


def test_it_lives_while_one_of_its_agents_does(play: Play) -> None:
    agent = play(nodes=2)
    gone = agent.agents[0]
    gone.kill()
    gone.wait(timeout=60)
    found = find_kept("digits")
    assert found.is_alive
    assert found.gone_agents == {0: gone.pid}


def test_a_moment_is_told_with_its_day_if_that_is_not_today() -> None:
    now = time.mktime((2026, 11, 22, 15, 30, 0, 0, 0, -1))
    assert time_text(now - 3600, now) == "14:30"
    assert time_text(now - 86_400, now) == "21 Nov 15:30"


# --- looking --------------------------------------------------------------------------------------


def test_sessions_are_listed_the_newest_first(play: Play) -> None:
    play("one", started=10.0)
    play("three", started=30.0)
    play("two", started=20.0)
    assert [kept.name for kept in kept_sessions()] == ["three", "two", "one"]


def test_what_is_left_of_a_session_whose_processes_are_gone_is_removed(play: Play) -> None:
    agent, other = play("gone"), play("here")
    agent.kill()
    assert [kept.name for kept in kept_sessions()] == ["here"]
    assert not agent.folder.exists()
    assert other.folder.exists()


def test_a_session_that_is_not_kept_is_not_listed(kept_base: Path) -> None:
    folder = kept_base / "distsession-plain"
    folder.mkdir(mode=0o700)
    lock = folder_lock.make(str(folder))
    assert kept_sessions() == []
    folder_lock.release(lock)


def test_a_folder_of_another_user_is_not_looked_at(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = play()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kept_sessions() == []
    assert "another user's" in message(str(agent.folder))


def test_neither_a_link_nor_a_folder_that_others_can_write_to_is_looked_at(
    play: Play, kept_base: Path
) -> None:
    agent = play()
    (kept_base / "distsession-link").symlink_to(agent.folder)
    assert len(kept_sessions()) == 1
    agent.folder.chmod(0o770)
    assert kept_sessions() == []


def test_folders_are_looked_for_where_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "link"))
    assert kept_module._bases() == [str(tmp_path), "/tmp", "/dev/shm"]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert kept_module._bases() == [str(tmp_path), "/tmp", "/dev/shm"]


# --- naming one -----------------------------------------------------------------------------------


def test_a_session_is_found_by_its_name_its_pid_and_its_folder(play: Play) -> None:
    agent, _ = play("digits"), play("other")
    folder = agent.folder
    for name in ("digits", str(agent.agents[0].pid), folder.name, str(folder), f"{folder}/"):
        assert find_kept(name) == agent.kept


def test_the_only_one_needs_no_name(play: Play) -> None:
    agent = play()
    assert find_kept() == agent.kept


def test_of_several_one_has_to_be_named(play: Play) -> None:
    agents = play("one"), play("two")
    text = message()
    assert text.startswith("there are 2 sessions, so say which:")
    for agent in agents:
        assert f"session {agent.kept.name} (2 ranks, gloo), started " in text
        assert f"pid {agent.agents[0].pid}, {agent.folder}" in text


def test_two_of_one_name_are_told_apart_by_pid_and_folder(play: Play) -> None:
    agents = play("digits"), play("digits")
    text = message("digits")
    assert text.startswith("there are 2 sessions named digits, so say which by its pid or its")
    for agent in agents:
        assert f"pid {agent.agents[0].pid}, {agent.folder}" in text
        assert find_kept(agent.folder.name) == agent.kept


def test_where_there_is_none_it_says_how_one_is_kept(kept_base: Path) -> None:
    assert message().startswith("there is no session that is kept: `%session start 4 --keep 12h`")
    assert message("digits").startswith("there is no session named digits that is kept: ")
    assert isinstance(KeptSessionError("x"), SessionStateError)


def test_a_name_that_is_not_there_suggests_the_one_that_was_meant(play: Play) -> None:
    play("digits", started=10.0)
    play("mnist", started=20.0)
    text = message("digit")
    assert text == "there is no session digit. Did you mean digits? There are: mnist, digits."
    assert "Did you mean" not in message("zzz")


def test_one_that_has_just_gone_is_said_to_be_gone(play: Play) -> None:
    agent = play()
    agent.kill()
    text = message("digits")
    assert text.startswith("session digits (2 ranks, gloo) is gone: its agent (pid ")
    assert not agent.folder.exists()
    again = message("digits")
    assert again.startswith("session digits (2 ranks, gloo) was found gone at ")
    assert "its agent (pid " in again
    assert message("digit").startswith("there is no session named digit")


def test_one_whose_lease_has_ended_says_when_it_did(play: Play) -> None:
    agent = play()
    ended = time.time() - 1
    write_owner(agent.folder, gone_at=ended - 60, lease_ends_at=ended)
    agent.kill()
    assert f"is gone: its lease ended at {time_text(ended)}" in message("digits")


def test_an_end_is_remembered_for_a_week_and_of_the_last_sessions(
    play: Play, kept_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for number in range(25):
        folder = kept_base / f"{folder_lock.PREFIX}{number}"
        folder.mkdir()
        write_record(
            str(folder),
            SESSION_FILE,
            {"name": f"s{number}", "world_size": 2, "backend": "gloo"},
        )
        monkeypatch.setattr(time, "time", lambda moment=now + number: moment)
        note_end(str(folder), ENDED, "nobody had attached for 12h")
        shutil.rmtree(folder)
    assert [end.name for end in ended_sessions()] == [f"s{number}" for number in range(24, 4, -1)]
    assert message("s24").startswith("session s24 (2 ranks, gloo) ended at ")
    assert message("s24").endswith(": nobody had attached for 12h. Its variables are lost.")
    assert message("s3").startswith("there is no session named s3")
    assert "The last one: session s24 (2 ranks, gloo) ended at " in message("")
    here = play("s24")
    assert find_kept("s24").folder == str(here.folder)
    here.close()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 24 * 3600)
    assert not ended_sessions()
    assert message("s23").startswith("session s23 (2 ranks, gloo) ended at ")
    monkeypatch.setattr(time, "time", lambda: now + 8 * 24 * 3600)
    assert message("s23").startswith("there is no session named s23")
    assert not list(kept_base.glob(".*"))


def test_the_end_of_a_session_that_was_asked_for_is_told_and_not_listed(play: Play) -> None:
    agent = play()
    note_end(str(agent.folder), WAS_ENDED, "`distsession stop` has ended it (by pid 7)")
    agent.close()
    assert not ended_sessions()
    assert "was ended at " in message("digits")
    assert "`distsession stop` has ended it (by pid 7)" in message("digits")


@pytest.mark.parametrize("content", ["", "{", '{"name": "x"}', '{"name": "\\u001b[31m"}'])
def test_a_damaged_note_of_an_end_is_removed(kept_base: Path, content: str) -> None:
    note = kept_base / ".distsession-one.ended"
    note.write_text(content)
    assert not ended_sessions()
    assert not note.exists()


def test_a_lease_goes_by_a_clock_that_nobody_sets(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = play()
    now = time.time()
    ends = host_clock() + 50
    write_owner(agent.folder, gone_at=now, lease_ends_at=now + 600, lease_ends_clock=ends)
    monkeypatch.setattr(time, "time", lambda: now + 24 * 3600)
    kept = find_kept()
    assert kept.lease_left_s == pytest.approx(50, abs=30)
    assert kept.lease_ends_at == pytest.approx(now + 24 * 3600 + 50, abs=30)


def test_one_of_another_version_is_refused_with_both_named(play: Play) -> None:
    agent = play()
    agent.write(version="9.8.7")
    text = message("digits")
    assert "is of distsession 9.8.7, and this is " + distsession.__version__ in text
    assert "`distsession stop digits`" in text
    assert find_kept("digits", any_version=True).version == "9.8.7"
    assert [kept.name for kept in kept_sessions()] == ["digits"]


def test_another_version_may_write_less_and_more(play: Play) -> None:
    agent = play()
    facts = {"version": "9.8.7", "name": "new", "world_size": 3, "agents": [agent.agents[0].pid]}
    (agent.folder / "session.json").write_text(json.dumps({**facts, "colour": "blue"}))
    (found,) = kept_sessions()
    assert (found.name, found.world_size, found.backend) == ("new", 3, "")


def test_a_folder_elsewhere_is_found_by_its_path(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = play()
    monkeypatch.setattr(kept_module, "_bases", lambda: [])
    assert kept_sessions() == []
    assert find_kept(str(agent.folder)) == agent.kept
    assert "there is no folder /no/such" in message("/no/such")
    (tmp_path / "else").mkdir(mode=0o700)
    assert "is not the folder of a session that is kept" in message(str(tmp_path / "else"))
    agent.kill()
    assert "is gone" in message(str(agent.folder))


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b'{"version": "0.1', "Unterminated string"),
        (b"[1]", "it is no JSON object"),
        (b"\xff\xfe", "can't decode"),
        (b"{}", "it does not say version"),
        (b'{"version": 3}', "version is 3"),
        (b'{"version":"1","name":"x","world_size":true,"agents":[1]}', "world_size is True"),
        (b'{"version":"1","name":"x","world_size":1,"agents":[]}', "agents is []"),
        (b'{"version":"1","name":"x","world_size":1,"agents":["1"]}', "agents is ['1']"),
        (b'{"version":"1","name":"x","world_size":1,"agents":[1],"started":NaN}', "started is nan"),
        (b"[" * 100_000, "recursion"),
        (b" " * (2 << 20), "more than 1,048,576 bytes"),
    ],
)
def test_a_damaged_file_is_named_and_the_others_are_listed(
    play: Play, content: bytes, why: str
) -> None:
    damaged, _ = play("damaged"), play("whole")
    path = damaged.folder / "session.json"
    path.write_bytes(content)
    assert [kept.name for kept in kept_sessions()] == ["whole"]
    (error,) = damaged_sessions()
    assert str(error).startswith(f"{path} cannot be read, so its session cannot be had: ")
    assert why in str(error)
    assert f"used by pid {damaged.agents[0].pid}" in str(error)
    for name in (damaged.folder.name, str(damaged.folder)):
        assert message(name) == str(error)
    assert str(error) in message("damaged")


def test_a_damaged_owner_is_named(play: Play) -> None:
    agent = play()
    (agent.folder / "owner.json").write_text('{"epoch": 1}')
    assert kept_sessions() == []
    assert f"{agent.folder / 'owner.json'} cannot be read" in message("digits")
    assert "it does not say pid" in message("digits")


def test_a_damaged_file_of_a_session_that_is_gone_is_removed_with_it(play: Play) -> None:
    agent = play()
    (agent.folder / "session.json").write_text("{")
    agent.kill()
    assert damaged_sessions() == []
    assert not agent.folder.exists()


def test_a_session_whose_files_cannot_be_opened_is_named(play: Play) -> None:
    agent = play()
    path = agent.folder / "session.json"
    path.unlink()
    path.mkdir()
    assert f"{path} cannot be read" in message("digits")


def test_records_are_compared_by_what_they_say() -> None:
    owner = Owner(epoch=2, pid=3, since=4.0)
    one = KeptSession(folder="/f", version="1", name="n", world_size=1, agents=(1,), owner=owner)
    assert one == KeptSession(
        folder="/f", version="1", name="n", world_size=1, agents=(1,), owner=owner
    )


# --- files that are not as they should be ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", -1), ("world_size", 0), ("nodes", -3), ("agents", [-1]), ("agents", [0]),
        ("started", -1.0), ("keeper", -5), ("name", "a\x1b[2Jb"), ("name", "\u202eb"),
        ("name", "a\nb"), ("backend", "\x07"), ("board", "\x1b]0;x"),
    ],
)  # fmt: skip
def test_a_record_with_impossible_values_is_named_and_others_are_shown(
    play: Play, name: str, value: Any
) -> None:
    bad = play("bad")
    play("good")
    path = bad.folder / SESSION_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert [kept.name for kept in kept_sessions()] == ["good"]
    (damage,) = kept_module.damaged_sessions()
    assert f"{name} is" in str(damage)
    assert not {"\x1b", "\x07", "\u202e"} & set(str(damage))


def test_a_fifo_in_a_records_place_holds_nobody_up(play: Play) -> None:
    bad = play("bad")
    play("good")
    (bad.folder / SESSION_FILE).unlink()
    os.mkfifo(bad.folder / SESSION_FILE)
    assert [kept.name for kept in kept_sessions()] == ["good"]
    assert "no plain file" in str(kept_module.damaged_sessions()[0])
