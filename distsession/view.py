"""Some ranks of a session, and what one can have them do."""

from __future__ import annotations

import concurrent.futures
import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from distsession.cluster.interrupts import InterruptHold
from distsession.cluster.pending import PendingRequest
from distsession.display import render
from distsession.errors import OptionsError
from distsession.export.history import Entry, History
from distsession.kernel import diff as comparing
from distsession.kernel import transfer
from distsession.kernel.cells import notebook_cells
from distsession.kernel.output import Output, Silent
from distsession.kernel.progress import TransferProgress
from distsession.kernel.requests import Requests
from distsession.kernel.runs import RunKind
from distsession.protocol import serialize
from distsession.protocol.cells import cell_name, name_of_value
from distsession.protocol.messages import CallRequest, CellRequest
from distsession.ranks import ranks_text
from distsession.results import RankResults

__all__ = ["Output", "RankView", "Silent"]

INTERNAL = frozenset(("channel", "check_open", "launcher", "recovery", "refusal", "requests"))
"""Attributes that other modules use: completion and ``dir()`` do not show them."""

T = TypeVar("T")

running_cell: Callable[[], int | None] | None = None
"""Gives the number of the notebook's cell that runs, or None outside of notebooks; the package's
face sets it."""


class RankView:
    """Some ranks of a session: ``session[0]``, ``session[1:3]``, ``session[[0, 3]]``.

    A session is the view of all its ranks.

    Args:
        session: The session that they are ranks of.
        requests: Of that session.
        history: What ran, for ``export``.
        ranks: Which.
    """

    def __init__(self, session: Any, requests: Requests, history: History, ranks: Sequence[int]):
        self._session = session
        self.requests = requests
        self._history = history
        self._ranks = tuple(ranks)

    @property
    def session(self) -> Any:
        """The :class:`~distsession.Session` that they are ranks of."""
        return self._session

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - INTERNAL)

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
        self.requests.check_open()
        output = self.requests.make_output()
        self.requests.wait_for_ranks(self._ranks, output)
        progress = TransferProgress(output.notify, "sending")
        with InterruptHold() as interrupts:
            pending, entry = self._call(
                RunKind.CALL, function, args, kwargs, output.cell, progress, interrupts
            )
            results: RankResults[T] = self.requests.finish(
                pending, output, began, interrupts=interrupts
            )
        self._history.keep(entry)
        return results

    def submit(
        self, function: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[RankResults[T]]:
        """Like :meth:`run`, without waiting: a future of what it would return or raise."""
        began = time.perf_counter()
        output = self.requests.make_output()
        progress = TransferProgress(output.notify, "sending")
        future: concurrent.futures.Future[RankResults[T]] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        context = contextvars.copy_context()  # output goes to the cell that made the call

        def wait() -> None:
            try:
                results = context.run(self.requests.finish, pending, output, began)
                self._history.keep(entry)
                future.set_result(results)
            except BaseException as error:
                future.set_exception(error)

        with InterruptHold() as interrupts:
            pending, entry = self._call(
                RunKind.SUBMIT, function, args, kwargs, output.cell, progress, interrupts
            )
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
            label: Stands for the file name in tracebacks. Default: ``In[3] (execute)``, with the
                number of the notebook's cell; outside of notebooks ``In[number of the request]``.
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

    def evaluate(
        self, expression: str, *, timeout: float | None = None, label: str | None = None
    ) -> RankResults[Any]:
        """The value of one expression on every rank of the view.

        Args:
            expression: Source code.
            timeout: Seconds after which it is interrupted. Default: none.
            label: Stands for the file name in tracebacks, as with :meth:`execute`.

        Raises:
            RunError: It raised on a rank, or is no expression.
        """
        results = self._execute(
            expression, fetch=True, timeout=timeout, label=label, expression=True
        )
        assert results is not None
        return results

    def diff(self, expression: str, *, label: str | None = None) -> comparing.Comparison:
        """Compare the value of an expression over the ranks of the view.

        It is evaluated once on each rank. Tensors and arrays are compared by dtype, shape and a
        hash of their bytes; dictionaries, lists, objects and what has a ``state_dict()`` part by
        part; other things by their pickle, or by what they print as. Only parts that differ are
        brought to the notebook, to say by how much.

        Args:
            expression: Source code.
            label: Stands for the file name in tracebacks, as with :meth:`execute`.

        Returns:
            ``.equal``, the ``.groups`` of ranks that agree, and the ``.differences``.

        Raises:
            RunError: It raised on a rank, or is no expression.
        """
        self.requests.check_open()
        return comparing.diff(self.requests, self._ranks, expression, label or self._label("diff"))

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
        self.requests.check_open()
        together = {**(values or {}), **named}
        entry = self._history.pushed(self._ranks, together, "push")
        transfer.push(self.requests, self._ranks, together)
        self._history.keep(entry)

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
        self.requests.check_open()
        results = transfer.pull(self.requests, self._ranks, names)
        results.expression = names[0] if len(names) == 1 else ""
        return results

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
        self.requests.check_open()
        entry = self._history.pushed(self._ranks, {name: value}, "scatter")
        transfer.scatter(self.requests, self._ranks, name, value, dim, sizes)
        self._history.keep(entry)

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
        self.requests.check_open()
        return transfer.gather(self.requests, self._ranks, name, dim)

    # --- inside -----------------------------------------------------------------------------------

    def _call(
        self,
        kind: RunKind,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        cell: int | None,
        progress: TransferProgress,
        interrupts: InterruptHold,
    ) -> tuple[PendingRequest, Entry]:
        self.requests.check_open()
        if not callable(function):
            raise TypeError(
                f"run() and submit() take a function and its arguments, not {function!r}: "
                "source code goes to execute()."
            )
        name = getattr(function, "__qualname__", type(function).__name__)
        files = set[str]()
        payload = serialize.dump_call(function, args, kwargs, files)
        cells = notebook_cells(files) if files else ()
        entry = self._history.call(self._ranks, function, args, kwargs)
        pending = self.requests.submit_run(
            self._ranks,
            lambda number: CallRequest(number, name, cells),
            payload,
            kind=kind,
            entry=entry.number,
            cell=cell,
            progress=progress,
            interrupts=interrupts,
        )
        self._history.note(entry)
        return pending, entry

    def _execute(
        self,
        code: str,
        *,
        fetch: bool = False,
        timeout: float | None = None,
        label: str | None = None,
        expression: bool = False,
        profile: Sequence[int] = (),
        debug: Sequence[int] = (),
    ) -> RankResults[Any] | None:
        began = time.perf_counter()
        self.requests.check_open()
        if timeout is not None and self.requests.channel.runs_in_caller:
            raise OptionsError(
                f"timeout={timeout:g} is not possible in an inline session, which runs code in "
                "the calling thread: leave it out, or use launcher='local'."
            )
        if timeout is not None and not timeout > 0:
            raise OptionsError(
                f"timeout={timeout:g} is not possible: it takes a number of seconds above 0. "
                "Without it, code may take as long as it likes."
            )
        self._check_debug(debug)

        elsewhere = [rank for rank in profile if rank not in self._ranks]
        if elsewhere:
            raise OptionsError(
                f"profile={list(profile)}: the code does not run on "
                f"{render.rank_label(elsewhere).strip('[]')}."
            )

        label = label or self._label("evaluate" if expression else "execute")

        source = code.strip() if expression else code
        entry = self._history.begin_cell(self._ranks, source)

        def make(number: int) -> CellRequest:
            name = label or cell_name(number)
            entry.name = f"%distributed {source}" if expression else name
            self._history.note(entry)
            return CellRequest(number, code, name, fetch, expression, tuple(profile), tuple(debug))

        output = self.requests.make_output()
        waited = self.requests.wait_for_ranks(self._ranks, output, timeout)
        if timeout is not None and waited > 1:
            timeout = max(0.1, timeout - round(waited, 1))
        named = name_of_value(code)
        with InterruptHold() as interrupts:
            pending = self.requests.submit_run(
                self._ranks,
                make,
                [],
                kind=RunKind.EXPRESSION if expression else RunKind.CELL,
                entry=entry.number,
                cell=output.cell,
                interrupts=interrupts,
            )
            results: RankResults[Any] = self.requests.finish(
                pending,
                output,
                began,
                timeout=timeout,
                expression=named,
                interrupts=interrupts,
            )
        results.expression = named
        self._history.keep(entry)
        return results if fetch else None

    def _label(self, how: str) -> str:
        """The name of code that the notebook's cell sends; empty outside of notebooks."""
        cell = None if running_cell is None else running_cell()
        return "" if cell is None else self.requests.names.next(cell, how)

    def _check_debug(self, ranks: Sequence[int]) -> None:
        if ranks and self.requests.channel.runs_in_caller:
            raise OptionsError(
                "an inline session runs code in the calling thread: write breakpoint() there, "
                "or use launcher='local'."
            )
        if wrong := [rank for rank in ranks if rank not in self._ranks]:
            raise OptionsError(
                f"{ranks_text(wrong)} cannot be debugged: the code runs on "
                f"{ranks_text(self._ranks)}."
            )
