"""What ranks ask of whoever sits at the notebook: input, and commands for their debuggers.

There is one box to type in, and several ranks may ask at once. The lowest comes first, and one
whose debugger is open keeps the box until it lets its code go on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from distsession.cluster.pending import NOBODY, PendingRequest
from distsession.protocol.board import Board
from distsession.protocol.messages import InputReply, InputRequest

__all__ = ["InputRequests"]

FIRST_REQUEST_DELAY_S = 0.1
"""Seconds after a first question in which others may come, for the lowest rank to be asked first.
Ranks reach a breakpoint together, but for some milliseconds."""
BLOCKED_AFTER_S = 0.3
"""Seconds in an operation after which a rank whose debugger is open gives its turn to those that
ask, too: it may wait for one of them."""
WATCH_EVERY_S = 0.1
"""Seconds between two looks at whether a rank still waits for its answer."""

NO_PLACE = "the output of this run has no place to ask in."
NO_INPUT = "this front end takes no input."


class InputRequests:
    """The questions of one run, answered in the thread that waits for it.

    Args:
        pending: The run.
        board: Says whose debugger is open.
        ask: Asks somebody, given a prompt and whether the answer is secret. None where nobody can
            be asked, for this run is not waited for in the main thread.
        obstacle: Why nobody can be asked.
    """

    def __init__(
        self,
        pending: PendingRequest,
        board: Board | None,
        ask: Callable[[str, bool], str] | None,
        obstacle: str = NOBODY,
    ):
        self._pending = pending
        self._board = board
        self._ask = ask
        self._obstacle = obstacle
        self._waiting: dict[int, InputRequest] = {}
        self._first_at = 0.0
        self._turn: int | None = None
        self._checked_at = time.monotonic()

    def add(self, question: InputRequest) -> None:
        """A rank asks."""
        if self._ask is None:
            self._pending.refuse(question, self._obstacle)
            return
        if not self._waiting:
            self._first_at = time.monotonic()
        self._waiting[question.rank] = question
        if question.rank == self._turn:
            self.check()

    def check(self) -> None:
        """Called now and then: ask whose turn it is."""
        self._count_pause()
        for gone in self._waiting.keys() - set(self._pending.missing):
            del self._waiting[gone]  # it has died meanwhile
        while (rank := self._next()) is not None:
            self._turn = rank
            self._prompt(self._waiting.pop(rank))
            self._count_pause()

    def _count_pause(self) -> None:
        """Time in which a debugger is open does not count for the run's time limit."""
        now = time.monotonic()
        is_open = self._board is not None and any(
            region.is_in_debugger or region.is_asking for region in self._board.regions
        )
        if is_open:
            self._pending.pause(now - self._checked_at)
        self._checked_at = now

    def _next(self) -> int | None:
        if not self._waiting or self._pending.stopped:
            return None
        if self._turn in self._waiting:
            return self._turn
        if self._turn is not None and self._keeps_turn(self._turn):
            return None
        if time.monotonic() - self._first_at < FIRST_REQUEST_DELAY_S:
            return None
        return min(self._waiting)

    def _keeps_turn(self, rank: int) -> bool:
        if self._board is None or rank not in self._pending.missing:
            return False
        region = self._board.regions[rank]
        if not region.is_in_debugger:
            return False
        return all(operation.seconds < BLOCKED_AFTER_S for operation in region.operations())

    def _prompt(self, question: InputRequest) -> None:
        rank = question.rank
        assert self._ask is not None
        box = _Prompt(lambda: rank not in self._pending.missing or bool(self._pending.stopped))
        try:
            with box:
                text: str | None = self._ask(f"[rank {rank}] {question.prompt}", question.secret)
        except _NobodyWaits:
            return
        except EOFError:
            text = None
        except NotImplementedError:  # Jupyter's, where nobody sits in front of the kernel
            self._ask, self._obstacle = None, NO_INPUT
            for waiting in (question, *self._waiting.values()):
                self._pending.refuse(waiting, NO_INPUT)
            self._waiting.clear()
            return
        finally:
            box.closed.set()
        self._pending.answer(rank, InputReply(question.number, text))


class _NobodyWaits(Exception):
    """Nobody waits for the answer any more."""


class _Prompt:
    """Around a question that is put in the main thread; ends it when nobody waits for the answer.

    Nothing but a signal gets a thread out of reading. One that comes before it reads does not, so
    it is sent until the box is closed.

    Args:
        is_over: Whether nobody waits any more.
    """

    def __init__(self, is_over: Callable[[], bool]):
        self._is_over = is_over
        self._lock = threading.Lock()
        self.closed = threading.Event()
        self._ended = False

    def __enter__(self) -> None:
        main = threading.main_thread().ident
        assert main is not None

        def watch() -> None:
            while not self.closed.wait(WATCH_EVERY_S):
                with self._lock:
                    if self._is_over() and not self.closed.is_set():
                        self._ended = True
                        signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=watch, name="distsession-question", daemon=True).start()

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.closed.set()
            with self._lock:
                pass  # no signal is sent from here on
            time.sleep(0)
        except KeyboardInterrupt:
            if not self._ended:
                raise
        if self._ended:
            raise _NobodyWaits
