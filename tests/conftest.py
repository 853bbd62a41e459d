"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import faulthandler
import glob
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.backends import BACKENDS, Backend, check_can_run, is_chosen
from tests.ports import held_port
from tests.warm_agents import WarmProcess

# A shell lets what it starts in the background ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


_in_one_of_several = False
"""Whether pytest-xdist runs this process beside others."""
_stderr = -1
"""That of the run, also while pytest captures the tests'."""


def pytest_configure(config: pytest.Config) -> None:
    global _in_one_of_several, _stderr
    _in_one_of_several = hasattr(config, "workerinput")
    _stderr = os.dup(2)


# What pytest-timeout says of a test that hangs goes to standard output, and a process that
# pytest-xdist started has none.


def pytest_timeout_set_timer(settings: Any) -> None:
    if _in_one_of_several:
        faulthandler.dump_traceback_later(max(settings.timeout - 1.0, 0.1), file=_stderr)


def pytest_timeout_cancel_timer() -> None:
    if _in_one_of_several:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if not is_chosen(item)]
    if others:
        items[:] = [item for item in items if is_chosen(item)]
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    check_can_run(item)


@pytest.fixture(scope="module", params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each of the backends that tests run on."""
    found: Backend = request.param
    return found


@dataclass(frozen=True)
class Traces:
    """What a session could leave behind on this machine."""

    processes: frozenset[int]
    folders: frozenset[str]
    shared_memory: frozenset[str]
    listening: frozenset[tuple[int, int]]


def traces() -> Traces:
    processes = {p.pid for p in psutil.process_iter(["cmdline"]) if _is_ours(p)}
    listening = {
        (c.pid or 0, c.laddr.port)
        for c in psutil.net_connections(kind="tcp")
        if c.status == psutil.CONN_LISTEN and c.pid in processes | {os.getpid()}
    }
    return Traces(
        processes=frozenset(processes),
        folders=frozenset(glob.glob(os.path.join(tempfile.gettempdir(), "distsession-*"))),
        shared_memory=shared_memory(),
        listening=frozenset(listening),
    )


def shared_memory() -> frozenset[str]:
    return frozenset(os.listdir("/dev/shm"))


def _is_ours(process: psutil.Process) -> bool:
    """A process of a session that this test run started, in whatever way it was detached."""
    try:
        mine = process.environ().get("PYTEST_RUN_OF") == str(os.getpid())
        return mine and process.pid != os.getpid()
    except psutil.Error:  # it ended, or it is another user's
        return False


def held_by_others(names: frozenset[str]) -> set[str]:
    """Those of these names in ``/dev/shm`` that processes of others have open or mapped."""
    held = set()
    for process in psutil.process_iter() if names else ():
        if process.pid == os.getpid() or _is_ours(process):
            continue
        try:
            with open(f"/proc/{process.pid}/maps") as file:
                uses = file.read()
            folder = f"/proc/{process.pid}/fd"
            uses += "".join(f"{os.readlink(f'{folder}/{fd}')}\n" for fd in os.listdir(folder))
        except OSError:  # it has ended
            continue
        held |= {name for name in names if f"/dev/shm/{name}\n" in uses}
    return held


def assert_nothing_left(before: Traces, within: float | None = None) -> None:
    """Processes, folders, shared memory and ports are as before, at latest after some seconds.

    Two of them; ten where other tests have the processors at the same time.
    """
    if within is None:
        within = 10.0 if _in_one_of_several else 2.0
    deadline = time.monotonic() + within
    while True:
        now = traces()
        left = Traces(
            processes=now.processes - before.processes,
            folders=now.folders - before.folders,
            shared_memory=(new := now.shared_memory - before.shared_memory) - held_by_others(new),
            listening=now.listening - before.listening,
        )
        if left == Traces(frozenset(), frozenset(), frozenset(), frozenset()):
            return
        if time.monotonic() > deadline:
            names = []
            for pid in left.processes:
                try:
                    names.append(f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}")
                except psutil.Error:
                    continue
            pytest.fail(f"left behind: {left}\n" + "\n".join(names))
        time.sleep(0.05)


@pytest.fixture(scope="session", autouse=True)
def _mark_processes() -> Iterator[None]:
    """Processes and folders of this test run can be told from those of others."""
    os.environ["PYTEST_RUN_OF"] = str(os.getpid())
    # pytest's own temporary folders have paths too long for a unix socket
    with tempfile.TemporaryDirectory(prefix="ds-test-", dir="/tmp") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
    tempfile.tempdir = None
    del os.environ["PYTEST_RUN_OF"], os.environ["TMPDIR"]


@pytest.fixture(scope="session")
def warm(_mark_processes: None) -> Iterator[WarmProcess]:
    """What programs can be started by that start agents that have imported torch."""
    from distsession.engine.process import agent_environment

    with contextlib.closing(WarmProcess(agent_environment(os.environ))) as process:
        yield process


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other program is given while the test runs."""
    with held_port() as number:
        yield number


@pytest.fixture(scope="module", autouse=True)
def _no_leaks(_mark_processes: None) -> Iterator[None]:
    """A module leaves nothing behind."""
    before = traces()
    yield
    assert_nothing_left(before)
