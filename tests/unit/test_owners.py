"""Who owns a kept session, as its agent decides it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Pipe
from threading import Thread
from typing import Any

import pytest

from distsession.engine import owners as module
from distsession.engine.log_file import PARTS_BYTES
from distsession.engine.owners import Owners
from distsession.protocol import unix_socket
from distsession.protocol.agent_messages import StartRanks
from distsession.protocol.attach import (
    Attached,
    AttachRefused,
    AttachRequest,
    BoardReply,
    BoardRequest,
    Ended,
    EndSession,
    Fenced,
    LogPart,
    LogRead,
    LogsReply,
    LogsRequest,
    attach_path,
)
from distsession.protocol.kept_record import OWNER_FILE, Owner, read_record
from distsession.ranks import HostInfo

HOST = HostInfo("alpha", 1, (), (("gloo", ("cpu",)),), "2.9.0", 4)


class Agent:
    """What an agent does with its owners, by the test's own clock."""

    def __init__(self, folder: str, monkeypatch: pytest.MonkeyPatch, **options: Any):
        self.folder = folder
        self.now = 1000.0
        monkeypatch.setattr(module, "host_clock", lambda: self.now)
        start = StartRanks(
            (), 2, 0, ("cpu",) * 2, "gloo", None, None, False, 1, "shared", 0, folder, "/", (), {},
            keep=60.0, version="1.0",
        )  # fmt: skip
        self.owners = Owners(replace(start, **options), 11)
        self.link: Connection | None
        self.link, self.kernel = Pipe()

    def attached(self, epoch: int) -> Attached:
        return Attached(epoch, HOST, 4711, {0: (0, 7)}, (), os.getpid())

    def read_board(self, whole: bool) -> BoardReply:
        return BoardReply([b"whole" if whole else b"new"], 1)

    def read_logs(self, reads: Sequence[LogRead]) -> tuple[LogPart, ...]:
        return tuple(LogPart(read.generation, data=b"text") for read in reads)

    def connect(self, wanted: Any) -> tuple[Any, Any]:
        """Somebody connects: what the agent does then, and what the one who connects is told."""
        told: list[Any] = []

        def ask() -> None:
            with Client(attach_path(self.folder, 0), family="AF_UNIX") as client:
                client.send(wanted)
                try:
                    told.append(client.recv())
                except EOFError:  # it was sent away
                    told.append(None)

        thread = Thread(target=ask)
        thread.start()
        found = self.owners.accept(self.link, self.attached, self.read_board, self.read_logs)
        thread.join()
        return found, told[0]

    @property
    def owner(self) -> Owner:
        return read_record(self.folder, OWNER_FILE, Owner)

    def close(self) -> None:
        self.owners.close()
        self.kernel.close()
        if self.link is not None:
            self.link.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Agent]]:
    with tempfile.TemporaryDirectory() as folder:
        agents: list[Agent] = []

        def start(**options: Any) -> Agent:
            agents.append(Agent(folder, monkeypatch, **options))
            return agents[-1]

        yield start
        for agent in agents:
            agent.close()


def idle() -> bool:
    return True


def busy() -> bool:
    return False


def test_the_lease_runs_from_the_owners_end_and_not_before(make: Callable[..., Agent]) -> None:
    agent = make()
    agent.now += 1000
    assert not agent.owners.problem(idle)
    assert agent.owner.gone_at is None
    agent.owners.leave()
    assert agent.owner.lease_ends_at is not None
    agent.now += 59
    assert not agent.owners.problem(idle)
    agent.now += 2
    assert "nobody had attached for 1m" in agent.owners.problem(busy)


def test_idle_ranks_end_sooner_and_work_begins_that_time_anew(make: Callable[..., Agent]) -> None:
    agent = make(keep_idle=10.0)
    agent.owners.leave()
    assert not agent.owners.problem(idle)
    agent.now += 9
    assert not agent.owners.problem(busy)
    agent.now += 9
    assert not agent.owners.problem(idle)
    agent.now += 9
    assert not agent.owners.problem(idle)
    agent.now += 2
    assert "idle for 10s" in agent.owners.problem(idle)


def test_who_attaches_where_nobody_is_becomes_the_owner_of_the_next_epoch(
    make: Callable[..., Agent],
) -> None:
    agent = make()
    agent.owners.leave()
    agent.link = None
    found, told = agent.connect(AttachRequest(22, "1.0"))
    assert isinstance(told, Attached)
    assert (told.epoch, found[1]) == (2, 22)
    assert (agent.owner.epoch, agent.owner.pid, agent.owner.gone_at) == (2, 22, None)
    agent.now += 1000
    assert not agent.owners.problem(idle)
    found[0].close()


def test_who_attaches_to_what_is_owned_is_refused_and_the_owner_stays(
    make: Callable[..., Agent],
) -> None:
    agent = make()
    found, told = agent.connect(AttachRequest(22, "1.0"))
    assert found is None
    assert isinstance(told, AttachRefused)
    assert "process 11 has owned it since" in told.reason
    assert "--take" in told.reason
    assert agent.owner.pid == 11
    assert not agent.kernel.poll()


