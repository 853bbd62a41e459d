"""Ranks on other hosts that are kept outlive their kernel, and nothing of them is lost or left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import distsession
from distsession import EngineDiedError, RunError, Session, SessionStateError
from distsession.cluster.end_kept import end_session
from distsession.cluster.hosts_launcher import HostsLauncher
from distsession.cluster.kept import find_kept, kept_sessions
from distsession.cluster.monitor import Monitor
from distsession.errors import KeptSessionError, LaunchError
from distsession.kernel import far_logs
from distsession.kernel.kept_state import look_at
from distsession.kernel.kept_table import doing_text
from distsession.kernel.log_text import LogReader
from distsession.notebook.kept_hint import hints
from distsession.protocol.messages import Text
from distsession.viewer import SessionViewer
from tests.integration.conftest import Recorder
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, options_of, reduced
from tests.until import until

pytestmark = pytest.mark.timeout(300)

ROOT = Path(distsession.__file__).parents[1]
BEGIN = """
import sys, time
from distsession import Session
from distsession.notebook.terminal import TerminalOutput

def say(text):
    print(text, flush=True)

def make_output():
    made = TerminalOutput()
    made.cell = 1
    return made

session = Session(**{options!r}, output=make_output)
session.execute("value = rank + 1")
"""
NEVER_BEGUN = """
import time
from distsession.cluster.local import LocalLauncher
LocalLauncher._write_state = lambda launcher: time.sleep(600)
"""
"""Has a start stay at the last thing that it does."""
LINES = """
import time
for number in range(60):
    print("line", number, flush=True)
    {work}
    time.sleep(0.02)
"""

CELL = """
import time
print("now", rank, flush=True)
{work}
"""
DISTSESSION = (sys.executable, "-m", "distsession")


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(("gpu1", "gpu2")) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: HostLab) -> Iterator[None]:
    yield
    nothing_left(lab)
    until(lambda: not list(lab.folder.glob("distsession-*")), "the folder of the start to go")


class Kernels:
    """Processes that start sessions on the hosts, and this one, which attaches to them."""

    def __init__(self, lab: HostLab):
        self._lab = lab
        self._processes: list[subprocess.Popen[str]] = []
        self._sessions: list[Session] = []
        self._names: list[str] = []
        self.output = Recorder()

    def start(self, code: str, name: str, **options: Any) -> subprocess.Popen[str]:
        """Start a session and run this, until it says ``ready``."""
        process = self.begin(code, name, **options)
        assert process.stdout is not None
        line = process.stdout.readline()
        while "ready" not in line:
            assert line, "the kernel has ended"
            line = process.stdout.readline()
        return process

    def begin(
        self, code: str, name: str, *, first: str = "", **options: Any
    ) -> subprocess.Popen[str]:
        """The same, without waiting.

        Args:
            first: What is run before the session is started.
        """
        given = {"ranks_per_host": [1, 1], "keep": 60, "name": name, **options}
        self._names.append(name)
        begin = first + BEGIN.format(options=options_of(self._lab, "gpu1", "gpu2", **given))
        process = subprocess.Popen(
            [sys.executable, "-c", f"{begin}{code}\nsay('ready')\ntime.sleep(600)"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self._processes.append(process)
        return process

    def leave(self, code: str, name: str, **options: Any) -> None:
        """Start a session, run this, and kill the kernel when it says ``ready``."""
        process = self.start(code, name, **options)
        process.kill()
        process.wait()

    def attach(self, name: str, **options: Any) -> Session:
        session = Session.attach(name, output=lambda: self.output, **options)
        self._sessions.append(session)
        return session

    def lines(self) -> dict[int, list[str]]:
        """Those that each rank has written in the cell that ran as its kernel ended."""
        found: dict[int, str] = {}
        for message in self.output.messages:
            if isinstance(message, Text):
                found[message.rank] = found.get(message.rank, "") + message.text
        return {rank: text.splitlines() for rank, text in found.items()}

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        for kept in kept_sessions():
            if kept.name in self._names:  # of a test that has failed; its lease may be over now
                with contextlib.suppress(KeptSessionError):
                    end_session(kept, "the test is over")


@pytest.fixture
def kernels(lab: HostLab) -> Iterator[Kernels]:
    made = Kernels(lab)
    yield made
    made.close()


BEGUN = """
while any(not region.request for region in session.launcher.board.regions):
    time.sleep(0.01)
"""


def in_background(cell: str) -> str:
    """Code that runs a cell, and goes on when its ranks have begun it."""
    return f"""
