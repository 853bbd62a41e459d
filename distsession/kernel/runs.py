"""What a later kernel of a session that is kept has to know of the runs of this one."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from distsession.kernel.journal import Record
from distsession.protocol.host_clock import host_clock

__all__ = ["LastRun", "RunBegan", "RunEnded", "RunFailed", "RunKind", "RunsKnown"]


class RunKind(enum.Enum):
    """What of the user's a run is."""

    CELL = "cell"
    EXPRESSION = "expression"
    CALL = "call"
    """Of ``run()``, whose caller waits."""
    SUBMIT = "submit"
    """Of ``submit()``, whose caller has a future."""


@dataclass(frozen=True, slots=True)
class LastRun:
    """The cell or call that the user has run last.

    Attributes:
        number: Of its request.
        ranks: Where.
    """

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RunBegan(Record):
    """A run is about to be sent to its ranks.

    Attributes:
        request: Its number.
        ranks: Where.
        kind: What it is.
        label: The name of its code, or of the function.
        cell: The number of the notebook's cell; None where there is none.
        entry: The number of its entry in the history.
        at: When, by ``time.time()``.
        clock: When, by ``host_clock()``; 0 where another version has written it.
        kernel: Which of the session's kernels, from 1.
        fetch: Its values are wanted, not only what it shows.
    """

    request: int
    ranks: tuple[int, ...]
    kind: RunKind
    label: str
    cell: int | None
    entry: int
    at: float
    kernel: int = 1
    fetch: bool = True
    clock: float = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since it began, whatever has been done to the time of day."""
        return max(0.0, host_clock() - self.clock if self.clock else time.time() - self.at)

    @property
    def title(self) -> str:
        """What sentences call it: ``In[7]``, or ``train() in In[7]``."""
        if self.kind in (RunKind.CELL, RunKind.EXPRESSION):
            return self.label
        within = "" if self.cell is None else f" in In[{self.cell}]"
        return f"{self.label}(){within}"


@dataclass(frozen=True)
class RunEnded(Record):
    """All ranks have answered, and whoever waited is about to be told.

    Attributes:
        request: Its number.
        succeeded: Whether it ended without an error, and was not stopped.
    """

    request: int
    succeeded: bool


@dataclass(frozen=True)
class RunFailed(Record):
    """How it has ended.

    Attributes:
        request: Its number.
        rank: The one that failed first; None where that is not known.
        error: As the cell said it.
    """

    request: int
    rank: int | None
    error: str


@dataclass(frozen=True)
class RunsKnown(Record):
    """What is known of all runs together.

    Attributes:
        last: The last cell or call.
        failed_rank: The rank at which the last run that failed did so first.
        cells: The numbers in the names of cells that ranks know.
        kernel: Which of the session's kernels says so, from 1.
    """

    last: LastRun | None
    failed_rank: int | None
    cells: frozenset[int]
    kernel: int = 1
