"""Payloads of up to 1 MB, which ranks copy out of memory that they have mapped once.

To make a segment for each payload, to hand a descriptor of it to every rank, and to map it there
costs several times what it takes to copy 1 MB. So what is small goes through one piece of memory,
whose descriptor each rank gets with the first of its requests. The sender writes a payload to it,
the ranks copy it, each into memory of its own, and when all have answered, that place is written to
again.

No rank may find another payload where its own was. So only an answer says that a place is free. If
one does not come, nobody can know how far that rank is: the memory is given up, and others made in
its place.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from distsession.protocol.messages import INLINE, Buffered
from distsession.protocol.shared_memory import Link, Segment, aligned, nbytes, offsets
from distsession.protocol.tensor_memory import size_of

__all__ = ["CAPACITY", "LARGEST", "Place", "SharedBuffer"]

LARGEST = 1 << 20
"""Bytes of a payload up to which it goes through the buffer, if it does not go with its message. To
copy 2 MB takes ranks longer than to map them, and what is mapped takes memory once for all."""

CAPACITY = 2 << 20
"""Bytes of the buffer, for payloads that are sent one after the other, and not answered yet."""


class SharedBuffer:
    """The memory of one sender, for all of its payloads that are small."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: Segment | None = None
        self._number = 0
        self._end = 0
        self._places = 0

    def put(self, frames: Sequence[Any]) -> Place | None:
        """Write a payload; None where it is not for here, or there is no room.

        Args:
            frames: What to write.

        Raises:
            OSError: There is no memory.
        """
        total = nbytes(frames)
        if not INLINE < total <= LARGEST:
            return None
        sizes = tuple(map(size_of, frames))
        with self._lock:
            at = self._end
            ends = [at + end for _, end in offsets(sizes)]
            if ends[-1] > CAPACITY:
                return None
            if self._memory is None:
                self._memory = Segment([CAPACITY], "distsession-buffer")
                self._number += 1
            memory, self._end = self._memory, aligned(ends[-1])
            self._places += 1
            place = Place(self, memory, Buffered(self._number, at, sizes))
        try:
            for frame, size, end in zip(frames, sizes, ends, strict=True):
                memory.put(frame, end - size)
        except BaseException:
            self.free(place)  # nobody knows of it
            raise
        return place

    def free(self, place: Place) -> None:
        """Nobody reads what is there any more."""
        with self._lock:
            if place.memory is self._memory:
                self._places -= 1
                if not self._places:
                    self._end = 0

    def give_up(self, place: Place) -> None:
        """A rank may read there at any time: what comes goes through other memory."""
        with self._lock:
            if place.memory is self._memory:
                self._forget()

    def close(self) -> None:
        """Let go of the memory; ranks keep it for as long as they have it mapped."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory, self._end, self._places = None, 0, 0


class Place:
    """Where a payload lies in the buffer of its sender.

    As a context, it gives the memory up, unless somebody else has taken the place over: its payload
    may have been sent to some ranks.

    Args:
        buffer: Whose it is.
        memory: Of the buffer.
        buffered: What a message says of it.
    """

    def __init__(self, buffer: SharedBuffer, memory: Segment, buffered: Buffered):
        self.memory = memory
        self.buffered = buffered
        self._buffer = buffer

    def hand(self, link: Link) -> None:
        """Let who is at the other end of a link have the buffer, unless it has it.

        Raises:
            OSError: It is gone, or does not read.
        """
        link.send_buffer(self.memory, self.buffered.number)

    def frames(self) -> list[memoryview]:
        """A copy of the payload."""
        return self.memory.copy(self.buffered.at, self.buffered.sizes)

    def release(self, *, taken: bool) -> None:
        """Let go of it.

        Args:
            taken: All ranks have their copies.
        """
        if taken:
            self._buffer.free(self)
        else:
            self._buffer.give_up(self)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.release(taken=False)
