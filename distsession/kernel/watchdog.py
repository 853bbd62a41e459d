"""Looking after one run: deadlocks and failures end it, and notices say who waits for whom."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from distsession.cluster.deaths import SilentHost
from distsession.cluster.pending import PendingRequest
from distsession.kernel.output import NO_NOTICE, Notice
from distsession.kernel.recovery import Recovery, has_finished, is_doomed, is_in_vain, waiting_in
from distsession.protocol.diagnosis import Kind, Verdict, describe_operation, is_from_any
from distsession.protocol.messages import STORE_WAIT, FrameInfo, RankReport, TimedOut
from distsession.protocol.rank_state import AbortReason, Ending, RankState
from distsession.ranks import ranks_text

__all__ = ["Watchdog"]

NOTICE_AFTER_S = 10.0
"""Seconds without progress after which a notice says who waits for whom."""
NOTICE_EVERY_S = 2.0
ASLEEP_S = 1.0
"""Seconds without any processor time after which a main thread within torch counts as blocked."""
ASLEEP_IN_VAIN_S = 0.2
"""The same once another rank has failed, whose error the user should see soon, or where a member
of an operation has ended without it."""
STILL_S = 1.0
"""Seconds at one instruction after which a main thread counts as blocked by a device that can
never go on."""
OTHERS_TIMEOUT_S = 0.3
"""Seconds that ranks have to say that their time was up, too, before the rest is freed."""
CONFIRM_S = 0.1
"""Seconds for which a cause that has been seen must stay the same: messages may be under way."""
CONFIRM_FAILURE_S = 0.02
"""The same where others miss a rank that has died or failed, and all share one board: what a rank
has begun stands there before it says how that ended."""

_WAITS = re.compile(r"/(threading|queue|concurrent/futures/\w+)\.py$")
"""Where a main thread is that waits for another thread."""


class Watchdog:
    """Looks after one run while its caller waits.

    Args:
        recovery: Of the session.
        pending: The run.
        notify: Shows a line that replaces the one before.
    """

    def __init__(
        self, recovery: Recovery, pending: PendingRequest, notify: Callable[[Notice], None]
    ):
        self._recovery = recovery
        self._pending = pending
        self._notify = notify
        self._seen: object = None
        self._seen_at = 0.0
        self._progress: object = None
        self._progress_at = time.monotonic()
        self._noticed_at = 0.0
        self._silent = ""
        self._was_broken = recovery.launcher.is_broken
        self._asked_at = 0.0
        self._with_threads: set[int] = set()
        """Ranks that have ended their part, but not all threads that it has started."""
        self._idle_since: dict[int, tuple[int, float]] = {}
        self._still_since: dict[int, tuple[int, float]] = {}
        self.due: float | None = None
        """When the next look has to be, by ``time.monotonic()``, if that is known."""
        self.verdict: Verdict | None = None
        """Why ranks of this run had to be freed; None if they had not."""
        self.waited: dict[int, str] = {}
        """The operations that freed ranks waited in."""
        self._earlier = recovery.verdict if recovery.launcher.is_broken else None
        """Why the group had been given up before this run, which is not what ends it."""
        self._late_since = 0.0
        self.places: dict[int, str] = {}
        """Where ranks were that others had waited for in vain, for as long as they may."""

    def check(self) -> None:
        """Called now and then; frees the ranks if no wait can help."""
        recovery = self._recovery
        launcher = recovery.launcher
        self.due = None
        self._find_late()
        launcher.note_unreported()
        self._look_at_hosts()
        self._recovery.give_up_stuck(self._pending)
        if launcher.board is None or self.verdict is not None or self._pending.stopped:
            return
        if where := self._pending.debugger_quit:
            if self._pending.missing:
                recovery.stop(self._pending, f"stopped {where}.")
            return
        if any(region.is_asking for region in launcher.board.regions):
            self._progress_at = time.monotonic()  # everybody waits for a person, who takes time
            return
        if launcher.is_broken and recovery.verdict is not None:
            if recovery.verdict is self._earlier:
                return
            self._adopt(recovery.verdict, recovery.reports(ask=False))
            return
        if not launcher.is_broken and recovery.find_mismatch() is not None:
            return  # the ranks that took part raise it
        sole = self._pending if self._pending.is_sole else None
        reports = recovery.reports(ask=False, sole=sole)
        for rank in self._with_threads:
            reports[rank] = replace(reports[rank], has_threads=has_finished(reports[rank]))
        now = time.monotonic()
        self._note_progress(reports, now)
        verdict = recovery.diagnose(reports, sole)
        suspects = self._suspects(reports, now)
        if verdict.kind in (Kind.NOTHING, Kind.WAIT) and suspects and now - self._asked_at > 0.1:
            self._asked_at = now
            # Those whose device was given something only just now suffer from the same.
            behind = [r for r, report in reports.items() if _has_enqueued(report)]
            asked = recovery.reports({*suspects, *behind}, ask=True, sole=sole)
            self._with_threads = {r for r, report in asked.items() if report.has_threads}
            reports = {
                r: _blocked(report, asked) if r in suspects else report
                for r, report in asked.items()
            }
            reports = self._with_doomed(reports, now)
            verdict = recovery.diagnose(reports, sole)
            self._act_on(verdict, reports, now, sole, kept=True)
        elif not suspects or verdict.kind in (Kind.DEADLOCK, Kind.ORDER):
            self._act_on(verdict, reports, now, sole)
        missing = [reports[rank] for rank in self._pending.missing]
        is_wait = verdict.kind is Kind.WAIT or verdict.is_crossed
        if is_wait or any(r.state.is_halted or r.unseen for r in missing):
            self._notice(now, sole)

    def _act_on(
        self,
        verdict: Verdict,
        reports: dict[int, RankReport],
        now: float,
        sole: PendingRequest | None,
        *,
        kept: bool = False,
    ) -> None:
        if verdict.kind not in (Kind.DEADLOCK, Kind.ORDER):
            self._seen = None
            return
        begun = tuple(reports[rank].operations[-1].sequence for rank in verdict.waiting)
        state = (verdict.kind, verdict.waiting, verdict.missing, verdict.failed, begun)
        if state != self._seen:
            self._seen, self._seen_at = state, now
        grace = self._recovery.hang_grace
        waits_for_any = any(is_from_any(reports[r].operations[-1]) for r in verdict.waiting)
        if verdict.failed:
            shares_board = self._recovery.launcher.shares_board
            grace = CONFIRM_FAILURE_S if shares_board else CONFIRM_S
        elif verdict.has_left or (verdict.kind is Kind.ORDER and not waits_for_any):
            grace = CONFIRM_S
        elif not grace:
            return
        if now - self._seen_at >= grace:
            self._abort(verdict, reports, sole, kept)
        else:
            self.due = self._seen_at + grace

    def _abort(
        self,
        verdict: Verdict,
        reports: dict[int, RankReport],
        sole: PendingRequest | None,
        kept: bool,
    ) -> None:
        recovery = self._recovery
        with recovery.lock:
            if recovery.launcher.is_broken:
                return
            if not kept:
                again = recovery.reports(ask=False, sole=sole)
                if recovery.diagnose(again, sole).kind is not verdict.kind:
                    return
            if self._may_still_come(verdict, reports, sole):
                return
            self._adopt(verdict, reports)
            recovery.abort(verdict)

    def _may_still_come(
        self, verdict: Verdict, reports: dict[int, RankReport], sole: PendingRequest | None
    ) -> bool:
        """Whether ranks that have ended their part have threads which may do what is missed."""
        ended = [rank for rank in verdict.missing if has_finished(reports[rank])]
        if verdict.failed or not ended:
            return False
        asked = self._recovery.reports(ended, ask=True, sole=sole)
        self._with_threads = {rank for rank in ended if asked[rank].has_threads}
        found = reports | {rank: asked[rank] for rank in self._with_threads}
        return self._recovery.diagnose(found, sole).kind is not verdict.kind

    def _adopt(self, verdict: Verdict, reports: dict[int, RankReport]) -> None:
        self.verdict = verdict
        for rank, report in reports.items():
            waits = report.operations and report.operations[-1].is_waiting
            if waits and rank in self._pending.ranks and report.state == RankState.RUNNING:
                self.waited[rank] = describe_operation(report.operations[-1])

    def _find_late(self) -> None:
        """Ask ranks that did not come in time where they are, as soon as another has said so."""
        late = {
            rank
            for reply, _ in list(self._pending.replies.values())
            if isinstance(reply.reason, TimedOut)
            for rank in reply.reason.missing
        }
        if new := late - self.places.keys():
            reports = self._recovery.reports(new, ask=True)
            self.places |= {rank: reports[rank].place for rank in new if rank in reports}
            self._late_since = self._late_since or time.monotonic()
        launcher = self._recovery.launcher
        if not self._late_since or launcher.is_broken or not self._pending.missing:
            return
        if time.monotonic() - self._late_since > OTHERS_TIMEOUT_S:
            # Whoever comes now would not meet those that have left.
            launcher.abort(
                AbortReason.FAILED, f"{ranks_text(sorted(late))} came too late for the others"
            )

    # --- hosts that do not answer -----------------------------------------------------------------

    def _look_at_hosts(self) -> None:
        """Name hosts that the run waits for; free who waits in vain for one that is cut off."""
        missing = set(self._pending.missing)
        silent = [
            host for host in self._recovery.launcher.silent_hosts() if missing & set(host.ranks)
        ]
        self._name_silent(silent)
        cut_off = [host for host in silent if host.is_cut_off]
        if cut_off and self._is_held_up(cut_off, missing):
            self._recovery.leave_behind(cut_off, self._pending)

    def _name_silent(self, silent: list[SilentHost]) -> None:
        text = " ".join(f"{host.text}." for host in silent)
        if text != self._silent:
            names = ", ".join(host.name for host in silent)
            self._notify(Notice(f"no answer from {names}", text) if text else NO_NOTICE)
            self._silent = text

    def _is_held_up(self, cut_off: list[SilentHost], missing: set[int]) -> bool:
        """Whether a rank waits in an operation with some of a host, or was freed from it."""
        launcher, away = self._recovery.launcher, {rank for host in cut_off for rank in host.ranks}
        if launcher.is_broken:
            return not self._was_broken and missing <= away
        reports = self._recovery.reports(ask=False)
        waiting = {
            rank: report.operations[-1]
            for rank, report in reports.items()
            if report.state == RankState.RUNNING and report.operations and rank not in away
        }
        held_up = {
            rank: describe_operation(operation)
            for rank, operation in waiting.items()
            if (operation.is_waiting or operation.is_enqueued) and away & set(operation.members)
        }
        self.waited |= held_up
        return bool(held_up)

    # --- blocked in something that was issued asynchronously --------------------------------------

    def _suspects(self, reports: dict[int, RankReport], now: float) -> list[int]:
        """Ranks that have issued something which is not complete, and use no processor time.

        Who waits for a device may use all there is, so of such a rank its own word counts.
        """
        has_failed = any(
            report.state == RankState.DEAD
            or (report.outcome is not None and report.outcome.ending is Ending.FAILED)
            for report in reports.values()
        )
        # A finished rank sees only when it is asked that its device is done with a graph, too,
        # or that its threads have ended.
        suspects = [
            r
            for r, report in reports.items()
            if report.outcome and (report.is_replaying or report.has_threads)
        ]
        if _wait_for_keys(reports):
            suspects += [r for r, report in reports.items() if report.state == RankState.RUNNING]
        for rank, report in reports.items():
            waits = report.operations and not report.operations[-1].is_waiting
            is_soon = has_failed or any(is_in_vain(op, reports) for op in report.operations)
            asleep = ASLEEP_IN_VAIN_S if is_soon else ASLEEP_S
            if (
                report.state != RankState.RUNNING
                or not waits
                or report.operations[-1].seconds < asleep
            ):
                self._idle_since.pop(rank, None)
                continue
            if report.operations[-1].is_enqueued:
                suspects.append(rank)
                continue
            used = self._recovery.launcher.processor_time(rank)
            before, since = self._idle_since.setdefault(rank, (used, now))
            if used != before:
                self._idle_since[rank] = (used, now)
            elif now - since >= asleep:
                suspects.append(rank)
        return suspects

    def _with_doomed(self, reports: dict[int, RankReport], now: float) -> dict[int, RankReport]:
        """Also those that do not get on behind an operation which can never complete.

        A device that cannot go on has room for so much only; then whatever is given to it waits,
        which looks like a computation.
        """
        found = dict(reports)
        for rank, report in reports.items():
            before, since = self._still_since.get(rank, (0, now))
            if not report.instruction or report.instruction != before:
                since = now
            self._still_since[rank] = report.instruction, since
            if now - since < STILL_S or report.is_device_wait or report.unseen:
                continue
            if operation := next((op for op in report.operations if is_doomed(op, reports)), None):
                found[rank] = waiting_in(report, operation)
        return found

    # --- notices ----------------------------------------------------------------------------------

    def _note_progress(self, reports: dict[int, RankReport], now: float) -> None:
        state = [
            (r.state, r.request, r.unseen_count, *r.sequences.values()) for r in reports.values()
        ]
        if state != self._progress:
            self._progress, self._progress_at = state, now
            if self._noticed_at:
                self._notify(NO_NOTICE)
                self._noticed_at = 0.0

    def _notice(self, now: float, sole: PendingRequest | None) -> None:
        if now - self._progress_at < NOTICE_AFTER_S or now - self._noticed_at < NOTICE_EVERY_S:
            return
        self._noticed_at = now
        reports = self._recovery.reports(ask=True, sole=sole)
        verdict = self._recovery.diagnose(reports, sole)
        is_told = verdict.kind is not Kind.NOTHING or any(
            report.state.is_halted or report.is_device_wait for report in reports.values()
        )
        if not is_told:  # it computes
            return
        self._notify(Notice(verdict.untimed or verdict.sentence, verdict.sentence))


def _wait_for_keys(reports: Mapping[int, RankReport]) -> bool:
    """Whether a rank waits for a key of the store, and no other runs code that could set it.

    Whether a thread of theirs can, they have to be asked.
    """
    last = [
        report.operations[-1]
        for report in reports.values()
        if report.operations and report.operations[-1].is_waiting
    ]
    is_old = any(op.name == STORE_WAIT and op.seconds >= ASLEEP_S for op in last)
    running = [report for report in reports.values() if report.state != RankState.IDLE]
    return is_old and len(last) == len(running)


def _has_enqueued(report: RankReport) -> bool:
    return any(operation.is_enqueued for operation in report.operations)


def _line(frame: FrameInfo) -> str:
    return next((text for number, text in frame.context if number == frame.lineno), "")


def _blocked(report: RankReport, reports: Mapping[int, RankReport]) -> RankReport:
    """The same, with the operation last and marked that its main thread waits for, if it does.

    Code that awaits waits only for what can never end: its event loop may have other things to do.

    Args:
        report: Of a rank that uses no processor time.
        reports: Of all ranks.
    """
    if report.state != RankState.RUNNING or not report.operations or not report.stack:
        return report
    filename = report.stack[-1].filename
    waits = [op for op in report.operations if op.in_thread]
    if "await " in _line(report.stack[-1]):
        waits = [op for op in waits if is_in_vain(op, reports)]
    elif not _WAITS.search(filename):
        waits = []
    # A future of C++ has no frame of torch's: the line of the user's that waits for it is the last.
    is_torchs = "torch" in filename or ".wait(" in _line(report.stack[-1])
    if not waits and is_torchs and not report.operations[-1].is_enqueued:
        waits = list(report.operations[-1:])
    if not waits:
        return report
    last = replace(waits[-1], is_waiting=True, place=waits[-1].place or report.place)
    others = tuple(op for op in report.operations if op is not waits[-1])
    return replace(report, operations=(*others, last))