import threading
threading.Thread(target=lambda: session.execute({cell!r}), daemon=True).start()
{BEGUN}
"""


# --- the kernel is killed -------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["pass", "dist.all_reduce(torch.ones(1))"], ids=["cell", "group"])
def test_a_cell_goes_on_without_its_kernel(kernels: Kernels, work: str) -> None:
    kernels.leave(in_background(LINES.format(work=work)), "cell")
    (hint,) = [line for line in hints() if "session cell " in line]
    assert "is still there" in hint
    assert "%session attach cell" in hint
    session = kernels.attach("cell")
    session.follow()
    expected = [f"line {number}" for number in range(60)]
    assert kernels.lines() == {0: expected, 1: expected}
    assert session.evaluate("value") == {0: 1, 1: 2}
    assert reduced(session) == {2.0}
    assert [host.name for host in session.hosts] == ["gpu1", "gpu2"]


def test_a_cell_that_has_ended_meanwhile_is_told_once(kernels: Kernels) -> None:
    kernels.leave(in_background("import time\ntime.sleep(0.5)\nprint('over')\n1 / 0"), "ended")
    until(lambda: doing_text(look_at(find_kept("ended"))).startswith("idle"), "the cell's end")
    session = kernels.attach("ended")
    with pytest.raises(RunError, match="ZeroDivisionError"):
        session.follow()
    session.follow()
    assert kernels.lines() == {0: ["over"], 1: ["over"]}


def test_a_push_that_is_cut_off_leaves_what_was_there_or_all_of_it(kernels: Kernels) -> None:
    push = "session.push(blob=bytes(64 << 20))"
    code = f"""
session.push(blob=b"old")
threading.Thread(target=lambda: {push}, daemon=True).start()
time.sleep(0.02)
"""
    kernels.leave(f"import threading{code}", "pushed")
    session = kernels.attach("pushed")
    with contextlib.suppress(RunError):
        session.follow()
    sizes = session.evaluate("len(blob)")
    assert sizes[0] == sizes[1]
    assert sizes[0] in (3, 64 << 20)
    session.push(blob=bytes(1 << 20))
    assert session.evaluate("len(blob)") == {0: 1 << 20, 1: 1 << 20}


def test_the_value_of_a_call_can_be_had_by_the_next_kernel(kernels: Kernels) -> None:
    # What only some ranks were sent is given up with the kernel.
    kernels.leave(f"session.submit(lambda: time.sleep(1) or 41)\n{BEGUN}", "called")
    session = kernels.attach("called")
    (future,) = session.pending()
    assert future.result(30) == {0: 41, 1: 41}


# --- one owner ------------------------------------------------------------------------------------


def test_who_detaches_can_attach_again(kernels: Kernels) -> None:
    kernels.leave("pass", "again")
    for count in range(1, 4):
        session = kernels.attach("again")
        session.execute("value += 10")
        assert session.evaluate("value") == {0: 1 + 10 * count, 1: 2 + 10 * count}
        session.detach()
    with pytest.raises(SessionStateError, match="let go"):
        session.execute("value")
    kernels.attach("again").close()


def test_an_owner_that_is_asleep_is_taken_from_and_told_so(kernels: Kernels) -> None:
    code = """
say("ready")
sys.stdin.readline()
try:
    session.execute("value = -1")
except Exception as error:
    say(f"{type(error).__name__}: {error} ready")
