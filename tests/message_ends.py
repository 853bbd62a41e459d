"""Ends of message streams that tests hold: they wait, with a limit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from distsession.protocol import message_stream
from distsession.protocol.message_listener import MessageListener
from distsession.protocol.message_stream import MessageStream, packed

__all__ = ["ListeningEnd", "MessageEnd"]

LONG_S = 60.0


class MessageEnd:
    """That of who has connected, as a rank does.

    Args:
        stream: To the other end, or the path of its socket.
        name: Under which to connect there.
    """

    def __init__(self, stream: MessageStream | str, name: bytes = b""):
        is_path = isinstance(stream, str)
        self.stream = message_stream.connect(stream, name) if is_path else stream
        self._messages: deque[list[bytes]] = deque()

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message, whole."""
        self.stream.post(packed(frames))
        deadline = time.monotonic() + LONG_S
        while not self.stream.flush():
            assert self.stream.wait(deadline - time.monotonic()), "nobody takes it"

    def poll(self, timeout_ms: float = 0) -> bool:
        """Whether a message comes in time."""
        deadline = time.monotonic() + timeout_ms / 1000
        self._messages += self.stream.receive()
        while not self._messages and not self.stream.is_over:
            if not self.stream.wait(deadline - time.monotonic()):
                break
            self._messages += self.stream.receive()
        return bool(self._messages)

    def receive(self) -> list[bytes]:
        """The next message."""
        assert self.poll(1000 * LONG_S), "no message"
        return self._messages.popleft()

    def close(self) -> None:
        self.stream.close()


class ListeningEnd:
    """That of who is connected to, as the kernel is."""

    def __init__(self, path: str):
        self.listener = MessageListener(path)
        self._messages: deque[list[bytes]] = deque()

    def _take_in(self) -> None:
        self._messages += [frames for _, frames in self.listener.receive()]

    def send(self, name: bytes, frames: Sequence[Any]) -> bool:
        """Send a message; False if nobody of this name is connected."""
        self._take_in()
        return self.listener.send(name, packed(frames))

    def poll(self, timeout_ms: float = 0) -> bool:
        """Whether a message comes in time."""
        deadline = time.monotonic() + timeout_ms / 1000
        self._take_in()
        while not self._messages and time.monotonic() < deadline:
            time.sleep(0.001)
            self._take_in()
        return bool(self._messages)

    def receive(self) -> list[bytes]:
        """The next message, of whomever."""
        assert self.poll(1000 * LONG_S), "no message"
        return self._messages.popleft()

    def close(self) -> None:
        self.listener.close()
