"""Writing down every operation before it begins, and comparing it with those of the other ranks.

Each rank posts what it is about to do on the board (see ``board``) and reads what its peers have
posted as the same operation of the same group. Two ways of comparing:

- *meet*, for a collective that its caller waits for anyway: nothing begins before every rank has
  posted. A rank that comes alone waits here, in Python, where it can be told to stop; a mismatch is
  seen by every rank before a byte has been sent, so no tensor is changed.
- *compare*, for what is issued asynchronously, and for sends and receives, where waiting for the
  others could block a correct program: the rank that comes later sees what the earlier one posted.

Ranks of one host share a board. What those of other hosts have posted is not on it, which is no
sign that they have not: only ranks of the same host meet and compare here. Across hosts the kernel
does, with what relays bring it, see ``protocol/comparison``.

The file is long because a stream and the recorder share private state on the hot path: each
operation passes through both, and a call across modules costs time there.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
import time
from _thread import get_ident
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any

from distsession.engine import cause, frames
from distsession.engine.collectives import torch_private
from distsession.engine.collectives.connections import Connections
from distsession.engine.collectives.in_flight import InFlight
from distsession.engine.collectives.operation_log import (
    BEGAN,
    BLOCKED,
    ENDED,
    FAILED,
    FLAGS,
    IS_ASYNC,
    IS_ENQUEUED,
    Entry,
    OperationLog,
    end,
)
from distsession.engine.collectives.operations import (
    comparable,
    describe,
    describe_detail,
)
from distsession.engine.collectives.unseen import UnseenWork
from distsession.engine.failure import is_user_code, short_name
from distsession.engine.gate import Gate
from distsession.engine.listeners import RequestListener
from distsession.engine.torch_errors import (
    Break,
    classify,
    in_torchs_place,
    plain_text,
    stand_in,
    time_limit_s,
)
from distsession.errors import CollectiveError, CollectiveHangError, CollectiveMismatchError
from distsession.protocol import board as layout
from distsession.protocol.board import Board, chained, key_of
from distsession.protocol.cause import (
    late_remedy,
    late_text,
    mismatch_remedy,
    mismatch_text,
    sentence,
)
from distsession.protocol.messages import (
    Abort,
    Aborted,
    Called,
    CallRequest,
    Mismatch,
    Operation,
    PushRequest,
    Request,
    TimedOut,
)
from distsession.protocol.operation_names import Pair, SplitSizes
from distsession.protocol.rank_state import AbortReason

__all__ = ["Posted", "Recorder", "Stream"]

log = logging.getLogger(__name__)

SPINS_BEFORE_SLEEP = 40
"""How often a rank yields the processor to others before it sleeps between two looks."""
CPUS_TO_SPIN = 2
"""Processors for each rank, below which it sleeps at once: whoever spins there takes one from
gloo's threads, and so from the rank that is awaited."""
FIRST_SLEEP_S = 5e-5
LONGEST_SLEEP_S = 1e-3
"""Where a processor has no more than ``RANKS_FOR_A_CPU`` ranks. A look takes some 30 microseconds,
and where more of them share one, those who wait would take it from who they wait for."""
RANKS_FOR_A_CPU = 2
SLEEP_SHARE = 0.02
"""Nor is a sleep longer than this share of what was waited by then: nobody loses more by it."""
ABORT_REASON_TIMEOUT_S = 0.5
"""Seconds that a rank whose connection was closed waits to be told why."""
OTHER_CALLS_TIMEOUT_S = 0.05
"""Seconds that a rank which has seen a mismatch waits for what the rest posts, to name them too."""

SHORT_CALL_NS = 1_000_000
"""Up to which a call that gives something to a device is taken to have waited for nobody."""

MAX_NAMES = 1000
"""How many texts of places are kept before those of old cells are dropped."""
MAX_SIGNATURES = 4096
"""How many operations that differ are known by their text before all are looked at anew."""
MAX_TAGS = 64
"""How many streams of messages with a tag are kept though nothing of theirs is under way."""
TAGS_CHECKED = 4
"""How many of those are looked at whenever one more begins."""

Signed = tuple[int, int, tuple[Any, ...]]
"""The fingerprint of an operation, the number of its text, and its key."""

Posted = list[int]
"""A slot's words, as they were when an operation was posted."""

MANY = 8
"""Members of a group from which on all are compared at once. Below, one by one is faster."""

_FRAMES = range(24)
"""How far up a place in user code is looked for."""
_UNKNOWN = Operation("an operation", "world", (), 0)
_LIMIT_S = 1800.0
"""torch's own time limit of a group, where that of an operation's is not known."""

# Words, as plain names of this module: they are read several times in each operation.
_HEAD, _RING, _SLOT = layout.STREAM_HEAD, layout.RING, layout.SLOT
_FINGERPRINT, _SIGNATURE, _PLACE = layout.FINGERPRINT, layout.SIGNATURE, layout.PLACE
_BEGAN, _STATE, _COUNT = layout.BEGAN, layout.STATE, layout.COUNT
_DEVICE_STREAM, _THREAD = layout.DEVICE_STREAM, layout.THREAD
_CHAIN, _BEGUN = layout.CHAIN, layout.BEGUN
_SEQUENCE_BITS, _SEQUENCE_MASK = layout.SEQUENCE_BITS, layout.SEQUENCE_MASK
_LINE_BITS = layout.LINE_BITS
_HALF = layout.TEXT_WORDS // 2
_now = time.monotonic_ns
_pack = struct.Struct("Q").pack
_ISSUED, _WAITING, _DONE = layout.ISSUED, layout.WAITING, layout.DONE
_ENQUEUED, _ENQUEUED_FLAGS = layout.ENQUEUED, IS_ASYNC | IS_ENQUEUED


CompareFar = Callable[[str, int, int, str, float | None], Mapping[int, str]]
"""Takes the name of an operation, how many ranks take part, what stands for it and what it is, and
for how many seconds to wait; gives what others have called, by their ranks, if that differs."""


