"""Agents in jobs of Slurm's, with two slurmd on this machine, and by other programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distsession
from distsession.cli.finding import Finding
from distsession.cli.hosts import check_hosts_of
from distsession.cluster.hosts import Hosts
from distsession.errors import LaunchError
from distsession.host_plan import HostPlan
from tests.integration.slurm_lab import SlurmLab, slurm_lab
from tests.until import until

ROOT = Path(distsession.__file__).parents[1]


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    with slurm_lab() as found:
        yield found


@pytest.fixture(autouse=True)
def _in_lab(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm's commands talk to it; and each test leaves neither jobs nor folders."""
    for name, value in lab.environment.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith(("SLURM_J", "SLURM_N"))]:
        monkeypatch.delenv(name)
    yield
    assert lab.queue() == ""
    assert not list(lab.folder.glob("distsession-*"))


def plan(lab: SlurmLab, launcher: str = "slurm", **changes: Any) -> HostPlan:
    return HostPlan(**{"launcher": launcher, "nodes": 2, "folder": str(lab.folder), **changes})


def problems(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.fatal]


class Told(Exception):
    """What is waited for."""


def test_the_doctor_starts_an_agent_on_each_host_of_a_job(lab: SlurmLab) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distsession", "doctor", "--json", "--launcher", "slurm", "--nodes",
         "2", "--partition", "debug", "--time", "5:00", "--folder", str(lab.folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = [(each["what"], each["value"]) for each in json.loads(done.stdout)]
    assert dict(told)["job"].isdigit()
    for node in ("n1", "n2"):
        text = "\n".join(value for what, value in told if what == node)
        assert re.search(r"an agent \(pid \d+\) comes to", text)
        assert "all others reach it at" in text
    assert [what for what, _ in told if what in ("n1", "n2")][:2] == ["n1", "n2"]


def test_what_is_waited_for_is_told_and_stop_gives_the_job_back(lab: SlurmLab) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            raise Told

    with Hosts(plan(lab, options={"begin": "now+1hour"}), tell) as hosts:
        with pytest.raises(Told):
            hosts.start()
        assert hosts.job in lab.queue()
    assert re.fullmatch(rf"job {hosts.job} pending \(BeginTime\), 2 nodes", told[-1])


def test_srun_is_told_how_many_processors_the_job_has_for_each_task(lab: SlurmLab) -> None:
    with Hosts(plan(lab, options={"cpus-per-task": "2"})) as hosts:
        hosts.start()
        assert len(hosts.links) == 2, hosts.problems
        for link in hosts.links:
            environ = Path(f"/proc/{link.pid}/environ").read_bytes().split(b"\0")
            assert b"SRUN_CPUS_PER_TASK=2" in environ


def test_a_job_that_is_cancelled_from_outside_is_named(lab: SlurmLab) -> None:
    hosts = Hosts(
        plan(lab, options={"begin": "now+1hour"}),
        lambda text: subprocess.run(["scancel", hosts.job], check=True),
    )
    with hosts:
        hosts.start()
    (problem,) = hosts.problems
    assert problem.value == f"job {hosts.job} has ended (cancelled); it has written nothing"


def test_a_job_that_ends_while_its_hosts_are_asked_is_named(lab: SlurmLab) -> None:
    with Hosts(plan(lab)) as hosts:
        hosts.start()
        assert len(hosts.links) == 2
        for link in hosts.links:  # they cannot answer
            os.kill(link.pid, signal.SIGSTOP)
        subprocess.run(["scancel", hosts.job], check=True)
        assert hosts.facts() == ()
        assert [each.what for each in hosts.problems] == ["n1", "n2"]
        for each in hosts.problems:
            assert f"job {hosts.job} has ended" in each.value


def test_a_partition_that_is_unknown_is_refused_with_slurms_own_words(lab: SlurmLab) -> None:
    (finding,) = problems(list(check_hosts_of(plan(lab, options={"partition": "nosuch"}))))
    assert "sbatch refuses the job" in finding.value
    assert "invalid partition specified: nosuch" in finding.value
    assert "sinfo" in finding.mend


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ("slurm", "sbatch"),
        ("mpi", "mpiexec"),
        ("sge", "qsub"),
        ("pbs", "qsub"),
        ("lsf", "bsub"),
        ("htcondor", "condor_submit"),
    ],
)
def test_a_launcher_whose_program_is_missing_says_which(
    lab: SlurmLab, launcher: str, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Hosts(plan(lab, launcher)) as hosts, pytest.raises(LaunchError, match=program) as error:
        hosts.start()
    assert error.value.remedy


def test_a_folder_that_a_host_does_not_share_is_named(lab: SlurmLab) -> None:
    with Hosts(plan(lab, folder=str(lab.private))) as hosts:
        hosts.start()
        (problem,) = hosts.problems
    assert problem.what == "n2"
    assert f"the folder {lab.private}" in problem.value
    assert "it is not shared with this host" in problem.value
    assert "--folder" in problem.mend


def test_within_an_allocation_agents_are_a_step_of_it(lab: SlurmLab) -> None:
    code = (
        "import os\n"
        "from distsession.host_plan import HostPlan\n"
        "from distsession.cluster.hosts import Hosts\n"
        f"with Hosts(HostPlan(launcher='slurm', folder={str(lab.folder)!r})) as hosts:\n"
        "    hosts.start()\n"
        "    print(*[link.name for link in hosts.links], hosts.job == os.environ['SLURM_JOB_ID'])\n"
        "    print(*hosts.problems)\n"
    )
    done = subprocess.run(
        ["salloc", "--nodes=2", "--quiet", sys.executable, "-c", code], capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["n1", "n2", "True"], done.stdout + done.stderr
    until(lambda: lab.queue() == "", "the end of the allocation")


@pytest.mark.parametrize(
    "command",
    ["srun -N2 --ntasks-per-node=1 {agent}", "srun -N2 --ntasks-per-node=1 {agent} < {keys}"],
)
def test_a_command_of_the_users_own_starts_agents(lab: SlurmLab, command: str) -> None:
    with Hosts(plan(lab, "command", command=command)) as hosts:
        hosts.start()
        assert [link.name for link in hosts.links] == ["n1", "n2"]
        assert hosts.problems == []
    # The job is srun's own, which ends before Slurm has put it away.
    until(lambda: lab.queue() == "", "the end of the user's job")


def test_a_command_may_start_agents_in_the_background(lab: SlurmLab) -> None:
    start = "setsid -f env SLURMD_NODENAME={0} {{agent}}"
    command = f"{start.format('a')}; {start.format('b')}"
    with Hosts(plan(lab, "command", command=command)) as hosts:
        hosts.start()
        assert [link.name for link in hosts.links] == ["a", "b"]
        pids = [link.pid for link in hosts.links]
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of the agents")


def test_a_command_that_fails_is_named_with_what_it_wrote(lab: SlurmLab) -> None:
    command = "sh -c 'echo no hosts today; exit 3' {agent}"
    with Hosts(plan(lab, "command", command=command)) as hosts:
        hosts.start()
    (problem,) = hosts.problems
    assert problem.value == "sh ended with exit code 3; its last lines are below"
    assert problem.details == "no hosts today"
