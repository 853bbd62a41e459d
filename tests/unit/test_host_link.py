"""The keys of a session over hosts, its links, and who is let in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from distsession.cluster.host_links import Dial, HostLinks
from distsession.engine.process import module_command
from distsession.engine.reach import ReachListener, try_address, try_peers
from distsession.protocol import link_connections
from distsession.protocol.host_link import (
    LISTENS,
    MESSAGE_MAX,
    STARTS,
    LinkKeys,
    decode,
    encode,
    read_keys,
    write_keys,
)
from distsession.protocol.link_connections import EACH_TWICE
from distsession.protocol.waiting_room import WAITING_MAX
from tests.until import until

KEYS = LinkKeys(
    addresses=("10.0.0.1",),
    port=4711,
    kernel_public="k" * 40,
    public="p" * 40,
    secret="s" * 40,
    reach_key="ab" * 32,
    stream_key="cd" * 32,
)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of zmq's protocol, by one that wants no encryption."""


@pytest.fixture
def links() -> Iterator[HostLinks]:
    made = HostLinks(["127.0.0.1"], bind="127.0.0.1")
    yield made
    made.close()


def agent(path: Path, name: str = "h") -> subprocess.Popen[str]:
    command = [*module_command("distsession.engine.host"), str(path), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_only_the_owner_may_read_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    before = os.umask(0)
    try:
        write_keys(str(path), KEYS)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path.read_text()) == KEYS


def test_keys_are_not_written_into_what_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "keys").touch(0o666)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("keys", "link"):
        with pytest.raises(FileExistsError):
            write_keys(str(tmp_path / name), KEYS)


def test_the_keys_are_in_no_text_that_is_shown() -> None:
    assert KEYS.secret not in repr(KEYS)
    assert KEYS.reach_key not in str(KEYS)
    assert KEYS.stream_key not in str(KEYS)
    assert KEYS.public in repr(KEYS)
    with pytest.raises(ValueError, match="no keys of a session") as error:
        read_keys('{"secret": "abcdef"')
    assert "abcdef" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"addresses": 1, "port": 2}'])
def test_what_is_no_file_of_keys_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no keys of a session"):
        read_keys(text)


def test_a_message_is_what_was_sent() -> None:
    assert decode(encode("hello", {"name": "gpu1"})) == ("hello", {"name": "gpu1"})
    assert decode(encode("end")) == ("end", {})


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"[]", b'["a"]', b"[1, {}]", b'["a", []]', b"\xff", b"[" * 100_000]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no message"):
        decode(data)


def test_an_agent_comes_tells_what_it_has_and_ends(links: HostLinks, tmp_path: Path) -> None:
    write_keys(str(tmp_path / "keys"), links.keys)
    process = agent(tmp_path / "keys", "gpu1")
    assert links.wait(lambda: len(links.hosts) == 1, 60)
    (host,) = links.hosts.values()
    assert (host.name, host.pid, host.address) == ("gpu1", process.pid, "127.0.0.1")
    assert links.wait(lambda: host.round_trip < 10, 60)
    assert abs(host.offset) < 1
    links.close()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()) == (0, [STARTS])


def test_an_agent_stays_while_the_kernel_says_nothing_but_lives(
    links: HostLinks, tmp_path: Path
) -> None:
    write_keys(str(tmp_path / "keys"), dataclasses.replace(links.keys, patience_s=0.5))
    links._ping = lambda *_: None  # type: ignore[method-assign]
    process = agent(tmp_path / "keys")
    assert links.wait(lambda: len(links.hosts) == 1, 60)
    (host,) = links.hosts.values()
    links.send(host, "welcome")
    time.sleep(3)  # and a while to make its connection anew
    assert process.poll() is None
    links.close()
    assert process.wait(60) == 0
    process.communicate()


