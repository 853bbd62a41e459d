"""The relay: the process of a node, other than the kernel's own, through which everything passes.

Messages go through the main thread (see ``message_relay``), payloads through two others. What the
kernel sends crosses the stream once, into shared memory; each rank of the node gets a descriptor of
it. What a rank hands over stays in the rank's shared memory until the kernel asks for it, and goes
from there to the stream. One thread receives and one sends, so that neither direction waits for the
other. The relay ends when the stream does, or with the agent, or when it is told to; what the
kernel has sent by then still reaches the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from distsession.engine.message_relay import MessageRelay
from distsession.engine.process import die_with_parent
from distsession.errors import SerializationError
from distsession.protocol import shared_memory
from distsession.protocol.board import Board
from distsession.protocol.messages import Shared
from distsession.protocol.shared_memory import LinkListener, Pool, Segment
from distsession.protocol.wire import (
    CHUNK,
    Cancel,
    Chunk,
    Discard,
    DropRank,
    Fetch,
    Fetched,
    Hand,
    Linked,
    LinkRanks,
    Open,
    Release,
    Stored,
    Wire,
    connect,
)

__all__ = ["Relay", "serve"]

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 1.0
"""Seconds that a rank which is ready may take to connect."""


@dataclass
class _Incoming:
    """A payload that comes from the kernel."""

    segment: Segment
    missing: int


def serve(
    listener: LinkListener,
    ready: Connection,
    folder: str,
    node: int,
    agent: int,
    epoch: int,
    board: Board | None,
    ranks: Sequence[int],
) -> None:
    """Be the relay of a node until the kernel or the agent is gone.

    Args:
        listener: Where the ranks connect that take and give payloads.
        ready: Closed once they can connect for messages, too.
        folder: The session's.
        node: Which.
        agent: Its process.
        epoch: Of the kernel that owns the session.
        board: Of the node, if it is another one than the kernel's.
        ranks: Of the node.
    """
    die_with_parent(agent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages = MessageRelay(folder, node, epoch, board, ranks, agent)
    signal.signal(signal.SIGTERM, lambda *_: messages.end())
    signal.set_wakeup_fd(messages.wake_writer)
    ready.close()
    messages.greet()
    payloads = Relay(connect(folder, node, epoch), listener, node)

    def carry() -> None:
        try:
            payloads.serve()
        finally:
            messages.end()

    threading.Thread(target=carry, name="distsession-relay-receive", daemon=True).start()
    messages.serve()


class Relay:
    """Takes payloads from the kernel for the ranks of a node, and theirs to the kernel.

    Args:
        wire: The stream to the kernel.
        links: Where the ranks connect.
        node: Which of the nodes this is.
    """

    def __init__(self, wire: Wire, links: LinkListener, node: int):
        self._wire = wire
        self._links = links
        self._node = node
        self._pool = Pool()
        self._payloads: dict[int, _Incoming] = {}
        self._to_send: queue.SimpleQueue[Fetch | Discard] = queue.SimpleQueue()
        self._cancelled: set[int] = set()

    def serve(self) -> None:
        """Handle what the kernel sends until the stream ends."""
        threading.Thread(target=self._send, name="distsession-relay", daemon=True).start()
        with contextlib.suppress(OSError):
            while True:
                self._handle(self._wire.receive())

    def _handle(self, message: object) -> None:
        match message:
            case Chunk():
                self._receive_chunk(message)
            case Open():
                self._open(message)
            case Hand():
                self._hand(message)
            case Release():
                self._release(message)
            case Fetch() | Discard():
                self._to_send.put(message)
            case Cancel():
                self._cancelled.add(message.key)
            case LinkRanks():
                self._link(message.names)
            case DropRank():
                self._links.drop(message.name)
            case _:
                log.warning("dropped a message that is not for a relay: %r", message)

    # --- from the kernel to ranks -----------------------------------------------------------------

    def _open(self, message: Open) -> None:
        try:
            shared_memory.check_room(sum(message.sizes), where=f"the host of node {self._node}")
            memory = self._pool.take(message.sizes)
        except SerializationError as error:
            self._wire.send(Stored(message.key, refusal=str(error)))
        except OSError as error:
            self._wire.send(Stored(message.key, problem=str(error)))
        else:
            self._payloads[message.key] = _Incoming(memory, sum(message.sizes))

    def _receive_chunk(self, chunk: Chunk) -> None:
        incoming = self._payloads.get(chunk.key)
        if incoming is None:  # it was refused or given up, and this was under way already
            self._wire.skip(chunk.length)
            return
        incoming.segment.receive(chunk.at, chunk.length, self._wire.read_into)
        incoming.missing -= chunk.length
        if not incoming.missing:
            incoming.segment.set_written()
            self._wire.send(Stored(chunk.key))

    def _hand(self, message: Hand) -> None:
        incoming = self._payloads.get(message.key)
        if incoming is None:
            return
        for name in message.names:
            try:
                self._links.link(name, LINK_TIMEOUT_S).send(incoming.segment, message.number)
            except OSError as error:  # if it has died, that is told elsewhere
                log.warning("%s does not take shared memory: %s", name, error)

    def _release(self, message: Release) -> None:
        incoming = self._payloads.pop(message.key, None)
        if incoming is None:
            return
        if message.reuse and not incoming.missing:
            self._pool.keep(incoming.segment)
        else:
            incoming.segment.close()

    def _link(self, names: tuple[str, ...]) -> None:
        linked = []
        for name in names:
            with contextlib.suppress(OSError):  # it has died
                self._links.link(name, LINK_TIMEOUT_S)
                linked.append(name)
        self._wire.send(Linked(tuple(linked)))

    # --- from ranks to the kernel, in a thread ----------------------------------------------------

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._fetch(self._to_send.get())

    def _fetch(self, message: Fetch | Discard) -> None:
        shared = Shared(message.sender, message.number, ())
        if isinstance(message, Discard):
            with contextlib.suppress(OSError):
                self._links.link(message.sender, LINK_TIMEOUT_S).discard(shared)
            return
        problem = ""
        with contextlib.ExitStack() as stack:
            try:
                link = self._links.link(message.sender, LINK_TIMEOUT_S)
                descriptor = stack.enter_context(link.receive(shared)).descriptor
            except OSError as error:
                problem = f"its rank has not handed it over: {error}"
            else:
                at = 0
                while at < message.length and message.key not in self._cancelled:
                    count = min(CHUNK, message.length - at)
                    self._wire.send_file(message.key, at, descriptor, count)
                    at += count
        self._cancelled.discard(message.key)
        self._wire.send(Fetched(message.key, problem))
