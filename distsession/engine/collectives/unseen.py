"""What a device is given that passes no group of ours, so that nothing is said of it for certain.

A captured graph is replayed without Python, and its operations with it. A library may make a
backend of torch's by itself. Kernels wait for one another through symmetric memory. None of it can
be recorded or compared; but that there was some can be noted where it begins, at next to no cost.
A rank that waits for its device is then not said to wait for an operation that is seen.

While a graph is captured, operations are written down for it and not begun: they are compared like
others, and none of them is under way. Nor may any event be asked then, by any thread, as that would
end the capture.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from distsession.engine.collectives import torch_private
from distsession.engine.collectives.in_flight import InFlight
from distsession.protocol.unseen import Unseen

__all__ = ["UnseenWork"]

_REPLAY = int(Unseen.REPLAY)  # enum's own operators would take as long as all the rest


class UnseenWork:
    """What one rank has begun that is not seen.

    Args:
        in_flight: What it has begun that is.
        show: Called with a word of flags, and how often something was begun, whenever they change.
        place_of: Gives the line of user code from a frame outwards, as a word.
        name_of: Gives the text of such a word.
    """

    def __init__(
        self,
        in_flight: InFlight,
        show: Callable[[int, int], None],
        place_of: Callable[[FrameType | None], int],
        name_of: Callable[[int], str],
    ):
        self._in_flight = in_flight
        self._show = show
        self._place_of = place_of
        self._name_of = name_of
        self._events: dict[object, Any] = {}
        """The end of the last replay on each stream."""
        self._is_unknown = False
        """A replay is being launched, or has no event that says when it is over."""
        self._replayed = "", 0
        """What was replayed last, and where."""
        self._standing: dict[Unseen, tuple[str, int]] = {}
        """What may give the device something at any time, and where it began."""
        self._flags = 0
        """The kinds of that."""
        self._count = 0
        self._watched: set[Any] = set()

    # --- watching ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch what torch has, in this process, from here on."""
        for kind in torch_private.graph_classes():
            self.watch_graphs(kind)
        for kind in torch_private.native_backends():
            self.watch_backends(kind)
        for owner, name in torch_private.symmetric_memory_functions():
            self._watch_symmetric_memory(owner, name)

    def watch_graphs(self, kind: Any) -> None:
        """Note when graphs of this class are captured and replayed."""
        if kind in self._watched:
            return
        self._watched.add(kind)
        in_flight = self._in_flight
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay
        text = f"a {kind.__name__}"

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            in_flight.begin_capture()
            try:
                return begin(graph, *args, **kwargs)
            except BaseException:
                in_flight.end_capture()
                raise

        @functools.wraps(end)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return end(graph, *args, **kwargs)
            finally:
                in_flight.end_capture()

        @functools.wraps(replay)
        def noted(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin_replay(text, sys._getframe(1))
            result = replay(graph, *args, **kwargs)
            self._note_end()
            return result

        for name, function in zip(
            ("capture_begin", "capture_end", "replay"),
            (capture_begin, capture_end, noted),
            strict=True,
        ):
            torch_private.put_in_place(kind, name, function)

    def watch_backends(self, kind: Any) -> None:
        """Note when code makes a backend of this class by itself."""
        if kind in self._watched:
            return
        self._watched.add(kind)
        init = kind.__init__
        text = f"a {kind.__name__} that was made directly"

        @functools.wraps(init)
        def noted(backend: Any, *args: Any, **kwargs: Any) -> None:
            init(backend, *args, **kwargs)
            if not torch_private.is_making_groups():
                self._note(Unseen.GROUP, text, sys._getframe(1))

        torch_private.put_in_place(kind, "__init__", noted)

    def _watch_symmetric_memory(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)
        if function in self._watched:
            return

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._note(Unseen.SYMMETRIC_MEMORY, "symmetric memory in use", sys._getframe(1))
            return result

        torch_private.put_in_place(owner, name, staticmethod(noted))
        self._watched.add(noted)

    # --- what was begun ---------------------------------------------------------------------------

    def _note(self, kind: Unseen, text: str, frame: FrameType | None) -> None:
        if kind not in self._standing:
            self._standing[kind] = text, 0 if frame is None else self._place_of(frame)
            self._flags |= int(kind)
            self._publish()

    def _begin_replay(self, text: str, frame: FrameType | None) -> None:
        self._replayed = text, self._place_of(frame)
        self._is_unknown = True
        self._count += 1
        self._publish()

    def _note_end(self) -> None:
        """Put an event behind what was just replayed, so that its end can be seen."""
        if self._in_flight.captures:
            return
        with contextlib.suppress(RuntimeError, AttributeError):  # a broken device, an old torch
            stream = torch.accelerator.current_stream()
            event = torch.Event(stream.device)  # another thread may just be asking the one before
            event.record(stream)
            self._events[stream.device_index, stream.stream_id] = event
            self._is_unknown = False

    @property
    def is_replaying(self) -> bool:
        """Whether a graph that was replayed may be under way."""
        return self._is_unknown or bool(self._events)

    def note_completed(self) -> None:
        """From any thread: see whether what was replayed is complete."""
        if self._events and self._in_flight.ask(self._drop_completed):
            self._publish()

    def _drop_completed(self) -> None:
        for stream, event in list(self._events.items()):
            try:
                is_over = bool(event.query())
            except RuntimeError:  # the device is broken
                is_over = True
            if is_over and self._events.get(stream) is event:
                del self._events[stream]

    def begin_request(self) -> None:
        """A request begins."""
        if torch_private.uses_torchcomms():
            self._note(Unseen.TORCHCOMMS, "torchcomms", None)
        if self._is_unknown:
            self._is_unknown = False
            self._publish()

    def reset(self) -> None:
        """The connections have been given up, and what was under way with them."""
        self._events.clear()
        self._is_unknown = False
        self._publish()

    def _publish(self) -> None:
        self._show(self._flags | (_REPLAY if self.is_replaying else 0), self._count)

    # --- in words ---------------------------------------------------------------------------------

    def texts(self) -> tuple[str, ...]:
        """What may be under way."""
        found = []
        if self.is_replaying:
            text, place = self._replayed
            found.append(f"{text} that was replayed{self._at(place)}")
        found += [f"{text}{self._at(place)}" for text, place in self._standing.values()]
        return tuple(found)

    def _at(self, place: int) -> str:
        name = self._name_of(place)
        return f" at {name}" if name else ""

    def is_device_used(self) -> bool:
        """Whether there is a device that this process has used."""
        return torch_private.is_accelerator_used()