"""
    owner = kernels.start(code, "taken")
    with pytest.raises(SessionStateError, match=f"process {owner.pid} has owned it"):
        kernels.attach("taken")
    owner.send_signal(signal.SIGSTOP)
    session = kernels.attach("taken", take=True)
    session.execute("value += 10")
    owner.send_signal(signal.SIGCONT)
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write("\n")
    owner.stdin.flush()
    told = owner.stdout.readline()  # as it asks its ranks, or before that
    assert re.search(r"taken over by process \d+ at|process \d+ has taken it at", told), told
    assert session.evaluate("value") == {0: 11, 1: 12}
    assert reduced(session) == {2.0}


# --- the end --------------------------------------------------------------------------------------


def processes_here(name: str) -> list[psutil.Process]:
    kept = find_kept(name)
    return [psutil.Process(pid) for pid in (*kept.agents, kept.keeper)]


@pytest.mark.parametrize("options", [{"keep": 2}, {"keep": 60, "keep_idle": 1}], ids=str)
def test_nothing_is_left_when_the_lease_is_over(
    lab: HostLab, kernels: Kernels, options: dict[str, Any]
) -> None:
    kernels.leave("pass", "leased", **options)
    folder, here = find_kept("leased").folder, processes_here("leased")
    until(lambda: not any(process.is_running() for process in here), "the end of all here")
    until(lambda: not os.path.exists(folder), "the folder's end")
    nothing_left(lab)


def test_ranks_that_work_are_not_idle(kernels: Kernels) -> None:
    kernels.leave("session.submit(time.sleep, 12)", "busy", keep_idle=2)
    until(lambda: "run" in doing_text(look_at(find_kept("busy"))), "what the ranks do to be known")
    session = kernels.attach("busy")
    (future,) = session.pending()
    assert future.result(30) == {0: None, 1: None}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["starts", "imports", "forks"])
def test_a_start_that_is_cut_off_leaves_nothing(
    lab: HostLab, kernels: Kernels, number: int, moment: str
) -> None:
    process = kernels.begin("pass", "cut", first=NEVER_BEGUN)
    moments: dict[str, Callable[[], object]] = {
        "starts": lab.processes,
        "imports": lab["gpu2"].left,
        "forks": lambda: lab["gpu2"].run("sh", "-c", "ls /tmp/distsession-*/logs || true").split(),
    }
    until(moments[moment], "that moment of the start")
    here = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.wait()
    until(lambda: not any(each.is_running() for each in here), "the end of all here")
    nothing_left(lab)
    assert not any(kept.name == "cut" for kept in kept_sessions())


def test_a_terminal_shows_and_ends_it(lab: HostLab, kernels: Kernels) -> None:
    kernels.leave(
        in_background("import time\ndist.barrier() if rank else time.sleep(600)"), "shown"
    )
    here, command = processes_here("shown"), [sys.executable, "-m", "distsession"]
    until(lambda: "barrier" in doing_text(look_at(find_kept("shown"))), "what ranks do to be known")
    (line,) = [line for line in _said(*command, "ls").splitlines() if line.startswith("shown ")]
    assert "barrier" in line
    assert "rank 1" in _said(*command, "diagnose", "shown")
    assert "has ended" in _said(*command, "stop", "shown")
    until(lambda: not any(process.is_running() for process in here), "the end of all here")
    nothing_left(lab)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --- what ranks write -----------------------------------------------------------------------------


class Followed:
    """A command whose output is read as it comes."""

    def __init__(self, *arguments: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distsession", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def followed(*arguments: str) -> Iterator[Followed]:
    command = Followed(*arguments)
    try:
        yield command
    finally:
        command.close()


def test_what_ranks_write_is_followed_without_an_owner_and_with_one(kernels: Kernels) -> None:
    kernels.leave("session.execute('print(\"before\", rank)')", "said")
    assert _said(*DISTSESSION, "logs", "said", "-r", "1") == "before 1\n"
    assert _said(*DISTSESSION, "logs", "said", "-r", "1", "--stderr") == ""
    with (
        followed("logs", "said", "-r", "1", "-f") as log,
        followed("attach", "said") as every,
    ):
        until(lambda: log.has("before 1") and every.has("before 1"), "what was there")
        session = kernels.attach("said")
        session.execute("print('meanwhile', rank)")
        until(lambda: log.has("meanwhile 1"), "what comes")
        until(lambda: every.has("meanwhile 0") and every.has("meanwhile 1"), "that of all")
        session.restart([1])
        session.execute("print('fresh', rank)")
        until(lambda: log.has("fresh 1") and every.has("fresh 1"), "text of a fresh process")
    assert log.lines[:3] == ["before 1", "meanwhile 1", "fresh 1"]


def test_a_viewer_sees_what_cells_on_hosts_put_out(kernels: Kernels) -> None:
    kernels.start(in_background(CELL.format(work="time.sleep(600)")), "watched")
    recorder = Recorder()
    with Session.view("watched", output=lambda: recorder) as viewer:
        until(lambda: _output_of(viewer, recorder) == {0: "now 0\n", 1: "now 1\n"}, "the text")
        assert "This is the text so far of In[" in repr(viewer.show_output())
        assert viewer.log_path(1) is None
        source = viewer.log_source(1, "stdout")
        assert source.name.startswith("gpu2:/")
        assert LogReader(source).before(source.size, 5).text == "now 1"


def test_of_very_much_text_a_viewer_sees_the_end_and_is_told(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_logs, "TEXT_BYTES", 4 * 20)
    work = "print('x' * 30, flush=True); time.sleep(600)"
    kernels.start(in_background(CELL.format(work=work)), "much")
    recorder = Recorder()
    with Session.view("much", output=lambda: recorder) as viewer:
        until(lambda: "x" in _output_of(viewer, recorder)[1], "the text")
        text = repr(viewer.show_output(ranks=1))
        assert recorder.text(1).endswith("x" * 19 + "\n")
        assert "Not kept: 17 bytes of text before what is shown of rank 1." in text


def _output_of(viewer: SessionViewer, recorder: Recorder) -> dict[int, str]:
    recorder.clear()
    with contextlib.suppress(SessionStateError):  # nothing was put out yet
        viewer.show_output()
    return {rank: recorder.text(rank) for rank in viewer.ranks}


def test_what_was_written_on_a_host_that_is_gone_is_said_to_be_gone(
    lab: HostLab, kernels: Kernels
) -> None:
    kernels.leave("session.execute('print(\"before\", rank)')", "halved")
    with followed("attach", "halved") as every:
        until(lambda: every.has("before 1"), "what was there")
        lab["gpu2"].crash()
        until(lambda: every.has("gpu2 is gone, and what its ranks wrote with it"), "to be told")
    assert sum("is gone" in line for line in every.lines) == 1
    refused = subprocess.run(
        [*DISTSESSION, "logs", "halved", "-r", "1"], capture_output=True, text=True, check=False
    )
    assert refused.returncode
    assert "gpu2 is gone, and what its ranks wrote with it" in refused.stderr
    assert _said(*DISTSESSION, "logs", "halved", "-r", "0") == "before 0\n"
    kernels.attach("halved").restart(hosts=["gpu2"])  # which removes what is left there


# --- hosts and their keeper -----------------------------------------------------------------------


def test_a_host_that_dies_while_nobody_is_there_is_named_and_replaced(
    lab: HostLab, kernels: Kernels
) -> None:
    kernels.leave("pass", "crashed", ranks_per_host=[1, 1])
    lab["gpu2"].crash()
    until(lambda: "dead" in doing_text(look_at(find_kept("crashed"))), "the death to be shown")
    session = kernels.attach("crashed")
    (error,) = session.launcher.dead_ranks().values()
    assert isinstance(error, EngineDiedError)
    assert error.rank == 1
    assert "the agent on gpu2" in str(error)
    assert session[0].evaluate("value") == {0: 1}
    session.restart(hosts=["gpu2"], restore=["value"])
    assert session.evaluate("value") == {0: 1, 1: 1}
    assert reduced(session) == {2.0}
    session.detach()
    session = kernels.attach("crashed")
    assert session.evaluate("value") == {0: 1, 1: 1}


@pytest.mark.parametrize("place", ["Monitor.wait_host", "HostsLauncher._start_ranks"])
def test_a_start_whose_keeper_is_killed_when_the_hosts_are_there_says_so(
    lab: HostLab, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """All hosts are gone at once, of which it is the cause."""
    owner, _, name = place.partition(".")
    of = {"Monitor": Monitor, "HostsLauncher": HostsLauncher}[owner]
    original = getattr(of, name)

    def kill_before(*args: Any) -> Any:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.ZombieProcess):  # of the first time
                if "host_keeper" in " ".join(child.cmdline()):
                    child.kill()
        return original(*args)

    monkeypatch.setattr(of, name, kill_before)
    options = options_of(lab, "gpu1", "gpu2", ranks_per_host=[1, 1], keep=60, name="unkept")
    with pytest.raises(LaunchError, match="was killed by SIGKILL before the session had started"):
        Session(**options)
    assert not kept_sessions()


def test_without_what_keeps_the_hosts_a_session_is_lost_and_that_is_said(
    lab: HostLab, kernels: Kernels
) -> None:
    kernels.leave("pass", "lost")
    kept = find_kept("lost")
    os.kill(kept.keeper, signal.SIGKILL)
    nothing_left(lab)
    state = look_at(find_kept("lost"))
    assert "dead" in doing_text(state)
    (hint,) = [line for line in hints() if "session lost " in line]
    assert "is lost" in hint
    with pytest.raises(KeptSessionError, match=f"pid {kept.keeper}.*distsession stop lost"):
        kernels.attach("lost")
    _said(sys.executable, "-m", "distsession", "stop", "lost")
    assert not os.path.exists(kept.folder)
    for folder in lab.folder.glob("distsession-start-*"):  # goes with the next start there
        assert not (folder / "keys").exists()
        shutil.rmtree(folder)


def test_an_owner_whose_hosts_are_lost_can_start_all_anew(kernels: Kernels) -> None:
    kernels.leave("pass", "anew")
    session = kernels.attach("anew")
    os.kill(find_kept("anew").keeper, signal.SIGKILL)
    until(lambda: len(session.launcher.dead_ranks()) == 2, "the loss of all ranks")
    with pytest.raises(SessionStateError, match="holds the connections to the hosts"):
        session.restart([0])
    session.restart()
    assert reduced(session) == {2.0}
