"""Unix sockets that are reached through streams: like the socket itself, and nothing is left."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import random
import resource
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from distsession.protocol import forward, secure_stream
from distsession.protocol.forward import (
    HANDSHAKES_AT_ONCE,
    StreamListener,
    UnixForwarder,
    UnixListener,
    pump,
)
from distsession.protocol.secure_stream import SecureStream, connect
from tests.until import until

SECRET = bytes(range(32))
LOOPBACK = "127.0.0.1"


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("distsession-")]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No thread, and no descriptor."""
    before = descriptors()
    yield
    assert ours() == []
    until(lambda: descriptors() <= before, "the end of all descriptors")  # zmq closes them later


class Two:
    """Two hosts: what listens at ``there`` on one can be reached at ``here`` on the other.

    Attributes:
        streams: The streams that have come.
    """

    def __init__(self, folder: str):
        self.here, self.there = f"{folder}/here", f"{folder}/there"
        self.streams: list[SecureStream] = []
        self.hellos: list[dict[str, str]] = []
        self.listener = StreamListener(SECRET, self._take, LOOPBACK)
        self.forwarder = UnixForwarder(self.here, self.open, "relay")

    def _take(self, stream: SecureStream, hello: dict[str, str]) -> None:
        self.streams.append(stream)
        self.hellos.append(hello)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self.there)
            pump(stream, sock)

    def open(self, service: str = "direct") -> SecureStream:
        return connect(self.dial(), SECRET, {"service": service})

    def dial(self) -> socket.socket:
        return socket.create_connection((LOOPBACK, self.listener.port))

    def close(self) -> None:
        self.forwarder.close()
        self.listener.close()


