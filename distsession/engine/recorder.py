"""Writing down every operation before it begins, and comparing it with those of the other ranks.

Runs in: an engine.

Each rank posts what it is about to do on the board (see ``board``) and reads what its peers have
posted as the same operation of the same group. Two ways of comparing:

- *meet*, for a collective that its caller waits for anyway: nothing begins before every rank has
  posted. A rank that comes alone waits here, in Python, where it can be told to stop; a mismatch is
  seen by every rank before a byte has been sent, so no tensor is changed.
- *look*, for what is issued asynchronously, and for sends and receives, where waiting for the
  others could block a correct program: the rank that comes later sees what the earlier one posted.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from distsession import board as layout
from distsession.board import Board, key_of
from distsession.engine.collectives import describe
from distsession.engine.failure import is_user_code, short_name
from distsession.engine.trace import ENDED, FAILED, FLAGS, Entry, Log
from distsession.errors import CollectiveError, CollectiveHangError, CollectiveMismatchError
from distsession.messages import Abort
from distsession.ranks import format_ranks

__all__ = ["Recorder", "Stream"]

SPINS = 40
"""How often a rank yields the processor to others before it sleeps between two looks."""
FIRST_SLEEP = 2e-5
LONGEST_SLEEP = 1e-3
WHY = 0.5
"""Seconds that a rank whose connection was closed waits to be told why."""
FOR_THE_OTHERS = 0.05
"""Seconds that a rank which has seen a mismatch waits for what the rest posts, to name them too."""

NAMES = 1000
"""How many texts of places are kept before those of old cells are dropped."""

_FRAMES = range(24)
"""How far up a place in user code is looked for."""
_SIZES = re.compile(r"send ([\d,]*) receive ([\d,]*)$")

# Words, as plain names of this module: they are read several times in each operation.
_HEAD, _RING, _SLOT = layout.STREAM_HEAD, layout.RING, layout.SLOT
_FINGERPRINT, _SIGNATURE, _PLACE = layout.FINGERPRINT, layout.SIGNATURE, layout.PLACE
_BEGAN, _STATE, _COUNT = layout.BEGAN, layout.STATE, layout.COUNT
_now = time.monotonic_ns
_ISSUED, _WAITING, _DONE = layout.ISSUED, layout.WAITING, layout.DONE


class Recorder:
    """One rank's hand on the board.

    Args:
        board: Shared by all ranks of the host.
        rank: Whose region is written.
        check: Compare with the other ranks; otherwise only write down.
    """

    def __init__(self, board: Board, rank: int, *, check: bool = True):
        self.board = board
        self.rank = rank
        self.check = check
        self.words = board.words
        self.region = board.regions[rank]
        self.abort: Abort | None = None
        self.signatures: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.log: Log | None = None
        """Where every operation is kept for a timeline, while code of the user runs."""
        self.names: dict[int, str] = {}
        """Texts of places, by their numbers; unlike the board's, none is overwritten."""
        self._places: dict[str, int] = {}
        self._streams: dict[int, Stream] = {}
        self._main = threading.main_thread().ident
        self._blocked = self.region.start + layout.BLOCKED_IN
        self._debuggers = [region.start + layout.IN_DEBUGGER for region in board.regions]
        self.fence = threading.Lock()
        """Taking and releasing it is a memory barrier: one's own post is out before one looks."""

    # --- life -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """A new generation begins; nothing is compared with an earlier one."""
        request, since = self.words[self.region.start + layout.REQUEST], time.monotonic_ns()
        self.region.clear()
        self.signatures.clear()
        self._places.clear()
        self.names = {}  # a log that is still read keeps the old one
        self._streams.clear()
        self.words[self.region.start + layout.SINCE] = since
        self.words[self.region.start + layout.REQUEST] = request
        self.abort = None

    def request(self, number: int) -> None:
        """This request runs from here on; 0 for none."""
        start = self.region.start
        self.words[start + layout.SINCE] = time.monotonic_ns()
        self.words[start + layout.REQUEST] = number

    def begin_log(self) -> Log:
        """Every operation is kept from here on, until :attr:`log` is None again."""
        if len(self.names) > NAMES:  # only those that are cached can still be met
            known = set(self._places.values())
            self.names = {n: name for n, name in self.names.items() if n in known}
        self.log = Log(self.names)
        return self.log

    def forget_stop(self) -> None:
        """What the group was given up for concerned an earlier request; it is gone all the same."""
        abort = self.abort
        if abort is not None and abort.kind != "failed":
            text = f"the process group was given up and is not connected: {abort.text}"
            self.abort = replace(abort, kind="failed", text=text)

    def somebody_is_asked(self) -> bool:
        """Whether a rank's debugger is open, or waits for input: no time limit counts then."""
        words = self.words
        return any(words[at] or words[at + 1] for at in self._debuggers)

    @property
    def is_main_thread(self) -> bool:
        return threading.get_ident() == self._main

    @property
    def is_blocked(self) -> bool:
        """Whether the main thread waits in an operation."""
        return self.words[self._blocked] != 0

    # --- for streams ------------------------------------------------------------------------------

    def stream(self, generation: int, name: str, members: Sequence[int], me: int) -> Stream:
        """The stream of that name, begun now if it was not before."""
        key = key_of(generation, name)
        known = self._streams.get(key)
        if known is None:
            known = self._streams[key] = Stream(self, key, name, members, me)
        return known

    def sign(self, key: tuple[Any, ...]) -> tuple[int, int]:
        """Fingerprint and text of an operation that is seen for the first time."""
        text = describe(key)
        if len(self.signatures) >= layout.TEXTS // 2 or len(self._places) >= layout.TEXTS // 4:
            self.signatures.clear()  # the board keeps a limited number of texts
            self._places.clear()
        compared = _SIZES.sub("", text)
        if key[0] in ("send", "recv"):  # the two ends of one message
            compared = compared[4:]
        signed = self.signatures[key] = (key_of(compared), self.region.add_text(text))
        return signed

    def place(self) -> int:
        """The innermost line of code that is neither torch's nor ours, as a word."""
        frame = sys._getframe(3).f_back  # of the group's method
        places = self._places
        for _ in _FRAMES:
            if frame is None:
                break
            name = frame.f_code.co_filename
            number = places.get(name)
            if number is None:
                number = places[name] = self._add_place(name) if is_user_code(name) else 0
            if number:
                return number << 32 | (frame.f_lineno or 0)
            frame = frame.f_back
        return 0

    def place_of(self, frame: FrameType | None, lineno: int = 0) -> int:
        """The innermost line of user code from a frame outwards, as a word; 0 if there is none.

        Args:
            frame: Where to begin.
            lineno: Of that frame, if it is not the one that the frame is at.
        """
        while frame is not None and not is_user_code(frame.f_code.co_filename):
            frame, lineno = frame.f_back, 0
        if frame is None:
            return 0
        name = frame.f_code.co_filename
        number = self._places.get(name)
        if number is None:
            number = self._places[name] = self._add_place(name)
        return number << 32 | (lineno or frame.f_lineno or 0)

    def _add_place(self, filename: str) -> int:
        name = short_name(filename)
        number = self.region.add_text(name)
        self.names[number] = name
        return number

    def block(self, at: int) -> None:
        """The main thread waits in this operation from here on; 0 for none."""
        if threading.get_ident() == self._main:
            self.words[self._blocked] = at

    def explain(self, error: BaseException) -> BaseException:
        """Why an operation broke off: what the group was given up for, not a closed socket."""
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return error
        text = str(error)
        if text.startswith("Detected mismatch between collectives"):  # check="detail"
            return CollectiveMismatchError(text)
        is_within = "gloo" in text or "timed out" in text  # otherwise it was refused at the door
        if not is_within and self.abort is None:
            return error
        # A peer may have closed its end of a connection a moment before we are told why.
        deadline = time.monotonic() + WHY
        while self.abort is None and "losed" in text and time.monotonic() < deadline:
            time.sleep(0.002)
        if self.abort is not None:
            return self.error().with_traceback(error.__traceback__)
        self.damage()
        return error

    def damage(self) -> None:
        """An operation has failed within the group: gloo closes its connections then."""
        self.words[self.region.start + layout.IS_DAMAGED] = 1

    def error(self) -> BaseException:
        """What an operation of an aborted generation raises."""
        abort = self.abort
        assert abort is not None
        match abort.kind:
            case "stop":
                return KeyboardInterrupt(abort.text)
            case "mismatch":
                return CollectiveMismatchError(abort.text)
            case "hang":
                return CollectiveHangError(abort.text)
        return CollectiveError(abort.text)


