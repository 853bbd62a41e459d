"""Sessions at the limits of processes and of memory: the limit that was met is named, and a remedy.

The limits are real: of control groups, and of a user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from distsession import EngineDiedError, LaunchError, RunError, Session
from tests.conftest import assert_nothing_left, traces
from tests.control_groups import ControlGroup, control_group
from tests.until import until

pytestmark = pytest.mark.timeout(120)

STARTS = """
import os, sys
from distsession import LaunchError, Session
try:
    Session(2, preload=sys.argv[1:], start_timeout=60).close()
except LaunchError as error:
    print(error)
else:
    print("it has started")
"""
LOOKS_NOT = """
from distsession.engine import process_limit
process_limit.room_problem = lambda *_: ""
"""
"""A module that has the agent find out that there is too little room when it is refused."""
EATS = """
import os, signal

def eat(*_):
    held = []
    while True:
        held.append(bytearray(b"x") * (10 << 20))

if "EATS_AT_ONCE" in os.environ:
    eat()
signal.signal(signal.SIGUSR1, eat)
"""
"""A module that has the agent take all memory, at once or when it is sent a signal."""
BESIDE_ROOT = 12345
"""A user to whom the limit of processes applies, unlike to root."""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules for agents are."""
    (tmp_path / "looks_not.py").write_text(LOOKS_NOT)
    (tmp_path / "eats.py").write_text(EATS)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


def said(
    code: str,
    *arguments: str,
    within: ControlGroup | None = None,
    before: Sequence[str] = (),
) -> str:
    """What a program prints that runs in a group."""
    known = traces()
    done = subprocess.run(
        [*before, sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE, text=True, timeout=110, check=True,
        preexec_fn=None if within is None else within.join,
    )  # fmt: skip
    assert_nothing_left(known)
    return done.stdout


# --- processes ------------------------------------------------------------------------------------


def assert_names_the_limit(text: str, limit: str, remedy: str) -> None:
    assert f"{limit}, of which " in text, text
    assert remedy in text
    assert "start fewer ranks, or give each fewer threads" in text
    assert "session.restart" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("most", "modules_of_agent"),
    [(6, ()), (12, ()), (22, ()), *((most, ("looks_not",)) for most in (10, 12, 14, 15, 18))],
)
@pytest.mark.usefixtures("modules")
def test_a_start_names_the_limit_of_its_control_group(
    most: int, modules_of_agent: Sequence[str]
) -> None:
    with control_group("pids", most) as group:
        text = said(STARTS, *modules_of_agent, within=group)
        name = f"may have {most} processes and threads (pids.max in {group.folder})"
    assert_names_the_limit(text, name, "docker run --pids-limit")


@pytest.mark.parametrize(
    ("most", "modules_of_agent"), [(6, ()), (20, ()), (11, ("looks_not",)), (18, ("looks_not",))]
)
@pytest.mark.usefixtures("modules")
def test_a_start_names_the_limit_of_its_user(most: int, modules_of_agent: Sequence[str]) -> None:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("that takes root, and setpriv to be another user")
    capabilities = "-all,+dac_override,+dac_read_search"  # the files of the tests are root's
    another = [
        "setpriv", f"--reuid={BESIDE_ROOT}", f"--regid={BESIDE_ROOT}", "--clear-groups",
        f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}",
        "prlimit", f"--nproc={most}",
    ]  # fmt: skip
    with small_tmp() as folder:
        os.chown(folder, BESIDE_ROOT, BESIDE_ROOT)
        environ = ["env", f"TMPDIR={folder}", f"HOME={folder}", f"IPYTHONDIR={folder}"]
        text = said(STARTS, *modules_of_agent, before=[*another, *environ])
    name = f"this user may have {most} processes and threads (ulimit -u)"
    assert_names_the_limit(text, name, "Raise it in the shell that starts Python or Jupyter")


@contextlib.contextmanager
def small_tmp() -> Iterator[str]:
    """A folder for another user, with a path short enough for sockets."""
    folder = f"/tmp/ds-user-{os.getpid()}"
    os.mkdir(folder, 0o700)
    yield folder
    shutil.rmtree(folder)


