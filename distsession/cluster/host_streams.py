"""The streams between the session's folder here and hosts: carried, called for, and cut."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distsession.cluster.host_links import HostLinks, LinkedHost
from distsession.engine import store_server
from distsession.protocol import unix_socket
from distsession.protocol.forward import StreamListener, pump
from distsession.protocol.host_link import ATTACH, MESSAGES, SOCKETS, STORE, TCP_STORE
from distsession.protocol.message_stream import hand_over
from distsession.protocol.secure_stream import SecureStream
from distsession.protocol.wire import socket_path

__all__ = ["HostStreams"]

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 5.0
"""Seconds that a connection to a host may take."""
CALL_TIMEOUT_S = 10.0
"""Seconds that a host has to bring a stream that it was asked for."""
LOST_LOOK_S = 0.25
"""Seconds between two looks for hosts that are silent."""
KNOCK_AFTER_S = 0.55
"""Seconds of silence after which a host is asked by a new connection at each look; a little more
than between two pings. Those that there are wait ever longer before they try again, also when the
network has come back."""
KNOCK_LOOK_S = 0.1
"""Seconds between two looks while some host is asked so."""
KNOCKS = 20
"""How many of these connections wait for an answer at most, the youngest: there is always one that
has just been tried, and an answer may take two seconds."""


@dataclass(frozen=True)
class _Call:
    """A connection for which a host is to bring a stream."""

    connection: socket.socket
    is_over: threading.Event = field(default_factory=threading.Event)


class HostStreams:
    """Takes what hosts bring, and connects it to the sockets of the session.

    Args:
        links: To the hosts.
        folder: The session's.
        is_lost: Says of a host whether it counts as gone.
        on_lost: Called for one that does, before its streams are closed.
        address_of: Gives where a host is that this process has gone to.
        look: Called at each look for hosts that are silent.

    Attributes:
        tcp_store_port: Of torch's TCP store, on this host.
    """

    def __init__(
        self,
        links: HostLinks,
        folder: str,
        is_lost: Callable[[LinkedHost], bool],
        on_lost: Callable[[LinkedHost], None],
        address_of: Callable[[LinkedHost], str],
        look: Callable[[], None],
    ):
        self.tcp_store_port = 0
        self._links, self._folder = links, folder
        self._is_lost, self._on_lost = is_lost, on_lost
        self._address_of, self._look = address_of, look
        self._streams: dict[bytes, set[SecureStream]] = {}
        self._calls: dict[str, _Call] = {}
        self._lock = threading.Lock()
        self._knocks: dict[bytes, list[socket.socket]] = {}
        self._knocking_since: dict[bytes, float] = {}
        self._answered: dict[bytes, float] = {}
        self._listener = StreamListener(bytes.fromhex(links.keys.stream_key), self._carry)
        links.on_open = self._go_to
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="distsession-host-watch", daemon=True).start()

    @property
    def port(self) -> int:
        """Where hosts bring their streams."""
        return self._listener.port

    def call(self, link: LinkedHost, connection: socket.socket) -> None:
        """Have a host connect its agent to somebody who wants to attach, until one of both ends.

        Args:
            link: To the host.
            connection: Of who has connected; it is closed, also if the host does not come.
        """
        token, call = os.urandom(8).hex(), _Call(connection)
        with self._lock:
            self._calls[token] = call
        self._links.send(link, "attach", {"token": token})
        call.is_over.wait(CALL_TIMEOUT_S)
        with self._lock:
            is_late = self._calls.pop(token, None) is not None
        if is_late:
            log.warning("the host %s has not answered somebody who wants to attach", link.name)
            connection.close()
        else:
            call.is_over.wait()

    def unheard_s(self, link: LinkedHost) -> float | None:
        """Seconds since the system of a host has answered; None where that is not known."""
        with self._lock:
            streams = list(self._streams.get(link.identity, ()))
        known = [seconds for each in streams if (seconds := each.unheard_s()) is not None]
        if (answered := self._answered.get(link.identity)) is not None:
            known.append(time.monotonic() - answered)
        return min(known, default=None)

    def asked_s(self, link: LinkedHost) -> float:
        """For how many seconds a host that is silent has been asked by new connections."""
        since = self._knocking_since.get(link.identity)
        return 0.0 if since is None else time.monotonic() - since

    def cut(self, link: LinkedHost) -> None:
        """Close all that a host has brought."""
        with self._lock:
            streams = self._streams.pop(link.identity, set())
        for stream in streams:
            stream.abort()

    def close(self) -> None:
        """Close all streams, and take no more. Harmless when repeated."""
        self._is_closed.set()
        self._listener.close()

    # --- inside -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Close what comes from hosts that are silent, by which all that waits for them ends."""
        while not self._is_closed.wait(KNOCK_LOOK_S if self._knocks else LOST_LOOK_S):
            self._look()
            for link in list(self._links.hosts.values()):
                if self._is_lost(link) and self._streams.get(link.identity):
                    self._close_knocks(link)
                    if not link.is_given_up:
                        self._on_lost(link)
                    # For good: else it were there again when its network is, without its streams.
                    link.is_given_up = True
                    self.cut(link)
                elif self._links.silent_s(link) > KNOCK_AFTER_S and not link.is_given_up:
                    self._knock(link)
                else:
                    self._close_knocks(link)
        for link in list(self._links.hosts.values()):
            self._close_knocks(link)

    def _knock(self, link: LinkedHost) -> None:
        """See whether the system of a host answers, be it that nobody listens there."""
        knocks = self._knocks.setdefault(link.identity, [])
        self._knocking_since.setdefault(link.identity, time.monotonic())
        for each in knocks[:]:
            poll = select.poll()
            poll.register(each, select.POLLOUT)
            if poll.poll(0):
                error = each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error in (0, errno.ECONNREFUSED):
                    self._answered[link.identity] = time.monotonic()
                knocks.remove(each)
                each.close()
        with self._lock:
            peers = [each.peer for each in self._streams.get(link.identity, ())]
        if not (known := [peer for peer in peers if peer]):
            return
        while len(knocks) >= KNOCKS:
            knocks.pop(0).close()
        made = socket.socket(socket.AF_INET6 if ":" in known[0][0] else socket.AF_INET)
        made.setblocking(False)
        if made.connect_ex(known[0]) == errno.EINPROGRESS:
            knocks.append(made)
        else:  # there is no way to it from here
            made.close()

    def _close_knocks(self, link: LinkedHost) -> None:
        self._knocking_since.pop(link.identity, None)
        for each in self._knocks.pop(link.identity, ()):
            each.close()

    def _go_to(self, link: LinkedHost, port: int) -> None:
        """Connect to a host that cannot connect to this one."""

        def go() -> None:
            try:
                address = self._address_of(link), port
                connection = socket.create_connection(address, DIAL_TIMEOUT_S)
            except OSError as error:
                log.warning("the host %s cannot be reached: %s", link.name, error)
            else:
                connection.settimeout(None)
                self._listener.take(connection)

        threading.Thread(target=go, name="distsession-host-dial", daemon=True).start()

    def _carry(self, stream: SecureStream, hello: Mapping[str, str]) -> None:
        """Connect a stream to what it asks for, until one of both ends."""
        link = self._link_of(hello.get("link", ""))
        if link is None:
            log.debug("a stream of a host's process that was given up is refused")
            return
        with contextlib.ExitStack() as stack:
            try:
                connection = self._connection(hello, stack)
            except (OSError, ValueError) as error:
                log.debug("nobody listens for %s: %s", hello.get("service"), error)
                return
            if hello.get("service") in SOCKETS:  # a few for each host, and not some for each rank
                stream.watch()
            with self._lock:
                self._streams.setdefault(link.identity, set()).add(stream)
            carry = hand_over if hello.get("service") == MESSAGES else pump
            try:
                carry(stream, connection)
            finally:
                with self._lock, contextlib.suppress(KeyError):
                    self._streams[link.identity].discard(stream)

    def _link_of(self, text: str) -> LinkedHost | None:
        """The host that has come by this link; None if it was given up."""
        with contextlib.suppress(ValueError):
            link = self._links.hosts.get(bytes.fromhex(text))
            return None if link is None or link.is_given_up else link
        return None

    def _connection(self, hello: Mapping[str, str], stack: contextlib.ExitStack) -> socket.socket:
        """What a stream is to be connected to."""
        service = hello.get("service", "")
        if service == TCP_STORE:
            return socket.create_connection(("127.0.0.1", self.tcp_store_port))
        if service == ATTACH:
            with self._lock:
                call = self._calls.pop(hello.get("token", ""), None)
            if call is None:
                raise ConnectionRefusedError("nobody has asked for it, or waits for it any more")
            stack.callback(call.is_over.set)
            return call.connection
        if service == STORE:
            path = store_server.socket_path(self._folder)
        elif service in SOCKETS:
            path = socket_path(self._folder, service, int(hello.get("epoch", "1")))
        else:
            raise ConnectionRefusedError(f"there is no {service!r}")
        return unix_socket.connect(path)
