"""The kernel's end of the links to the relays of all nodes but its own.

Messages leave from whichever thread makes them, under a lock, and one thread receives. A Ctrl-C
waits until one is sent, since what is half sent would end a stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsession.cluster.interrupts import interrupts_held
from distsession.protocol import node_link as link
from distsession.protocol.message_listener import MessageListener
from distsession.protocol.message_stream import packed

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
        self._listener = MessageListener(path, is_asked=True)
        self.descriptor = self._listener.descriptor
        self._lock = threading.Lock()
        self._nodes: dict[int, bytes] = {}
        """Those whose relays have connected, and the names of these."""
        self._flows: dict[bytes, _Flow] = {}
        self._shown: defaultdict[int, int] = defaultdict(int)
        self.sent: defaultdict[int, int] = defaultdict(int)
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
        if not self._listener.send(self._nodes.get(node, b""), packed(frames)):
            log.debug("the relay of node %d is gone: a message for its ranks is dropped", node)

    def write_words(self, nodes: Iterable[int], frames: list[bytes]) -> None:
        """Have words written on the boards of some nodes."""
        with interrupts_held(), self._lock:
            for node in nodes:
                self._to_relay(node, [link.WORDS, *frames])

    @property
    def nodes(self) -> list[int]:
        """Those whose relays have connected."""
        return list(self._nodes)

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
        for name, message in self._listener.receive():
            kind, *frames = message or [b""]
            try:
                node = link.node_of(name)
            except ValueError as error:
                log.warning("dropped a message of who is no relay: %s", error)
                continue
            self._heard_at[node] = time.monotonic()
            if kind in (link.REPLY, link.OUTPUT):
                yield frames
                if kind == link.OUTPUT:
                    self._shown[node] += 1
            else:
                with self._lock:
                    self._handle(node, name, kind, frames)

    def _handle(self, node: int, name: bytes, kind: bytes, frames: list[bytes]) -> None:
        try:
            if kind == link.HELLO:
                (clock,) = map(link.unpack_count, frames)
                self._nodes[node] = name
                words = self._on_hello(node, time.monotonic_ns() - clock)
                self._to_relay(node, [link.WELCOME, *words])
            elif kind == link.BOARD:
                at, *changes = frames
                behind = time.monotonic_ns() - link.unpack_count(at)
                self._on_board(node, behind, changes)
            elif kind == link.TAKEN:
                key, count = frames
                self._note_taken(key, link.unpack_count(count))
            else:
                raise ValueError(f"of an unknown kind: {kind[:10]!r}")
        except (ValueError, LookupError) as error:  # also of a node that has no ranks
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
        """Wait until all has left this process; another thread receives meanwhile."""
        deadline = time.monotonic() + timeout
        while self._is_holding():
            if time.monotonic() > deadline:
                return False
            time.sleep(SENT_POLL_S)
        return True

    def _is_holding(self) -> bool:
        with self._lock:
            held = any(flow.held for flow in self._flows.values())
        return held or self._listener.holds_something

    def close(self, linger_ms: int) -> None:
        """Close all links; nothing is sent or received any more.

        Args:
            linger_ms: How long what has been sent may take to leave this process.
        """
        self._listener.close(linger_ms)
