"""What every rank is doing, in memory that all processes of a session on one host share.

Runs in: both.

A rank writes its own region and reads those of its peers; the kernel reads all of them, also while
a rank is blocked in C code and can answer nothing. A region holds a header, streams and texts. A
*stream* is one ordered series of operations: the collectives of a process group, or the messages
from one rank to another. It keeps the last few operations in a ring of slots. Whatever is longer
than a word (names, shapes, places in the code) is a text, written once and referred to by number.

Everything is a 64-bit word, stored and loaded whole. A slot's sequence number is written last, so
who reads the number that it expects also reads what belongs to it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distsession.messages import Operation

__all__ = ["Board", "Region", "Slot", "file_size", "make_file"]

HEADER = 16
STREAMS = 256
RING = 16
SLOT = 6
STREAM_HEAD = 4
STREAM = STREAM_HEAD + RING * SLOT
TEXTS = 256
TEXT_BYTES = 256
REGION = HEADER + STREAMS * STREAM + TEXTS * TEXT_BYTES // 8
"""Words of one rank's region, 270 kB; only what is used of it takes memory."""

# Words of a header.
STREAM_COUNT, REQUEST, SINCE, TEXT_COUNT, BLOCKED_IN, IS_DAMAGED, WRITTEN, TO_WRITE = range(8)
IN_DEBUGGER, ASKS, ASKS_AT = range(8, 11)  # the first two are read together
# Words of a stream's head.
KEY, NAME, MEMBERS, COUNT = range(4)
# Words of a slot.
SEQUENCE, FINGERPRINT, SIGNATURE, PLACE, BEGAN, STATE = range(6)
# States of an operation.
ISSUED, WAITING, DONE = 1, 2, 3


class Slot(NamedTuple):
    """One operation, as its rank wrote it down."""

    fingerprint: int
    signature: str
    place: str
    began: int
    state: int


def file_size(world_size: int) -> int:
    """Bytes of a board."""
    return REGION * world_size * 8


def make_file() -> int:
    """A descriptor of memory for a board; it has no name, so nothing of it can stay behind."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("distsession-board")
    else:
        descriptor, path = tempfile.mkstemp(prefix="distsession-board-")
        os.unlink(path)
    return descriptor


def key_of(*parts: object) -> int:
    """A number that stands for a stream."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class Board:
    """The memory of all ranks of a host."""

    def __init__(self, descriptor: int, world_size: int):
        self._map = mmap.mmap(descriptor, file_size(world_size))
        self.words = memoryview(self._map).cast("Q")
        self.regions = [Region(self, rank) for rank in range(world_size)]

    @property
    def bytes(self) -> mmap.mmap:
        return self._map

    def close(self) -> None:
        self.words.release()
        self._map.close()


