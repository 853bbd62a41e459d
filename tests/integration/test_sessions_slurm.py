"""Sessions in jobs of Slurm's, and of MPI's and a command's: starting, Stop, and their ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from distsession import (
    EngineDiedError,
    LaunchError,
    OptionsError,
    RunError,
    RunInterrupt,
    Session,
    SessionStateError,
)
from tests.integration.host_lab import need
from tests.integration.host_sessions import attached, interrupt_start, kill_kernel, python, reduced
from tests.integration.slurm_lab import SlurmLab, slurm_lab
from tests.until import Press, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Slurm, whose commands talk to it."""
    with slurm_lab() as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        for name in [name for name in os.environ if name.startswith(("SLURM_J", "SLURM_N"))]:
            patch.delenv(name)
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: SlurmLab) -> Iterator[None]:
    yield
    until(lambda: not lab.queue(), "an empty queue")
    until(lambda: not list(lab.folder.glob("distsession-*")), "the folder of the start to go")


def options_of(lab: SlurmLab, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"launcher": "slurm", "nodes": 2, "ranks_per_host": [1, 1]}
    return {**given, "folder": str(lab.folder), **changes}


def stop() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_session_runs_in_a_job_of_its_own_and_outlives_a_rank(lab: SlurmLab) -> None:
    with Session(**options_of(lab)) as session:
        assert session.job in lab.queue()
        assert [(host.name, host.ranks) for host in session.hosts] == [("n1", (0,)), ("n2", (1,))]
        assert reduced(session) == {2.0}
        session.execute("kept = rank + 1")
        with Press(session, stop), pytest.raises(RunInterrupt):
            session.execute("dist.barrier() if rank else __import__('time').sleep(600)")
        assert reduced(session) == {2.0}
        os.kill(session.infos[1].pid, signal.SIGKILL)
        with pytest.raises((RunError, EngineDiedError), match=r"rank 1 .* was killed by SIGKILL"):
            session.execute("dist.barrier()")
        session.restart(hosts=["n2"], restore="kept")
        assert dict(session.pull("kept")) == {0: 1, 1: 1}
        assert reduced(session) == {2.0}
        with pytest.raises(OptionsError, match="chooses the hosts itself"):
            session.restart(hosts={"n2": "n3"})


def test_a_job_that_is_cancelled_is_told_and_another_takes_its_place(lab: SlurmLab) -> None:
    with Session(**options_of(lab)) as session:
        first = session.job
        future = session.submit(_sleep)
        subprocess.run(["scancel", session.job], check=True)
        gone = (
            f"Slurm job {first} was cancelled or preempted, or has reached its time limit. "
            "session.restart() submits a new one; its ranks have no variables."
        )
        with pytest.raises(RunError) as raised:
            future.result(60)
        shown = raised.value._render_traceback_()
        assert shown == [f"EngineDiedError: ranks 0-1: each is gone: {gone}"]
        with pytest.raises(EngineDiedError) as again:
            session.run(int)
        assert str(again.value).endswith(gone)
        with pytest.raises(SessionStateError, match=r"restart\(\) starts all of them anew"):
            session.restart([0])
        session.restart()  # as is said
        assert session.job != first
        assert session.job in lab.queue()
        assert reduced(session) == {2.0}


def _sleep() -> None:
    import time

    time.sleep(600)


def test_stop_while_a_job_waits_takes_it_back(lab: SlurmLab) -> None:
    options = options_of(lab, launcher_options={"begin": "now+1hour"})
    interrupt_start(lambda: "PD" in lab.queue(), **options)
    assert not lab.queue()


def test_a_killed_kernel_gives_its_job_back(lab: SlurmLab) -> None:
    kill_kernel(**options_of(lab))
    until(lambda: not lab.queue(), "an empty queue")
    for folder in lab.folder.glob("distsession-start-*"):
        assert not (folder / "keys").exists()
        with Session(**options_of(lab)):  # whoever comes next removes it
            assert not folder.exists()


def test_within_an_allocation_the_ranks_are_a_step_of_it(lab: SlurmLab) -> None:
    code = (
        "import os\n"
        "from distsession import Session\n"
        f"with Session(launcher='slurm', ranks_per_host=[1, 1], folder={str(lab.folder)!r}) as s:\n"
        "    s.execute('t = torch.ones(())\\ndist.all_reduce(t)')\n"
        "    print([host.name for host in s.hosts], s.job == os.environ['SLURM_JOB_ID'])\n"
        "    print([float(value) for value in s.pull('t').values()])\n"
    )
    inside = python(code, "salloc", "--nodes=2", "--quiet")
    told, written = inside.communicate(timeout=110)
    assert told.splitlines() == ["['n1', 'n2'] True", "[2.0, 2.0]"], told + written


def test_ranks_that_are_kept_outlive_their_kernel_in_their_job(lab: SlurmLab) -> None:
    with attached("kept", **options_of(lab)) as session:
        assert reduced(session) == {2.0}
        os.kill(session.infos[1].pid, signal.SIGKILL)
        until(session.launcher.dead_ranks, "the death to be known")
        session.restart(hosts=["n2"], restore="value")
        assert reduced(session) == {2.0}
        assert session.job in lab.queue()


def test_ranks_that_are_kept_in_an_allocation_can_be_had_from_outside(lab: SlurmLab) -> None:
    options = options_of(lab)
    del options["nodes"]
    inside = ("salloc", "--nodes=2", "--quiet", "sh", "-c", '"$@" & wait; read line', "")
    with attached("allocated", *inside, **options) as session:
        assert reduced(session) == {2.0}
        session.restart()  # as a step of that allocation, of which this process has no variable
        assert reduced(session) == {2.0}
        assert len(lab.queue().splitlines()) == 1


def test_a_lease_that_ends_gives_the_job_back(lab: SlurmLab) -> None:
    options = {**options_of(lab), "name": "leased", "keep": 2}
    code = f"from distsession import Session\nsession = Session(**{options!r})\n"
    kernel = python(f"{code}session.detach()")
    _, written = kernel.communicate(timeout=60)
    assert kernel.returncode == 0, written
    assert lab.queue()
    until(lambda: not lab.queue(), "an empty queue")


def test_a_command_of_the_users_own_starts_a_session(lab: SlurmLab) -> None:
    options = options_of(lab, launcher="command", command="srun -N2 --ntasks-per-node=1 {agent}")
    with Session(**options) as session:
        assert [(host.name, host.ranks) for host in session.hosts] == [("n1", (0,)), ("n2", (1,))]
        assert reduced(session) == {2.0}


def test_mpi_starts_a_session_that_may_be_kept(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("mpiexec")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    arguments = {"args": "--oversubscribe --bind-to none"}
    options = options_of(lab, launcher="mpi", nodes=1, ranks_per_host=[2])
    with attached("mpi", **options, launcher_options=arguments) as session:
        assert [host.ranks for host in session.hosts] == [(0, 1)]
        assert reduced(session) == {2.0}


def test_a_partition_that_is_unknown_is_named(lab: SlurmLab) -> None:
    with pytest.raises(LaunchError, match="invalid partition specified: nosuch"):
        Session(**options_of(lab, launcher_options={"partition": "nosuch"}))
