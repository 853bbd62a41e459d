"""Ends of processes, hosts and networks under a session on hosts by ssh."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import psutil
import pytest

from distsession import EngineDiedError, LaunchError, RunError, Session
from distsession.cluster import hosts as cluster_hosts
from distsession.cluster.host_links import HostLinks
from distsession.cluster.hosts import LOST_S
from tests.integration.host_lab import HostLab, LabHost, host_lab
from tests.integration.host_sessions import count, nothing_left, processes, reduced, start
from tests.until import until, until_settled

pytestmark = pytest.mark.timeout(90)

NAMES = ("gpu1", "gpu2", "gpu3")
PATIENCE_S = 8.0
"""Of hosts with a kernel that is silent; shorter than theirs, for a test waits for it."""


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab((*NAMES, "gpu4")) as found:
        yield found
        nothing_left(found)
        assert not list(found.folder.glob("distsession-*"))


@pytest.fixture(scope="module")
def six(lab: HostLab) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_hosts, "HostLinks", partial(HostLinks, patience_s=PATIENCE_S))
        with start(lab, *NAMES) as session:
            yield session


@pytest.fixture(autouse=True)
def _keeps_its_variables(six: Session) -> Iterator[None]:
    """Whatever a test does, ranks that it does not harm keep what they have."""
    hosts = six.hosts
    six.execute("kept = rank")
    before = {info.rank: info.pid for info in six.infos}
    yield
    values = six.pull("kept")
    for info in six.infos:
        if info.pid == before[info.rank]:
            assert values[info.rank] == info.rank
    assert reduced(six) == {6.0}
    assert [host.ranks for host in six.hosts] == [host.ranks for host in hosts]


def in_a_barrier(session: Session) -> Future[Any]:
    """All ranks but one wait for it, which is in a sleep."""
    future = session.submit(_sleep_or_wait)
    until_settled(session)
    return future


def _sleep_or_wait() -> None:
    import torch

    time.sleep(600) if torch.distributed.get_rank() == 3 else torch.distributed.barrier()


def kill(session: Session, which: str) -> None:
    if which == "rank":
        os.kill(session.infos[3].pid, signal.SIGKILL)
    else:
        processes(session, "gpu2")[which].kill()


KILLED = {
    "rank": r"rank 3 \(pid \d+\) was killed by SIGKILL",
    "agent": r"ranks? 2.* is gone: the agent on gpu2 .* is gone.*, and with it ranks 2-3",
    "relay": r"ranks? 2.* cannot be reached: the relay of gpu2",
    "host": r"ranks? 2.* is gone: the agent on gpu2 .* is gone.*, and with it ranks 2-3",
}


@pytest.mark.parametrize("which", KILLED)
def test_the_end_of_a_process_frees_the_others_and_is_mended(
    lab: HostLab, six: Session, which: str
) -> None:
    future = in_a_barrier(six)
    before = {info.pid for info in six.infos}
    kill(six, which)
    with pytest.raises(RunError, match=f"^EngineDiedError: {KILLED[which]}"):
        future.result(30)
    assert dict(six.on("gpu1", "gpu3").evaluate("kept")) == {0: 0, 1: 1, 4: 4, 5: 5}
    with pytest.raises(EngineDiedError, match=KILLED[which]):
        six.run(int)
    six.restart(hosts=["gpu2"], restore="kept")
    assert reduced(six) == {6.0}
    assert dict(six.on("gpu2").evaluate("kept")) == {2: 0, 3: 0}
    gone = before - {info.pid for info in six.infos}
    assert len(gone) == 2
    until(lambda: not any(psutil.pid_exists(pid) for pid in gone), "the end of the old ranks")
    until(lambda: len(lab["gpu2"].left()) == 1, "nothing but what the new agent has")


def test_a_network_that_is_cut_for_a_second_costs_nothing(lab: HostLab, six: Session) -> None:
    pids = [info.pid for info in six.infos]
    future = six.submit(count, 30)
    with lab["gpu2"].unplugged():
        time.sleep(1)
    assert list(future.result(60).values()) == [30 * 6.0] * 6
    assert reduced(six) == {6.0}
    assert [info.pid for info in six.infos] == pids


def test_a_kernel_that_is_held_up_gives_up_no_host(six: Session) -> None:
    pids = [info.pid for info in six.infos]
    ctypes.PyDLL(None).sleep(round(LOST_S) + 2)  # holds the interpreter's lock
    time.sleep(1)
    assert reduced(six) == {6.0}
    assert [info.pid for info in six.infos] == pids


CUT_OFF = r"^EngineDiedError: ranks? 2.* cannot be reached: gpu2 has not answered for"


@pytest.fixture
def patient() -> Iterator[None]:
    """No host counts as gone, however long a busy machine takes to let it answer again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_hosts, "LOST_S", 60.0)
        yield


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("work", ["waits", "reduces"])
def test_a_host_that_is_cut_off_is_named_and_the_others_are_free(
    lab: HostLab, six: Session, work: str
) -> None:
    pids = [info.pid for info in six.infos]
    future = in_a_barrier(six) if work == "waits" else six.submit(count, 600)
    until(lambda: any(r.operations() for r in six.launcher.board.regions), "a collective")
    with lab["gpu2"].unplugged():
        with pytest.raises(RunError, match=CUT_OFF):
            future.result(30)
        assert dict(six.on("gpu1", "gpu3").evaluate("kept")) == {0: 0, 1: 1, 4: 4, 5: 5}
        with pytest.raises(EngineDiedError, match="gpu2 has not answered"):
            six.run(int)
        assert "gpu2 has not answered" in six.status()
        assert not six.launcher.dead_ranks()
    until(lambda: not six.launcher.silent_hosts(), "gpu2 to answer again")
    assert reduced(six) == {6.0}
    assert [info.pid for info in six.infos] == pids
    assert "gpu2" not in six.status()


