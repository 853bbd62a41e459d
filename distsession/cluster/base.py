"""What a session needs from whatever starts its ranks and carries its messages.

Runs in: the kernel.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from distsession.errors import EngineDiedError, RunTimeoutError
from distsession.messages import ClearOutput, Display, OutputEnd, Reply, Request, Text
from distsession.ranks import RankInfo, format_ranks
from distsession.serialize import Frames

__all__ = ["Budget", "Channel", "Launcher", "OutputMessage", "Pending", "python_command"]

OutputMessage = Text | Display | ClearOutput


def python_command(module: str) -> list[str]:
    """The command that runs ``main()`` of one of our modules in a process of its own.

    The package may have been found by a ``sys.path`` that only this kernel has.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
    return [sys.executable, "-c", code]


_DONE = object()


class Budget:
    """Counts the output that waits in this process to be shown.

    While it is over its limit nothing more is read from the output socket; zmq then holds back
    the ranks, whose output stays in their log files.
    """

    def __init__(self, limit: int = 8 << 20):
        self._limit = limit
        self._held = 0
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        with self._lock:
            self._held += amount

    @property
    def is_over(self) -> bool:
        return self._held > self._limit


def _weight(message: OutputMessage) -> int:
    if isinstance(message, Text):
        return len(message.text)
    if isinstance(message, Display):
        return sum(len(v) if isinstance(v, (str, bytes)) else 1000 for v in message.data.values())
    return 0


class Pending:
    """A request that some ranks work on.

    The channel's thread puts in what arrives; the thread that waits takes output out as it comes,
    and is woken only once for all replies together.
    """

    def __init__(self, request: int, ranks: Sequence[int], budget: Budget | None = None):
        self.request = request
        self.ranks = tuple(ranks)
        self.replies: dict[int, tuple[Reply, Frames]] = {}
        self.deaths: dict[int, EngineDiedError] = {}
        self._open: set[int] = set()
        self._ended: set[int] = set()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._budget = budget or Budget()
        self._is_done = False

    # --- the channel's thread ---------------------------------------------------------------------

    def put_output(self, message: OutputMessage | OutputEnd) -> None:
        if isinstance(message, OutputEnd):
            self._ended.add(message.rank)
            self._check()
        else:
            self._budget.add(_weight(message))
            self._events.put(message)

    def put_reply(self, reply: Reply, payload: Sequence[Any]) -> None:
        if reply.has_output:
            self._open.add(reply.rank)
        self.replies[reply.rank] = (reply, list(payload))
        self._check()

    def put_death(self, error: EngineDiedError) -> None:
        if error.rank in self.ranks and error.rank not in self.replies:
            self.deaths[error.rank] = error
        self._open.discard(error.rank)
        self._check()

    def _check(self) -> None:
        answered = len(self.replies) + len(self.deaths) == len(self.ranks)
        if answered and self._open <= self._ended and not self._is_done:
            self._is_done = True
            self._events.put(_DONE)

    # --- the waiting thread -----------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have neither answered nor died."""
        return tuple(r for r in self.ranks if r not in self.replies and r not in self.deaths)

    def wait(
        self, on_output: Callable[[OutputMessage], None], timeout: float | None = None
    ) -> None:
        """Hand on output until every rank has answered or died.

        Raises:
            RunTimeoutError: That took longer than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = self._events.get(timeout=left)
            except queue.Empty:
                raise RunTimeoutError(
                    f"rank {format_ranks(self.missing)} did not finish within {timeout:g} s."
                ) from None
            if event is _DONE:
                return
            self._budget.add(-_weight(event))
            on_output(event)


class Channel(ABC):
    """Carries requests to ranks and their answers back."""

    @abstractmethod
    def submit(
        self, ranks: Sequence[int], make: Callable[[int], Request], payload: Frames
    ) -> Pending:
        """Send a request to some ranks.

        Args:
            ranks: Who gets it.
            make: Makes the request from its number.
            payload: The frames that go with it, the same for all.
        """

    @abstractmethod
    def interrupt(self, ranks: Sequence[int], request: int) -> None:
        """Ask ranks to raise KeyboardInterrupt in a request, if they are still in it."""

    @abstractmethod
    def pending(self) -> list[Pending]:
        """The requests that somebody waits for, oldest first."""

    @abstractmethod
    def forget(self, pending: Pending) -> None:
        """Nobody waits for this any more; what still comes of it is background output."""


class Launcher(ABC):
    """Starts ranks, replaces them, and ends them."""

    channel: Channel
    name: str

    @abstractmethod
    def start(self) -> tuple[RankInfo, ...]:
        """Start all ranks; returns when the process group is ready on each."""

    @abstractmethod
    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        """Put fresh processes in the place of some ranks, or of all."""

    @abstractmethod
    def close(self) -> None:
        """End everything. Harmless when repeated."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the processes that hold the session together still run."""

    @abstractmethod
    def dead_ranks(self) -> dict[int, EngineDiedError]:
        """Ranks whose process has ended and was not replaced."""

    @abstractmethod
    def client(self, timeout: float) -> Any:
        """The connected ``ipyparallel.Client``, once every rank is registered."""
