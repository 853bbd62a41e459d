"""The end of a session: however it comes, nothing stays, and nobody is killed without need."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from distsession import LaunchError, Session
from distsession.kernel.snapshot import Snapshots
from tests.conftest import assert_nothing_left, traces
from tests.integration import cycles
from tests.until import until

BUSY = 4
"""Processes that compute beside a session, so that there is less of the machine for it."""


@pytest.fixture
def busy_machine() -> Iterator[None]:
    loops = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(BUSY)
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def script(text: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **more},
    )


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"no {word!r}: {process.communicate()[1]}")


# --- how long an agent has ------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("busy_machine")
def test_no_agent_is_killed_that_ends_by_itself(
    start: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    for ranks, wait in ((1, 0.0), (4, 0.0), (2, 0.7), (2, 1.5), (16, 0.0)):
        session = start(ranks)
        time.sleep(wait)  # the agent may be in the midst of what it imports when it is idle
        with caplog.at_level(logging.WARNING, logger="distsession"):
            session.close()
    assert caplog.messages == []


def test_a_stopped_agent_is_killed_with_its_ranks_and_all_that_they_have_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = traces()
    session = Session(2)
    session.execute("import subprocess; sleeping = subprocess.Popen(['sleep', '600'])")
    os.kill(session.launcher._agents.pid(), signal.SIGSTOP)
    session.close()
    assert_nothing_left(before)
    assert "the agent is stuck, so it is killed with its ranks" in caplog.messages


@pytest.mark.usefixtures("cold_agents")
def test_an_agent_that_is_killed_takes_its_ranks_with_it(start: Callable[..., Session]) -> None:
    session = start(2, nodes=2)
    ranks = [psutil.Process(info.pid) for info in session.infos]
    for rank in ranks:
        agent = rank.parent()
        assert agent is not None
        agent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


# --- Ctrl-C ---------------------------------------------------------------------------------------

SLOW_END = """
    import atexit, signal, sys, time
    from distsession import Session
    session = Session(2)
    session.execute("import atexit, time; atexit.register(time.sleep, 60)")
    print("ready", flush=True)