def test_who_takes_it_fences_the_one_before(make: Callable[..., Agent]) -> None:
    agent = make()
    found, told = agent.connect(AttachRequest(22, "1.0", take=True))
    assert isinstance(told, Attached)
    fenced = agent.kernel.recv()
    assert isinstance(fenced, Fenced)
    assert "process 22 has taken it" in fenced.reason
    with pytest.raises(EOFError):
        agent.kernel.recv()
    assert agent.owner.pid == 22
    agent.link = None
    found[0].close()


@pytest.mark.parametrize("is_owned", [False, True])
def test_who_attaches_and_does_not_wait_leaves_it_to_nobody(
    make: Callable[..., Agent], is_owned: bool
) -> None:
    agent = make()
    if not is_owned:
        agent.owners.leave()
        agent.link = None
    client = Client(attach_path(agent.folder, 0), family="AF_UNIX")
    client.send(AttachRequest(22, "1.0", take=True))

    def attached(epoch: int) -> Attached:
        client.close()  # the machine is busy, and this takes longer than somebody waits
        return agent.attached(epoch)

    assert agent.owners.accept(agent.link, attached, agent.read_board, agent.read_logs) == (
        None,
        22,
    )
    if is_owned:
        assert isinstance(agent.kernel.recv(), Fenced)
        agent.link = None
    agent.owners.leave()
    agent.now += 61
    assert agent.owners.problem(idle)


def test_who_ends_it_need_not_wait(make: Callable[..., Agent]) -> None:
    agent = make()
    client = Client(attach_path(agent.folder, 0), family="AF_UNIX")
    client.send(EndSession("somebody has ended it"))
    client.close()
    assert isinstance(
        agent.owners.accept(agent.link, agent.attached, agent.read_board, agent.read_logs),
        EndSession,
    )


def test_another_version_is_refused_with_both(make: Callable[..., Agent]) -> None:
    agent = make()
    found, told = agent.connect(AttachRequest(22, "2.0", take=True))
    assert found is None
    assert "distsession 1.0" in told.reason
    assert "2.0" in told.reason


def test_anybody_of_the_same_user_may_end_it(make: Callable[..., Agent]) -> None:
    agent = make()
    found, told = agent.connect(EndSession("somebody has ended it"))
    assert isinstance(found, EndSession)
    assert isinstance(told, Ended)
    assert isinstance(agent.kernel.recv(), Fenced)


@pytest.mark.parametrize("wanted", ["hello", None, 7])
def test_who_says_something_else_changes_nothing(make: Callable[..., Agent], wanted: Any) -> None:
    agent = make()
    found, _ = agent.connect(wanted)
    assert found is None
    assert agent.owner.pid == 11


def test_who_connects_and_says_nothing_does_not_keep_the_agent(
    make: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.05)
    agent = make()
    with Client(attach_path(agent.folder, 0), family="AF_UNIX"):
        assert (
            agent.owners.accept(agent.link, agent.attached, agent.read_board, agent.read_logs)
            is None
        )
    assert agent.owner.pid == 11


def test_who_begins_a_message_and_does_not_end_it_does_not_keep_the_agent(
    make: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.05)
    agent = make()
    for begun in (b"\0", b"\0\0\1\0", b"\0\0\1\0half"):
        with unix_socket.connect(attach_path(agent.folder, 0)) as client:
            client.sendall(begun)
            found = agent.owners.accept(
                agent.link, agent.attached, agent.read_board, agent.read_logs
            )
            assert found is None
            assert client.recv(1) == b""
    assert agent.owner.pid == 11


def test_who_asks_for_the_board_and_does_not_read_does_not_keep_the_agent(
    make: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLY_TIMEOUT_S", 0.1)
    agent = make()
    monkeypatch.setattr(agent, "read_board", lambda whole: BoardReply([bytes(32 << 20)], 1))
    with Client(attach_path(agent.folder, 0), family="AF_UNIX") as client:
        client.send(BoardRequest(whole=True))
        agent.owners.accept(agent.link, agent.attached, agent.read_board, agent.read_logs)
    assert agent.owner.pid == 11


def test_who_looks_at_board_and_logs_owns_nothing(make: Callable[..., Agent]) -> None:
    agent = make()
    for whole, told in ((True, b"whole"), (False, b"new")):
        found, said = agent.connect(BoardRequest(whole))
        assert found is None
        assert said == BoardReply([told], 1)
    assert agent.owner.pid == 11
    found, said = agent.connect(LogsRequest((LogRead(1, "out", 3, 0, 10),)))
    assert (found, said) == (None, LogsReply((LogPart(3, data=b"text"),)))
    agent.owners.leave()
    agent.now += 59
    agent.connect(BoardRequest(whole=True))
    agent.connect(LogsRequest(()))
    agent.now += 2
    assert agent.owners.problem(idle)


def test_who_asks_for_logs_and_does_not_read_does_not_hold_the_agent_up(
    make: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make()
    part = LogPart(1, 1, "/tmp/" + "p" * 100, PARTS_BYTES, 0, b"x" * PARTS_BYTES)
    monkeypatch.setattr(agent, "read_logs", lambda reads: (part,))
    with Client(attach_path(agent.folder, 0), family="AF_UNIX") as client:
        client.send(LogsRequest((LogRead(1, "out", 1, 0, PARTS_BYTES),)))
        agent.owners.accept(agent.link, agent.attached, agent.read_board, agent.read_logs)
        assert client.recv() == LogsReply((part,))
