"""What the kernel does with hosts, as far as none is needed: their streams, their job's limit."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsession.cluster import host_streams
from distsession.cluster.deaths import SilentHost
from distsession.cluster.host_links import LinkedHost
from distsession.cluster.host_streams import HostStreams
from distsession.cluster.hosts import Hosts
from distsession.cluster.hosts_launcher import HostsLauncher
from distsession.errors import EngineDiedError
from distsession.host_plan import HostPlan
from distsession.kernel.recovery import Recovery
from distsession.protocol.host_link import ATTACH, STORE
from distsession.protocol.message_listener import MessageListener
from distsession.protocol.message_stream import MessageStream, packed
from distsession.protocol.secure_stream import SecureStream, connect
from distsession.protocol.wire import socket_path
from tests.message_ends import MessageEnd
from tests.until import until

SECRET = bytes(range(32))


class PlayedLinks:
    """Links to hosts that have come, and of which nothing else is known."""

    def __init__(self, *names: str):
        links = [LinkedHost(os.urandom(8), name, None, 1, "") for name in names]
        self.hosts = {link.identity: link for link in links}
        self.keys = SimpleNamespace(stream_key=SECRET.hex())
        self.said: queue.SimpleQueue[tuple[str, dict[str, str]]] = queue.SimpleQueue()
        self.on_open: Any = None
        self.silent_for = 0.0

    def silent_s(self, _: LinkedHost) -> float:
        return self.silent_for

    def send(self, _: LinkedHost, kind: str, body: dict[str, str]) -> None:
        self.said.put((kind, body))


class Streams(HostStreams):
    """Those of a host ``gpu1``, which has come."""

    def __init__(self, folder: Path):
        self.played, self.folder = PlayedLinks("gpu1"), str(folder)
        (self.link,) = self.played.hosts.values()
        self.is_ended = False
        links: Any = self.played
        self.lost: list[LinkedHost] = []
        super().__init__(
            links,
            self.folder,
            lambda link: link.is_given_up or self.is_ended,
            self.lost.append,
            lambda link: "",
            lambda: None,
        )

    def come(self, **hello: str) -> SecureStream:
        """A stream that the host brings."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        return connect(connection, SECRET, {"link": self.link.identity.hex(), **hello})


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    made = Streams(tmp_path)
    yield made
    made.close()


def reached(streams: Streams, path: str, **hello: str) -> bool:
    """Whether a stream of a host comes to a socket of the kernel's, which answers."""
    path = os.path.join(streams.folder, path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):  # it is gone: nobody has come
                taken, _ = listener.accept()
                with taken:
                    taken.sendall(b"word")

        thread = threading.Thread(target=answer)
        thread.start()
        stream = streams.come(**hello)
        try:
            return bytes(stream.receive()) == b"word"
        except OSError:
            return False
        finally:
            stream.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            os.unlink(path)


def test_a_stream_is_taken_from_a_host_that_has_come_and_from_no_other(streams: Streams) -> None:
    assert reached(streams, "store.sock", service=STORE)
    assert not reached(streams, "store.sock", service=STORE, link="00" * 8)
    assert not reached(streams, "store.sock", service=STORE, link="nothing")
    assert not reached(streams, "store.sock", service="passwd")
    streams.link.is_given_up = True
    assert not reached(streams, "store.sock", service=STORE)


def test_a_stream_comes_to_the_owner_that_it_is_for(streams: Streams) -> None:
    path = os.path.basename(socket_path("", "relay", 7))
    assert reached(streams, path, service="relay", epoch="7")
    assert not reached(streams, path, service="relay", epoch="6")
    assert not reached(streams, path, service="relay", epoch="seven")


def test_a_stream_of_messages_is_handed_over_to_the_owner(streams: Streams) -> None:
    listener = MessageListener(socket_path(streams.folder, "link", 7), is_asked=True)
    taken: list[tuple[bytes, list[bytes]]] = []

    def take_in() -> bool:
        taken.extend(listener.receive())
        return bool(taken)

    stream = streams.come(service="link", epoch="7")
    end = MessageStream(stream._socket, stream)
    end.post(packed([b"gpu1"]))
    end.post(packed([b"hello", b"from there"]))
    assert end.flush()
    until(take_in, "a message of the host")
    assert taken == [(b"gpu1", [b"hello", b"from there"])]
    assert listener.send(b"gpu1", packed([b"welcome"]))
    there = MessageEnd(end)
    assert there.receive() == [b"welcome"]
    streams.cut(streams.link)
    until(lambda: there.poll(0) or end.is_over, "the end of the stream")
    until(lambda: [*listener.receive()] or listener.find(b"gpu1") is None, "the other end of it")
    end.close()
    listener.close()


def test_a_host_is_called_for_a_stream_to_its_agent(streams: Streams) -> None:
    mine, its = socket.socketpair()
    caller = threading.Thread(target=streams.call, args=(streams.link, its))
    caller.start()
    kind, body = streams.played.said.get(timeout=5)
    assert kind == "attach"
    strange = streams.come(service=ATTACH, token="0" * 16)
    with pytest.raises(ConnectionError):
        strange.receive()
    strange.close()
    stream = streams.come(service=ATTACH, **body)
    with mine:
        mine.sendall(b"may I?")
        assert bytes(stream.receive()) == b"may I?"
        stream.send(b"yes")
        assert mine.recv(10) == b"yes"
    stream.close()
    caller.join(5)
    assert not caller.is_alive()


