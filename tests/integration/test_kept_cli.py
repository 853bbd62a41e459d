"""The command line and sessions that are kept, with and without the kernel that started them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from distsession import Session
from distsession.cli import logs, main
from distsession.cluster.kept import find_kept
from distsession.engine.process_state import STOPPED, process_state
from distsession.errors import SessionStateError
from distsession.protocol.attach import attach_path
from tests.conftest import assert_nothing_left, traces
from tests.until import until

from .kernel import Notebook

Start = Callable[..., Session]
Capture = pytest.CaptureFixture[str]
NAME = f"test-{os.getpid()}"


def listed() -> dict[str, Any]:
    """What ``distsession ls --json`` says of the session of this test."""
    command = [sys.executable, "-m", "distsession", "ls", "--json"]
    told = subprocess.run(command, check=True, capture_output=True, timeout=100).stdout
    (found,) = [each for each in json.loads(told)["sessions"] if each["name"] == NAME]
    return dict(found)


def written(rank: int, *, stream: str = "out") -> bytes:
    path = Path(find_kept(NAME).folder) / "logs" / f"rank{rank}-0.{stream}"
    return path.read_bytes()


@pytest.fixture
def orphan(kernel: Callable[[str], Notebook]) -> int:
    """Two nodes of two ranks whose kernel has been killed in the midst of a cell; its pid."""
    notebook = kernel(f"--keep 600s --name {NAME} --nodes 2")
    code = "import time\nfor n in range(10**6):\n    print('line', n)\n    time.sleep(0.01)"
    notebook.client.execute(f"%%distributed\n{code}")
    until(lambda: all(b"line 5\n" in written(rank) for rank in range(4)))
    pid = int(listed()["owner"]["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture
def kernel() -> Iterator[Callable[[str], Notebook]]:
    """Start a session of four ranks in a kernel; in the end nothing of either is left."""
    before, notebooks = traces(), []

    def begin(flags: str) -> Notebook:
        notebooks.append(Notebook())
        notebooks[-1].run("%load_ext distsession")
        assert not notebooks[-1].run(f"%session start 4 {flags}").error
        return notebooks[-1]

    yield begin
    for notebook in notebooks:
        notebook.close()
    with contextlib.suppress(SessionStateError):
        find_kept(NAME)
        main(["stop", NAME])
    assert_nothing_left(before)


def test_a_session_is_listed_with_its_kernel_and_without(orphan: int, capsys: Capture) -> None:
    until(lambda: listed()["owner"]["gone_at"] is not None)
    found = listed()
    assert not found["has_owner"]
    assert 500 < found["lease_left_s"] <= 600
    places = [rank["place"] for rank in found["rank_states"]]
    assert all(re.fullmatch(r"In\[\d+\] line [345]", place) for place in places), places
    assert [rank["state"] for rank in found["rank_states"]] == ["running"] * 4
    assert found["memory_bytes"] > 20 << 20
    assert main(["diagnose", NAME]) == 0
    assert "no rank waits for a missing one: " in (told := capsys.readouterr().out)
    assert len(re.findall(r"running In\[\d+\] line [345] ", told)) == 4


def test_a_log_is_followed_until_the_session_is_ended(orphan: int, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as output:
        thread = threading.Thread(
            target=logs.show_log,
            args=(NAME, 3),
            kwargs={"follow": True, "stream": "stdout", "output": output},
        )
        thread.start()
        shown = tmp_path / "log"
        lines = shown.read_bytes().count(b"\n")
        until(lambda: shown.read_bytes().count(b"\n") > lines + 50)
        assert main(["stop", NAME]) == 0
        thread.join(timeout=60)
        assert not thread.is_alive()
    numbers = [int(line.split()[1]) for line in shown.read_text().splitlines()]
    assert numbers == list(range(len(numbers)))


def test_an_agent_that_is_stopped_is_named_and_ends_when_it_goes_on(
    orphan: int, capsys: Capture
) -> None:
    pid = find_kept(NAME).agents[1]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process_state(pid) in STOPPED)
    try:
        assert main(["stop", NAME]) == 1
        assert f"the agent of node 1 (pid {pid})" in capsys.readouterr().err
        assert [rank["state"] for rank in listed()["rank_states"]] == ["running"] * 4
    finally:
        os.kill(pid, signal.SIGCONT)
    assert main(["stop", NAME]) == 0
    assert f"session {NAME} (4 ranks, gloo), started " in capsys.readouterr().out


def test_whoever_has_a_session_is_told_that_it_was_ended(start: Start) -> None:
    session = start(2, keep=600, name=NAME)
    assert listed()["has_owner"]
    command = [sys.executable, "-m", "distsession", "stop", NAME]
    stopped = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert " has ended." in stopped.stdout
    with pytest.raises(SessionStateError, match=r"is over: `distsession stop` has ended it") as end:
        session.run(int)
    assert "take" not in str(end.value)


def test_a_session_that_is_not_kept_is_not_listed(start: Start) -> None:
    name = f"{NAME}-now"  # sessions of the other name have just ended, which is told
    start(1, name=name)
    with pytest.raises(SessionStateError, match="there is no session"):
        find_kept(name)


@pytest.mark.parametrize("data", [b"", b"garbage", b"cno.such.module\nName\n.", b"\x80\x05N."])
def test_what_an_agent_cannot_read_is_dropped(start: Start, data: bytes) -> None:
    session = start(1, keep=600, name=NAME)
    with Client(attach_path(find_kept(NAME).folder, 0), family="AF_UNIX") as link:
        link.send_bytes(data)
        with pytest.raises(EOFError):
            link.recv()
    assert session.run(int)[0] == 0


# --- exec and attach ------------------------------------------------------------------------------


def command(*arguments: str, text: str | None = None) -> tuple[int, str, str]:
    """What a command in a terminal ends with, and what it says."""
    ended = subprocess.run(
        [sys.executable, "-m", "distsession", *arguments],
        capture_output=True, text=True, timeout=100, input=text,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def kept(start: Start) -> Iterator[Session]:
    """A session that its process has let go of."""
    session = start(2, keep=600, name=NAME)
    session.execute("import distsession.distributed as dd; x = [1]")
    session.detach()
    yield session
    with contextlib.suppress(SessionStateError):
        find_kept(NAME)
        main(["stop", NAME])


def test_code_runs_on_the_ranks_and_leaves_its_variables(kept: Session, tmp_path: Path) -> None:
    code, said, told = command("exec", NAME, "x.append(2); print('hello'); x")
    assert (code, told) == (0, "")
    assert sorted(said.splitlines()) == ["[0] hello", "[1] hello", "[ranks 0-1] [1, 2]"]
    file = tmp_path / "more.py"
    file.write_text("x.append(3)\nx")
    assert command("exec", NAME, str(file), "-r", "1") == (0, "[rank 1] [1, 2, 3]\n", "")
    assert command("exec", NAME, "-", text="len(x)")[1] == "[rank 0] 2\n[rank 1] 3\n"
    assert not find_kept(NAME).has_owner
    session = Session.attach(NAME)
    try:
        assert list(session.evaluate("len(x)").values()) == [2, 3]
    finally:
        session.close()


def test_an_error_is_told_with_its_line_and_the_ranks_go_on(kept: Session, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("y = 1\n1 / 0")
    code, said, told = command("exec", NAME, str(file))
    assert (code, said) == (1, "")
    assert "ZeroDivisionError on ranks 0-1" in told
    assert "wrong.py line 2" in told
    assert command("exec", NAME, "y") == (0, "[ranks 0-1] 1\n", "")


def test_what_cannot_be_run_is_an_error(kept: Session) -> None:
    assert command("exec", NAME, "no_such_file.py")[0::2] == (
        2, "distsession: there is no file no_such_file.py.\n",
    )  # fmt: skip
    code, _, told = command("exec", NAME, "1", "-r", "7")
    assert (code, told) == (2, "distsession: there is no rank 7: this session has ranks 0 to 1.\n")
    assert not find_kept(NAME).has_owner


def test_code_does_not_run_beside_a_kernel_unless_it_takes_the_session(start: Start) -> None:
    session = start(1, keep=600, name=NAME)
    code, said, told = command("exec", NAME, "1")
    assert (code, said) == (1, "")
    assert f"process {os.getpid()} has owned it since" in told
    assert session.run(int)[0] == 0
    assert command("exec", NAME, "1", "--take") == (0, "[rank 0] 1\n", "")
    with pytest.raises(SessionStateError, match="no longer this process's"):
        session.run(int)
    assert main(["stop", NAME]) == 0


def test_code_does_not_swallow_what_an_earlier_kernel_has_begun(orphan: int) -> None:
    code, said, told = command("exec", NAME, "1")
    assert (code, said) == (1, "")
    assert re.search(r"an earlier kernel has begun In\[\d+\] in session", told)
    assert [rank["state"] for rank in listed()["rank_states"]] == ["running"] * 4


def test_what_all_ranks_write_is_watched_until_the_end(orphan: int, tmp_path: Path) -> None:
    with (tmp_path / "err").open("w") as errors:
        watching = subprocess.Popen(
            [sys.executable, "-m", "distsession", "attach", NAME, "-n", "3"],
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert watching.stdout is not None
    first = [watching.stdout.readline() for _ in range(200)]
    assert main(["stop", NAME]) == 0
    rest = watching.stdout.read()
    watching.stdout.close()
    assert watching.wait(timeout=60) == 0
    told = (tmp_path / "err").read_text()
    numbers: dict[str, list[int]] = {f"[{rank}]": [] for rank in range(4)}
    for line in [*first, *rest.splitlines()]:
        rank, _, number = line.split()
        numbers[rank].append(int(number))
    for shown in numbers.values():
        assert shown == list(range(shown[0], shown[-1] + 1))
        assert shown[0] > 0
    head, end = told.splitlines()
    assert re.match(rf"distsession: session {NAME} \(4 ranks, gloo\): .*running In\[", head)
    assert end == f"distsession: session {NAME} (4 ranks, gloo) has ended."


def test_ctrl_c_leaves_a_session_as_it_is(kept: Session) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "distsession", "attach", NAME],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watching.stderr is not None
    assert "idle" in watching.stderr.readline()
    watching.send_signal(signal.SIGINT)
    told = watching.stderr.read()
    watching.stderr.close()
    watching.wait(timeout=60)
    assert (watching.returncode, told) == (
        0, f"distsession: session {NAME} (2 ranks, gloo) goes on.\n",
    )  # fmt: skip
    assert not find_kept(NAME).has_owner
