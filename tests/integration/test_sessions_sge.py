"""Sessions in array jobs of Grid Engine's: starting, Stop, and their ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from distsession import LaunchError, RunError, RunInterrupt, Session, SessionStateError
from tests.integration.grid_engine_lab import GridEngineLab, grid_engine_lab
from tests.integration.host_sessions import attached, interrupt_start, kill_kernel, reduced
from tests.until import Press, until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def lab() -> Iterator[GridEngineLab]:
    """Grid Engine, whose commands are on the PATH."""
    with grid_engine_lab() as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", found.path)
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: GridEngineLab) -> Iterator[None]:
    yield
    until(lambda: not lab.queue(), "an empty queue")
    until(lambda: not list(lab.hosts.folder.glob("distsession-*")), "the folder of the start to go")


def options_of(lab: GridEngineLab, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"launcher": "sge", "nodes": 2, "ranks_per_host": [1, 1]}
    return {**given, "folder": str(lab.hosts.folder), **changes}


def test_each_task_of_an_array_job_has_the_ranks_of_its_host(lab: GridEngineLab) -> None:
    with Session(**options_of(lab, launcher_options={"q": "all.q"})) as session:
        assert session.job in lab.queue()
        assert sorted(host.name for host in session.hosts) == ["gpu1", "gpu2"]
        assert reduced(session) == {2.0}
        session.execute("kept = rank + 1")
        with (
            Press(session, lambda: os.kill(os.getpid(), signal.SIGINT)),
            pytest.raises(RunInterrupt),
        ):
            session.execute("dist.barrier() if rank else __import__('time').sleep(600)")
        assert reduced(session) == {2.0}
        killed = session.infos[1].pid
        with (
            Press(session, lambda: os.kill(killed, signal.SIGKILL)),
            pytest.raises(RunError, match=r"rank 1 .* was killed by SIGKILL"),
        ):
            session.execute("dist.barrier() if rank == 0 else __import__('time').sleep(60)")
        session.restart([1], restore="kept")
        assert dict(session.pull("kept")) == {0: 1, 1: 1}


def test_a_job_that_is_deleted_is_told_and_another_takes_its_place(lab: GridEngineLab) -> None:
    with Session(**options_of(lab)) as session:
        first = session.job
        future = session.submit(_sleep)
        lab.run("qdel", first)
        with pytest.raises(RunError, match=r"ranks? 0.* is gone: the agent on gpu"):
            future.result(60)
        with pytest.raises(SessionStateError, match=r"restart\(\) starts all of them anew"):
            session.restart([0])
        session.restart()
        assert session.job != first
        assert reduced(session) == {2.0}


def _sleep() -> None:
    import time

    time.sleep(600)


def test_stop_while_a_job_waits_takes_it_back(lab: GridEngineLab) -> None:
    options = options_of(lab, launcher_options={"a": "203001010000"})
    interrupt_start(lambda: "qw" in lab.queue(), **options)


def test_a_killed_kernel_gives_its_job_back(lab: GridEngineLab) -> None:
    kill_kernel(**options_of(lab))
    until(lambda: not lab.queue(), "an empty queue")
    with Session(**options_of(lab)):  # whoever comes next removes what is left of the start
        pass


def test_ranks_that_are_kept_outlive_their_kernel_in_their_job(lab: GridEngineLab) -> None:
    with attached("kept", **options_of(lab)) as session:
        assert session.job in lab.queue()
        assert reduced(session) == {2.0}


def test_what_the_scheduler_says_of_a_job_that_it_refuses_is_told(lab: GridEngineLab) -> None:
    with pytest.raises(LaunchError, match=r"qsub refuses the job: .*nowhere\.q"):
        Session(**options_of(lab, launcher_options={"q": "nowhere.q"}))
