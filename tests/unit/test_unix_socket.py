"""Unix sockets: each end knows whose process the other one is, before anything is sent."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import zmq

from distsession.protocol import message_stream, sockets, unix_socket, wire
from distsession.protocol.message_listener import MessageListener
from distsession.protocol.message_stream import packed
from distsession.protocol.shared_memory import Link, LinkListener
from distsession.protocol.unix_socket import StrangerError
from tests.strangers import as_stranger, from_another_user, stranger
from tests.until import until

STREAM, PACKETS = socket.SOCK_STREAM, socket.SOCK_SEQPACKET


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that others can open, as none of a session ever should be."""
    with tempfile.TemporaryDirectory(prefix="u-", dir="/tmp") as path:
        os.chmod(path, 0o777)
        yield Path(path)


@pytest.mark.parametrize("kind", [STREAM, PACKETS])
def test_ones_own_processes_meet(folder: Path, kind: int) -> None:
    path = str(folder / "s")
    with unix_socket.listen(path, kind=kind) as listener:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with (
            unix_socket.connect(path, kind=kind, timeout_s=5) as one,
            unix_socket.accept(listener) as other,
        ):
            one.send(b"hello")
            assert other.recv(10) == b"hello"
            mine = os.getpid(), os.geteuid(), os.getegid()
            assert unix_socket.peer(one) == unix_socket.peer(other) == mine


def _connect(path: str, kind: int, say: bytes = b"") -> str:
    """What a stranger gets to hear there."""
    with socket.socket(socket.AF_UNIX, kind) as s:
        s.settimeout(5)
        s.connect(path)
        try:
            if say:
                s.send(say)
            return s.recv(100).decode()
        except ConnectionError:
            return ""


@from_another_user
@pytest.mark.parametrize("kind", [STREAM, PACKETS])
def test_a_stranger_who_connects_is_refused(folder: Path, kind: int) -> None:
    path = str(folder / "s")
    with unix_socket.listen(path, kind=kind) as listener:
        os.chmod(path, 0o666)
        with stranger(lambda: _connect(path, kind)) as answer:
            with pytest.raises(StrangerError, match="another user"):
                unix_socket.accept(listener)
            assert answer() == ""


def _listen(path: str, kind: int, listening: list[socket.socket]) -> None:
    listening.append(socket.socket(socket.AF_UNIX, kind))
    listening[0].bind(path)
    listening[0].listen()


def _hear(listening: list[socket.socket]) -> str:
    """What one who connects says to a stranger."""
    listening[0].settimeout(10)
    connection, _ = listening[0].accept()
    connection.settimeout(10)
    return connection.recv(1000).decode("latin-1")


CONNECTS: dict[str, tuple[int, Callable[[str], Any]]] = {
    "connect": (STREAM, unix_socket.connect),
    "messages": (STREAM, lambda path: message_stream.connect(path, b"0.1")),
    "asks": (STREAM, lambda path: message_stream.connect(path, b"0.1", asks=True)),
    "relay": (STREAM, lambda path: wire.connect(os.path.dirname(path), 1)),
    "memory": (PACKETS, lambda path: Link.connect(path, "0.1")),
}


@from_another_user
@pytest.mark.parametrize("name", CONNECTS)
def test_nothing_is_said_to_a_stranger_who_listens(folder: Path, name: str) -> None:
    kind, connect = CONNECTS[name]
    path = str(folder / "relay-1.sock")
    listening: list[socket.socket] = []
    with stranger(lambda: _hear(listening), first=lambda: _listen(path, kind, listening)) as heard:
        os.chmod(path, 0o666)
        with pytest.raises(StrangerError, match="another user"):
            connect(path)
        assert heard() == ""


@from_another_user
def test_listeners_go_on_after_a_stranger(folder: Path) -> None:
    path = str(folder / "m")
    listener = MessageListener(path)
    os.chmod(path, 0o666)
    try:
        say = b"".join(packed([b"0.1"]))
        with stranger(lambda: _connect(path, STREAM, say)) as answer:
            until(lambda: listener.receive(0.1) is None or answer, "it")
            for _ in range(5):
                assert listener.receive(0.05) == []
            assert answer() == ""
        assert listener.find(b"0.1") is None
        mine = message_stream.connect(path, b"0.2")
        until(lambda: listener.receive(0.1) == [] and listener.find(b"0.2"), "one's own")
        mine.close()
    finally:
        listener.close()


@from_another_user
def test_links_for_memory_go_on_after_a_stranger_and_one_who_is_silent(folder: Path) -> None:
    path = str(folder / "memory")
    listener = LinkListener(path)
    os.chmod(path, 0o666)
    with (
        stranger(lambda: _connect(path, PACKETS, b"0.1")) as answer,
        unix_socket.connect(path, kind=PACKETS),
    ):
        link = Link.connect(path, "0.2")
        assert listener.link("0.2", 10.0)
        with pytest.raises(OSError):  # noqa: PT011  whatever it is, the name is nobody's
            listener.link("0.1", 0.1)
        assert answer() == ""
        link.close()
    listener.close()


def _push(path: str, sent: list[Any]) -> str:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{path}")
    socket.send_multipart([b"poison", b"more"])
    socket.close(2000)
    context.term()
    return "sent"


@from_another_user
def test_messages_of_zmq_from_a_stranger_are_dropped(folder: Path) -> None:
    path = str(folder / "z")
    context: zmq.Context[Any] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        pull.bind(f"ipc://{path}")
        os.chmod(path, 0o666)
        assert as_stranger(lambda: _push(path, [])) == "sent"
        assert pull.poll(5000)
        with pytest.raises(zmq.Again):
            sockets.receive(pull)
        push.connect(f"ipc://{path}")
        push.send_multipart([b"mine", b"too"])
        assert pull.poll(5000)
        assert sockets.receive(pull) == [b"mine", b"too"]
    finally:
        context.destroy(0)


def test_what_multiprocessing_sends_goes_through_it(folder: Path) -> None:
    path = str(folder / "c")
    with unix_socket.listen(path) as listener:
        one = Connection(unix_socket.connect(path).detach())
        other = Connection(unix_socket.accept(listener).detach())
        one.send({"a": 1})
        assert other.recv() == {"a": 1}
        one.close()
        other.close()
