"""A request that some ranks work on, and what arrives of it."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distsession.cluster.interrupts import MAIN_THREAD, interrupts_held
from distsession.errors import EngineDiedError, RunTimeoutError
from distsession.protocol.cells import is_cell
from distsession.protocol.messages import (
    ClearOutput,
    CommMessage,
    Display,
    ErrorInfo,
    InputReply,
    InputRequest,
    OutputEnd,
    Reply,
    Text,
)
from distsession.protocol.operation_names import CodeLine
from distsession.protocol.serialize import Frames
from distsession.ranks import ranks_text

__all__ = ["NOBODY", "OutputBudget", "OutputMessage", "PendingRequest", "nobody_listens"]

OutputMessage = Text | Display | ClearOutput | CommMessage

NOBODY = "nobody waits for this run in the main thread, so there is nobody to ask."

CHECK_EVERY_S = 0.05
"""Seconds between two checks of whether a run can still end."""
CHECK_RANK_S = 0.0002
"""Seconds between two checks for each rank: looking at many takes as long as a call to them."""
CHECKS = ((1.0, CHECK_EVERY_S), (5.0, 0.1), (math.inf, 0.2))
"""Until when, in seconds of a run, how many seconds are between two checks: they use processors
that the ranks may be short of, and who has waited for long does not see a tenth of a second."""
CHECK_QUEUED_EVERY_S = 5.0
"""Seconds between two checks of one that waits behind others, which are looked after themselves."""
CHECK_PAUSE_FACTOR = 9
"""How many times the processor time of a check passes before the next one: where there are so many
ranks that this is the longer, checks must not keep the answers from being taken in."""
_QUITS = ("DebuggerQuit", "BdbQuit")
_DONE, _NEXT, _FAILED = object(), object(), object()


class OutputBudget:
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
    if isinstance(message, CommMessage):
        return 1000 + sum(map(len, message.buffers))
    return 0


class PendingRequest:
    """A request that some ranks work on.

    The channel's thread puts in what arrives; the thread that waits takes output out as it comes,
    and is woken only once for all replies together.

    Args:
        request: Its number.
        ranks: That work on it.
        budget: Counts the output that has not been shown yet.
        send: Sends a rank what was typed.
        queued: All its ranks have others to answer first.
        only_stages: Its ranks change nothing by it that the user sees.
    """

    def __init__(
        self,
        request: int,
        ranks: Sequence[int],
        budget: OutputBudget | None = None,
        send: Callable[[int, InputReply], None] = lambda rank, reply: None,
        *,
        queued: bool = False,
        only_stages: bool = False,
    ):
        self.request = request
        self.ranks = tuple(ranks)
        self.title = ""
        """What sentences call it; empty where it is no run of the user's."""
        self.since = 0.0
        """When an earlier kernel began it, by ``host_clock()``; 0 if this one has."""
        self.stops = 0
        """How often its ranks were interrupted."""
        self.only_stages = only_stages
        self.replies: dict[int, tuple[Reply, Frames]] = {}
        self.deaths: dict[int, EngineDiedError] = {}
        self.times: dict[int, float] = {}
        """When each rank answered or was found dead."""
        self.is_cut_short = False
        """A rank has answered, and was gone before the last of its output had come."""
        self._open: set[int] = set()
        self._ended: set[int] = set()
        self._arriving: dict[int, tuple[int, int]] = {}
        self._events: deque[Any] = deque()
        """An event is taken out once it is handed on: a Ctrl-C may come in between."""
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        """At least as many items as there are events."""
        self._presses = 0
        self._budget = budget or OutputBudget()
        self._send = send
        self._is_queued = queued
        self._is_done = False
        self._has_failed = False
        self._stopped = ""
        self._was_begun = True
        self._is_abandoned = False
        self._is_sole = False
        self._is_awaited = False
        self._paused_s = 0.0
        self._state = threading.Lock()
        """Answers and deaths may come by different threads."""
        self.on_event: Callable[[], None] = nobody_listens
        """Called, by any thread, when there is something that its caller has to see."""

    # --- the channel's thread ---------------------------------------------------------------------

    def put_output(self, message: OutputMessage | OutputEnd | InputRequest) -> None:
        if isinstance(message, OutputEnd):
            with self._state:
                self._ended.add(message.rank)
                self._check_done()
        elif isinstance(message, InputRequest):
            self._put(message)
        else:
            self._budget.add(_weight(message))
            self._put(message)

    def come_next(self) -> None:
        """A rank has answered all that it was asked before."""
        if self._is_queued:
            self._is_queued = False
            self._put(_NEXT)

    def put_progress(self, rank: int, done: int, total: int) -> None:
        """The answer of a rank of another node is on its way: bytes that are here, of how many."""
        self._arriving[rank] = done, total

    def put_reply(self, reply: Reply, payload: Sequence[Any]) -> None:
        with self._state:
            rank = reply.rank
            self._arriving.pop(rank, None)
            if rank in self.deaths:  # it died while its answer was on its way
                return
            if rank in self.replies:  # it was sent again, as this kernel has just attached
                return
            if reply.has_output:
                self._open.add(rank)
            self.times[rank] = time.monotonic()
            self.replies[rank] = (reply, list(payload))
            if len(self.replies) + len(self.deaths) == len(self.ranks):
                self._check_done()
            if reply.error is not None:
                self._note_failure()

    def put_death(self, error: EngineDiedError) -> None:
        with self._state:
            if error.rank in self.ranks and error.rank not in self.replies:
                self.times[error.rank] = time.monotonic()
                self.deaths[error.rank] = error
            if error.rank in self._open and error.rank not in self._ended:
                self.is_cut_short = True
            self._open.discard(error.rank)
            self._check_done()
            self._note_failure()

    def _note_failure(self) -> None:
        """Others may wait for that rank in vain: have a check now, for the first that fails."""
        if not (self._has_failed or self._is_done):
            self._has_failed = True
            self._put(_FAILED)

    def _check_done(self) -> None:
        answered = len(self.replies) + len(self.deaths) == len(self.ranks)
        if answered and self._open <= self._ended and not self._is_done:
            self._is_done = True
            self._put(_DONE)

    def _put(self, event: object) -> None:
        self._events.append(event)
        self._arrived.put(None)
        self.on_event()

    # --- how it is --------------------------------------------------------------------------------

    @property
    def has_event(self) -> bool:
        """There is something that its caller has to see."""
        return bool(self._events)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have neither answered nor died."""
        return tuple(r for r in self.ranks if r not in self.replies and r not in self.deaths)

    @property
    def arriving(self) -> Mapping[int, tuple[int, int]]:
        """Ranks of other nodes whose answers are on their way: bytes that are here, of how many."""
        return dict(self._arriving)

    @property
    def stopped(self) -> str:
        """Why the caller is to be told that it was stopped; empty if it was not."""
        return self._stopped

    @property
    def was_begun(self) -> bool:
        """Whether its ranks had begun with it when it was stopped."""
        return self._was_begun

    @property
    def is_sole(self) -> bool:
        """Its caller blocks the kernel's main thread: nothing else will be asked of the ranks."""
        return self._is_sole

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for what its ranks send."""
        return not self._is_abandoned and not self._stopped

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for it now; for what a former owner has left, nobody may yet."""
        return self._is_awaited and self.is_wanted

    @property
    def paused_s(self) -> float:
        """Seconds for which somebody was asked something; no time limit counts them."""
        return self._paused_s

    @property
    def debugger_quit(self) -> str:
        """In whose debugger the run was ended, if it was, and where."""
        for rank, (reply, _) in sorted(self.replies.items()):
            if reply.error is not None and reply.error.ename in _QUITS:
                line = _innermost_cell_line(reply.error)
                return f"in the debugger of rank {rank}{f' at {line}' if line else ''}"
        return ""

    # --- what is done with it ---------------------------------------------------------------------

    def stop(self, reason: str, *, begun: bool = True) -> None:
        """From any thread: its caller is to be told this, once its ranks are free.

        Args:
            reason: Why, or where its ranks were.
            begun: Whether its ranks had begun with it.
        """
        self._was_begun = begun
        self.stops += begun
        self._stopped = reason

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self._is_abandoned = True

    def pause(self, seconds: float) -> None:
        """Somebody was asked something for so long, which no time limit counts."""
        self._paused_s += seconds

    def answer(self, rank: int, reply: InputReply) -> None:
        """Send a rank what was typed."""
        self._send(rank, reply)

    def refuse(self, question: InputRequest, why: str = NOBODY) -> None:
        """Tell a rank that nobody answers."""
        self.answer(question.rank, InputReply(question.number, None, why))

    def wait(
        self,
        on_output: Callable[[OutputMessage], None],
        timeout: float | None = None,
        check: Callable[[], float | None] | None = None,
        on_input_request: Callable[[InputRequest], None] | None = None,
        begin: Callable[[float], None] | None = None,
    ) -> None:
        """Hand on output until every rank has answered or died.

        Args:
            on_output: Gets each piece of output.
            timeout: In seconds.
            check: Called every ``CHECK_EVERY_S`` seconds meanwhile, and when the first rank fails;
                more seldom for a long run, and where none of the ranks can have begun and nobody
                looks on. It may give the moment, by ``time.monotonic()``, at which it has to be
                called again at the latest.
            on_input_request: Gets what ranks ask; without it, they are told that nobody answers.
            begin: Called first, with a moment by ``time.monotonic()``: it may wait itself, for the
                first event and no longer than that.

        Raises:
            RunTimeoutError: That took longer than ``timeout`` seconds.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        self._is_sole = threading.get_ident() == MAIN_THREAD
        self._is_awaited = True
        began = time.monotonic()
        paused = self._paused_s
        next_check = None if check is None else began + self._check_interval_s(0.0)
        if begin is not None:
            until = began if next_check is None else next_check
            begin(until if timeout is None else min(until, began + timeout))
        while True:
            now = time.monotonic()
            if check is not None and next_check is not None and now >= next_check:
                used = -time.thread_time()
                due = check()
                used += time.thread_time()
                pause = max(CHECK_PAUSE_FACTOR * used, self._check_interval_s(now - began))
                next_check = (checked := time.monotonic()) + pause
                if due is not None:
                    next_check = min(next_check, max(due, checked + used))
            deadline = None
            if timeout is not None:
                deadline = began + timeout + self._paused_s - paused
            if deadline is not None and now >= deadline and not self._events:
                raise RunTimeoutError(
                    f"{ranks_text(self.missing)} did not finish within {timeout:g} s."
                )
            ends = [end for end in (deadline, next_check) if end is not None]
            if not self._events:
                with suppress(queue.Empty):
                    self._arrived.get(timeout=max(0.0, min(ends) - now) if ends else None)
                continue
            event = self._events[0]
            if event is _DONE:
                return
            if isinstance(event, OutputMessage):
                self._hand_on(on_output)
                continue
            self._events.popleft()
            if event is _NEXT:
                next_check = None if check is None else time.monotonic() + CHECK_EVERY_S
            elif event is _FAILED:
                next_check = None if check is None else time.monotonic()
            else:
                (on_input_request or self.refuse)(event)

    def _hand_on(self, on_output: Callable[[OutputMessage], None]) -> None:
        """Hand on one piece of output, which a Ctrl-C must not lose, nor show twice."""
        self._presses = 0
        with interrupts_held(self._insist):
            message = self._events.popleft()
            self._budget.add(-_weight(message))
            on_output(message)

    def _insist(self) -> None:
        """Of two Ctrl-C the second is raised at once: a terminal may take no more output."""
        self._presses += 1
        if self._presses > 1:
            raise KeyboardInterrupt

    def _check_interval_s(self, seconds: float) -> float:
        if self._is_queued and not self._is_sole:
            return CHECK_QUEUED_EVERY_S
        least = CHECK_RANK_S * len(self.ranks)
        for until, every in CHECKS:
            if seconds < until:
                return max(every, least)
        return least


def nobody_listens() -> None:
    """Does nothing."""


def _innermost_cell_line(error: ErrorInfo) -> str:
    """The innermost line of a cell in a traceback."""
    for frame in reversed(error.frames):
        if is_cell(frame.filename):
            return CodeLine(frame.filename, frame.lineno).name
    return ""
