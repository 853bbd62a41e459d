"""Nobody else on the machine or the network can reach the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import zmq

from distsession import LaunchError, RunInterrupt, Session
from distsession.engine import store_server
from distsession.protocol.message_stream import packed
from tests.message_ends import MessageEnd
from tests.strangers import NOBODY, as_stranger, from_another_user, stranger


def can(do: Callable[[], Any]) -> bool:
    """Whether that works."""
    try:
        do()
    except OSError:
        return False
    return True


def connected(port: int) -> socket.socket:
    """Without a look-up of the name, for which a stranger might have to import something."""
    s = socket.socket()
    s.settimeout(2)
    s.connect(("127.0.0.1", port))
    return s


def listening_ports() -> list[int]:
    """What anybody may read of this machine's ports on the loopback interface."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(words[1].partition(":")[2], 16) for words in lines if words[3] == "0A"]


@pytest.fixture(scope="module")
def running():
    with Session(2) as session:
        session.client  # noqa: B018  so that ipyparallel's part is there, too
        session.execute("t = torch.ones(1)\ndist.all_reduce(t)")
        yield session


def processes_of(session: Session) -> list[psutil.Process]:
    """All that live: a process that has ended and is not reaped yet has nothing to show."""
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        process.cmdline()
    except psutil.NoSuchProcess:  # ZombieProcess is one
        return False
    return True


def test_every_port_is_on_the_loopback_interface(running: Session) -> None:
    listening = [
        connection
        for process in [psutil.Process(), *processes_of(running)]
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or connection.type.name == "SOCK_DGRAM"
    ]
    assert listening, "the store, gloo and ipyparallel's controller do listen"
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1"}


def keys_of(session: Session) -> list[str]:
    files = Path(session.launcher.folder).glob("ipyparallel-*/security/*.json")
    facts = [json.loads(path.read_text()) for path in files]
    assert len(facts) == 2
    keys = [fact[name] for fact in facts for name in ("key", "curve_serverkey") if fact.get(name)]
    assert keys
    return keys


def test_keys_are_in_no_command_line_and_no_environment(running: Session) -> None:
    keys = keys_of(running)
    for process in processes_of(running):
        seen = " ".join(process.cmdline()) + " ".join(process.environ().values())
        assert not any(key in seen for key in keys), process
    on_ranks = running.evaluate("' '.join(__import__('os').environ.values())")
    assert not any(key in text for key in keys for text in on_ranks.values())


def test_files_with_keys_are_the_users_alone(running: Session) -> None:
    for path in Path(running.launcher.folder).glob("ipyparallel-*/security/*.json"):
        assert path.stat().st_mode & 0o077 == 0


def test_ipyparallel_wants_curve(running: Session) -> None:
    files = Path(running.launcher.folder).glob("ipyparallel-*/security/*-client.json")
    facts = json.loads(next(iter(files)).read_text())
    assert facts["curve_serverkey"]
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.connect(f"{facts['interface']}:{facts['registration']}")
        stranger.send_multipart([b"", b"anything"])
        assert not stranger.poll(500)
        events = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert not events.poll(500)
        stranger.disable_monitor()
    finally:
        stranger.close(0)
        context.destroy(0)


@pytest.mark.parametrize("name", ["requests", "output"])
@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"junk"],
        [b"ds1"],
        [b"ds1", b"not a pickle"],
        [b"ds1", b"\x80\x05K\x01."],
        [b"x" * 100_000, b"y"],
    ],
)
def test_foreign_frames_are_dropped_and_counted(running: Session, name, frames) -> None:
    channel = running.launcher.channel
    before = channel.malformed
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    path = f"{running.launcher.folder}/{name}-1.sock"
    end = MessageEnd(path, b"anybody") if name == "requests" else None
    try:
        if end is not None:
            end.send(frames)
        else:
            socket.connect(f"ipc://{path}")
            socket.send_multipart(frames)
        for _ in range(100):
            if channel.malformed > before:
                break
            assert running.evaluate("rank")[1] == 1
    finally:
        socket.close(1000)
        context.term()
        if end is not None:
            end.close()
    assert channel.malformed == before + 1
    assert running.evaluate("rank")[1] == 1


@pytest.mark.parametrize(
    "frames", [[b"junk"], [b"ds1not a pickle"], [b"ds1\x80\x05K\x01.", b"more"]]
)
def test_a_rank_drops_frames_that_are_no_request(running: Session, frames) -> None:
    channel = running.launcher.channel
    with channel._lock:
        channel._send_request(channel._identities[0], packed(frames))
        channel._control.send_multipart([channel._identities[0], *frames])
    assert running.evaluate("rank")[0] == 0
    future = running[0].submit(__import__("time").sleep, 60)
    __import__("time").sleep(0.1)
    assert running.interrupt()
    with pytest.raises(RunInterrupt):
        future.result(10)


