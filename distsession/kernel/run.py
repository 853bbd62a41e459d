"""One request, from its submission to its results or one error."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from distsession.cluster.base import Channel
from distsession.cluster.interrupts import MAIN_THREAD, InterruptHold, interrupts_held
from distsession.cluster.pending import OutputMessage, PendingRequest
from distsession.display import render
from distsession.errors import (
    EngineDiedError,
    RunInterrupt,
    RunTimeoutError,
    SessionStateError,
    in_lines,
)
from distsession.kernel.failures import collect, own_causes, with_handled, with_mismatch
from distsession.kernel.imports import ImportHints
from distsession.kernel.outcome import (
    caught_text,
    handled_text,
    hang_error,
    reconnected_text,
    run_error,
)
from distsession.kernel.output import Output
from distsession.kernel.progress import ProgressNotice, TransferProgress
from distsession.kernel.recovery import (
    RETURN_AFTER_INTERRUPT_S,
    RETURN_TIMEOUT_S,
    Recovery,
)
from distsession.kernel.replay import RunRecord
from distsession.kernel.stdin import NO_PLACE, InputRequests
from distsession.kernel.stopped import ahead_notice
from distsession.kernel.watchdog import Watchdog
from distsession.protocol import serialize
from distsession.protocol.messages import RankReport
from distsession.results import RankResults

__all__ = ["SET_ALREADY", "Run"]

SET_ALREADY = "this was stopped when it was done already: the variables are set."

BOARD_DELAY_S = 0.05
"""Seconds that it may take until it is known here what a rank of another node has done."""


_NOTHING = nullcontext()


class _NotBack(Exception):
    """Ranks of a run that was stopped do not come back."""


class Run:
    """Waits for one request, hands on its output, and makes results or an error of its answers.

    Args:
        pending: The request.
        recovery: Looks after it.
        channel: That it was sent by.
        output: Where its output goes; closed at its end.
        began: When the call was made, by ``time.perf_counter()``.
        timeout: Seconds after which it is interrupted.
        progress: Shows how much of the answers is here.
        steady: A stop comes too late for it and is only told afterwards.
        goes_on: Something may run after it, so it is told what to do and that the group works.
        expression: What is shown of it, as code; empty if that has no name.
        record: Takes a note of its output, too.
        interrupts: Held since it was sent; released where a Ctrl-C stops it.
        settle: Told whether it succeeded, when everything of it is here and before its ranks are
            told so.
        hints: Say what would have made it faster.
        leave: Asked at a Ctrl-C: lets go of ranks that are kept where this process is to end, and
            gives what its caller is told; nothing where they are to be stopped.
    """

    def __init__(
        self,
        pending: PendingRequest,
        *,
        recovery: Recovery,
        channel: Channel,
        output: Output,
        began: float,
        timeout: float | None = None,
        progress: TransferProgress | None = None,
        steady: bool = False,
        goes_on: bool = True,
        expression: str = "",
        record: RunRecord | None = None,
        interrupts: InterruptHold | None = None,
        settle: Callable[[bool], None] = lambda succeeded: None,
        hints: ImportHints | None = None,
        leave: Callable[[Output], str] = lambda output: "",
    ):
        self._pending = pending
        self._recovery = recovery
        self._channel = channel
        self._output = output
        self._began = began
        self._timeout = timeout
        self._progress = progress
        self._steady = steady
        self._goes_on = goes_on
        self._expression = expression
        self._record = record
        self._interrupts = interrupts or InterruptHold()
        self._settle = settle
        self._hints = hints
        self._leave = leave
        self._has_left = False
        self._may_wait, self._has_waited = True, False
        """For runs of an earlier kernel; none comes that is not there at the begin."""
        self._goes_on_stopped = False
        """It was stopped, and its ranks go on: its end is waited for in another thread."""
        self._watchdog = Watchdog(recovery, pending, output.notify)
        self._input_requests = self._make_input_requests()
        self._stopped_at = 0.0
        self._problem: str | None = None
        """What prevents the group from being connected anew; None where that was not tried yet."""
        self._cut_off: list[int] = []
        """Ranks whose devices have gone on behind what was given up."""

    def finish(self) -> RankResults[Any]:
        """Wait for all ranks; their values, or one error."""
        pending, output = self._pending, self._output
        is_late = succeeded = False
        try:
            is_late = self._wait()
            self._recovery.check_owned(self._pending)
            with self._importing():
                results, failed = collect(
                    pending, time.perf_counter() - self._began, remedies=self._goes_on
                )
            shown = {
                rank: reply.shown for rank, (reply, _) in pending.replies.items() if reply.shown
            }
            if pending.deaths and not self._recovery.launcher.shares_board:
                time.sleep(BOARD_DELAY_S)  # what it posted last may still be on its way
            if mismatch := self._recovery.find_mismatch():
                failed = with_mismatch(failed, mismatch)
            if shown:
                bundles = render.with_notes(
                    {rank: (data, metadata) for rank, (data, metadata, _) in shown.items()},
                    {rank: digest for rank, (_, _, digest) in shown.items()},
                    self._expression,
                )
                if self._record is not None:
                    self._record.show(bundles)
                output.show(bundles)
            if not pending.stopped and (
                text := caught_text(pending, failed, self._watchdog.verdict, self._watchdog.waited)
            ):
                output.remark(text)
            self._remark()
            succeeded = not (failed or pending.stopped or is_late)
        except KeyboardInterrupt:
            with interrupts_held():
                # It may have been pressed twice within microseconds.
                if pending.missing and not (pending.stopped or self._has_left):
                    self._recovery.stop(pending)
                    self._goes_on_stopped = bool(pending.stopped and self._is_stuck())
            raise
        finally:
            if self._goes_on_stopped:
                self._follow_behind()
            else:
                self._end(succeeded)
            then = ""
            if not succeeded or self._recovery.launcher.must_reconnect:
                is_gone = self._has_left or self._recovery.launcher.taken
                then = "" if pending.missing or is_gone else self._reconnected_text()
        if succeeded and not pending.stopped:
            return results
        if pending.stopped:
            end = then if pending.was_begun else ""
            raise in_lines(RunInterrupt, _lines(pending.stopped, handled_text(pending), end))
        if pending.debugger_quit:
            raise RunInterrupt(f"stopped {pending.debugger_quit}. All variables are kept.")
        verdict, waited = self._watchdog.verdict, self._watchdog.waited
        failed = with_handled(failed, waited, len(pending.ranks))
        has_suffered = len(own_causes(failed, waited)) < len(failed)
        has_cause = any(failure.during is not None for failure in failed.values())
        if verdict is not None and not (verdict.failed or has_cause) and has_suffered:
            raise hang_error(verdict, then, failed, waited)
        if failed:
            infos, places = self._recovery.launcher.infos, self._watchdog.places
            raise run_error(failed, results, infos, waited, then, places, verdict)
        raise RunInterrupt(SET_ALREADY)

    def _end(self, succeeded: bool) -> None:
        try:
            self._output.close()
        finally:
            with interrupts_held():
                self._settle(succeeded)
                self._channel.forget(self._pending)
                self._recovery.check_damage(has_failed=not succeeded)

    def _is_stuck(self) -> bool:
        """Whether ranks have not come back that were interrupted."""
        return bool(self._pending.missing and self._pending.was_begun)

    def _follow_behind(self) -> None:
        """Wait for the end in a thread: until then it runs, and its output goes to its cell."""
        context = contextvars.copy_context()

        def follow() -> None:
            try:
                context.run(self._pending.wait, self._write)
            finally:
                context.run(self._end, False)
                if self._goes_on:
                    context.run(self._reconnect)

        threading.Thread(target=follow, name="distsession-stopped", daemon=True).start()

    def _remark(self) -> None:
        """Say what would have made this faster, where somebody can do something about it."""
        if self._hints is None or not self._goes_on or self._pending.stopped:
            return
        replies = self._pending.replies.items()
        if text := self._hints.text({rank: reply.imports for rank, (reply, _) in replies}):
            self._output.remark(text)

    def _importing(self) -> AbstractContextManager[object]:
        """Say so if the first tensor that arrives makes this process import torch."""
        payloads = [payload for _, payload in self._pending.replies.values() if payload]
        if not any(map(serialize.imports_torch, payloads)):
            return _NOTHING
        doing = "importing torch in this process, for what the ranks have sent"
        return ProgressNotice(self._output, doing, lambda: "")

    def _write(self, message: OutputMessage) -> None:
        if self._record is not None:
            self._record.add(message)
        self._output.write(message)

    def _wait(self) -> bool:
        """Stop, or the end of the time, reaches the ranks before it reaches the caller.

        Returns:
            Whether a stop came too late for a steady request.
        """
        pending = self._pending
        try:
            self._output.connect(pending.ranks, self._channel)
            questions = self._input_requests
            pending.wait(
                self._write, self._timeout, self._check, questions.add, self._receive_first
            )
        except _NotBack:
            self._goes_on_stopped = self._is_stuck()
            stuck = self._recovery.explain_stuck(pending)
            raise in_lines(RunInterrupt, _lines(pending.stopped, stuck)) from None
        except KeyboardInterrupt:
            if left := self._leave(self._output):
                self._has_left = True
                raise RunInterrupt(left) from None
            if self._steady:
                with suppress(RunTimeoutError):
                    pending.wait(self._write, RETURN_TIMEOUT_S)
                    return True
            raise in_lines(RunInterrupt, self._stop()) from None
        except RunTimeoutError as error:
            text = self._stop()
            text = f"{error} {text[:1].upper()}{text[1:]}"
            raise in_lines(RunTimeoutError, text) from None
        return False

    def _receive_first(self, until: float) -> None:
        """A short call is over before another thread would have told of it."""
        self._channel.receive_for(self._pending, until)
        self._interrupts.release()

    def _check(self) -> float | None:
        """Called every few hundredths of a second while ranks work; gives when at the latest."""
        pending = self._pending
        if pending.stopped and pending.was_begun and not self._steady:  # by another thread
            self._stopped_at = self._stopped_at or time.monotonic()
            is_late = time.monotonic() - self._stopped_at > RETURN_AFTER_INTERRUPT_S
            if is_late and pending.missing:
                raise _NotBack
        self._input_requests.check()
        self._tell_ahead()
        self._watchdog.check()
        self._output.tick(self._reports)
        if self._progress is not None:
            self._show_transfer(self._progress)
        return self._watchdog.due

    def _tell_ahead(self) -> None:
        """Say what of an earlier kernel this waits for, as nobody else shows it here."""
        pending = self._pending
        if pending.since or not self._may_wait:
            return
        missing = set(pending.missing)
        ahead = [
            each
            for each in self._channel.pending()
            if each.since and each.request < pending.request and missing.intersection(each.missing)
        ]
        if ahead or self._has_waited:
            self._output.notify(ahead_notice(ahead, self._recovery.reports_of_stopped(ahead)))
        self._may_wait = self._has_waited = bool(ahead)

    def _reports(self, ask: bool) -> Mapping[int, RankReport]:
        found = self._recovery.reports(self._pending.missing, ask=ask)
        return {rank: found[rank] for rank in self._pending.ranks}

    def _make_input_requests(self) -> InputRequests:
        board = self._recovery.launcher.board
        if threading.get_ident() != MAIN_THREAD:
            return InputRequests(self._pending, board, None)
        ask: Callable[[str, bool], str] | None = self._output.ask if self._output.can_ask else None
        return InputRequests(self._pending, board, ask, NO_PLACE)

    def _show_transfer(self, progress: TransferProgress) -> None:
        board = self._recovery.launcher.board
        if board is None:
            return
        arriving = self._pending.arriving
        for rank in self._pending.ranks:
            done, total = arriving.get(rank) or board.regions[rank].transfer
            if total:
                progress(done, total, rank)

    def _stop(self) -> str:
        """Interrupt the request and wait a moment for its ranks; gives how that went."""
        pending = self._pending
        with suppress(KeyboardInterrupt):  # pressed again: do not wait
            with interrupts_held():  # but stop it
                self._recovery.stop(pending)
            if pending.was_begun:
                with suppress(RunTimeoutError):
                    pending.wait(self._write, RETURN_TIMEOUT_S)
        self._goes_on_stopped = self._is_stuck()
        if not pending.was_begun:
            return pending.stopped
        if stuck := self._recovery.explain_stuck(pending) if pending.missing else "":
            return _lines(pending.stopped, handled_text(pending), stuck)
        return _lines(pending.stopped, handled_text(pending), self._reconnected_text())

    def _reconnected_text(self) -> str:
        board = self._recovery.launcher.board
        if self._problem is None and board is not None:
            self._cut_off = [region.rank for region in board.regions if region.is_cut_off]
        problem = self._reconnect()
        return reconnected_text(problem, self._cut_off) if problem or self._goes_on else ""

    def _reconnect(self) -> str:
        """Connect the group anew, once, if that is needed; gives what prevents it."""
        if self._problem is None:
            try:
                self._problem = self._recovery.reconnect()
            except KeyboardInterrupt:
                self._problem = "it was stopped"
            except SessionStateError as error:  # closed meanwhile
                self._problem = str(error)
            except EngineDiedError as error:
                self._problem = str(error).splitlines()[0]
        return self._problem


def _lines(*parts: str) -> str:
    """Those parts that there are, each on lines of its own."""
    return "\n".join(part for part in parts if part)
