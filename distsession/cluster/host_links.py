"""The kernel's end of the links to the agents of other hosts: authenticated, encrypted, watched."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distsession.protocol.host_link import (
    MESSAGE_MAX,
    PING_S,
    LinkKeys,
    decode,
    encode,
    tcp_place,
)
from distsession.protocol.link_connections import LinkConnections

__all__ = ["Dial", "HostLinks", "LinkedHost"]

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 2.0
"""Seconds that an agent which listens has to answer at one of its addresses."""
SEND_TIMEOUT_S = 1.0
"""Seconds that the last messages have to leave, once the links are closed."""


@dataclass
class LinkedHost:
    """An agent that has come.

    Attributes:
        name: Of its host.
        place: Which of the hosts it is, where its launcher numbers them.
        pid: Of the agent.
        address: Of the kernel's, by which it has come; empty where the kernel has come to it.
        heard: When it last said something, by the monotonic clock.
        offset: By how many seconds its clock is ahead of the one here.
        round_trip: Seconds of the fastest message there and back.
        replies: What it has answered last, by the kind of the message.
        is_given_up: Another one takes its place.
    """

    identity: bytes
    name: str
    place: int | None
    pid: int
    address: str
    heard: float = field(default_factory=time.monotonic)
    offset: float = 0.0
    round_trip: float = float("inf")
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_given_up: bool = False


class _OneKey:
    """Lets in who has the session's key, for zmq's authenticator."""

    def __init__(self, public: str):
        self._key = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class HostLinks:
    """Listens for agents, and talks to them in a thread of its own.

    Args:
        addresses: Of this host, in the order in which agents try them.
        patience_s: Seconds of silence of this process after which they end.
        bind: The address to listen at. Default: all.
        expected: How many agents there will be.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        patience_s: float = 15.0,
        bind: str = "*",
        expected: int = 1,
    ):
        self.on_open: Callable[[LinkedHost, int], None] = lambda host, port: None
        """Called, by the thread, where a host wants a connection to a port of its own."""
        self.on_notice: Callable[[LinkedHost, str], None] = lambda host, what: None
        """Called, by the thread, where a host's process has been told to end, and by what."""
        kernel_public, self._secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self._context = zmq.Context()  # no other has our authenticator
        self._auth = ThreadAuthenticator(self._context, log=logging.getLogger(f"{__name__}.auth"))
        self._auth.start()
        self._auth.configure_curve_callback("*", _OneKey(public.decode()))
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = kernel_public, self._secret
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_MAX)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.IPV6, 1)  # as well
        self._connections = LinkConnections(self._context, self._socket, expected)
        port = self._connections.bind(f"tcp://{bind}")
        self.keys = LinkKeys(
            addresses=tuple(addresses),
            port=port,
            kernel_public=kernel_public.decode(),
            public=public.decode(),
            secret=secret.decode(),
            reach_key=os.urandom(32).hex(),
            stream_key=os.urandom(32).hex(),
            tunnel=f"/tmp/distsession-{os.urandom(8).hex()}",
            patience_s=patience_s,
        )
        self.hosts: dict[bytes, LinkedHost] = {}
        """Those that have come, by their identities."""
        self.dropped = 0
        """Messages that could not be read."""
        self._changed = threading.Condition()
        self._orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake_out: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._wake_in: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self._is_closed = False
        self._pinged_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="distsession-hosts", daemon=True)
        self._thread.start()

    # --- for any thread ---------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def connect(self, address: str, port: int) -> None:
        """Go to an agent that listens."""
        self._order(lambda: self._socket.connect(tcp_place(address, port)))

    def disconnect(self, address: str, port: int) -> None:
        """Go there no longer."""
        self._order(lambda: self._socket.disconnect(tcp_place(address, port)))

    def send(self, host: LinkedHost, kind: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a message, which is lost if the agent has gone."""
        data = encode(kind, body)
        self._order(lambda: self._socket.send_multipart([host.identity, data]))

    def silent_s(self, host: LinkedHost) -> float:
        """For how many seconds nothing has come from an agent, though it was asked meanwhile."""
        # While this process is stopped, or a call of the user's holds the interpreter's lock, it
        # asks nobody.
        asked_until = min(time.monotonic(), self._pinged_at + PING_S)
        return max(0.0, asked_until - host.heard)

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until something holds that follows from what comes from agents."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def wait_for_news(self, timeout: float) -> None:
        """Wait until anything has come from any agent."""
        with self._changed:
            self._changed.wait(timeout)

    def snapshot(self, hosts: Sequence[LinkedHost]) -> tuple[LinkedHost, ...]:
        """Agents as they are at one moment."""
        with self._changed:
            return tuple(replace(host, replies=dict(host.replies)) for host in hosts)

    def close(self) -> None:
        """End all agents, and the links. Harmless when repeated."""
        if self._is_closed:
            return
        for host in list(self.hosts.values()):
            self.send(host, "end")
        self._is_closed = True
        self._order(lambda: None)
        self._thread.join()
        self._auth.stop()
        self._wake_out.close(linger=0)
        self._context.destroy(linger=round(1000 * SEND_TIMEOUT_S))

    def _order(self, what: Callable[[], object]) -> None:
        """Have the thread do something, since it alone may use the socket."""
        self._orders.put(what)
        with self._wake_lock:
            self._wake_out.send(b"")

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        poller.register(self._connections.events, zmq.POLLIN)
        while True:
            wait_s = self._pinged_at + PING_S - time.monotonic()
            ready = dict(poller.poll(max(0, round(1000 * wait_s))))
            if self._wake_in in ready:
                self._wake_in.recv()
                with contextlib.suppress(zmq.ZMQError):  # an address that is none; an agent gone
                    self._orders.get()()
            if self._socket in ready:
                self._receive()
            self._connections.look()
            if time.monotonic() >= self._pinged_at + PING_S:
                self._ping_all()
            if self._is_closed and self._orders.empty():
                self._wake_in.close(linger=0)
                self._connections.close()
                return

    def _ping_all(self) -> None:
        late_s = time.monotonic() - self._pinged_at - PING_S
        for identity, host in self.hosts.items():
            # It was not asked for that long: this process was stopped, or a call of the user's has
            # held the interpreter's lock.
            host.heard += late_s
            # One that was cut off never got to know that it was given up, and comes back.
            self._ping(identity, "end" if host.is_given_up else "ping")
        self._pinged_at = time.monotonic()

    def _ping(self, identity: bytes, kind: str = "ping") -> None:
        body = {"sent": time.time()} if kind == "ping" else {}
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, encode(kind, body)], zmq.NOBLOCK)

    def _receive(self) -> None:
        first, *frames = self._socket.recv_multipart(copy=False)
        self._connections.note(first)
        identity = first.bytes
        with self._changed:
            try:
                kind, body = decode(b"".join(frame.bytes for frame in frames))
                self._handle(identity, kind, body)
            except (ValueError, KeyError, TypeError) as error:
                self.dropped += 1
                log.warning("dropped a message that no agent sends: %s", error)
            self._changed.notify_all()

    def _handle(self, identity: bytes, kind: str, body: dict[str, Any]) -> None:
        if kind == "hello":
            self.hosts[identity] = LinkedHost(
                identity=identity,
                name=str(body["name"]),
                place=None if body["place"] is None else int(body["place"]),
                pid=int(body["pid"]),
                address=str(body["address"]),
            )
            self._ping(identity)  # by which the agent knows that it has found the right one
            return
        host = self.hosts[identity]
        host.heard = time.monotonic()
        if kind == "pong":
            self._note_clock(host, float(body["sent"]), float(body["time"]))
        elif kind == "notice":
            self.on_notice(host, str(body["signal"]))
        elif kind == "open":
            self.on_open(host, int(body["port"]))
        else:
            host.replies[kind] = body

    def _note_clock(self, host: LinkedHost, sent: float, theirs: float) -> None:
        """The fastest round trip tells the most."""
        now = time.time()
        if now - sent < host.round_trip:
            host.round_trip = now - sent
            host.offset = theirs - (sent + now) / 2


@dataclass
class Dial:
    """Goes to an agent that listens, by one of its addresses at a time.

    By two at once it would have two ways here, and what it sends on the slower one were lost.
    """

    links: HostLinks
    name: str
    addresses: tuple[str, ...]
    port: int
    tried: int = 0
    since: float = 0.0

    @property
    def address(self) -> str:
        """The one that was tried last."""
        return self.addresses[(self.tried - 1) % len(self.addresses)] if self.tried else ""

    def go_on(self) -> None:
        """Try the next address, if the one before has had its time."""
        if not self.addresses or time.monotonic() - self.since < DIAL_TIMEOUT_S:
            return
        if self.tried and len(self.addresses) == 1:  # zmq goes on by itself
            return
        if self.tried:
            self.links.disconnect(self.addresses[(self.tried - 1) % len(self.addresses)], self.port)
        self.links.connect(self.addresses[self.tried % len(self.addresses)], self.port)
        self.tried += 1
        self.since = time.monotonic()
