"""Connecting the process group anew, with an end whatever happens meanwhile.

A rank that is stopped, dies or loses the store would otherwise leave the others waiting for it, and
every later run behind them. So an attempt ends at once where it is seen that it cannot succeed, and
else after a limit; whoever still waits in it is freed, and it is tried again where that may help.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from distsession.cluster.base import Channel
from distsession.cluster.deaths import SilentHost
from distsession.cluster.interrupts import interrupts_held
from distsession.cluster.pending import PendingRequest
from distsession.cluster.rank_processes import RankProcesses
from distsession.engine.process_state import STOPPED
from distsession.errors import EngineDiedError, RunTimeoutError
from distsession.protocol.board import Board
from distsession.protocol.connections import begun_where_whole
from distsession.protocol.messages import ReconnectRequest
from distsession.protocol.rank_state import AbortReason
from distsession.ranks import ranks_text

__all__ = ["Halted", "Reconnect", "failure_of"]

RECONNECT_TIMEOUT_S = 10.0
"""Limit of a first attempt, once all ranks are idle; each further one has twice as long."""
RECONNECT_TIMEOUT_PER_RANK_S = 0.5
"""By how much each rank makes that longer."""
RANKS_LATER_S = 2.0
"""By how much longer ranks wait for each other than the kernel does, which knows who is late."""
RECONNECT_ATTEMPTS = 3
SETTLE_S = 0.2
"""How long ranks have to come to an end before a first attempt is put off."""
FREED_S = 3.0
"""The same for ranks that were freed from an attempt which failed."""
FREED_PER_RANK_S = 0.1
UNDISTURBED_S = 1.0
"""Seconds for which an attempt goes on although somebody stops it. Ranks that have met connect in
some milliseconds. Should one of them be stopped within these, nothing would end the wait of the
others for it: gloo (torch 2.13) waits for a connection until its limit is over."""
TOLD_TIMEOUT_S = 0.5
"""Seconds that ranks have to hear that the group is not connected."""
POLL_S = 0.002
HALTED_S = 0.5
"""A process that is stopped for so long is no longer waited for."""
STOPPED_TEXT = "it was stopped"


class _Over(Exception):
    """This attempt cannot succeed any more."""


class Halted:
    """Notices processes that are stopped by SIGSTOP, or held by a debugger.

    Args:
        processes: Of the ranks.
    """

    def __init__(self, processes: RankProcesses):
        self._processes = processes
        self._since: dict[int, float] = {}

    def check(self, ranks: Sequence[int]) -> str:
        """What to say of those that are halted for some time; nothing if none is."""
        now = time.monotonic()
        halted = {rank: self._processes.state(rank) for rank in ranks}
        halted = {rank: state for rank, state in halted.items() if state in STOPPED}
        self._since = {rank: self._since.get(rank, now) for rank in halted}
        long = [rank for rank, since in self._since.items() if now - since >= HALTED_S]
        if not long:
            return ""
        be = "is" if len(long) == 1 else "are"
        if any(halted[rank] == "t" for rank in long):
            return f"{ranks_text(long)} {be} held by a debugger"
        it = "it" if len(long) == 1 else "them"
        return (
            f"{ranks_text(long)} {be} stopped by SIGSTOP: {self._processes.continue_text(long)} "
            f"lets {it} go on, session.restart({long}) replaces {it}"
        )

    def check_twice(self, ranks: Sequence[int]) -> str:
        """The same where nothing has been looked at before; takes its time only if some are."""
        self.check(ranks)
        if not self._since:
            return ""
        time.sleep(HALTED_S)
        return self.check(ranks)


class _Ranks(Protocol):
    """What is needed of the launcher."""

    @property
    def board(self) -> Board | None: ...
    @property
    def channel(self) -> Channel: ...
    @property
    def may_keep_connections(self) -> bool: ...
    def begin_generation(self) -> int: ...
    def store_problem(self) -> str: ...
    @property
    def processes(self) -> RankProcesses: ...
    def dead_ranks(self) -> Mapping[int, EngineDiedError]: ...
    def silent_hosts(self) -> tuple[SilentHost, ...]: ...
    def request_stacks(self, ranks: Sequence[int], timeout: float) -> Mapping[int, object]: ...
    def abort(
        self, reason: AbortReason, text: str, *, interrupt: int = 0, refuse: Sequence[int] = ()
    ) -> None: ...


class Reconnect:
    """The attempts to connect the group of some ranks anew.

    Args:
        launcher: Whose ranks they are.
        ranks: All of the world.
        may_keep: Leave the connections as they are where nothing has happened to them.
    """

    def __init__(self, launcher: _Ranks, ranks: Sequence[int], *, may_keep: bool = True):
        self._launcher = launcher
        self._may_keep = may_keep
        self._channel = launcher.channel
        self._ranks = list(ranks)
        self._halted = Halted(launcher.processes)
        self._cancelled = threading.Event()
        self._request = 0
        """The number of the present attempt's; known before anybody sees that it is pending."""
        self._undisturbed_until = 0.0
        self._problem = STOPPED_TEXT

    @property
    def problem(self) -> str:
        """What prevents it; nothing once it is done."""
        return self._problem

    def is_request_of(self, pending: PendingRequest) -> bool:
        """Whether that is its request."""
        return pending.request == self._request

    def cancel(self) -> None:
        """From another thread: give it up."""
        self._cancelled.set()

    def run(self) -> str:
        """Connect the group anew; gives what prevents it, or nothing."""
        limit = RECONNECT_TIMEOUT_S + RECONNECT_TIMEOUT_PER_RANK_S * len(self._ranks)
        settle, problem = SETTLE_S, ""
        for _ in range(RECONNECT_ATTEMPTS):
            if text := self._what_prevents_it(settle):
                self._problem = problem or text
                self._free_all()
                break
            begun = self._begun()
            problem = self._attempt(limit, begun)
            if not problem:
                return ""
            if self._cancelled.is_set() or self._launcher.dead_ranks():
                break
            limit *= 1 if begun else 2
            settle = FREED_S + FREED_PER_RANK_S * len(self._ranks)
        return self._problem

    def _what_prevents_it(self, settle: float) -> str:
        """What is to be said before ranks are asked for anything."""
        if text := (
            self._launcher.store_problem()
            or self._dead_text()
            or self._lost_text()
            or self._cut_off_text()
        ):
            return text
        if text := self._halted.check_twice(self._ranks):
            return text
        deadline = time.monotonic() + settle
        while busy := [rank for rank in self._ranks if self._channel.is_busy(rank)]:
            if self._cancelled.is_set():
                return STOPPED_TEXT
            if time.monotonic() > deadline:
                be = "is" if len(busy) == 1 else "are"
                return self._halted.check(busy) or (
                    f"{ranks_text(busy)} {be} still busy; the next run tries again, and "
                    f"session.restart({busy}) replaces {'it' if len(busy) == 1 else 'them'}"
                )
            time.sleep(POLL_S)
        return ""

    def _dead_text(self) -> str:
        dead = sorted(self._launcher.dead_ranks())
        have = "has" if len(dead) == 1 else "have"
        return f"{ranks_text(dead)} died and {have} to be replaced first" if dead else ""

    def _cut_off_text(self) -> str:
        cut_off = [host.text for host in self._launcher.silent_hosts() if host.is_cut_off]
        return f"{', '.join(cut_off)}; the next run tries again" if cut_off else ""

    def _lost_text(self) -> str:
        board = self._launcher.board
        lost = [r for r in self._ranks if board is not None and board.regions[r].is_device_lost]
        if not lost:
            return ""
        have, it = ("has", "it") if len(lost) == 1 else ("have", "them")
        return (
            f"{ranks_text(lost)} {have} lost the device to an error that stays: "
            f"session.restart({lost}) replaces {it}, and restore=[...] copies variables from a "
            "rank that stays"
        )

    def _begun(self) -> tuple[int, ...]:
        """What each rank has begun, if their connections can stay as they are; once."""
        may_keep, self._may_keep = self._may_keep, False
        board = self._launcher.board
        if not may_keep or board is None or not self._launcher.may_keep_connections:
            return ()
        return begun_where_whole(board.regions)

    def _attempt(self, limit: float, begun: tuple[int, ...] = ()) -> str:
        """Have all ranks join another generation; nobody stays in it if that fails.

        Args:
            limit: Seconds that it may take.
            begun: See :class:`~distsession.protocol.messages.ReconnectRequest`.
        """
        generation = self._launcher.begin_generation()
        problem = STOPPED_TEXT
        undisturbed = min(UNDISTURBED_S, limit)
        pending = None

        def make(number: int) -> ReconnectRequest:
            self._request = number
            return ReconnectRequest(number, generation, limit + RANKS_LATER_S, begun)

        try:
            with interrupts_held():
                pending = self._channel.submit(self._ranks, make, [])
                self._undisturbed_until = time.monotonic() + undisturbed
                has_ended = self._ends_within(undisturbed, pending)
                if has_ended:
                    problem = self._dead_text() or failure_of(pending)
            if not has_ended:
                pending.wait(lambda _: None, limit - undisturbed, lambda: self._check(pending))
                problem = self._dead_text() or failure_of(pending)
        except EngineDiedError:  # so nobody was asked
            problem = self._dead_text()
        except _Over as over:
            problem = str(over)
        except RunTimeoutError:
            assert pending is not None
            problem = self._why_late(pending, limit)
        finally:  # also where the caller was interrupted
            self._problem = problem
            if pending is not None:
                self._channel.forget(pending)
                if problem:
                    self._free_all([pending.request])
        return problem

    def _ends_within(self, seconds: float, pending: PendingRequest) -> bool:
        try:
            pending.wait(lambda _: None, seconds, lambda: self._check(pending))
        except RunTimeoutError:
            return False
        return True

    def _free_all(self, requests: Sequence[int] = ()) -> None:
        """Nobody waits in an attempt any more, and operations say why they cannot begin."""
        text = f"the process group is not connected: {self._problem}."
        self._launcher.abort(AbortReason.FAILED, text, refuse=requests)
        # A request takes another way to them, and what comes first would be begun, or tell why the
        # group was given up before. Who is asked something on the same way has heard of this.
        gone, processes = self._launcher.dead_ranks(), self._launcher.processes
        told = [r for r in self._ranks if r not in gone and processes.state(r) not in STOPPED]
        self._launcher.request_stacks(told, TOLD_TIMEOUT_S)

    def _check(self, pending: PendingRequest) -> None:
        """Called now and then during an attempt; ends it where it cannot succeed."""
        if self._cancelled.is_set() and time.monotonic() > self._undisturbed_until:
            raise _Over(STOPPED_TEXT)
        text = self._dead_text() or self._cut_off_text() or failure_of(pending)
        text = text or self._halted.check(pending.missing)
        if text:
            raise _Over(text)

    def _why_late(self, pending: PendingRequest, limit: float) -> str:
        """Who is to blame for an attempt that took too long."""
        missing, board = pending.missing, self._launcher.board
        away = [
            rank
            for rank in missing
            if board is not None and board.regions[rank].request != pending.request
        ]
        if away:
            it = "it" if len(away) == 1 else "them"
            return (
                f"{ranks_text(away)} did not begin with it within {limit:g} s, as C code may hold "
                f"the interpreter's lock there: session.restart({away}) replaces {it}"
            )
        return (
            f"{ranks_text(missing)} did not get through within {limit:g} s: session.restart() "
            "starts all ranks anew"
        )


def failure_of(pending: PendingRequest | None) -> str:
    """The first error among the answers to a request; empty if there is none."""
    replies = {} if pending is None else dict(pending.replies)
    for rank, (reply, _) in sorted(replies.items()):
        if reply.error is not None:
            text = reply.error.evalue.rstrip(".")
            return f"rank {rank} could not join it: {reply.error.ename}: {text}"
    return ""
