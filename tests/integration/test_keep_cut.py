"""Hosts that are cut off under a session that is kept, with and without somebody who owns it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

import distsession
from distsession import EngineDiedError, RunError, Session
from distsession.cluster.end_kept import end_session
from distsession.cluster.kept import find_kept, kept_sessions
from distsession.cluster.kept_session import users
from distsession.kernel.kept_state import look_at
from distsession.kernel.kept_table import doing_text
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, options_of, reduced
from tests.until import until, until_settled

pytestmark = pytest.mark.timeout(300)

NAMES = ("gpu1", "gpu2")
NAME = "cutoff"
SHORT_S = 3.0
"""Of a cut that is seen, and costs nothing."""
LONG_LEASE_S = 20
"""Of a session whose host counts as gone long before."""
GONE = r"rank 1 \(pid \d+\) is gone: the agent on gpu2 .* is gone, and with it rank 1"
CUT_OFF = r"^EngineDiedError: rank 1 \(pid \d+\) cannot be reached: gpu2 has not answered for"
PATIENT = """
import sys
from distsession.cluster import kept_hosts
KEEPER = (
    "from distsession.cluster import host_keeper, hosts; hosts.LOST_S = 60; host_keeper.main()"
)
kept_hosts.python_command = lambda module: [sys.executable, "-c", KEEPER]
"""
"""No host counts as gone, however long it is cut off on a busy machine."""
KERNEL = """
import time
from distsession import Session
session = Session(**{options!r})
session.execute("kept = rank")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(NAMES) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: HostLab) -> Iterator[None]:
    yield
    for kept in kept_sessions():
        if kept.name == NAME:  # of a test that has failed
            end_session(kept, "the test is over")
    nothing_left(lab)
    folders = lambda: [str(folder) for folder in lab.folder.glob("distsession-*")]  # noqa: E731
    try:
        until(lambda: not folders(), "the folder of the start to go")
    except AssertionError as error:
        left = {name: (os.listdir(name), users(name)) for name in folders()}
        raise AssertionError(f"{error}: {left}") from None