def test_a_start_with_more_threads_than_the_system_has_names_that() -> None:
    with pytest.raises(LaunchError) as caught:
        Session(2, threads=10_000_000)
    text = str(caught.value)
    assert "ranks 0-1, with 10000000 threads for computing each" in text
    assert "of which" in text
    assert "give each fewer threads (threads=)" in text


def test_a_restart_that_meets_a_limit_costs_no_other_rank(start: Callable[..., Session]) -> None:
    with control_group("pids", 1000) as group:
        session = start(2, threads=1)
        group.add(psutil.Process(session.infos[1].pid).ppid())
        session.restart()
        session.execute("kept = 'a variable'")
        os.kill(session.infos[1].pid, signal.SIGKILL)
        until(lambda: session.launcher.dead_ranks(), "the end of rank 1")
        group.limit(group.used())
        with pytest.raises(LaunchError, match=r"^rank 1 could not be started: .*pids\.max"):
            session.restart([1])
        assert session[0].evaluate("kept") == {0: "a variable"}
        group.limit(1000)
        session.restart([1])
        assert session.evaluate("'kept' in globals()") == {0: True, 1: False}
        session.close()


def test_a_rank_that_is_refused_a_thread_and_ends_names_the_limit(
    start: Callable[..., Session],
) -> None:
    with control_group("pids", 1000) as group:
        session = start(1, threads=1)
        group.add(psutil.Process(session.infos[0].pid).ppid())
        session.restart()
        session.execute("'it has all threads of its own'")
        group.limit(group.used())
        with pytest.raises((EngineDiedError, RunError)) as caught:
            session.execute(
                "import os, threading\n"
                "try: threading.Thread(target=print).start()\n"
                "except RuntimeError as error:\n"
                "    os.write(2, str(error).encode())\n"
                "    os._exit(3)"
            )
        text = str(caught.value)
        assert "ended with exit code 3, for it was refused a process or thread" in text
        assert f"pids.max in {group.folder}" in text
        session.close()


# --- memory ---------------------------------------------------------------------------------------

LIMIT = 900 << 20
KILLED = (
    "was killed by SIGKILL, by the system for want of memory (its count of out-of-memory kills "
    "rose; its limit is 900 MiB)"
)


@pytest.mark.usefixtures("modules")
def test_an_agent_that_is_killed_for_want_of_memory_as_it_starts_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EATS_AT_ONCE", "1")
    with control_group("memory", LIMIT) as group:
        text = said(STARTS, "eats", within=group)
    assert text == f"the agent {KILLED} before it was ready.\n"


KILLS_THE_AGENT = """
import os, signal, sys, time
import psutil
from distsession import EngineDiedError, Session
with Session(2, preload=["eats"], threads=1, nodes=int(sys.argv[1])) as session:
    for number in signal.SIGUSR1, signal.SIGKILL:
        os.kill(psutil.Process(session.infos[1].pid).ppid(), number)
        while 1 not in session.launcher.dead_ranks():
            time.sleep(0.01)
        print(session.launcher.dead_ranks()[1])
        session.restart()
        assert session.evaluate("rank") == {0: 0, 1: 1}
"""


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("nodes", "who", "remedy"),
    [
        (1, "the session's agent (the process that started the ranks)", "session.restart() brings"),
        (2, "the agent of node 1 (the process that started its ranks)", "session.restart([1]) sta"),
    ],
)
def test_an_agent_that_is_killed_for_want_of_memory_is_told_so(
    nodes: int, who: str, remedy: str
) -> None:
    with control_group("memory", LIMIT) as group:
        by_the_system, by_a_user = said(KILLS_THE_AGENT, str(nodes), within=group).splitlines()
    assert f"{who} is gone (it {KILLED})" in by_the_system
    assert remedy in by_the_system
    assert f"{who} is gone (it was killed by SIGKILL)" in by_a_user
