"""What a session asks of its ranks: requests out, results or one error back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distsession.cluster.base import Channel, Launcher, Payload
from distsession.cluster.interrupts import InterruptHold, interrupts_held
from distsession.cluster.pending import PendingRequest
from distsession.errors import DistsessionError, RunError, RunInterrupt, RunTimeoutError
from distsession.kernel.outcome import collect, run_error
from distsession.kernel.output import Output
from distsession.kernel.progress import TransferProgress
from distsession.kernel.recovery import Recovery
from distsession.kernel.replay import OutputHistory
from distsession.kernel.run import Run
from distsession.protocol.cells import CellNames
from distsession.protocol.messages import Request
from distsession.results import RankResults

__all__ = ["LastRun", "Requests"]


@dataclass(frozen=True)
class LastRun:
    """The cell or call that the user has run last.

    Attributes:
        number: Of its request.
        ranks: Where.
    """

    number: int
    ranks: tuple[int, ...]


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
        self.goes_on = True
        """Something may run after a failure; otherwise nobody is told what to do then."""

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
        self.recovery.reconnect()
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
        record = self.outputs.begin(output.cell, pending.ranks, self.launcher.log_path)
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
        )
        try:
            return run.finish()
        except (DistsessionError, RunInterrupt) as error:
            if isinstance(error, RunError):
                self.failed_rank = error.first_rank
            if record is not None:
                record.fail(error)
            raise

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
        """The payload of a rank's answer as it is, without being rebuilt here."""
        with InterruptHold() as interrupts:
            pending = self.submit([rank], make, [], interrupts=interrupts)
            try:
                interrupts.release()
                pending.wait(lambda _: None)
                results, failed = collect(pending, 0.0, load=False)
            finally:
                self.channel.forget(pending)
        if failed:
            raise run_error(failed, results, self.launcher.infos)
        return pending.replies[rank][1]
