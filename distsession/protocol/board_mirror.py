"""A board of which each host has a part, and the kernel the whole.

A host's ranks share a board of their own, on which the regions of other hosts' ranks are empty. Its
relay looks for what has changed in the regions of its ranks, and the kernel writes that into a
board on which all are. What is read there is at most a little old, and each slot is one that was
there: a rank writes a slot's sequence last, and here it is copied first.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from distsession.protocol import board as layout
from distsession.protocol.board import Board

__all__ = ["Change", "Mirror", "apply", "pack", "pack_words", "unpack", "unpack_words"]

Change = tuple[int, bytes]
"""Where bytes of a board begin, and what they are."""

TEXT_SETTLED_S = 0.01
"""Seconds that a rank may take to write a text down whose number it has given already."""

_HEADER, _STREAM = layout.HEADER * 8, layout.STREAM * 8
_REQUEST, _SINCE = layout.REQUEST * 8, layout.SINCE * 8
_LOG, _BEHIND_LOG = layout.LOG_REQUEST * 8, layout.CLOCK_BEHIND * 8
"""Where words on the log begin, and where they end."""
_KERNEL_WORDS, _BEHIND_THEM = layout.CLOCK_BEHIND * 8, layout.UNSEEN * 8
"""Where words of a header begin that the kernel writes, and where they end."""
_TEXT_END, _STREAM_COUNT = layout.TEXT_END * 8, layout.STREAM_COUNT * 8


class Mirror:
    """Finds what has changed in the regions of some ranks.

    Args:
        board: Where they write.
        ranks: Which.
        clock: Gives seconds.
    """

    def __init__(
        self,
        board: Board,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._regions = [_Region(board, rank, clock) for rank in ranks]

    def changes(self, *, before_answer: bool = False) -> list[Change]:
        """What has changed since the last call, in the order in which it is to be written.

        Args:
            before_answer: That a rank has been at something and is at rest again, as it was when
                that was last asked, can wait for another call: the answer says so, too.
        """
        return [change for region in self._regions for change in region.changes(before_answer)]

    def is_running(self) -> bool:
        """Whether a rank runs a request, as far as the last call has seen."""
        return any(region.request for region in self._regions)


class _Region:
    """One rank's region, and what was last seen of it."""

    def __init__(self, board: Board, rank: int, clock: Callable[[], float]):
        self._board, self._clock = board, clock
        start = rank * layout.REGION
        self._start = start * 8
        self._first = (start + layout.HEADER) * 8
        self._texts = start + layout.HEADER + layout.STREAMS * layout.STREAM
        self._line = (self._texts + layout.TEXT_WORDS) * 8
        self._header = self._streams = self._place = b""
        self._text_end = self._settled_end = 0
        self._text_at = 0.0

    @property
    def request(self) -> bytes:
        """What it runs; zeros if nothing."""
        return self._header[_REQUEST : _REQUEST + 8].strip(b"\0")

    def changes(self, before_answer: bool) -> Iterator[Change]:
        # What refers to something is read before it, and written after it.
        memory = self._board.bytes
        header = bytearray(memory[self._start : self._first])
        used = int.from_bytes(header[_STREAM_COUNT : _STREAM_COUNT + 8], "little")
        streams = memory[self._first : self._first + min(used, layout.STREAMS) * _STREAM]
        place = memory[self._line : self._line + layout.LINE_WORDS * 8]
        text_end = self._start + _TEXT_END
        header[_TEXT_END : _TEXT_END + 8] = memory[text_end : text_end + 8]
        yield from self._new_texts(int.from_bytes(header[_TEXT_END : _TEXT_END + 8], "little"))
        if header != self._header and not (before_answer and self._rests_again(header)):
            self._header = bytes(header)
            yield self._start, self._header[:_KERNEL_WORDS]
            yield self._start + _BEHIND_THEM, self._header[_BEHIND_THEM:]
        if place != self._place:
            self._place = place
            yield self._line, place
        if streams != self._streams:
            before, self._streams = self._streams, streams
            for at in range(0, len(streams), _STREAM):
                if streams[at : at + _STREAM] != before[at : at + _STREAM]:
                    yield self._first + at, streams[at : at + _STREAM]

    def _rests_again(self, header: bytearray) -> bool:
        """Whether all that differs is what the rank has been at meanwhile."""
        return _at_rest(header) == _at_rest(self._header)

    def _new_texts(self, end: int) -> Iterator[Change]:
        """Texts up to a number. The last ones may just be being written, so they come again."""
        now = self._clock()
        if end == self._text_end == self._settled_end:
            return
        begin = max(self._settled_end, end - layout.TEXT_WORDS)
        if end == self._text_end and now - self._text_at < TEXT_SETTLED_S:
            return
        if end == self._text_end:
            self._settled_end = end
        self._text_end, self._text_at = end, now
        while begin < end:
            at = begin % layout.TEXT_WORDS
            count = min(end - begin, layout.TEXT_WORDS - at)
            from_byte = (self._texts + at) * 8
            yield from_byte, self._board.bytes[from_byte : from_byte + count * 8]
            begin += count


def _at_rest(header: bytes | bytearray) -> bytes:
    """The words of a header but those that say since when it is so, and what was put out before."""
    return bytes(header[:_SINCE] + header[_SINCE + 8 : _LOG] + header[_BEHIND_LOG:])


def pack(changes: Sequence[Change]) -> list[bytes]:
    """The frames of some changes."""
    places = array.array("Q", [n for at, data in changes for n in (at, len(data))])
    return [places.tobytes(), b"".join(data for _, data in changes)]


def unpack(frames: Sequence[Any]) -> list[Change]:
    """The changes in some frames.

    Raises:
        ValueError: They are none.
    """
    if len(frames) != 2 or len(frames[0]) % 16:
        raise ValueError("no changes of a board")
    numbers = array.array("Q", bytes(frames[0]))
    data, begin, found = bytes(frames[1]), 0, []
    for at, length in zip(numbers[::2], numbers[1::2], strict=True):
        found.append((at, data[begin : begin + length]))
        begin += length
    if begin != len(data):
        raise ValueError("changes of a board that do not fit to their lengths")
    return found


def pack_words(words: Sequence[tuple[int, int]]) -> list[bytes]:
    """The frame of some words of a board: where each is, and what."""
    return [array.array("Q", [n for word in words for n in word]).tobytes()]


def unpack_words(frames: Sequence[Any]) -> list[tuple[int, int]]:
    """The words in a frame.

    Raises:
        ValueError: There are none.
    """
    if len(frames) != 1 or len(frames[0]) % 16:
        raise ValueError("no words of a board")
    numbers = array.array("Q", bytes(frames[0]))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def apply(board: Board, changes: Sequence[Change], ranks: Iterable[int]) -> None:
    """Write changes of the regions of some ranks into a board.

    Raises:
        ValueError: One is not within these.
    """
    size = layout.REGION * 8
    allowed = set(ranks)
    for at, data in changes:
        if at // size not in allowed or (at + max(len(data), 1) - 1) // size != at // size:
            raise ValueError("a change of a board outside of the regions of its ranks")
    for at, data in changes:
        board.bytes[at : at + len(data)] = data
