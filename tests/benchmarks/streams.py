"""What an encrypted stream between hosts costs: beside plain TCP, and beside CURVE of zmq.

Both ends are on this machine, each in a process of its own, so the network takes no time and all
of it is the processors'.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import zmq

from distsession.protocol.forward import StreamListener, UnixForwarder, pump
from distsession.protocol.secure_stream import SecureStream, accept, connect
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Arm, Figure, Row, Target, take_turns

BLOCK = 1 << 20
SMALL = 1024
SECRET = bytes(32)
TIMEOUT_S = 60


class Plain:
    """A socket."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._buffer = memoryview(bytearray(BLOCK))
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: memoryview) -> None:
        self.sock.sendall(data)

    def take(self, count: int) -> None:
        while count:
            got = self.sock.recv_into(self._buffer, min(count, BLOCK))
            assert got
            count -= got

    def close(self) -> None:
        self.sock.close()


class Stream:
    """An encrypted stream."""

    def __init__(self, stream: SecureStream):
        self._stream = stream

    def send(self, data: memoryview) -> None:
        self._stream.send(data)

    def take(self, count: int) -> None:
        while count:
            got = len(self._stream.receive())
            assert got
            count -= got

    def close(self) -> None:
        self._stream.close()


class Curve:
    """Messages of zmq, encrypted with CURVE."""

    def __init__(self, context: zmq.Context[Any], sock: zmq.Socket[bytes]):
        self._context, self._socket = context, sock

    def send(self, data: memoryview) -> None:
        self._socket.send(data, copy=len(data) <= SMALL)

    def take(self, count: int) -> None:
        while count:
            count -= len(self._socket.recv(copy=False).buffer)

    def close(self) -> None:
        self._context.destroy(linger=0)


Link = Plain | Stream | Curve


def _curve(keys: list[bytes]) -> tuple[zmq.Context[Any], zmq.Socket[bytes]]:
    context: zmq.Context[Any] = zmq.Context()
    sock = context.socket(zmq.PAIR)
    sock.rcvtimeo = sock.sndtimeo = 1000 * TIMEOUT_S
    sock.curve_publickey, sock.curve_secretkey = keys[:2]
    return context, sock


def _dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), TIMEOUT_S)


def _go_there(kind: str, place: Any, folder: str) -> tuple[Link, Callable[[], None]]:
    """The link of the other process, and what closes all behind it."""
    if kind == "curve":
        port, public, secret, server = place
        context, zmq_socket = _curve([public, secret])
        zmq_socket.curve_serverkey = server
        zmq_socket.connect(f"tcp://127.0.0.1:{port}")
        return Curve(context, zmq_socket), lambda: None
    if kind == "tcp":
        return Plain(_dial(place)), lambda: None
    if kind == "stream":
        return Stream(connect(_dial(place), SECRET, {})), lambda: None
    forwarder = UnixForwarder(
        f"{folder}/far", lambda service: connect(_dial(place), SECRET, {}), "relay"
    )
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"{folder}/far")
    return Plain(sock), forwarder.close


def _far(kind: str, place: Any, folder: str, orders: Connection) -> None:
    """The other process: sends and sends back as it is told."""
    link, close = _go_there(kind, place, folder)
    block, small = memoryview(bytearray(BLOCK)), memoryview(bytearray(SMALL))
    while order := orders.recv():
        what, count = order
        for _ in range(count):
            if what == "send":
                link.send(block)
            else:
                link.take(SMALL)
                link.send(small)
    link.close()
    close()


