"""What a session asks of its ranks: requests out, results or one error back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from distsession.cluster.base import Channel, Launcher, Payload
from distsession.cluster.interrupts import InterruptHold, interrupts_held
from distsession.cluster.pending import PendingRequest
from distsession.errors import DistsessionError, RunError, RunInterrupt, RunTimeoutError
from distsession.kernel.failures import collect
from distsession.kernel.imports import ImportHints
from distsession.kernel.journal import Journal
from distsession.kernel.outcome import run_error
from distsession.kernel.output import Output
from distsession.kernel.progress import TransferProgress
from distsession.kernel.recovery import Recovery
from distsession.kernel.replay import OutputHistory, RunRecord
from distsession.kernel.run import Run
from distsession.kernel.runs import LastRun, RunBegan, RunEnded, RunFailed, RunKind, RunsKnown
from distsession.protocol.cells import CellNames, number_in
from distsession.protocol.host_clock import host_clock
from distsession.protocol.messages import CallRequest, CellRequest, Request
from distsession.results import RankResults

__all__ = ["Requests"]


MOST_ENDED = 1000
"""Runs that have ended of which is noted so before it is looked which of them are acknowledged."""


class Requests:
    """Sends requests to the ranks of one session.

    Args:
        recovery: Looks after what runs.
        make_output: Makes the place for the output of one run.
        check_open: Raises where the session is closed.
    """

    def __init__(
        self,
        recovery: Recovery,
        make_output: Callable[[], Output],
        check_open: Callable[[], None],
    ):
        self.recovery = recovery
        self.make_output = make_output
        self.check_open = check_open
        self.pushing = threading.Lock()
        """Held from what is pushed to its names being set: ranks stage one push at a time."""
        self.last_run: LastRun | None = None
        self.failed_rank: int | None = None
        """The rank at which the last run that failed did so first."""
        self.names = CellNames()
        self.outputs = OutputHistory()
        self.import_hints = ImportHints()
        self.goes_on = True
        """Something may run after a failure; otherwise nobody is told what to do then."""
        self._journal: Journal | None = None
        self.before_submit: Callable[[], None] = lambda: None
        """Called before something is sent."""
        self.leave: Callable[[Output], str] = lambda output: ""
        """Asked at a Ctrl-C; see :class:`~distsession.kernel.run.Run`."""
        self._under_way: dict[int, RunBegan] = {}
        self._ended: dict[int, bool] = {}
        """Whether runs succeeded whose ranks may not know yet that everything of them is here."""
        self._most_ended = MOST_ENDED

    @property
    def journal(self) -> Journal | None:
        """Where it is told what a later kernel has to know, if the session is kept.

        Not once another process owns it: what ends here then goes on there.
        """
        return None if self._journal is not None and self.launcher.taken else self._journal

    @journal.setter
    def journal(self, journal: Journal | None) -> None:
        self._journal = journal

    @property
    def launcher(self) -> Launcher:
        """The present one of the session."""
        return self.recovery.launcher

    @property
    def channel(self) -> Channel:
        return self.launcher.channel

    # --- a run of the user's ----------------------------------------------------------------------

    def wait_for_ranks(
        self, ranks: Sequence[int], output: Output, timeout: float | None = None
    ) -> float:
        """Wait for ranks that have not come back from a run that was stopped; seconds it took."""
        if self.channel.runs_in_caller or not self.launcher.is_broken:
            return 0.0
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        problem = self.recovery.wait_for_ranks(ranks, output.notify, deadline)
        if not problem:
            return time.monotonic() - began
        output.close()
        if deadline is not None and time.monotonic() > deadline:
            raise RunTimeoutError(problem)
        raise RunInterrupt(problem)

    def submit(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        progress: TransferProgress | None = None,
        interrupts: InterruptHold | None = None,
    ) -> PendingRequest:
        """Send a request, once the process group is connected.

        Args:
            ranks: Who gets it.
            make: Makes it from its number.
            payload: What goes with it.
            progress: Shows how much of the payload has been written.
            interrupts: Held from when it is sent; whoever waits for it releases them.
        """
        self.before_submit()
        self.recovery.reconnect()
        self.recovery.check_reach(ranks)
        try:
            return self.channel.submit(ranks, make, payload, progress, interrupts)
        except KeyboardInterrupt:
            raise RunInterrupt(
                "this was stopped while its data were written to shared memory: nothing was sent."
            ) from None

    def finish(
        self,
        pending: PendingRequest,
        output: Output,
        began: float,
        *,
        timeout: float | None = None,
        progress: TransferProgress | None = None,
        steady: bool = False,
        expression: str = "",
        interrupts: InterruptHold | None = None,
    ) -> RankResults[Any]:
        """Wait for a request; see :class:`~distsession.kernel.run.Run`."""
        begun = self._under_way.get(pending.request)
        record = self.outputs.begin(
            output.cell,
            pending.ranks,
            self.launcher.log_path,
            request=pending.request,
            kernel=0 if begun is None or begun.cell is None else begun.kernel,
            began=0.0 if begun is None else begun.at,
        )
        run = Run(
            pending,
            recovery=self.recovery,
            channel=self.channel,
            output=output,
            began=began,
            timeout=timeout,
            progress=progress,
            steady=steady,
            goes_on=self.goes_on,
            expression=expression,
            record=record,
            interrupts=interrupts,
            settle=partial(self._settle, pending.request, record),
            hints=self.import_hints,
            leave=self.leave,
        )
        try:
            return run.finish()
        except (DistsessionError, RunInterrupt) as error:
            if isinstance(error, RunError):
                self.failed_rank = error.first_rank
            if record is not None:
                record.fail(error)
            self._note_failure(pending.request, record)
            raise
        finally:
            if self.journal is not None:
                self.journal.tidy()

    # --- what a later kernel has to know ----------------------------------------------------------

    def submit_run(
        self,
        ranks: Sequence[int],
        make: Callable[[int], CellRequest | CallRequest],
        payload: Payload,
        *,
        kind: RunKind,
        entry: int,
        cell: int | None,
        progress: TransferProgress | None = None,
        interrupts: InterruptHold | None = None,
    ) -> PendingRequest:
        """Send a run of the user's; a later kernel knows of it before the first rank gets it.

        Args:
            ranks: Who gets it.
            make: Makes it from its number.
            payload: What goes with it.
            kind: What it is.
            entry: The number of its entry in the history.
            cell: The number of the notebook's cell; None where there is none.
            progress: Shows how much of the payload has been written.
            interrupts: Held from when it is sent; whoever waits for it releases them.
        """
        number = 0

        def noted(given: int) -> Request:
            nonlocal number
            number, request = given, make(given)
            label = request.label if isinstance(request, CellRequest) else request.name
            self._note_begin(
                RunBegan(
                    request=given,
                    ranks=tuple(ranks),
                    kind=kind,
                    label=label,
                    cell=cell,
                    entry=entry,
                    at=time.time(),
                    clock=host_clock(),
                    kernel=self.outputs.kernel,
                    fetch=isinstance(request, CallRequest) or request.fetch,
                )
            )
            return request

        try:
            pending = self.submit(ranks, noted, payload, progress, interrupts)
        except BaseException:
            self.drop_run(number)
            raise
        if (run := self._under_way.get(pending.request)) is not None:
            pending.title = run.title
        if kind is not RunKind.EXPRESSION:
            self.last_run = LastRun(pending.request, tuple(ranks))
        return pending

    def _note_begin(self, run: RunBegan) -> None:
        self._under_way[run.request] = run
        if run.kind in (RunKind.CELL, RunKind.EXPRESSION):
            self.names.seen.update(number_in(run.label))
        if self.journal is not None:
            self.journal.append(run)

    def take_over(self, run: RunBegan) -> None:
        """An earlier kernel's run is under way still, and is waited for here."""
        self._under_way[run.request] = run

    def note_end(self, request: int, succeeded: bool) -> None:
        """Everything of a run has been seen, here or in an earlier kernel."""
        self._ended[request] = succeeded
        if len(self._ended) > self._most_ended:
            # Answers are acknowledged in the order of the requests.
            oldest = min((pending.request for pending in self.channel.pending()), default=request)
            kept = [each for each in list(self._ended.items()) if each[0] >= oldest]
            self._ended = dict(kept)
            self._most_ended = max(MOST_ENDED, 2 * len(kept))

    def ended(self) -> Iterator[RunEnded]:
        """The runs that have ended, and of which ranks may still have the answers."""
        for request, succeeded in list(self._ended.items()):
            yield RunEnded(request, succeeded)

    def drop_run(self, request: int) -> None:
        """A run that was noted was not sent, or nobody waits for it."""
        if self._under_way.pop(request, None) is not None and self.journal is not None:
            self.journal.append(RunEnded(request, False))

    def under_way(self) -> Iterator[RunBegan]:
        """The runs that have not ended."""
        yield from list(self._under_way.values())

    def known(self) -> RunsKnown:
        """What is known of all runs together."""
        cells = frozenset(self.names.taken | self.names.seen)
        return RunsKnown(self.last_run, self.failed_rank, cells, self.outputs.kernel)

    def forget_failure(self) -> None:
        """The ranks are others now."""
        self.failed_rank = None
        if self.journal is not None:
            self.journal.append(self.known())

    def _settle(self, request: int, record: RunRecord | None, succeeded: bool) -> None:
        """Everything of a run is here, and its ranks are about to be told so."""
        run = self._under_way.pop(request, None)
        if record is not None:
            record.is_over = True
        if self.journal is None:
            return
        if record is not None and (noted := record.noted) is not None:
            self.journal.append(noted, later=run is not None)
        if run is not None:
            self.note_end(request, succeeded)
            self.journal.append(RunEnded(request, succeeded))

    def _note_failure(self, request: int, record: RunRecord | None) -> None:
        if self.journal is None:
            return
        text = "" if record is None else record.error
        if record is not None and not (record.pieces or record.shown) and record.noted is not None:
            self.journal.append(record.noted)
        self.journal.append(RunFailed(request, self.failed_rank, text))

    # --- the session's own ------------------------------------------------------------------------

    def call(
        self,
        ranks: Sequence[int],
        make: Callable[[int], Request],
        payload: Payload,
        *,
        verb: str = "",
        steady: bool = False,
    ) -> RankResults[Any]:
        """Have ranks do something of the session's own; each one's answer.

        Args:
            ranks: Which.
            make: Makes the request from its number.
            payload: What goes with it.
            verb: What is shown if it takes long: ``"sending"`` or ``"bringing"``.
            steady: A stop comes too late for it and is only told afterwards.
        """
        began = time.perf_counter()
        output = self.make_output()
        progress = TransferProgress(output.notify, verb) if verb else None
        arriving = progress if verb == "bringing" else None
        with InterruptHold() as interrupts:
            try:
                self.wait_for_ranks(ranks, output)
                pending = self.submit(ranks, make, payload, progress, interrupts)
            except BaseException:
                output.close()
                raise
            return self.finish(
                pending, output, began, progress=arriving, steady=steady, interrupts=interrupts
            )

    def post(self, ranks: Sequence[int], make: Callable[[int], Request]) -> None:
        """Send something to those ranks that can take it, and wait for no answer."""
        dead = self.launcher.dead_ranks()
        living = [rank for rank in ranks if rank not in dead]
        with interrupts_held():
            self.channel.forget(self.channel.submit(living, make, []))

    def fetch_frames(self, rank: int, make: Callable[[int], Request]) -> Any:
        """The payload of a rank's answer as it is, without being rebuilt here.

        The rank needs no process group for it, and others may be dead.
        """
        self.before_submit()
        self.recovery.check_reach([rank])
        with InterruptHold() as interrupts:
            pending = self.channel.submit([rank], make, [], None, interrupts)
            try:
                interrupts.release()
                pending.wait(lambda _: None)
                results, failed = collect(pending, 0.0, load=False)
            finally:
                self.channel.forget(pending)
        if failed:
            self.recovery.check_owned(pending)
            raise run_error(failed, results, self.launcher.infos)
        return pending.replies[rank][1]
