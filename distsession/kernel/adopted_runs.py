"""What an earlier kernel of a session had its ranks do, and did not see the end of."""

from __future__ import annotations

import concurrent.futures
import contextvars
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distsession.cluster.attachment import Adopted
from distsession.cluster.pending import PendingRequest
from distsession.errors import EngineDiedError
from distsession.kernel.output import Output
from distsession.kernel.requests import Requests
from distsession.kernel.runs import LastRun, RunBegan, RunKind
from distsession.kernel.session_record import Entries, Known
from distsession.protocol.cells import name_of_value, number_in
from distsession.protocol.host_clock import host_clock
from distsession.protocol.messages import CallRequest, CellRequest
from distsession.ranks import ranks_text
from distsession.results import RankResults

__all__ = ["AdoptedRun", "AdoptedRuns"]

ANSWERS_S = 0.3
"""Seconds in which the answers of a run that has ended come in after attaching."""
POLL_S = 0.01

Future = concurrent.futures.Future[RankResults[Any]]


@dataclass(eq=False)
class AdoptedRun:
    """A run of an earlier kernel.

    Attributes:
        began: What that kernel noted of it.
        pending: What comes of it.
        missing: Ranks that were to run it, live, and never got it.
        future: Of its values, if they are wanted.
        source: Its code; empty if that is not known.
        is_followed: Somebody waits for it.
    """

    began: RunBegan
    pending: PendingRequest
    missing: tuple[int, ...] = ()
    future: Future | None = None
    source: str = ""
    is_followed: bool = False

    @property
    def duration(self) -> float:
        """Seconds that its ranks took, as far as they have answered."""
        return max((reply.duration for reply, _ in self.pending.replies.values()), default=0.0)


