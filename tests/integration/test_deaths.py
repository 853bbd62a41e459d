"""A death has a line, and is told even where the agent cannot."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from distsession import RunError, RunInterrupt, Session, errors
from distsession.engine.process_state import has_ended, process_state
from tests.backends import Backend
from tests.control_groups import control_group
from tests.integration.conftest import Recorder
from tests.until import LIMIT_S, Press, until, until_settled

pytestmark = pytest.mark.timeout(180)


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


PLACE_KNOWN_S = 1.5
"""Where a rank is, it notes now and then, so that its agent can tell it."""


def death(session: Session, code: str, kill: int = 0) -> errors.EngineDiedError:
    """Rank 1 dies in this cell, of what it does itself or of a signal from outside."""

    def press() -> None:
        if kill:
            os.kill(session.infos[1].pid, kill)

    def until_known() -> None:
        until_settled(session)
        time.sleep(PLACE_KNOWN_S)

    with (
        Press(session, press, until_known if kill else int),
        pytest.raises(RunError) as caught,
    ):
        session.execute(code, label="In[7]", timeout=LIMIT_S)
    error = caught.value.by_rank[1]
    assert isinstance(error, errors.EngineDiedError)
    return error


@pytest.fixture(scope="module")
def _shared(backend: Backend) -> Iterator[tuple[Session, Recorder]]:
    recorder = Recorder()
    with backend.session(2, output=recorder) as session:
        yield session, recorder


@pytest.fixture
def whole(session: Session) -> Iterator[Session]:
    """The shared session, whose rank 1 is replaced afterwards."""
    yield session
    session.restart([1])
    sums = session.execute("t = torch.ones(1); dist.all_reduce(t); t.item()", fetch=True)
    assert sums == {0: 2.0, 1: 2.0}


HEAD = "import ctypes, os, signal, sys, time\nif rank == 1:\n    "
TAIL = "\ndist.barrier()"

# signal.raise_signal lets other threads run, at which faulthandler may crash.
CRASHES = {
    "SIGSEGV": "ctypes.string_at(0)",
    "SIGABRT": "os.abort()",
    "SIGBUS": "ctypes.PyDLL(None)['raise'](signal.SIGBUS)",
    "SIGFPE": "ctypes.PyDLL(None)['raise'](signal.SIGFPE)",
    "SIGILL": "ctypes.PyDLL(None)['raise'](signal.SIGILL)",
}


@pytest.mark.parametrize(("name", "code"), CRASHES.items(), ids=CRASHES)
def test_a_crash_names_its_line(whole: Session, name: str, code: str) -> None:
    error = death(whole, f"{HEAD}{code}{TAIL}")
    assert f"was killed by {name} at In[7] line 3." in first_line(error)
    assert "Its Python stack, innermost line first:" in str(error)
    assert 'File "In[7]", line 3, in <module>' in str(error)
    assert "engine/rank.py" not in str(error)


def test_a_crash_in_a_function_of_a_thread_names_the_threads_line(whole: Session) -> None:
    code = (
        "import ctypes, threading, time\n"
        "def work():\n"
        "    time.sleep(0.3)\n"
        "    ctypes.string_at(0)\n"
        "if rank == 1: threading.Thread(target=work).start()\n"
        "time.sleep(20) if rank == 1 else dist.barrier()"
    )
    assert "was killed by SIGSEGV at In[7] line 4." in first_line(death(whole, code))


def test_a_crash_of_a_child_is_not_taken_for_one_of_the_rank(whole: Session) -> None:
    code = (
        "import ctypes, os, time\n"
        "if rank == 1:\n"
        "    pid = os.fork()\n"
        "    if pid == 0: ctypes.string_at(0)\n"
        "    _ = os.waitpid(pid, 0)\n"
        "    time.sleep(20)"
        f"{TAIL}"
    )
    error = death(whole, code, kill=signal.SIGKILL)
    assert "was killed by SIGKILL, last seen at In[7] line 6." in first_line(error)


ENDS = {
    "os._exit": ("os._exit(3)", 0, "ended with exit code 3 at In[7] line 3."),
    "its own SIGTERM": (
        "os.kill(os.getpid(), 15); time.sleep(9)",
        0,
        "was ended by SIGTERM, which this session has not sent, at In[7] line 3.",
    ),
    "SIGTERM from outside": (
        "time.sleep(20)",
        signal.SIGTERM,
        "was ended by SIGTERM, which this session has not sent, at In[7] line 3.",
    ),
    "SIGKILL in a loop": (
        "while True: sum(range(1000))",
        signal.SIGKILL,
        "was killed by SIGKILL, last seen at In[7] line 3.",
    ),
    "SIGKILL in C code": (
        "ctypes.PyDLL(None).sleep(20)",
        signal.SIGKILL,
        "was killed by SIGKILL, ",
    ),
    "SIGKILL at once": (
        "os.kill(os.getpid(), 9)",
        0,
        "was killed by SIGKILL, ",
    ),
    "SIGKILL in a collective": (
        "dist.barrier()\nelse:\n    time.sleep(20)",
        signal.SIGKILL,
        "was killed by SIGKILL in barrier #",
    ),
}


@pytest.mark.parametrize(("code", "kill", "text"), ENDS.values(), ids=ENDS)
def test_an_end_names_its_line(whole: Session, code: str, kill: int, text: str) -> None:
    error = death(whole, f"{HEAD}{code}{TAIL}", kill)
    assert text in first_line(error)
    exact = "In[7] line 3." if text.endswith(("line 3.", "#")) else "In[7]"
    assert exact in first_line(error)
    assert "out-of-memory" not in str(error)


def test_a_death_in_a_function_of_the_notebook_names_it(whole: Session) -> None:
    def fall(rank_of: str) -> None:
        import os

        if os.environ["RANK"] == rank_of:
            os._exit(5)

    with pytest.raises(RunError) as caught:
        whole.run(fall, "1")
    assert "ended with exit code 5 at test_deaths.py line " in first_line(caught.value.by_rank[1])


def test_a_rank_that_dies_idle_says_so(whole: Session) -> None:
    os.kill(whole.infos[1].pid, signal.SIGKILL)
    until(lambda: "dead" in whole.status())
    with pytest.raises(errors.EngineDiedError, match="by SIGKILL while it was idle"):
        whole.run(int)


def test_ends_that_are_errors_are_no_deaths(session: Session) -> None:
    for code in ("import sys; sys.exit(3)", "raise SystemExit('no')", "import os; os.close(99)"):
        with pytest.raises(RunError) as caught:
            session.execute(code)
        assert not isinstance(caught.value.first, errors.EngineDiedError)
    pids = [info.pid for info in session.infos]
    with pytest.raises(RunError, match="Bad file descriptor"):
        session.execute(
            "import os, sys\nsaved = os.dup(1)\nos.close(1)\n"
            "try: print('x')\nfinally: os.dup2(saved, 1)"
        )
    assert [info.pid for info in session.infos] == pids
    session.execute("print('there')")


# --- want of memory -------------------------------------------------------------------------------


def test_a_kill_for_want_of_memory_is_named(start: Callable[..., Session]) -> None:
    with control_group("memory", 1 << 30) as group:
        session = start(2, threads=1)
        group.add(psutil.Process(session.infos[1].pid).ppid())
        session.restart()  # ranks that are forked from here on are within the limit, too
        error = death(
            session,
            "if rank == 1:\n"
            "    held = []\n"
            "    while True:\n"
            "        held.append(bytearray(b'x') * (10 << 20))\n"
            "dist.barrier()",
        )
        text = first_line(error)
        assert "was killed by SIGKILL, by the system for want of memory" in text
        assert "its limit is 1.0 GiB" in text
        assert re.search(r"last seen at In\[7\] line [34]\.", text)
        session.restart([1])
        error = death(session, f"{HEAD}time.sleep(20){TAIL}", signal.SIGKILL)
        assert "memory" not in first_line(error)
        session.close()


# --- an agent that is stopped ---------------------------------------------------------------------


@contextlib.contextmanager
def stopped_agent(session: Session) -> Iterator[int]:
    agent = psutil.Process(session.infos[0].pid).ppid()
    os.kill(agent, signal.SIGSTOP)
    try:
        until(lambda: process_state(agent) == "T")
        yield agent
    finally:
        os.kill(agent, signal.SIGCONT)


def wait_zombie(pid: int) -> None:
    until(lambda: has_ended(pid))


def in_background(session: Session, code: str) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            session.execute(code, label="In[6]")
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    board = session.launcher.board
    assert board is not None
    until(lambda: board.regions[1].request != 0)
    until_settled(session)
    time.sleep(PLACE_KNOWN_S)
    return thread, found


def test_a_death_is_told_while_the_agent_is_stopped(whole: Session) -> None:
    session, pid = whole, whole.infos[1].pid
    thread, found = in_background(
        session, "import time\ndist.barrier() if rank == 0 else time.sleep(60)"
    )
    with stopped_agent(session) as agent:
        assert f"The agent (pid {agent}) is stopped" in session.status()
        assert f"kill -CONT {agent}" in session.status()
        os.kill(pid, signal.SIGKILL)
        wait_zombie(pid)
        text = repr(session.diagnose())
        assert "dead" in text
        assert f"kill -CONT {agent}" in text
        assert "C code" not in text
        assert "not answering" not in text
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the run does not end"
        assert isinstance(found[0], RunError)
        line = first_line(found[0])
        assert f"rank 1 (pid {pid}) has ended; the agent (pid {agent}) cannot say how" in line
        assert f"kill -CONT {agent}" in line
        with pytest.raises(errors.SessionStateError, match=f"kill -CONT {agent}"):
            session.restart([1])
    until(lambda: "SIGKILL" in str(session.launcher.dead_ranks()[1]), "what the agent says later")


def test_what_needs_ranks_that_died_before_names_all_of_them(backend: Backend) -> None:
    with backend.session(4) as session:
        killed, ended = session.infos[1], session.infos[2]
        os.kill(killed.pid, signal.SIGKILL)
        os.kill(session.infos[3].pid, signal.SIGKILL)
        with contextlib.suppress(RunError):
            session[2].execute("import os; os._exit(7)")
        until(lambda: sorted(session.launcher.dead_ranks()) == [1, 2, 3], "the deaths")
        with pytest.raises(errors.EngineDiedError) as caught:
            session.execute("dist.barrier()")
        remedy = "session.restart([1, 2, 3]) replaces them"
        text = first_line(caught.value)
        assert text.startswith("ranks 1,3: each was killed by SIGKILL while it was idle. rank 2")
        assert f"rank 2 (pid {ended.pid}) ended with exit code 7 at In[1] line 1." in text
        assert text.count(remedy) == 1, text
        with pytest.raises(errors.EngineDiedError) as caught:
            session[[0, 1]].execute("1")
        text = first_line(caught.value)
        assert text.startswith(f"rank 1 (pid {killed.pid}) was killed by SIGKILL"), text
        assert "session.restart([1]) replaces it" in text
        session.restart([1, 2, 3])
        session.execute("dist.barrier()")


def test_a_rank_that_dies_idle_is_told_while_the_agent_is_stopped(whole: Session) -> None:
    session, pid = whole, whole.infos[1].pid
    with stopped_agent(session) as agent:
        os.kill(pid, signal.SIGKILL)
        wait_zombie(pid)
        assert f"dead (the agent (pid {agent}) cannot say how" in repr(session.diagnose())
        with pytest.raises(RunError, match=f"kill -CONT {agent}"):
            session.execute("dist.barrier()", timeout=60)


def test_stop_says_that_a_rank_has_ended_and_that_the_agent_is_stopped(
    whole: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, pid = whole, whole.infos[1].pid
    monkeypatch.setattr(type(session.launcher), "note_unreported", lambda self: None)
    with stopped_agent(session) as agent:

        def end() -> None:
            os.kill(pid, signal.SIGKILL)
            wait_zombie(pid)
            os.kill(os.getpid(), signal.SIGINT)

        with Press(session, end), pytest.raises(RunInterrupt) as caught:
            session.execute("import time\ntime.sleep(60)")
        assert f"Rank 1 has ended; the agent (pid {agent}) cannot say how" in str(caught.value)
        assert "C code" not in str(caught.value)


def test_an_agent_that_only_tells_late_is_waited_for(whole: Session, output: Recorder) -> None:
    """Stopped for a moment: the death is told in full, with its line."""
    session, pid = whole, whole.infos[1].pid
    thread, found = in_background(session, "import time\ntime.sleep(60 * rank)")
    with stopped_agent(session):
        os.kill(pid, signal.SIGKILL)
        wait_zombie(pid)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert "by SIGKILL" in first_line(found[0])
    assert "In[6]" in first_line(found[0])
