"""A thousand who connect to each port of a session and say nothing: what they take of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import pytest

from distsession import Session
from distsession.protocol import link_connections, waiting_room
from distsession.protocol.link_connections import EACH_TWICE
from distsession.protocol.waiting_room import WAITING_MAX
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, reduced, start
from tests.until import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.alone]

EACH = 1000
PORTS_AT_ONCE = 8
"""Of one process that floods: it may have so many descriptors everywhere."""
FEW = 20
"""Descriptors that a process opens for other reasons meanwhile."""
MEMORY_MAX, CONTROLLER_MAX = 32 << 20, 128 << 20
"""Bytes that a process may grow by, and ipyparallel's controller, which keeps all at 18 ports."""
THREADS_MAX = 4

FLOOD = """
import select, socket, sys, time
held, poll = {}, select.poll()
for place in sys.argv[2:]:
    address, _, port = place.rpartition(":")
    for _ in range(int(sys.argv[1])):
        made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        made.setblocking(False)
        made.connect_ex((address, int(port)))
        held[made.fileno()] = made
        poll.register(made, select.POLLOUT)
come, until = 0, time.monotonic() + 10
waiting = set(held)
while waiting and time.monotonic() < until:
    for descriptor, events in poll.poll(1000):
        come += not held[descriptor].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        poll.unregister(descriptor)
        waiting.discard(descriptor)
print(come, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flooded(places: Sequence[str], *before: str) -> Iterator[int]:
    """Hold that many connections to each of these; gives how many were made.

    Args:
        places: Addresses with ports.
        before: The command that it is done by.
    """
    command = [*before, sys.executable, "-S", "-c", FLOOD, str(EACH)]
    floods = [
        subprocess.Popen(
            [*command, *places[at : at + PORTS_AT_ONCE]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for at in range(0, len(places), PORTS_AT_ONCE)
    ]  # fmt: skip
    try:
        yield sum(int(each.stdout.readline()) for each in floods if each.stdout is not None)
    finally:
        for each in floods:
            each.communicate()


@dataclass(frozen=True)
class Taken:
    """What a process has."""

    descriptors: int
    threads: int
    memory: int


def taken(processes: Sequence[psutil.Process]) -> dict[psutil.Process, Taken]:
    return {
        each: Taken(each.num_fds(), each.num_threads(), each.memory_info().rss)
        for each in processes
    }


def ports_of(process: psutil.Process) -> set[int]:
    return {
        each.laddr.port
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def own_processes() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(("gpu1", "gpu2")) as found:
        yield found
        nothing_left(found)


def kept_of(ports: int, hosts: int) -> int:
    """Connections of strangers that are kept at most, at so many ports."""
    return ports * (WAITING_MAX + EACH_TWICE * hosts) + FEW


def check(
    before: dict[psutil.Process, Taken],
    most: dict[psutil.Process, int],
    controllers: Sequence[psutil.Process] = (),
) -> None:
    """See that no process has grown by more than it may."""

    def is_kept(process: psutil.Process) -> bool:
        return process.num_fds() <= before[process].descriptors + most[process]

    for process, first in before.items():
        until(lambda process=process: is_kept(process), f"an end of strangers at {process}")
        now = taken([process])[process]
        assert now.threads <= first.threads + THREADS_MAX, process
        memory_max = CONTROLLER_MAX if process in controllers else MEMORY_MAX
        assert now.memory <= first.memory + memory_max, process


def test_a_session_over_hosts_keeps_few_and_goes_on(
    lab: HostLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that it is not their time that ends them.
    monkeypatch.setattr(link_connections, "HANDSHAKE_TIMEOUT_S", 600.0)
    monkeypatch.setattr(waiting_room, "WAIT_S", 600.0)
    with start(lab, "gpu1", "gpu2", ranks_per_host=[1, 1]) as session:
        assert reduced(session) == {2.0}
        this = psutil.Process()
        mine = ports_of(this)
        assert len(mine) == 2  # of the links, and of the streams
        before = taken([this])
        most = {this: kept_of(len(mine), 2)}
        with contextlib.ExitStack() as stack:
            come = stack.enter_context(flooded([f"{lab.address}:{port}" for port in mine]))
            assert come == EACH * len(mine)
            for host in lab.hosts:
                listening = host.run("ss", "-Hltn").split("\n")
                found = [line.split()[3].rpartition(":") for line in listening if line]
                places = [(address, port) for address, _, port in found if port != "22"]
                assert len(places) == 2  # of the trial, and of torch's store
                there = [psutil.Process(pid) for pid in host.processes()]
                before |= taken(there)
                most |= dict.fromkeys(there, kept_of(len(places), 1))
                here = [f"127.0.0.1:{port}" for _, port in places]
                into = ("nsenter", "-t", str(host.pid), "-n", "--")
                assert stack.enter_context(flooded(here, *into)) == EACH * len(places)
            check(before, most)
            assert reduced(session) == {2.0}
            session.restart(hosts=["gpu2"])
            assert reduced(session) == {2.0}


def test_on_one_host_only_processes_of_their_own_take_them(own: Session) -> None:
    client = own.client
    assert client is not None
    mine = own_processes()
    controllers = [each for each in mine if "IPController" in " ".join(each.cmdline())]
    ranks = {info.pid for info in own.infos}
    places = {f"127.0.0.1:{port}" for each in mine for port in ports_of(each)}
    assert len(places) > 10
    before = taken(mine)
    stores = [each for each in mine if ports_of(each) and each not in controllers]
    assert not ranks & {each.pid for each in stores}
    assert psutil.Process() not in stores
    # Nobody can limit these two: they are torch's and ipyparallel's.
    own_limit = dict.fromkeys([*controllers, *stores], EACH * len(places))
    with flooded(sorted(places)) as come:
        assert come >= EACH
        check(before, {each: own_limit.get(each, FEW) for each in mine}, controllers)
        assert reduced(own) == {2.0}
        own.restart()
        assert reduced(own) == {2.0}


@pytest.fixture
def own() -> Iterator[Session]:
    with Session(2, threads=1) as session:
        yield session
