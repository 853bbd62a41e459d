"""The roads of what goes with requests and replies.

Through memory that is shared with the ranks of this host; through the streams of relays to and
from other nodes; or, where it is small or neither can be had, with the message itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distsession.cluster.base import Payload
from distsession.cluster.relay import Arrival, Upload, lost
from distsession.cluster.relays import Relays
from distsession.protocol import shared_memory
from distsession.protocol.messages import INLINE, Addressed, Request, Shared, encode
from distsession.protocol.serialize import Frames
from distsession.protocol.shared_buffer import Place, SharedBuffer
from distsession.protocol.shared_memory import LinkListener, Progress, Segment
from distsession.protocol.wire import memory_path

__all__ = ["Part", "Payloads"]

log = logging.getLogger(__name__)

LINK = 2.0
"""Seconds that the relay of a node may take to connect to a rank that is ready."""

Part = Frames | Place | Segment | Upload
"""What one rank gets: with its request, in memory of this host, or in memory of its own host."""


class Payloads:
    """The roads for payloads to and from all ranks of a session.

    Args:
        folder: The session's private folder.
        epoch: Of the kernel that owns the session.
    """

    def __init__(self, folder: str, epoch: int = 1):
        self.relays = Relays(folder, epoch)
        self._pool = shared_memory.Pool()
        self._buffer = SharedBuffer()
        self._sent: dict[int, list[Place | Segment | Upload]] = {}
        self._links = LinkListener(memory_path(folder, 0, epoch))
        self._names: dict[int, str] = {}
        self._nodes: dict[str, int] = {}

    # --- ranks ------------------------------------------------------------------------------------

    def place(self, rank: int, name: str, node: int) -> None:
        """A rank's process of this name, on this node, takes the place of the one before."""
        before = self._names.pop(rank, None)
        if before is not None:
            relay = self.relays.of(self._nodes.pop(before))
            if relay is not None:
                relay.drop(before)
            else:
                self._links.drop(before)
        self._names[rank] = name
        self._nodes[name] = node

    def link(self, ranks: Sequence[int]) -> None:
        """Take the connections of ranks that have just become ready."""
        for node, group in self._by_node(ranks).items():
            names = [self._names[rank] for rank in group]
            relay = self.relays.of(node)
            if relay is not None:
                relay.link(names, LINK)
            elif not node:
                for name in names:
                    with contextlib.suppress(OSError):  # it has died: that is told elsewhere
                        self._links.link(name)

    def _by_node(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self._nodes[self._names[rank]], []).append(rank)
        return groups

    # --- sending ----------------------------------------------------------------------------------

    def prepare(
        self,
        ranks: Sequence[int],
        payload: Payload,
        progress: Progress | None,
        stack: contextlib.ExitStack,
    ) -> dict[int, Part]:
        """Bring a payload to where its ranks can take it.

        Args:
            ranks: Who gets it.
            payload: What.
            progress: Is told how far it is.
            stack: Closes what is made here, unless it is taken over with :meth:`keep`.
        """
        if isinstance(payload, list):  # as most are
            return self._spread(ranks, payload, progress, stack)
        if isinstance(payload, Segment):
            # Of another host nobody can share that memory: those ranks are asked for their parts.
            return {r: [] if self._nodes[self._names[r]] else payload for r in ranks}
        if isinstance(payload, Mapping):
            parts: dict[int, Part] = {}
            for rank in ranks:
                parts |= self._spread([rank], payload[rank](), progress, stack)
            return parts
        return self._spread(ranks, payload, progress, stack)

    def _spread(
        self,
        ranks: Sequence[int],
        frames: Frames,
        progress: Progress | None,
        stack: contextlib.ExitStack,
    ) -> dict[int, Part]:
        """The same frames to some ranks: all nodes at the same time, each once."""
        total = shared_memory.nbytes(frames)
        if total <= INLINE:  # goes with each message
            return dict.fromkeys(ranks, frames)
        groups = self._by_node(ranks)
        parts: dict[int, Part] = dict.fromkeys(ranks, frames)
        uploads: list[tuple[Upload, list[int]]] = []
        if total >= shared_memory.THRESHOLD:
            for node, group in groups.items():
                reached = [r for r in group if self.relays.of(node, self._names[r])] if node else []
                relay = self.relays.of(node)
                if reached and relay is not None:
                    uploads.append((stack.enter_context(relay.put(frames)), reached))
        shares = [0] * (1 + len(uploads))
        is_here = 0 in groups

        def note(done: int, total: int) -> None:
            shares[0] = done
            tell(total)

        def tell(total: int) -> None:
            if progress is not None:
                shares[1:] = [upload.sent for upload, _ in uploads]
                progress(sum(shares), total * (is_here + len(uploads)))

        if is_here:
            offered = self._offer(frames, note)
            if offered is not None:
                stack.push(offered)
                parts |= dict.fromkeys(groups[0], offered)
        for upload, reached in uploads:
            if upload.wait(lambda total=upload.total: tell(total)):  # type: ignore[misc]
                parts |= dict.fromkeys(reached, upload)
            else:
                upload.release()
        return parts

    def _offer(self, frames: Frames, note: Progress) -> Place | Segment | None:
        """Memory of this host with these frames; None where they are to go with the message."""
        try:
            place = self._buffer.put(frames)
        except OSError:  # as nobody can do without shared memory, this goes with the message, too
            place = None
        return place or shared_memory.offer(frames, note, self._pool)

    def encode(self, rank: int, request: Request | Addressed, part: Segment) -> list[Any]:
        """The message of a request to a rank of this host, which leads to its part."""
        try:
            link = self._links.link(self._names[rank])
            return encode(request, link.send(part))
        except OSError as error:  # if the rank has died, that is told elsewhere
            log.warning("rank %d does not take shared memory: %s", rank, error)
            return encode(request, shared_memory.map_private(part.descriptor, part.sizes))

    def reach(self, rank: int, place: Place) -> bool:
        """Let a rank of this host have the buffer of a place; False if it does not take it."""
        try:
            place.hand(self._links.link(self._names[rank]))
        except OSError as error:  # if the rank has died, that is told elsewhere
            log.warning("rank %d does not take shared memory: %s", rank, error)
            return False
        return True

    def hand(self, ranks: Sequence[int], request: Request | Addressed, part: Upload) -> list[Any]:
        """The message of a request to ranks of another node, which leads to what they all get."""
        return encode(request, part.relay.hand(part, [self._names[rank] for rank in ranks]))

    def keep(self, request: int, parts: Mapping[int, Part], stack: contextlib.ExitStack) -> None:
        """Hold what ranks are to take until :meth:`forget`, instead of the stack."""
        made = {id(part): part for part in parts.values() if not isinstance(part, list)}
        if made:
            self._sent[request] = list(made.values())
            stack.pop_all()

    def forget(self, request: int, *, taken: bool) -> None:
        """Let go of what went with a request.

        Args:
            request: Its number.
            taken: All ranks have it. One that has not come to it yet cannot be seen to want it.
        """
        for made in self._sent.pop(request, []):
            if isinstance(made, Place):
                made.release(taken=taken)
            elif isinstance(made, Upload):
                made.release(reuse=taken)
            elif taken:
                self._pool.keep(made)
            else:
                made.close()

    # --- receiving --------------------------------------------------------------------------------

    def is_here(self, shared: Shared) -> bool:
        """Whether a payload is in memory of this host."""
        return not self._nodes.get(shared.sender, 0)

    def open(self, shared: Shared) -> Sequence[Any]:
        """The frames of a payload in memory of this host."""
        # Whoever sends has connected before; if it has been replaced since, nobody waits.
        link = self._links.link(shared.sender, patience=0.2)
        with link.receive(shared) as handed:
            return shared_memory.map_private(handed.descriptor, shared.sizes)

    def fetch(
        self,
        shared: Shared,
        is_wanted: Callable[[], bool],
        note: Callable[[int, int], None],
        done: Arrival,
    ) -> None:
        """Bring a payload from another node; see :meth:`Relay.fetch`."""
        relay = self.relays.of(self._nodes[shared.sender])
        if relay is None:
            done([], lost(self._nodes[shared.sender]))
        elif is_wanted():
            relay.fetch(shared, is_wanted, note, done)
        else:
            relay.discard(shared)
            done([], None)

    def close(self) -> None:
        """Let go of everything."""
        self.relays.close()
        with contextlib.suppress(FileNotFoundError):  # the agent may have removed the folder
            self._links.close()
        self._pool.close()
        self._buffer.close()
        for made in itertools.chain(*self._sent.values()):
            if isinstance(made, Segment):
                made.close()
        self._sent.clear()