@pytest.fixture
def two() -> Iterator[Two]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, contextlib.closing(Two(folder)) as made:
        yield made


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends(two: Two) -> Iterator[Ends]:
    """Both ends of one connection through all of it."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(two.there)
        server.listen()
        client.connect(two.here)
        with server.accept()[0] as other:
            for each in (client, other):
                each.settimeout(60)
            yield client, other


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 20), b""))


def send_all(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


# --- like the socket itself -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100_000, 20_000_001])
def test_what_comes_is_what_was_sent_both_ways_at_once(ends: Ends, size: int) -> None:
    data = [os.urandom(size) for _ in ends]
    with ThreadPoolExecutor(4) as pool:
        sent = list(map(pool.submit, [send_all] * 2, ends, data))
        assert list(pool.map(read_all, ends)) == data[::-1]
        assert [one.result() for one in sent] == [None, None]


def test_one_direction_ends_and_the_other_goes_on(ends: Ends) -> None:
    client, server = ends
    send_all(client, b"question")
    assert read_all(server) == b"question"
    server.sendall(b"first")
    assert client.recv(100) == b"first"
    send_all(server, b"second")
    assert read_all(client) == b"second"
    until(lambda: not [name for name in ours() if name.endswith("-send")], "the end of the pumps")


def test_who_says_what_the_stream_is_for_is_heard(two: Two, ends: Ends) -> None:
    ends[0].sendall(b"x")
    assert ends[1].recv(1) == b"x"
    assert two.hellos == [{"service": "relay"}]


def test_a_secret_of_another_length_is_refused_before_anybody_comes() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        StreamListener(b"abc", echo, LOOPBACK)


def test_only_the_owner_can_connect(two: Two) -> None:
    assert stat.S_IMODE(os.stat(two.here).st_mode) == 0o600


def test_a_small_message_is_not_kept_back(ends: Ends) -> None:
    for number in range(1000):
        for one, other in (ends, ends[::-1]):
            one.sendall(b"%d" % number)
            assert other.recv(100) == b"%d" % number


def test_zmq_sockets_are_carried(two: Two) -> None:
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        router.bind(f"ipc://{two.there}")
        dealer.connect(f"ipc://{two.here}")
        for size in (0, 10, 100_000, 5_000_000):
            data = os.urandom(size)
            dealer.send_multipart([b"head", data])
            name, *frames = router.recv_multipart()
            assert frames == [b"head", data]
            router.send_multipart([name, data])
            assert dealer.recv_multipart() == [data]
    finally:
        context.destroy(linger=0)


def test_zmq_connects_again_when_its_stream_was_broken(two: Two) -> None:
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        dealer.reconnect_ivl = 10
        router.bind(f"ipc://{two.there}")
        dealer.connect(f"ipc://{two.here}")
        dealer.send(b"before")
        assert router.recv_multipart()[1:] == [b"before"]
        two.streams[0].abort()
        until(lambda: dealer.send(b"after") or router.poll(10), "what is sent after that")
        assert router.recv_multipart()[1:] == [b"after"]
    finally:
        context.destroy(linger=0)


def test_listeners_of_multiprocessing_are_carried(two: Two) -> None:
    key = b"key"
    with (
        multiprocessing.connection.Listener(two.there, "AF_UNIX", authkey=key) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        accepted = pool.submit(listener.accept)
        with multiprocessing.connection.Client(two.here, "AF_UNIX", authkey=key) as client:
            with accepted.result() as server:
                for value in ({"a": 1}, bytes(3_000_000)):
                    client.send(value)
                    assert server.recv() == value
                    server.send(value)
                    assert client.recv() == value
            with pytest.raises(EOFError):
                client.recv()


def test_many_connections_are_carried_at_once(two: Two) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(two.there)
        server.listen(100)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(HANDSHAKES_AT_ONCE + 6)]
        for number, client in enumerate(clients):
            client.connect(two.here)
            client.sendall(b"%d" % number)
        for other in [server.accept()[0] for _ in clients]:
            with other:
                other.sendall(b"you are " + other.recv(100))
        for number, client in enumerate(clients):
            assert read_all(client) == b"you are %d" % number
            client.close()


# --- what breaks ----------------------------------------------------------------------------------


def test_a_stream_that_breaks_ends_the_connections_of_both_hosts(two: Two, ends: Ends) -> None:
    two.streams[0].abort()
    for end in ends:
        assert read_all(end) == b""
        until(lambda: has_failed(end), "an error of who goes on writing")  # noqa: B023


def has_failed(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"x")
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def test_a_stream_that_breaks_after_the_end_of_one_direction_ends_the_other(
    two: Two, ends: Ends
) -> None:
    client, server = ends
    client.shutdown(socket.SHUT_WR)
    assert read_all(server) == b""
    assert not is_hung_up(server)
    two.streams[0].abort()
    assert read_all(client) == b""
    until(lambda: is_hung_up(server), "the end of the connection")


def test_a_stream_that_breaks_frees_who_waits_for_one_that_takes_nothing(
    two: Two, ends: Ends
) -> None:
    client, _ = ends
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.sendall, bytes(100_000_000))
        until(lambda: two.streams, "the stream")
        two.streams[0].abort()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sent.result()


def test_who_writes_to_a_process_that_is_gone_is_told(ends: Ends) -> None:
    client, server = ends
    server.close()
    assert read_all(client) == b""
    until(lambda: has_failed(client), "an error of who goes on writing")


def test_all_that_a_process_has_sent_before_it_was_gone_arrives(ends: Ends) -> None:
    client, server = ends
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_until_broken, client)  # which the server does not read
        data = os.urandom(100_000)
        count = 0
        server.settimeout(0.5)  # until no buffer on the way takes any more
        with contextlib.suppress(TimeoutError):
            while True:
                count += server.send(data)
        server.close()
        came = 0
        with contextlib.suppress(ConnectionResetError):  # instead of an end: not all was read
            while part := client.recv(1 << 20):
                came += len(part)
        assert came == count
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        sent.result()


def send_until_broken(sock: socket.socket) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            sock.sendall(bytes(100_000))


@contextlib.contextmanager
def through_a_stream(two: Two) -> Iterator[tuple[SecureStream, socket.socket]]:
    """One end of a connection that is a stream, and one that is a unix socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(two.there)
        listener.listen()
        with contextlib.closing(two.open()) as stream, listener.accept()[0] as server:
            yield stream, server


def test_what_is_not_authentic_frees_who_waits_for_one_that_takes_nothing(two: Two) -> None:
    with through_a_stream(two) as (stream, server), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_until_broken, server)
        full = [server, two.streams[0]._socket]
        until(lambda: not any(takes_more(full) for _ in range(5)), "full buffers")
        stream._socket.sendall(bytes(100))
        sent.result()
        until(lambda: "distsession-forward-send" not in ours(), "the end of the pump")


def takes_more(sockets: list[socket.socket]) -> bool:
    """Whether one of them has room for more, or gets it soon."""
    return bool(select.select([], sockets, [], 0.1)[1])