KERNEL = """
import sys
from distsession.cluster.host_links import HostLinks
from distsession.protocol.host_link import write_keys
links = HostLinks(["127.0.0.1"], patience_s=0.5)
write_keys(sys.argv[1], links.keys)
print("listens", flush=True)
links.wait(lambda: any(host.round_trip < 10 for host in links.hosts.values()), 60)
print("linked", flush=True)
sys.stdin.read()
"""


def test_an_agent_ends_when_the_kernel_is_stopped(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    with subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(keys)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as kernel:  # fmt: skip
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "listens\n"
        process = agent(keys)
        assert kernel.stdout.readline() == "linked\n"
        kernel.send_signal(signal.SIGSTOP)
        assert process.wait(60) == 0
        process.communicate()
        kernel.kill()


def test_an_agent_ends_when_its_connection_is_closed_and_not_made_anew(
    links: HostLinks, tmp_path: Path
) -> None:
    write_keys(str(tmp_path / "keys"), dataclasses.replace(links.keys, patience_s=1000.0))
    process = agent(tmp_path / "keys")
    assert links.wait(lambda: len(links.hosts) == 1, 60)
    (host,) = links.hosts.values()
    assert links.wait(lambda: host.round_trip < 10, 60)  # it has found its kernel
    links.hosts.clear()  # so that nobody is told to end, as by a kernel that is killed
    links.close()
    assert process.wait(60) == 0
    process.communicate()


def test_an_agent_that_was_given_up_while_it_was_cut_off_ends_when_it_comes_back(
    links: HostLinks, tmp_path: Path
) -> None:
    write_keys(str(tmp_path / "keys"), links.keys)
    process = agent(tmp_path / "keys")
    assert links.wait(lambda: len(links.hosts) == 1, 60)
    (host,) = links.hosts.values()
    assert links.wait(lambda: host.round_trip < 10, 60)
    host.is_given_up = True  # and no word of that has come there
    assert process.wait(60) == 0
    process.communicate()


def test_links_that_were_held_up_take_no_host_for_silent(links: HostLinks, tmp_path: Path) -> None:
    write_keys(str(tmp_path / "keys"), links.keys)
    process = agent(tmp_path / "keys")
    assert links.wait(lambda: len(links.hosts) == 1, 60)
    (host,) = links.hosts.values()
    assert links.wait(lambda: host.round_trip < 10, 60)
    silent: list[float] = []
    is_over = threading.Event()

    def hold_up() -> None:
        """As if nobody had been asked, or heard, for 100 seconds."""
        links._pinged_at -= 100
        host.heard -= 100
        silent.append(links.silent_s(host))
        links._ping_all()
        silent.append(links.silent_s(host))
        is_over.set()

    links._order(hold_up)
    assert is_over.wait(60)
    assert max(silent) < 50
    links.close()
    process.communicate()


def test_an_agent_without_keys_says_so(tmp_path: Path) -> None:
    output, _ = agent(tmp_path / "none").communicate(timeout=60)
    assert f"the keys cannot be read from {tmp_path}/none: No such file or directory" in output


def test_who_has_other_keys_is_not_let_in(links: HostLinks, tmp_path: Path) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    wrong = dataclasses.replace(links.keys, public=public, secret=secret, patience_s=1.0)
    write_keys(str(tmp_path / "keys"), wrong)
    output, _ = agent(tmp_path / "keys").communicate(timeout=60)
    assert "it reaches no address of the kernel's (127.0.0.1" in output
    assert not links.hosts


def test_an_agent_talks_to_the_right_kernel_only(links: HostLinks, tmp_path: Path) -> None:
    other, _ = (key.decode() for key in zmq.curve_keypair())
    write_keys(
        str(tmp_path / "keys"), dataclasses.replace(links.keys, kernel_public=other, patience_s=1.0)
    )
    output, _ = agent(tmp_path / "keys").communicate(timeout=60)
    assert "it reaches no address of the kernel's" in output


def test_ten_thousand_frames_of_strangers_and_of_members_that_are_no_messages(
    links: HostLinks, tmp_path: Path
) -> None:
    hello = encode("hello", {"name": "x", "place": None, "pid": 1, "address": ""})
    context = zmq.Context()
    plain, stranger, member = (context.socket(zmq.DEALER) for _ in range(3))
    for each in (stranger, member):
        each.curve_serverkey = links.keys.kernel_public.encode()
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    member.curve_publickey = links.keys.public.encode()
    member.curve_secretkey = links.keys.secret.encode()
    try:
        for each in (plain, stranger, member):
            each.sndhwm = 0
            each.connect(f"tcp://127.0.0.1:{links.keys.port}")
        for number in range(10_000):
            junk = os.urandom(number % 300)
            for each in (plain, stranger):
                with contextlib.suppress(zmq.Again):  # zmq does not go on with one that is refused
                    each.send(hello if number % 2 else junk, zmq.NOBLOCK)
            member.send(junk)
        for number in range(500):  # who does not even speak zmq's protocol
            with socket.create_connection(("127.0.0.1", links.keys.port)) as raw:
                raw.sendall(GREETING[: number % 80] + os.urandom(200))
        with (
            socket.create_connection(("127.0.0.1", links.keys.port)) as raw,
            contextlib.suppress(ConnectionError),  # it is closed, sooner or later
        ):
            raw.sendall(GREETING)
            for _ in range(10_000):
                raw.sendall(b"\x00" + bytes([len(hello)]) + hello)
        member.send_multipart([encode("facts"), b"more"])
        member.send(encode("hello", {"name": "x"}))
        member.send(encode("pong", {"sent": "x", "time": None}))
        member.send(b" " * (MESSAGE_MAX + 1))  # which ends its connection
        assert links.wait(lambda: links.dropped >= 10_003, 60), links.dropped
        assert not links.hosts
        write_keys(str(tmp_path / "keys"), links.keys)
        process = agent(tmp_path / "keys")
        assert links.wait(lambda: len(links.hosts) == 1, 60)
        links.close()
        assert process.wait(60) == 0
        process.communicate()
    finally:
        context.destroy(linger=0)


def test_strangers_who_stay_are_shut_out_when_there_are_too_many_and_members_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(link_connections, "HANDSHAKE_TIMEOUT_S", 600.0)  # they do not go in time
    links = HostLinks(["127.0.0.1"], bind="127.0.0.1")
    port = links.keys.port
    with contextlib.ExitStack() as held:
        for number in range(400):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(GREETING[: number % 3])
        until(lambda: 0 < len(_accepted(port)) <= MOST, "an end of most of them")
        write_keys(str(tmp_path / "keys"), links.keys)
        process = agent(tmp_path / "keys")
        assert links.wait(lambda: len(links.hosts) == 1, 60)
        (host,) = links.hosts.values()
        for _ in range(400):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: 0 < len(_accepted(port)) <= MOST, "an end of most of them")
        heard = host.heard
        assert links.wait(lambda: host.heard > heard + 1, 60)
        assert host.pid == process.pid
        assert process.poll() is None
    links.close()
    assert process.wait(60) == 0
    process.communicate()


