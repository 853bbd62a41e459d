"""Sessions on hosts by ssh whose names, keys, torch or disks are not as they should be."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distsession import LaunchError
from distsession.cli.hosts import check_hosts_of
from distsession.host_plan import HostPlan
from tests.integration.conftest import Recorder
from tests.integration.host_lab import (
    ENDS_WITH_TESTS,
    PATH,
    HostLab,
    LabHost,
    host_lab,
    run,
)
from tests.integration.host_sessions import (
    nothing_left,
    options_of,
    processes,
    python,
    reduced,
    start,
)
from tests.until import until

pytestmark = pytest.mark.timeout(120)

NEVER_S = 10_000


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(("gpu1", "gpu2")) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: HostLab) -> Iterator[None]:
    yield
    nothing_left(lab)
    assert not list(lab.folder.glob("distsession-*"))


def refusal(lab: HostLab, *hosts: str, **options: Any) -> list[str]:
    """The lines of a start that fails."""
    with pytest.raises(LaunchError) as caught:
        start(lab, *hosts, ranks_per_host=[1] * len(hosts), **options)
    return str(caught.value).splitlines()


# --- names ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def name_server(lab: HostLab, seconds: float, options: str = "") -> Iterator[Path]:
    """One that answers after so long with gpu1's address; gives a resolv.conf that names it."""
    program = Path(__file__).with_name("slow_dns.py")
    server = subprocess.Popen(
        [*ENDS_WITH_TESTS, sys.executable, program, lab.address, lab["gpu1"].address, str(seconds)],
        stdout=subprocess.PIPE, env={**os.environ, "PATH": PATH},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        file = lab.folder / "resolv.conf"
        file.write_text(f"nameserver {lab.address}\n{options}\n")
        yield file
    finally:
        server.kill()
        server.communicate()


KERNEL = """
from distsession import LaunchError, Session
try:
    with Session(**{options!r}) as session:
        print("ranks", *session.evaluate("rank").values())
except LaunchError as error:
    print(error)
"""


def said_with(resolv: Path, lab: HostLab, *hosts: str, **options: Any) -> list[str]:
    """What a kernel says whose host asks that name server."""
    code = KERNEL.format(options=options_of(lab, *hosts, **options))
    mounts = f'mount --bind {resolv} /etc/resolv.conf && exec "$@"'
    before = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mounts, "sh")
    said, _ = python(code, *before).communicate(timeout=100)
    return said.splitlines()


def test_a_name_that_is_found_late_is_waited_for(lab: HostLab) -> None:
    with name_server(lab, 12.0, "options timeout:15") as resolv:
        said = said_with(resolv, lab, "slow.example", ranks_per_host=[2])
    assert said == ["ranks 0 1"]


def test_a_name_server_that_never_answers_is_named(lab: HostLab) -> None:
    with name_server(lab, NEVER_S, "options timeout:2 attempts:2") as resolv:
        said = said_with(resolv, lab, "slow.example", "gpu2")
    assert said[0].startswith(
        "slow.example: its name is not found, for no name server has answered. Try: try again"
    )
    assert "Host slow.example, HostName ..." in said[0]


def test_a_look_up_that_takes_longer_than_the_start_may_is_named(lab: HostLab) -> None:
    with name_server(lab, NEVER_S, "options timeout:30") as resolv:
        said = said_with(resolv, lab, "slow.example", "gpu2", start_timeout=8)
    assert said == [
        "slow.example: ssh has not started anything there within 8 s. Try: see how long "
        "`ssh slow.example true` takes: a name server that does not answer holds it up, or a login "
        "shell that waits for something."
    ]


@pytest.fixture
def nameless(lab: HostLab) -> Iterator[LabHost]:
    """A host that does not know its own name, and asks a name server that never answers."""
    hosts = lab.folder / "nameless"
    hosts.write_text("127.0.0.1 localhost\n")
    with (
        name_server(lab, NEVER_S) as resolv,
        lab["gpu2"].mounted(resolv, "/etc/resolv.conf"),
        lab["gpu2"].mounted(hosts, "/etc/hosts"),
    ):
        yield lab["gpu2"]


@pytest.mark.parametrize("hosts", [("gpu1", "gpu2"), ("gpu2",)], ids=["two hosts", "one host"])
def test_a_host_whose_own_name_nobody_answers_for_is_no_silent_one(
    lab: HostLab, nameless: LabHost, hosts: tuple[str, ...]
) -> None:
    with start(lab, *hosts) as session:
        assert reduced(session) == {float(2 * len(hosts))}
        session.restart(hosts=[nameless.name])
        assert reduced(session) == {float(2 * len(hosts))}


def test_the_doctor_names_a_host_whose_own_name_nobody_answers_for(
    lab: HostLab, nameless: LabHost
) -> None:
    plan = HostPlan(
        launcher="ssh", hosts=("gpu1", nameless.name), folder=str(lab.folder),
        options={"config": lab.ssh_config},
    )  # fmt: skip
    (found,) = [each for each in check_hosts_of(plan) if each.mend]
    assert found.what == nameless.name
    assert "its own name, gpu2, is not found there, for no name server answers" in found.value
    assert not found.fatal


