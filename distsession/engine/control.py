"""The side thread of a rank: it answers while the main thread is busy or blocked.

Runs in: an engine.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import zmq

from distsession.messages import Abort, MalformedMessage, decode

__all__ = ["Control", "Interruptor"]

log = logging.getLogger(__name__)

AGAIN = 0.3
"""Seconds after which an interrupt that had no effect is repeated, once."""
FREED = 0.1
"""Seconds that a main thread which waited in a collective has to come back by itself."""


class Interruptor:
    """Raises KeyboardInterrupt in user code, and nowhere else.

    A SIGINT that came a moment too late would otherwise hit the engine's own code and end it.
    """

    def __init__(self) -> None:
        self._running = 0
        self._wanted = 0
        self._main = threading.main_thread()
        signal.signal(signal.SIGINT, self._on_signal)

    @contextmanager
    def user_code(self, request: int) -> Iterator[None]:
        """User code of this request runs within."""
        self._running = request
        try:
            yield
        finally:
            self._running = 0

    def want(self, request: int) -> None:
        """From another thread: this request is to be interrupted, once."""
        self._wanted = request

    def interrupt(self) -> bool:
        """From another thread: interrupt what is wanted. Whether that is still to come."""
        if self._wanted and self._running == self._wanted and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, signal.SIGINT)
            return True
        return False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._running and self._running == self._wanted:
            self._wanted = 0
            raise KeyboardInterrupt


class Control:
    """Receives what the kernel sends past the request queue.

    Args:
        socket: Connected to the kernel's control socket. Used by this thread alone.
        interruptor: Reaches the main thread.
        obey: Called with every other message; for an ``Abort``, before the interrupt.
        is_blocked: Whether the main thread waits in a collective, which the abort will free.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        interruptor: Interruptor,
        obey: Callable[[Any], None],
        is_blocked: Callable[[], bool],
    ):
        self._socket = socket
        self._interruptor = interruptor
        self._obey = obey
        self._is_blocked = is_blocked
        self.malformed = 0
        self._thread = threading.Thread(target=self._serve, name="distsession-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        due: list[float] = []
        while True:
            if self._socket.poll(20 if due else None):
                try:
                    message, _ = decode(self._socket.recv_multipart())
                except MalformedMessage as error:
                    self.malformed += 1
                    log.warning("dropped a malformed message: %s", error)
                    continue
                try:
                    if isinstance(message, Abort) and message.interrupt:
                        due = self._interrupt(message)
                    else:
                        self._obey(message)
                except Exception:
                    log.exception("could not obey %r", message)
            if due and time.monotonic() > due[0]:
                due.pop(0)
                if not self._interruptor.interrupt():
                    due.clear()

    def _interrupt(self, message: Abort) -> list[float]:
        """Gives when the main thread is to be interrupted, if it is not back by then."""
        blocked = self._is_blocked()
        self._interruptor.want(message.interrupt)
        self._obey(message)
        now = time.monotonic()
        if blocked:  # it is free within some milliseconds; a signal then would be one too many
            return [now + FREED, now + FREED + AGAIN]
        self._interruptor.interrupt()
        return [now + AGAIN]