def test_a_network_that_comes_back_in_time_costs_no_ranks_though_nothing_is_sent_again_yet(
    lab: HostLab, six: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_hosts, "LOST_S", 7.0)
    monkeypatch.setattr(cluster_hosts, "SLOW_LOST_S", 60.0)
    pids = [info.pid for info in six.infos]
    with lab["gpu2"].unplugged():
        time.sleep(4.5)  # after which what was sent meanwhile is sent again some 3 s later
    until(lambda: not six.launcher.silent_hosts(), "gpu2 to answer again")
    assert reduced(six) == {6.0}
    assert [info.pid for info in six.infos] == pids


@contextlib.contextmanager
def stopped(host: LabHost) -> Iterator[None]:
    """All processes of a host are stopped; its system answers."""
    pids = host.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("link", ["near", "far", "lossy"])
def test_a_host_that_is_stopped_for_three_seconds_is_named_and_costs_nothing(
    lab: HostLab, six: Session, link: str
) -> None:
    pids = [info.pid for info in six.infos]
    delays = {"far": (0.2, 0.0), "lossy": (0.01, 0.02)}
    with lab.delayed("gpu2", *delays[link]) if link in delays else contextlib.nullcontext():
        future = six.submit(count, 10)
        until(lambda: any(r.request for r in six.launcher.board.regions), "the call's beginning")
        with stopped(lab["gpu2"]):
            began = time.monotonic()
            until(lambda: "gpu2 has not answered for" in six.status(), "its name")
            time.sleep(max(0.0, began + 3 - time.monotonic()))
            assert not future.done(), future.exception()
        assert list(future.result(60).values()) == [10 * 6.0] * 6
        until(lambda: "gpu2" not in six.status(), "gpu2 to answer again")
    assert reduced(six) == {6.0}
    assert [info.pid for info in six.infos] == pids


def test_hosts_that_are_busy_are_not_cut_off(lab: HostLab, six: Session) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        future = six.submit(count, 50)
        while not future.done():
            assert not any(host.is_cut_off for host in six.launcher.silent_hosts())
            time.sleep(0.1)
        assert list(future.result(60).values()) == [50 * 6.0] * 6
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.parametrize("crashes", [True, False], ids=["crashed", "cut off for a while"])
def test_a_host_that_is_lost_is_named_and_taken_in_again(
    lab: HostLab, six: Session, crashes: bool
) -> None:
    future = in_a_barrier(six)
    with lab["gpu2"].unplugged():
        if crashes:
            lab["gpu2"].crash()
        with pytest.raises(RunError, match=CUT_OFF):
            future.result(30)
        until(lambda: sorted(six.launcher.dead_ranks()) == [2, 3], "gpu2 to count as gone")
        with pytest.raises(EngineDiedError, match=KILLED["host"]):
            six.run(int)
        assert dict(six.on("gpu1", "gpu3").evaluate("kept")) == {0: 0, 1: 1, 4: 4, 5: 5}
    six.restart(hosts=["gpu2"], restore=["kept"])
    assert reduced(six) == {6.0}
    assert dict(six.on("gpu2").evaluate("kept")) == {2: 0, 3: 0}
    until(lambda: len(lab["gpu2"].left()) == 1, "nothing but what the new agent has")