@contextlib.contextmanager
def _near(kind: str, folder: str) -> Iterator[tuple[Any, Callable[[], Link]]]:
    """Where the other process is to go, and what waits for it."""
    with contextlib.ExitStack() as stack:
        if kind == "curve":
            (server, secret), (public, other) = zmq.curve_keypair(), zmq.curve_keypair()
            context, zmq_socket = _curve([server, secret])
            zmq_socket.curve_server = True
            port = zmq_socket.bind_to_random_port("tcp://127.0.0.1")
            yield (port, public, other, server), lambda: Curve(context, zmq_socket)
        elif kind == "forwarded":
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/near")
            listener.listen()

            def carry(stream: SecureStream, hello: dict[str, str]) -> None:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(f"{folder}/near")
                    pump(stream, sock)

            streams = stack.enter_context(
                contextlib.closing(StreamListener(SECRET, carry, "127.0.0.1"))
            )
            yield streams.port, lambda: Plain(listener.accept()[0])
        else:
            tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = tcp.getsockname()[1]
            if kind == "tcp":
                yield port, lambda: Plain(tcp.accept()[0])
            else:
                yield port, lambda: Stream(accept(tcp.accept()[0], SECRET)[0])


@contextlib.contextmanager
def _link(kind: str) -> Iterator[tuple[Link, Connection]]:
    """A link to another process, and where that gets its orders."""
    orders, theirs = multiprocessing.Pipe()
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        _near(kind, folder) as (place, wait),
    ):
        process = multiprocessing.get_context("spawn").Process(
            target=_far, args=(kind, place, folder, theirs), daemon=True
        )
        process.start()
        with contextlib.closing(wait()) as link:
            yield link, orders
            orders.send(None)
            process.join(TIMEOUT_S)


def _bring(link: Link, orders: Connection, blocks: int) -> list[float]:
    began = time.perf_counter()
    orders.send(("send", blocks))
    link.take(blocks * BLOCK)
    return [1e3 * (time.perf_counter() - began)]


def _round_trips(link: Link, orders: Connection, count: int) -> list[float]:
    orders.send(("send back", count))
    small = memoryview(bytearray(SMALL))
    times = []
    for _ in range(count):
        began = time.perf_counter()
        link.send(small)
        link.take(SMALL)
        times.append(1e6 * (time.perf_counter() - began))
    return times


SUBJECTS = {
    "tcp": "plain TCP",
    "curve": "zmq, CURVE",
    "stream": f"{OURS}, a stream",
    "forwarded": f"{OURS}, unix sockets through a stream",
}


def streams(bench: Bench) -> Iterator[Row]:
    """Bytes in one direction, and small messages there and back."""
    blocks = 64 if bench.quick else 256
    with contextlib.ExitStack() as stack:
        links = {kind: stack.enter_context(_link(kind)) for kind in SUBJECTS}
        for link, orders in links.values():
            _bring(link, orders, blocks)
            _round_trips(link, orders, 100)

        def arms(measure: Callable[..., list[float]], count: int) -> dict[str, Arm]:
            return {
                kind: Arm(subject, functools.partial(measure, *links[kind], count))
                for kind, subject in SUBJECTS.items()
            }

        moved = arms(_bring, blocks)
        take_turns(list(moved.values()), 2 * bench.repeats)
        yield from _beside(f"{blocks} MiB from another process", "ms", moved)
        for kind in ("stream", "forwarded"):
            figure = moved[kind].figure
            assert figure is not None
            rates = tuple(blocks * BLOCK / value / 1e6 for value in figure.values)
            target = Target(1, at_least=True) if kind == "stream" else None
            name = "bytes through one connection"
            yield Row(name, SUBJECTS[kind], Figure(rates), "GB/s", target=target)
        trips = arms(_round_trips, 500)
        take_turns(list(trips.values()), bench.repeats)
        yield from _beside("1 KiB there and back", "us", trips, {"forwarded": Target(500)})


def _beside(
    name: str, unit: str, arms: dict[str, Arm], targets: dict[str, Target] | None = None
) -> Iterator[Row]:
    yield arms["tcp"].row(name, unit)
    for kind in ("curve", "stream", "forwarded"):
        yield arms[kind].row(name, unit, arms["tcp"])
    for kind, target in (targets or {}).items():
        yield arms[kind].row(f"{name}, by itself", unit, target=target)
