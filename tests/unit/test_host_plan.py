"""What the user says of hosts, what is refused, and why an agent has not come."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distsession.cli.hosts import take_plan
from distsession.cluster.host_failures import explain, noise
from distsession.cluster.host_launchers import Failure
from distsession.cluster.host_processes import EachCommandLauncher, _command
from distsession.cluster.hosts_launcher import CARRIED
from distsession.cluster.slurm_jobs import JobState, read_time
from distsession.engine.host import host_name, place_among_hosts
from distsession.errors import OptionsError
from distsession.host_plan import HostPlan, SshTarget, ssh_target
from distsession.protocol.host_link import FAILS, STARTS


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("gpu1", SshTarget("gpu1")),
        ("me@gpu1", SshTarget("me@gpu1")),
        ("me@10.0.0.1:2222", SshTarget("me@10.0.0.1", 2222)),
        ("gpu-1.site.org:22", SshTarget("gpu-1.site.org", 22)),
    ],
)
def test_a_host_of_ssh_is_read(text: str, target: SshTarget) -> None:
    assert ssh_target(text) == target


@pytest.mark.parametrize(
    "text", ["", "a b", "-oProxyCommand=x", "gpu1:", "gpu1:x", "gpu1:0", "gpu1:65536", "me@", "@a"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="is no host"):
        ssh_target(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"launcher": "flux"}, "is none of ssh, slurm"),
        ({"launcher": "ssh"}, "needs hosts="),
        ({"launcher": "ssh", "hosts": ("a", "a")}, "named 2 times"),
        ({"launcher": "ssh", "hosts": ("a",), "nodes": 2}, "1 hosts are named"),
        ({"launcher": "slurm"}, "needs the number of hosts"),
        ({"launcher": "slurm", "nodes": 2, "hosts": ("a",)}, "chooses its own"),
        ({"launcher": "mpi"}, "needs the number of hosts"),
        ({"launcher": "command", "nodes": 2}, "need each other"),
        ({"launcher": "mpi", "nodes": 2, "command": "x {agent}"}, "need each other"),
        ({"launcher": "command", "nodes": 2, "command": "srun"}, "has no {agent}"),
        ({"launcher": "command", "nodes": 2, "command": "{agent} {x}"}, "has {x}"),
        ({"launcher": "command", "nodes": 2, "command": "{host} {agent}"}, "needs hosts="),
        ({"launcher": "command", "hosts": ("a", "a"), "command": "{agent}"}, "named 2 times"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(OptionsError) as error:
        HostPlan(**changes)
    assert says in str(error.value)


def test_a_command_is_run_for_each_host_that_is_named() -> None:
    command = "kubectl exec -i {host} -- {agent} < {keys}"
    plan = HostPlan(launcher="command", hosts=("a", "b c"), command=command, python="/py")
    assert plan.count == 2
    launcher = EachCommandLauncher(plan, "/folder")
    assert launcher.program == "kubectl"
    (*_, text), (*_, other) = (_command(launcher, host) for host in plan.hosts)
    assert re.fullmatch(r"kubectl exec -i a -- /py -c '.*' - a < /folder/keys", text)
    assert re.fullmatch(r"kubectl exec -i 'b c' -- /py -c '.*' - 'b c' < /folder/keys", other)


def test_one_host_takes_the_place_of_another() -> None:
    plan = HostPlan(launcher="ssh", hosts=("a", "b"))
    assert plan.with_another("c", "a").hosts == ("c", "b")
    with pytest.raises(OptionsError, match="named 2 times"):
        plan.with_another("b", "a")
    with pytest.raises(OptionsError, match="chooses the hosts itself"):
        HostPlan(launcher="mpi", nodes=2).with_another("c", "a")


def test_within_a_job_of_slurms_the_hosts_are_those_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert HostPlan(launcher="slurm").count == 3
    assert HostPlan(launcher="slurm", nodes=2).count == 2
    assert HostPlan(launcher="ssh", hosts=("a", "b")).count == 2


def test_the_doctors_flags_make_a_plan() -> None:
    given = {
        "launcher": "slurm",
        "nodes": 2,
        "launcher_options": {"partition": "gpu"},
        "option": ["--mem=8G", "exclusive=user"],
        "address": ["10.0.0.1"],
        "start_within": 5.0,
    }
    plan = take_plan(given)
    assert plan == HostPlan(
        launcher="slurm",
        nodes=2,
        options={"partition": "gpu", "mem": "8G", "exclusive": "user"},
        addresses=("10.0.0.1",),
        timeout=5.0,
    )
    assert given == {}
    assert take_plan({"launcher": "local", "ranks": 2}) is None
    ssh = take_plan({"launcher": "ssh", "hosts": ("a", "me@b:22")})
    assert ssh is not None
    assert ssh.hosts == ("a", "me@b:22")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hosts": ("a",)}, "--hosts is for several hosts"),
        ({"command": "x", "launcher": "local"}, "--command is for several hosts"),
        ({"launcher": "ssh", "hosts": ("a",), "backend": "gloo"}, "backend is for a session"),
        ({"launcher": "ssh", "hosts": ("a",), "option": ["x"]}, "takes NAME=VALUE"),
    ],
    ids=str,
)
def test_flags_that_do_not_fit_together_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        take_plan(given)


@pytest.mark.parametrize(
    ("output", "says", "mend"),
    [
        ("ssh: Could not resolve hostname gpu1: Name", "no host of this name", "~/.ssh/config"),
        ("ssh: connect to host gpu1 port 2: Connection refused", "refused at port 2222", "sshd"),
        ("ssh: connect to host gpu1 port 22: Connection timed out", "(Connection timed", "2222"),
        ("me@gpu1: Permission denied (publickey).", "no key of yours", "copy-id -p 2222 me@gpu1,"),
        ("Host key verification failed.", "the host's key", "once by hand"),
        ("bash: line 1: exec: /py: not found", "is not there: /py", "--python"),
        (f"{STARTS}\nModuleNotFoundError: No module named 'zmq'", "module zmq", "/py -m pip"),
        ("No module named 'distsession.engine'", "distsession is missing", "install distsession"),
        ("No module named 'yaml.loader'", "the module yaml", "/py -m pip install yaml"),
        (f"{STARTS}\nsomething", "ssh ended with exit code 1; its last lines are below", ""),
        ("", "ssh ended with exit code 1; it has written nothing", ""),
    ],
    ids=str,
)
def test_why_an_agent_has_not_come_is_read_from_what_was_written(
    output: str, says: str, mend: str
) -> None:
    plan = HostPlan(launcher="ssh", hosts=("me@gpu1:2222",), python="/py")
    problem = explain(Failure("me@gpu1:2222", "ssh ended with exit code 1", output), plan)
    assert problem.what == "me@gpu1:2222"
    assert says in problem.value
    assert mend in problem.mend
    assert problem.fatal


def test_the_host_that_lacks_something_names_itself() -> None:
    output = f"{STARTS}\n{FAILS}n2: the keys cannot be read from /x/keys: No such file or directory"
    plan = HostPlan(launcher="mpi", nodes=2)
    problem = explain(Failure("", "mpiexec ended with exit code 1", output), plan)
    assert problem.what == "n2"
    assert "the folder /x/keys is not there" in problem.value
    assert "--folder" in problem.mend


def test_what_a_login_shell_prints_is_told_from_what_an_agent_does() -> None:
    assert noise("gpu1", f"{STARTS}\nlater\n") == []
    assert noise("gpu1", "never begun\n") == []
    (problem,) = noise("gpu1", f"Welcome\n\nNews\n{STARTS}\n")
    assert "prints 2 lines: 'Welcome'" in problem.value
    assert not problem.fatal


def test_a_host_is_called_what_its_launcher_calls_it() -> None:
    assert host_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert host_name({})
    assert place_among_hosts({"SLURM_NODEID": "3"}) == 3
    assert place_among_hosts({"SGE_TASK_ID": "undefined"}) is None


@pytest.mark.parametrize(
    ("state", "text", "pending", "ended"),
    [
        (JobState("PENDING", "Priority"), "pending (Priority)", True, False),
        (JobState("RUNNING", "None"), "running", False, False),
        (JobState("NODE_FAIL"), "node fail", False, True),
        (JobState("", problem="no controller"), "unknown (no controller)", False, False),
    ],
    ids=str,
)
def test_a_jobs_state_is_told(state: JobState, text: str, pending: bool, ended: bool) -> None:
    assert (state.text, state.is_pending, state.has_ended) == (text, pending, ended)


def test_a_job_that_asks_for_more_than_there_is_may_never_start() -> None:
    assert JobState("PENDING", "PartitionConfig").may_not_start
    assert not JobState("PENDING", "Priority").may_not_start
    assert not JobState("RUNNING", "PartitionConfig").may_not_start


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("59", None), ("1:00", 60), ("2:03:04", 7384), ("1-00:00:01", 86401), ("UNLIMITED", None)],
)
def test_the_time_that_a_job_has_left_is_read(text: str, seconds: float | None) -> None:
    assert read_time(text) == seconds


def test_what_differs_between_hosts_is_not_carried_to_them() -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PATH", "HOME", "SSH_AUTH_SOCK"):
        assert not name.startswith(CARRIED)
    for name in ("NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "HF_HOME", "TORCH_LOGS", "OMP_NUM_THREADS"):
        assert name.startswith(CARRIED)
