"""Stopping runs, freeing their ranks, and connecting the process group anew."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from distsession.cluster.base import Launcher
from distsession.cluster.deaths import SilentHost, replace_text, stuck_error
from distsession.cluster.interrupts import interrupts_held
from distsession.cluster.pending import PendingRequest
from distsession.display import render
from distsession.engine.process_state import ENDED
from distsession.errors import EngineDiedError, SessionStateError
from distsession.kernel.output import NO_NOTICE, Notice
from distsession.kernel.stopped import END_IT, going_on_text, running_text
from distsession.protocol import diagnosis
from distsession.protocol.board import Region
from distsession.protocol.board_report import running_report
from distsession.protocol.cause import mismatch_text, sentence
from distsession.protocol.cells import is_notebook_file
from distsession.protocol.diagnosis import (
    Kind,
    Verdict,
    describe_operation,
    device_wait_text,
    shortened,
)
from distsession.protocol.messages import Mismatch, Operation, RankReport, StackReply
from distsession.protocol.operation_names import CodeLine, Pair, group_title
from distsession.protocol.rank_state import NO_PART, AbortReason, Ending, Outcome, RankState
from distsession.protocol.unseen import Unseen, texts
from distsession.ranks import ranks_text

__all__ = ["DIAGNOSE_TIMEOUT_S", "Recovery", "has_finished", "is_doomed", "waiting_in"]

STACK_TIMEOUT_S = 0.15
"""Seconds that the control thread of a rank has to say where its main thread is, in a run that
is waited for."""
DIAGNOSE_TIMEOUT_S = 1.0
"""The same where somebody has asked for just that: a busy machine must not make it wrong."""
ANSWER_TIMEOUT_S = 0.2
"""Seconds that a rank has to say that it has finished a run, or does not begin it."""
RETURN_TIMEOUT_S = 0.5
"""Seconds that interrupted ranks have to come back before the caller does without them."""
RETURN_AFTER_INTERRUPT_S = 5.0
"""The same where ``interrupt()`` has stopped the run: its caller is another thread, in no hurry."""
RETURN_POLL_S = 0.1
"""Seconds between two looks at whether ranks have come back from a run that was stopped."""
MOST_SOURCE = 60
"""Characters of a line of code that are told."""
ABORT_AGAIN_S = 2.0
"""Seconds between two attempts to free such ranks from collectives of the group given up."""
STUCK_S, STUCK_PER_RANK_S = 10.0, 0.5
"""Seconds after an abort of the group, and more for each rank, before a rank that still waits in it
is given up."""
RETURN_NOTICE_AFTER_S = 1.0
"""Seconds after which whoever waits for that is told so."""


class Recovery:
    """What a session does about ranks that cannot go on by themselves.

    Args:
        hang_grace: See ``SessionOptions``.
        waiting: Says meanwhile that the group is connected anew, should that take long.

    Attributes:
        launcher: The present one of the session, which sets it.
    """

    launcher: Launcher

    def __init__(
        self,
        hang_grace: float,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self._waiting = waiting
        self.hang_grace = hang_grace
        self.lock = threading.RLock()
        self.verdict: Verdict | None = None
        """Why the process group has been given up, while it is."""
        self._waits: set[threading.Event] = set()

    # --- what the ranks do ------------------------------------------------------------------------

    def reports(
        self,
        ranks: Iterable[int] | None = None,
        *,
        ask: bool,
        sole: PendingRequest | None = None,
        timeout: float = STACK_TIMEOUT_S,
        waiting: bool = True,
    ) -> dict[int, RankReport]:
        """What each rank does.

        Args:
            ranks: Which are asked where their main thread is. Default: all that run something.
            ask: Ask them; otherwise only what is known without disturbing anyone.
            sole: A run that nothing else can be asked of the ranks beside.
            timeout: Seconds that they have to answer.
            waiting: Ask also those that wait in an operation, which the board says with its place.
        """
        launcher = self.launcher
        pendings = launcher.channel.pending()
        if sole is not None and not any(p is not sole for p in pendings):
            pendings = [p for p in pendings if p is not sole] + [sole]
        else:
            sole = None
        dead = launcher.dead_ranks()
        found = {
            info.rank: self._report(info.rank, pendings, sole, dead) for info in launcher.infos
        }
        if ask:
            running = [
                rank
                for rank, report in found.items()
                if report.state == RankState.RUNNING or report.is_replaying or has_finished(report)
            ]
            wanted = running if ranks is None else [r for r in ranks if r in running]
            if not waiting:
                known = {rank: _at_operation(found[rank]) for rank in wanted}
                found |= {rank: report for rank, report in known.items() if report is not None}
                wanted = [rank for rank in wanted if known[rank] is None]
            stacks = launcher.request_stacks(wanted, timeout) if wanted else {}
            for rank in wanted:
                report = found[rank]
                if report.unseen or any(op.is_enqueued for op in report.operations):
                    # Its control thread has just looked what of that is complete.
                    found[rank] = self._report(rank, pendings, sole, dead)
                reply = stacks.get(rank)
                if found[rank].state == RankState.RUNNING:
                    found[rank] = _with_stack(found[rank], reply)
                elif has_finished(found[rank]) and reply is not None:
                    found[rank] = replace(found[rank], has_threads=reply.has_threads)
            found |= {
                rank: _behind_device(report, found)
                for rank, report in found.items()
                if report.is_device_wait
            }
        return found

    def diagnose(self, reports: dict[int, RankReport], sole: PendingRequest | None) -> Verdict:
        """The verdict on what the ranks do while a run is looked after."""
        pendings = self.launcher.channel.pending()
        is_sole = sole is not None and all(pending is sole for pending in pendings)
        return diagnosis.diagnose(reports, is_sole=is_sole)

    def _report(
        self,
        rank: int,
        pendings: list[PendingRequest],
        sole: PendingRequest | None,
        dead: Mapping[int, EngineDiedError],
    ) -> RankReport:
        launcher = self.launcher
        death = dead.get(rank)
        if death is not None:
            return RankReport(rank, RankState.DEAD, outcome=Outcome(Ending.DIED, death.how))
        if launcher.board is None:
            return RankReport(rank, RankState.IDLE)
        region = launcher.board.regions[rank]
        letter = launcher.process_state(rank)
        if letter in ENDED and launcher.has_ended(rank):
            outcome = Outcome(Ending.DIED, launcher.unreported(rank))
            return RankReport(rank, RankState.DEAD, outcome=outcome, sequences=region.sequences())
        if launcher.channel.is_busy(rank):
            return running_report(region, letter)
        ended: Outcome | None = None
        for pending in pendings:
            if rank in pending.replies:
                error = pending.replies[rank][0].error
                ended = Outcome(Ending.FINISHED)
                if error is not None:
                    ended = Outcome(Ending.FAILED, error.evalue, error.ename)
            elif pending is sole and rank not in pending.ranks:
                ended = NO_PART
        under_way = region.unseen & Unseen.REPLAY  # the rest needs a rank that runs something
        return RankReport(
            rank,
            RankState.IDLE,
            region.seconds,
            outcome=ended,
            # What a lost device was given never comes to its end, whatever had been begun.
            sequences={} if region.is_device_lost else region.sequences(),
            refused=region.refused(),
            left=region.left(),
            unseen=texts(under_way),
            is_replaying=bool(under_way),
        )

    # --- stop -------------------------------------------------------------------------------------

    def check_owned(self, pending: PendingRequest) -> None:
        """What another process has taken over goes on there; nobody has died.

        A run can have all its answers here and lack its last output. The other process shows it.

        Raises:
            SessionStateError: It has.
        """
        is_elsewhere = pending.deaths or pending.is_cut_short
        if is_elsewhere and (taken := self.launcher.taken_over):
            raise SessionStateError(f"{taken}.".replace("..", "."))

    def stop(self, pending: PendingRequest, why: str = "", *, force: bool = False) -> None:
        """Interrupt a run, whose caller is then told why, or where its ranks were.

        Args:
            pending: The run.
            why: What its caller is told.
            force: End it, also if its code catches every interrupt.
        """
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
            begun = self._has_begun(pending, missing)
            if not begun:
                launcher.refuse(later)
                # Control messages are handled in order: who answers has refused it, or had begun.
                launcher.request_stacks(missing, DIAGNOSE_TIMEOUT_S)
                begun = self._has_begun(pending, missing)
            if not begun:
                pending.stop(self._not_under_way_text(pending), begun=False)
                return
            # Also those that have ended their part, and have threads that may not have.
            reports = self.reports(pending.ranks, ask=True, waiting=False)
            verdict = diagnosis.diagnose(reports)
            is_wait = verdict.kind is not Kind.NOTHING
            lines = verdict.lines if is_wait else (self._places(reports, pending),)
            if verdict.threads and not is_wait:
                lines = (*map(sentence, filter(None, lines)), verdict.threads)
            stopped = f"the run on {ranks_text(pending.ranks)} was stopped"
            where = "\n".join(lines)
            pending.stop(why or sentence(f"{stopped}: {where}" if where else stopped))
            text = why or sentence(f"stopped: {' '.join(lines)}" if where else "stopped")
            launcher.abort(
                AbortReason.STOP, text, interrupt=pending.request, refuse=later, force=force
            )
            self.verdict = verdict

    def stop_all(self, *, force: bool = False) -> list[PendingRequest]:
        """Interrupt whatever runs on the ranks; gives what that is."""
        running = [each for each in self.launcher.channel.pending() if each.missing]
        for pending in running:
            self.stop(pending, force=force)
        return running

    @staticmethod
    def await_return(stopped: Sequence[PendingRequest], timeout: float) -> list[int]:
        """Wait for the ranks of runs that were stopped; gives those that have not come back."""
        deadline = time.monotonic() + timeout
        while missing := {rank for pending in stopped for rank in pending.missing}:
            if time.monotonic() > deadline:
                break
            time.sleep(RETURN_POLL_S / 10)
        return sorted(missing)

    def running(self) -> str:
        """What runs, and what has come of stops of it; empty if nothing runs.

        To connect the group anew is no run.
        """
        launcher = self.launcher
        pendings = [
            each
            for each in launcher.channel.pending()
            if not launcher.is_reconnecting_by(each) and each.missing
        ]
        begun = [each for each in pendings if self._has_begun(each, each.missing)]
        return running_text(begun or pendings, self.reports_of_stopped(pendings))

    def stopped(self) -> str:
        """What was stopped and goes on, as sentences; empty if there is nothing."""
        pendings = [each for each in self.launcher.channel.pending() if each.stops and each.missing]
        reports = self.reports_of_stopped(pendings)
        return " ".join(sentence(going_on_text(each, reports)) for each in pendings)

    def interrupted_text(self) -> str:
        """What has come of an interrupt just now."""
        self.await_return(self.launcher.channel.pending(), RETURN_TIMEOUT_S)
        if stopped := self.stopped():
            return f"{stopped} {END_IT}"
        self.reconnect()  # which whoever waited for it does, too
        return "interrupted; what ran has ended."

    def reports_of_stopped(self, pendings: Iterable[PendingRequest]) -> dict[int, RankReport]:
        """What the ranks do that have not answered those of these that were stopped."""
        missing = {rank for each in pendings if each.stops for rank in each.missing}
        return self.reports(missing, ask=True) if missing else {}

    def _places(self, reports: Mapping[int, RankReport], pending: PendingRequest) -> str:
        """Where ranks are that wait for nobody; those that have failed come first."""
        board = self.launcher.board
        grades: dict[tuple[int, str, str], list[int]] = {}
        for rank in pending.ranks:
            last = board.regions[rank].last_line if board is not None else ""
            if does := _was(reports[rank], last):
                grades.setdefault(does, []).append(rank)
        return ", ".join(
            f"{ranks_text(ranks)} {one if len(ranks) == 1 else many}"
            for (_, one, many), ranks in sorted(grades.items(), key=lambda item: item[0][0])
        )

    def _has_begun(self, pending: PendingRequest, ranks: Iterable[int]) -> bool:
        board = self.launcher.board
        return board is None or any(
            board.regions[rank].request == pending.request for rank in ranks
        )

    def _not_under_way_text(self, pending: PendingRequest) -> str:
        """What to say of a run that was stopped while no rank was in the midst of it."""
        board = self.launcher.board
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        # Who is idle has finished it or refuses it, and is about to say so.
        while board is not None and any(not board.regions[r].request for r in pending.missing):
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        run = f"the run on {ranks_text(pending.ranks)} was stopped"
        if pending.only_stages:
            return f"{run}: the variables are as they were."
        replies = dict(pending.replies)
        finished = sorted(rank for rank, (reply, _) in replies.items() if reply.error is None)
        others = [rank for rank in pending.ranks if rank not in finished]
        if not finished:
            return f"{run} before it began; what it waited for goes on."
        if not others:
            return f"{run} when it was done already: the variables are set."
        return (
            f"{run} when {ranks_text(finished)} had finished it already; it does not begin on "
            f"{ranks_text(others)}."
        )

    def wait_for_ranks(
        self, ranks: Iterable[int], notify: Callable[[Notice], None], deadline: float | None = None
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
        given_up = threading.Event()
        self._waits.add(given_up)
        try:
            problem = self._wait_for_ranks(ranks, notify, deadline, given_up)
        finally:
            self._waits.discard(given_up)
        # It may have been given up in a reconnect that succeeded all the same.
        return problem or (self._stop_late(()) if given_up.is_set() else "")

    def _wait_for_ranks(
        self,
        ranks: Iterable[int],
        notify: Callable[[Notice], None],
        deadline: float | None,
        given_up: threading.Event,
    ) -> str:
        launcher = self.launcher
        began = freed = time.monotonic()
        noticed, late = False, list[int]()
        try:
            while True:
                self.reconnect()
                if not launcher.is_broken or launcher.dead_ranks() or not launcher.is_alive:
                    return ""
                if self._cut_off(ranks):  # which is told when it is sent
                    return ""
                late = [rank for rank in ranks if launcher.channel.is_busy(rank)]
                if not late:
                    return ""
                now = time.monotonic()
                if now - began > RETURN_NOTICE_AFTER_S or (now > began and self._stopped_on(late)):
                    noticed = True
                    notify(Notice(self._busy_text(late, waits=True)))
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
            if noticed:
                notify(NO_NOTICE)

    def _stop_late(self, late: Sequence[int]) -> str:
        """Somebody who waits in :meth:`wait_for_ranks` stops: interrupt that again."""
        board = self.launcher.board
        stopped = self._stopped_on(late)
        with suppress(KeyboardInterrupt):  # pressed again: do not wait
            with interrupts_held():
                for pending in stopped:
                    self.stop(pending)
            self.await_return(stopped, RETURN_TIMEOUT_S)
        if board is not None:
            known = {pending.request for pending in stopped}
            for request in {board.regions[rank].request for rank in late} - {0, *known}:
                self.launcher.abort(
                    AbortReason.STOP, "an earlier run was stopped", interrupt=request
                )
        late = [rank for rank in late if self.launcher.channel.is_busy(rank)]
        return f"this was stopped before it began. {self._busy_text(late)}".rstrip()

    def _stopped_on(self, ranks: Iterable[int]) -> list[PendingRequest]:
        """What was stopped and goes on there."""
        wanted = set(ranks)
        return [
            pending
            for pending in self.launcher.channel.pending()
            if pending.stops and wanted.intersection(pending.missing)
        ]

    def cancel_waits(self) -> bool:
        """From any thread: end every :meth:`wait_for_ranks`; whether there was one."""
        held = list(self._waits)
        for event in held:
            event.set()
        return any(event in self._waits for event in held)  # the others may not have seen it

    def _busy_text(self, late: Sequence[int], *, waits: bool = False) -> str:
        """Why ranks cannot begin anything, and what to do: press Stop, while somebody waits."""
        reports = self.reports(late, ask=True)
        parts, told = [], set[int]()
        for pending in self._stopped_on(late):
            ranks = [rank for rank in pending.missing if rank in late]
            if any(reports[rank].interrupted for rank in ranks):
                told.update(ranks)
                what = going_on_text(pending, reports)
                parts.append(
                    f"{'This waits: ' if waits else ''}{what}. "
                    + ("Stop interrupts it again." if waits else END_IT)
                )
        together: dict[str, list[int]] = {}
        for rank in late:
            if rank not in told:
                together.setdefault(_stuck_text(reports[rank]), []).append(rank)
        for why, ranks in together.items():
            who = ranks_text(ranks)
            have, it = ("has", "it") if len(ranks) == 1 else ("have", "them")
            after = "after a Stop, " if waits else ""
            parts.append(
                f"{who[:1].upper()}{who[1:]} {have} not come back from a run that was stopped "
                f"({why}): {after}session.restart({ranks}) replaces {it}."
            )
        return " ".join(parts)

    def explain_stuck(self, pending: PendingRequest) -> str:
        """What to do about ranks that did not come back from a run that was stopped."""
        reports = self.reports(pending.missing, ask=True)
        if any(report.interrupted for report in reports.values()):
            return (
                f"{_capital(going_on_text(pending, reports))}. %session interrupt "
                f"(session.interrupt()) interrupts it again. {END_IT}"
            )
        busy, stuck = list[int](), dict[str, list[int]]()
        for rank in sorted(pending.missing):
            if reports[rank].request not in (0, pending.request):
                busy.append(rank)
            else:
                stuck.setdefault(_stuck_text(reports[rank]), []).append(rank)
        text = ""
        if stuck:
            told = (
                f"{ranks_text(ranks)} {why}"
                if len(ranks) == 1
                else f"{ranks_text(ranks)} each {why}"
                for why, ranks in stuck.items()
            )
            remedy = replace_text(
                sorted(itertools.chain(*stuck.values())), len(self.launcher.infos)
            )
            text = f" {_capital('; '.join(told))}: {remedy}"
        if busy:
            is_, there = ("is", "there") if len(busy) == 1 else ("are", "on them")
            text += (
                f" {_capital(ranks_text(busy))} {is_} still busy with an earlier run; this "
                f"one will not begin {there}."
            )
        return text

    # --- hosts that do not answer -----------------------------------------------------------------

    def check_reach(self, ranks: Sequence[int]) -> None:
        """See that no rank is cut off, which would do what it was asked when nobody waits for it.

        Raises:
            EngineDiedError: One is.
        """
        for rank, host in self._cut_off(ranks).items():
            raise host.error_of(self.launcher.infos[rank])

    def _cut_off(self, ranks: Iterable[int]) -> dict[int, SilentHost]:
        hosts = [host for host in self.launcher.silent_hosts() if host.is_cut_off]
        if not hosts:
            return {}
        # One that counts as gone by now is told as dead, with what to do then.
        wanted = set(ranks) - self.launcher.dead_ranks().keys()
        return {rank: host for host in hosts for rank in host.ranks if rank in wanted}

    def leave_behind(self, hosts: Sequence[SilentHost], pending: PendingRequest) -> None:
        """Free whoever waits for ranks that are cut off, and wait for these no longer.

        They live, and may come back: then they hear that they are to end what they do.
        """
        launcher = self.launcher
        text = sentence(", ".join(host.text for host in hosts))
        with self.lock:
            if not launcher.is_broken:
                launcher.abort(AbortReason.FAILED, text)
            missing = set(pending.missing)
            infos = launcher.infos
            for host in hosts:
                if left := sorted(missing & set(host.ranks)):
                    launcher.leave(left, pending.request, text)
                    for rank in left:
                        pending.put_death(host.error_of(infos[rank]))

    # --- ranks that cannot be freed ---------------------------------------------------------------

    def give_up_stuck(self, pending: PendingRequest) -> None:
        """Wait no longer for ranks of a run that an abort of the group does not free.

        NCCL may leave a rank so: while it makes a communicator with another rank, or where one
        communicator's abort waits for the kernels of another. The rank runs on until a restart.
        """
        launcher = self.launcher
        if launcher.board is None or not launcher.is_broken:
            return
        infos, regions = launcher.infos, launcher.board.regions
        seconds = {rank: regions[rank].abort_seconds for rank in pending.missing}
        limit_s = STUCK_S + STUCK_PER_RANK_S * len(infos)
        if max(seconds.values(), default=0.0) < limit_s:
            return
        stuck = {
            rank: operation
            for rank, report in self.reports(ask=False).items()
            # The other ranks began their aborts a moment later, and are told with the first.
            if seconds.get(rank, 0.0) > limit_s / 2 and report.state == RankState.RUNNING
            for operation in report.operations[-1:]
            if (operation.is_waiting or operation.is_enqueued) and operation.seconds > seconds[rank]
        }
        remedy = replace_text(sorted(stuck), len(infos))
        for rank, operation in stuck.items():
            told = describe_operation(operation)
            pending.put_death(stuck_error(infos[rank], told, seconds[rank], remedy))

    # --- abort and reconnect ----------------------------------------------------------------------

    def abort(self, verdict: Verdict) -> None:
        """Give the process group up, so that whoever waits in it comes back with an error."""
        self.verdict = verdict
        self.launcher.abort(verdict.reason, verdict.sentence, stuck=verdict.waiting)

    def find_mismatch(self) -> Mismatch | None:
        """Give the group up if ranks of different nodes have begun what does not match."""
        if self.launcher.shares_board:  # they see that themselves
            return None
        with self.lock:
            launcher = self.launcher
            mismatch = launcher.find_mismatch()
            if mismatch is not None and not launcher.is_broken:
                text = sentence(mismatch_text(mismatch))
                launcher.abort(AbortReason.MISMATCH, text, mismatch=mismatch)
        return mismatch

    def check_damage(self, *, has_failed: bool) -> None:
        """After a run: give the group up if an operation failed within (a time-out of gloo's).

        Args:
            has_failed: So did the run: operations that were issued, and that others will not begin
                any more, are a reason, too. What those begin next would be taken for them.
        """
        launcher = self.launcher
        if launcher.board is None or launcher.is_broken:
            return
        if damaged := launcher.board.damaged_ranks():
            text = f"an operation failed on {ranks_text(damaged)}"
            launcher.abort(AbortReason.FAILED, text)
        elif not has_failed or launcher.channel.pending():
            return
        elif left := _left_alone(launcher.board.regions):
            text = f"{left} was left by a run that failed elsewhere"
            launcher.abort(AbortReason.FAILED, text)

    def reconnect(self, *, may_keep: bool = True) -> str:
        """Connect the group anew if it has been given up; gives what prevents that, or nothing.

        Args:
            may_keep: Connections that nothing has happened to stay as they are.
        """
        launcher = self.launcher
        if not (launcher.must_reconnect or launcher.lacks_group):
            return ""
        with self.lock:
            lacks_group = launcher.lacks_group
            if not (launcher.must_reconnect or lacks_group):
                return ""
            with self._waiting():
                problem = launcher.reconnect(may_keep=may_keep and not lacks_group)
            if not problem:
                self.verdict = None
            return problem


def _left_alone(regions: Sequence[Region]) -> str:
    """A collective of ranks that run nothing any more, which some member has not begun.

    It may have ended where it was begun, as a broadcast does whose root has sent everything.
    """
    begun = [region.sequences() for region in regions]
    for region in regions:
        for operation in region.operations() if not region.request else ():
            if Pair.from_name(operation.group) is None and any(
                begun[member].get(operation.group, 0) < operation.sequence
                for member in operation.members
            ):
                return describe_operation(operation)
    given = [_given(region) for region in regions]
    for rank, region in enumerate(regions):
        for group, (count, members) in region.begun().items() if not region.request else ():
            if Pair.from_name(group) is None and any(
                given[member].get(group, 0) < given[rank][group] for member in members
            ):
                return f"operation #{count} of {group_title(group)}"
    return ""


def _given(region: Region) -> dict[str, int]:
    """How many operations of each group a rank has begun, without those that it refused."""
    refused = Counter(group for group, _ in region.refused())
    return {group: count - refused[group] for group, count in region.sequences().items()}


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


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
    if any(frame.filename.startswith("<frozen importlib") for frame in report.stack):
        return f"imports something, which is not cut off, at {report.place or 'an unknown place'}"
    if report.place or not report.stack:
        return f"does not react, at {report.place or 'an unknown place'}"
    # Its own code is over: what it had is let go, and the end of that takes long.
    outermost = report.stack[0]
    file = os.path.basename(outermost.filename)
    return f"does not react, in {outermost.name} ({file} line {outermost.lineno})"


def has_finished(report: RankReport) -> bool:
    """Whether a rank has ended its part of a run, and without an error."""
    return report.outcome is not None and report.outcome.ending is Ending.FINISHED


def _at_operation(report: RankReport) -> RankReport | None:
    """A report with its place, where the main thread waits in an operation that is all there is."""
    operations = report.operations
    if not operations or not operations[-1].is_waiting:
        return None
    if report.unseen or any(operation.is_enqueued for operation in operations):
        return None
    return replace(report, place=operations[-1].place)


def _with_stack(report: RankReport, reply: StackReply | None) -> RankReport:
    if reply is None:
        operation = report.operations[-1] if report.operations else None
        if operation is not None and operation.is_waiting:
            # Who waits there does not hold the interpreter's lock: the machine is busy.
            return replace(report, place=operation.place)
        return replace(report, state=RankState.SILENT)
    return replace(
        report,
        place=reply.place,
        stack=reply.stack,
        is_device_wait=reply.is_device_wait,
        unseen=reply.unseen,
        instruction=reply.instruction,
        has_one_thread=reply.has_one_thread,
        interrupted=reply.interrupted,
    )


def _behind_device(report: RankReport, reports: Mapping[int, RankReport]) -> RankReport:
    """A rank that waits for its device, with the operation last and marked that it waits behind.

    A device goes on with what it was given first; of several streams, with what can go on. Where it
    may have been given something else that is not seen, that may be what is waited for.
    """
    if report.unseen:
        return report
    enqueued = [operation for operation in report.operations if operation.is_enqueued]
    alone = [operation for operation in enqueued if _is_missed(operation, reports)]
    first = (alone or enqueued)[:1]
    if not first or report.operations[-1].is_waiting:
        return report
    return waiting_in(report, first[0])


def waiting_in(report: RankReport, operation: Operation) -> RankReport:
    """The same report, with the operation last and marked that its main thread waits for it."""
    rest = tuple(each for each in report.operations if each is not operation)
    return replace(report, operations=(*rest, replace(operation, is_waiting=True)))


def is_doomed(operation: Operation, reports: Mapping[int, RankReport]) -> bool:
    """Whether a device was given it, and a member will never begin it."""
    return operation.is_enqueued and is_in_vain(operation, reports)


def is_in_vain(operation: Operation, reports: Mapping[int, RankReport]) -> bool:
    """Whether a member will never begin it."""
    return any(
        _misses(report, operation)
        and (report.state == RankState.DEAD or report.outcome is not None)
        for member in operation.members
        if (report := reports.get(member)) is not None
    )


def _is_missed(operation: Operation, reports: Mapping[int, RankReport]) -> bool:
    """Whether a member has not begun it, or has died in it."""
    return any(
        _misses(report, operation)
        for member in operation.members
        if (report := reports.get(member)) is not None
    )


def _misses(report: RankReport, operation: Operation) -> bool:
    """Whether that rank takes no part in an operation."""
    return (
        report.state == RankState.DEAD
        or report.sequences.get(operation.group, 0) < operation.sequence
        or (operation.group, operation.sequence) in report.refused
    )


def _was(report: RankReport, last: str) -> tuple[int, str, str] | None:
    """What a rank did when it was stopped: how grave that is, and the verb for one and for several.

    Args:
        report: The rank's.
        last: The line that it was last seen at.
    """
    known = {
        RankState.SILENT: "in C code that does not let Python run, or without processor time",
        RankState.STOPPED: "stopped by SIGSTOP",
        RankState.TRACED: "held by a debugger",
        RankState.DEBUGGING: "in its debugger",
        RankState.WAITING_FOR_INPUT: "waiting for input",
    }
    operation = report.operations[-1] if report.operations else None
    if report.state in (RankState.IDLE, RankState.DEAD):
        if report.outcome is None or report.outcome.ending is Ending.NO_PART:
            return None
        if report.outcome.ending is Ending.FINISHED:
            return 2, "had finished its part", "had finished their part"
        had = f"had {'died' if report.state == RankState.DEAD else 'failed'}"
        had += f" ({shortened(report.outcome.reason)})" if report.outcome.reason else ""
        return 0, had, had
    if report.state in known:
        at = report.place or last
        where = known[RankState(report.state)]
        where += f", {'last seen ' if not report.place else ''}at {at}" if at else ""
    elif operation is not None and operation.is_waiting:
        where = f"in {describe_operation(operation)}"
    elif report.is_device_wait:
        where = f"waiting for the device {device_wait_text(report)}"
    elif report.place or last:
        where = f"at {report.place or last}{_source(report)}"
    elif report.stack:  # its own code is over, or there was none
        frame = report.stack[-1]
        where = f"in {frame.name} ({os.path.basename(frame.filename)} line {frame.lineno})"
    else:
        where = "running"
    return 1, f"was {where}", f"were {where}"


def _source(report: RankReport) -> str:
    """The line of code that a rank is at: `` (while True: pass)``; empty if that is not known."""
    if not report.place or not report.stack:
        return ""
    line = CodeLine.from_name(report.place).line
    for frame in reversed(report.stack):
        name = os.path.basename(frame.filename)
        if frame.lineno == line and (
            report.place.startswith(f"{name} line ") or is_notebook_file(frame.filename)
        ):
            text = dict(frame.context or render.local_lines(frame)).get(line, "").strip()
            return f" ({shortened(text, MOST_SOURCE)})" if text else ""
    return ""
