"""Nobody else on the machine or the network can reach the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import zmq

from distsession import RunInterrupt, Session


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
    files = Path(session._launcher.folder).glob("ipyparallel-*/security/*.json")
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
    for path in Path(running._launcher.folder).glob("ipyparallel-*/security/*.json"):
        assert path.stat().st_mode & 0o077 == 0


def test_ipyparallel_wants_curve(running: Session) -> None:
    files = Path(running._launcher.folder).glob("ipyparallel-*/security/*-client.json")
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


@pytest.mark.parametrize("name", ["replies", "output"])
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
    channel = running._launcher.channel
    before = channel.malformed
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    try:
        socket.connect(f"ipc://{running._launcher.folder}/{name}.sock")
        socket.send_multipart(frames)
        for _ in range(100):
            if channel.malformed > before:
                break
            assert running.evaluate("rank")[1] == 1
    finally:
        socket.close(1000)
        context.term()
    assert channel.malformed == before + 1
    assert running.evaluate("rank")[1] == 1


@pytest.mark.parametrize(
    "frames", [[b"junk"], [b"ds1not a pickle"], [b"ds1\x80\x05K\x01.", b"more"]]
)
def test_a_rank_drops_frames_that_are_no_request(running: Session, frames) -> None:
    channel = running._launcher.channel
    with channel._lock:
        channel._requests.send_multipart([channel._identities[0], *frames])
        channel._control.send_multipart([channel._identities[0], *frames])
    assert running.evaluate("rank")[0] == 0
    future = running[0].submit(__import__("time").sleep, 60)
    __import__("time").sleep(0.1)
    assert running.interrupt()
    with pytest.raises(RunInterrupt):
        future.result(10)