"""


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_as_the_interpreter_ends_leaves_nothing(times: int) -> None:
    before = traces()
    process = script(SLOW_END + "    atexit.register(print, 'ending', flush=True)\n")
    wait_for(process, "ending")
    for _ in range(times):
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert_nothing_left(before)
    assert "Traceback" not in error
    assert process.returncode == 0


def test_ctrl_c_twice_in_a_script_leaves_nothing() -> None:
    before = traces()
    process = script(SLOW_END + "    time.sleep(600)\n")
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)  # ends the script
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # while the session is being closed
    _, error = process.communicate(timeout=60)
    assert_nothing_left(before)
    assert error.count("Traceback") == 1  # the script's own
    assert "Exception ignored" not in error


def test_ctrl_c_while_a_session_is_being_closed_closes_it_first() -> None:
    before = traces()
    process = script(
        SLOW_END
        + """
    print("closing", flush=True)
    try:
        session.close()
    except KeyboardInterrupt:
        print("interrupted", session.is_open, flush=True)
    sys.stdin.close()
    """
    )
    wait_for(process, "closing")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert_nothing_left(before)
    assert output == "interrupted False\n"
    assert "Traceback" not in error


def test_ctrl_c_twice_while_a_session_starts_leaves_nothing() -> None:
    before = traces()
    process = script(
        """
        from distsession import Session
        print("begin", flush=True)
        Session(4)
        """
    )
    wait_for(process, "begin")
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert_nothing_left(before)


# --- starts that fail -----------------------------------------------------------------------------


@pytest.mark.usefixtures("cold_agents")
def test_an_agent_that_is_killed_while_it_starts_is_named(tmp_path: Path) -> None:
    before = traces()
    (tmp_path / "ends_the_agent.py").write_text("import os, signal\nos.kill(os.getpid(), 9)\n")
    process = script(
        """
        from distsession import LaunchError, Session
        try:
            Session(2, preload=["ends_the_agent"], ipyparallel="eager")
        except LaunchError as error:
            print(error)
        """,
        PYTHONPATH=os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))),
    )
    output, error = process.communicate(timeout=60)
    assert output == "the agent was killed by SIGKILL before it was ready.\n"
    assert "Traceback" not in error
    assert_nothing_left(before)


@pytest.mark.usefixtures("cold_agents")
def test_a_start_that_cannot_be_finished_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    from distsession.cluster import local

    before = traces()
    held = psutil.Process().num_fds()

    def fail(*_: object, **__: object) -> None:
        raise OSError("no more of these")

    monkeypatch.setattr(local, "SocketChannel", fail)
    with pytest.raises(LaunchError, match=r"^the session could not be set up: no more of these"):
        Session(2)
    assert psutil.Process().num_fds() == held
    assert_nothing_left(before)


LIMITED = """
    import os, resource, sys
    from distsession import LaunchError, Session
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
"""


def limited(text: str, soft: int, hard: int) -> tuple[str, str]:
    before = traces()
    code = textwrap.dedent(LIMITED) + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-c", code, str(soft), str(hard)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert_nothing_left(before)
    return done.stdout, done.stderr


@pytest.mark.parametrize(("soft", "hard"), [(64, 64), (64, 4096), (100, 100)])
def test_too_few_descriptors_for_ipyparallel_are_named_and_cells_go_on(
    soft: int, hard: int
) -> None:
    output, error = limited(
        """
        with Session(2) as session:
            for _ in range(2):
                try:
                    session.client
                except LaunchError as error:
                    print(error)
            session.execute("t = torch.ones(1); dist.all_reduce(t)")
            print(session.evaluate("t.item()"))
        """,
        soft,
        hard,
    )
    first, second, values = output.splitlines()
    assert first == second
    assert first.startswith("ipyparallel takes ")
    assert f"may have {soft}. Raise the limit" in first
    assert "ulimit -n 1024" in first
    assert values == "[ranks 0-1] 2.0"
    assert "Traceback" not in error


def test_a_rank_that_has_too_few_descriptors_for_ipyparallel_says_so() -> None:
    output, error = limited(
        """
        with Session(2) as session:
            session[1].execute("files = [open('/dev/null') for _ in range(100)]")
            try:
                session.client
            except LaunchError as error:
                print(error)
            session[1].execute("del files")
            print(session.client.ids)
        """,
        160,
        4096,
    )
    first, second = output.splitlines()
    assert first.startswith("rank 1 could not register with ipyparallel's controller")
    assert "Too many open files (a process may have 160). Raise the limit" in first
    assert second == "[0, 1]"
    assert "Traceback" not in error


def test_too_few_descriptors_for_a_session_are_named() -> None:
    code = """
        try:
            Session({ranks})
        except LaunchError as error:
            print(error)
    """
    for ranks, soft in ((2, 20), (16, 64)):
        output, error = limited(code.format(ranks=ranks), soft, soft)
        assert "open files and sockets in this process" in output
        assert f"may have {soft}. Raise the limit" in output
        assert "Traceback" not in error


# --- what is shown of an agent that is gone -------------------------------------------------------


def test_figures_of_an_agent_that_answers_no_more_are_not_shown(
    start: Callable[..., Session],
) -> None:
    session = start(2)
    observer = Snapshots(session)
    deadline = time.monotonic() + 30
    while not observer.take().rows[0].gauges:
        assert time.monotonic() < deadline
    agent = psutil.Process(session.launcher._agents.pid())
    agent.suspend()
    assert f"(pid {agent.pid}) is stopped" in observer.take().status
    time.sleep(3.0)
    assert not any(line.gauges for line in observer.take().rows)
    agent.resume()
    while not observer.take().rows[0].gauges:
        assert time.monotonic() < deadline
    agent.kill()
    agent.wait()
    until(lambda: {line.kind for line in observer.take().rows} == {"dead"})
    gone = observer.take()
    assert "agent is gone" in gone.status
    assert not any(line.gauges for line in gone.rows)
    assert "agent is gone" in repr(session.show_config())


def test_figures_are_those_of_the_agent_that_took_the_place_of_another(
    start: Callable[..., Session],
) -> None:
    session = start(2, nodes=2)
    observer = Snapshots(session)
    deadline = time.monotonic() + 60
    for _ in range(4):
        observer.take()
    agent = psutil.Process(session.infos[1].pid).parent()
    assert agent is not None
    agent.kill()
    while "dead" not in session.status():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    session.restart([1])
    while True:
        known = session.launcher.usage(0.3)
        assert known is None or {use.pid for use in known.uses} <= {i.pid for i in session.infos}
        if known is not None and len(known.uses) == 2:
            break
        assert time.monotonic() < deadline


# --- again and again ------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_a_process_that_starts_and_closes_sessions_does_not_grow() -> None:
    cycles.go(10)


def test_the_folder_goes_with_the_agent_and_does_not_need_the_kernel(
    start: Callable[..., Session],
) -> None:
    session = start(2)
    launcher = session.launcher
    folder = Path(launcher.folder)
    assert folder.exists()
    with launcher._made.pop_all():  # what the kernel does last, were it not killed by then
        session.close()
        assert not folder.exists()