MOST = WAITING_MAX + EACH_TWICE + 1
"""Connections that are kept, and the agent's."""


def _accepted(port: int) -> list[object]:
    """What this process has at the end that listens."""
    return [
        each
        for each in psutil.Process().net_connections("tcp")
        if each.laddr.port == port and each.raddr
    ]


def test_a_stranger_who_goes_is_no_end_of_an_agent_that_listens(
    links: HostLinks, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = dataclasses.replace(links.keys, port=closed.getsockname()[1])
        write_keys(str(tmp_path / "keys"), nowhere)
        process = agent(tmp_path / "keys")
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        text = next(line for line in lines if line.startswith(LISTENS))
        port = json.loads(text.removeprefix(LISTENS))["port"]
        dial = Dial(links, "h", ("127.0.0.1",), port)
        until(lambda: dial.go_on() or links.hosts, "the agent")
        (host,) = links.hosts.values()
        for _ in range(5):
            socket.create_connection(("127.0.0.1", port)).close()
        heard = host.heard
        assert links.wait(lambda: host.heard > heard + 4, 60)  # long after it would have ended
        assert process.poll() is None
        links.close()
        assert process.wait(60) == 0
        process.communicate()


def test_a_host_shows_who_it_is_and_another_one_is_not_taken_for_it() -> None:
    listener = ReachListener("gpu1", KEYS.reach_key)
    port = listener.port
    try:
        assert try_address("127.0.0.1", port, "gpu1", KEYS.reach_key) == ""
        for name, key in (("gpu2", KEYS.reach_key), ("gpu1", "cd" * 32)):
            assert "something else" in try_address("127.0.0.1", listener.port, name, key)
        peers = {"gpu1": {"addresses": ["127.0.0.1", "127.0.0.2"], "port": listener.port}}
        assert try_peers(peers, KEYS.reach_key)["gpu1"]["127.0.0.1"] == ""
    finally:
        listener.close()
    why = try_address("127.0.0.1", port, "gpu1", KEYS.reach_key)
    assert why == "Connection refused"


def test_strangers_at_the_port_of_the_trial_hold_nobody_up() -> None:
    listener = ReachListener("gpu1", KEYS.reach_key)
    idle = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(12)]
    try:
        assert try_address("127.0.0.1", listener.port, "gpu1", KEYS.reach_key) == ""
        for number in range(1000):
            with socket.create_connection(("127.0.0.1", listener.port)) as raw:
                raw.sendall(os.urandom(number % 40))
        assert try_address("127.0.0.1", listener.port, "gpu1", KEYS.reach_key) == ""
    finally:
        for one in idle:
            one.close()
        listener.close()
    until(
        lambda: not [t for t in threading.enumerate() if t.name == "distsession-reach"],
        "the end of its thread",
    )