# --- from another uid -----------------------------------------------------------------------------


@pytest.fixture
def plain() -> Iterator[Session]:
    """A session of which nobody has asked for ipyparallel's part."""
    with Session(3, threads=1) as session:
        session.execute("import os\nx = torch.ones(1)\ndist.all_reduce(x)")
        yield session


def reconnect(session: Session) -> None:
    session.launcher.abort("failed", "so that the group is connected anew")
    session.execute("x = torch.ones(1)\ndist.all_reduce(x)")
    assert session.evaluate("x.item()")[0] == 3.0


def ports_of(process: psutil.Process) -> set[int]:
    return {
        connection.laddr.port
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def tcp_store_port(session: Session) -> int:
    return int(session[0].evaluate("os.environ['MASTER_PORT']")[0])


def is_of_ipyparallel(process: psutil.Process) -> bool:
    """Its controller, or what that has started."""
    line = [process, *process.parents()]
    return any("controller" in " ".join(p.cmdline()) for p in line if p.pid != os.getpid())


@from_another_user
def test_the_only_port_that_others_reach_is_that_of_torchs_store(plain: Session) -> None:
    plain.execute("pair = dist.new_group([0, 1])\nif rank < 2: dist.all_reduce(x, group=pair)")
    reconnect(plain)
    port = tcp_store_port(plain)
    ranks = {info.pid for info in plain.infos}
    agent = psutil.Process(plain.launcher._agents.pid())  # others have sessions, too
    listening = {
        process.pid: ports_of(process)
        for process in (agent, *agent.children(recursive=True))
        if is_alive(process) and not is_of_ipyparallel(process) and ports_of(process)
    }
    assert list(listening.values()) == [{port}]
    assert not ranks & listening.keys()
    assert as_stranger(lambda: can(lambda: connected(port)))


@from_another_user
def test_nothing_in_the_folder_can_be_reached(running: Session) -> None:
    folder = Path(running.launcher.folder)
    sockets = [str(path) for path in folder.rglob("*") if path.is_socket()]
    files = [str(path) for path in folder.rglob("*") if path.is_file()]
    assert any(path.endswith("store.sock") for path in sockets)
    assert files

    def connect(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)

    def ask() -> list[Any]:
        return [
            can(lambda: os.listdir(folder)),
            [path for path in sockets if can(lambda p=path: connect(p))],
            [path for path in files if can(lambda p=path: open(p).close())],
        ]

    assert as_stranger(ask) == [False, [], []]


@from_another_user
def test_no_socket_has_an_abstract_name(running: Session) -> None:
    """Those are reached by every user, whatever folders there are."""
    for process in [psutil.Process(), *processes_of(running)]:
        names = [str(c.laddr) for c in process.net_connections("unix") if c.laddr]
        assert not [name for name in names if name[:1] in ("@", "\0")], process.cmdline()


@from_another_user
def test_memory_and_environment_of_the_processes_are_the_users_alone(running: Session) -> None:
    pids = [process.pid for process in processes_of(running)]
    assert len(pids) >= 4

    def ask() -> list[str]:
        names = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem", "maps")]
        reached = [name for name in names if can(lambda n=name: open(n, "rb").read(1))]
        reached += [str(pid) for pid in pids if can(lambda p=pid: os.listdir(f"/proc/{p}/fd"))]
        return reached + [str(pid) for pid in pids if can(lambda p=pid: os.kill(p, signal.SIGTERM))]

    assert as_stranger(ask) == []


@from_another_user
def test_torchs_store_holds_nothing_of_the_sessions_and_may_be_disturbed(plain: Session) -> None:
    port = tcp_store_port(plain)

    def ask() -> int:
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        before = int(store.num_keys())
        for number in range(3):
            for rank in range(3):
                store.set(f"generation{number}/world/cpu//0/{rank}", "junk")
            store.set(f"generation{number}/arrived", "100")
            store.set(f"generation{number}/all have arrived", "")
        for junk in (b"\0" * 100, b"\xff" * 1000, os.urandom(1000)):
            with connected(port) as s:
                s.sendall(junk)
        return before

    assert as_stranger(ask) == 0
    for _ in range(2):
        reconnect(plain)


@from_another_user
def test_the_store_answers_its_user_alone_even_where_its_socket_can_be_reached(
    plain: Session,
) -> None:
    folder = plain.launcher.folder
    path = store_server.socket_path(folder)
    os.chmod(path, 0o777)
    os.chmod(folder, 0o755)
    os.chmod(os.path.dirname(folder), 0o711)

    def ask() -> str:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(5)
            s.connect(path)
            return s.recv(100).hex()

    try:
        assert as_stranger(ask) == ""
    finally:
        os.chmod(os.path.dirname(folder), 0o700)
        os.chmod(folder, 0o700)
    plain.execute("dist.new_group([0, 1, 2])")


@contextlib.contextmanager
def half_open(each: int) -> Iterator[int]:
    """A stranger holds that many connections to every port there is; gives how many it got."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            signal.alarm(120)
            held = []
            for port in listening_ports():
                with contextlib.suppress(OSError):
                    for _ in range(each):
                        held.append(connected(port))
            os.write(writing, str(len(held)).encode())
            time.sleep(100)
        os._exit(0)
    os.close(writing)
    try:
        yield int(os.read(reading, 100))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


@from_another_user
def test_half_open_connections_take_no_descriptor_of_a_rank(plain: Session) -> None:
    """Of a group that is connected; gloo would keep each, and end the rank where none is left."""

    def descriptors() -> list[int]:
        return [psutil.Process(info.pid).num_fds() for info in plain.infos]

    plain.client  # noqa: B018  ipyparallel's part takes descriptors, too, as it comes up
    before, now = [], descriptors()
    while before != now:
        before = now
        time.sleep(0.5)
        now = descriptors()
    with half_open(200) as held:
        assert held >= 200  # torch's store takes them
        time.sleep(0.3)
        assert descriptors() == before
        plain.execute("pair = dist.new_group([0, 1, 2])\ndist.all_reduce(x, group=pair)")
        reconnect(plain)


# --- a folder that somebody replaces --------------------------------------------------------------


class Poison:
    """Runs code where it is unpickled."""

    def __init__(self, marker: str):
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self._marker,)


def lie_in_wait(paths: list[str]) -> list[socket.socket]:
    """Listen at all of these."""
    found = []
    for path in paths:
        kind = socket.SOCK_SEQPACKET if "memory" in path else socket.SOCK_STREAM
        found.append(socket.socket(socket.AF_UNIX, kind))
        found[-1].bind(path)
        os.chmod(path, 0o777)
        found[-1].listen(100)
    return found


def feed(listening: list[socket.socket], data: bytes, seconds: float) -> list[str]:
    """Send this to all who connect, and give what they say."""
    heard = []
    until_s = time.monotonic() + seconds
    while (left := until_s - time.monotonic()) > 0:
        for listener in select.select(listening, [], [], left)[0]:
            connection, _ = listener.accept()
            connection.settimeout(0.5)
            with contextlib.suppress(OSError), connection:
                connection.send(data)
                heard.append(connection.recv(1000).decode("latin-1"))
    return [said for said in heard if said]


@from_another_user
def test_a_rank_that_is_restarted_takes_nothing_from_a_stranger_in_the_folders_place(
    tmp_path: Path,
) -> None:
    """Whoever could rename what lies in TMPDIR would do this."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    marker = str(tmp_path / "was here")
    message = pickle.dumps(Poison(marker))
    data = b"".join(packed([b"ds1" + message])) + struct.pack("!i", len(message)) + message
    with Session(2, threads=1, start_timeout=6) as session:
        folder = Path(session.launcher.folder)
        names = [path.name for path in folder.iterdir() if path.is_socket()]
        assert {"store.sock", "requests-1.sock", "control-1.sock"} <= set(names)
        aside = folder.with_name(f"{folder.name}.aside")
        folder.rename(aside)
        try:
            folder.mkdir()
            folder.chmod(0o777)
            (folder / "logs").mkdir()
            parent, before = folder.parent, folder.parent.stat().st_mode
            parent.chmod(0o755)
            listening: list[socket.socket] = []
            paths = [str(folder / name) for name in names]
            with stranger(
                lambda: feed(listening, data, 8.0),
                first=lambda: listening.extend(lie_in_wait(paths)),
            ) as heard:
                with pytest.raises(LaunchError):
                    session.restart()
                said = heard()
        finally:
            parent.chmod(before)
            shutil.rmtree(folder)
            aside.rename(folder)
        assert not os.path.exists(marker)
        # zmq greets whoever listens, before it is known who that is.
        assert [text for text in said if not text.startswith("\xff")] == []


@from_another_user
def test_a_session_is_not_put_where_others_may_rename_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    place = tmp_path / "mine"
    place.mkdir(mode=0o700)
    code = "from distsession import Session; print(Session(1).launcher.folder)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "TMPDIR": str(place)},
    )  # fmt: skip
    assert said.stdout.startswith("/tmp/distsession-")
    assert os.listdir(place) == []