class Stream:
    """The operations of one group, or from one rank to another, as this rank issues them."""

    def __init__(
        self, recorder: Recorder, key: int, name: str, members: Sequence[int], me: int
    ) -> None:
        self.recorder = recorder
        self.name = name
        self.count = 0
        self._key = key
        self._words = recorder.words
        self.members = tuple(members)
        self.open: dict[int, Entry] = {}
        """What is logged and has not ended, by where it is posted."""
        self.at = recorder.region.add_stream(key, name, members)
        others = [rank for rank in members if rank != me]
        self._peers = [[rank, -1] for rank in others] if recorder.check else []
        if self.at < 0:  # more groups than the board has room for: these are not watched
            self._words = memoryview(bytearray(8 * layout.STREAM)).cast("Q")
            self.at = 0
            self._peers = []

    def post(self, key: tuple[Any, ...]) -> int:
        """Write an operation down; gives where.

        Raises:
            CollectiveError: The group has been given up; or what else it was given up for.
        """
        recorder = self.recorder
        if recorder.abort is not None:
            raise recorder.error()
        fingerprint, text = recorder.signatures.get(key) or recorder.sign(key)
        self.count = sequence = self.count + 1
        at = self.at + _HEAD + (sequence % _RING) * _SLOT
        words = self._words
        words[at + _FINGERPRINT] = fingerprint
        words[at + _SIGNATURE] = text
        words[at + _PLACE] = place = recorder.place()
        words[at + _BEGAN] = began = _now()
        words[at + _STATE] = _ISSUED
        words[at] = sequence
        words[self.at + _COUNT] = sequence
        log = recorder.log
        if log is not None:
            entry = self.open[at] = [self, sequence, key, place, began, 0, 0, 0]
            log.count += 1
            log.append(entry)
        return at

    def end(self, at: int) -> None:
        """That operation is over, well or not."""
        self._words[at + _STATE] = _DONE
        entry = self.open.pop(at, None)
        if entry is not None:
            entry[ENDED] = _now()

    def fail(self, at: int) -> None:
        """That operation is over, without having been done."""
        if at in self.open:
            self.open[at][FLAGS] |= FAILED
        self.end(at)

    def withdraw(self, at: int) -> None:
        """That operation failed here alone: to its peers it is one that this rank has not begun."""
        self.fail(at)
        if self.recorder.abort is None and self._words[at] == self.count:
            self._words[at] = 0
            self.count -= 1
            self._words[self.at + _COUNT] = self.count

    def look(self, at: int) -> None:
        """Compare with what the peers have posted by now.

        Raises:
            CollectiveMismatchError: A peer has posted something else.
        """
        with self.recorder.fence:
            pass
        sequence, fingerprint = self._words[at], self._words[at + _FINGERPRINT]
        if self._are_all_here(sequence, fingerprint):
            return
        for peer in self._peers:
            self._is_here(peer, sequence, fingerprint)

    def meet(self, at: int, timeout: float | None) -> None:
        """Wait until all peers have posted the same operation.

        Raises:
            CollectiveMismatchError: A peer has posted something else.
            CollectiveHangError: The peers did not come within ``timeout`` seconds.
        """
        with self.recorder.fence:
            pass
        recorder = self.recorder
        sequence, fingerprint = self._words[at], self._words[at + _FINGERPRINT]
        if self._are_all_here(sequence, fingerprint):
            return
        waiting = [p for p in self._peers if not self._is_here(p, sequence, fingerprint)]
        if not waiting:
            return
        recorder.block(at)
        self._words[at + _STATE] = _WAITING
        deadline = None if timeout is None else time.monotonic() + timeout
        looks, pause = 0, FIRST_SLEEP
        try:
            while waiting:
                if recorder.abort is not None:
                    raise recorder.error()
                looks += 1
                if looks < SPINS:
                    os.sched_yield()
                else:
                    time.sleep(pause)
                    pause = min(LONGEST_SLEEP, pause * 1.2)
                    if deadline is not None and recorder.somebody_is_asked():
                        deadline = time.monotonic() + (timeout or 0.0)
                    elif deadline is not None and time.monotonic() > deadline:
                        recorder.damage()
                        raise self._late(at, [peer[0] for peer in waiting], timeout)
                waiting = [p for p in waiting if not self._is_here(p, sequence, fingerprint)]
        finally:
            recorder.block(0)

    def _are_all_here(self, sequence: int, fingerprint: int) -> bool:
        """Whether all peers have just posted the same; the short way for what is so most often."""
        words = self._words
        slot = _HEAD + (sequence % _RING) * _SLOT
        for _, begins in self._peers:
            at = begins + slot
            if begins < 0 or words[at] != sequence or words[at + _FINGERPRINT] != fingerprint:
                return False
        return True

    def _is_here(self, peer: list[int], sequence: int, fingerprint: int) -> bool:
        begins = peer[1]
        if begins < 0:
            begins = peer[1] = self.recorder.board.regions[peer[0]].find_stream(self._key)
            if begins < 0:
                return False
        words = self._words
        at = begins + _HEAD + (sequence % _RING) * _SLOT
        posted = words[at]
        if posted != sequence:
            return posted > sequence  # it is that far ahead only if it found this one alike
        if words[at + _FINGERPRINT] != fingerprint:
            raise self._mismatch(sequence)
        return True

    def posted_by(self, rank: int) -> int:
        """How many operations that peer has begun."""
        begins = self.recorder.board.regions[rank].find_stream(self._key)
        return self._words[begins + _COUNT] if begins >= 0 else 0

    # --- sizes that differ from rank to rank ------------------------------------------------------

    def compare_sizes(self, at: int, send: Sequence[int], receive: Sequence[int]) -> None:
        """Check the parts of an all_to_all against those of the peers; all have posted theirs.

        Raises:
            CollectiveMismatchError: A rank sends more or less than its peer expects.
        """
        sequence = self._words[at]
        me = self.members.index(self.recorder.rank)
        for number, rank in enumerate(self.members):
            theirs = _SIZES.search(self._signature(rank, sequence))
            if theirs is None or rank == self.recorder.rank:
                continue
            sent, received = ([int(n) for n in part.split(",") if n] for part in theirs.groups())
            if (sent and sent[me] != receive[number]) or (
                received and received[me] != send[number]
            ):
                raise self._mismatch(sequence)

    # --- words for people -------------------------------------------------------------------------

    def _signature(self, rank: int, sequence: int) -> str:
        region = self.recorder.board.regions[rank]
        begins = region.find_stream(self._key)
        at = begins + _HEAD + (sequence % _RING) * _SLOT
        if begins < 0 or self._words[at] != sequence:
            return ""
        return region.slot(at).signature

    def _posted(self, sequence: int) -> dict[tuple[str, str], list[int]]:
        """What each rank that has come has posted, and where: signature and place -> ranks."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank in self.members:
            region = self.recorder.board.regions[rank]
            begins = region.find_stream(self._key)
            at = begins + _HEAD + (sequence % _RING) * _SLOT
            if begins >= 0 and self._words[at] == sequence:
                slot = region.slot(at)
                found.setdefault((slot.signature, slot.place), []).append(rank)
        return found

    def _mismatch(self, sequence: int) -> CollectiveMismatchError:
        deadline = time.monotonic() + FOR_THE_OTHERS
        posted = self._posted(sequence)
        while sum(map(len, posted.values())) < len(self.members) and time.monotonic() < deadline:
            time.sleep(0.001)
            posted = self._posted(sequence)
        sides = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} called {_readable(text)}"
            f"{f' at {place}' if place else ''}"
            for (text, place), ranks in sorted(posted.items(), key=lambda item: item[1])
        )
        return CollectiveMismatchError(
            f"operation {sequence} of {_titled(self.name)} is not the same on all ranks: {sides}. "
            "It was not begun here, and no tensor of it was changed. Make the calls agree."
        )

    def _late(self, at: int, ranks: Sequence[int], timeout: float | None) -> CollectiveHangError:
        slot = self.recorder.region.slot(at)
        return CollectiveHangError(
            f"{_readable(slot.signature)} at {slot.place}: rank{'s' if len(ranks) > 1 else ''} "
            f"{format_ranks(ranks)} did not come within {timeout:g} s."
        )


def _readable(signature: str) -> str:
    name, _, detail = signature.partition(" ")
    return f"{name} ({detail})" if detail else name


def _titled(name: str) -> str:
    return "the default group" if name == "world" else name.replace("world ", "", 1)
