"""Agents on other hosts by ssh, in network namespaces: what fits, what does not, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
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
from distsession.host_plan import HostPlan
from tests.integration.host_lab import HostLab, host_lab, need
from tests.until import until

NAMES = ("gpu1", "gpu2", "gpu3")
ROOT = Path(distsession.__file__).parents[1]


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(NAMES) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: HostLab) -> Iterator[None]:
    yield
    until(lambda: not lab.processes(), "the end of all agents")
    assert not list(lab.folder.glob("distsession-*"))


def plan(lab: HostLab, *hosts: str, **changes: Any) -> HostPlan:
    given = {"folder": str(lab.folder), "options": {"config": lab.ssh_config}, **changes}
    return HostPlan(launcher="ssh", hosts=hosts or NAMES, **given)


def found(plan: HostPlan) -> list[Finding]:
    return list(check_hosts_of(plan))


def problems(findings: list[Finding]) -> dict[str, str]:
    """What is wrong, with its remedy, for each host."""
    told: dict[str, str] = {}
    for finding in findings:
        if finding.mend:
            told[finding.what] = (
                f"{told.get(finding.what, '')}{finding.mark}: {finding.value} -> {finding.mend}\n"
            )
    return told


def doctor(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "distsession", "doctor", *arguments]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


def test_the_doctor_finds_nothing_wrong_with_three_hosts_that_fit(lab: HostLab) -> None:
    done = doctor(
        "--json", "--launcher", "ssh", "--hosts", ",".join(NAMES), "--folder", str(lab.folder),
        "--option", f"config={lab.ssh_config}", cwd=lab.folder,
    )  # fmt: skip
    told = {name: [] for name in NAMES}
    for finding in json.loads(done.stdout):
        if finding["what"] in NAMES:
            told[finding["what"]].append((finding["mark"], finding["value"]))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        marks, values = zip(*told[name], strict=True)
        assert set(marks) == {"ok"}, told[name]
        text = "\n".join(values)
        assert "torch 2" in text
        assert f"all others reach it at {lab[name].address} (eth0)" in text


def test_each_way_in_which_a_host_differs_is_named_with_its_remedy(
    lab: HostLab, tmp_path: Path
) -> None:
    odd = lab["gpu2"]
    hosts_file, package, shell = (lab.folder / name for name in ("odd", "odd.py", "odd.bashrc"))
    hosts_file.write_text("127.0.0.1 localhost gpu2\n")
    source = ROOT / "distsession" / "__init__.py"
    package.write_text(source.read_text().replace(f'"{distsession.__version__}"', '"0.0.7"'))
    shell.write_text("echo Welcome to gpu2\n")
    bashrc = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".bashrc"  # sshd asks nobody for $HOME
    with contextlib.ExitStack() as stack:
        if not bashrc.exists():
            bashrc.touch()
            stack.callback(bashrc.unlink)
        stack.enter_context(odd.mounted(hosts_file, "/etc/hosts"))
        stack.enter_context(odd.mounted(package, source))
        stack.enter_context(odd.mounted(shell, bashrc))
        told = problems(found(plan(lab, "gpu1", "gpu2", folder=str(tmp_path))))
    text = told["gpu2"]
    assert "its own name, gpu2, resolves to 127.0.0.1 there" in text
    assert "GLOO_SOCKET_IFNAME=eth0" in text
    assert f"distsession 0.0.7, and {distsession.__version__} here" in text
    assert "-m pip install 'distsession==" in text
    assert "its login shell prints 1 line: 'Welcome to gpu2'" in text
    assert "[[ $- == *i* ]] || return" in text
    assert "the session's folder is not shared with this host" in told["gpu1"]
    assert "127.0.0.1" not in told["gpu1"]


def test_hosts_that_a_firewall_keeps_apart_are_named(lab: HostLab) -> None:
    with lab["gpu2"].firewall("INPUT", "-s", lab["gpu1"].address, "-p", "tcp", "-j", "DROP"):
        told = problems(found(plan(lab, "gpu1", "gpu2")))
    assert "gpu1 reaches no address of gpu2" in told["gpu1 -> gpu2"]
    assert "open TCP ports between the hosts" in told["gpu1 -> gpu2"]
    # What gpu2 asks is answered by packets of gpu1's, which the rule drops as well.
    assert set(told) <= {"gpu1 -> gpu2", "gpu2 -> gpu1"}


def test_a_host_that_may_not_dial_is_gone_to(lab: HostLab) -> None:
    with lab["gpu1"].firewall("OUTPUT", "-p", "tcp", "--syn", "-j", "REJECT"):
        with Hosts(plan(lab, "gpu1", "gpu2")) as hosts:
            hosts.start()
            ways = {link.name: link.address for link in hosts.links}
        assert not hosts.problems
    assert ways == {"gpu1": "", "gpu2": lab.address}


def test_a_host_that_neither_dials_nor_can_be_dialled_is_named(lab: HostLab) -> None:
    closed = lab["gpu1"]
    with (
        closed.firewall("OUTPUT", "-p", "tcp", "--syn", "-j", "REJECT"),
        closed.firewall("INPUT", "-p", "tcp", "--dport", "1024:", "--syn", "-j", "REJECT"),
        Hosts(plan(lab, "gpu1", timeout=3.0)) as hosts,
    ):
        hosts.start()
        assert hosts.links == ()
        (problem,) = hosts.problems
    assert problem.what == "gpu1"
    assert "has not come within 3 s" in problem.value
    assert lab.address in problem.mend
    assert "--address" in problem.mend


@pytest.mark.parametrize(
    ("host", "changes", "says", "mend"),
    [
        ("nosuch.invalid", {}, "no host of this name is known", "~/.ssh/config"),
        ("gpu1:2222", {}, "the connection is refused at port 2222", "start sshd there"),
        ("gpu1", {"options": {"IdentityFile": "stranger"}}, "no key of yours", "ssh-copy-id gpu1"),
        ("gpu1", {"python": "/no/python"}, "/no/python", "--python"),
        ("gpu1", {"options": {"config": "/no/config"}}, "ssh does not read its", "below"),
    ],
    ids=["unknown", "refused", "key", "python", "config"],
)
def test_why_ssh_starts_nothing_is_said(
    lab: HostLab, host: str, changes: dict[str, Any], says: str, mend: str
) -> None:
    options = changes.get("options", {})
    if "IdentityFile" in options:
        config = lab.folder / "stranger_config"
        text = Path(lab.ssh_config).read_text().replace("/identity", "/stranger")
        config.write_text(text)
        changes = {"options": {"config": str(config)}}
    (finding,) = [each for each in found(plan(lab, host, **changes)) if each.mend]
    assert finding.what == host
    assert says in finding.value
    assert mend in finding.mend
    assert finding.fatal


def test_the_keys_are_in_no_command_line_environment_or_file_of_a_host(lab: HostLab) -> None:
    with Hosts(plan(lab, "gpu1")) as hosts:
        hosts.start()
        secret = hosts._links.keys.secret
        assert len(secret) == 40
        pid = hosts.links[0].pid
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        for pid in lab.processes():
            assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        folder = next(lab.folder.glob("distsession-*"))
        assert folder.stat().st_mode & 0o77 == 0
        assert not (folder / "keys").exists()


def test_agents_end_when_the_kernel_is_killed(lab: HostLab) -> None:
    code = (
        "import os, signal\n"
        "from distsession.host_plan import HostPlan\n"
        "from distsession.cluster.hosts import Hosts\n"
        f"options = {{'config': {lab.ssh_config!r}}}\n"
        f"plan = HostPlan(launcher='ssh', hosts=('gpu1', 'gpu2'), folder={str(lab.folder)!r}, "
        "options=options)\n"
        "hosts = Hosts(plan)\n"
        "hosts.start()\n"
        "print(len(hosts.links), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["2"]
    until(lambda: not lab.processes(), "the end of all agents")
    (left,) = lab.folder.glob("distsession-*")
    with Hosts(plan(lab, "gpu1")):  # whoever comes next removes what it has left
        assert not left.exists()


def test_what_is_given_up_while_it_starts_leaves_nothing(lab: HostLab) -> None:
    command = [
        sys.executable, "-m", "distsession", "doctor", "--launcher", "ssh", "--hosts", "gpu1,gpu2",
        "--folder", str(lab.folder), "--option", f"config={lab.ssh_config}",
    ]  # fmt: skip
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        until(lambda: lab.processes(), "an agent")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.fixture
def mpi_ssh(lab: HostLab) -> Path:
    """What an MPI calls to come to the hosts."""
    path = lab.folder / "mpi_ssh"
    path.write_text(f'#!/bin/sh\nexec ssh -F {lab.ssh_config} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def mpi_options(lab: HostLab, mpi_ssh: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of Open MPI."""
    need("mpiexec.openmpi")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    network = f"{lab.subnet}0/24"
    return f"--mca plm_rsh_agent {mpi_ssh} --mca oob_tcp_if_include {network} --bind-to none"


