"""Hosts on one machine: network namespaces, each with an address, a name, a /tmp and an sshd."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import distsession
from tests.until import until

__all__ = [
    "ENDS_WITH_TESTS",
    "HostLab",
    "LabHost",
    "host_lab",
    "lacks",
    "make_folder",
    "need",
    "remove_stale",
]

ROOT = Path(distsession.__file__).parents[1]
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "unshare", "nsenter", "setpriv", "iptables")
DELAY_LINK = Path(__file__).with_name("delay_link.py")
ENDS_WITH_TESTS = ("setpriv", "--pdeathsig", "KILL", "--")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
BRIDGE_ADDRESS = "02:00:00:00:00:fe"

SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxStartups 50
"""

SSH = """
{hosts}
Host *
  User root
  IdentityFile {folder}/identity
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""


def lacks(*programs: str) -> str:
    """What to say where these are missing; nothing where all is there."""
    missing = [name for name in programs or PROGRAMS if shutil.which(name, path=PATH) is None]
    if os.geteuid() != 0:
        missing.append("the rights of root")
    return f"this needs {', '.join(missing)}" if missing else ""


def need(*programs: str) -> None:
    """Skip a test where these are missing, unless all has to be there."""
    if text := lacks(*programs):
        if os.environ.get("DISTSESSION_LABS") == "required":
            pytest.fail(text)
        pytest.skip(text)


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [*map(str, command)], env={**os.environ, "PATH": PATH}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class LabHost:
    """One of them.

    Attributes:
        plug: Its end of the network, outside of it.
        pid: Of its sshd, whose namespaces it is.
    """

    name: str
    address: str
    namespace: str
    plug: str
    pid: int

    def run(self, *command: str | Path) -> str:
        """Run a program there."""
        return run("nsenter", "-t", str(self.pid), "-m", "-u", "-n", "--", *command)

    def processes(self) -> list[int]:
        """All that run there, but for its sshd."""
        found = run("ip", "netns", "pids", self.namespace).split()
        return [int(pid) for pid in found if int(pid) != self.pid and not _is_sshd(int(pid))]

    def left(self) -> list[str]:
        """What sessions have left there: folders, and memory that processes share."""
        # Not deeper: what is tried here may be installed below the host's own /tmp.
        where = ("/tmp", "/dev/shm", "-mindepth", "1", "-maxdepth", "1")
        return self.run("find", *where, "-name", "distsession-*").split()

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Nothing comes there, and nothing from there: no connection is closed by it."""
        run("ip", "link", "set", self.plug, "down")
        try:
            yield
        finally:
            run("ip", "link", "set", self.plug, "up")

    @contextlib.contextmanager
    def limited(self, mbit: int) -> Iterator[None]:
        """What goes to it passes a link of so many megabits a second."""
        link = ("dev", self.plug, "root")
        run("tc", "qdisc", "add", *link, "tbf", "rate", f"{mbit}mbit", "burst", "1mb",
            "latency", "100ms")  # fmt: skip
        try:
            yield
        finally:
            run("tc", "qdisc", "del", *link)

    def crash(self) -> None:
        """All that runs there ends at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def mounted(self, source: Path, target: str | Path) -> Iterator[None]:
        """A file that is another one there."""
        self.run("mount", "--bind", source, target)
        try:
            yield
        finally:
            self.run("umount", target)

    @contextlib.contextmanager
    def firewall(self, *rule: str) -> Iterator[None]:
        """A rule of its firewall."""
        self.run("iptables", "-w", "-A", *rule)
        try:
            yield
        finally:
            self.run("iptables", "-w", "-D", *rule)


def _is_sshd(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("sshd")
    return True


@dataclass
class HostLab:
    """All of them.

    Attributes:
        folder: All hosts see it.
        address: Of this process, as the hosts see it.
    """

    folder: Path
    prefix: str
    subnet: str
    hosts: list[LabHost] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.subnet}fe" if self.is_ipv6 else f"{self.subnet}254"

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.subnet

    @property
    def mask(self) -> list[str]:
        """How long the part of an address is that all have; and no wait for others that have it."""
        return ["64", "nodad"] if self.is_ipv6 else ["24"]

    @property
    def ssh_config(self) -> str:
        return str(self.folder / "ssh_config")

    def __getitem__(self, name: str) -> LabHost:
        return next(host for host in self.hosts if host.name == name)

    @contextlib.contextmanager
    def delayed(self, name: str, seconds: float, loss: float = 0.0) -> Iterator[None]:
        """What goes to a host and comes from it takes a while; of all packets some are lost."""
        plug, bridge = self[name].plug, f"{self.prefix}b"
        near, far = f"{plug}n", f"{plug}f"
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        for interface in (near, far):
            run("ip", "link", "set", interface, "up")
        for host in self.hosts:
            host.run(sys.executable, DELAY_LINK, "eth0")
        run(sys.executable, DELAY_LINK, bridge)
        run("ip", "link", "set", plug, "nomaster")
        wire = subprocess.Popen(
            [*ENDS_WITH_TESTS, sys.executable, DELAY_LINK, plug, near, str(seconds), str(loss)],
            stdout=subprocess.PIPE, env={**os.environ, "PATH": PATH}, start_new_session=True,
        )  # fmt: skip
        try:
            assert wire.stdout is not None
            assert wire.stdout.readline() == b"ready\n"
            run("ip", "link", "set", far, "master", bridge)
            yield
        finally:
            wire.kill()
            wire.communicate()
            run("ip", "link", "del", near)
            run("ip", "link", "set", plug, "master", bridge)

    def processes(self) -> list[int]:
        return [pid for host in self.hosts for pid in host.processes()]


@contextlib.contextmanager
def host_lab(names: Sequence[str], *, ipv6: bool = False) -> Iterator[HostLab]:
    """Start hosts of these names, with addresses of IPv4 or IPv6 only; nothing is left of them."""
    need(*PROGRAMS)
    remove_stale()
    number = random.randrange(1 << 14)
    folder = make_folder()
    subnet = f"fd00:{number:x}::" if ipv6 else f"10.{64 + number // 256}.{number % 256}."
    lab = HostLab(folder, f"dl{os.getpid()}", subnet)
    sshds: list[subprocess.Popen[bytes]] = []
    try:
        _write_configuration(lab, names)
        # Otherwise the bridge takes the lowest address of its ports, and another one when a port
        # comes or goes; then hosts may send to the earlier one for some seconds.
        run("ip", "link", "add", f"{lab.prefix}b", "address", BRIDGE_ADDRESS, "type", "bridge")
        length, *more = lab.mask
        run("ip", "addr", "add", f"{lab.address}/{length}", "dev", f"{lab.prefix}b", *more)
        run("ip", "link", "set", f"{lab.prefix}b", "up")
        for place, name in enumerate(names, 1):
            sshds.append(_start_host(lab, place, name))
        for host in lab.hosts:
            until(lambda host=host: _answers(host.address), f"sshd of {host.name}")
        yield lab
    finally:
        _remove_network(lab.prefix)
        for sshd in sshds:
            sshd.wait()
        shutil.rmtree(folder)


def make_folder() -> Path:
    """One of this process; not in ``/tmp``, which each host has for itself."""
    return Path(tempfile.mkdtemp(prefix=f"distsession-lab-{os.getpid()}-", dir="/var/tmp"))


def remove_stale() -> None:
    """Remove what test runs have left that were killed: their processes end with them."""
    for folder in Path("/var/tmp").glob("distsession-lab-*"):
        if not _lives(folder.name.split("-")[2]):
            shutil.rmtree(folder)
    prefixes = set(re.findall(r"\bdl(\d+)[nbv]", run("ip", "netns") + run("ip", "-o", "link")))
    for pid in prefixes:
        if not _lives(pid):
            _remove_network(f"dl{pid}")


def _lives(pid: str) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _remove_network(prefix: str) -> None:
    for namespace in re.findall(rf"^({prefix}n\d+)", run("ip", "netns"), re.MULTILINE):
        for pid in run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "del", namespace)
    # Those of hosts go with their namespaces, but these last as long as TCP tries to send what
    # processes have left that are gone: minutes, where it goes to a host that was cut off.
    links = re.findall(rf"^\d+: ({prefix}(?:b|v\d+n?))\b", run("ip", "-o", "link"), re.MULTILINE)
    for link in links:
        try:
            run("ip", "link", "del", link)
        except AssertionError as error:
            if "Cannot find device" not in str(error):  # it has gone meanwhile
                raise


def _write_configuration(lab: HostLab, names: Sequence[str]) -> None:
    for key in ("host_key", "identity", "stranger"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", lab.folder / key)
    shutil.copy(lab.folder / "identity.pub", lab.folder / "authorized_keys")
    addresses = {name: f"{lab.subnet}{place}" for place, name in enumerate(names, 1)}
    hosts = "\n".join(f"Host {name}\n  HostName {ip}" for name, ip in addresses.items())
    (lab.folder / "ssh_config").write_text(SSH.format(hosts=hosts, folder=lab.folder))
    table = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in addresses.items())]
    (lab.folder / "hosts").write_text("\n".join(table) + "\n")


def _start_host(lab: HostLab, place: int, name: str) -> subprocess.Popen[bytes]:
    namespace, address = f"{lab.prefix}n{place}", f"{lab.subnet}{place}"
    outside = f"{lab.prefix}v{place}"
    run("ip", "netns", "add", namespace)
    run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    run("ip", "link", "set", outside, "master", f"{lab.prefix}b", "up")
    length, *more = lab.mask
    for command in (["link", "set", "lo", "up"], ["link", "set", "eth0", "up"],
                    ["addr", "add", f"{address}/{length}", "dev", "eth0", *more]):  # fmt: skip
        run("ip", "-n", namespace, *command)
    config = lab.folder / f"sshd_config_{name}"
    config.write_text(SSHD.format(address=address, folder=lab.folder))
    os.makedirs("/run/sshd", exist_ok=True)
    script = " && ".join(
        [
            f"hostname {name}",
            *_own_tmp(lab.folder),
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount --bind {lab.folder}/hosts /etc/hosts",
            f"exec $(command -v sshd) -D -e -f {config}",
        ]
    )
    sshd = subprocess.Popen(
        [*ENDS_WITH_TESTS, "ip", "netns", "exec", namespace, "unshare", "--uts", "--mount",
         "--propagation", "private", "sh", "-c", script],
        env={**os.environ, "PATH": PATH}, stdin=subprocess.DEVNULL,
        stderr=open(lab.folder / f"sshd-{name}.log", "wb"), start_new_session=True,
    )  # fmt: skip
    lab.hosts.append(LabHost(name, address, namespace, outside, sshd.pid))
    return sshd


def _own_tmp(folder: Path) -> Iterator[str]:
    """Commands that give a host its own ``/tmp``, in which Python and this package stay."""
    kept = [path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")]
    for number, path in enumerate(kept):
        yield f"mkdir -p {folder}/kept-{number}"
        yield f"mount --bind {path} {folder}/kept-{number}"
    yield "mount -t tmpfs tmpfs /tmp"
    for number, path in enumerate(kept):
        yield f"mkdir -p {path}"
        yield f"mount --move {folder}/kept-{number} {path}"


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 22), 1.0) as connection:
        return connection.recv(4) == b"SSH-"
    return False