class Recorder(RequestListener):
    """One rank's hand on the board.

    Args:
        board: Shared by all ranks of the host.
        rank: Whose region is written.
        check: Compare with the other ranks; otherwise only write down.
        here: The ranks of this host. Default: all of the board.
    """

    def __init__(
        self, board: Board, rank: int, *, check: bool = True, here: Sequence[int] | None = None
    ):
        self.here = frozenset(range(len(board.regions)) if here is None else here)
        self.board = board
        self.rank = rank
        self.check = check
        self.words = board.words
        self.region = board.regions[rank]
        self.abort: Abort | None = None
        self.aborted = Gate()
        """Wakes who sleeps between two looks; only :attr:`abort` says whether there is one."""
        cpus = len(os.sched_getaffinity(0))
        self._crowd = max(1.0, len(self.here) / (RANKS_FOR_A_CPU * cpus))
        """How many times as long as others ranks sleep here between two looks."""
        self.spins = SPINS_BEFORE_SLEEP if cpus >= CPUS_TO_SPIN * len(self.here) else 0
        """How often a rank looks here before it sleeps between two looks."""
        self.signatures: dict[tuple[Any, ...], Signed] = {}
        self.compare_far: CompareFar | None = None
        """Compares an operation with ranks of other hosts before it begins; None: nobody does."""
        self.log: OperationLog | None = None
        """Where every operation is kept for a timeline, while code of the user runs."""
        self.in_flight = InFlight()
        """What the device has been given."""
        self.connections = Connections(self.region)
        """Whether those of gloo are as between two operations."""
        self.unseen = UnseenWork(
            self.in_flight, self.region.set_unseen, self.place_of, self.region.place
        )
        """What it has been given that is not seen."""
        self.names: dict[int, str] = {}
        """Texts of places, by their numbers; unlike the board's, none is overwritten."""
        self.places: dict[str, int] = {}
        """The texts of files, see :meth:`number_of`."""
        self._streams: dict[int, Stream] = {}
        self._tagged: OrderedDict[int, Stream] = OrderedDict()
        self._counts: dict[int, tuple[int, int]] = {}
        """How many operations streams had begun whose room was given to others, and what stands
        for all of them."""
        self._dropped: deque[tuple[int, Iterable[int]]] = deque()
        self._unneeded: list[Stream] = []
        """Streams of groups that are gone here; a peer may still be about to look."""
        self._free: list[int] = []
        """Where streams were that nobody looks at any more."""
        self.epoch = 0
        """Counts the generations that this process has seen; streams of others mean nothing."""
        self.overdue: TimedOut | None = None
        """For what this rank has given the group up by itself, if it has."""
        self._has_told_fork = False
        self.raised: Mismatch | None = None
        """What has been raised in this request, whatever the user's code makes of it."""
        self.broken: tuple[int, Operation | None] = 0, None
        """The last operation that failed while nobody waited in Python, and in which epoch."""
        self._limit = 0.0
        """Seconds that what the main thread is blocked in may take; 0 where that sees to it."""
        self.on_limited: Callable[[], None] = lambda: None
        """Called when something begins that may have a time limit, after nothing had one."""
        self._input_at = 0
        """When somebody was last seen to be asked for input: no limit counts until then."""
        self._is_full = False
        self._lock = threading.RLock()
        """Held to add texts and streams: a group may be used from several threads."""
        self._turn_at = 0
        self.main = threading.main_thread().ident
        """The thread that runs code of the user."""
        self.blocked = self.region.start + layout.BLOCKED_IN
        """Where it stands what the main thread waits in."""
        self._debuggers = [region.start + layout.IN_DEBUGGER for region in board.regions]
        self.fence = threading.Lock()
        """Taking and releasing it is a memory barrier: one's own post is out before one looks."""

    # --- life -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """A new generation begins; nothing is compared with an earlier one."""
        request, since = self.words[self.region.start + layout.REQUEST], time.monotonic_ns()
        self.region.clear()
        self.signatures.clear()
        self.places.clear()
        self.names = {}  # a log that is still read keeps the old one
        self._streams.clear()
        self._tagged.clear()
        self._counts.clear()
        self._unneeded.clear()
        self._free.clear()
        self.in_flight.clear()
        self.unseen.reset()
        self.epoch += 1
        self.overdue = None
        self.words[self.region.start + layout.SINCE] = since
        self.words[self.region.start + layout.REQUEST] = request
        self.abort = None
        self.aborted.close()

    def begin_request(self, request: Request) -> None:
        self._show_request(request.id)
        self.raised = None
        self.unseen.begin_request()
        self._expire_abort()
        if isinstance(request, (CallRequest, PushRequest)):
            for cell in request.cells:  # it may have another number by now
                self.places.pop(cell.file, None)

    def end_request(self, request: Request) -> None:
        self.connections.note_rest()
        self._show_request(0)
        self.note_completed()

    def note_completed(self) -> None:
        """From any thread: see what the device has completed of all that it was given."""
        self.in_flight.note_completed()
        self.unseen.note_completed()

    def note_wait(self, innermost: Callable[[], FrameType | None]) -> bool:
        """From another thread, now and then: note whether the main thread waits for the device.

        Returns:
            Whether there is anything that it may wait for, and somebody wants to know.
        """
        if self.log is None:
            return False
        self.in_flight.note_wait(innermost)
        return len(self.in_flight) > 0

    def _show_request(self, number: int) -> None:
        start = self.region.start
        self.words[start + layout.SINCE] = time.monotonic_ns()
        self.words[start + layout.REQUEST] = number

    def begin_log(self) -> OperationLog:
        """Every operation is kept from here on, until :attr:`log` is None again."""
        if len(self.names) > MAX_NAMES:  # only those that are cached can still be met
            known = set(self.places.values())
            self.names = {n: name for n, name in self.names.items() if n in known}
        self.log = OperationLog(self.names)
        return self.log

    def _expire_abort(self) -> None:
        """What the group was given up for concerned an earlier request; it is gone all the same."""
        abort, self.overdue = self.abort, None
        if abort is not None and abort.reason != AbortReason.FAILED:
            text = f"the process group was given up and is not connected: {abort.text}"
            self.abort = replace(abort, reason=AbortReason.FAILED, text=text, mismatch=None)

    def pause_after(self, waited: float) -> float:
        """How long to sleep before the next look, after so many seconds of waiting."""
        longest = LONGEST_SLEEP_S * self._crowd
        return max(LONGEST_SLEEP_S, min(longest, SLEEP_SHARE * waited))

    def is_input_awaited(self) -> bool:
        """Whether a rank's debugger is open, or waits for input: no time limit counts then."""
        words = self.words
        return any(words[at] or words[at + 1] for at in self._debuggers)

    @property
    def sees_all(self) -> bool:
        """Whether all ranks meet here before they begin what their callers wait for."""
        return self.check and len(self.here) == len(self.board.regions)

    @property
    def is_main_thread(self) -> bool:
        return get_ident() == self.main

    @property
    def is_blocked(self) -> bool:
        """Whether the main thread waits in an operation."""
        return self.words[self.blocked] != 0

    # --- for streams ------------------------------------------------------------------------------

    def stream(
        self, family: tuple[int, int], name: str, members: Sequence[int], *, tag: int = 0
    ) -> Stream:
        """The stream of that name, begun now if it was not before.

        Args:
            family: The generation of the process group, and how many groups of its name there were
                in it before.
            name: Unlike any other's of that family.
            members: The ranks that take part.
            tag: Of messages. There may be any number of tags, so their streams are given up again.
        """
        key = key_of(*family, name)
        known = self._streams.get(key)
        if known is None:
            with self._lock:
                known = self._streams[key] = self._begin_stream(key, name, members)
                if tag:
                    self._tagged[key] = known
                    self._evict_tagged()
        return known

    def _begin_stream(self, key: int, name: str, members: Sequence[int]) -> Stream:
        at = self.region.add_stream(key, name, members, self._allocate())
        if at < 0:
            self.connections.lose()  # nobody sees how much is begun there
        if at < 0 and not self._is_full:
            self._is_full = True
            log.warning(
                "rank %d has more than %d groups and tags in use: operations of %r, and of those "
                "that come after it, are neither compared nor shown",
                self.rank, layout.STREAMS, name,
            )  # fmt: skip
        return Stream(self, key, name, members, at, *self._counts.pop(key, (0, 0)))

    def enter(self, stream: Stream | None = None, at: int = 0) -> None:
        """Something begins within gloo; :meth:`leave` ends that.

        Whoever has given the group up by now has found nobody within, and leaves the connections as
        they are. So it is asked again, once it can be seen that this rank is about to begin.

        Args:
            stream: Whose operation that was posted is handed to gloo next, if it is one.
            at: Where it is posted, if the main thread waits in it.

        Raises:
            CollectiveError: The group has been given up; or what else it was given up for.
        """
        if stream is not None:
            stream.begun = stream.words[stream.begun_at] = stream.begun + 1
        connections = self.connections
        if get_ident() == self.main:
            connections.depth += 1
            if at:
                self.words[self.blocked] = at
        else:  # of other threads nobody keeps account
            connections.lose()
        if self.abort is not None:
            self.leave(at)
            if stream is not None:
                stream.begun = stream.words[stream.begun_at] = stream.begun - 1
            raise self.abort_error()

    def leave(self, at: int = 0) -> None:
        """The call of what has entered is over."""
        if get_ident() == self.main:
            self.connections.depth -= 1
            if at:
                self.words[self.blocked] = 0

    @property
    def begun(self) -> int:
        """How many operations of all groups have been handed to gloo in this generation."""
        return sum(stream.begun for stream in list(self._streams.values()))

    def drop_streams(self, epoch: int, keys: Iterable[int]) -> None:
        """A group is gone; called at any moment, in any thread.

        Args:
            epoch: Of this recorder, when the group was made.
            keys: Of the group's streams.
        """
        self._dropped.append((epoch, keys))

    def _allocate(self) -> int:
        """Where a stream is that no rank needs any more; -1 if there is none."""
        while self._dropped:
            epoch, keys = self._dropped.popleft()
            for key in list(keys) if epoch == self.epoch else ():
                stream = self._streams.pop(key, None)
                self._counts.pop(key, None)
                self._tagged.pop(key, None)
                if stream is not None and stream.is_watched:
                    self._unneeded.append(stream)
        if self._free:
            return self._free.pop()
        for number, stream in enumerate(self._unneeded):
            if stream.is_settled():
                del self._unneeded[number]
                return stream.at
        return -1

    def _evict_tagged(self) -> None:
        """Let go of a tag that was first used long ago, where both ends are done with it."""
        for key in list(self._tagged)[: min(TAGS_CHECKED, len(self._tagged) - MAX_TAGS)]:
            stream = self._tagged[key]
            if stream.is_watched and stream.is_at_rest():
                self._counts[key] = stream.count, stream.chain
                del self._tagged[key], self._streams[key]
                self.words[stream.at + layout.KEY] = 0
                self._free.append(stream.at)
            else:
                self._tagged.move_to_end(key)

    # --- texts ------------------------------------------------------------------------------------

    def sign(self, key: tuple[Any, ...]) -> Signed:
        """What stands for an operation that is seen for the first time."""
        text, compared = describe(key), comparable(key)
        with self._lock:
            if len(self.signatures) >= MAX_SIGNATURES:
                self.signatures.clear()
            number = self._add_text(text)
            signed = self.signatures[key] = (key_of(compared), number, key)
        return signed

    def _add_text(self, text: str) -> int:
        with self._lock:
            if self.region.text_end + layout.LONGEST_TEXT // 8 >= self._turn_at:
                self._turn()
            return self.region.add_text(text)

    def _turn(self) -> None:
        """Write down again what is still needed, before the ring of texts comes round to it.

        This is done once in each half of the ring. So every number that is younger than that is
        good for another half, and those that are older are in none of the caches and no slot.
        """
        region = self.region
        self.signatures.clear()
        self.places.clear()
        again: dict[int, int] = {}

        def anew(number: int) -> int:
            if number not in again:
                text = region.text(number)
                again[number] = region.add_text(text) if text else number
                if number in self.names:
                    self.names[again[number]] = self.names[number]
            return again[number]

        words = self.words
        for at in list(self._slots_in_use()):
            words[at + _SIGNATURE] = anew(words[at + _SIGNATURE])
            words[at + _PLACE] = _moved(words[at + _PLACE], anew)
        for at in list(region.left_slots()):
            words[at + layout.GROUP] = anew(words[at + layout.GROUP])
            words[at + layout.LEFT_AT] = _moved(words[at + layout.LEFT_AT], anew)
        asks = region.start + layout.ASKS_AT
        words[asks] = _moved(words[asks], anew)
        self._turn_at = (region.text_end // _HALF + 1) * _HALF

    def _slots_in_use(self) -> Iterator[int]:
        for stream in [*self._streams.values(), *self._unneeded]:
            if stream.is_watched:
                yield from stream.slots_in_use()

    def number_of(self, filename: str) -> int:
        """The text of a file with code of the user's; 0 for torch's, ours and other libraries'."""
        number = self._add_place(filename) if is_user_code(filename) else 0
        self.places[filename] = number
        return number

    def place_of(self, frame: FrameType | None, lineno: int = 0) -> int:
        """The innermost line of user code from a frame outwards, as a word; 0 if there is none.

        Args:
            frame: Where to begin.
            lineno: Of that frame, if it is not the one that the frame is at.
        """
        for each in frames.outward(frame):
            name = each.f_code.co_filename
            if is_user_code(name):
                number = self.places.get(name) or self.number_of(name)
                return number << _LINE_BITS | (lineno or each.f_lineno or 0)
            lineno = 0
        return 0

    def _add_place(self, filename: str) -> int:
        name = short_name(filename)
        number = self._add_text(name)
        self.names[number] = name
        return number

    def note_left(self, group: str, family: tuple[int, int], *, is_final: bool) -> None:
        """Code of the user leaves a process group; see ``Region.note_left``."""
        with self._lock:
            place = self.place_of(sys._getframe(1))
            self.region.note_left(group, family, place, is_final=is_final)

    def block(self, at: int, limit: float = 0.0) -> None:
        """The main thread waits in this operation from here on; 0 for none.

        Args:
            at: Where that is posted.
            limit: Seconds that it may take; 0 where it ends by itself then.
        """
        if get_ident() == self.main:
            self._limit = limit
            self.words[self.blocked] = at
            if limit:
                self.on_limited()

    def repeat_place(self, place: int) -> int:
        """A place that was found before, as a word that can be written down now."""
        name = self.names.get(place >> _LINE_BITS)
        number = place >> _LINE_BITS if name is None else self._add_text(name)
        return number << _LINE_BITS | (place & layout.LINE_MASK)

    def explain(self, error: BaseException) -> BaseException:
        """Why an operation broke off: what the group was given up for, not a closed socket."""
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return error
        text = str(error)
        why = classify(text)
        if why is Break.MISMATCH:  # check="detail"
            return CollectiveMismatchError(text)
        if why is Break.OUTSIDE and self.abort is None:
            return error
        # A peer may have closed its end of a connection a moment before we are told why.
        deadline = time.monotonic() + ABORT_REASON_TIMEOUT_S
        while self.abort is None and why is Break.CLOSED and time.monotonic() < deadline:
            time.sleep(0.002)
        if self.abort is not None:
            return self.abort_error().with_traceback(error.__traceback__)
        self.mark_damaged()
        if why is Break.CLOSED:
            operation = self._operation()
            closed = CollectiveError(
                f"{_described(operation)} broke off: another rank closed its connection, as one "
                "does that fails, dies or runs into a time limit within an operation."
            ).with_traceback(error.__traceback__)
            in_torchs_place(closed, plain_text(text))
            return cause.attach(closed, Aborted(operation))
        if why is Break.TIMED_OUT:
            late = self._timeout_error(time_limit_s(text)).with_traceback(error.__traceback__)
            return in_torchs_place(late, plain_text(text))
        return error

    def _timeout_error(self, limit_s: float) -> CollectiveHangError:
        """What to raise for a time limit of gloo's."""
        epoch, broken = self.broken
        ended = (broken,) if broken is not None and epoch == self.epoch else ()
        *operations, last = [*(self.region.operations() or ended), _UNKNOWN]
        begun = [region.sequences() for region in self.board.regions]
        found = TimedOut(last, ())
        for operation in reversed(operations):
            late = [
                rank
                for rank in operation.members
                if rank in self.here and begun[rank].get(operation.group, 0) < operation.sequence
            ]
            if late or found.operation is _UNKNOWN:
                found = TimedOut(replace(operation, is_waiting=True), tuple(late))
            if late:
                break
        return _late_error(self.with_threads(replace(found, limit=limit_s)), self.rank)

    # --- time limits of what a device was given ---------------------------------------------------

    @property
    def is_limited(self) -> bool:
        """From any thread: whether anything is under way that may have a time limit."""
        return bool(self._limit or self.in_flight)

    def find_overdue(self) -> TimedOut | None:
        """From another thread: an operation that has been under way for longer than it may.

        It is one that a device was given, or in whose call the main thread waits for others.
        """
        if self.abort is not None or not self.is_limited:
            return None
        if self.is_input_awaited():
            self._input_at = time.monotonic_ns()
            return None
        late = self.in_flight.overdue(self._input_at, time.monotonic_ns())
        if late is not None:
            return self._timed_out(late[1].name, late[3] & _SEQUENCE_MASK, late[6])
        at, limit = self.words[self.blocked], self._limit
        if not (at and limit):
            return None
        began = max(self.words[at + _BEGAN], self._input_at)
        operation = self._operation()
        if time.monotonic_ns() - began < limit * 1e9 or operation is None:
            return None
        return self._timed_out(operation.group, operation.sequence, limit)

    def _timed_out(self, group: str, sequence: int, limit: float) -> TimedOut:
        """Who did not come to an operation of this rank."""
        operations = [op for op in self.region.operations() if op.group == group]
        exact = [op for op in operations if op.sequence == sequence]
        # Of many that wait for their turn, the first are no longer on the board.
        operation = (exact or operations or [replace(_UNKNOWN, group=group, sequence=sequence)])[0]
        late = (
            rank
            for rank in self.here.intersection(operation.members)
            if (region := self.board.regions[rank]).sequences().get(group, 0) < operation.sequence
            or (group, operation.sequence) in region.refused()
        )
        late_in = TimedOut(replace(operation, is_waiting=True), tuple(sorted(late)), limit)
        return self.with_threads(late_in)

    def with_threads(self, overdue: TimedOut) -> TimedOut:
        """The same with what several threads of this rank wait in, if they do in that group."""
        group = overdue.operation.group
        threads = {
            op.thread: Called(self.rank, op.name, op.detail, op.place, op.thread != 0)
            for op in self.region.operations()
            if op.group == group and (op.in_thread or op.is_waiting)
        }
        is_one = len(threads) < 2 or Pair.from_name(group) is not None
        return overdue if is_one else replace(overdue, threads=tuple(threads.values()))

    def give_up(self, overdue: TimedOut, generation: int) -> Abort:
        """From another thread: nothing of this generation begins any more, for that reason."""
        self.overdue = overdue
        self.mark_damaged()
        text = sentence(late_text(overdue, (self.rank,), {}))
        return Abort(AbortReason.HANG, text, generation)

    def mark_damaged(self) -> None:
        """An operation has failed within the group: gloo closes its connections then."""
        self.region.set_damaged(layout.OPERATION_FAILED)

    def abort_error(self, operation: Operation | None = None) -> BaseException:
        """What an operation of an aborted generation raises.

        Args:
            operation: One that is refused; by default what the main thread is in.
        """
        abort = self.abort
        assert abort is not None
        if self.overdue is not None:
            late = _late_error(self.overdue, self.rank)
            return self.stand_in(late, self.overdue.operation, self.overdue.limit)
        kinds: dict[AbortReason, type[BaseException]] = {
            AbortReason.STOP: KeyboardInterrupt,
            AbortReason.MISMATCH: CollectiveMismatchError,
            AbortReason.HANG: CollectiveHangError,
        }
        known, mismatch = operation or self._operation(), abort.mismatch
        if mismatch is not None and any(call.rank == self.rank for call in mismatch.calls):
            remedy = mismatch_remedy(mismatch)
            self.raised = mismatch
            differs = CollectiveMismatchError(abort.text, remedy=remedy)
            return cause.attach(self.stand_in(differs, known), mismatch)
        error = kinds.get(abort.reason, CollectiveError)(abort.text)
        if abort.reason is AbortReason.FORKED and not self._has_told_fork:
            self._has_told_fork = True  # nobody waits for what it raises, and it may be caught
            sys.stderr.write(f"CollectiveError: {_described(known)}: {abort.text}\n")
        return cause.attach(self.stand_in(error, known), Aborted(known))

    def stand_in(
        self, error: BaseException, operation: Operation | None, limit: float = 0.0
    ) -> BaseException:
        """Let an error be what torch raises, too, where that operation breaks off.

        Args:
            error: What is raised.
            operation: If it is known.
            limit: Its time limit in seconds. Default: that of its group.
        """
        operation = operation or _UNKNOWN
        found = [s for s in list(self._streams.values()) if s.name == operation.group]
        return stand_in(
            error,
            name=operation.name,
            sequence=operation.sequence,
            limit_s=limit or (found[-1].limit if found else _LIMIT_S),
            rank=self.rank,
            is_gloo=not found or found[-1].is_gloo,
        )

    def _operation(self) -> Operation | None:
        """What this rank is in: what the main thread waits in, if it does."""
        operations = self.region.operations()
        return replace(operations[-1], is_waiting=True) if operations else None


class Stream:
    """The operations of one group, or from one rank to another, as this rank issues them."""

    def __init__(
        self,
        recorder: Recorder,
        key: int,
        name: str,
        members: Sequence[int],
        at: int,
        count: int = 0,
        chain: int = 0,
    ) -> None:
        self.recorder = recorder
        self.chain = self._chain_before = chain
        """Stands for all operations that were posted, where the members are on several hosts."""
        self._is_split = not recorder.here.issuperset(members)
        self.name = name
        self.key = key
        self.count = count
        self.begun = 0
        """How many of them have been handed to gloo."""
        self.is_gloo, self.limit = True, _LIMIT_S
        """Whether gloo does them, and the group's time limit: for what torch says of an error."""
        self.members = tuple(members)
        self.open: dict[int, Entry] = {}
        """What is logged and has not ended, by where it is posted."""
        self.is_watched = at >= 0
        """Whether it has room on the board; otherwise nobody sees it."""
        self.at = max(at, 0)
        self.words = recorder.words
        if not self.is_watched:
            self.words = memoryview(bytearray(8 * layout.STREAM)).cast("Q")
        self.words[self.at + _COUNT] = count
        self._base = self.words[self.at + layout.INCARNATION] << _SEQUENCE_BITS
        self._others = [r for r in members if r != recorder.rank and r in recorder.here]
        """The members of the same host: nothing is seen of the others."""
        self._first, self.begun_at = self.at + _HEAD, self.at + _BEGUN
        self._own = key >> 1
        """Keeps what stands for an operation here apart from all of other streams."""
        is_compared = self.is_watched and recorder.check
        self._peers = [[rank, -1, 0] for rank in self._others if is_compared]
        """Ranks to compare with; where the stream of each begins (-1: not found yet), its base."""
        self._found: list[int] | None = None if self._peers else []
        """Where the fingerprints of the peers' operations begin, once all are found."""
        self._row: tuple[int, int, int, int] | None = None
        """Where there are many, and the members' begin at even distances: those of the first and
        behind the last, the distance, and how many there are."""

    def post(self, key: tuple[Any, ...], state: int = _ISSUED) -> int:
        """Write an operation down; gives where.

        Args:
            key: What it is.
            state: Whether this thread waits for it.

        Raises:
            CollectiveError: The group has been given up; or what else it was given up for.
        """
        recorder = self.recorder
        if recorder.abort is not None:
            raise recorder.abort_error(self._refused(key))
        # The key is the one that was signed: the log keeps it, and none of its own for each.
        fingerprint, text, key = recorder.signatures.get(key) or recorder.sign(key)
        try:
            frame = sys._getframe(3)  # of who has called the group's method
        except ValueError:  # that was C++, in a thread of its own
            frame = None
        place, places = 0, recorder.places
        for _ in _FRAMES:  # outwards to the innermost line of the user's
            if frame is None:
                break
            name = frame.f_code.co_filename
            number = places.get(name)
            if number is None:
                number = recorder.number_of(name)
            if number:
                place = number << _LINE_BITS | (frame.f_lineno or 0)
                break
            frame = frame.f_back
        if frame is None and not recorder.is_main_thread:
            # A thread of torch's, such as autograd's for a device: the main thread waits for it.
            place = recorder.place_of(frames.innermost(recorder.main or 0))
        self.count = sequence = self.count + 1
        at = self._first + (sequence % _RING) * _SLOT
        words = self.words
        words[at + _FINGERPRINT] = fingerprint = fingerprint ^ (self._own + sequence)
        words[at + _SIGNATURE] = text
        words[at + _PLACE] = place
        words[at + _BEGAN] = began = _now()
        words[at + _STATE] = state
        thread = get_ident()
        words[at + _THREAD] = 0 if thread == recorder.main else thread
        if self._is_split:
            self._chain_before = self.chain
            words[at + _CHAIN] = self.chain = chained(self.chain, fingerprint)
        words[at] = self._base + sequence
        words[self.at + _COUNT] = self.count  # another thread may have posted one meanwhile
        log = recorder.log
        if log is not None:
            entry = self.open[at] = [self, sequence, key, place, began, 0, 0, 0]
            log.count += 1
            log.append(entry)
        return at

    def _refused(self, key: tuple[Any, ...]) -> Operation:
        """An operation that is not to be begun."""
        recorder = self.recorder
        name, detail = key[0], describe_detail(key)
        place = recorder.region.place(recorder.place_of(sys._getframe(3).f_back))
        sequence = self.count + 1
        return Operation(name, self.name, self.members, sequence, detail, place, is_waiting=False)

    def end_call(self, at: int) -> None:
        """The call of an operation that was waited for is over, and it went well."""
        recorder, words = self.recorder, self.words
        if get_ident() == recorder.main:  # as in Recorder.leave
            recorder.connections.depth -= 1
            recorder.words[recorder.blocked] = 0
        words[at + _STATE] = _DONE
        entry = self.open.pop(at, None)
        if entry is not None:
            entry[ENDED] = _now()

    def end(self, at: int) -> None:
        """That operation is over, well or not."""
        self.words[at + _STATE] = _DONE
        entry = self.open.pop(at, None)
        if entry is not None:
            entry[ENDED] = _now()

    def returned(self, at: int) -> None:
        """The call of that operation is over: the rank has waited in it, if that took any time."""
        entry = self.open.get(at)
        if entry is not None and _now() - entry[BEGAN] > SHORT_CALL_NS:
            entry[BLOCKED] = entry[BEGAN]

    def fail(self, at: int) -> None:
        """That operation is over, without having been done."""
        if at in self.open:
            self.open[at][FLAGS] |= FAILED
        self.end(at)

    def refuse(self, at: int) -> None:
        """That operation does not match: it is not begun, and stays for its peers to see."""
        self.fail(at)
        if self.words[at] == self._base + self.count:
            self.words[at + _CHAIN] = self.chain = self._chain_before
        self.words[at + _STATE] = layout.REFUSED

    def leave(self, at: int, error: BaseException) -> None:
        """That operation is over before all have come: nobody may count on it any more.

        Unless it is given up for all, who come later would wait in it for ever.

        Args:
            at: Where it is posted.
            error: What ended it: that of a signal handler if it is none of ours.
        """
        self.fail(at)
        if self.recorder.abort is None and not isinstance(error, CollectiveError):
            self.words[at + _STATE] = layout.BROKEN_OFF

    def fail_begun(self, at: int) -> None:
        """That operation failed after the backend had accepted it, which uses up its number."""
        self.fail(at)
        self.words[at + _STATE] = layout.FAILED

    def accepted(self, at: int) -> None:
        """The backend has accepted that operation, and does it."""
        self.words[at + layout.ACCEPTED] = self.words[at]

    def withdraw(self, at: int) -> None:
        """The backend has refused that operation: the next one has its number, as in the backend.

        The peers may refuse it as well, and some may not have looked yet. So it is written down
        what was withdrawn.
        """
        if self.recorder.abort is None and self.words[at] == self._base + self.count:
            if self.is_watched:
                self.recorder.region.add_withdrawn(
                    self.at, self.words[at], self.words[at + _FINGERPRINT]
                )
            self.words[at] = self.words[at + _FINGERPRINT] = 0
            self.chain = self._chain_before
            self.count -= 1
            self.words[self.at + _COUNT] = self.count
        self.fail(at)  # last: what is over and still there counts as accepted

    # --- operations that are waited for later, when their slots may be others' --------------------

    def sequence_word(self, at: int) -> int:
        """What says, while it is there, that the slot is still that operation's."""
        return self.words[at]

    def enqueued(
        self, at: int, work: Any, limit: float, posted: int = 0, device_stream: int = 0
    ) -> None:
        """A device has been given that operation.

        Args:
            at: Where it is posted.
            work: Its handle.
            limit: Seconds that it may take.
            posted: Its sequence word. Default: it has just been posted.
            device_stream: The number of the device's stream that it runs in, if it is known, with
                ``layout.IN_GROUP_ORDER`` if that holds; ``layout.ON_CPU`` where threads of the
                backend do it instead.
        """
        words, in_flight = self.words, self.recorder.in_flight
        posted = posted or words[at]
        entry = self.open.pop(at, None)
        if entry is not None:
            entry[FLAGS] |= IS_ASYNC if device_stream == layout.ON_CPU else _ENQUEUED_FLAGS
        if in_flight.captures and torch_private.is_stream_capturing():
            # It was written down for a graph, and its handle may not be asked.
            if entry is not None:
                end(entry)
            self.end_posted(at, [posted])
        else:
            words[at + _DEVICE_STREAM] = device_stream
            words[at + _STATE] = _ENQUEUED
            in_flight.add((work, self, at, posted, entry, words[at + _BEGAN], limit))
            if len(in_flight) == 1:
                self.recorder.on_limited()

    def posted(self, at: int) -> Posted:
        """What has just been posted there."""
        return self.words[at : at + _SLOT].tolist()

    def end_posted(self, at: int, posted: Posted) -> None:
        """That operation is over; its slot is marked if it is still its own."""
        if at and self.words[at] == posted[0] and self.words[at + _STATE] < _DONE:
            self.words[at + _STATE] = _DONE

    def fail_posted(self, at: int, posted: Posted) -> None:
        """The same of one that failed after the backend had accepted it."""
        if at and self.words[at] == posted[0]:
            if self.words[at + _STATE] < _DONE:
                self.recorder.broken = self.recorder.epoch, self._operation(at)
            self.words[at + _STATE] = layout.FAILED

    def wait_for(self, at: int, posted: Posted, key: tuple[Any, ...]) -> int:
        """This thread is about to wait for that operation; gives where that can be seen.

        An operation that has lost its slot to a later one gets the spare slot for that time, if
        it is the main thread that waits; 0 otherwise.
        """
        words = self.words
        if words[at] == posted[0]:
            return at
        if not self.is_watched or not self.recorder.is_main_thread:
            return 0
        spare = self.at + _HEAD + _RING * _SLOT
        _, text, _ = self.recorder.signatures.get(key) or self.recorder.sign(key)
        place = self.recorder.repeat_place(posted[_PLACE])
        values = (posted[_FINGERPRINT], text, place, posted[_BEGAN], _WAITING)
        for word, value in enumerate(values, spare + 1):
            words[word] = value
        words[spare + _THREAD] = posted[_THREAD]
        words[spare] = posted[0]
        return spare

    # --- whether its room can be given to another -------------------------------------------------

    def slots_in_use(self) -> Iterator[int]:
        """Where operations are posted that have not ended."""
        words, base = self.words, self._base >> _SEQUENCE_BITS
        first = self.at + _HEAD
        for at in range(first, first + (_RING + 1) * _SLOT, _SLOT):
            if words[at + _STATE] < _DONE and words[at] >> _SEQUENCE_BITS == base:
                yield at

    def is_settled(self) -> bool:
        """Whether every peer has seen all that this rank has posted, or will never look."""
        return all(self._has_passed(rank) is not False for rank in self._others)

    def is_at_rest(self) -> bool:
        """Whether the messages of a pair of ranks have all been sent and received.

        The sender lets go first: it can see that the receiver is done. That the sender has let go
        is what the receiver sees.
        """
        if any(True for _ in self.slots_in_use()):
            return False
        if not self._others:  # the other end is on another host, where nobody looks at this
            return True
        source, target = self.members[0], self.members[-1]
        if self.recorder.rank == source:
            return self._has_passed(target) is True
        return self._has_passed(source) is None

    def _has_passed(self, rank: int) -> bool | None:
        """Whether a peer has done as many operations; None if it has no such stream."""
        region, words = self.recorder.board.regions[rank], self.recorder.words
        at = region.find_stream(self.key)
        incarnation = region.incarnation(at, self.key) if at >= 0 else 0
        if not incarnation:
            return None
        count = words[at + _COUNT]
        if count < self.count:
            return False
        slots = words[at + _HEAD : at + layout.WITHDRAWN].tolist()
        return not any(
            slots[slot] >> _SEQUENCE_BITS == incarnation
            and slots[slot] & _SEQUENCE_MASK <= self.count
            and slots[slot + _STATE] < _DONE
            for slot in range(0, len(slots), _SLOT)
        )

    # --- comparing --------------------------------------------------------------------------------

    def compare(self, at: int) -> None:
        """Compare with what the peers have posted by now.

        Raises:
            CollectiveMismatchError: A peer has posted something else.
        """
        with self.recorder.fence:
            pass
        if self._are_all_here(at):
            return
        for peer in self._peers:
            self._is_here(peer, at, is_async=True)

    def meet(self, at: int, timeout: float | None) -> None:
        """Wait until all peers have posted the same operation.

        Raises:
            CollectiveMismatchError: A peer has posted something else.
            CollectiveHangError: The peers did not come within ``timeout`` seconds.
        """
        # No fence: who misses here what a peer has just posted looks again.
        if not self._are_all_here(at):
            self._wait_for_peers(at, timeout)
        if self._is_split and self.recorder.compare_far is not None and self.is_watched:
            self._meet_far(self.recorder.compare_far, at, timeout)

    def _meet_far(self, compare: CompareFar, at: int, timeout: float | None) -> None:
        """The same, with ranks of other hosts, of which nothing is seen here."""
        recorder = self.recorder
        sequence, fingerprint = self.words[at] & _SEQUENCE_MASK, self.words[at + _FINGERPRINT]
        mine = recorder.region.slot(at)
        recorder.block(at)
        self.words[at + _STATE] = _WAITING
        try:
            said = compare(
                self._attempt(sequence),
                len(self.members),
                fingerprint,
                f"{mine.place}\0{mine.signature}",
                timeout,
            )
        except TimeoutError:
            recorder.mark_damaged()
            late = [rank for rank in self.members if rank not in recorder.here]
            raise self._late(at, late, timeout) from None
        finally:
            recorder.block(0)
        if said:
            calls = []
            for rank, text in said.items():
                place, _, signature = text.partition("\0")
                name, _, detail = signature.partition(" ")
                calls.append(Called(rank, name, detail, place))
            raise self._mismatch(sequence, calls)

    def _attempt(self, sequence: int) -> str:
        """Names an operation, also where others of its number were withdrawn."""
        count = len(self.recorder.region.withdrawn(self.at, self._base + sequence))
        return f"{self.key:x}/{sequence}" + (f".{count}" if count else "")

    def _wait_for_peers(self, at: int, timeout: float | None) -> None:
        recorder = self.recorder
        waiting = [peer for peer in self._peers if not self._is_here(peer, at)]
        if not waiting:
            return
        recorder.block(at)
        self.words[at + _STATE] = _WAITING
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        rounds, pause = 0, FIRST_SLEEP_S
        try:
            while waiting:
                if recorder.abort is not None:
                    raise recorder.abort_error()
                rounds += 1
                if rounds <= recorder.spins:
                    os.sched_yield()
                else:
                    if pause < LONGEST_SLEEP_S:
                        time.sleep(pause)
                        pause *= 1.2
                    else:
                        recorder.aborted.wait(recorder.pause_after(time.monotonic() - began))
                    if deadline is not None and recorder.is_input_awaited():
                        deadline = time.monotonic() + (timeout or 0.0)
                    elif deadline is not None and time.monotonic() > deadline:
                        recorder.mark_damaged()
                        raise self._late(at, [peer[0] for peer in waiting], timeout)
                waiting = [peer for peer in waiting if not self._is_here(peer, at)]
        finally:
            recorder.block(0)

    def _are_all_here(self, at: int) -> bool:
        """Whether all peers have just posted the same; the short way for what is so most often.

        What stands for an operation is another one in each stream and at each place in it, so one
        word of each peer says all.
        """
        words, slot = self.words, at - self._first
        mark = words[at + _FINGERPRINT]
        row = self._row
        if row is not None:  # by functions of C alone
            first, last, step, count = row
            return words[first + slot : last + slot : step].tobytes() == _pack(mark) * count
        found = self._found
        if found is None:
            return False
        for begins in found:  # noqa: SIM110  (all() takes twice as long)
            if words[begins + slot] != mark:
                return False
        return True

    def _is_here(self, peer: list[int], mine: int, *, is_async: bool = False) -> bool:
        if peer[1] < 0 and not self._find(peer):
            return False
        words = self.words
        sequence, at = words[mine] & _SEQUENCE_MASK, peer[1] + _HEAD + mine - self._first
        posted, base = words[at], peer[2]
        if posted == base + sequence:
            if words[at + _FINGERPRINT] == words[mine + _FINGERPRINT]:
                return True
            if words[peer[1] + _COUNT] >= sequence + _RING - 1:  # it is writing a later one there
                return True
            if (is_past := self._is_past_withdrawn(peer, mine, at)) is not None:
                return is_past
            slot = self.recorder.board.regions[peer[0]].slot(at)
            raise self._mismatch(sequence, [self._call(peer[0], slot)], is_async=is_async)
        if posted >> _SEQUENCE_BITS == base >> _SEQUENCE_BITS:
            return posted > base + sequence  # it is that far ahead only if it found this one alike
        if words[peer[1] + layout.INCARNATION] != base >> _SEQUENCE_BITS:
            peer[1] = -1  # the peer has no such group any more; its room is another's
            self._found = self._row = None
            return False
        return not posted and self._is_past_withdrawn(peer, mine, at) is True

    def _is_past_withdrawn(self, peer: list[int], mine: int, its: int) -> bool | None:
        """Whether a peer is past this operation, which its backend has refused.

        A backend that refuses an operation does so on all ranks as a rule, and not at the same
        moment. What was withdrawn under the same number says how far each rank is.

        Args:
            peer: One of the peers.
            mine: Where this rank has posted its operation.
            its: Where the peer has posted, or will post, that of the same number.

        Returns:
            True if the peer has withdrawn the same operation; False if it is still at one that this
            rank has withdrawn; None if the two operations are to be compared.
        """
        words, board = self.words, self.recorder.board
        if not words[peer[1] + layout.WITHDRAWN] and not words[self.at + layout.WITHDRAWN]:
            return None
        sequence, region = words[mine] & _SEQUENCE_MASK, board.regions[peer[0]]
        ours = self.recorder.region.withdrawn(self.at, self._base + sequence)
        while True:  # until nothing was withdrawn there meanwhile
            count, posted = words[peer[1] + layout.WITHDRAWN], words[its]
            theirs = region.withdrawn(peer[1], peer[2] + sequence)
            called = words[its + _FINGERPRINT]
            is_over = region.is_accepted(its) or words[peer[1] + _COUNT] > sequence
            if words[peer[1] + layout.WITHDRAWN] == count and words[its] == posted:
                break
        fingerprint = words[mine + _FINGERPRINT]
        if len(theirs) > len(ours):
            if theirs[len(ours)] == fingerprint:
                return True
            if len(theirs) == layout.MOST_WITHDRAWN and fingerprint in theirs:
                return True
        if posted != peer[2] + sequence:
            return posted > peer[2] + sequence
        if called == fingerprint:
            return True
        is_behind = len(ours) > len(theirs) and called == ours[len(theirs)]
        return False if is_behind and not is_over else None

    def _find(self, peer: list[int]) -> bool:
        """Look for a peer's stream; whether it is there."""
        region = self.recorder.board.regions[peer[0]]
        begins = region.find_stream(self.key)
        incarnation = region.incarnation(begins, self.key) if begins >= 0 else 0
        if not incarnation:
            return False
        peer[1:] = begins, incarnation << _SEQUENCE_BITS
        if all(begins >= 0 for _, begins, _ in self._peers):
            self._found = [begins + _HEAD + _FINGERPRINT for _, begins, _ in self._peers]
            self._row = _row_of([*self._found, self._first + _FINGERPRINT])
        return True

    def posted_by(self, rank: int) -> int:
        """How many operations that peer has begun."""
        region = self.recorder.board.regions[rank]
        begins = region.find_stream(self.key)
        count = self.recorder.words[begins + _COUNT] if begins >= 0 else 0
        return count if begins >= 0 and region.incarnation(begins, self.key) else 0

    # --- sizes that differ from rank to rank ------------------------------------------------------

    def compare_sizes(self, at: int, *, is_async: bool = False) -> None:
        """Check what all ranks send in an all_to_all against what each expects from the others.

        Every rank checks all of them, so that none begins what another has refused; where they do
        not meet, each checks those that have posted theirs by now.

        Raises:
            CollectiveMismatchError: A rank sends more or less than its peer expects.
        """
        sequence = self.words[at] & _SEQUENCE_MASK
        parts = [_parts(self._signature(rank, sequence)) for rank in self.members]
        for source, (sent, _) in enumerate(parts):
            for target, (_, received) in enumerate(parts):
                if sent and received and sent[target] != received[source]:
                    raise self._mismatch(sequence, is_async=is_async)

    # --- words for people -------------------------------------------------------------------------

    def _slot_of(self, rank: int, sequence: int) -> layout.Slot | None:
        """What a rank has posted as an operation, as long as that is there to be read."""
        region = self.recorder.board.regions[rank]
        begins = region.find_stream(self.key)
        incarnation = region.incarnation(begins, self.key) if begins >= 0 else 0
        at = begins + _HEAD + (sequence % _RING) * _SLOT
        expected = incarnation << _SEQUENCE_BITS | sequence
        words = self.recorder.words
        if not incarnation or words[at] != expected:
            return None
        slot = region.slot(at)
        return slot if words[at] == expected else None

    def _signature(self, rank: int, sequence: int) -> str:
        slot = self._slot_of(rank, sequence)
        return "" if slot is None else slot.signature

    def _call(self, rank: int, slot: layout.Slot) -> Called:
        name, _, detail = slot.signature.partition(" ")
        return Called(rank, name, detail, slot.place, slot.thread != 0)

    def _beside(self, rank: int, own: layout.Slot) -> dict[tuple[int, int], Called]:
        """What other threads of a rank wait in, or were refused, beside one of its operations.

        Args:
            rank: Of this host.
            own: That operation.
        """
        region, words = self.recorder.board.regions[rank], self.words
        begins = region.find_stream(self.key) if self.is_watched else -1
        incarnation = region.incarnation(begins, self.key) if begins >= 0 else 0
        if not incarnation:
            return {}
        found = {}
        since = words[region.start + layout.SINCE]  # earlier refusals belong to another run
        first = begins + _HEAD
        for at in range(first, first + _RING * _SLOT, _SLOT):
            posted = words[at]
            if (
                posted >> _SEQUENCE_BITS == incarnation
                and words[at + _STATE] in (_WAITING, layout.REFUSED)
                and words[at + _THREAD] != own.thread
                and words[at + _BEGAN] >= since
            ):
                found[rank, posted & _SEQUENCE_MASK] = self._call(rank, region.slot(at))
        return found

    def _mismatch(
        self, sequence: int, calls: Sequence[Called] = (), *, is_async: bool = False
    ) -> CollectiveMismatchError:
        """What to raise.

        Args:
            sequence: Of the operation.
            calls: What has been seen already; its rank may withdraw it at any moment.
            is_async: Nobody waits for the others here.
        """
        deadline = time.monotonic() + OTHER_CALLS_TIMEOUT_S
        seen = {call.rank: call for call in calls}
        beside: dict[tuple[int, int], Called] = {}
        while True:
            for rank in self.members:
                slot = self._slot_of(rank, sequence)
                if slot is not None:
                    seen[rank] = self._call(rank, slot)
                    beside |= self._beside(rank, slot)
            # What one thread calls here and the main thread there, the other may call next.
            is_mixed = len({call.in_thread for call in seen.values()}) > 1
            is_seen = len(seen) == len(self.members) and (beside or not is_mixed)
            if is_seen or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        calls = tuple(seen[rank] for rank in sorted(seen))
        others = tuple(beside[key] for key in sorted(beside))
        mismatch = Mismatch(self.name, sequence, calls, is_async, beside=others)
        text, remedy = sentence(mismatch_text(mismatch)), mismatch_remedy(mismatch)
        self.recorder.raised = mismatch
        differs = CollectiveMismatchError(text, remedy=remedy)
        self.recorder.stand_in(differs, None)
        return cause.attach(differs, mismatch)

    def _late(self, at: int, ranks: Sequence[int], timeout: float | None) -> CollectiveHangError:
        operation = self._operation(at)
        overdue = TimedOut(operation, tuple(ranks), timeout or 0.0)
        late = _late_error(self.recorder.with_threads(overdue), self.recorder.rank)
        self.recorder.stand_in(late, operation, timeout or 0.0)
        return late

    def _operation(self, at: int) -> Operation:
        """What is posted there."""
        call = self._call(self.recorder.rank, self.recorder.region.slot(at))
        sequence = self.words[at] & _SEQUENCE_MASK
        return Operation(call.name, self.name, self.members, sequence, call.detail, call.place)


def _row_of(places: list[int]) -> tuple[int, int, int, int] | None:
    """Where the first of many places is, what is behind the last, and their even distance."""
    first, *others = sorted(places)
    step = others[0] - first if others else 0
    count = len(places)
    if count < MANY or sorted(places) != list(range(first, first + step * count, step)):
        return None
    return first, first + step * (count - 1) + 1, step, count


def _late_error(overdue: TimedOut, rank: int) -> CollectiveHangError:
    text = sentence(late_text(overdue, (rank,), {}))
    return cause.attach(CollectiveHangError(text, remedy=late_remedy(overdue)), overdue)


def _described(operation: Operation | None) -> str:
    if operation is None:
        return "an operation"
    place = f" at {operation.place}" if operation.place else ""
    return _readable(f"{operation.name} {operation.detail}".strip()) + place


@lru_cache(256)
def _parts(signature: str) -> SplitSizes:
    """How much a rank sends to each member and expects from each; empty where it does not say."""
    return SplitSizes.from_description(signature) or SplitSizes((), ())


def _readable(signature: str) -> str:
    name, _, detail = signature.partition(" ")
    return f"{name} ({detail})" if detail else name


def _moved(place: int, anew: Callable[[int], int]) -> int:
    """A place whose text has been written down again."""
    return anew(place >> _LINE_BITS) << _LINE_BITS | (place & layout.LINE_MASK)