def test_mpi_starts_an_agent_on_each_host(lab: HostLab, mpi_options: str) -> None:
    with Hosts(mpi_plan(lab, f"{mpi_options} --host gpu1,gpu2 --map-by ppr:1:node")) as hosts:
        hosts.start()
        assert [link.name for link in hosts.links] == ["gpu1", "gpu2"], hosts.problems
        assert hosts.problems == []


def test_two_agents_of_mpi_on_one_host_are_named(lab: HostLab, mpi_options: str) -> None:
    text = problems(found(mpi_plan(lab, f"{mpi_options} --host gpu1:2")))["gpu1"]
    assert "2 agents are on a host of this name" in text
    assert "--map-by ppr:1:node" in text


def test_mpich_starts_an_agent_on_each_host(lab: HostLab, mpi_ssh: Path) -> None:
    need("mpiexec.mpich")
    hosts_of = ",".join(lab[name].address for name in ("gpu1", "gpu2"))
    where = f"-localhost {lab.address} -hosts {hosts_of} -ppn 1"
    arguments = f"-launcher ssh -launcher-exec {mpi_ssh} {where}"
    with Hosts(mpi_plan(lab, arguments, "mpiexec.mpich")) as hosts:
        hosts.start()
        assert [link.name for link in hosts.links] == ["gpu1", "gpu2"], hosts.problems
        assert hosts.problems == []


def mpi_plan(lab: HostLab, arguments: str, command: str = "mpiexec.openmpi") -> HostPlan:
    options = {"command": command, "args": arguments}
    return HostPlan(launcher="mpi", nodes=2, options=options, folder=str(lab.folder))
