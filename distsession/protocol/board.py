"""What every rank is doing, in memory that all processes of a session on one host share.

A rank writes its own region and reads those of its peers; the kernel reads all of them, also while
a rank is blocked in C code and can answer nothing. A region holds a header, streams and texts. A
*stream* is one ordered series of operations: the collectives of a process group, or the messages
from one rank to another. Its head says whose it is; it keeps the last operations in a ring of
slots. Whatever else is longer than a word (what was called, places in the code) is a text in a ring
of bytes and referred to by its number, which is where it begins.

A session lives long, so everything here is used again, and who reads must see that it was. A
stream's room is given to another stream only when no peer still needs it, and then has another
*incarnation*, which is a part of each slot's sequence word. A text's number is never given twice:
one that lies too far back has been overwritten. Its rank writes texts that are still needed again
before that (see ``Recorder``).

Everything else is a 64-bit word, stored and loaded whole. A slot's sequence is written last, so who
reads the one that it expects also reads what belongs to it.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distsession.protocol.messages import Left, Operation
from distsession.protocol.operation_names import CodeLine
from distsession.protocol.unseen import Unseen

__all__ = ["Board", "Region", "Slot", "file_size", "make_file"]

HEADER = 128
STREAMS = 4096
RING = 64
SLOT = 9
MAX_RANKS = 1024
MEMBER_WORDS = MAX_RANKS // 64
NAME_WORDS = 24
STREAM_HEAD = 5 + MEMBER_WORDS + NAME_WORDS
WITHDRAWN = STREAM_HEAD + (RING + 1) * SLOT
"""Where the operations stand that were posted and withdrawn: how many, then two words for each of
the last ``MOST_WITHDRAWN``, its sequence and its fingerprint. There is one slot more than the ring
has: for an operation that is waited for after its slot was given to another."""
MOST_WITHDRAWN = 64
STREAM = WITHDRAWN + 1 + 2 * MOST_WITHDRAWN
TEXT_WORDS = 1 << 18
LONGEST_TEXT = 8192
"""Bytes; whatever is longer is cut."""
LINE_WORDS = 64
"""For the line that the main thread was last seen at, as text that ends with a zero."""
REGION = HEADER + STREAMS * STREAM + TEXT_WORDS + LINE_WORDS
"""Words of one rank's region, 27 MB; pages that nobody writes to take no memory."""

