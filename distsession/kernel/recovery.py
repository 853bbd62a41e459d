"""Noticing that a run can never end, freeing its ranks, and connecting their group anew."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from distsession.cluster.base import Launcher
from distsession.cluster.pending import PendingRequest
from distsession.cluster.process_state import ENDED, has_ended, process_state, processor_time
from distsession.protocol import diagnosis
from distsession.protocol.diagnosis import (
    Kind,
    Verdict,
    describe_operation,
    is_any_source,
)
from distsession.protocol.messages import RankReport, StackReply, TimedOut
from distsession.protocol.rank_state import NO_PART, AbortReason, Ending, Outcome, RankState
from distsession.ranks import ranks_text

__all__ = ["Recovery", "Watchdog"]

STACK_TIMEOUT_S = 0.15
"""Seconds that the control thread of a rank has to say where its main thread is."""
RETURN_TIMEOUT_S = 0.5
"""Seconds that interrupted ranks have to come back before the caller does without them."""
RETURN_AFTER_INTERRUPT_S = 5.0
"""The same where ``interrupt()`` has stopped the run: its caller is another thread, in no hurry."""
NOTICE_AFTER_S = 10.0
"""Seconds without progress after which a notice says who waits for whom."""
NOTICE_EVERY_S = 2.0
ASLEEP_S = 1.0
"""Seconds without any processor time after which a main thread within torch counts as blocked."""
ASLEEP_AFTER_FAILURE_S = 0.2
"""The same once another rank has failed, whose error the user should see soon."""
OTHERS_TIMEOUT_S = 0.3
"""Seconds that ranks have to say that their time was up, too, before the rest is freed."""
RETURN_POLL_S = 0.1
"""Seconds between two looks at whether ranks have come back from a run that was stopped."""
ABORT_AGAIN_S = 2.0
"""Seconds between two attempts to free such ranks from collectives of the group given up."""
RETURN_NOTICE_AFTER_S = 1.0
"""Seconds after which whoever waits for that is told so."""
CONFIRM_S = 0.1
"""Seconds for which a cause that has been seen must stay the same: messages may be under way."""


_WAITS = re.compile(r"/(threading|queue|concurrent/futures/\w+)\.py$")
"""Where a main thread is that waits for another thread."""


class Recovery:
    """What a session does about ranks that cannot go on by themselves.

    Args:
        launcher: Gives the present launcher of the session.
        hang_grace: See ``SessionOptions``.
        waiting: Says meanwhile that the group is connected anew, should that take long.
    """

    def __init__(
        self,
        launcher: Callable[[], Launcher],
        hang_grace: float,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self._launcher = launcher
        self._waiting = waiting
        self.hang_grace = hang_grace
        self.lock = threading.RLock()
        self.verdict: Verdict | None = None
        """Why the process group has been given up, while it is."""
        self._waits: set[threading.Event] = set()

    @property
    def launcher(self) -> Launcher:
        return self._launcher()

    # --- what the ranks do ------------------------------------------------------------------------

    def reports(
        self, ranks: Iterable[int] | None = None, *, ask: bool, sole: PendingRequest | None = None
    ) -> dict[int, RankReport]:
        """What each rank does.

        Args:
            ranks: Which are asked where their main thread is. Default: all that run something.
            ask: Ask them; otherwise only what is known without disturbing anyone.
            sole: A run that nothing else can be asked of the ranks beside.
        """
        launcher = self.launcher
        pendings = launcher.channel.pending()
        if sole is not None and not any(p is not sole for p in pendings):
            pendings = [p for p in pendings if p is not sole] + [sole]
        else:
            sole = None
        found = {
            info.rank: self._report(info.rank, info.pid, pendings, sole) for info in launcher.infos
        }
        if ask:
            running = [r for r, report in found.items() if report.state == RankState.RUNNING]
            wanted = running if ranks is None else [r for r in ranks if r in running]
            stacks = launcher.request_stacks(wanted, STACK_TIMEOUT_S) if wanted else {}
            for rank in wanted:
                found[rank] = _with_stack(found[rank], stacks.get(rank))
        return found

    def diagnose(self, reports: dict[int, RankReport], sole: PendingRequest | None) -> Verdict:
        """The verdict on what the ranks do while a run is looked after."""
        pendings = self.launcher.channel.pending()
        is_sole = sole is not None and all(pending is sole for pending in pendings)
        return diagnosis.diagnose(reports, is_sole=is_sole)

    def _report(
        self, rank: int, pid: int, pendings: list[PendingRequest], sole: PendingRequest | None
    ) -> RankReport:
        launcher = self.launcher
        death = launcher.dead_ranks().get(rank)
        if death is not None:
            return RankReport(rank, RankState.DEAD, outcome=Outcome(Ending.DIED, death.how))
        if launcher.board is None:
            return RankReport(rank, RankState.IDLE)
        region = launcher.board.regions[rank]
        operations, sequences = region.operations(), region.sequences()
        letter = process_state(pid)
        if letter in ENDED and has_ended(pid):
            outcome = Outcome(Ending.DIED, launcher.unreported(rank))
            return RankReport(rank, RankState.DEAD, outcome=outcome, sequences=sequences)
        if launcher.channel.is_busy(rank):
            state, place = RankState.RUNNING, ""
            if region.is_asking:
                place = region.asks_at
                state = RankState.WAITING_FOR_INPUT
                if region.is_in_debugger:
                    state = RankState.DEBUGGING
            state = {"T": RankState.STOPPED, "t": RankState.TRACED}.get(letter, state)
            return RankReport(
                rank, state, region.seconds, region.request, place, None, operations, sequences,
                region.refused(),
            )  # fmt: skip
        ended: Outcome | None = None
        for pending in pendings:
            if rank in pending.replies:
                error = pending.replies[rank][0].error
                ended = Outcome(Ending.FINISHED)
                if error is not None:
                    ended = Outcome(Ending.FAILED, error.evalue, error.ename)
            elif pending is sole and rank not in pending.ranks:
                ended = NO_PART
        return RankReport(
            rank,
            RankState.IDLE,
            region.seconds,
            outcome=ended,
            sequences=sequences,
            refused=region.refused(),
        )

    # --- stop -------------------------------------------------------------------------------------

    def stop(self, pending: PendingRequest, why: str = "") -> None:
        """Interrupt a run, whose caller is then told why, or where its ranks were."""
        launcher = self.launcher
        if launcher.cancel_reconnect(pending):
            return
        with self.lock:
            missing = pending.missing
            if missing and set(missing) <= set(pending.arriving):
                pending.stop(
                    f"the run on {ranks_text(pending.ranks)} was stopped while what it gave was "
                    "brought here; the ranks have finished it and keep their variables.",
                    begun=False,  # so the group does not have to be connected anew
                )
                return
            later = [
                other.request
                for other in launcher.channel.pending()
                if other.request >= pending.request and set(other.ranks) & set(missing)
            ]
            board = launcher.board
            begun = board is None or any(
                board.regions[rank].request == pending.request for rank in missing
            )
            if not begun:
                launcher.refuse(later)
                pending.stop(
                    f"the run on {ranks_text(pending.ranks)} was stopped before it began; "
                    "what it waited for goes on.",
                    begun=False,
                )
                return
            reports = self.reports(missing, ask=True)
            verdict = diagnosis.diagnose(reports)
            where = (
                verdict.sentence if verdict.kind is not Kind.NOTHING else _places(reports, missing)
            )
            where = f"{where[:1].upper()}{where[1:]}"
            run = f"the run on {ranks_text(pending.ranks)}"
            pending.stop(why or f"{run} was stopped. {where}".rstrip())
            text = why or f"stopped. {where}".rstrip()
            launcher.abort(AbortReason.STOP, text, interrupt=pending.request, refuse=later)
            self.verdict = verdict

    def wait_for_ranks(
        self, ranks: Iterable[int], notify: Callable[[str], None], deadline: float | None = None
    ) -> str:
        """Before a run: connect the group anew where it has been given up.

        Ranks that have not come back yet from what was stopped are waited for. Otherwise they would
        begin the run as soon as they do, without a group, and fail with what the stop said.

        Args:
            ranks: Of the run.
            notify: Shows a line that replaces the one before.
            deadline: By ``time.monotonic()``.

        Returns:
            Why the run is not to begin; nothing if it may.
        """
        launcher = self.launcher
        began = freed = time.monotonic()
        given_up = threading.Event()
        noticed, late = "", list[int]()
        self._waits.add(given_up)
        try:
            while True:
                self.reconnect()
                if not launcher.is_broken or launcher.dead_ranks() or not launcher.is_alive:
                    return ""
                late = [rank for rank in ranks if launcher.channel.is_busy(rank)]
                if not late:
                    return ""
                now = time.monotonic()
                if now - began > RETURN_NOTICE_AFTER_S:
                    noticed = self._busy_text(late)
                    notify(noticed)
                if given_up.is_set():
                    return self._stop_late(late)
                if deadline is not None and now > deadline:
                    return f"this did not begin in time. {self._busy_text(late)}"
                if now - freed > ABORT_AGAIN_S:
                    freed = now
                    launcher.abort(AbortReason.FAILED, "an earlier run was stopped")
                given_up.wait(RETURN_POLL_S)
        except KeyboardInterrupt:
            return self._stop_late(late)
        finally:
            self._waits.discard(given_up)
            if noticed:
                notify("")

    def _stop_late(self, late: Sequence[int]) -> str:
        """Somebody who waits in :meth:`wait_for_ranks` stops: interrupt that again."""
        board = self.launcher.board
        if board is not None:
            for request in {board.regions[rank].request for rank in late} - {0}:
                self.launcher.abort(
                    AbortReason.STOP, "an earlier run was stopped", interrupt=request
                )
        return f"this was stopped before it began. {self._busy_text(late)}".rstrip()

    def cancel_waits(self) -> bool:
        """From any thread: end every :meth:`wait_for_ranks`; whether there was one."""
        held = list(self._waits)
        for event in held:
            event.set()
        return bool(held)

    def _busy_text(self, late: Sequence[int]) -> str:
        reports = self.reports(late, ask=True)
        together: dict[str, list[int]] = {}
        for rank in late:
            together.setdefault(_stuck_text(reports[rank]), []).append(rank)
        parts = []
        for why, ranks in together.items():
            who = ranks_text(ranks)
            have, it = ("has", "it") if len(ranks) == 1 else ("have", "them")
            parts.append(
                f"{who[:1].upper()}{who[1:]} {have} not come back from a run that was stopped "
                f"({why}): session.restart({ranks}) replaces {it}."
            )
        return " ".join(parts)

    def explain_stuck(self, pending: PendingRequest) -> str:
        """What to do about ranks that did not come back from a run that was stopped."""
        parts = []
        reports = self.reports(pending.missing, ask=True)
        for rank in pending.missing:
            report = reports[rank]
            if report.request not in (0, pending.request):
                parts.append(
                    f"Rank {rank} is still busy with an earlier run; this one will not begin there."
                )
                continue
            why = _stuck_text(report)
            parts.append(
                f"Rank {rank} {why}: session.restart([{rank}]) replaces it alone; the others keep "
                "their variables."
            )
        return "".join(f" {part}" for part in parts)

    # --- abort and reconnect ----------------------------------------------------------------------

    def abort(self, verdict: Verdict) -> None:
        """Give the process group up, so that whoever waits in it comes back with an error."""
        self.verdict = verdict
        self.launcher.abort(verdict.reason, verdict.sentence)

    def check_damage(self) -> None:
        """After a failure: give the group up too if it failed within (a time-out of gloo's)."""
        launcher = self.launcher
        if launcher.board is not None and not launcher.is_broken:
            damaged = [r.rank for r in launcher.board.regions if r.is_damaged]
            if damaged:
                text = f"an operation failed on {ranks_text(damaged)}"
                launcher.abort(AbortReason.FAILED, text)

    def reconnect(self) -> str:
        """Connect the group anew if it has been given up; gives what prevents that, or nothing."""
        if not self.launcher.must_reconnect:
            return ""
        with self.lock:
            if not self.launcher.must_reconnect:
                return ""
            with self._waiting():
                problem = self.launcher.reconnect()
            if not problem:
                self.verdict = None
            return problem


class Watchdog:
    """Looks after one run while its caller waits.

    Args:
        recovery: Of the session.
        pending: The run.
        notify: Shows a line that replaces the one before.
    """

    def __init__(self, recovery: Recovery, pending: PendingRequest, notify: Callable[[str], None]):
        self._recovery = recovery
        self._pending = pending
        self._notify = notify
        self._seen: object = None
        self._seen_at = 0.0
        self._progress: object = None
        self._progress_at = time.monotonic()
        self._noticed_at = 0.0
        self._asked_at = 0.0
        self._idle_since: dict[int, tuple[int, float]] = {}
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
        self._find_late()
        launcher.note_unreported()
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
        sole = self._pending if self._pending.is_sole else None
        reports = recovery.reports(ask=False, sole=sole)
        now = time.monotonic()
        self._note_progress(reports, now)
        verdict = recovery.diagnose(reports, sole)
        suspects = self._suspects(reports, now)
        if verdict.kind in (Kind.NOTHING, Kind.WAIT) and suspects and now - self._asked_at > 0.1:
            self._asked_at = now
            asked = recovery.reports(suspects, ask=True, sole=sole)
            reports = {
                r: _blocked(report) if r in suspects else report for r, report in asked.items()
            }
            verdict = recovery.diagnose(reports, sole)
            self._act_on(verdict, reports, now, sole, kept=True)
            return
        if not suspects or verdict.kind in (Kind.DEADLOCK, Kind.ORDER):
            self._act_on(verdict, reports, now, sole)
        is_halted = any(reports[r].state.is_halted for r in self._pending.missing)
        if verdict.kind is Kind.WAIT or is_halted:
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
        waits_for_any = any(is_any_source(reports[r].operations[-1]) for r in verdict.waiting)
        if verdict.failed or (verdict.kind is Kind.ORDER and not waits_for_any):
            grace = CONFIRM_S
        elif not grace:
            return
        if now - self._seen_at >= grace:
            self._abort(verdict, reports, sole, kept)

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
            self._adopt(verdict, reports)
            recovery.abort(verdict)

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

    # --- blocked in something that was issued asynchronously --------------------------------------

    def _suspects(self, reports: dict[int, RankReport], now: float) -> list[int]:
        """Ranks that have issued something which is not complete, and use no processor time."""
        pids = {info.rank: info.pid for info in self._recovery.launcher.infos}
        has_failed = any(
            report.state == RankState.DEAD
            or (report.outcome is not None and report.outcome.ending is Ending.FAILED)
            for report in reports.values()
        )
        asleep = ASLEEP_AFTER_FAILURE_S if has_failed else ASLEEP_S
        suspects = []
        for rank, report in reports.items():
            waits = report.operations and not report.operations[-1].is_waiting
            if (
                report.state != RankState.RUNNING
                or not waits
                or report.operations[-1].seconds < asleep
            ):
                self._idle_since.pop(rank, None)
                continue
            used = processor_time(pids[rank])
            before, since = self._idle_since.setdefault(rank, (used, now))
            if used != before:
                self._idle_since[rank] = (used, now)
            elif now - since >= asleep:
                suspects.append(rank)
        return suspects

    # --- notices ----------------------------------------------------------------------------------

    def _note_progress(self, reports: dict[int, RankReport], now: float) -> None:
        state = [(r.state, r.request, *r.sequences.values()) for r in reports.values()]
        if state != self._progress:
            self._progress, self._progress_at = state, now
            if self._noticed_at:
                self._notify("")
                self._noticed_at = 0.0

    def _notice(self, now: float, sole: PendingRequest | None) -> None:
        if now - self._progress_at < NOTICE_AFTER_S or now - self._noticed_at < NOTICE_EVERY_S:
            return
        self._noticed_at = now
        reports = self._recovery.reports(ask=True, sole=sole)
        self._notify(self._recovery.diagnose(reports, sole).sentence)


def _stuck_text(report: RankReport) -> str:
    """Why a rank does not come back."""
    known = {
        RankState.SILENT: "computes in C code that holds Python's lock and cannot be interrupted",
        RankState.STOPPED: "is stopped by SIGSTOP (kill -CONT lets it go on)",
        RankState.TRACED: "is held by a debugger",
        RankState.DEAD: f"has ended; {report.outcome.text if report.outcome else ''}",
    }
    if report.state in known:
        return known[report.state]
    if report.place or not report.stack:
        return f"does not react, at {report.place or 'an unknown place'}"
    # Its own code is over: what it had is let go, and the end of that takes long.
    outermost = report.stack[0]
    file = os.path.basename(outermost.filename)
    return f"does not react, in {outermost.name} ({file} line {outermost.lineno})"


def _with_stack(report: RankReport, reply: StackReply | None) -> RankReport:
    if reply is None:
        return replace(report, state=RankState.SILENT)
    return replace(report, place=reply.place, stack=reply.stack)


def _blocked(report: RankReport) -> RankReport:
    """The same, with the operation last and marked that its main thread waits for, if it does."""
    if report.state != RankState.RUNNING or not report.operations or not report.stack:
        return report
    filename = report.stack[-1].filename
    waits = [op for op in report.operations if op.in_thread and _WAITS.search(filename)]
    if not waits and "torch" in filename:
        waits = list(report.operations[-1:])
    if not waits:
        return report
    last = replace(waits[-1], is_waiting=True, place=waits[-1].place or report.place)
    others = tuple(op for op in report.operations if op is not waits[-1])
    return replace(report, operations=(*others, last))


def _places(reports: dict[int, RankReport], ranks: Iterable[int]) -> str:
    """Where ranks are that wait for nobody."""
    at: dict[str, list[int]] = {}
    for rank in ranks:
        at.setdefault(reports[rank].place, []).append(rank)
    parts = [
        f"{ranks_text(there)} {'was' if len(there) == 1 else 'were'} at {place}"
        for place, there in at.items()
        if place
    ]
    text = ", ".join(parts)
    return f"{text}." if text else ""
