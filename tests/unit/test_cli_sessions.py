"""The commands on sessions that are kept, on processes that play agents and ranks."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import distsession
from distsession.cli import logs, main
from distsession.cluster import end_kept
from distsession.cluster.kept import find_kept, time_text
from distsession.engine.process_state import STOPPED, process_state
from distsession.engine.usage import GpuReader
from distsession.kernel.kept_state import look_at
from distsession.kernel.kept_table import doing_text, kept_html, kept_text, owner_text
from distsession.protocol.rank_state import RankState
from tests.kept_agents import PlayedAgent, write_owner
from tests.until import until

Play = Callable[..., PlayedAgent]
Capture = pytest.CaptureFixture[str]


def failed(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


# --- ls -------------------------------------------------------------------------------------------


def test_ls_without_sessions_says_so(kept_base: Path, capsys: Capture) -> None:
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == "no session is kept.\n"
    assert main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"sessions": [], "problems": [], "ended": []}


def test_ls_tells_who_has_each_session_and_what_it_does(play: Play, capsys: Capture) -> None:
    agent, other = play("digits", has_ranks=True, world_size=3), play(None, started=1.0)
    agent.run(0, seconds=100)
    agent.run(2, seconds=20)
    for rank in (0, 2):
        agent.board.regions[rank].set_last_line("In[7] line 12")
    now = time.time()
    write_owner(agent.folder, since=now)
    assert main(["ls"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "name ranks backend started owner doing memory pid"
    started = time_text(agent.kept.started)
    columns = re.split("  +", first)
    assert columns[:4] == ["digits", "3", "gloo", started]
    assert columns[4] == f"pid {os.getpid()} since {time_text(now)}"
    assert columns[5] == "ranks 0,2 running In[7] line 12 for 100 s; rank 1 idle"
    assert columns[6].endswith(" MiB")
    assert columns[7] == str(agent.agents[0].pid)
    assert second.startswith(f"{other.folder.name}  2 ")
    assert " not known yet " in second


def test_ls_has_the_same_facts_as_json(play: Play, capsys: Capture) -> None:
    agent = play(has_ranks=True, keep_s=3600.0)
    agent.run(1, seconds=5, request=7)
    now = time.time()
    write_owner(agent.folder, epoch=2, gone_at=now, lease_ends_at=now + 3600)
    assert main(["ls", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["sessions"]
    assert (found["name"], found["keep_s"], found["world_size"]) == ("digits", 3600.0, 2)
    assert found["agents"] == [agent.agents[0].pid]
    assert found["owner"]["epoch"] == 2
    assert found["has_owner"] is False
    assert 3000 < found["lease_left_s"] <= 3600
    assert found["memory_bytes"] > 3 << 20
    idle, running = found["rank_states"]
    assert (idle["state"], running["state"], running["request"]) == ("idle", "running", 7)
    assert running["seconds"] >= 5
    assert Path(f"/proc/{running['pid']}").exists()


def test_ls_names_damaged_files_and_lists_the_others(play: Play, capsys: Capture) -> None:
    damaged, _ = play("damaged"), play("whole")
    (damaged.folder / "session.json").write_text("{")
    assert main(["ls"]) == 1
    captured = capsys.readouterr()
    assert "whole" in captured.out
    assert f"distsession: {damaged.folder}/session.json cannot be read" in captured.err
    assert main(["ls", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "session.json cannot be read" in problem


def test_ls_lists_a_session_of_another_version_without_reading_its_memory(
    play: Play, capsys: Capture
) -> None:
    play().write(version="9.8.7")
    assert main(["ls"]) == 0
    assert " of distsession 9.8.7 " in capsys.readouterr().out


def test_who_has_a_session_is_told_for_each_state_of_it(play: Play) -> None:
    agent = play()
    now = time.time()
    at = time_text(now)

    def told(**facts: Any) -> str:
        write_owner(agent.folder, **facts)
        return owner_text(find_kept())

    assert told(since=now) == f"pid {os.getpid()} since {at}"
    text = told(gone_at=now, lease_ends_at=now + 12 * 3600 - 30)
    assert text == f"nobody since {at}, ends in 11h59m"
    assert told(gone_at=now, lease_ends_at=now - 5) == f"nobody since {at}, ends in 0s"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(timeout=60)
    assert told(pid=ended.pid) == f"pid {ended.pid}, which is gone"


def test_ranks_that_have_ended_or_are_stopped_are_told_apart(play: Play) -> None:
    agent = play(has_ranks=True, world_size=4)
    pids = look_at(agent.kept).pids
    assert sorted(pids) == [0, 1, 2, 3]
    agent.run(0)
    agent.run(1)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(pids[3], signal.SIGKILL)
    until(lambda: process_state(pids[1]) in STOPPED and process_state(pids[3]) == "Z")
    states = [report.state for _, report in sorted(look_at(agent.kept).reports.items())]
    assert states == [RankState.RUNNING, RankState.STOPPED, RankState.IDLE, RankState.DEAD]
    text = doing_text(look_at(agent.kept))
    assert "rank 1 stopped by SIGSTOP" in text
    assert "rank 3 dead (its process has ended)" in text
    os.kill(pids[1], signal.SIGCONT)


def test_an_agent_that_is_gone_or_stopped_is_told(play: Play) -> None:
    agent = play(nodes=2)
    first, second = agent.agents
    second.send_signal(signal.SIGSTOP)
    until(lambda: process_state(second.pid) in STOPPED)
    assert f"the agent of node 1 (pid {second.pid}) is stopped" in kept_text([look_at(agent.kept)])
    second.send_signal(signal.SIGCONT)
    first.kill()
    first.wait(timeout=60)
    text = kept_text([look_at(find_kept())])
    assert "the agent is gone" in text
    assert "its board cannot be read" in text


def test_what_a_rank_has_started_counts_for_the_memory(play: Play) -> None:
    agent = play(has_ranks=True)
    state = look_at(agent.kept)
    assert state.gpu_memory_bytes is None
    assert 1 << 20 < state.memory_bytes < 1 << 30
    assert "GPU" not in kept_text([state])


def test_memory_of_gpus_is_that_of_the_sessions_processes(play: Play) -> None:
    agent = play(has_ranks=True)
    rank = look_at(agent.kept).pids[0]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda _: "gpu",
        nvmlDeviceGetUUID=lambda _: "GPU-a",
        nvmlDeviceGetMigMode=lambda _: (0, 0),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [
            SimpleNamespace(pid=rank, usedGpuMemory=3 << 30),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 << 30),
        ],
    )
    state = look_at(agent.kept, GpuReader(nvml))
    assert state.gpu_memory_bytes == 3 << 30
    assert "3.0 GiB" in kept_text([state])
    assert "<td" in kept_html([state])
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: []
    assert look_at(agent.kept, GpuReader(nvml)).gpu_memory_bytes is None


# --- stop -----------------------------------------------------------------------------------------


def test_stop_ends_a_session_and_returns_when_it_has_ended(play: Play, capsys: Capture) -> None:
    agent, other = play(has_ranks=True), play("other")
    assert main(["stop", "digits"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("session digits (2 ranks, gloo), started ")
    assert text.endswith(" has ended.\n")
    assert not agent.folder.exists()
    assert agent.said() == f"`distsession stop` has ended it (by pid {os.getpid()})"
    assert agent.agents[0].wait(timeout=60) == 0
    assert other.folder.exists()


def test_one_that_is_about_to_end_by_itself_is_waited_for(play: Play) -> None:
    agent = play(answer="is ending")
    assert main(["stop", "digits"]) == 0
    assert not agent.folder.exists()


def test_stop_ends_every_agent(play: Play) -> None:
    agent = play(nodes=3)
    assert main(["stop", str(agent.agents[0].pid)]) == 0
    assert [each.wait(timeout=60) for each in agent.agents] == [0, 0, 0]


def test_stop_ends_what_is_left_where_an_agent_is_gone(play: Play) -> None:
    agent = play(nodes=2)
    agent.agents[0].kill()
    agent.agents[0].wait(timeout=60)
    assert main(["stop", "digits"]) == 0
    assert agent.agents[1].wait(timeout=60) == 0
    assert not agent.folder.exists()


def test_stop_names_an_agent_that_is_stopped_by_a_signal(play: Play, capsys: Capture) -> None:
    agent = play(nodes=2)
    stopped = agent.agents[1]
    stopped.send_signal(signal.SIGSTOP)
    until(lambda: process_state(stopped.pid) in STOPPED)
    text = failed(capsys, "stop", "digits")
    assert f"the agent of node 1 (pid {stopped.pid}) of session digits (2 ranks, gloo)" in text
    assert f"`kill -CONT {stopped.pid}` lets it go on" in text
    assert agent.agents[0].poll() is None  # nobody has been told anything
    stopped.send_signal(signal.SIGCONT)
    assert main(["stop", "digits"]) == 0


@pytest.mark.parametrize(
    ("answer", "why"), [("closes", "it has hung up"), ("waits", "it does not answer within 0.2 s")]
)
def test_stop_names_an_agent_that_does_not_answer(
    play: Play, capsys: Capture, monkeypatch: pytest.MonkeyPatch, answer: str, why: str
) -> None:
    monkeypatch.setattr(end_kept, "ANSWER_TIMEOUT_S", 0.2 if answer == "waits" else 60)
    agent = play(answer=answer)
    text = failed(capsys, "stop", "digits")
    pid = agent.agents[0].pid
    assert f"(pid {pid}) of session digits (2 ranks, gloo) cannot be told to end it: {why}" in text
    assert f"`kill {pid}` ends it with its ranks." in text


def test_stop_ends_a_session_of_another_version_too(play: Play) -> None:
    agent = play()
    agent.write(version="9.8.7")
    assert main(["stop", "digits"]) == 0
    assert agent.agents[0].wait(timeout=60) == 0


def test_stop_says_who_keeps_the_folder_of_a_session_that_has_ended(
    play: Play, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distsession.protocol import folder_lock

    monkeypatch.setattr(end_kept, "FOLDER_TIMEOUT_S", 0.1)
    agent = play()
    lock = folder_lock.hold(str(agent.folder))
    try:
        assert main(["stop", "digits"]) == 0
    finally:
        folder_lock.release(lock)
    assert f"stays until its kernel (pid {os.getpid()}) lets it go" in capsys.readouterr().out


def test_stop_of_what_is_not_there_is_an_error(play: Play, capsys: Capture) -> None:
    play("digits"), play("digits")
    assert "there is no session digit. Did you mean digits?" in failed(capsys, "stop", "digit")
    lines = failed(capsys, "stop", "digits").splitlines()
    assert lines[0].startswith("distsession: there are 2 sessions named digits, so say which")
    assert [line[:17] for line in lines[1:]] == ["  session digits "] * 2
    with pytest.raises(SystemExit):
        main(["stop"])
    assert "NAME" in capsys.readouterr().err


# --- logs -----------------------------------------------------------------------------------------


def shown(*arguments: str) -> bytes:
    """What the command line writes, in a process of its own."""
    base = Path(find_kept().folder).parent
    program = "import sys, distsession.cluster.kept as kept; from distsession.cli import main; "
    program += f"kept._bases = lambda: [{str(base)!r}]; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def test_logs_shows_what_a_rank_has_written(play: Play) -> None:
    play(has_ranks=True)
    assert shown("logs", "digits") == b"rank 0 is here\n"
    assert shown("logs", "-r", "1") == b"rank 1 is here\n"
    assert shown("logs", "digits", "--rank", "1", "--stderr") == b"rank 1 complains\n"


def test_logs_shows_the_newest_generation_as_it_is(play: Play) -> None:
    agent = play()
    for generation in (0, 9, 10):
        (agent.folder / f"logs/rank1-{generation}.out").write_bytes(b"\xff\r%d" % generation)
    assert shown("logs", "digits", "-r", "1") == b"\xff\r10"


class Screen(io.BytesIO):
    """What is written to it can be waited for."""

    def has(self, text: bytes) -> None:
        until(lambda: text in self.getvalue())


def follow(screen: Screen, rank: int = 0) -> threading.Thread:
    thread = threading.Thread(
        target=logs.show_log,
        args=("digits", rank),
        kwargs={"follow": True, "stream": "stdout", "output": screen},
    )
    thread.start()
    return thread


def test_logs_follows_a_rank_to_the_process_that_takes_its_place_and_to_the_end(
    play: Play,
) -> None:
    agent, screen = play(), Screen()
    first, second = (agent.folder / f"logs/rank0-{number}.out" for number in (0, 1))
    first.write_text("one\n")
    thread = follow(screen)
    screen.has(b"one\n")
    with first.open("a") as file:
        file.write("two\n")
    screen.has(b"two\n")
    second.write_text("three\n")
    screen.has(b"three\n")
    with second.open("a") as file:
        file.write("four")
        file.flush()
        assert main(["stop", "digits"]) == 0
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert screen.getvalue() == b"one\ntwo\nthree\nfour"


def test_logs_says_what_is_missing_of_a_long_file(play: Play, capsys: Capture) -> None:
    agent, screen = play(), Screen()
    path = agent.folder / "logs/rank0-0.out"
    with path.open("wb") as file:
        file.truncate(1 << 20)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"the end\n")
    assert logs.show_log("digits", 0, follow=False, stream="stdout", output=screen) == 0
    assert screen.getvalue() == b"the end\n"
    assert "1,048,576 bytes of text that were given back to the disk" in capsys.readouterr().err


def test_logs_of_no_such_rank_is_an_error(play: Play, capsys: Capture) -> None:
    play()
    assert main(["logs", "digits", "-r", "2"]) == 2
    assert "there is no rank 2" in capsys.readouterr().err
    assert "rank 1 of session digits (2 ranks, gloo) has no log" in failed(
        capsys, "logs", "digits", "-r", "1"
    )


# --- diagnose -------------------------------------------------------------------------------------


def test_diagnose_tells_what_each_rank_does_without_asking_it(play: Play, capsys: Capture) -> None:
    agent = play(has_ranks=True)
    agent.run(1, seconds=30)
    assert main(["diagnose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["rank", "state", "since"]
    assert lines[3].split()[:2] == ["0", "idle"]
    assert lines[4].split()[:3] == ["1", "running", "30"]
    assert main(["diagnose", "digits", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["name"], facts["kind"]) == ("digits", "nothing")
    assert facts["verdict"]
    assert [rank["state"] for rank in facts["ranks"]] == ["idle", "running"]


def test_diagnose_says_why_it_knows_nothing(play: Play, capsys: Capture) -> None:
    agent = play()
    agent.write(board="/proc/self/fd/999999")
    text = failed(capsys, "diagnose", "digits")
    assert "what the ranks of session digits (2 ranks, gloo) do is not known" in text
    assert "`distsession stop digits` ends it" in text


def test_diagnose_refuses_a_session_of_another_version(play: Play, capsys: Capture) -> None:
    play().write(version="9.8.7")
    text = failed(capsys, "diagnose", "digits")
    assert f"is of distsession 9.8.7, and this is {distsession.__version__}" in text


def test_a_missing_package_is_told_as_such(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distsession.cli.sessions", None)
    monkeypatch.delattr("distsession.cli.sessions", raising=False)
    assert "distsession doctor" in failed(capsys, "ls")
