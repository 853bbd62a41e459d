"""What a rank has put out and no kernel has acknowledged yet, so that another one can be told.

Text stays in the log files; kept here is which parts of them belong to which request. Displays are
kept themselves, within bounds; of those that are updated, and of a widget's state, the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from distsession.engine.log_file import LogFile
from distsession.protocol.messages import CommMessage, Display, Text

__all__ = ["RetainedOutput"]

KEPT_BYTES = 64 << 20
"""Bytes of displays that are kept."""
MAX_ITEMS = 20_000
"""Items that are kept; beyond it, the order of the two streams of a request is not."""
CHUNK_BYTES = 1 << 16
GIVEN_BACK = "distsession: {:,} bytes of text were given back to the disk.\n"
NOT_KEPT = "distsession: a display that was put out while no notebook was there was not kept.\n"


@dataclass(slots=True)
class _Item:
    """Text in a log file, or a message; without either once it has been replaced."""

    request: int
    stream: int = -1
    begin: int = 0
    end: int = 0
    message: Any = None
    size: int = 0


class RetainedOutput:
    """The output of requests that no kernel has acknowledged.

    Args:
        rank: Of this process.
        files: The log files of stdout and stderr.
        streams: Their names.
    """

    def __init__(self, rank: int, files: list[LogFile], streams: tuple[str, str]):
        self._rank = rank
        self._files = files
        self._streams = streams
        self._items: list[_Item] = []
        self._latest: dict[tuple[int, str, str], _Item] = {}
        self._bytes = 0

    def add_text(self, request: int, stream: int, begin: int, end: int) -> None:
        """Text that is in its log file."""
        near = self._items[-1:] if len(self._items) < MAX_ITEMS else reversed(self._items)
        for last in near:
            if (last.request, last.stream, last.end) == (request, stream, begin):
                last.end = end
                return
        self._items.append(_Item(request, stream, begin, end))

    def add(self, message: Any) -> None:
        """Something else, in its place between the text."""
        message, key = self._merged(message)
        size = _size(message)
        item = _Item(message.request, message=message, size=size)
        self._items.append(item)
        self._bytes += size
        if key is not None:
            self._latest[key] = item
        self._drop_oldest()

    def _merged(self, message: Any) -> tuple[Any, tuple[int, str, str] | None]:
        """An update takes the place of the one before, at the end, where all it names is known."""
        if isinstance(message, Display) and message.update:
            key = message.request, "display", message.display_id
            self._let_go(self._latest.pop(key, None))
            return message, key
        if isinstance(message, CommMessage) and _is_state(message):
            key = message.request, "comm", message.comm_id
            before = self._latest.pop(key, None)
            if before is not None and before.message is not None:
                state = {**before.message.content["data"]["state"]}
                state |= message.content["data"]["state"]
                content = {**message.content, "data": {**message.content["data"], "state": state}}
                message = replace(message, content=content)
                self._let_go(before)
            return message, key
        return message, None

    def _let_go(self, item: _Item | None) -> None:
        if item is not None:
            self._bytes -= item.size
            item.message, item.size = None, 0

    def _drop_oldest(self) -> None:
        if self._bytes <= KEPT_BYTES:
            return
        for item in self._items[:-1]:
            if item.size:
                self._let_go(item)
                item.message = Text(self._rank, item.request, "stderr", NOT_KEPT)
            if self._bytes <= KEPT_BYTES:
                return

    def forget(self, acknowledged: int, *, background: bool) -> None:
        """Let go of the output of requests up to one, and of what came between requests."""

        def is_over(request: int) -> bool:
            return request <= acknowledged if request else background

        if any(is_over(item.request) for item in self._items[:1] + self._items[-1:]):
            for item in self._items:
                if is_over(item.request):
                    self._let_go(item)
            self._items = [item for item in self._items if not is_over(item.request)]
            self._latest = {k: v for k, v in self._latest.items() if not is_over(k[0])}

    def messages(self, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
        """All of it again, in order.

        Args:
            is_wanted: Whether a message is still of interest.
        """
        for item in list(self._items):
            if item.stream >= 0:
                yield from self._texts(item)
            elif item.message is not None and is_wanted(item.message):
                yield item.message

    def _texts(self, item: _Item) -> Iterator[Text]:
        at = item.begin
        if at < (begin := min(self._files[item.stream].begin, item.end)):
            yield Text(self._rank, item.request, "stderr", GIVEN_BACK.format(begin - at))
            at = begin
        while at < item.end:
            data = self._files[item.stream].read(min(CHUNK_BYTES, item.end - at), at)
            if not data:
                return
            if at + len(data) < item.end:
                data = _whole(data)
            text, end = data.decode("utf-8", "replace"), at + len(data)
            yield Text(self._rank, item.request, self._streams[item.stream], text, at, end)
            at = end


def _is_state(message: CommMessage) -> bool:
    """A change of a widget's state that another one can be laid over."""
    data = message.content.get("data")
    return (
        message.kind == "comm_msg"
        and isinstance(data, dict)
        and data.get("method") == "update"
        and isinstance(data.get("state"), dict)
        and not message.buffers
        and not data.get("buffer_paths")
    )


def _size(message: Any) -> int:
    if isinstance(message, Display):
        return sum(len(v) if isinstance(v, (str, bytes)) else 1000 for v in message.data.values())
    if isinstance(message, CommMessage):
        return 1000 + sum(map(len, message.buffers))
    return len(message.text) if isinstance(message, Text) else 0


def _whole(data: bytes) -> bytes:
    """Without the beginning of a character at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return data
        if byte >= 0xC0:  # a first byte: is all of its character here?
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data if back >= need else data[:-back] or data
    return data