@pytest.mark.timeout(240)
def test_a_network_that_is_cut_for_a_minute_is_named_and_mended_on_both_ends(
    lab: HostLab, six: Session, caplog: pytest.LogCaptureFixture
) -> None:
    future = in_a_barrier(six)
    former = {six.infos[rank].pid for rank in (2, 3)}
    cut_at = time.monotonic()
    with lab["gpu2"].unplugged():
        with pytest.raises(RunError, match=CUT_OFF):
            future.result(30)
        until(lambda: sorted(six.launcher.dead_ranks()) == [2, 3], "gpu2 to count as gone")
        with pytest.raises(EngineDiedError, match=KILLED["host"]):
            six.run(int)
        # Its own end: nobody there waits for a kernel that does not come back.
        until(lambda: not lab["gpu2"].processes(), "the end of what is cut off")
        assert not any(psutil.pid_exists(pid) for pid in former)
        assert lab["gpu2"].left() == []
        with pytest.raises(LaunchError, match=r"gpu2: ssh does not get there \("):
            six.restart(hosts=["gpu2"])
        steps = 0
        while time.monotonic() < cut_at + 60:
            others = six.on("gpu1", "gpu3")
            others.execute("kept = kept + 0")
            assert dict(others.evaluate("kept")) == {0: 0, 1: 1, 4: 4, 5: 5}
            steps += 1
        assert steps > 10
        assert "rank 2" in six.status() or "ranks 2-3" in six.status()
    six.restart(hosts=["gpu2"], restore=["kept"])
    assert reduced(six) == {6.0}
    assert dict(six.on("gpu2").evaluate("kept")) == {2: 0, 3: 0}
    until(lambda: len(lab["gpu2"].left()) == 1, "nothing but what the new agent has")
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warnings == ["the host gpu2 is silent: it counts as gone"]


def test_a_host_that_is_back_when_it_counts_as_gone_is_told_to_end(
    lab: HostLab, six: Session
) -> None:
    with lab["gpu2"].unplugged():
        until(lambda: sorted(six.launcher.dead_ranks()) == [2, 3], "gpu2 to count as gone")
    until(lambda: not lab["gpu2"].processes(), "the end of what was given up")
    assert lab["gpu2"].left() == []
    six.restart(hosts=["gpu2"], restore="kept")
    assert dict(six.on("gpu2").evaluate("kept")) == {2: 0, 3: 0}


def test_another_host_takes_the_place_of_one_that_is_cut_off(
    lab: HostLab, six: Session, caplog: pytest.LogCaptureFixture
) -> None:
    future = in_a_barrier(six)
    with lab["gpu2"].unplugged():
        with pytest.raises(RunError, match=CUT_OFF):
            future.result(30)
        until(lambda: sorted(six.launcher.dead_ranks()) == [2, 3], "gpu2 to count as gone")
        six.restart(hosts={"gpu2": "gpu4"}, restore="kept")
        assert [host.name for host in six.hosts] == ["gpu1", "gpu4", "gpu3"]
        assert dict(six.on("gpu4").run(lambda: os.uname().nodename)) == {2: "gpu4", 3: "gpu4"}
        assert reduced(six) == {6.0}
        until(lambda: not lab["gpu2"].processes(), "the end of what is cut off")
        assert lab["gpu2"].left() == []
    six.restart(hosts={"gpu4": "gpu2"}, restore="kept")
    until(lambda: not lab["gpu4"].processes(), "the end of what was replaced")
    assert dict(six.on("gpu2").run(lambda: os.uname().nodename)) == {2: "gpu2", 3: "gpu2"}
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warnings == ["the host gpu2 is silent: it counts as gone"]
