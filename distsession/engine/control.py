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

from distsession.messages import ControllerInfo, Interrupt, MalformedMessage, decode

__all__ = ["Control", "Interruptor"]

log = logging.getLogger(__name__)

AGAIN = 0.3
"""Seconds after which an interrupt that had no effect is repeated, once."""


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

    def interrupt(self, request: int) -> None:
        """From another thread: interrupt this request, if it is the one that runs."""
        self._wanted = request
        if self._running == request and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, signal.SIGINT)

    def is_running(self, request: int) -> bool:
        return self._running == request

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._running and self._running == self._wanted:
            self._wanted = 0
            raise KeyboardInterrupt


class Control:
    """Receives what the kernel sends past the request queue.

    Args:
        socket: Connected to the kernel's control socket. Used by this thread alone.
        interruptor: Reaches the main thread.
        on_controller: Called with the facts of ipyparallel's controller.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        interruptor: Interruptor,
        on_controller: Callable[[ControllerInfo], None],
    ):
        self._socket = socket
        self._interruptor = interruptor
        self._on_controller = on_controller
        self.malformed = 0
        self._thread = threading.Thread(target=self._serve, name="distsession-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        repeat: tuple[float, int] | None = None
        while True:
            if self._socket.poll(None if repeat is None else 50):
                try:
                    message, _ = decode(self._socket.recv_multipart())
                except MalformedMessage as error:
                    self.malformed += 1
                    log.warning("dropped a malformed message: %s", error)
                    continue
                if isinstance(message, Interrupt):
                    self._interruptor.interrupt(message.request)
                    repeat = (time.monotonic() + AGAIN, message.request)
                else:
                    self._obey(message)
            if repeat and time.monotonic() > repeat[0]:
                self._interruptor.interrupt(repeat[1])
                repeat = None

    def _obey(self, message: Any) -> None:
        if isinstance(message, ControllerInfo):
            self._on_controller(message)
        else:
            log.warning("dropped a message that is not for the control thread: %r", message)
