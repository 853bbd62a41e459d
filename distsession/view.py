"""Some ranks of a session, and what one can have them do."""

from __future__ import annotations

import concurrent.futures
import contextvars
import linecache
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from distsession.cluster.base import OutputMessage, Payload, Pending
from distsession.display import render
from distsession.errors import (
    EngineDiedError,
    OptionsError,
    RunInterrupt,
    RunTimeoutError,
    SessionStateError,
)
from distsession.kernel import diff as comparing
from distsession.kernel import transfer
from distsession.kernel.outcome import collect, hang_error, own_causes, reconnected_text, run_error
from distsession.kernel.recovery import BACK, BACK_FROM_INTERRUPT_S, Recovery, Watchdog
from distsession.kernel.stdin import NO_PLACE, InputRequests
from distsession.kernel.timeline import LastRun
from distsession.kernel.transfer import Progress
from distsession.protocol import serialize
from distsession.protocol.messages import CallRequest, CellRequest, PullRequest, RankReport, Request
from distsession.ranks import ranks_text
from distsession.results import RankResults

if TYPE_CHECKING:
    from distsession.session import Session

__all__ = ["Output", "RankView", "Silent"]

T = TypeVar("T")


class Output(Protocol):
    """Where the ranks' output goes; the session itself never prints."""

    def write(self, message: OutputMessage) -> None:
        """Take one piece of output."""

    def tick(self, reports: Callable[[bool], Mapping[int, RankReport]]) -> None:
        """Called several times a second while ranks work.

        Args:
            reports: Gives what each rank does; called with True it asks the ranks for the line
                that they are at, which takes some milliseconds.
        """

    def show(self, shown: dict[int, render.Bundle]) -> None:
        """Show the value of a cell's last expression on each rank."""

    def notify(self, text: str) -> None:
        """Show a line about the run that replaces the one before; an empty one takes it away."""

    def close(self) -> None:
        """The run is over."""

    # An output may have an attribute ``is_file``: nobody looks on, so less is told of what is under
    # way.
    # An output may have a method ``ask(prompt: str, secret: bool) -> str``, too. What ranks ask is
    # put to somebody by it, in the main thread; it raises EOFError at the end of the input.


