"""Everything that distsession raises.

::

    DistsessionError
    ├─ OptionsError(ValueError)
    ├─ SessionStateError(RuntimeError)
    │  └─ KeptSessionError
    ├─ SerializationError(TypeError)
    ├─ ResultsError(TypeError)
    ├─ LaunchError(RuntimeError)
    │  ├─ LaunchTimeoutError(TimeoutError)
    │  └─ ProcessGroupError
    ├─ EngineDiedError(RuntimeError)
    ├─ CollectiveError(RuntimeError)
    │  ├─ CollectiveMismatchError
    │  └─ CollectiveHangError
    ├─ RunTimeoutError(TimeoutError)
    ├─ ExportError(ValueError)
    ├─ RemoteError
    └─ RunError(RuntimeError)

    RunInterrupt(KeyboardInterrupt)

Each error is also an instance of the builtin that fits it, so ``except TimeoutError`` and its
like work without importing anything from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = [
    "CollectiveError",
    "CollectiveHangError",
    "CollectiveMismatchError",
    "DistsessionError",
    "EngineDiedError",
    "ExportError",
    "KeptSessionError",
    "LaunchError",
    "LaunchTimeoutError",
    "OptionsError",
    "ProcessGroupError",
    "RemoteError",
    "ResultsError",
    "RunError",
    "RunInterrupt",
    "RunTimeoutError",
    "SerializationError",
    "SessionStateError",
]


DOCTOR_REMEDY = "`distsession doctor` says what this machine lacks."
"""What to do about an error that comes from the machine."""

wording: Callable[[str], str] | None = None
"""Words what is to be typed as the notebook does that shows an error; its magics set it."""

E = TypeVar("E", bound="DistsessionError | RunInterrupt")


def _shown(lines: Sequence[str]) -> list[str]:
    return [*lines] if wording is None else [wording(line) for line in lines]


class DistsessionError(Exception):
    """Base of all errors of this package.

    An IPython front end shows the message alone: the frames between the user's call and the
    ``raise`` are this package's own and explain nothing.

    Args:
        message: What has happened, or all of it.
        remedy: What to do about it, where that is told apart.
        lines: The message in short lines, where it is long.

    Attributes:
        remedy: The same; ``str()`` gives both.
    """

    remedy: str = ""

    def __init__(self, *message: object, remedy: str = "", lines: Sequence[str] = ()):
        super().__init__(*message)
        if remedy:
            self.remedy = remedy
        self._lines = tuple(lines)

    def __str__(self) -> str:
        return f"{super().__str__()} {self.remedy}" if self.remedy else super().__str__()

    @property
    def lines(self) -> tuple[str, ...]:
        """The message in lines, as it is shown."""
        return self._lines or (str(self),)

    def _render_traceback_(self) -> list[str]:
        first, *others = self.lines
        return _shown([f"{type(self).__name__}: {first}", *others])


class OptionsError(DistsessionError, ValueError):
    """An option has a value that cannot work."""


class SessionStateError(DistsessionError, RuntimeError):
    """The session cannot do this in its present state (closed, not started, none at all)."""


class KeptSessionError(SessionStateError):
    """A session that is kept is not there, or cannot be had from here."""


class SerializationError(DistsessionError, TypeError):
    """A function, an argument or a result cannot be carried between processes."""


class ResultsError(DistsessionError, TypeError):
    """Results of several ranks cannot be used in this way, or not without saying how."""


class LaunchError(DistsessionError, RuntimeError):
    """The ranks did not start. Nothing of the session is left running."""


class LaunchTimeoutError(LaunchError, TimeoutError):
    """The ranks did not start within ``start_timeout``."""


class ProcessGroupError(LaunchError):
    """The ranks started, but the process group could not be built."""


class EngineDiedError(DistsessionError, RuntimeError):
    """The process of a rank ended while it was needed.

    Attributes:
        rank: The rank that died.
        pid: Process id of its engine.
        returncode: Exit code, or the negative signal number, as in :mod:`subprocess`.
        log_tail: The last lines that it wrote.
        how: How and where it ended: ``"was killed by SIGKILL at In[3] line 4"``.
        remedy: What to do about it.
        details: What else is known, on lines of its own.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        pid: int,
        returncode: int,
        log_tail: str = "",
        how: str = "",
        remedy: str = "",
        details: str = "",
    ):
        super().__init__(message)
        self.remedy = remedy
        self.details = details
        self.rank = rank
        self.pid = pid
        self.returncode = returncode
        self.log_tail = log_tail
        self.how = how or message.partition("\n")[0].rstrip(".")

    def __str__(self) -> str:
        return self.text()

    def text(self, *, with_remedy: bool = True) -> str:
        """The message, with the remedy or without it."""
        remedy = f" {self.remedy}" if with_remedy and self.remedy else ""
        return f"{self.args[0]}{remedy}{self.details}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_engine_died, (
            self.args[0],
            self.rank,
            self.pid,
            self.returncode,
            self.log_tail,
            self.how,
            self.remedy,
            self.details,
        )