# --- what ssh asks --------------------------------------------------------------------------------


def configured(lab: HostLab, name: str, change: tuple[str, str], more: str = "") -> dict[str, Any]:
    """Options for another configuration of ssh."""
    text = Path(lab.ssh_config).read_text()
    assert change[0] in text
    path = lab.folder / f"ssh_config_{name}"
    path.write_text(f"{text.replace(*change)}\n{more}\n")
    return {"launcher_options": {"config": str(path)}}


@contextlib.contextmanager
def asking_sshd(lab: HostLab, host: LabHost) -> Iterator[int]:
    """An sshd on a host that asks for a password; gives its port."""
    config = lab.folder / "sshd_config_asking"
    config.write_text(
        f"Port 2222\nListenAddress {host.address}\nHostKey {lab.folder}/host_key\nPidFile none\n"
        f"PermitRootLogin yes\nPasswordAuthentication yes\nKbdInteractiveAuthentication no\n"
        f"AuthorizedKeysFile {lab.folder}/authorized_keys\nStrictModes no\n"
    )
    inside = ["nsenter", "-t", str(host.pid), "-m", "-u", "-n", "--"]
    sshd = subprocess.Popen(
        [*ENDS_WITH_TESTS, *inside, "sh", "-c", f"exec $(command -v sshd) -D -e -f {config}"],
        env={**os.environ, "PATH": PATH}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert sshd.stderr is not None
        assert "Server listening" in sshd.stderr.readline()
        yield 2222
    finally:
        sshd.kill()
        sshd.communicate()


def test_a_host_that_asks_for_a_password_is_named_and_nobody_is_asked(lab: HostLab) -> None:
    options = configured(lab, "asking", ("/identity", "/stranger"), "BatchMode no")
    with asking_sshd(lab, lab["gpu1"]) as port:
        code = KERNEL.format(options=options_of(lab, f"gpu1:{port}", **options))
        # In a terminal, in which ssh would ask.
        ours, theirs = os.openpty()
        process = python(
            code, "setsid", "--ctty", "--wait", stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:
            while more := terminal.read(4096):
                said += more
        assert process.wait(60) == 0
    text = said.decode()
    assert "password:" not in text
    assert (
        "gpu1:2222: ssh is refused: no key of yours is accepted, and a password cannot be asked "
        "for. Try: ssh-copy-id -p 2222 gpu1, or name the key"
    ) in text
    assert "Permission denied (publickey,password)" in text


def test_a_key_with_a_passphrase_is_not_asked_for(lab: HostLab) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", lab.folder / "locked")
    with open(lab.folder / "authorized_keys", "a") as keys:
        keys.write((lab.folder / "locked.pub").read_text())
    line, *_ = refusal(lab, "gpu1", **configured(lab, "locked", ("/identity", "/locked")))
    assert "one that has a passphrase has to be in an agent (ssh-add)" in line


def known(lab: HostLab, name: str, before: str, key: Path) -> dict[str, Any]:
    """Options for a list of known hosts with one line."""
    kind, text = key.read_text().split()[:2]
    (lab.folder / f"known_{name}").write_text(f"{before} {kind} {text}\n")
    return configured(lab, name, ("/known_hosts", f"/known_{name}"))


def test_a_host_with_another_key_than_before_is_named_with_what_to_do(lab: HostLab) -> None:
    address = lab["gpu1"].address
    options = known(lab, "changed", address, lab.folder / "stranger.pub")
    line, *_ = refusal(lab, "gpu1", "gpu2", **options)
    assert line.startswith("gpu1: its host key is not the one that is known: ")
    forget = f"`ssh-keygen -f {lab.folder}/known_changed -R '{address}'`"
    assert forget in line
    assert "run `ssh gpu1` once by hand, and compare the key." in line
    run(*forget.strip("`").replace("'", "").split())
    with start(lab, "gpu1", **options) as session:
        assert reduced(session) == {2.0}


def test_a_host_with_a_key_that_was_revoked_is_named(lab: HostLab) -> None:
    line, *_ = refusal(
        lab, "gpu1", **known(lab, "revoked", "@revoked *", lab.folder / "host_key.pub")
    )
    assert line == (
        "gpu1: its host key is marked as revoked here, as one is that was stolen. Try: ask who "
        "runs the host for its new key."
    )


def test_a_host_whose_key_is_not_known_is_named(lab: HostLab) -> None:
    options = configured(lab, "strict", ("accept-new", "yes"), "")
    config = Path(options["launcher_options"]["config"])
    config.write_text(config.read_text().replace("/known_hosts", "/known_none"))
    line, *_ = refusal(lab, "gpu1", **options)
    assert "or is not known yet. Try: run `ssh gpu1` once by hand, and compare the key." in line


# --- torch ----------------------------------------------------------------------------------------


def changed(lab: HostLab, path: Path, old: str, new: str) -> Path:
    """A file with another text."""
    text = path.read_text()
    assert old in text
    copy = lab.folder / f"changed-{path.name}"
    copy.write_text(text.replace(old, new, 1))
    return copy


def test_a_host_with_another_torch_is_named_before_anything_runs(lab: HostLab) -> None:
    here = importlib.metadata.version("torch")
    metadata = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    path = next(metadata.glob("torch-*.dist-info")) / "METADATA"
    copy = changed(lab, path, f"\nVersion: {here}\n", "\nVersion: 2.8.9\n")
    with lab["gpu2"].mounted(copy, path):
        line, *more = refusal(lab, "gpu1", "gpu2")
    assert line.startswith(f"gpu2: torch 2.8.9, and {here} here. Try: install the same there: ")
    assert f"-m pip install 'torch=={here}'" in line
    assert more == []


def test_a_host_with_another_build_of_torch_is_named_before_ranks_start(lab: HostLab) -> None:
    """Whatever is installed there says to be the same."""
    path = Path(torch.__file__).with_name("version.py")
    copy = changed(lab, path, f"'{torch.__version__}'", "'2.8.9+odd'")
    says = (
        f"torch's build: {torch.__version__} on gpu1; 2.8.9+odd on gpu2. Try: install the same "
        "build of torch on all hosts."
    )
    with lab["gpu2"].mounted(copy, path):
        assert refusal(lab, "gpu1", "gpu2") == [says]
    with start(lab, "gpu1", "gpu2") as session:
        session.execute("kept = rank")
        with lab["gpu2"].mounted(copy, path):
            processes(session, "gpu2")["host"].kill()
            until(lambda: sorted(session.launcher.dead_ranks()) == [2, 3], "gpu2's end")
            with pytest.raises(LaunchError, match="torch's build: "):
                session.restart(hosts=["gpu2"])
        assert dict(session.on("gpu1").evaluate("kept")) == {0: 0, 1: 1}
        session.restart(hosts=["gpu2"], restore="kept")
        assert reduced(session) == {4.0}


# --- disks ----------------------------------------------------------------------------------------

WARNING = "there is no space left on the disk of /tmp/distsession-"


@pytest.fixture
def small(lab: HostLab) -> Iterator[LabHost]:
    """A host with 8 MB for its /tmp."""
    host = lab["gpu2"]
    host.run("mount", "-o", "remount,size=8m", "/tmp")
    yield host
    host.run("rm", "-f", "/tmp/full")
    host.run("mount", "-o", "remount,size=1g", "/tmp")


def fill(host: LabHost, left_kb: int = 0) -> None:
    """Leave so much room on its disk."""
    write = "dd if=/dev/zero of=/tmp/full bs=4k 2>/dev/null"
    host.run("sh", "-c", f"{write}; truncate -s -{left_kb}k /tmp/full")


@pytest.mark.parametrize("left_kb", [0, 4, 16, 64, 1024])
def test_a_session_starts_on_a_host_with_little_room(
    lab: HostLab, small: LabHost, left_kb: int
) -> None:
    """What has no room at all in ``/tmp`` has its folder elsewhere."""
    fill(small, left_kb)
    output = Recorder()
    with start(lab, "gpu1", "gpu2", output=output) as session:
        session.execute("for i in range(12000): print('x' * 100)")
        for rank in session.ranks:
            assert output.text(rank).count("x" * 100 + "\n") == 12_000
        if small.left():
            said = "".join(output.text(rank, "stderr") for rank in (2, 3))
            assert WARNING in said
            assert "on gpu2, where the logs of the ranks are" in said
        assert "" == output.text(0, "stderr") == output.text(1, "stderr")
        assert reduced(session) == {4.0}


def test_a_disk_that_fills_is_named_with_its_host_and_all_is_mended_there(
    lab: HostLab, small: LabHost
) -> None:
    output = Recorder()
    with start(lab, "gpu1", "gpu2", output=output) as session:
        session.execute("print('at first')\nkept = rank")
        fill(small)
        session.execute("for i in range(12000): print('x' * 100)")
        for rank in session.ranks:
            assert output.text(rank).count("x" * 100 + "\n") == 12_000
            is_there = rank in (2, 3)
            assert output.text(rank, "stderr").count(WARNING) == is_there
            assert output.text(rank, "stderr").count("on gpu2, where the logs") == is_there
        assert dict(session.evaluate("kept")) == {0: 0, 1: 1, 2: 2, 3: 3}
        for which in ("rank", "agent", "host"):
            if which == "rank":
                session.restart([3], restore="kept")
            else:
                processes(session, "gpu2")[which].kill()
                until(lambda: sorted(session.launcher.dead_ranks()) == [2, 3], "gpu2's end")
                session.restart(hosts=["gpu2"], restore="kept")
            assert reduced(session) == {4.0}
            assert session.pull("kept")[0] == 0
