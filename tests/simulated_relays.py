"""A process that plays relays of many nodes, and their ranks: no torch, and nothing is computed.

Each relay has its own connections to the kernel, and says what a real one says: its hello, what has
changed on its board before each answer, and which messages were taken. A cell with the label
``"hang 1.5"`` begins an operation of all ranks, to which the last one comes so many seconds later.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distsession.protocol import board as layout
from distsession.protocol import board_mirror, message_stream, wire
from distsession.protocol import node_link as link
from distsession.protocol.board import Board, Region, file_size, key_of, make_file
from distsession.protocol.board_mirror import Mirror
from distsession.protocol.message_stream import MessageStream, packed
from distsession.protocol.messages import (
    CellRequest,
    Reply,
    StackReply,
    StackRequest,
    decode,
    encode,
)

GROUP = "default_pg"
POLL_MS = 5


@dataclass
class _Wait:
    """Answers that are held back until the last rank comes."""

    request: int
    ranks: list[int]
    until: float


@dataclass
class SimulatedRelay:
    """One node's relay and its ranks.

    Attributes:
        node: Which.
        ranks: Of the node.
        board: On which the ranks write.
    """

    node: int
    ranks: range
    board: Board
    stream: MessageStream
    waits: list[_Wait] = field(default_factory=list)
    requests: int = 0
    """Messages with requests that have come, however many ranks they were for."""

    def __post_init__(self) -> None:
        self._mirror = Mirror(self.board, self.ranks)
        self._taken: Counter[bytes] = Counter()
        for rank in self.ranks:
            self.board.regions[rank].set_process(os.getpid(), 1)
            self._post(rank)  # as every rank has been in the group's first barrier
            self._leave(self.board.regions[rank])

    def greet(self) -> None:
        self._send([link.HELLO, link.pack_count(time.monotonic_ns())])

    def _send(self, frames: list[Any]) -> None:
        self.stream.post(packed(frames))
        while not self.stream.flush():
            self.stream.wait(1.0)

    def receive(self) -> None:
        for kind, *rest in self.stream.receive():
            if kind in (link.REQUEST, link.CONTROL):
                names, *message = rest
                self._take(kind, link.split_names(names), message)

    def _take(self, kind: bytes, names: list[bytes], frames: list[bytes]) -> None:
        message, _ = decode(frames)
        ranks = [int(name.rpartition(b".")[2]) for name in names]
        if kind == link.REQUEST:
            self.requests += 1
            for rank in ranks:
                self._begin(rank, message.id)
            if isinstance(message, CellRequest) and message.label.startswith("hang "):
                self._hang(message.id, ranks, float(message.label.split()[1]))
            else:
                for rank in ranks:
                    self._answer(rank, message.id)
        elif isinstance(message, StackRequest):
            for rank in ranks:
                stack = StackReply(rank, message.number, (), "In[1] line 1")
                self._send([link.REPLY, *encode(stack)])
        for name in names:
            self._note_taken(link.key_of(kind, name))

    def _note_taken(self, key: bytes) -> None:
        self._taken[key] += 1
        if self._taken[key] >= link.WINDOW // 2:
            count = link.pack_count(self._taken.pop(key))
            self._send([link.TAKEN, key, count])

    def _begin(self, rank: int, request: int) -> None:
        region = self.board.regions[rank]
        self.board.words[region.start + layout.SINCE] = time.monotonic_ns()
        self.board.words[region.start + layout.REQUEST] = request

    def _answer(self, rank: int, request: int) -> None:
        region = self.board.regions[rank]
        self.board.words[region.start + layout.SINCE] = time.monotonic_ns()
        self.board.words[region.start + layout.REQUEST] = 0
        self.look()
        self._send([link.REPLY, *encode(Reply(request, rank, 1e-5))])

    def look(self) -> None:
        """Tell what has changed on the board."""
        if changes := self._mirror.changes():
            clock = link.pack_count(time.monotonic_ns())
            self._send([link.BOARD, clock, *board_mirror.pack(changes)])

    # --- an operation to which one comes late -----------------------------------------------------

    def _hang(self, request: int, ranks: list[int], seconds: float) -> None:
        last = len(self.board.regions) - 1
        for rank in ranks:
            if rank != last:
                self._post(rank)
        self.waits.append(_Wait(request, ranks, time.monotonic() + seconds))
        self.look()

    def _post(self, rank: int) -> None:
        region, words = self.board.regions[rank], self.board.words
        key = key_of(GROUP)
        at = region.find_stream(key)
        if at < 0:
            at = region.add_stream(key, GROUP, range(len(self.board.regions)))
        count = words[at + layout.COUNT] + 1
        slot = at + layout.STREAM_HEAD + count % layout.RING * layout.SLOT
        words[slot + layout.FINGERPRINT] = words[slot + layout.CHAIN] = count
        words[slot + layout.SIGNATURE] = region.add_text("all_reduce (4,) float32")
        words[slot + layout.BEGAN] = time.monotonic_ns()
        words[slot + layout.STATE] = layout.WAITING
        words[slot] = region.base(at) + count
        words[at + layout.COUNT] = count
        words[region.start + layout.BLOCKED_IN] = slot

    def _leave(self, region: Region) -> None:
        words = self.board.words
        if at := words[region.start + layout.BLOCKED_IN]:
            words[at + layout.STATE] = layout.DONE
            words[region.start + layout.BLOCKED_IN] = 0

    def answer_late(self) -> None:
        """Let those go on to which the last rank has come."""
        over = [wait for wait in self.waits if wait.until <= time.monotonic()]
        for wait in over:
            self.waits.remove(wait)
            for rank in wait.ranks:
                if rank == len(self.board.regions) - 1:
                    self._post(rank)
                self._leave(self.board.regions[rank])
                self._answer(rank, wait.request)


def serve(relays: list[SimulatedRelay]) -> Iterator[None]:
    """Answer; gives the word back now and then."""
    epoll = select.epoll()
    for relay in relays:
        epoll.register(relay.stream, select.EPOLLIN)
        relay.greet()
    of_stream = {relay.stream.fileno(): relay for relay in relays}
    told_at = time.monotonic()
    while True:
        pause_ms = POLL_MS if any(relay.waits for relay in relays) else 200
        for descriptor, _ in epoll.poll(pause_ms / 1000):
            of_stream[descriptor].receive()
        if time.monotonic() - told_at > 0.02:
            told_at = time.monotonic()
            for relay in relays:
                relay.answer_late()
                if relay.waits:
                    relay.look()
        yield


def main() -> None:
    """Play the relays of some nodes until the process that started this one is gone."""
    folder, epoch, first, count, per_node, nodes = sys.argv[1], *map(int, sys.argv[2:])
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(nodes * per_node))
    board = Board(descriptor, nodes * per_node)
    streams, relays = [], []
    for node in range(first, first + count):
        streams.append(wire.connect(folder, node, epoch))
        name = link.relay_name(node)
        link_stream = message_stream.connect(wire.link_path(folder, epoch), name, asks=True)
        ranks = range((node - 1) * per_node, node * per_node)
        relays.append(SimulatedRelay(node, ranks, board, link_stream))
    parent = os.getppid()
    told = 0
    for _ in serve(relays):
        if os.getppid() != parent:
            os._exit(0)
        if (came := sum(relay.requests for relay in relays)) != told:
            told = came
            print(came, flush=True)


if __name__ == "__main__":
    main()