# Words of a header.
STREAM_COUNT, REQUEST, SINCE, TEXT_END, BLOCKED_IN, IS_DAMAGED, WRITTEN, TO_WRITE = range(8)
IN_DEBUGGER, ASKS, ASKS_AT = range(8, 11)  # the first two are read together
INCARNATIONS, WITHOUT_GROUP = 11, 12
OWN_GROUP = 2  # of WITHOUT_GROUP
LOG_REQUEST, LOG_BEGINS = 13, 14  # the latter of two files, a word each
CLOCK_BEHIND = 16
"""In nanoseconds; written by the kernel, in what it has of the boards of other hosts."""
OPERATION_FAILED, DEVICE_LOST, CUT_OFF = 1, 2, 4  # bits of IS_DAMAGED
# Of the first rank's header, written by the kernel; one word of each for every owner's epoch, so
# that a former owner who goes on after a stop by SIGSTOP changes nothing of the present one's.
COMMITTED, ACKNOWLEDGED = 17, 25
EPOCHS = 8
PUSHED = 33
"""Of the first rank's header, written by the kernel: the last push whose names are to be set."""
STAGED = 34
"""The push that a rank has staged, and looks at ``PUSHED`` for; 0 if none."""
# What the device was given that is not seen: its kinds, and how often something was begun.
UNSEEN, UNSEEN_COUNT = 35, 36
# Of its process: which one, by itself; and what the system says of it and, in a node's first
# region, of the agent, by the relay of the node: for a kernel on another host.
PROCESS, PROCESS_STATE, PROCESSOR_TIME, AGENT_STATE = range(37, 41)
# Of its connections (see engine/collectives/connections): one more than the generation in which
# they were made, 0 where they may be half-way in something; and whether something that was issued
# has not ended yet.
CONNECTED_IN, IS_UNSETTLED = 41, 42
SEEN_AT = 43
"""In nanoseconds of the clock here; written by the keeper of hosts, when it has had a look."""
ABORTED_AT = 45
"""In nanoseconds of its host's clock: when the rank last began to abort its groups; 0 if never."""
LEFT_COUNT, LEFT = 44, 48
"""How many groups its code has left, and a ring of the last ones: five words for each."""
LEFT_RING, LEFT_WORDS = 16, 5
GROUP, LEFT_AT, IS_FINAL, FAMILY = range(4)
"""The text with the group's name, the place in the code, whether it has destroyed the group, and
two words that tell the group from others of its name."""
# Words of a stream's head; the members are bits, the name is text.
KEY, INCARNATION, COUNT, NAME_BYTES, BEGUN, MEMBERS = range(6)
"""``COUNT`` operations were posted, and ``BEGUN`` of them handed to gloo."""
NAME = MEMBERS + MEMBER_WORDS
# Words of a slot.
SEQUENCE, FINGERPRINT, SIGNATURE, PLACE, BEGAN, STATE = range(6)
DEVICE_STREAM = 6  # of what is ENQUEUED: the number of the device's stream that it runs in, or 0
ON_CPU = 1 << 63
"""In its place: no device was given it, but threads of a backend such as gloo's."""
IN_GROUP_ORDER = 1 << 62
"""A bit beside that number: the group's backend runs its operations in order, messages too."""
STREAM_NUMBER_MASK = IN_GROUP_ORDER - 1
ACCEPTED = 6
"""Of what gloo does, the same word: the sequence again, once gloo is known to have accepted it."""
CHAIN = 7
"""Stands for all operations up to this one, where members of the group are on several hosts."""
THREAD = 8
"""The thread that has issued it; 0 for the main thread."""
# States of an operation: what its thread waits for is WAITING from the first, and what a device was
# given is ENQUEUED, until it is seen to be complete. What is over is not below DONE.
ISSUED, WAITING, ENQUEUED, DONE, REFUSED, FAILED, BROKEN_OFF = range(1, 8)

WORD_MASK = (1 << 64) - 1
SEQUENCE_BITS = 40
"""Of a slot's sequence word; the incarnation of its stream has the rest."""
SEQUENCE_MASK = (1 << SEQUENCE_BITS) - 1
CHAIN_FACTOR, CHAIN_MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
PID_BITS, STARTED_BITS, LETTER_BITS = 22, 32, 8
"""Of the words that stand for a process: its pid, when it was started, and its state."""
LINE_BITS = 24
"""Of the word that stands for a place in the code; the text's number has the rest."""
LINE_MASK = (1 << LINE_BITS) - 1

OVERWRITTEN = "an operation that is no longer on record"


def chained(chain: int, fingerprint: int) -> int:
    """What stands for some operations and one more."""
    return (chain * CHAIN_FACTOR + fingerprint) & CHAIN_MASK


class Slot(NamedTuple):
    """One operation, as its rank wrote it down."""

    fingerprint: int
    signature: str
    place: str
    began: int
    state: int
    thread: int = 0


