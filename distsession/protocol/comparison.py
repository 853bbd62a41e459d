"""Comparing what ranks of different hosts have posted, on the board that has all of it.

Ranks of one host compare themselves, before they begin. Here the rest is seen, some hundredths of a
second later: an operation may have begun by then, and even have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from distsession.protocol import board as layout
from distsession.protocol.board import Board, Head
from distsession.protocol.messages import Called, Mismatch, Operation
from distsession.protocol.operation_names import SplitSizes

__all__ = ["Comparison", "completed", "late_members"]


@dataclass(frozen=True)
class _Place:
    """A rank's stream on the board.

    Attributes:
        at: Its first word.
        base: What its incarnation adds to the sequence words of its slots.
    """

    rank: int
    at: int
    base: int
    head: Head


def late_members(board: Board, operation: Operation) -> tuple[int, ...]:
    """The ranks that have not begun an operation by now."""
    return tuple(
        rank
        for rank in sorted(operation.members)
        if board.regions[rank].sequences().get(operation.group, 0) < operation.sequence
    )


def completed(board: Board, mismatch: Mismatch) -> Mismatch:
    """A mismatch that ranks of one host have seen, with what those of others have posted."""
    calls = {call.rank: call for call in mismatch.calls}
    for region in board.regions:
        for at, head in region.streams():
            place = _Place(region.rank, at, region.base(at), head)
            if head.name != mismatch.group or region.rank in calls:
                continue
            if (call := _call(board, place, mismatch.sequence)) is not None:
                calls[region.rank] = call
    if len(calls) == len(mismatch.calls):
        return mismatch
    together = tuple(calls[rank] for rank in sorted(calls))
    return replace(mismatch, calls=together, is_begun=True)


class _Posted(NamedTuple):
    """What stands for an operation, and for all up to it, and how it is."""

    fingerprint: int
    chain: int
    state: int


_POSTED = layout.FINGERPRINT, layout.CHAIN, layout.STATE


class Comparison:
    """Finds operations of ranks of different hosts that do not match.

    Args:
        board: With the regions of all ranks.
        node_of: Gives the node of a rank.
    """

    def __init__(self, board: Board, node_of: Callable[[int], int]):
        self._board, self._node_of = board, node_of
        self._compared: dict[tuple[int, int], int] = {}
        """For the key of a stream and a node, up to which operation that is done."""
        self._sized: dict[int, int] = {}
        """For the key of a stream, up to which operation sizes are compared."""

    def find(self) -> Mismatch | None:
        """The first mismatch among what has been posted since the last call; None if all match."""
        streams: dict[int, list[_Place]] = {}
        for region in self._board.regions:
            for at, head in region.streams():
                key, base = self._board.words[at + layout.KEY], region.base(at)
                if self._is_split(head.members):
                    streams.setdefault(key, []).append(_Place(region.rank, at, base, head))
        self._compared = {k: n for k, n in self._compared.items() if k[0] in streams}
        self._sized = {key: n for key, n in self._sized.items() if key in streams}
        for key, places in streams.items():
            sequence = self._compare(key, places)
            if sequence:
                return self._mismatch(places, sequence)
        return None

    def _is_split(self, members: tuple[int, ...]) -> bool:
        """Whether they are on several hosts; the last is likely to be on another than the first."""
        first = self._node_of(members[0]) if members else 0
        return any(self._node_of(member) != first for member in reversed(members))

    def _compare(self, key: int, places: list[_Place]) -> int:
        """The first operation that differs, of one stream; 0 if none does."""
        leaders = self._leaders(places)
        if refused := self._refused(places):
            return refused
        (_, first), *others = leaders.items()
        for node, place in others:
            count = _count(self._board, place)
            if not count or self._compared.get((key, node)) == count:
                continue
            mine, its = _posted(self._board, first, count), _posted(self._board, place, count)
            if mine is None or its is None:  # the first is far ahead: there will be a later one
                continue
            if layout.REFUSED in (mine.state, its.state):
                continue
            if mine.chain != its.chain:
                different = self._first_difference(first, place, count)
                if self._is_withdrawn(first, place, different):
                    continue
                return different
            self._compared[key, node] = count
        return self._compare_sizes(key, places)

    def _compare_sizes(self, key: int, places: list[_Place]) -> int:
        """The first all_to_all to which all have come and whose sizes do not fit; 0 if all do."""
        if len(places) < len(places[0].head.members):
            return 0
        count = min(map(self._count_of, places))
        for sequence in range(max(self._sized.get(key, 0), count - layout.RING + 1) + 1, count + 1):
            if self._sizes(places[0], sequence) is None:
                continue
            sizes = [self._sizes(place, sequence) or SplitSizes((), ()) for place in places]
            for source, (sent, _) in enumerate(sizes):
                for target, (_, received) in enumerate(sizes):
                    if sent and received and sent[target] != received[source]:
                        return sequence
        self._sized[key] = count
        return 0

    def _sizes(self, place: _Place, sequence: int) -> SplitSizes | None:
        if _posted(self._board, place, sequence) is None:
            return None
        slot = self._board.regions[place.rank].slot(_slot(place, sequence))
        return SplitSizes.from_description(slot.signature)

    def _first_difference(self, one: _Place, other: _Place, last: int) -> int:
        """Of the operations that are on record; the last one, if none of them is it."""
        for sequence in range(max(1, last - layout.RING + 2), last + 1):
            mine, its = _posted(self._board, one, sequence), _posted(self._board, other, sequence)
            if mine is not None and its is not None and mine.fingerprint != its.fingerprint:
                return sequence
        return last

    def _is_withdrawn(self, one: _Place, other: _Place, sequence: int) -> bool:
        """Whether one rank is at an operation that the other's backend refused, as its own may."""
        for ahead, behind in ((one, other), (other, one)):
            posted = _posted(self._board, behind, sequence)
            region, last = self._board.regions[behind.rank], _count(self._board, behind)
            if posted is None or last > sequence or region.is_accepted(_slot(behind, sequence)):
                continue
            withdrawn = self._board.regions[ahead.rank].withdrawn(ahead.at, ahead.base + sequence)
            if posted.fingerprint in withdrawn:
                return True
        return False

    def _refused(self, places: list[_Place]) -> int:
        """An operation that ranks of one host have refused and some of another wait in; or 0."""
        for place in places:
            count = _count(self._board, place)
            if self._board.words[_slot(place, count) + layout.STATE] != layout.REFUSED:
                continue
            if _posted(self._board, place, count) is not None:
                others = [_posted(self._board, other, count) for other in places]
                if any(other is not None and other.state < layout.DONE for other in others):
                    return count
        return 0

    def _count_of(self, place: _Place) -> int:
        return _count(self._board, place)

    def _leaders(self, places: list[_Place]) -> Mapping[int, _Place]:
        """Of each node the rank that has begun most; that which has of all first."""
        found: dict[int, _Place] = {}
        for place in sorted(places, key=self._count_of, reverse=True):
            found.setdefault(self._node_of(place.rank), place)
        return found

    def _mismatch(self, places: list[_Place], sequence: int) -> Mismatch:
        found = (_call(self._board, place, sequence) for place in places)
        calls = sorted((call for call in found if call is not None), key=lambda call: call.rank)
        return Mismatch(places[0].head.name, sequence, tuple(calls), is_begun=True)


def _count(board: Board, place: _Place) -> int:
    """How many operations a rank has begun."""
    return board.words[place.at + layout.COUNT]


def _posted(board: Board, place: _Place, sequence: int) -> _Posted | None:
    """What a rank has posted as an operation; None where that is not there."""
    words, at = board.words, _slot(place, sequence)
    expected = place.base + sequence
    before = words[at + layout.SEQUENCE]
    posted = _Posted(*(words[at + word] for word in _POSTED))
    is_there = before == words[at + layout.SEQUENCE] == expected
    # Of one that is being overwritten the sequence is the last to change.
    is_whole = _count(board, place) < sequence + layout.RING - 1
    return posted if is_there and is_whole else None


def _call(board: Board, place: _Place, sequence: int) -> Called | None:
    """The same in words."""
    if _posted(board, place, sequence) is None:
        return None
    slot = board.regions[place.rank].slot(_slot(place, sequence))
    name, _, detail = slot.signature.partition(" ")
    return Called(place.rank, name, detail, slot.place)


def _slot(place: _Place, sequence: int) -> int:
    return place.at + layout.STREAM_HEAD + sequence % layout.RING * layout.SLOT