class AdoptedRuns:
    """The runs that a kernel has taken over.

    Args:
        requests: Of the session.
        history: What ran, for ``export``.
    """

    def __init__(self, requests: Requests, history: Entries):
        self._requests = requests
        self._history = history
        self._runs: list[AdoptedRun] = []
        self._unwanted: list[PendingRequest] = []
        self._lost: list[str] = []
        self._ended_at = 0.0

    def take(self, adopted: Sequence[Adopted], known: Known) -> None:
        """Take over what the ranks have said that they were asked.

        Args:
            adopted: That, in its order.
            known: What the journal tells of it.
        """
        dead = self._requests.launcher.dead_ranks()
        for each in adopted:
            request, pending = each.request, each.pending
            if request.id in known.ended:  # the kernel before has seen the end of it
                self._requests.note_end(request.id, known.ended[request.id])
                self._unwanted.append(pending)
            elif not isinstance(request, (CellRequest, CallRequest)):
                self._unwanted.append(pending)  # of a transfer that nobody goes on with
            else:
                began = known.began.get(request.id) or self._guessed(request, pending)
                run = AdoptedRun(
                    began, pending, each.missing, source=getattr(request, "source", "")
                )
                self._take_run(run, dead)
        there = {each.request.id for each in adopted}
        self._note_lost(known, there | self._take_late(known, there, dead), dead)

    def _take_late(
        self, known: Known, there: Collection[int], dead: Mapping[int, EngineDiedError]
    ) -> set[int]:
        """Take over what only ranks can tell of that have not connected yet; gives which."""
        launcher, taken = self._requests.launcher, set()
        for number, began in known.began.items():
            if number in there or number in known.ended:
                continue
            if (pending := launcher.adopt_late(number, began.ranks)) is not None:
                self._take_run(AdoptedRun(began, pending), dead)
                taken.add(number)
        self._runs.sort(key=lambda run: run.began.request)
        launcher.resume_late()
        return taken

    def _take_run(self, run: AdoptedRun, dead: Mapping[int, EngineDiedError]) -> None:
        began, pending = run.began, run.pending
        pending.title, pending.since = began.title, host_clock() - began.age_s
        died = [rank for rank in began.ranks if rank in dead and rank not in pending.ranks]
        pending.ranks = tuple(sorted({*pending.ranks, *died}))
        for rank in died:
            pending.put_death(dead[rank])
        self._requests.take_over(began)
        if began.fetch:
            run.future = concurrent.futures.Future()
            run.future.set_running_or_notify_cancel()
        self._runs.append(run)

    def begin(self) -> None:
        """Wait behind for what nobody is to see, and for what ``submit`` has sent."""
        unwanted, self._unwanted = self._unwanted, []
        for pending in unwanted:
            _in_thread(partial(self._let_go, pending))
        for run in self._runs:
            if run.began.kind is RunKind.SUBMIT:  # as in its own kernel
                self._follow_behind(run)
        self._requests.before_submit = self.follow_behind

    def take_lost(self) -> Sequence[str]:
        """What is to be said, once, of runs that no rank has any more."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def waiting(self) -> Sequence[AdoptedRun]:
        """Those that nobody waits for yet, in their order."""
        return [run for run in self._runs if not run.is_followed]

    @property
    def futures(self) -> Sequence[Future]:
        """Of the values of runs whose caller is gone, in their order."""
        return [run.future for run in self._runs if run.future is not None]

    def heading(self, run: AdoptedRun) -> str:
        """Which run it is: ``In[7], begun 14:02:11, ended 14:09:40``."""
        began = run.began
        parts = [began.title, f"begun {_time(began.at)}"]
        if self._has_ended(run):
            end = self._ended_at = max(began.at, self._ended_at) + run.duration
            parts.append(f"ended {_time(end)}")
        if run.missing:
            parts.append(f"which never reached {ranks_text(run.missing)}")
        return ", ".join(parts)

    def follow(self, run: AdoptedRun) -> RankResults[Any]:
        """Wait for a run as its own kernel would have: with its output, Ctrl-C, and its error.

        Returns:
            Its values.

        Raises:
            RunError: It raised on a rank.
            RunInterrupt: Ctrl-C or Jupyter's Stop.
        """
        run.is_followed = True
        return self._finish(run, self._requests.make_output())

    def follow_behind(self) -> None:
        """Wait in threads for those that nobody waits for: what comes of them has to go on."""
        for run in self.waiting:
            self._follow_behind(run)

    # --- inside -----------------------------------------------------------------------------------

    def _note_lost(self, known: Known, there: Collection[int], dead: Collection[int]) -> None:
        """Of runs that the kernel before had not seen the end of, and that no rank has."""
        runs = {n: run for n, run in known.began.items() if n in known.ended or n in there}
        for number, run in known.began.items():
            if number not in runs:
                gone = [rank for rank in run.ranks if rank in dead]
                self._lost.append(_lost_text(run, gone))
        last = self._requests.last_run
        if last is not None and last.number in known.began and last.number not in runs:
            found = [run for run in runs.values() if run.kind is not RunKind.EXPRESSION]
            last = LastRun(found[-1].request, found[-1].ranks) if found else None
            self._requests.last_run = last

    def _follow_behind(self, run: AdoptedRun) -> None:
        run.is_followed = True
        output = self._requests.make_output()
        context = contextvars.copy_context()  # output goes to the cell that attaches

        def wait() -> None:
            try:
                context.run(self._finish, run, output)
            except BaseException as error:
                if run.future is None:
                    self._show_error(run, output, error)

        _in_thread(wait)

    def _show_error(self, run: AdoptedRun, output: Output, error: BaseException) -> None:
        """Nobody is there whom it could be raised to."""
        output.fail(f"{run.began.title}: {error}")

    def _finish(self, run: AdoptedRun, output: Output) -> RankResults[Any]:
        began = run.began
        age = began.age_s
        if began.cell is not None:
            output.cell = began.cell
        output.go_on(age)
        name = name_of_value(run.source)
        try:
            results: RankResults[Any] = self._requests.finish(
                run.pending, output, time.perf_counter() - age, expression=name
            )
        except BaseException as error:
            if run.future is not None:
                run.future.set_exception(error)
            raise
        results.expression = name
        if (entry := self._history.find(began.entry)) is not None and not run.missing:
            self._history.keep(entry)
        if run.future is not None:
            run.future.set_result(results)
        return results

    def _let_go(self, pending: PendingRequest) -> None:
        """Have a request come to its end where nobody sees it."""
        pending.abandon()
        try:
            pending.wait(lambda _: None)
        finally:
            self._requests.channel.forget(pending)

    def _has_ended(self, run: AdoptedRun) -> bool:
        """Whether all ranks have answered, who may be about to say so again."""
        deadline = time.monotonic() + ANSWERS_S
        while run.pending.missing and not self._is_under_way(run):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        return not run.pending.missing

    def _is_under_way(self, run: AdoptedRun) -> bool:
        board, number = self._requests.launcher.board, run.began.request
        return board is not None and any(
            board.regions[rank].request == number for rank in run.pending.missing
        )

    def _guessed(self, request: CellRequest | CallRequest, pending: PendingRequest) -> RunBegan:
        """What the journal does not tell, since there was no room for it on the disk."""
        if isinstance(request, CallRequest):
            kind, label, fetch = RunKind.CALL, request.name, True
        else:
            kind = RunKind.EXPRESSION if request.expression else RunKind.CELL
            label, fetch = request.label, request.fetch
        board = self._requests.launcher.board
        regions = () if board is None else [board.regions[rank] for rank in pending.ranks]
        ages = [region.seconds for region in regions if region.request == request.id]
        cell = next(iter(number_in(label)), None) if kind is not RunKind.CALL else None
        entry = self._history.lost(pending.ranks, label)
        age = max(ages, default=0.0)
        kernel = self._requests.outputs.kernel - 1
        return RunBegan(
            request.id, pending.ranks, kind, label, cell, entry.number, time.time() - age, kernel,
            fetch, host_clock() - age,
        )  # fmt: skip


def _lost_text(run: RunBegan, dead: Sequence[int]) -> str:
    begun = f"{run.title}, begun {_time(run.at)},"
    if dead:
        be = "has" if len(dead) == 1 else "have"
        return f"{begun} was lost: {ranks_text(dead)} {be} died."
    return f"{begun} never reached its ranks, for its kernel ended as it sent it: run it again."


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="distsession-adopted", daemon=True).start()


def _time(when: float) -> str:
    moment = time.localtime(when)
    is_today = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%d %b %H:%M:%S", moment)
