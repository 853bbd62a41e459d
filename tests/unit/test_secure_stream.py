"""Streams between hosts: what comes is what was sent, by who has the secret, or nothing is."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.protocol import secure_stream
from distsession.protocol.secure_stream import (
    HELLO_MAX_BYTES,
    RECORD_MAX_BYTES,
    SecureStream,
    accept,
    connect,
)

SECRET = bytes(range(32))
HELLO = {"service": "relay", "host": "gpu1"}
GREETING_BYTES = secure_stream._GREETING.size
SIZES = (1, 1023, 4096, RECORD_MAX_BYTES, RECORD_MAX_BYTES + 1, 3_000_001)


def sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


Made = tuple[SecureStream, SecureStream]


def pair_over(client: socket.socket, server: socket.socket) -> Made:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, server, SECRET)
        stream = connect(client, SECRET, HELLO)
        other, hello = accepted.result()
    assert hello == HELLO
    return stream, other


@pytest.fixture
def pair() -> Iterator[Made]:
    made = pair_over(*sockets())
    yield made
    for stream in made:
        stream.close()


@contextlib.contextmanager
def beside(what: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Something that goes on in another thread, and whose error is raised at the end."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(what, *arguments)
        yield
        done.result()


def read_all(stream: SecureStream) -> bytes:
    parts = []
    while part := stream.receive():
        parts.append(bytes(part))
    return b"".join(parts)


def send_all(stream: SecureStream, *parts: bytes) -> None:
    for part in parts:
        stream.send(part)
    stream.end()


# --- what comes is what was sent ------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_what_comes_is_what_was_sent_both_ways(pair: Made, size: int) -> None:
    data = os.urandom(size)
    for here, there in (pair, pair[::-1]):
        with beside(send_all, here, data):
            assert read_all(there) == data
        assert not there.receive()  # and at the end it stays


def test_256_mb_come_as_they_were_sent(pair: Made) -> None:
    part = os.urandom(1 << 20)
    with beside(send_all, pair[0], *[part] * 256):
        rest = at = 0
        while piece := pair[1].receive():
            first = min(len(piece), len(part) - at)
            assert piece[:first] == part[at : at + first]
            assert piece[first:] == part[: len(piece) - first]
            rest += len(piece)
            at = (at + len(piece)) % len(part)
    assert rest == 256 << 20


@given(st.lists(st.binary(max_size=9000), max_size=20))
def test_bytes_come_in_order_however_they_are_cut(parts: list[bytes]) -> None:
    here, there = pair_over(*socket.socketpair())
    with contextlib.closing(here), contextlib.closing(there), beside(send_all, here, *parts):
        assert read_all(there) == b"".join(parts)


def test_both_ends_send_at_once_more_than_the_system_holds(pair: Made) -> None:
    data = os.urandom(20_000_000)
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send_all, stream, data) for stream in pair]
        assert all(read == data for read in pool.map(read_all, pair))
        assert [one.result() for one in sent] == [None, None]


def test_one_direction_ends_and_the_other_goes_on(pair: Made) -> None:
    here, there = pair
    send_all(here, b"question")
    assert read_all(there) == b"question"
    send_all(there, b"answer")
    assert read_all(here) == b"answer"


def test_a_stream_that_is_used_for_long_has_new_keys_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_stream, "REKEY_RECORDS", 4)
    here, there = pair_over(*socket.socketpair())
    with contextlib.closing(here), contextlib.closing(there):
        used = set()
        for number in range(40):
            used.add(here._sending.key)
            here.send(b"%d" % number)
            assert there.receive() == b"%d" % number
        assert len(used) == 10


def test_an_older_release_of_cryptography_speaks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = secure_stream._IN_PLACE
    monkeypatch.setattr(secure_stream, "_IN_PLACE", False)
    here, there = pair_over(*socket.socketpair())
    with contextlib.closing(here), contextlib.closing(there):
        here.send(b"old")
        monkeypatch.setattr(secure_stream, "_IN_PLACE", newer)
        assert there.receive() == b"old"
        there.send(b"new")
        monkeypatch.setattr(secure_stream, "_IN_PLACE", False)
        assert here.receive() == b"new"


def test_a_small_message_leaves_at_once_and_a_silent_host_is_asked(pair: Made) -> None:
    for stream in pair:
        sock = stream._socket
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.gettimeout() is None


# --- who is let in --------------------------------------------------------------------------------


def refused(client_secret: bytes, server_secret: bytes) -> tuple[str, str]:
    """Why each of the two ends does not go on."""
    client, server = sockets()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, server, server_secret)
        with pytest.raises(ConnectionError) as here:
            connect(client, client_secret, HELLO)
        with pytest.raises(ConnectionError) as there:
            accepted.result()
    assert client.fileno() == server.fileno() == -1
    return str(here.value), str(there.value)


def test_who_has_another_secret_is_told_and_not_let_in() -> None:
    why, _ = refused(bytes(32), SECRET)
    assert why == "the other end does not have the secret of this session"


class SameKey:
    """Stands for a key that gives what it is told with every other one."""

    shared = bytes(32)

    @classmethod
    def generate(cls) -> SameKey:
        return cls()

    def public_key(self) -> SameKey:
        return self

    def public_bytes_raw(self) -> bytes:
        return b"k" * 32

    def exchange(self, other: object) -> bytes:
        return self.shared


def test_who_learns_the_secret_later_cannot_read_what_was_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_stream, "X25519PrivateKey", SameKey)
    monkeypatch.setattr(secure_stream.os, "urandom", bytes)  # so that all that is recorded is alike
    keys = []
    for shared in (b"a" * 32, b"b" * 32):
        monkeypatch.setattr(SameKey, "shared", shared)
        here, there = pair_over(*socket.socketpair())
        keys += [here._sending.key, there._sending.key]
        here.close()
        there.close()
    assert len(set(keys)) == 4


def test_the_end_that_connects_says_nothing_to_who_has_not_shown_the_secret() -> None:
    client, stranger = sockets()

    def dial() -> None:
        with pytest.raises(ConnectionError):
            connect(client, SECRET, HELLO)

    with stranger, beside(dial):
        stranger.sendall(greeting(stranger.recv(4096), role=b"DSESS-S") + bytes(21))
        assert rest(stranger) == b""


def test_who_sends_back_what_it_gets_is_not_let_in() -> None:
    for connects in (True, False):
        ours, stranger = sockets()
        with stranger:
            stranger.settimeout(10)
            if connects:
                arguments = (connect, ours, SECRET, HELLO)
            else:
                arguments = (accept, ours, SECRET)
                stranger.sendall(greeting(bytes(GREETING_BYTES), role=b"DSESS-C"))
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(*arguments)
                with contextlib.suppress(ConnectionError):
                    while said := stranger.recv(4096):
                        stranger.sendall(said[-21:] if not connects else said)
                with pytest.raises(ConnectionError):
                    done.result()


def test_another_version_is_named() -> None:
    client, stranger = sockets()
    with stranger:
        stranger.sendall(greeting(bytes(GREETING_BYTES), role=b"DSESS-S", version=2))
        with pytest.raises(ConnectionError, match="another version of distsession"):
            connect(client, SECRET, HELLO)


def test_what_is_no_distsession_is_named() -> None:
    client, stranger = sockets()
    with stranger:
        stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(200))
        with pytest.raises(ConnectionError, match="something else"):
            connect(client, SECRET, HELLO)


def test_a_key_that_gives_the_same_with_every_other_is_refused() -> None:
    server, stranger = sockets()
    with stranger:
        made = greeting(bytes(GREETING_BYTES), role=b"DSESS-C")
        stranger.sendall(made[:-32] + bytes(32))
        with pytest.raises(ConnectionError, match="key is none"):
            accept(server, SECRET)


@pytest.mark.parametrize("sent", [0, 1, GREETING_BYTES - 1, GREETING_BYTES, GREETING_BYTES + 20])
def test_who_does_not_go_on_with_its_handshake_is_not_waited_for(sent: int) -> None:
    server, stranger = sockets()
    said = greeting(bytes(GREETING_BYTES), role=b"DSESS-C") + struct.pack("!BI", 1, 9) + bytes(25)
    with stranger:
        stranger.sendall(said[:sent])
        with pytest.raises(TimeoutError):
            accept(server, SECRET, timeout_s=0.1)
    assert server.fileno() == -1


def test_a_byte_now_and_then_does_not_make_a_handshake_longer() -> None:
    server, stranger = sockets()
    is_over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                stranger.sendall(b"D")

    with stranger, beside(drip):
        try:
            with pytest.raises(TimeoutError):
                accept(server, SECRET, timeout_s=0.2)
        finally:
            is_over.set()


def test_a_stranger_cannot_have_memory_made_for_it() -> None:
    server, stranger = sockets()
    with stranger, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, server, SECRET)
        stranger.sendall(greeting(bytes(GREETING_BYTES), role=b"DSESS-C"))
        stranger.sendall(struct.pack("!BI", 1, HELLO_MAX_BYTES + 1))
        with pytest.raises(ConnectionError, match="longer than any can be"):
            accepted.result(60)


@pytest.mark.parametrize("said", [b"", b"[]", b"{", b'{"a": 1}', b'{"a": "\xff"}', b"[" * 1000])
def test_a_hello_that_is_none_is_refused(said: bytes) -> None:
    client, server = sockets()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, server, SECRET)
        stream = secure_stream._greet(client, SECRET, is_client=True, timeout_s=60)
        stream._send_record(secure_stream._HELLO, memoryview(said))
        with pytest.raises(ConnectionError, match="what the stream is for"):
            accepted.result()
    stream.close()


def test_a_hello_has_a_longest_length_and_a_secret_has_one_length() -> None:
    client, server = sockets()
    with server, pytest.raises(ValueError, match="1024 bytes at most"):
        connect(client, SECRET, {"service": "x" * HELLO_MAX_BYTES})
    assert client.fileno() == -1
    client, server = sockets()
    with server, pytest.raises(ValueError, match="32 bytes, not 3"):
        connect(client, b"abc", HELLO)


def greeting(model: bytes, *, role: bytes, version: int = 1) -> bytes:
    """One by a stranger."""
    key = secure_stream.X25519PrivateKey.generate().public_key().public_bytes_raw()
    return secure_stream._GREETING.pack(role, version, model[8:40], key)


def rest(sock: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: sock.recv(4096), b""))
    return b""


# --- what somebody between the two can do ---------------------------------------------------------


class Between:
    """Sits between two ends, and hands on what it is told to.

    Attributes:
        client, server: The ends.
        records: Takes the next record of the client off the wire.
    """

    def __init__(self) -> None:
        ours, self._near = sockets()
        self._far, theirs = sockets()
        with ThreadPoolExecutor(3) as pool:
            accepted = pool.submit(accept, theirs, SECRET)
            connected = pool.submit(connect, ours, SECRET, HELLO)
            self._far.sendall(self._read(self._near, GREETING_BYTES))
            self._near.sendall(self._read(self._far, GREETING_BYTES + 21))
            self._far.sendall(self.record())
            self.client, (self.server, _) = connected.result(), accepted.result()

    @staticmethod
    def _read(sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))
            assert part
            data += part
        return data

    def record(self) -> bytes:
        head = self._read(self._near, 5)
        return head + self._read(self._near, struct.unpack("!BI", head)[1] + 16)

    def hand_on(self, *records: bytes) -> None:
        self._far.sendall(b"".join(records))

    def cut(self) -> None:
        self._far.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self.client, self.server, self._near, self._far):
            each.close()


@pytest.fixture
def between() -> Iterator[Between]:
    with contextlib.closing(Between()) as made:
        yield made


def three(between: Between) -> list[bytes]:
    send_all(between.client, b"first", b"second")
    return [between.record() for _ in range(3)]


def test_records_that_are_handed_on_as_they_are_arrive(between: Between) -> None:
    between.hand_on(*three(between))
    assert read_all(between.server) == b"firstsecond"


def assert_broken_after(between: Between, *good: bytes, why: str = "not authentic") -> None:
    for part in good:
        assert between.server.receive() == part
    with pytest.raises(ConnectionError, match=why):
        between.server.receive()


def test_a_record_that_is_sent_again_breaks_the_stream(between: Between) -> None:
    first, *_ = three(between)
    between.hand_on(first, first)
    assert_broken_after(between, b"first")


def test_records_in_another_order_break_the_stream(between: Between) -> None:
    first, second, _ = three(between)
    between.hand_on(second, first)
    assert_broken_after(between)


def test_a_record_that_is_left_out_breaks_the_stream(between: Between) -> None:
    _, second, end = three(between)
    between.hand_on(second, end)
    assert_broken_after(between)


def test_an_end_that_is_left_out_is_no_end(between: Between) -> None:
    first, second, _ = three(between)
    between.hand_on(first, second)
    between.cut()
    assert_broken_after(between, b"first", b"second", why="cut before its end")


@pytest.mark.parametrize("count", [1, 5, 12, -1])
def test_a_record_that_is_cut_breaks_the_stream(between: Between, count: int) -> None:
    first, second, _ = three(between)
    between.hand_on(first, second[:count])
    between.cut()
    assert_broken_after(between, b"first", why="cut before its end")


@pytest.mark.parametrize("at", range(0, 26))
def test_a_record_of_which_one_bit_is_altered_breaks_the_stream(between: Between, at: int) -> None:
    first, *_ = three(between)
    altered = bytearray(first)
    altered[at] ^= 1
    between.hand_on(bytes(altered))
    between.cut()
    assert_broken_after(between, why="authentic|cut before|longer than any")


def test_a_record_of_another_stream_breaks_the_stream(between: Between) -> None:
    with contextlib.closing(Between()) as other:
        between.hand_on(*three(other))
    assert_broken_after(between)


def test_what_is_authentic_and_no_data_breaks_the_stream(pair: Made) -> None:
    here, there = pair
    here._send_record(secure_stream._HELLO, memoryview(b"{}"))
    with pytest.raises(ConnectionError, match="not allowed there"):
        there.receive()


@pytest.mark.parametrize("kind", [secure_stream._DATA, secure_stream._END])
def test_data_has_bytes_and_an_end_has_none(pair: Made, kind: int) -> None:
    here, there = pair
    here._send_record(kind, memoryview(b"" if kind == secure_stream._DATA else b"x"))
    with pytest.raises(ConnectionError, match="not allowed there"):
        there.receive()


def test_what_was_sent_cannot_be_read_on_the_way(between: Between) -> None:
    between.client.send(b"very secret")
    assert b"secret" not in between.record()


class Given:
    """Stands for a socket from which some bytes come and then no more."""

    def __init__(self, data: bytes):
        self._data = data

    def recv_into(self, buffer: memoryview) -> int:
        part, self._data = self._data[: len(buffer)], self._data[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def test_each_of_a_hundred_thousand_wrong_frames_is_an_error_and_takes_no_memory() -> None:
    rng = random.Random(1)
    keys = secure_stream._Key(bytes(32)), secure_stream._Key(bytes(32))
    for number in range(100_000):
        length = rng.choice((0, 1, 16, 200))
        said = rng.choice((length, length, length + 1, RECORD_MAX_BYTES + 1, 2**32 - 1))
        frame = struct.pack("!BI", rng.randrange(256), said) + rng.randbytes(length + number % 18)
        sock: Any = Given(frame)
        stream = SecureStream(sock, secure_stream._Reader(sock, None), *keys)
        with pytest.raises(ConnectionError):
            stream.receive()
        assert len(stream._reader._buffer) == 4096


# --- ends that go ---------------------------------------------------------------------------------


def test_an_end_that_is_gone_is_an_error_and_not_the_end(pair: Made) -> None:
    here, there = pair
    here.close()
    with pytest.raises(ConnectionError):
        there.receive()


@pytest.mark.parametrize("waits", ["sends", "receives"])
def test_a_thread_that_waits_is_freed_by_an_abort(pair: Made, waits: str) -> None:
    here, _ = pair
    failed: list[OSError] = []
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        try:
            while True:
                here.send(bytes(1 << 20)) if waits == "sends" else here.receive()
        except OSError as error:
            failed.append(error)

    with beside(wait):
        is_waiting.wait()
        threading.Event().wait(0.2)  # until the system takes no more
        here.abort()
    assert failed


def test_what_was_sent_last_is_not_taken_back_by_what_is_unread(pair: Made) -> None:
    here, there = pair
    there.send(b"nobody reads this")
    send_all(here, bytes(100_000))
    with beside(lambda: (here.drain(60), here.close())):
        assert len(read_all(there)) == 100_000
        there.close()
