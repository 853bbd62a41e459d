"""ipyparallel's controller comes when it is asked for, and goes with the kernel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from distsession import LaunchError, Session, SessionStateError
from distsession.cluster import ipyparallel
from distsession.cluster.base import python_command
from distsession.cluster.ipyparallel import Controller
from distsession.cluster.monitor import Monitor
from distsession.cluster.registration import Registration
from tests.conftest import assert_nothing_left, traces
from tests.until import until

from .conftest import Recorder
from .kernel import Notebook


def controllers() -> list[psutil.Process]:
    """The controllers that this process has started."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "ipyparallel_controller" in " ".join(child.cmdline())
    ]


def has_heart_monitor(controller: int) -> bool:
    """Whether it listens for engines' hearts."""
    return any(
        connection.status == psutil.CONN_LISTEN
        for child in psutil.Process(controller).children()
        for connection in child.net_connections()
    )


def is_registered(session: Session) -> list[bool]:
    """Which ranks have become ipyparallel's engines."""
    ids = session.launcher._monitor.engine_ids
    return [rank in ids for rank in session.ranks]


def test_nothing_of_ipyparallel_is_there_before_it_is_asked_for() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import psutil, sys, time
                from distsession import Session
                with Session(2) as session:
                    session.execute("t = torch.ones(1); dist.all_reduce(t)")
                    session.restart([1])
                    time.sleep(1.0)
                    here = [name for name in sys.modules if name.startswith("ipyparallel")]
                    names = [
                        " ".join(child.cmdline())
                        for child in psutil.Process().children(recursive=True)
                    ]
                    print(here, any("controller" in name for name in names))
                    tcp = psutil.Process().net_connections(kind="tcp")
                    print([connection.laddr for connection in tcp])
                """
            ),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout == "[] False\n[]\n", done.stderr


def test_ranks_register_only_once_the_controller_was_asked_for(
    start: Callable[..., Session],
) -> None:
    session = start(2)
    session.restart([1])
    assert controllers() == []
    assert is_registered(session) == [False, False]
    assert session.client.ids == [0, 1]
    assert is_registered(session) == [True, True]
    client = session.client
    session.restart([1])  # from here on by themselves: a client knows the new one
    deadline = time.monotonic() + 60
    while is_registered(session) != [True, True]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert session.client is client
    assert client[:].apply_sync(os.getpid) == [info.pid for info in session.infos]


def test_the_first_use_may_come_after_a_restart(start: Callable[..., Session]) -> None:
    session = start(2)
    session.restart()
    assert session.client[:].apply_sync(os.getpid) == [info.pid for info in session.infos]


def test_eager_starts_it_behind_the_session(start: Callable[..., Session]) -> None:
    session = start(2, ipyparallel="eager")
    deadline = time.monotonic() + 60
    while is_registered(session) != [True, True]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert session.client.ids == [0, 1]


def test_two_threads_that_ask_at_once_get_the_same_client(start: Callable[..., Session]) -> None:
    session = start(2)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        clients = list(pool.map(lambda _: session.client, range(4)))
    assert len({id(client) for client in clients}) == 1
    assert len([c for c in controllers() if c.ppid() == os.getpid()]) == 1


def test_px_starts_it_and_says_what_it_waits_for() -> None:
    notebook = Notebook()
    try:
        notebook.run(
            "%load_ext distsession\nimport distsession\nfrom distsession.kernel import progress\n"
            "progress.SHOW_AFTER_S = 0\nsession = distsession.Session(2)"
        )
        request = notebook.client.execute("%px print(rank)")
        shown = notebook.collect(request)
        assert not shown.error
        assert "0" in shown.stdout or "0" in shown.plain
        notebook.run("session.close()")
        notebook.run("session = distsession.Session(2)")
        updates = notebook.updates(notebook.client.execute("%px pass"))
        assert any("ipyparallel's controller to start" in text for text in updates), updates
    finally:
        notebook.close()


@pytest.mark.parametrize("after", [0.0, 0.1, 0.3, 0.6, 1.0])
def test_a_stop_while_it_starts_leaves_nothing_half_made(
    start: Callable[..., Session], after: float
) -> None:
    session = start(2)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(after, signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()
        session.client  # noqa: B018
        time.sleep(after + 1.0)  # it was faster than the timer
    except KeyboardInterrupt:
        pass
    timer.join()
    assert session.client[:].apply_sync(os.getpid) == [info.pid for info in session.infos]
    assert len([c for c in controllers() if c.ppid() == os.getpid()]) == 1


@pytest.mark.parametrize("after", [0.0, 0.2, 0.5, 1.0])
def test_a_session_that_is_closed_while_it_starts_leaves_nothing(after: float) -> None:
    before = traces()
    session = Session(2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: session.client)
        time.sleep(after)
        session.close()
        problem = asking.exception(30)
    assert problem is None or "closed" in str(problem), problem
    assert_nothing_left(before)


@pytest.mark.parametrize(
    ("home", "step"),
    [
        (Controller, "start"),
        (Controller, "wait_ready"),
        (Registration, "_tell"),
        (Monitor, "wait_registered"),
        (Controller, "client"),
    ],
)
def test_whoever_waits_for_the_client_hears_of_a_close_at_any_step(
    home: type, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = traces()
    session = Session(2)
    closing = threading.Thread(target=session.close)
    real = getattr(home, step)

    def after_close(self: Any, *args: Any, **kwargs: Any) -> Any:
        if step == "wait_ready":
            assert self._ready.wait(30)
        closing.start()
        if step == "start":  # that is done under the lock for which the close waits
            until(lambda: session.launcher.is_closed)
        else:
            closing.join(30)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(home, step, after_close)
    with pytest.raises(SessionStateError, match="closed while ipyparallel's client"):
        session.client  # noqa: B018
    closing.join(30)
    assert_nothing_left(before)


def test_a_controller_that_does_not_start_is_tried_again(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(1)
    real = ipyparallel.python_command
    monkeypatch.setattr(
        ipyparallel,
        "python_command",
        lambda _: [sys.executable, "-c", "raise SystemExit('no ports for you')"],
    )
    with pytest.raises(LaunchError, match=r"did not start(.|\n)*no ports for you"):
        session.client  # noqa: B018
    monkeypatch.setattr(ipyparallel, "python_command", real)
    assert session.client.ids == [0]


def test_dead_ranks_and_agents_are_named_at_once(start: Callable[..., Session]) -> None:
    session = start(2)
    os.kill(session.infos[1].pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while "dead" not in session.status():
        assert time.monotonic() < deadline
    with pytest.raises(SessionStateError, match=r"rank 1 has died: session.restart\(\[1\]\)"):
        session.client  # noqa: B018
    os.kill(session.launcher._agents.pid(), signal.SIGKILL)
    while "agent is gone" not in session.status():
        assert time.monotonic() < deadline
    with pytest.raises(SessionStateError, match=r"session\.restart\(\) brings them back"):
        session.client  # noqa: B018
    session.restart()
    assert session.client.ids == [0, 1]


def test_ids_are_free_at_once_whatever_their_number(start: Callable[..., Session]) -> None:
    session = start(6, output=Recorder())
    assert session.client.ids == list(range(6))
    session.restart()
    assert session.client.ids == list(range(6))
    assert session.client[:].apply_sync(os.getpid) == [info.pid for info in session.infos]


# --- the processes, each alone --------------------------------------------------------------------


def test_a_controller_whose_kernel_is_gone_before_it_looks_ends(tmp_path: Path) -> None:
    # Its own start takes longer than the life of the one that has started it.
    (tmp_path / "logs").mkdir()
    (tmp_path / "lock").touch()
    program = """
        import os, subprocess, sys
        from distsession.cluster.base import python_command
        command = python_command("distsession.cluster.ipyparallel_controller")
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(1.0);" + command[2],
             str(os.getpid()), sys.argv[1], f"--profile-dir={sys.argv[1]}/profile"],
            start_new_session=True,
        )
        print(process.pid)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    _, alive = psutil.wait_procs([psutil.Process(int(done.stdout))], timeout=15)
    assert not alive
    assert not (tmp_path / "profile").exists()


def test_a_controller_listens_on_ports_that_were_held_for_it(tmp_path: Path) -> None:
    # A port that it only finds free may be somebody else's by the time it listens.
    (tmp_path / "lock").touch()
    program = """
        import ipyparallel.util
        def select_random_ports(n):
            raise RuntimeError("ipyparallel looks for a free port")
        ipyparallel.util.select_random_ports = select_random_ports
    """
    command = python_command("distsession.cluster.ipyparallel_controller")
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(program) + command[2],
                str(os.getpid()),
                str(tmp_path),
                f"--profile-dir={tmp_path}/profile",
                "--IPController.use_threads=True",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: has_heart_monitor(process.pid) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_heart_monitor_ends_with_its_controller(start: Callable[..., Session]) -> None:
    session = start(1)
    session.client  # noqa: B018
    process = session.launcher._registration.controller._cluster.controller.process
    children = process.children()
    assert children
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