def test_a_process_that_is_gone_and_has_not_read_all_has_ended_all_the_same(two: Two) -> None:
    with through_a_stream(two) as (stream, server):
        stream.send(b"is not read")
        select.select([server], [], [])
        server.sendall(b"last")
        server.close()
        assert stream.receive() == b"last"
        assert stream.receive() == b""


def test_ends_that_cross_are_the_end(two: Two, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    both, end = threading.Barrier(2), SecureStream.end

    def end_and_wait(stream: SecureStream) -> None:
        end(stream)
        both.wait(60)
        time.sleep(0.1)  # the other's has come by now

    monkeypatch.setattr(SecureStream, "end", end_and_wait)
    for each in ends:
        each.shutdown(socket.SHUT_WR)
    for each in ends:
        assert read_all(each) == b""
        until(lambda: is_hung_up(each), "the end of the connection")  # noqa: B023


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other end has closed it altogether, and not only one direction."""
    poller = select.poll()
    poller.register(sock, 0)
    return bool(poller.poll(0))


def test_a_process_that_is_killed_ends_the_connection(two: Two) -> None:
    code = f"import socket; s = socket.socket(1); s.connect({two.here!r}); s.send(b'x'); s.recv(1)"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(two.there)
        server.listen()
        process = subprocess.Popen([sys.executable, "-c", code])
        with server.accept()[0] as other:
            other.settimeout(60)
            assert other.recv(1) == b"x"
            process.kill()
            process.wait()
            assert other.recv(1) == b""


def test_nobody_behind_a_service_is_the_end_of_the_connection(two: Two) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(two.here)
        assert read_all(client) == b""


def test_no_stream_for_a_connection_is_its_end_and_the_next_may_have_one(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: str) -> SecureStream:
        raise ConnectionRefusedError("not now")

    path = two.here + "2"
    with contextlib.closing(UnixForwarder(path, fail, "link")) as forwarder:
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                assert client.recv(1) == b""
        assert "there is no stream for link: not now" in caplog.text
        assert "Traceback" not in caplog.text
        forwarder._open_stream = two.open
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(two.there)
            server.listen()
            client.connect(path)
            server.accept()[0].close()
            assert client.recv(1) == b""


@pytest.mark.parametrize("which", ["forwarder", "listener"])
def test_closing_one_of_them_breaks_all_it_carries(two: Two, ends: Ends, which: str) -> None:
    client, server = ends
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(client.sendall, bytes(100_000_000))  # more than anybody has room for
        assert server.recv(1) == b"\0"
        getattr(two, which).close()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sent.result()
    read_all(server)
    getattr(two, which).close()


def test_closing_does_not_wait_for_who_has_connected_and_says_nothing(two: Two) -> None:
    with two.dial() as one, two.dial() as other, two.dial():
        for each in (one, other):
            each.sendall(b"D")  # the third says nothing at all
        until(lambda: len(two.listener._handshakes) == 2, "both handshakes")
        two.listener.close()
        assert "distsession-streams" not in ours()
        with pytest.raises(ConnectionRefusedError):
            two.dial()


def test_a_stream_that_comes_while_all_is_closed_is_closed_too(two: Two) -> None:
    is_asked, may_open = threading.Event(), threading.Event()

    def open_late(service: str) -> SecureStream:
        is_asked.set()
        assert may_open.wait(60)
        return two.open(service)

    with socket.socket(socket.AF_UNIX) as server, ThreadPoolExecutor(1) as pool:
        server.bind(two.there)
        server.listen()
        forwarder = UnixForwarder(two.here + "2", open_late, "late")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(two.here + "2")
            is_asked.wait(60)
            closed = pool.submit(forwarder.close)
            until(lambda: forwarder._is_closed, "the close")
            may_open.set()
            closed.result()
            assert "distsession-forward-late" not in ours()


def test_a_socket_that_is_there_already_is_left_alone(two: Two) -> None:
    before = os.stat(two.here).st_ino
    with pytest.raises(OSError, match="in use"):
        UnixForwarder(two.here, two.open, "relay")
    assert os.stat(two.here).st_ino == before


def test_a_socket_is_gone_when_it_is_closed_and_only_that_one(two: Two) -> None:
    two.forwarder.close()
    assert not os.path.exists(two.here)
    Path(two.here).touch()
    two.forwarder.close()
    assert os.path.exists(two.here)


def test_a_mistake_of_who_takes_streams_ends_that_stream_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def take(stream: SecureStream, hello: dict[str, str]) -> None:
        if hello["service"] == "bad":
            raise KeyError("a mistake")
        stream.send(b"good")

    with contextlib.closing(StreamListener(SECRET, take, LOOPBACK)) as listener:
        for service in ("bad", "good"):
            raw = socket.create_connection((LOOPBACK, listener.port))
            with contextlib.closing(connect(raw, SECRET, {"service": service})) as stream:
                if service == "good":
                    assert stream.receive() == b"good"
                with pytest.raises(ConnectionError):
                    stream.receive()
        assert listener.dropped == 0
    assert "a mistake" in caplog.text


def test_connections_are_taken_again_when_descriptors_are_free_again(
    two: Two, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with two.dial() as idle:
        idle.sendall(b"x")
        until(lambda: two.listener._handshakes, "the handshake")
        waiting, held = socket.socket(), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), hard))
        try:
            with contextlib.suppress(OSError):  # until there is none left: numbers may be free
                while True:
                    held.append(os.dup(waiting.fileno()))
            waiting.connect((LOOPBACK, two.listener.port))
            until(lambda: "no connection can be taken" in caplog.text, "a warning")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        connect(waiting, SECRET, {"service": "x"}).close()


# --- strangers ------------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Counting(StreamListener):
    """Tells how many threads and handshakes there have been at once."""

    most = 0

    def _admit(self, connection: socket.socket) -> None:
        super()._admit(connection)
        self.most = max(self.most, len(self._threads))


def echo(stream: SecureStream, hello: dict[str, str]) -> None:
    while data := stream.receive():
        stream.send(bytes(data))
    stream.end()


def still_serves(listener: StreamListener) -> bool:
    raw = socket.create_connection((LOOPBACK, listener.port))
    with contextlib.closing(connect(raw, SECRET, {"service": "echo"})) as stream:
        stream.send(b"are you there")
        return bool(stream.receive() == b"are you there")


def garbage(rng: random.Random, number: int) -> bytes:
    """What a stranger could say, from nothing at all to all but the secret."""
    key = secure_stream.X25519PrivateKey.generate().public_key().public_bytes_raw()
    made = secure_stream._GREETING.pack(b"DSESS-C", 1, rng.randbytes(32), key)
    head = secure_stream._HEAD.pack(
        rng.choice([0, 1, 2, 3, 255]), rng.choice([0, 9, 1024, 2**32 - 1])
    )
    kinds: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: rng.randbytes(rng.randrange(300)),
        lambda: made[: rng.randrange(len(made))],
        lambda: made[:-32] + bytes(32),
        lambda: made + head + rng.randbytes(rng.randrange(2000)),
        lambda: b"GET / HTTP/1.1\r\n\r\n" * 100,
    ]
    return kinds[number % len(kinds)]()


def test_ten_thousand_strangers_get_nowhere_and_members_are_served() -> None:
    rng = random.Random(1)
    heard: list[dict[str, str]] = []

    def take(stream: SecureStream, hello: dict[str, str]) -> None:
        heard.append(hello)
        echo(stream, hello)

    with contextlib.closing(Counting(SECRET, take, LOOPBACK)) as listener:
        assert still_serves(listener)
        before = resident_bytes()
        for number in range(10_000):
            with (
                socket.create_connection((LOOPBACK, listener.port)) as raw,
                contextlib.suppress(ConnectionError),
            ):
                raw.sendall(garbage(rng, number))
                if number % 1000 == 0:
                    assert still_serves(listener)
        until(lambda: listener.dropped == 10_000, "the end of the last of them")
        assert still_serves(listener)
        assert len(heard) == 12
        assert listener.most <= HANDSHAKES_AT_ONCE + 2  # those that are let in
        assert resident_bytes() - before < 50 << 20


def test_strangers_who_are_silent_hold_nobody_up() -> None:
    with contextlib.closing(StreamListener(SECRET, echo, LOOPBACK)) as listener:
        silent = [
            socket.create_connection((LOOPBACK, listener.port))
            for _ in range(3 * HANDSHAKES_AT_ONCE)
        ]
        assert still_serves(listener)
        for one in silent:
            one.close()


def test_handshakes_that_do_not_end_are_so_many_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def accept_late(sock: socket.socket, secret: bytes) -> tuple[SecureStream, dict[str, str]]:
        may_end.wait()
        return secure_stream.accept(sock, secret)

    monkeypatch.setattr(forward, "accept", accept_late)
    with contextlib.closing(StreamListener(SECRET, echo, LOOPBACK)) as listener:
        silent = [
            socket.create_connection((LOOPBACK, listener.port))
            for _ in range(HANDSHAKES_AT_ONCE + 6)
        ]
        for one in silent:
            one.sendall(b"D")
        until(lambda: len(listener._threads) >= HANDSHAKES_AT_ONCE, "the handshakes")
        time.sleep(0.2)
        assert len(listener._threads) == HANDSHAKES_AT_ONCE
        for one in silent:
            one.close()
        may_end.set()
        assert still_serves(listener)


def malformed(rng: random.Random) -> bytes:
    """A frame that no other end makes: of any kind, of any length, of any bytes."""
    length = rng.choice([0, 1, 16, rng.randrange(200)])
    said = rng.choice([length, length, length, 2**32 - 1, 1 << 20])
    return secure_stream._HEAD.pack(rng.randrange(256), said) + rng.randbytes(length + 16)


def test_a_hundred_thousand_frames_that_are_none_end_their_own_streams_only() -> None:
    rng = random.Random(2)
    with contextlib.closing(StreamListener(SECRET, echo, LOOPBACK)) as listener:
        raw = socket.create_connection((LOOPBACK, listener.port))
        with contextlib.closing(connect(raw, SECRET, {"service": "echo"})) as good:
            before = resident_bytes()
            for number in range(500):
                raw = socket.create_connection((LOOPBACK, listener.port))
                if number % 2:
                    connect(raw, SECRET, {"service": "echo"})
                with raw, contextlib.suppress(ConnectionError):
                    for _ in range(20):
                        raw.sendall(b"".join(malformed(rng) for _ in range(10)))
                good.send(b"still here")
                assert good.receive() == b"still here"
            until(lambda: listener.dropped == 250, "the end of the last stranger")
            assert still_serves(listener)
            assert resident_bytes() - before < 50 << 20


def test_each_wrong_frame_of_a_member_is_the_end_of_its_stream() -> None:
    rng = random.Random(3)
    ended: list[OSError] = []

    def take(stream: SecureStream, hello: dict[str, str]) -> None:
        try:
            echo(stream, hello)
        except ConnectionError as error:
            ended.append(error)

    with contextlib.closing(StreamListener(SECRET, take, LOOPBACK)) as listener:
        for _ in range(300):
            raw = socket.create_connection((LOOPBACK, listener.port))
            with contextlib.closing(connect(raw, SECRET, {"service": "echo"})) as stream:
                raw.sendall(malformed(rng))
                raw.shutdown(socket.SHUT_WR)
                with pytest.raises(ConnectionError):
                    stream.receive()
        until(lambda: len(ended) == 300, "the end of all of them")
        assert listener.dropped == 0


def test_who_is_connected_goes_on_where_nobody_else_is_taken(two: Two, ends: Ends) -> None:
    client, other = ends
    two.forwarder.stop_listening()
    two.forwarder.stop_listening()
    assert not os.path.exists(two.here)
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(OSError, match="No such file"):
        late.connect(two.here)
    another = UnixForwarder(two.here, two.open, "relay")  # that of the next owner
    two.forwarder.close()
    assert os.path.exists(two.here)
    another.close()
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(OSError, match="No such file"):
        late.connect(two.here)
    assert read_all(client) == b""
    del other


def test_what_is_under_way_still_arrives_when_nobody_else_is_taken(two: Two, ends: Ends) -> None:
    client, other = ends
    two.forwarder.stop_listening()
    send_all(client, b"the last word")
    assert read_all(other) == b"the last word"
    send_all(other, b"heard")
    assert read_all(client) == b"heard"


def test_who_connects_to_a_door_is_handed_over() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(connection.recv(100).upper())

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/door"
        with contextlib.closing(UnixListener(path, answer)):
            assert os.stat(path).st_mode & 0o777 == 0o600
            for _ in range(2):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
                    client.sendall(b"hello")
                    assert read_all(client) == b"HELLO"