class Region:
    """One rank's part of a board."""

    def __init__(self, board: Board, rank: int):
        self.rank = rank
        self._board = board
        self._words = board.words
        self.start = rank * REGION
        self._texts = (self.start + HEADER + STREAMS * STREAM) * 8

    # --- writing, by its own rank -----------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything: a process or a generation begins."""
        for word in range(self.start, self.start + HEADER):
            self._words[word] = 0

    def add_text(self, text: str) -> int:
        """Write a text down; gives its number, from 1. The oldest ones are overwritten in turn."""
        number = self._words[self.start + TEXT_COUNT] + 1
        data = text.encode()[: TEXT_BYTES - 1]
        at = self._texts + (number % TEXTS) * TEXT_BYTES
        self._board.bytes[at : at + TEXT_BYTES] = data.ljust(TEXT_BYTES, b"\0")
        self._words[self.start + TEXT_COUNT] = number
        return number

    def add_stream(self, key: int, name: str, members: Sequence[int]) -> int:
        """Begin a stream; gives the index of its first word, or -1 where there is no room."""
        count = self._words[self.start + STREAM_COUNT]
        if count >= STREAMS:
            return -1
        at = self.start + HEADER + count * STREAM
        for word in range(at, at + STREAM):
            self._words[word] = 0
        self._words[at + NAME] = self.add_text(name)
        self._words[at + MEMBERS] = self.add_text(",".join(map(str, members)))
        self._words[at + KEY] = key
        self._words[self.start + STREAM_COUNT] = count + 1
        return at

    def ask_nothing(self) -> None:
        """Its rank has died, so it is in no debugger and waits for no input; the kernel says so."""
        for word in (IN_DEBUGGER, ASKS):
            self._words[self.start + word] = 0

    # --- reading ----------------------------------------------------------------------------------

    def text(self, number: int) -> str:
        """The text of that number; empty where it has been overwritten."""
        if not 0 <= self._words[self.start + TEXT_COUNT] - number < TEXTS or not number:
            return ""
        at = self._texts + (number % TEXTS) * TEXT_BYTES
        return self._board.bytes[at : at + TEXT_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def find_stream(self, key: int) -> int:
        """The index of a stream's first word; -1 if this rank has not begun it."""
        first = self.start + HEADER
        for number in range(self._words[self.start + STREAM_COUNT]):
            if self._words[first + number * STREAM + KEY] == key:
                return first + number * STREAM
        return -1

    def slot(self, at: int) -> Slot:
        """What is written in the slot that begins at this word."""
        words = self._words
        return Slot(
            words[at + FINGERPRINT],
            self.text(words[at + SIGNATURE]),
            self.place(words[at + PLACE]),
            words[at + BEGAN],
            words[at + STATE],
        )

    def place(self, word: int) -> str:
        """``In[3] line 4``, from a text's number and a line in one word."""
        name = self.text(word >> 32)
        return f"{name} line {word & 0xFFFFFFFF}" if name else ""

    @property
    def request(self) -> int:
        """The request that runs; 0 if none."""
        return self._words[self.start + REQUEST]

    @property
    def seconds(self) -> float:
        """Since when it runs, or is idle."""
        since = self._words[self.start + SINCE]
        return max(0.0, (time.monotonic_ns() - since) / 1e9) if since else 0.0

    @property
    def transfer(self) -> tuple[int, int]:
        """Bytes written of a large result, and of how many; zeros where there is none."""
        return self._words[self.start + WRITTEN], self._words[self.start + TO_WRITE]

    @property
    def is_in_debugger(self) -> bool:
        """Whether its debugger is open, also while it runs what it was told to."""
        return self._words[self.start + IN_DEBUGGER] != 0

    @property
    def is_asking(self) -> bool:
        """Whether its main thread waits for somebody to type something."""
        return self._words[self.start + ASKS] != 0

    @property
    def asks_at(self) -> str:
        """The line of user code at which it waits for that."""
        return self.place(self._words[self.start + ASKS_AT])

    @property
    def is_damaged(self) -> bool:
        """Whether an operation has failed within the group, which is of no use then."""
        return self._words[self.start + IS_DAMAGED] != 0

    def _streams(self) -> Iterator[tuple[int, str, tuple[int, ...], int]]:
        first = self.start + HEADER
        for number in range(min(STREAMS, self._words[self.start + STREAM_COUNT])):
            at = first + number * STREAM
            name = self.text(self._words[at + NAME])
            text = self.text(self._words[at + MEMBERS])
            members = tuple(int(part) for part in text.split(",") if part)
            yield at, name, members, self._words[at + COUNT]

    def sequences(self) -> dict[str, int]:
        """For each stream, how many operations have been begun."""
        return {name: count for _, name, _, count in self._streams()}

    def operations(self) -> tuple[Operation, ...]:
        """What has been begun and not ended, the one that the main thread is blocked in last."""
        words, now = self._words, time.monotonic_ns()
        blocked = words[self.start + BLOCKED_IN]
        found: list[tuple[bool, int, Operation]] = []
        for at, name, members, count in self._streams():
            for sequence in range(max(1, count - RING + 1), count + 1):
                word = at + STREAM_HEAD + (sequence % RING) * SLOT
                if words[word + STATE] == DONE or words[word + SEQUENCE] != sequence:
                    continue
                slot = self.slot(word)
                title, _, detail = slot.signature.partition(" ")
                operation = Operation(
                    name=title,
                    group=name,
                    members=members,
                    sequence=sequence,
                    detail=detail,
                    place=slot.place,
                    seconds=max(0.0, (now - slot.began) / 1e9),
                    is_waiting=blocked == word,
                )
                found.append((operation.is_waiting, slot.began, operation))
        return tuple(operation for _, _, operation in sorted(found, key=lambda f: f[:2]))