def test_who_calls_a_host_that_does_not_come_is_let_go(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_streams, "CALL_TIMEOUT_S", 0.05)
    mine, its = socket.socketpair()
    with mine:
        streams.call(streams.link, its)
        assert mine.recv(10) == b""
    late = streams.come(service=ATTACH, **streams.played.said.get()[1])
    with pytest.raises(ConnectionError):
        late.receive()
    late.close()


def test_a_host_without_room_for_a_folder_is_told_so(tmp_path: Path) -> None:
    with Hosts(HostPlan(launcher="ssh", hosts=("gpu1",), folder=str(tmp_path))) as hosts:
        link = LinkedHost(b"x", "gpu1", None, 1, "")
        assert hosts._facts_of([(link, {"problem": "there is no folder for its sockets"})]) == ()
    (problem,) = hosts.problems
    assert (problem.what, problem.value) == ("gpu1", "there is no folder for its sockets")
    assert "TMPDIR" in problem.mend


class PlayedJob:
    """Stands for the launcher of a job that has so many seconds left at each look."""

    _job_problem = HostsLauncher._job_problem
    job = "4711"

    def __init__(self, *left: float | None):
        self._left = list(left)
        self._hosts = SimpleNamespace(seconds_left=lambda: self._left.pop(0))
        self._job_ends = float("inf")
        self.pauses: list[float] = []
        self._is_over: Any = SimpleNamespace(wait=self._wait)

    def _wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return not self._left


def test_the_limit_of_a_job_is_told_twice_also_if_the_scheduler_is_silent_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = PlayedJob(3600, None, 610, 600, 590, None, 70, 60, 30)
    with caplog.at_level(logging.WARNING):
        HostsLauncher._watch_job(job)  # type: ignore[arg-type]
    said = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert said == ["Job 4711 ends in 10 minutes", "Job 4711 ends in 1 minute"]
    assert job.pauses == [0.0, 60.0, 60.0, 10.0, 60.0, 60.0, 60.0, 10.0, 60.0, 60.0]


def test_of_a_job_with_much_time_left_nothing_is_said() -> None:
    job = PlayedJob(7200, 7100)
    HostsLauncher._watch_job(job)  # type: ignore[arg-type]
    assert HostsLauncher._job_problem(job) == ""  # type: ignore[arg-type]


def test_it_is_known_since_when_a_silent_host_has_been_asked(streams: Streams) -> None:
    assert streams.asked_s(streams.link) == 0
    streams.played.silent_for = 60.0
    until(lambda: streams.asked_s(streams.link) > 0.3)
    streams.played.silent_for = 0.0
    until(lambda: streams.asked_s(streams.link) == 0)


@pytest.mark.parametrize(
    ("unheard_s", "asked_s", "is_cut_off"),
    [
        (None, 60.0, False),
        (1.0, 60.0, False),
        (3.0, 0.0, False),
        (3.0, 0.5, False),
        (3.0, 1.0, True),
    ],
)
def test_a_silent_host_is_cut_off_when_its_system_had_the_time_to_answer_and_has_not(
    unheard_s: float | None, asked_s: float, is_cut_off: bool
) -> None:
    hosts = Hosts.__new__(Hosts)
    played: Any = PlayedLinks("gpu1")
    played.silent_for = 3.0
    hosts._links = played
    known: Any = SimpleNamespace(unheard_s=lambda _: unheard_s, asked_s=lambda _: asked_s)
    hosts._streams = known
    (link,) = played.hosts.values()
    assert hosts.is_cut_off(link) is is_cut_off
    played.silent_for = 1.0
    assert not hosts.is_cut_off(link)


def test_a_host_that_counts_as_gone_is_told_of_once_and_its_streams_end(streams: Streams) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(streams.folder, "store.sock"))
        listener.listen()
        with contextlib.closing(streams.come(service=STORE)):
            until(lambda: streams._streams.get(streams.link.identity), "the stream")
            streams.is_ended = True
            until(lambda: not streams._streams.get(streams.link.identity), "its end")
    assert streams.link.is_given_up
    assert streams.lost == [streams.link]


@pytest.mark.parametrize(("silent_for", "is_said"), [(0.6, False), (3.0, True), (60.0, True)])
def test_only_a_host_that_is_silent_is_said_to_be(
    silent_for: float, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = Hosts.__new__(Hosts)
    played: Any = PlayedLinks("gpu1")
    played.silent_for = silent_for
    hosts._links = played
    (link,) = played.hosts.values()
    hosts._note_lost(link)
    said = [record.getMessage() for record in caplog.records]
    assert said == (["the host gpu1 is silent: it counts as gone"] if is_said else [])


@pytest.mark.parametrize("is_dead", [False, True])
def test_who_is_cut_off_is_asked_nothing_and_who_is_dead_by_now_is_told_as_dead(
    is_dead: bool,
) -> None:
    played: Any = SimpleNamespace(
        silent_hosts=lambda: (SilentHost("gpu2", (1,), 3.0, True, 5.0),),
        dead_ranks=lambda: {1: "has died"} if is_dead else {},
        infos=[SimpleNamespace(rank=rank, pid=rank) for rank in range(2)],
    )
    recovery = Recovery.__new__(Recovery)
    recovery.launcher = played
    recovery.check_reach([0])
    cut_off = pytest.raises(EngineDiedError, match="gpu2 has not answered for 3 s")
    with contextlib.nullcontext() if is_dead else cut_off:
        recovery.check_reach([0, 1])
