"""The kernel's end of a relay, which carries payloads to and from another node.

One thread sends to it and one receives. The thread of a caller only waits, so a Stop can
reach it anywhere without leaving a chunk half sent.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distsession.errors import DistsessionError, SerializationError, SessionStateError
from distsession.protocol import shared_memory
from distsession.protocol.messages import Shared
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
)

__all__ = ["Arrival", "Relay", "Upload", "lost"]

log = logging.getLogger(__name__)

Arrival = Callable[[Sequence[Any], DistsessionError | None], None]
"""Takes the frames of a payload that has arrived, or what has become of it."""


class Upload:
    """A payload on its way to a node, and then in its memory.

    Args:
        relay: Of the node.
        key: Its number there.
        frames: What to send; they must stay as they are until it is stored.
    """

    def __init__(self, relay: Relay, key: int, frames: Sequence[Any]):
        self.relay = relay
        self.key = key
        self.sizes = tuple(memoryview(frame).nbytes for frame in frames)
        self.total = sum(self.sizes)
        self._sent = 0
        self.number = 0
        """Under which it was handed to ranks."""
        self.answer: Stored | None = None
        self._is_wanted = True
        self._chunks = self._cut(frames)

    def _cut(self, frames: Sequence[Any]) -> Iterator[tuple[int, memoryview]]:
        for frame, (at, _) in zip(frames, shared_memory.offsets(self.sizes), strict=True):
            view = memoryview(frame)
            rest = view.cast("B") if view.nbytes else memoryview(b"")
            while rest:
                yield at, rest[:CHUNK]
                at, rest = at + CHUNK, rest[CHUNK:]

    def send_next(self, wire: Wire) -> bool:
        """Send one chunk; False if there is none left to send."""
        chunk = next(self._chunks, None) if self._is_wanted and self.answer is None else None
        if chunk is None:
            self._chunks = iter(())  # lets go of the frames
            return False
        wire.send_chunk(self.key, *chunk)
        self._sent += len(chunk[1])
        return True

    @property
    def sent(self) -> int:
        """Bytes that are on their way or there. The node may say first that it has all of them."""
        answer = self.answer
        is_there = answer is not None and not (answer.refusal or answer.problem)
        return self.total if is_there else self._sent

    def wait(self, progress: Callable[[], None]) -> bool:
        """Wait until it is stored; False if the node takes no payloads by this road.

        Args:
            progress: Called now and then.

        Raises:
            SerializationError: There is no room for it.
        """
        while not self.relay.wait(lambda: self.answer is not None, 0.05):
            progress()
        assert self.answer is not None
        progress()
        if self.answer.refusal:
            raise SerializationError(self.answer.refusal)
        if self.answer.problem and self.relay.is_up:
            log.warning(
                "node %d takes no payload in shared memory (%s): it is sent through the sockets "
                "of its ranks, which is slower",
                self.relay.node,
                self.answer.problem,
            )
        return not self.answer.problem

    def release(self, *, reuse: bool = False) -> None:
        """Let go of it; what is not sent yet is not sent any more."""
        self._is_wanted = False
        self.relay.release(self.key, reuse)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Download:
    """A payload that a rank of the node has made, on its way here."""

    def __init__(
        self,
        shared: Shared,
        is_wanted: Callable[[], bool],
        note: Callable[[int, int], None],
        done: Arrival,
    ):
        self.sizes = shared.sizes
        self.memory = shared_memory.own_memory(shared.sizes)
        self.length = len(self.memory)
        self.arrived = 0
        self.is_wanted = is_wanted
        self.note = note
        self.done = done


class Relay:
    """The relay of one node, as long as its process lives.

    Args:
        node: Which.
        wire: The stream to it.
        on_lost: Called once, in a thread of the relay's, when the stream has ended.
    """

    def __init__(self, node: int, wire: Wire, on_lost: Callable[[Relay], None]):
        self.node = node
        self.wire = wire
        self.is_up = True
        self.is_forgotten = False
        """Its end is nothing to tell."""
        self.linked: frozenset[str] = frozenset()
        """The ranks that it has connections to."""
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._orders: deque[Any] = deque()
        self._sending: deque[Upload] = deque()
        self._uploads: dict[int, Upload] = {}
        self._downloads: dict[int, _Download] = {}
        self._keys = itertools.count(1)
        self._numbers = itertools.count(1)
        for work in (self._send, self._receive):
            threading.Thread(target=work, name=f"distsession-relay-{node}", daemon=True).start()

    # --- for callers ------------------------------------------------------------------------------

    def put(self, frames: Sequence[Any]) -> Upload:
        """Begin to send a payload to the node's memory."""
        with self._changed:
            upload = Upload(self, next(self._keys), frames)
            if not self.is_up:
                upload.answer = Stored(upload.key, problem="its relay is gone")
                return upload
            self._uploads[upload.key] = upload
            self._sending.append(upload)
            self._order(Open(upload.key, upload.sizes))
        return upload

    def release(self, key: int, reuse: bool) -> None:
        """Have a payload let go, of which there may still be something to send."""
        with self._changed:
            self._uploads.pop(key, None)
            self._order(Release(key, reuse))

    def hand(self, upload: Upload, names: Sequence[str]) -> Shared:
        """Give a stored payload to ranks; gives what their request says of it.

        Requests must be sent in the order of these calls.
        """
        upload.number = upload.number or next(self._numbers)
        self.order(Hand(upload.key, upload.number, tuple(names)))
        return Shared("", upload.number, upload.sizes)

    def fetch(
        self,
        shared: Shared,
        is_wanted: Callable[[], bool],
        note: Callable[[int, int], None],
        done: Arrival,
    ) -> None:
        """Bring what a rank has handed over.

        Args:
            shared: What.
            is_wanted: Asked meanwhile, in a thread of the relay's, as the next two.
            note: Is told how many bytes of how many are here.
            done: Gets the frames, or why there are none.
        """
        try:
            shared_memory.check_room(sum(shared.sizes), "brought")
            download = _Download(shared, is_wanted, note, done)
        except (SerializationError, OSError, MemoryError) as error:
            self.discard(shared)
            done([], error if isinstance(error, SerializationError) else SerializationError(
                f"there is no memory for {sum(shared.sizes):,} bytes: {error}"
            ))  # fmt: skip
            return
        with self._changed:
            if self.is_up:
                key = next(self._keys)
                self._downloads[key] = download
                self._order(Fetch(key, shared.sender, shared.number, download.length))
                return
        done([], lost(self.node))

    def discard(self, shared: Shared) -> None:
        """Have what a rank has handed over let go."""
        self.order(Discard(shared.sender, shared.number))

    def link(self, names: Sequence[str], timeout: float) -> None:
        """Have ranks that are ready connected."""
        self.order(LinkRanks(tuple(names)))
        self.wait(lambda: self.linked.issuperset(names), timeout)

    def drop(self, name: str) -> None:
        """A rank is gone."""
        with self._changed:
            self.linked -= {name}
        self.order(DropRank(name))

    def order(self, message: Any) -> None:
        """Send a message before the next chunk; of no effect once the relay is gone."""
        with self._changed:
            self._order(message)

    def _order(self, message: Any) -> None:
        if self.is_up:
            self._orders.append(message)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until something holds, or the relay is gone, which ends all waiting."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or not self.is_up, timeout)
            return condition()

    def close(self) -> None:
        self.wire.close()

    # --- its threads ------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._orders or self._sending or not self.is_up)
                    if not self.is_up:
                        return
                    orders = list(self._orders)
                    self._orders.clear()
                    upload = self._sending[0] if self._sending else None
                for order in orders:
                    self.wire.send(order)
                if upload is not None and not upload.send_next(self.wire):
                    with self._changed:
                        if upload in self._sending:
                            self._sending.remove(upload)
        except OSError:
            self._mark_lost()

    def _receive(self) -> None:
        try:
            while True:
                self._handle(self.wire.receive())
        except OSError:
            self._mark_lost()
        except Exception:
            log.exception("the stream of node %d's relay cannot be read", self.node)
            self._mark_lost()

    def _handle(self, message: object) -> None:
        match message:
            case Chunk():
                self._receive_chunk(message)
            case Fetched():
                self._finish(message)
            case Stored():
                with self._changed:
                    upload = self._uploads.pop(message.key, None)
                    if upload is not None:
                        upload.answer = message
                    self._changed.notify_all()
            case Linked():
                with self._changed:
                    self.linked |= frozenset(message.names)
                    self._changed.notify_all()

    def _receive_chunk(self, chunk: Chunk) -> None:
        download = self._downloads.get(chunk.key)
        if download is None:  # given up with the relay
            self.wire.skip(chunk.length)
            return
        if download.length and not download.is_wanted():
            download.memory, download.length = memoryview(b""), 0
            self.order(Cancel(chunk.key))
        if not download.length:
            self.wire.skip(chunk.length)
            return
        self.wire.read_into(download.memory[chunk.at : chunk.at + chunk.length])
        download.arrived += chunk.length
        download.note(download.arrived, download.length)

    def _finish(self, message: Fetched) -> None:
        with self._changed:
            download = self._downloads.pop(message.key, None)
        if download is None:
            return
        if download.length and download.arrived == download.length:
            download.done(shared_memory.split(download.memory, download.sizes), None)
        else:
            problem = message.problem or "it was stopped"
            download.done([], SessionStateError(f"the result did not arrive: {problem}."))

    def _mark_lost(self) -> None:
        with self._changed:
            if not self.is_up:
                return
            self.is_up = False
            self.linked = frozenset()
            for key, upload in self._uploads.items():
                upload.answer = Stored(key, problem="its relay is gone")
            downloads = list(self._downloads.values())
            self._uploads.clear()
            self._downloads.clear()
            self._sending.clear()
            self._changed.notify_all()
        self.wire.close()
        for download in downloads:
            download.done([], lost(self.node))
        self._on_lost(self)


def lost(node: int) -> SessionStateError:
    """What becomes of a result whose relay has ended."""
    return SessionStateError(
        f"the result did not arrive: the relay of node {node} (the process through which its ranks "
        "are reached) has ended."
    )
