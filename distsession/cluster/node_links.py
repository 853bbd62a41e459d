"""The kernel's end of the links to the relays of all nodes but its own.

Messages leave from whichever thread makes them, and one thread receives, on one zmq socket, which
is no thing for two threads at a time. So each touches it under a lock, and nobody waits in it: that
there is something to receive is seen by its descriptor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from distsession.protocol import node_link as link
from distsession.protocol.sockets import POLLIN, receive, send

__all__ = ["NodeLinks"]

log = logging.getLogger(__name__)


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


class NodeLinks:
    """Sends to ranks through the relays of their nodes, and receives what these forward.

    Args:
        context: Of the kernel's sockets.
        address: Where the relays connect.
        wake: Called when a thread that sends has found that there is something to receive.
        on_hello: Called, by the thread that receives, with a node and by how many nanoseconds its
            clock is behind at most; gives what its board needs.
        on_board: Called, by the same, with a node, the same of its clock, and what has changed on
            its board.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        wake: Callable[[], object],
        on_hello: Callable[[int, int], list[bytes]] = lambda node, behind: [],
        on_board: Callable[[int, int, list[bytes]], object] = lambda node, behind, frames: None,
    ):
        self._on_hello, self._on_board = on_hello, on_board
        self._nodes: dict[bytes, int] = {}
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self.descriptor = int(self._socket.FD)
        """Is readable when the state of the socket changes."""
        self._wake = wake
        self._lock = threading.Lock()
        self._relays: dict[int, bytes] = {}
        self._flows: dict[bytes, _Flow] = {}
        self._shown: defaultdict[bytes, int] = defaultdict(int)
        self.sent: defaultdict[int, int] = defaultdict(int)
        """Messages with requests and control that went to each node."""
        self._heard_at: dict[int, float] = {}

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
        with self._lock:
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
            self._wake_if_readable()

    def _post(self, node: int, kind: bytes, names: Sequence[bytes], frames: list[Any]) -> None:
        self._to_relay(node, [kind, link.join_names(names), *frames], link.is_small(frames))
        self.sent[node] += 1
        for name in names:
            self._flows[link.key_of(kind, name)].under_way += 1

    def _to_relay(self, node: int, frames: list[Any], is_small: bool = True) -> None:
        identity = self._relays.get(node)
        if identity is None or not self._try(identity, frames, is_small):
            log.debug("the relay of node %d is gone: a message for its ranks is dropped", node)

    def _try(self, identity: bytes, frames: list[Any], is_small: bool = True) -> bool:
        """Send to a relay; False if it is gone, which is told elsewhere."""
        try:
            send(self._socket, (identity, *frames), copy=is_small)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _wake_if_readable(self) -> None:
        """What the descriptor says of a message that came meanwhile, sending has taken in."""
        if int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
            self._wake()

    def write_words(self, nodes: Iterable[int], frames: list[bytes]) -> None:
        """Have words written on the boards of some nodes."""
        with self._lock:
            if self._socket.closed:
                return
            for node in nodes:
                self._to_relay(node, [link.WORDS, *frames])
            self._wake_if_readable()

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
        with self._lock:
            if self._socket.closed:
                return
            flows = [
                self._flows.pop(link.key_of(kind, name), None)
                for kind in (link.REQUEST, link.CONTROL)
            ]
            if any(flows):  # or nothing was ever sent to it
                self._to_relay(node, [link.FORGET, name])
            self._wake_if_readable()

    # --- receiving: one thread --------------------------------------------------------------------

    def receive(self, at_most: int = 1000) -> Iterator[list[bytes]]:
        """The frames of each message that has come from ranks."""
        for _ in range(at_most):
            with self._lock:
                try:
                    identity, *frames = receive(self._socket)
                except zmq.Again:
                    return
                kind = frames[0] if frames else b""
                if (node := self._nodes.get(identity)) is not None:
                    self._heard_at[node] = time.monotonic()
                if kind not in (link.REPLY, link.OUTPUT):
                    self._handle(identity, kind, frames[1:])
                    continue
            yield frames[1:]
            if kind == link.OUTPUT:
                self._shown[identity] += 1
        self._wake()

    def _handle(self, identity: bytes, kind: bytes, frames: list[bytes]) -> None:
        try:
            if kind == link.HELLO:
                number, clock = map(link.unpack_count, frames)
                self._relays[number], self._nodes[identity] = identity, number
                self._heard_at[number] = time.monotonic()
                words = self._on_hello(number, time.monotonic_ns() - clock)
                self._try(identity, [link.WELCOME, *words])
            elif kind == link.BOARD:
                at, *changes = frames
                behind = time.monotonic_ns() - link.unpack_count(at)
                self._on_board(self._nodes[identity], behind, changes)
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
        due = [key for key, count in self._shown.items() if count >= link.OUTPUT_WINDOW // 2]
        if not due:
            return
        with self._lock:
            for identity in due:
                count = self._shown.pop(identity)
                self._try(identity, [link.CREDIT, link.pack_count(count)])
            self._wake_if_readable()

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
        """Close the socket; nothing is sent or received any more."""
        with self._lock:
            self._socket.close(linger_ms)
