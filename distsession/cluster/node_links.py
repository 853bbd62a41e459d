"""The kernel's end of the links to the relays of all nodes but its own.

Messages leave from whichever thread makes them, under a lock, and one thread receives. None of them
waits for a relay: what the system does not take at once is sent by the thread that receives, when
there is room. A Ctrl-C waits meanwhile, since what is half sent would end a stream.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsession.cluster.interrupts import interrupts_held
from distsession.protocol import message_stream
from distsession.protocol import node_link as link
from distsession.protocol.message_stream import MessageStream

__all__ = ["NodeLinks"]

log = logging.getLogger(__name__)


BACKLOG = 1024
SENT_POLL_S = 0.005
"""Seconds between two looks at whether all has been sent."""


@dataclass
class _Flow:
    """Messages for one socket of a rank.

    Attributes:
        under_way: How many were sent and not taken.
        held: What is sent when there is room: to which node, and what.
    """

    under_way: int = 0
    held: deque[tuple[int, list[Any]]] = field(default_factory=deque)


@dataclass(eq=False)
class _Relay:
    """A relay that has connected.

    Attributes:
        stream: To it.
        node: Which it is of; None until it has said so.
        watched: What the system is asked of its descriptor.
    """

    stream: MessageStream
    node: int | None = None
    watched: int = select.EPOLLIN


class NodeLinks:
    """Sends to ranks through the relays of their nodes, and receives what these forward.

    Args:
        path: Of the socket at which the relays connect; it must not be there yet.
        on_hello: Called, by the thread that receives, with a node and by how many nanoseconds its
            clock is behind at most; gives what its board needs.
        on_board: Called, by the same, with a node, the same of its clock, and what has changed on
            its board.

    Attributes:
        descriptor: Is readable when there is something to do for :meth:`receive`.
        sent: Messages with requests and control that went to each node.
    """

    def __init__(
        self,
        path: str,
        on_hello: Callable[[int, int], list[bytes]] = lambda node, behind: [],
        on_board: Callable[[int, int, list[bytes]], object] = lambda node, behind, frames: None,
    ):
        self._on_hello, self._on_board = on_hello, on_board
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()
        self._lock = threading.Lock()
        self._arriving: dict[int, socket.socket] = {}
        """Those that have not said yet how messages travel."""
        self._connected: dict[int, _Relay] = {}
        self._relays: dict[int, _Relay] = {}
        self._flows: dict[bytes, _Flow] = {}
        self._shown: defaultdict[int, int] = defaultdict(int)
        self.sent: defaultdict[int, int] = defaultdict(int)
        self._heard_at: dict[int, float] = {}
        self._is_closed = False

    # --- sending ----------------------------------------------------------------------------------

    def send(self, node: int, kind: bytes, names: Sequence[bytes], frames: list[Any]) -> None:
        """Send the same to some ranks of a node, once; see :meth:`send_each`."""
        self.send_each(kind, [(node, names, frames)])

    def send_each(
        self, kind: bytes, messages: Iterable[tuple[int, Sequence[bytes], list[Any]]]
    ) -> None:
        """Send some messages, without handling answers in between: with many nodes that is slow.

        Args:
            kind: To which sockets of ranks.
            messages: Of each its node, the names of the processes of its ranks, and what they all
                get. Those that take nothing get it later.
        """
        with interrupts_held(), self._lock:
            for node, names, frames in messages:
                ready = []
                for name in names:
                    flow = self._flows.setdefault(link.key_of(kind, name), _Flow())
                    if flow.held or flow.under_way >= link.WINDOW:
                        flow.held.append((node, frames))
                    else:
                        ready.append(name)
                if ready:
                    self._post(node, kind, ready, frames)

    def _post(self, node: int, kind: bytes, names: Sequence[bytes], frames: list[Any]) -> None:
        self._to_relay(node, [kind, link.join_names(names), *frames])
        self.sent[node] += 1
        for name in names:
            self._flows[link.key_of(kind, name)].under_way += 1

    def _to_relay(self, node: int, frames: list[Any]) -> None:
        relay = self._relays.get(node)
        if relay is None:
            log.debug("the relay of node %d is gone: a message for its ranks is dropped", node)
        else:
            self._send(relay, frames)

    def _send(self, relay: _Relay, frames: list[Any]) -> None:
        """Send to a relay; that it is gone is told elsewhere."""
        relay.stream.post(frames)
        self._flush(relay)

    def _flush(self, relay: _Relay) -> None:
        is_done = True
        with contextlib.suppress(OSError):  # the thread that receives sees its end
            is_done = relay.stream.flush()
        wanted = select.EPOLLIN if is_done else select.EPOLLIN | select.EPOLLOUT
        if wanted != relay.watched:
            relay.watched = wanted
            self._epoll.modify(relay.stream.fileno(), wanted)

    def write_words(self, nodes: Iterable[int], frames: list[bytes]) -> None:
        """Have words written on the boards of some nodes."""
        with interrupts_held(), self._lock:
            for node in nodes:
                self._to_relay(node, [link.WORDS, *frames])

    @property
    def nodes(self) -> list[int]:
        """Those whose relays have connected."""
        return list(self._relays)

    def silent_s(self, node: int) -> float:
        """Seconds since something has come from the relay of a node; 0 if it has not connected."""
        heard_at = self._heard_at.get(node)
        return 0.0 if heard_at is None else time.monotonic() - heard_at

    def forget(self, node: int, name: bytes) -> None:
        """A rank is gone: what waits for it is dropped."""
        with interrupts_held(), self._lock:
            flows = [
                self._flows.pop(link.key_of(kind, name), None)
                for kind in (link.REQUEST, link.CONTROL)
            ]
            if any(flows):  # or nothing was ever sent to it
                self._to_relay(node, [link.FORGET, name])

    # --- receiving: one thread --------------------------------------------------------------------

    def receive(self) -> Iterator[list[bytes]]:
        """The frames of each message that has come from ranks; more may be there afterwards."""
        for descriptor, events in self._epoll.poll(0):
            if self._is_closed:
                return
            if descriptor in self._connected:
                yield from self._serve(self._connected[descriptor], events)
            elif descriptor in self._arriving:
                self._admit(descriptor)
            else:
                self._accept()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, _ = self._listener.accept()
            self._arriving[connection.fileno()] = connection
            self._epoll.register(connection, select.EPOLLIN)

    def _admit(self, descriptor: int) -> None:
        """Take in how messages travel from now on."""
        connection = self._arriving.pop(descriptor)
        self._epoll.unregister(connection)
        try:
            stream = message_stream.accept(connection, socket.MSG_DONTWAIT)
            if stream.fileno() == descriptor:
                message_stream.accept_plain(connection)
        except OSError as error:
            log.warning("a relay is refused: %s", error)
            connection.close()
            return
        self._connected[stream.fileno()] = _Relay(stream)
        self._epoll.register(stream, select.EPOLLIN)

    def _serve(self, relay: _Relay, events: int) -> Iterator[list[bytes]]:
        """Send what was left, and receive."""
        if events & select.EPOLLOUT:
            with self._lock:
                self._flush(relay)
        for message in relay.stream.receive():
            kind, *frames = message or [b""]
            if relay.node is not None:
                self._heard_at[relay.node] = time.monotonic()
            if kind in (link.REPLY, link.OUTPUT):
                yield frames
                if kind == link.OUTPUT and relay.node is not None:
                    self._shown[relay.node] += 1
            else:
                with self._lock:
                    self._handle(relay, kind, frames)
        if relay.stream.is_over:
            self._drop(relay)

    def _drop(self, relay: _Relay) -> None:
        """A relay is gone, which is told elsewhere."""
        with self._lock:
            if self._connected.pop(relay.stream.fileno(), None) is None:
                return
            if relay.node is not None and self._relays.get(relay.node) is relay:
                del self._relays[relay.node]
            self._epoll.unregister(relay.stream)
            relay.stream.close()

    def _handle(self, relay: _Relay, kind: bytes, frames: list[bytes]) -> None:
        try:
            if kind == link.HELLO:
                number, clock = map(link.unpack_count, frames)
                self._relays[number], relay.node = relay, number
                self._heard_at[number] = time.monotonic()
                words = self._on_hello(number, time.monotonic_ns() - clock)
                self._send(relay, [link.WELCOME, *words])
            elif relay.node is None:
                raise ValueError("it comes before a hello")
            elif kind == link.BOARD:
                at, *changes = frames
                behind = time.monotonic_ns() - link.unpack_count(at)
                self._on_board(relay.node, behind, changes)
            elif kind == link.TAKEN:
                key, count = frames
                self._note_taken(key, link.unpack_count(count))
            else:
                raise ValueError(f"of an unknown kind: {kind[:10]!r}")
        except (ValueError, KeyError) as error:
            log.warning("dropped a message of a relay that cannot be read: %s", error)

    def _note_taken(self, key: bytes, count: int) -> None:
        flow = self._flows.get(key)
        if flow is None:  # of a rank that is gone
            return
        flow.under_way -= count
        kind, name = key[:1], key[1:]
        while flow.held and flow.under_way < link.WINDOW:
            node, frames = flow.held.popleft()
            self._post(node, kind, [name], frames)

    def grant(self) -> None:
        """There is room for more output: let the relays send as much as was taken in."""
        due = [node for node, count in self._shown.items() if count >= link.OUTPUT_WINDOW // 2]
        if not due:
            return
        with self._lock:
            for node in due:
                self._to_relay(node, [link.CREDIT, link.pack_count(self._shown.pop(node))])

    def wait_sent(self, timeout: float) -> bool:
        """Wait until nothing is held back any more; another thread receives meanwhile."""
        deadline = time.monotonic() + timeout
        while self._is_holding():
            if time.monotonic() > deadline:
                return False
            time.sleep(SENT_POLL_S)
        return True

    def _is_holding(self) -> bool:
        with self._lock:
            return any(flow.held for flow in self._flows.values())

    def close(self, linger_ms: int) -> None:
        """Close all links; nothing is sent or received any more. Harmless when repeated.

        Args:
            linger_ms: How long what has been sent may take to leave this process.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            deadline = time.monotonic() + linger_ms / 1000
            for relay in self._connected.values():
                _leave(relay.stream, deadline)
            for connection in (*self._arriving.values(), self._listener):
                connection.close()
            self._relays.clear()
            self._epoll.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _leave(stream: MessageStream, deadline: float) -> None:
    """Close a stream, when all has been sent or the time is up."""
    with contextlib.suppress(OSError):
        while not stream.flush() and (left := deadline - time.monotonic()) > 0:
            stream.wait(left)
    stream.close()