def _rebuild_engine_died(
    message: str,
    rank: int,
    pid: int,
    returncode: int,
    log_tail: str,
    how: str,
    remedy: str,
    details: str,
) -> EngineDiedError:
    return EngineDiedError(
        message,
        rank=rank,
        pid=pid,
        returncode=returncode,
        log_tail=log_tail,
        how=how,
        remedy=remedy,
        details=details,
    )


class CollectiveError(DistsessionError, RuntimeError):
    """A collective (or a send or receive) was given up; the message says for whose sake.

    On a rank it is of the type, too, that torch raises in such a case.

    Attributes:
        torch_text: What torch says in such a case, for code that looks for it; ``str()`` ends with
            it.
    """

    torch_text: str = ""

    @property
    def own_text(self) -> str:
        """The message without what torch says."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.own_text} (torch: {self.torch_text})" if self.torch_text else self.own_text

    @property
    def lines(self) -> tuple[str, ...]:
        """The message in lines, as it is shown: without what torch says."""
        return self._lines or (self.own_text,)


class CollectiveMismatchError(CollectiveError):
    """The ranks called different things, or the same with different tensors."""


class CollectiveHangError(CollectiveError):
    """Ranks waited in a collective that could never have completed."""


class RunTimeoutError(DistsessionError, TimeoutError):
    """A run did not end within the time that its caller gave."""


class ExportError(DistsessionError, ValueError):
    """What ran cannot be written as a script, or the script gives other results."""


class ExportWarning(UserWarning):
    """A script was written that will not run through as it is."""


class RemoteError(DistsessionError):
    """Stands for an exception of a rank that cannot be rebuilt here.

    Attributes:
        ename: Name of the exception's class on the rank.
        evalue: Its message.
        traceback: The traceback as text, formatted on the rank.
    """

    def __init__(self, ename: str, evalue: str, traceback: str = ""):
        super().__init__(ename, evalue, traceback)
        self.ename = ename
        self.evalue = evalue
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.ename}: {self.evalue}"


class RunError(DistsessionError, RuntimeError):
    """A function or cell failed on one or more ranks.

    A plain exception rather than an ``ExceptionGroup``: IPython 9 hands every group to
    ``traceback.print_exc`` and never asks it how it wants to be shown.

    Attributes:
        by_rank: The exception of each rank that failed: the cause first, last those of ranks that
            only suffered from it. Each carries a note that names its rank, host and device.
        results: The values of the ranks that finished.

    Args:
        message: Its first line, and how the ranks are afterwards.
        by_rank: See above.
        results: See above.
        details: All of it, as a notebook shows it.
        tracebacks: Of the ranks. They are a note of the error, which Python shows below it.
    """

    def __init__(
        self,
        message: str,
        *,
        by_rank: Mapping[int, BaseException],
        results: Mapping[int, Any],
        details: str = "",
        tracebacks: str = "",
    ):
        super().__init__(message)
        self.by_rank = dict(by_rank)
        self.results = results
        self._details = details
        self._tracebacks = f"\n{tracebacks}" if tracebacks else ""
        if tracebacks:
            self.add_note(self._tracebacks)

    @property
    def first(self) -> BaseException:
        """The cause; that of the lowest rank, if several failed alike."""
        return self.by_rank[self.first_rank]

    @property
    def first_rank(self) -> int:
        """The rank of the cause."""
        return next(iter(self.by_rank))

    def as_group(self) -> BaseExceptionGroup[BaseException]:
        """All ranks' exceptions as a group, for ``except*``; the cause comes first."""
        return BaseExceptionGroup(str(self), list(self.by_rank.values()))

    def _render_traceback_(self) -> list[str]:
        notes = [each for each in getattr(self, "__notes__", []) if each != self._tracebacks]
        lines = (self._details or str(self)).splitlines()
        return _shown([*lines, *(["", *notes] if notes else [])])

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        tracebacks = self._tracebacks.removeprefix("\n")
        return _rebuild_run_error, (
            str(self), self.by_rank, self.results, self._details, tracebacks
        )  # fmt: skip


def _rebuild_run_error(
    message: str,
    by_rank: Mapping[int, BaseException],
    results: Mapping[int, Any],
    details: str,
    tracebacks: str = "",
) -> RunError:
    return RunError(
        message, by_rank=by_rank, results=results, details=details, tracebacks=tracebacks
    )


class RunInterrupt(KeyboardInterrupt):
    """Stop was pressed (or Ctrl-C) while a run was under way.

    A ``KeyboardInterrupt``, so that it ends a loop around the call as well.
    """

    def __init__(self, *message: object, lines: Sequence[str] = ()):
        super().__init__(*message)
        self._lines = tuple(lines)

    def _render_traceback_(self) -> list[str]:
        first, *others = self._lines or (str(self),)
        return _shown([f"KeyboardInterrupt: {first}", *others])


def in_lines(kind: type[E], text: str) -> E:
    """An error that is shown in the lines of a text, and says it in one."""
    lines = [line.strip() for line in text.split("\n")]
    return kind(" ".join(lines), lines=lines)
