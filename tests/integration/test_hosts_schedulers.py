"""Array jobs of schedulers that cannot be had here: PBS, LSF, HTCondor. Shims play them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import distsession
from distsession import Session
from distsession.cluster.hosts import Hosts
from distsession.errors import LaunchError
from distsession.host_plan import HostPlan
from tests.integration.host_sessions import reduced
from tests.until import until

ROOT = Path(distsession.__file__).parents[1]

pytestmark = pytest.mark.timeout(120)

SHIM = Path(__file__).with_name("scheduler_shim.py")
NAMES = ("qsub", "qstat", "qdel", "bsub", "bjobs", "bkill")
NAMES = (*NAMES, "condor_submit", "condor_q", "condor_rm")
SCHEDULERS = {
    "openpbs": ("pbs", "pbs_version = 22.05.11", "4711[].server"),
    "torque": ("pbs", "Version: 6.1.2", "4711[].server"),
    "lsf": ("lsf", "", "4711"),
    "htcondor": ("htcondor", "", "4711"),
}
"""The launcher, the version that ``qsub`` says, and the id of the job."""

WRAPPER = f"""#!/bin/sh
exec {sys.executable} {SHIM} "$(basename "$0")" {{folder}} "{{version}}" "$@"
"""


@pytest.fixture(params=SCHEDULERS)
def scheduler(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """One of them, whose programs are on the PATH; nothing is left of its job."""
    text = WRAPPER.format(folder=tmp_path, version=SCHEDULERS[request.param][1])
    (tmp_path / "bin").mkdir()
    for name in NAMES:
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
        yield request.param
    until(lambda: not any(map(lives, tasks(tmp_path))), "the end of all tasks")
    assert not list(tmp_path.glob("distsession-*"))


def tasks(folder: Path) -> list[int]:
    path = folder / "tasks"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def plan(scheduler: str, folder: Path, **options: str) -> HostPlan:
    return HostPlan(launcher=SCHEDULERS[scheduler][0], nodes=2, folder=str(folder), options=options)


def test_each_task_has_a_host_of_its_own(scheduler: str, tmp_path: Path) -> None:
    with Hosts(plan(scheduler, tmp_path)) as hosts:
        hosts.start()
        assert [link.name for link in hosts.links] == ["node1", "node2"]
        assert (hosts.job, hosts.problems) == (SCHEDULERS[scheduler][2], [])
    assert not (tmp_path / "deleted").exists()  # they have ended by themselves


def test_a_session_runs_in_the_tasks(scheduler: str, tmp_path: Path) -> None:
    with Session(
        launcher=SCHEDULERS[scheduler][0], nodes=2, ranks_per_host=[1, 1], folder=str(tmp_path)
    ) as session:
        assert reduced(session) == {2.0}


def test_a_job_whose_agents_do_not_end_is_deleted(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.cluster.array_jobs.STOP_S", 0.0)
    with Hosts(plan(scheduler, tmp_path)) as hosts:
        hosts.start()
        with stopped(tasks(tmp_path)):
            hosts.close()
            assert (tmp_path / "deleted").read_text() == SCHEDULERS[scheduler][2]


def test_a_scheduler_that_does_not_answer_for_a_while_keeps_no_job(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.cluster.array_jobs.STOP_S", 2.0)
    with Hosts(plan(scheduler, tmp_path)) as hosts:
        hosts.start()
        with stopped(tasks(tmp_path)):
            (tmp_path / "silent").write_text("2")
            hosts.close()
            assert (tmp_path / "deleted").read_text() == SCHEDULERS[scheduler][2]


def test_a_job_is_not_said_to_have_ended_while_the_scheduler_does_not_answer(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.cluster.array_jobs.GONE_S", 0.0)
    monkeypatch.setattr("distsession.cluster.array_jobs.ASK_S", 0.0)
    (tmp_path / "silent").write_text("3")
    with Hosts(plan(scheduler, tmp_path)) as hosts:
        hosts.start()
        assert hosts.problems == []
        assert (tmp_path / "silent").read_text() == "0"


def test_a_job_that_ends_before_its_agents_come_is_told(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.cluster.array_jobs.GONE_S", 0.5)
    broken = HostPlan(
        launcher=SCHEDULERS[scheduler][0], nodes=2, folder=str(tmp_path), python="/bin/false"
    )
    with Hosts(broken) as hosts:
        hosts.start()
        assert hosts.problems
        for problem in hosts.problems:
            assert "has ended" in problem.value


def test_what_the_scheduler_refuses_is_told_in_its_own_words(
    scheduler: str, tmp_path: Path
) -> None:
    option, said = {
        "lsf": ("q", "nosuch: No such queue"),
        "htcondor": ("queue_name", "Failed to parse command file"),
    }.get(scheduler, ("q", "Unknown queue"))
    with (
        Hosts(plan(scheduler, tmp_path, **{option: "nosuch"})) as hosts,
        pytest.raises(LaunchError, match=said),
    ):
        hosts.start()


def test_a_stop_while_the_job_is_submitted_takes_it_back(scheduler: str, tmp_path: Path) -> None:
    code = (
        "from distsession.cluster.hosts import Hosts\n"
        "from distsession.host_plan import HostPlan\n"
        f"with Hosts({plan(scheduler, tmp_path)!r}) as hosts:\n    hosts.start()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SHIM_SUBMITS_IN_S": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    until((tmp_path / "submitting").exists, "the submitting of a job")
    os.killpg(process.pid, signal.SIGINT)  # as a notebook's front end and a terminal do
    _, written = process.communicate(timeout=60)
    assert written.rstrip().endswith("KeyboardInterrupt")
    assert tasks(tmp_path)  # it was taken, and the fixture sees that nothing is left of it


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that do nothing for a while."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGCONT)
