"""What a session needs from whatever starts its ranks and carries its messages."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distsession.errors import EngineDiedError, RunTimeoutError
from distsession.protocol.board import Board
from distsession.protocol.messages import (
    ClearOutput,
    CompletionReply,
    Display,
    ErrorInfo,
    InputReply,
    InputRequest,
    OutputEnd,
    Reply,
    Request,
    StackReply,
    Text,
    UsageReply,
)
from distsession.protocol.serialize import Frames
from distsession.protocol.shared_memory import Progress, Segment
from distsession.ranks import RankInfo, ranks_text

__all__ = [
    "NOBODY",
    "Budget",
    "Channel",
    "Launcher",
    "OutputMessage",
    "Payload",
    "Pending",
    "python_command",
]

OutputMessage = Text | Display | ClearOutput

Payload = Frames | Mapping[int, Callable[[], Frames]] | Segment
"""What goes with a request: the same frames for all ranks; for each rank its own, made when it is
their turn; or memory that all of them share."""


LOOK = 0.05
"""Seconds between two looks at whether a run can still end."""
LONG, LATER_LOOK = 5.0, 0.2
"""Seconds after which a run is a long one, and between two looks from then on."""


def python_command(module: str) -> list[str]:
    """The command that runs ``main()`` of one of our modules in a process of its own.

    The package may have been found by a ``sys.path`` that only this kernel has.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
    return [sys.executable, "-c", code]


NOBODY = "nobody waits for this run in the main thread, so there is nobody to ask."
_QUITS = ("DebuggerQuit", "BdbQuit")
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
        self.times: dict[int, float] = {}
        """When each rank answered or was found dead."""
        self._open: set[int] = set()
        self._ended: set[int] = set()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._budget = budget or Budget()
        self._is_done = False
        self.stopped = ""
        """Why the caller is to be told that it was stopped; empty if it was not."""
        self.was_begun = True
        """Whether its ranks had begun with it when it was stopped."""
        self.arriving: dict[int, tuple[int, int]] = {}
        """Ranks of other nodes whose answers are on their way: bytes that are here, of how many."""
        self.is_over = False
        """Nobody waits any more."""
        self.is_sole = False
        """Its caller blocks the kernel's main thread: nothing else will be asked of the ranks."""
        self.paused = 0.0
        """Seconds for which somebody was asked something; no time limit counts them."""
        self.answer: Callable[[int, InputReply], None] = lambda rank, reply: None
        """Sends a rank what was typed."""

    # --- the channel's thread ---------------------------------------------------------------------

    def put_output(self, message: OutputMessage | OutputEnd | InputRequest) -> None:
        if isinstance(message, OutputEnd):
            self._ended.add(message.rank)
            self._check()
        elif isinstance(message, InputRequest):
            self._events.put(message)
        else:
            self._budget.add(_weight(message))
            self._events.put(message)

    def put_reply(self, reply: Reply, payload: Sequence[Any]) -> None:
        self.arriving.pop(reply.rank, None)
        if reply.rank in self.deaths:  # it died while its answer was on its way
            return
        if reply.has_output:
            self._open.add(reply.rank)
        self.times[reply.rank] = time.monotonic()
        self.replies[reply.rank] = (reply, list(payload))
        self._check()

    def put_death(self, error: EngineDiedError) -> None:
        if error.rank in self.ranks and error.rank not in self.replies:
            self.times[error.rank] = time.monotonic()
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

    @property
    def debugger_quit(self) -> str:
        """In whose debugger the run was ended, if it was, and where."""
        for rank, (reply, _) in sorted(self.replies.items()):
            if reply.error is not None and reply.error.ename in _QUITS:
                place = _cell_line(reply.error)
                return f"in the debugger of rank {rank}{f' at {place}' if place else ''}"
        return ""

    def wait(
        self,
        on_output: Callable[[OutputMessage], None],
        timeout: float | None = None,
        look: Callable[[], None] | None = None,
        on_ask: Callable[[InputRequest], None] | None = None,
    ) -> None:
        """Hand on output until every rank has answered or died.

        Args:
            on_output: Gets each piece of output.
            timeout: In seconds.
            look: Called every ``LOOK`` seconds meanwhile.
            on_ask: Gets what ranks ask; without it, they are told that nobody answers.

        Raises:
            RunTimeoutError: That took longer than ``timeout`` seconds.
        """
        began = time.monotonic()
        paused = self.paused
        next_look = None if look is None else began + LOOK
        while True:
            now = time.monotonic()
            if look is not None and next_look is not None and now >= next_look:
                look()
                is_early = now - began < LONG
                next_look = time.monotonic() + (LOOK if is_early else LATER_LOOK)
            deadline = None
            if timeout is not None:
                deadline = began + timeout + self.paused - paused
            if deadline is not None and now >= deadline and self._events.empty():
                raise RunTimeoutError(
                    f"{ranks_text(self.missing)} did not finish within {timeout:g} s."
                )
            ends = [end for end in (deadline, next_look) if end is not None]
            try:
                event = self._events.get(timeout=max(0.0, min(ends) - now) if ends else None)
            except queue.Empty:
                continue
            if event is _DONE:
                return
            if isinstance(event, InputRequest):
                (on_ask or self.refuse)(event)
                continue
            self._budget.add(-_weight(event))
            on_output(event)

    def refuse(self, question: InputRequest, why: str = NOBODY) -> None:
        """Tell a rank that nobody answers."""
        self.answer(question.rank, InputReply(question.number, None, why))