def leave(lab: HostLab, *, first: str = "", **options: Any) -> None:
    """Have a kernel start the session, and kill it.

    Args:
        lab: Has the hosts.
        first: What the kernel runs before.
        options: Of the session.
    """
    given = {"ranks_per_host": [1, 1], "keep": 60, "name": NAME, **options}
    code = first + KERNEL.format(options=options_of(lab, *NAMES, **given))
    root = str(Path(distsession.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as kernel:  # fmt: skip
        assert kernel.stdout is not None
        line = kernel.stdout.readline()
        kernel.send_signal(signal.SIGKILL)
    assert line == "ready\n"


@contextlib.contextmanager
def attached(lab: HostLab, first: str = "") -> Iterator[Session]:
    """The session, with this process as its owner."""
    leave(lab, first=first)
    with Session.attach(NAME) as session:
        yield session


def in_a_barrier(session: Session) -> Future[Any]:
    """Rank 0 waits for the other one, which sleeps."""
    future = session.submit(_sleep_or_wait)
    until_settled(session)
    return future


def _sleep_or_wait() -> None:
    import torch

    time.sleep(600) if os.environ["RANK"] == "1" else torch.distributed.barrier()


def pids(session: Session) -> list[int]:
    return [info.pid for info in session.infos]


# --- with an owner --------------------------------------------------------------------------------


def test_a_host_that_comes_back_is_named_and_keeps_its_variables(lab: HostLab) -> None:
    with attached(lab, PATIENT) as session:
        before, future = pids(session), in_a_barrier(session)
        with lab["gpu2"].unplugged():
            with pytest.raises(RunError, match=CUT_OFF):
                future.result(60)
            assert session[0].evaluate("kept") == {0: 0}
            assert "gpu2 has not answered" in session.status()
            assert not session.launcher.dead_ranks()
        until(lambda: not session.launcher.silent_hosts(), "gpu2 to answer again")
        assert reduced(session) == {2.0}
        assert session.evaluate("kept") == {0: 0, 1: 1}
        assert pids(session) == before


def test_a_host_that_stays_away_counts_as_gone_for_this_owner_and_the_next(lab: HostLab) -> None:
    with attached(lab) as session:
        with lab["gpu2"].unplugged():
            until(session.launcher.dead_ranks, "gpu2 to count as gone")
            # A RunError where the call was sent in the instant in which this becomes known.
            with pytest.raises((EngineDiedError, RunError), match=GONE):
                session.run(int)
            session.detach()
            with Session.attach(NAME) as again:
                with pytest.raises(EngineDiedError, match="rank 1"):
                    again.run(int)
                assert again[0].evaluate("kept") == {0: 0}
                until(lambda: not lab["gpu2"].processes(), "the end of what is cut off")
                again.detach()
        with Session.attach(NAME) as again:
            again.restart(hosts=["gpu2"], restore="kept")
            assert reduced(again) == {2.0}
            assert again.evaluate("kept") == {0: 0, 1: 0}


# --- with nobody ----------------------------------------------------------------------------------


def doing() -> str:
    return doing_text(look_at(find_kept(NAME)))


def test_a_cut_that_nobody_sees_costs_nothing(lab: HostLab) -> None:
    leave(lab, first=PATIENT)
    with lab["gpu2"].unplugged():
        time.sleep(SHORT_S)
    with Session.attach(NAME) as session:
        until(lambda: not session.launcher.silent_hosts(), "gpu2 to answer again")
        assert session.evaluate("kept") == {0: 0, 1: 1}
        assert reduced(session) == {2.0}


def test_who_attaches_while_a_host_is_cut_off_has_the_others(lab: HostLab) -> None:
    leave(lab)
    with lab["gpu2"].unplugged(), Session.attach(NAME) as session:
        assert session[0].evaluate("kept") == {0: 0}
        until(session.launcher.dead_ranks, "gpu2 to count as gone")
        session.detach()
    with Session.attach(NAME) as session:
        with pytest.raises(EngineDiedError, match="rank 1"):
            session.run(int)
        session.restart(hosts=["gpu2"], restore="kept")
        assert session.evaluate("kept") == {0: 0, 1: 0}
        assert reduced(session) == {2.0}


def test_a_host_that_stays_away_is_dead_in_the_list_and_to_who_attaches(lab: HostLab) -> None:
    leave(lab)
    with lab["gpu2"].unplugged():
        until(lambda: "rank 1 dead" in doing(), "its death to be shown")
        until(lambda: not lab["gpu2"].processes(), "the end of what is cut off")
        assert lab["gpu2"].left() == []
    with Session.attach(NAME) as session:
        with pytest.raises(EngineDiedError, match=GONE):
            session.run(int)
        session.restart(hosts=["gpu2"], restore="kept")
        assert session.evaluate("kept") == {0: 0, 1: 0}
        assert reduced(session) == {2.0}


@pytest.mark.parametrize("is_lost", [False, True], ids=["just now", "for long"])
def test_the_end_of_a_lease_leaves_nothing_on_a_host_that_is_cut_off(
    lab: HostLab, is_lost: bool
) -> None:
    leave(lab, keep=LONG_LEASE_S if is_lost else 5)
    kept = find_kept(NAME)
    here = [psutil.Process(pid) for pid in (*kept.agents, kept.keeper)]
    with lab["gpu2"].unplugged():
        if is_lost:
            until(lambda: "rank 1 dead" in doing(), "gpu2 to count as gone")
        until(lambda: not any(each.is_running() for each in here), "the end of all here")
        until(lambda: not os.path.exists(kept.folder), "the folder's end")
        until(lambda: not lab["gpu1"].processes(), "the end of all on the other host")
        until(lambda: not lab["gpu2"].processes(), "the end of what is cut off")
        assert lab["gpu2"].left() == []