def test_one_address_after_the_other_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    now = 100.0
    monkeypatch.setattr("distsession.cluster.host_links.time.monotonic", lambda: now)

    class Links:
        def connect(self, address: str, port: int) -> None:
            done.append(f"+{address}:{port}")

        def disconnect(self, address: str, port: int) -> None:
            done.append(f"-{address}:{port}")

    dial = Dial(Links(), "gpu1", ("a", "b"), 1)  # type: ignore[arg-type]
    for now in (100.0, 101.0, 103.0, 103.1, 106.0):  # noqa: B007 - what the clock says
        dial.go_on()
    assert done == ["+a:1", "-a:1", "+b:1", "-b:1", "+a:1"]
    done.clear()
    single = Dial(Links(), "gpu1", ("a",), 1)  # type: ignore[arg-type]
    for now in (200.0, 300.0):  # noqa: B007
        single.go_on()
    assert done == ["+a:1"]


def test_an_agent_that_listens_is_dialled_at_the_address_that_works(
    links: HostLinks, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = dataclasses.replace(links.keys, port=closed.getsockname()[1])
        write_keys(str(tmp_path / "keys"), nowhere)
        process = agent(tmp_path / "keys", "gpu1")
        assert process.stdout is not None
        assert process.stdout.readline().strip() == STARTS
        place = json.loads(process.stdout.readline().removeprefix(LISTENS))
        assert place["name"] == "gpu1"
        for number in range(10_000):  # at its port, too, strangers get nowhere
            if number % 100 == 0:
                raw = socket.create_connection(("127.0.0.1", place["port"]))
            with contextlib.suppress(ConnectionError):
                raw.sendall(GREETING + os.urandom(50) if number % 100 == 0 else os.urandom(50))
            if number % 100 == 99:
                raw.close()
        dial = Dial(links, "gpu1", ("240.0.0.1", "127.0.0.1"), place["port"])
        until(lambda: dial.go_on() or links.hosts, "the agent")
        (host,) = links.hosts.values()
        assert (host.name, host.address, dial.tried) == ("gpu1", "", 2)
        links.close()
        assert process.wait(60) == 0
        process.communicate()