def _cell_line(error: ErrorInfo) -> str:
    """The innermost line of a cell."""
    for frame in reversed(error.frames):
        if frame.filename.startswith("In["):
            return f"{frame.filename} line {frame.lineno}"
    return ""


class Channel(ABC):
    """Carries requests to ranks and their answers back."""

    runs_in_caller = False
    """A request is over when it has been submitted, so nobody can end it before."""

    @abstractmethod
    def submit(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        progress: Progress | None = None,
    ) -> Pending:
        """Send a request to some ranks.

        Args:
            ranks: Who gets it.
            make: Makes the request from its number.
            payload: What goes with it.
            progress: Is told how much of the payload has been written.

        Raises:
            SerializationError: The payload does not fit into memory.
        """

    @abstractmethod
    def pending(self) -> list[Pending]:
        """The requests that somebody waits for, oldest first."""

    def is_busy(self, rank: int) -> bool:
        """Whether a rank has requests that it has not answered."""
        return False

    @abstractmethod
    def forget(self, pending: Pending) -> None:
        """Nobody waits for this any more; what still comes of it is background output."""


class Launcher(ABC):
    """Starts ranks, replaces them, and ends them."""

    channel: Channel
    name: str
    board: Board | None = None
    """What the ranks are doing; None where there is no such memory."""

    @abstractmethod
    def start(self) -> tuple[RankInfo, ...]:
        """Start all ranks; returns when the process group is ready on each."""

    @abstractmethod
    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        """Put fresh processes in the place of some ranks, or of all."""

    @abstractmethod
    def close(self) -> None:
        """End everything. Harmless when repeated."""

    # --- the process group; nothing to do where there is only this process ------------------------

    is_broken = False
    """The process group has been given up and is not yet connected anew."""

    def abort(  # noqa: B027
        self, kind: str, text: str, *, interrupt: int = 0, refuse: Sequence[int] = ()
    ) -> None:
        """Free all ranks from collectives; see :class:`~distsession.protocol.messages.Abort`."""

    def refuse(self, requests: Sequence[int]) -> None:  # noqa: B027
        """Have requests that have not begun answered with an error."""

    @property
    def must_reconnect(self) -> bool:
        """Whether the process group is to be connected anew before the next run."""
        return self.is_broken

    def reconnect(self) -> str:
        """Connect the process group anew; gives what prevents it, or nothing."""
        return ""

    def cancel_reconnect(self, pending: Pending | None = None) -> bool:
        """Give up connecting the group anew, from another thread.

        Args:
            pending: Only if this is its request.

        Returns:
            Whether it was under way.
        """
        return False

    def log_path(self, rank: int, stream: str) -> Path | None:
        """Where everything is that a rank wrote to ``"stdout"`` or ``"stderr"``."""
        return None

    def waits_for(self) -> str:
        """What a start or a restart that is under way waits for just now."""
        return ""

    def trouble(self) -> str:
        """What does not work though the ranks do; empty where all is well."""
        return ""

    def unreported(self, rank: int) -> str:
        """Of a rank that has ended: why nobody says how."""
        return "nobody has said how"

    def note_unreported(self) -> None:  # noqa: B027
        """Take ranks for dead that have ended and whose agent does not say so."""

    def request_stacks(self, ranks: Sequence[int], timeout: float) -> dict[int, StackReply]:
        """Where the main threads of ranks are; without those that do not answer in time."""
        return {}

    def look(
        self, ranks: Sequence[int], code: str, inspect: bool, timeout: float
    ) -> dict[int, CompletionReply]:
        """Complete code, or inspect a name, by what ranks have, also while they are busy."""
        return {}

    def usage(self, timeout: float) -> UsageReply | None:
        """What the ranks use of processors, memory and GPUs; as last known after ``timeout``."""
        return None

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        """The facts of each rank, as it last told them."""
        return ()

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