class Silent:
    """Drops all output."""

    def write(self, message: OutputMessage) -> None:
        pass

    def tick(self, reports: Callable[[bool], Mapping[int, RankReport]]) -> None:
        pass

    def show(self, shown: dict[int, render.Bundle]) -> None:
        pass

    def notify(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _NotBack(Exception):
    """Ranks of a run that was stopped do not come back."""


class RankView:
    """Some ranks of a session: ``session[0]``, ``session[1:3]``, ``session[[0, 3]]``.

    ``session.run`` and its like are those of ``session[:]``.
    """

    def __init__(self, session: Session, ranks: Sequence[int]):
        self._session = session
        self._ranks = tuple(ranks)

    @property
    def session(self) -> Session:
        """The session that they are ranks of."""
        return self._session

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        return f"<RankView {render.rank_label(self._ranks)} of {self._session!r}>"

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> RankResults[T]:
        """Call a function on every rank of the view and wait for all of them.

        The function and its arguments are pickled with cloudpickle, once for all ranks: lambdas,
        closures and what a notebook defines work. Names that the notebook does not have are
        looked up among the rank's variables.

        Args:
            function: What to call.
            *args: Its positional arguments, the same on each rank.
            **kwargs: Its keyword arguments; none is taken by this method.

        Returns:
            Each rank's value.

        Raises:
            RunError: It raised on a rank; ``.by_rank`` has the exceptions.
            SerializationError: The function or an argument cannot be pickled.
            RunInterrupt: Ctrl-C or Jupyter's Stop.
        """
        began = time.perf_counter()
        self._session.check_open()
        output = self._session.output()
        self._settle(output)
        progress = Progress(output.notify, "sending")
        pending = self._call(function, args, kwargs, progress)
        pending.is_sole = threading.current_thread() is threading.main_thread()
        entry = self._session.history.call(self._ranks, function, args, kwargs)
        results: RankResults[T] = self._finish(pending, output, None, began)
        self._session.history.keep(entry)
        return results

    def submit(
        self, function: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[RankResults[T]]:
        """Like :meth:`run`, without waiting: a future of what it would return or raise."""
        began = time.perf_counter()
        output = self._session.output()
        pending = self._call(function, args, kwargs, Progress(output.notify, "sending"))
        future: concurrent.futures.Future[RankResults[T]] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        context = contextvars.copy_context()  # output goes to the cell that made the call
        entry = self._session.history.call(self._ranks, function, args, kwargs)

        def wait() -> None:
            try:
                results = context.run(self._finish, pending, output, None, began)
                self._session.history.keep(entry)
                future.set_result(results)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=wait, name="distsession-submit", daemon=True).start()
        return future

    def execute(
        self,
        code: str,
        *,
        fetch: bool = False,
        timeout: float | None = None,
        label: str | None = None,
        profile: Sequence[int] = (),
        debug: Sequence[int] = (),
    ) -> RankResults[Any] | None:
        """Run code in the namespace of every rank of the view, as a cell.

        Magics, ``!`` and top-level ``await`` work. The value of a last expression is shown for
        each rank.

        Args:
            code: Source code.
            fetch: Return the values of the last expression too.
            timeout: Seconds after which the code is interrupted. Default: none.
            label: Stands for the file name in tracebacks. Default: ``In[number of the request]``.
            profile: Ranks of the view on which torch's profiler runs around it; ``timeline()`` of
                the session has what it finds.
            debug: Ranks whose debugger opens at the first line.

        Returns:
            With ``fetch``, each rank's value; otherwise None.

        Raises:
            RunError: It raised on a rank.
            RunTimeoutError: It took longer than ``timeout``.
            RunInterrupt: Ctrl-C or Jupyter's Stop.
        """
        return self._execute(
            code, fetch=fetch, timeout=timeout, label=label, profile=profile, debug=debug
        )

    def evaluate(self, expression: str, *, timeout: float | None = None) -> RankResults[Any]:
        """The value of one expression on every rank of the view.

        Raises:
            RunError: It raised on a rank, or is no expression.
        """
        results = self._execute(expression, fetch=True, timeout=timeout, expression=True)
        assert results is not None
        return results

    def diff(self, expression: str) -> comparing.Comparison:
        """Compare the value of an expression over the ranks of the view.

        It is evaluated once on each rank. Tensors and arrays are compared by dtype, shape and a
        hash of their bytes; dictionaries, lists, objects and what has a ``state_dict()`` part by
        part; other things by their pickle, or by what they print as. Only parts that differ are
        brought to the notebook, to say by how much.

        Returns:
            ``.equal``, the ``.groups`` of ranks that agree, and the ``.differences``.

        Raises:
            RunError: It raised on a rank, or is no expression.
        """
        self._session.check_open()
        name = f"%distributed --diff {expression.strip()}"
        entry = self._session.history.cell(self._ranks, expression, name)
        found = comparing.diff(self, expression)
        self._session.history.keep(entry)
        return found

    # --- moving data ------------------------------------------------------------------------------

    def push(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Set variables on every rank of the view.

        On one host a large value is written once, to shared memory. Each rank maps it
        copy-on-write: what one changes, no other sees. To another node it crosses once.

        Args:
            values: By name, such as ``{"x": tensor}``.
            **named: More of them: ``push(x=tensor, cfg=cfg)``.

        Raises:
            SerializationError: One cannot be pickled; the message gives the path to what is at
                fault. Or it does not fit into memory. Nothing has changed on any rank then.
            RunError: A rank cannot rebuild it. Nothing has changed on any rank then, either.
        """
        self._session.check_open()
        together = {**(values or {}), **named}
        entry = self._session.history.pushed(self._ranks, together, "push")
        transfer.push(self, together)
        self._session.history.keep(entry)

    def pull(self, *names: str) -> RankResults[Any]:
        """The values of variables on every rank of the view.

        Tensors of a GPU arrive on the CPU.

        Args:
            *names: Of variables or of their parts: ``pull("x")``, ``pull("model.weight")``,
                ``pull("losses[-1]")``.

        Returns:
            Each rank's value; with several names, each rank's dict of values by name.

        Raises:
            RunError: A rank has no such variable, or it cannot be pickled.
        """
        self._session.check_open()
        return transfer.pull(self, names)

    def scatter(
        self, name: str, value: Any, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> None:
        """Split a tensor, array or list over the ranks of the view, which get their part as a
        variable.

        Args:
            name: Of the variable.
            value: A torch tensor, a numpy array, a list or a tuple.
            dim: The dimension along which to split.
            sizes: How much each rank gets. Default: evenly; if it does not come out even, the
                first ranks get one more, as with ``torch.tensor_split``.

        Raises:
            OptionsError: There is no such dimension, or the sizes do not fit.
        """
        self._session.check_open()
        entry = self._session.history.pushed(self._ranks, {name: value}, "scatter")
        transfer.scatter(self, name, value, dim, sizes)
        self._session.history.keep(entry)

    def gather(self, name: str, dim: int = 0) -> Any:
        """Join what the ranks of the view hold under a name to one tensor, array or list.

        The ranks write their parts into the same memory, so there is never a second copy. Of a
        sharded tensor (``DTensor``, also as a parameter) it gives the full one, and no rank
        holds more than its share; only for partial sums, and where one dimension is sharded
        twice, each rank has to make the full tensor.

        Args:
            name: Of the variable, or of a part, such as ``"model.weight"``.
            dim: The dimension along which to join; of no meaning for a sharded tensor.

        Returns:
            A tensor on the CPU without a gradient, a numpy array, or a list.

        Raises:
            SessionStateError: The ranks hold what cannot be joined.
            RunError: A rank has no such variable.
        """
        self._session.check_open()
        return transfer.gather(self, name, dim)

    def copy_to(self, ranks: Sequence[int], names: Sequence[str]) -> None:
        """Give other ranks these variables of this view's only rank, all in one payload.

        What they share (an optimizer the parameters of its model) stays shared. The values pass
        through the kernel as they are, without being rebuilt there.

        Raises:
            RunError: A name is not there, or its value cannot be pickled or rebuilt.
        """
        pending = self._submit(lambda number: PullRequest(number, tuple(names)), [])
        try:
            pending.wait(lambda _: None)
            results, failed = collect(pending, 0.0, load=False)
        finally:
            self._session.channel.forget(pending)
        if failed:
            raise run_error(failed, results, self._session.infos)
        payload = pending.replies[self._ranks[0]][1]
        transfer.push_frames(RankView(self._session, ranks), payload)

    # --- for transfers and comparisons ------------------------------------------------------------

    def ask(
        self,
        make: Callable[[int], Request],
        payload: Payload,
        *,
        verb: str = "",
        steady: bool = False,
    ) -> RankResults[Any]:
        """Have the ranks do something of the session's own; each one's answer.

        Args:
            make: Makes the request from its number.
            payload: What goes with it.
            verb: What is shown if it takes long: ``"sending"`` or ``"bringing"``.
            steady: A stop comes too late for it and is only told afterwards.
        """
        began = time.perf_counter()
        output = self._session.output()
        progress = Progress(output.notify, verb) if verb else None
        try:
            self._settle(output)
            pending = self._submit(make, payload, progress)
        except BaseException:
            output.close()
            raise
        pending.is_sole = threading.current_thread() is threading.main_thread()
        bringing = progress if verb == "bringing" else None
        return self._finish(pending, output, None, began, progress=bringing, steady=steady)

    @property
    def pushing(self) -> threading.Lock:
        """Held while a push is under way."""
        return self._session.pushing

    def part(self, ranks: Sequence[int]) -> RankView:
        """Some ranks of this view."""
        return RankView(self._session, ranks)

    def post(self, make: Callable[[int], Request]) -> None:
        """Send something to those ranks that can take it, and wait for no answer."""
        dead = self._session.recovery.launcher.dead_ranks()
        ranks = [rank for rank in self._ranks if rank not in dead]
        self._session.channel.forget(self._session.channel.submit(ranks, make, []))

    # --- inside -----------------------------------------------------------------------------------

    def _call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        progress: Progress,
    ) -> Pending:
        self._session.check_open()
        if not callable(function):
            raise TypeError(
                f"run() and submit() take a function and its arguments, not {function!r}: "
                "source code goes to execute()."
            )
        name = getattr(function, "__qualname__", type(function).__name__)
        payload = serialize.dump_call(function, args, kwargs)
        source = _source(function)
        pending = self._submit(lambda number: CallRequest(number, name, source), payload, progress)
        self._session.last_run = LastRun(pending.request, self._ranks)
        return pending

    def _execute(
        self,
        code: str,
        *,
        fetch: bool = False,
        timeout: float | None = None,
        label: str | None = None,
        expression: bool = False,
        record: bool = True,
        profile: Sequence[int] = (),
        debug: Sequence[int] = (),
    ) -> RankResults[Any] | None:
        began = time.perf_counter()
        self._session.check_open()
        if timeout is not None and self._session.channel.runs_in_caller:
            raise OptionsError(
                f"timeout={timeout:g} is not possible in an inline session, which runs code in "
                "the calling thread: leave it out, or use launcher='local'."
            )
        self._check_debug(debug)

        elsewhere = [rank for rank in profile if rank not in self._ranks]
        if elsewhere:
            raise OptionsError(
                f"profile={list(profile)}: the code does not run on "
                f"{render.rank_label(elsewhere).strip('[]')}."
            )

        def make(number: int) -> Request:
            name = label or f"In[{number}]"
            return CellRequest(number, code, name, fetch, expression, tuple(profile), tuple(debug))

        output = self._session.output()
        waited = self._settle(output, timeout)
        if timeout is not None and waited > 1:
            timeout = max(0.1, timeout - round(waited, 1))
        pending = self._submit(make, [])
        pending.is_sole = threading.current_thread() is threading.main_thread()
        if record and not expression:
            self._session.last_run = LastRun(pending.request, self._ranks)
        name = f"%distributed {code.strip()}" if expression else label or f"In[{pending.request}]"
        entry = self._session.history.cell(self._ranks, code, name) if record else None
        results: RankResults[Any] = self._finish(pending, output, timeout, began)
        if entry is not None:
            self._session.history.keep(entry)
        return results if fetch else None

    def _check_debug(self, ranks: Sequence[int]) -> None:
        if ranks and self._session.channel.runs_in_caller:
            raise OptionsError(
                "an inline session runs code in the calling thread: write breakpoint() there, "
                "or use launcher='local'."
            )
        if wrong := [rank for rank in ranks if rank not in self._ranks]:
            raise OptionsError(
                f"{ranks_text(wrong)} cannot be debugged: the code runs on "
                f"{ranks_text(self._ranks)}."
            )

    def _settle(self, output: Output, timeout: float | None = None) -> float:
        """Wait for ranks that have not come back from a run that was stopped; seconds it took."""
        recovery = self._session.recovery
        if self._session.channel.runs_in_caller or not recovery.launcher.is_broken:
            return 0.0
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        problem = recovery.settle(self._ranks, output.notify, deadline)
        if not problem:
            return time.monotonic() - began
        output.close()
        if deadline is not None and time.monotonic() > deadline:
            raise RunTimeoutError(problem)
        raise RunInterrupt(problem)

    def _submit(
        self,
        make: Callable[[int], Request],
        payload: Payload,
        progress: Progress | None = None,
    ) -> Pending:
        self._session.recovery.mend()
        try:
            return self._session.channel.submit(self._ranks, make, payload, progress)
        except KeyboardInterrupt:
            raise RunInterrupt(
                "this was stopped while its data were written to shared memory: nothing was sent."
            ) from None

    def _finish(
        self,
        pending: Pending,
        output: Output,
        timeout: float | None,
        began: float,
        *,
        progress: Progress | None = None,
        steady: bool = False,
    ) -> RankResults[Any]:
        """Wait for a request, handing on its output; make results or an error of its answers."""
        recovery = self._session.recovery
        watch = Watchdog(recovery, pending, output.notify)
        questions = self._questions(pending, output)
        is_late = False
        try:
            is_late = self._wait(pending, output, timeout, watch, questions, progress, steady)
            results, failed = collect(pending, time.perf_counter() - began)
            shown = {
                rank: reply.shown for rank, (reply, _) in pending.replies.items() if reply.shown
            }
            if shown:
                output.show(shown)
        finally:
            output.close()
            self._session.channel.forget(pending)
            recovery.check_damage()
            problem = "" if pending.missing else self._mend(recovery)
        if pending.stopped:
            end = reconnected_text(problem) if pending.was_begun else ""
            raise RunInterrupt(f"{pending.stopped}{end}")
        if pending.debugger_quit:
            raise RunInterrupt(f"stopped {pending.debugger_quit}. All variables are kept.")
        verdict, waited = watch.verdict, watch.waited
        has_suffered = len(own_causes(failed, waited)) < len(failed)
        if verdict is not None and not verdict.failed and has_suffered:
            raise hang_error(verdict, problem, failed, waited)
        if failed:
            infos = self._session.infos
            error = run_error(failed, results, infos, waited, problem, watch.places)
            self._session.failed = error.first_rank
            raise error
        if is_late:
            raise RunInterrupt("this was stopped when it was done already: the variables are set.")
        return results

    def _wait(
        self,
        pending: Pending,
        output: Output,
        timeout: float | None,
        watch: Watchdog,
        questions: InputRequests,
        progress: Progress | None,
        steady: bool,
    ) -> bool:
        """Stop, or the end of the time, reaches the ranks before it reaches the caller.

        Returns:
            Whether a stop came too late for a steady request.
        """
        stopped_at = 0.0

        def reports(ask: bool) -> Mapping[int, RankReport]:
            found = self._session.recovery.reports(pending.missing, ask=ask)
            return {rank: found[rank] for rank in pending.ranks}

        def look() -> None:
            nonlocal stopped_at
            if pending.stopped and pending.was_begun and not steady:  # by another thread
                stopped_at = stopped_at or time.monotonic()
                is_late = time.monotonic() - stopped_at > BACK_FROM_INTERRUPT_S
                if is_late and pending.missing:
                    raise _NotBack
            questions.look()
            watch.look()
            output.tick(reports)
            if progress is not None:
                self._show_transfer(pending, progress)

        try:
            pending.wait(output.write, timeout, look, questions.put)
        except _NotBack:
            stuck = self._session.recovery.explain_stuck(pending)
            raise RunInterrupt(f"{pending.stopped}{stuck}") from None
        except KeyboardInterrupt:
            if steady:
                with suppress(RunTimeoutError):
                    pending.wait(output.write, BACK)
                    return True
            raise RunInterrupt(self._stop(pending, output)) from None
        except RunTimeoutError as error:
            text = self._stop(pending, output)
            raise RunTimeoutError(f"{error} {text[:1].upper()}{text[1:]}") from None
        return False

    def _questions(self, pending: Pending, output: Output) -> InputRequests:
        board = self._session.recovery.launcher.board
        if threading.current_thread() is not threading.main_thread():
            return InputRequests(pending, board, None)
        return InputRequests(pending, board, getattr(output, "ask", None), NO_PLACE)

    def _show_transfer(self, pending: Pending, progress: Progress) -> None:
        board = self._session.recovery.launcher.board
        if board is None:
            return
        arriving = dict(pending.arriving)
        for rank in pending.ranks:
            done, total = arriving.get(rank) or board.regions[rank].transfer
            if total:
                progress(done, total, rank)

    def _stop(self, pending: Pending, output: Output) -> str:
        """Interrupt a request and wait a moment for its ranks; gives how that went."""
        recovery = self._session.recovery
        with suppress(KeyboardInterrupt):  # pressed again: do not wait
            recovery.stop(pending)
            if pending.was_begun:
                with suppress(RunTimeoutError):
                    pending.wait(output.write, BACK)
        if not pending.was_begun:
            return pending.stopped
        if stuck := recovery.explain_stuck(pending) if pending.missing else "":
            return pending.stopped + stuck
        return pending.stopped + reconnected_text(self._mend(recovery))

    def _mend(self, recovery: Recovery) -> str:
        """Connect the group anew where that is needed and possible; gives what prevents it."""
        try:
            return recovery.mend()
        except KeyboardInterrupt:
            return "it was stopped"
        except SessionStateError as error:  # closed meanwhile
            return str(error)
        except EngineDiedError as error:
            return str(error).splitlines()[0]


def _source(function: Callable[..., Any]) -> tuple[str, str]:
    """Where a function of the notebook comes from, and the lines of that cell."""
    name = getattr(getattr(function, "__code__", None), "co_filename", "")
    if "ipykernel_" not in name and not name.startswith("<ipython-input-"):
        return "", ""
    return name, "".join(linecache.getlines(name))