class Head(NamedTuple):
    """Whose a stream is."""

    name: str
    members: tuple[int, ...]


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
    """The memory of all ranks of a host.

    Args:
        descriptor: Of the memory.
        world_size: Number of ranks.
        is_read_only: Of somebody who only looks.

    Raises:
        ValueError: There are more ranks than a stream's head has room for.
    """

    def __init__(self, descriptor: int, world_size: int, *, is_read_only: bool = False):
        if world_size > MAX_RANKS:
            raise ValueError(f"a session has at most {MAX_RANKS} ranks on a host, not {world_size}")
        access = mmap.ACCESS_READ if is_read_only else mmap.ACCESS_WRITE
        self._map = mmap.mmap(descriptor, file_size(world_size), access=access)
        self.words = memoryview(self._map).cast("Q")
        self.regions = [Region(self, rank) for rank in range(world_size)]

    @property
    def bytes(self) -> mmap.mmap:
        return self._map

    def damaged_ranks(self) -> list[int]:
        """Those on which an operation has failed within the group; see ``Region.is_damaged``."""
        words = self.words
        found = []
        for region in self.regions:
            if words[region.start + IS_DAMAGED] & OPERATION_FAILED:
                found.append(region.rank)
        return found

    @property
    def lacks_group(self) -> bool:
        """Whether code has left the process group on some ranks, and none is in another one."""
        states = self.words[WITHOUT_GROUP::REGION].tolist()
        return any(states) and OWN_GROUP not in states

    # --- what the kernel says to all ranks: one word each, so that they see it all or not -------

    def begin_epoch(self, epoch: int) -> None:
        """Nothing has been sent by this owner yet."""
        self.commit(epoch, 0)
        self.acknowledge(epoch, 0)

    def commit(self, epoch: int, number: int) -> None:
        """Requests up to this one have been sent to all their ranks."""
        self.words[COMMITTED + epoch % EPOCHS] = number

    def last_committed(self) -> int:
        """The highest number that an owner has given; later ones go on from there."""
        return max(self.words[COMMITTED : COMMITTED + EPOCHS])

    def committed(self, epoch: int) -> int:
        return self.words[COMMITTED + epoch % EPOCHS]

    def acknowledge(self, epoch: int, number: int) -> None:
        """Nobody needs the answers of requests up to this one any more."""
        self.words[ACKNOWLEDGED + epoch % EPOCHS] = number

    def acknowledged(self, epoch: int) -> int:
        return self.words[ACKNOWLEDGED + epoch % EPOCHS]

    def commit_push(self, number: int) -> None:
        """All ranks of a push have staged it by this request, and are to set its names."""
        self.words[PUSHED] = number

    def is_push_committed(self, number: int) -> bool:
        return self.words[PUSHED] == number

    def kernel_words(self) -> list[tuple[int, int]]:
        """All of these, and where they are."""
        return [(at, self.words[at]) for at in range(COMMITTED, ACKNOWLEDGED + EPOCHS)]

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
        self._first = self.start + HEADER
        self._texts = self._first + STREAMS * STREAM
        self._line = (self._texts + TEXT_WORDS) * 8
        self._heads: dict[int, tuple[int, Head]] = {}

    # --- writing, by its own rank -----------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything: a process or a generation begins.

        The counts of incarnations and of texts go on, so that nobody takes what comes for what was.
        """
        for word in range(HEADER):
            is_kept = word in (TEXT_END, INCARNATIONS) or COMMITTED <= word < LEFT_COUNT
            if not is_kept:
                self._words[self.start + word] = 0

    @property
    def text_end(self) -> int:
        """The number of the text that comes next."""
        return self._words[self.start + TEXT_END] or 1

    def add_text(self, text: str) -> int:
        """Write a text down; gives its number, from 1. The oldest ones are overwritten in turn."""
        data = text.encode()
        if len(data) > LONGEST_TEXT:
            data = data[: LONGEST_TEXT - 3].decode("utf-8", "ignore").encode() + b"..."
        length = 1 + (len(data) + 7) // 8
        number = self.text_end
        room = TEXT_WORDS - number % TEXT_WORDS
        if length > room:  # in one piece
            number += room
        # First this: from here on nobody believes in what stands there.
        self._words[self.start + TEXT_END] = number + length
        at = self._texts + number % TEXT_WORDS
        self._words[at] = len(data)
        self._board.bytes[(at + 1) * 8 : (at + 1) * 8 + len(data)] = data
        return number

    def add_stream(self, key: int, name: str, members: Sequence[int], at: int = -1) -> int:
        """Begin a stream; gives the index of its first word, or -1 where there is no room.

        Args:
            key: Of the stream.
            name: For people.
            members: The ranks that take part.
            at: Where a stream was that nobody needs any more. Default: where none has been.
        """
        words = self._words
        count = words[self.start + STREAM_COUNT]
        is_new = at < 0
        if is_new and count >= STREAMS:
            return -1
        if is_new:
            at = self._first + count * STREAM
        words[at + KEY] = 0
        words[self.start + INCARNATIONS] = words[at + INCARNATION] = (
            words[self.start + INCARNATIONS] + 1
        )
        words[at + COUNT] = words[at + BEGUN] = words[at + WITHDRAWN] = 0
        bits = sum(1 << rank for rank in set(members))
        for word in range(MEMBER_WORDS):
            words[at + MEMBERS + word] = bits >> (64 * word) & WORD_MASK
        data = _shortened(name, NAME_WORDS * 8)
        self._board.bytes[(at + NAME) * 8 : (at + NAME) * 8 + len(data)] = data
        words[at + NAME_BYTES] = len(data)
        words[at + KEY] = key
        if is_new:
            words[self.start + STREAM_COUNT] = count + 1
        return at

    def add_withdrawn(self, at: int, sequence: int, fingerprint: int) -> None:
        """An operation is about to be withdrawn.

        Args:
            at: Where its stream begins.
            sequence: Its sequence word.
            fingerprint: What stands for it.
        """
        words = self._words
        count = words[at + WITHDRAWN]
        entry = at + WITHDRAWN + 1 + 2 * (count % MOST_WITHDRAWN)
        words[entry], words[entry + 1] = sequence, fingerprint
        words[at + WITHDRAWN] = count + 1

    def withdrawn(self, at: int, sequence: int) -> list[int]:
        """What stands for the operations that were withdrawn with a sequence word, oldest first."""
        count = self._words[at + WITHDRAWN]
        if not count:
            return []
        entries = self._words[at + WITHDRAWN + 1 : at + STREAM].tolist()
        order = range(max(0, count - MOST_WITHDRAWN), count)
        places = (2 * (number % MOST_WITHDRAWN) for number in order)
        return [entries[place + 1] for place in places if entries[place] == sequence]

    def is_accepted(self, at: int) -> bool:
        """Whether the backend is known to have accepted the operation in the slot at this word."""
        words = self._words
        state = words[at + STATE]
        return state >= ENQUEUED or words[at + ACCEPTED] == words[at + SEQUENCE]

    def set_last_line(self, text: str) -> None:
        """Where its main thread has just been seen; empty where it runs nothing."""
        if text:
            data = text.encode("utf-8", "replace")[: LINE_WORDS * 8 - 1] + b"\0"
            self._board.bytes[self._line : self._line + len(data)] = data
        else:  # as at the end of each request
            self._board.bytes[self._line] = 0

    def clear_input_request(self) -> list[tuple[int, int]]:
        """Its rank has died, so it is in no debugger and waits for no input; the kernel says so.

        Returns:
            Where it has written, and what.
        """
        written = [(self.start + word, 0) for word in (IN_DEBUGGER, ASKS)]
        for at, word in written:
            self._words[at] = word
        return written

    def set_log_begins(self, request: int, sizes: tuple[int, int]) -> None:
        """How long its log files were as a request began, which puts out what follows."""
        words, start = self._words, self.start
        words[start + LOG_REQUEST] = 0
        words[start + LOG_BEGINS], words[start + LOG_BEGINS + 1] = sizes
        words[start + LOG_REQUEST] = request

    def set_damaged(self, how: int) -> None:
        """Its group, or its device, is of no use any more."""
        self._words[self.start + IS_DAMAGED] |= how

    def note_abort(self) -> None:
        """The rank begins to abort its groups, which frees the threads that wait in them."""
        self._words[self.start + ABORTED_AT] = time.monotonic_ns()

    def set_connected_in(self, generation: int) -> None:
        """In which generation its connections were made; -1 if they may not be whole."""
        self._words[self.start + CONNECTED_IN] = generation + 1

    def set_unsettled(self, is_unsettled: bool) -> None:
        """Whether something that it has issued has not ended yet."""
        self._words[self.start + IS_UNSETTLED] = is_unsettled

    def set_without_group(self, is_without: bool, *, has_own: bool = False) -> None:
        """Whether its code has left the process group, and whether it has made one of its own."""
        self._words[self.start + WITHOUT_GROUP] = OWN_GROUP if has_own else is_without

    def note_left(self, group: str, family: tuple[int, int], place: int, *, is_final: bool) -> None:
        """Its code leaves a process group, which it may have put aside before.

        Args:
            group: The group's name.
            family: What tells the group from others of its name, as the keys of its streams do.
            place: A word that stands for the line.
            is_final: It has destroyed the group.
        """
        words = self._words
        number = words[self.start + LEFT_COUNT]
        at = self._left_at(group) or self.start + LEFT + number % LEFT_RING * LEFT_WORDS
        words[at + GROUP] = 0
        words[at + LEFT_AT], words[at + IS_FINAL] = place, is_final
        words[at + FAMILY], words[at + FAMILY + 1] = family
        words[at + GROUP] = self.add_text(group)
        words[self.start + LEFT_COUNT] = number + 1

    def forget_left(self, group: str) -> None:
        """It has put the group of that name back."""
        if at := self._left_at(group):
            self._words[at + GROUP] = 0

    def left_slots(self) -> Iterator[int]:
        """Where it stands that its code has left a group."""
        first = self.start + LEFT
        for at in range(first, first + LEFT_RING * LEFT_WORDS, LEFT_WORDS):
            if self._words[at + GROUP]:
                yield at

    def _left_at(self, group: str) -> int:
        slots = self.left_slots() if self._words[self.start + LEFT_COUNT] else ()
        return next((at for at in slots if self.text(self._words[at + GROUP]) == group), 0)

    def set_staged(self, number: int) -> None:
        """Which push it has staged that the kernel commits by a word; 0 if none."""
        self._words[self.start + STAGED] = number

    def set_unseen(self, flags: int, count: int) -> None:
        """What its device may have been given that is not seen, and how often that was begun."""
        self._words[self.start + UNSEEN] = flags
        self._words[self.start + UNSEEN_COUNT] = count

    def set_process(self, pid: int, started: int) -> None:
        """Which process writes here.

        Args:
            pid: Its own.
            started: When it was started, in the system's ticks; pids are given again.
        """
        started &= (1 << STARTED_BITS) - 1
        self._words[self.start + PROCESS] = started << PID_BITS | pid

    def set_process_state(self, process: tuple[int, int], letter: str) -> None:
        """By the relay: what the system says of the process that wrote :meth:`set_process`."""
        pid, started = process
        word = (started << PID_BITS | pid) << LETTER_BITS | ord(letter)
        self._words[self.start + PROCESS_STATE] = word

    def set_processor_time(self, ticks: int) -> None:
        """By the relay: how much time its main thread has used."""
        self._words[self.start + PROCESSOR_TIME] = ticks

    def set_agent_state(self, pid: int, letter: str) -> None:
        """By the relay, in the first region of its node: what the system says of the agent."""
        self._words[self.start + AGENT_STATE] = pid << LETTER_BITS | ord(letter)

    # --- reading ----------------------------------------------------------------------------------

    @property
    def process(self) -> tuple[int, int]:
        """The process that writes here: its pid and its start, in ``STARTED_BITS``; or zeros."""
        word = self._words[self.start + PROCESS]
        return word & (1 << PID_BITS) - 1, word >> PID_BITS

    def process_state(self, pid: int) -> str:
        """A process's letter of /proc, as the relay has it; empty where that is of another one."""
        word = self._words[self.start + PROCESS_STATE]
        is_its = word >> LETTER_BITS == self._words[self.start + PROCESS] and self.process[0] == pid
        return _letter(word) if is_its else ""

    @property
    def processor_time(self) -> int:
        """Clock ticks that its main thread has used in a run, as the relay has it."""
        return self._words[self.start + PROCESSOR_TIME]

    @property
    def agent_state(self) -> tuple[int, str]:
        """The pid and the letter of its node's agent, as the relay has it; of the first region."""
        word = self._words[self.start + AGENT_STATE]
        return word >> LETTER_BITS, _letter(word)

    @property
    def unseen(self) -> Unseen:
        """What its device may have been given that is not seen."""
        return Unseen(self._words[self.start + UNSEEN])

    @property
    def unseen_count(self) -> int:
        """How often something of that kind was begun."""
        return self._words[self.start + UNSEEN_COUNT]

    @property
    def is_without_group(self) -> bool:
        """Whether its code has left the process group, when its last request ended."""
        return self._words[self.start + WITHOUT_GROUP] == 1

    @property
    def has_own_group(self) -> bool:
        """Whether it was in a group of its code's own, then."""
        return self._words[self.start + WITHOUT_GROUP] == OWN_GROUP

    def left(self) -> dict[str, Left]:
        """The process groups that its code has left in this generation."""
        words = self._words
        if not words[self.start + LEFT_COUNT]:
            return {}
        found = {}
        for at in self.left_slots():
            group, place = self.text(words[at + GROUP]), self.place(words[at + LEFT_AT])
            if group:
                family = words[at + FAMILY], words[at + FAMILY + 1]
                found[group] = Left(place, words[at + IS_FINAL] != 0, family)
        return found

    def text(self, number: int) -> str | None:
        """The text of that number; None where it has been overwritten, empty for number 0."""
        if not number:
            return ""
        if not self._has_text(number):
            return None
        at = self._texts + number % TEXT_WORDS
        length = self._words[at]
        begin = (at + 1) * 8
        data = self._board.bytes[begin : begin + min(length, LONGEST_TEXT)]
        return data.decode("utf-8", "replace") if self._has_text(number) else None

    def _has_text(self, number: int) -> bool:
        end = self._words[self.start + TEXT_END]
        return 0 < number < end <= number + TEXT_WORDS

    def find_stream(self, key: int) -> int:
        """The index of a stream's first word; -1 if this rank has not begun it."""
        first = self._first
        end = first + min(STREAMS, self._words[self.start + STREAM_COUNT]) * STREAM
        keys = self._words[first + KEY : end : STREAM].tolist()
        return first + keys.index(key) * STREAM if key in keys else -1

    def incarnation(self, at: int, key: int) -> int:
        """Of the stream that begins at this word; 0 if it is not, or no longer, that of the key."""
        number = self._words[at + INCARNATION]
        return number if self._words[at + KEY] == key else 0

    def base(self, at: int) -> int:
        """What the incarnation of the stream there adds to the sequence words of its slots."""
        return self._words[at + INCARNATION] << SEQUENCE_BITS

    def slot(self, at: int) -> Slot:
        """What is written in the slot that begins at this word."""
        words = self._words
        while True:
            sequence = words[at + SEQUENCE]
            signature = self.text(words[at + SIGNATURE])
            slot = Slot(
                words[at + FINGERPRINT],
                OVERWRITTEN if signature is None else signature,
                self.place(words[at + PLACE]),
                words[at + BEGAN],
                words[at + STATE],
                words[at + THREAD],
            )
            if signature is not None or words[at + SEQUENCE] == sequence:
                return slot

    def place(self, word: int) -> str:
        """``In[3] line 4``, from a text's number and a line in one word."""
        name = self.text(word >> LINE_BITS)
        return CodeLine(name, word & LINE_MASK).name if name else ""

    @property
    def staged(self) -> int:
        """The push that it has staged and that is committed by a word; 0 if none."""
        return self._words[self.start + STAGED]

    @property
    def request(self) -> int:
        """The request that runs; 0 if none."""
        return self._words[self.start + REQUEST]

    @property
    def last_line(self) -> str:
        """``In[3] line 4``, as it was some hundredths of a second ago; or only what it runs."""
        data, again = b"", self._line_bytes()
        while data != again:  # it was just being written
            data, again = again, self._line_bytes()
        return data.decode("utf-8", "replace")

    def _line_bytes(self) -> bytes:
        data = self._board.bytes[self._line : self._line + LINE_WORDS * 8]
        return data.partition(b"\0")[0]

    @property
    def last_begun(self) -> int:
        """The last request that has begun; 0 if none has."""
        return self._words[self.start + LOG_REQUEST]

    def log_begins(self, request: int) -> tuple[int, int] | None:
        """Where a request's output begins in the log files; None if it is not the last one."""
        words, start = self._words, self.start
        begins = words[start + LOG_BEGINS], words[start + LOG_BEGINS + 1]
        return begins if words[start + LOG_REQUEST] == request else None

    @property
    def seconds(self) -> float:
        """Since when it runs, or is idle."""
        since = self._words[self.start + SINCE]
        return max(0.0, (self._now() - since) / 1e9) if since else 0.0

    @property
    def abort_seconds(self) -> float:
        """Seconds since the rank last began to abort its groups; 0 if it never has."""
        at = self._words[self.start + ABORTED_AT]
        return max(0.0, (self._now() - at) / 1e9) if at else 0.0

    @property
    def clock_behind_ns(self) -> int:
        """How much less the clock of its host says than that of this one."""
        word = self._words[self.start + CLOCK_BEHIND]
        return word - (1 << 64) if word >> 63 else word

    @clock_behind_ns.setter
    def clock_behind_ns(self, behind: int) -> None:
        self._words[self.start + CLOCK_BEHIND] = behind & WORD_MASK

    @property
    def seen_at_ns(self) -> int:
        """When a keeper has last had a look at what is on its host, by the clock of this one."""
        return self._words[self.start + SEEN_AT]

    @seen_at_ns.setter
    def seen_at_ns(self, at: int) -> None:
        self._words[self.start + SEEN_AT] = at

    def _now(self) -> int:
        return time.monotonic_ns() - self.clock_behind_ns

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
    def connected_in(self) -> int:
        """In which generation its connections were made, as far as they are whole; else -1."""
        words, start = self._words, self.start
        if words[start + IS_UNSETTLED] or words[start + IS_DAMAGED]:
            return -1
        return words[start + CONNECTED_IN] - 1

    @property
    def is_damaged(self) -> bool:
        """Whether an operation has failed within the group, which is of no use then."""
        return self._words[self.start + IS_DAMAGED] & OPERATION_FAILED != 0

    @property
    def is_cut_off(self) -> bool:
        """Whether its device has gone on behind an operation that was given up."""
        return self._words[self.start + IS_DAMAGED] & CUT_OFF != 0

    @property
    def is_device_lost(self) -> bool:
        """Whether every use of its device fails from now on, until its process ends."""
        return self._words[self.start + IS_DAMAGED] & DEVICE_LOST != 0

    def streams(self) -> Iterator[tuple[int, Head]]:
        """Where each stream begins, and whose it is."""
        for number in range(min(STREAMS, self._words[self.start + STREAM_COUNT])):
            at = self._first + number * STREAM
            head = self._head(at)
            if head is not None:
                yield at, head

    def _head(self, at: int) -> Head | None:
        """Whose the stream is; None while it is being given to another."""
        words = self._words
        key = words[at + KEY]
        incarnation = self.incarnation(at, key) if key else 0
        if not incarnation:
            return None
        known = self._heads.get(at)
        if known is not None and known[0] == incarnation:
            return known[1]
        begin = (at + NAME) * 8
        name = self._board.bytes[begin : begin + min(words[at + NAME_BYTES], NAME_WORDS * 8)]
        bits = self._board.bytes[(at + MEMBERS) * 8 : (at + MEMBERS + MEMBER_WORDS) * 8]
        head = Head(name.decode("utf-8", "replace"), _members(bits))
        if self.incarnation(at, key) != incarnation:
            return None
        self._heads[at] = incarnation, head
        return head

    def sequences(self) -> dict[str, int]:
        """For each stream, how many operations have been begun."""
        found = [
            (self._words[at + INCARNATION], head.name, self._words[at + COUNT])
            for at, head in self.streams()
        ]
        # A group that was made again may bear the name of one that is gone: the later one counts.
        return {name: count for _, name, count in sorted(found)}

    def begun(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """The same, each with the members of its group."""
        found = [
            (self._words[at + INCARNATION], head.name, self._words[at + COUNT], head.members)
            for at, head in self.streams()
        ]
        return {name: (count, members) for _, name, count, members in sorted(found)}

    def handed_on(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """For each stream, by its key: how many operations were handed to gloo, and its members."""
        words = self._words
        return {
            words[at + KEY]: (begun, head.members)
            for at, head in self.streams()
            if (begun := words[at + BEGUN])
        }

    def refused(self) -> tuple[tuple[str, int], ...]:
        """Operations that this rank has posted and not begun, as they do not match: group, number.

        They stay to be seen, so that the peers refuse them as well; nobody may count on them. Nor
        on what an error of a signal handler has broken off before all had come. Nor on what has
        failed within the group on a rank that has ended its part. Before that its peers may be
        about to see it fail as well.
        """
        over = (REFUSED, BROKEN_OFF) if self.request else (REFUSED, BROKEN_OFF, FAILED)
        found = []
        for at, head in self.streams():
            states = self._words[at + STREAM_HEAD + STATE : at + WITHDRAWN : SLOT].tolist()
            if any(state in states for state in over):
                incarnation = self._words[at + INCARNATION]
                posted = self._words[at + STREAM_HEAD + SEQUENCE : at + WITHDRAWN : SLOT].tolist()
                found += [
                    (head.name, word & SEQUENCE_MASK)
                    for word, state in zip(posted, states, strict=True)
                    if state in over and word >> SEQUENCE_BITS == incarnation
                ]
        return tuple(found)

    def operations(self) -> tuple[Operation, ...]:
        """What has been begun and not ended, the one that the main thread is blocked in last."""
        words, now = self._words, self._now()
        blocked = words[self.start + BLOCKED_IN]
        found: list[tuple[bool, int, Operation]] = []
        for at, head in self.streams():
            incarnation = words[at + INCARNATION]
            slots = words[at + STREAM_HEAD : at + WITHDRAWN].tolist()
            for offset in range(0, len(slots), SLOT):
                posted = slots[offset]
                if slots[offset + STATE] >= DONE or posted >> SEQUENCE_BITS != incarnation:
                    continue
                word = at + STREAM_HEAD + offset
                slot = self.slot(word)
                if words[word] != posted:  # it has ended meanwhile
                    continue
                title, _, detail = slot.signature.partition(" ")
                if slot.signature == OVERWRITTEN:
                    title, detail = OVERWRITTEN, ""
                device_stream = slots[offset + DEVICE_STREAM]
                is_enqueued = slots[offset + STATE] == ENQUEUED
                is_on_cpu = device_stream == ON_CPU
                is_given = is_enqueued and not is_on_cpu
                operation = Operation(
                    name=title,
                    group=head.name,
                    members=head.members,
                    sequence=posted & SEQUENCE_MASK,
                    detail=detail,
                    place=slot.place,
                    seconds=max(0.0, (now - slot.began) / 1e9),
                    is_waiting=blocked == word,
                    in_thread=blocked != word and slots[offset + STATE] == WAITING,
                    is_enqueued=is_enqueued,
                    device_stream=device_stream & STREAM_NUMBER_MASK if is_given else 0,
                    in_group_order=is_given and bool(device_stream & IN_GROUP_ORDER),
                    is_on_cpu=is_enqueued and is_on_cpu,
                    stream_key=words[at + KEY],
                    thread=slot.thread,
                )
                found.append((operation.is_waiting, slot.began, operation))
        return tuple(operation for _, _, operation in sorted(found, key=lambda f: f[:2]))


@functools.lru_cache(maxsize=1024)
def _members(bits: bytes) -> tuple[int, ...]:
    """The ranks that these bits stand for; one tuple for the heads of all members."""
    number = int.from_bytes(bits, sys.byteorder)
    return tuple(rank for rank in range(number.bit_length()) if number >> rank & 1)


def _letter(word: int) -> str:
    number = word & (1 << LETTER_BITS) - 1
    return chr(number) if number else ""


def _shortened(name: str, limit: int) -> bytes:
    """A name as bytes; one that is too long is cut, and told from others by a part of its hash."""
    data = name.encode()
    if len(data) <= limit:
        return data
    mark = f"...{key_of(name):x}".encode()
    return data[: limit - len(mark)].decode("utf-8", "ignore").encode() + mark
