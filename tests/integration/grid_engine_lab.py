"""Grid Engine on the hosts of a lab: a master, and an execution host on each of two of them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.host_lab import ENDS_WITH_TESTS, HostLab, LabHost, host_lab, need
from tests.until import until

__all__ = ["GridEngineLab", "grid_engine_lab"]

NAMES = ("gpu1", "gpu2")
PROGRAMS = Path("/usr/lib/gridengine")
"""Debian's. What is on the PATH are scripts that call these."""
SHARED = Path("/usr/share/gridengine")

BOOTSTRAP = """Version: 6.2
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {root}/default/common;{root}/spool
binary_path /usr/sbin
qmaster_spool_dir {root}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""

ON_HOST = """#!/bin/sh
exec nsenter -t {pid} -m -u -n --wd="$PWD" -- env {environment} {program} "$@"
"""


@dataclass(frozen=True)
class GridEngineLab:
    """It.

    Attributes:
        hosts: On which it runs. Jobs are submitted on the first one.
        root: Its folder, which all hosts see.
    """

    hosts: HostLab
    root: Path

    @property
    def path(self) -> str:
        """Where its commands are. They run on the host that submits."""
        return f"{self.root}/commands:{os.environ['PATH']}"

    @property
    def environment(self) -> list[str]:
        return [
            "SGE_ND=1",  # daemons stay in the foreground
            f"SGE_ROOT={self.root}", "SGE_CELL=default",
            "SGE_QMASTER_PORT=6444", "SGE_EXECD_PORT=6445",
        ]  # fmt: skip

    def run(self, program: str, *arguments: str | Path) -> str:
        """Run one of its programs on the host that submits."""
        command = ["env", *self.environment, PROGRAMS / program, *arguments]
        return self.hosts[NAMES[0]].run(*command)

    def queue(self) -> str:
        """The jobs that have not ended."""
        return self.run("qstat").strip()


@contextlib.contextmanager
def grid_engine_lab() -> Iterator[GridEngineLab]:
    """Start it; in the end nothing is left of it."""
    need("qsub", "sge_qmaster", "sge_execd")
    with host_lab(NAMES) as hosts:
        lab = GridEngineLab(hosts, hosts.folder / "sge")
        with contextlib.ExitStack() as stack:
            _configure(lab)
            for program in ("sge_qmaster", "sge_execd"):
                for host in hosts.hosts if program == "sge_execd" else hosts.hosts[:1]:
                    stack.enter_context(_daemon(lab, host, program))
                until(lambda: _answers(lab), "Grid Engine's master")
                if program == "sge_qmaster":
                    _admit_hosts(lab)
            _add_queue(lab)
            until(lambda: lab.run("qhost").count("lx-amd64") == len(NAMES), "its hosts")
            yield lab


def _configure(lab: GridEngineLab) -> None:
    common = lab.root / "default" / "common"
    common.mkdir(parents=True)
    for name in ("qmaster", "spool", "execd", "commands"):
        (lab.root / name).mkdir()
    for name in ("bin", "lib", "utilbin"):
        (lab.root / name).symlink_to(Path("/var/lib/gridengine", name))
    (lab.root / "util").symlink_to(SHARED / "util")
    bootstrap = BOOTSTRAP.format(root=lab.root)
    (common / "bootstrap").write_text(bootstrap)
    (common / "act_qmaster").write_text(f"{NAMES[0]}\n")
    lab.run("spoolinit", "classic", "libspoolc", f"{common};{lab.root}/spool", "init")
    configuration = lab.root / "configuration"
    text = (SHARED / "default-configuration").read_text()
    changes = {"execd_spool_dir": f"{lab.root}/execd", "min_uid": "0", "min_gid": "0"}
    configuration.write_text(_changed(text, changes))
    resources = SHARED / "util" / "resources"
    lab.run("spooldefaults", "configuration", configuration)
    lab.run("spooldefaults", "complexes", resources / "centry")
    lab.run("spooldefaults", "usersets", resources / "usersets")
    lab.run("spooldefaults", "managers", "root")
    for name in ("qsub", "qstat", "qdel"):
        command = lab.root / "commands" / name
        environment = " ".join(lab.environment)
        pid = lab.hosts[NAMES[0]].pid
        command.write_text(
            ON_HOST.format(pid=pid, environment=environment, program=PROGRAMS / name)
        )
        command.chmod(0o755)


def _changed(text: str, changes: dict[str, str]) -> str:
    for name, value in changes.items():
        text, count = re.subn(rf"(?m)^{name}\s.*$", f"{name} {value}", text)
        assert count == 1, name
    return text


@contextlib.contextmanager
def _daemon(lab: GridEngineLab, host: LabHost, program: str) -> Iterator[None]:
    command = [
        *ENDS_WITH_TESTS, "nsenter", "-t", str(host.pid), "-m", "-u", "-n", "--",
        "env", *lab.environment, str(PROGRAMS / program),
    ]  # fmt: skip
    with open(lab.root / f"{program}-{host.name}.log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _answers(lab: GridEngineLab) -> bool:
    with contextlib.suppress(AssertionError):
        return "gpu1" in lab.run("qconf", "-sh")
    return False


def _admit_hosts(lab: GridEngineLab) -> None:
    lab.run("qconf", "-ah", ",".join(NAMES[1:]))
    lab.run("qconf", "-as", NAMES[0])
    scheduler = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
    path = lab.root / "scheduler"
    path.write_text(_changed(lab.run("qconf", "-ssconf"), scheduler))
    lab.run("qconf", "-Msconf", path)


def _add_queue(lab: GridEngineLab) -> None:
    """One of all hosts, each of which takes one task at a time."""
    group = lab.root / "hosts"
    group.write_text(f"group_name @allhosts\nhostlist {' '.join(NAMES)}\n")
    lab.run("qconf", "-Ahgrp", group)
    changes = {
        "qname": "all.q", "hostlist": "@allhosts", "slots": "1", "pe_list": "NONE",
        "load_thresholds": "NONE",
    }  # fmt: skip
    queue = lab.root / "all.q"
    queue.write_text(_changed(lab.run("qconf", "-sq"), changes))
    lab.run("qconf", "-Aq", queue)
