"""What is measured: values, ratios between them, and the rows that show both."""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "distsession"
"""The name of this project's rows."""


class NotInstalled(Exception):
    """A peer is not here; the message says how to get it."""


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, float]:
        return {
            "min": min(self.values),
            "median": self.median,
            "max": max(self.values),
            "count": len(self.values),
        }


@dataclass(frozen=True)
class Target:
    """What a figure should be at most, or at least."""

    limit: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"

    def is_met(self, figure: Figure) -> bool:
        return figure.median >= self.limit if self.at_least else figure.median <= self.limit


@dataclass
class Row:
    """One line of the table.

    Attributes:
        benchmark: What was done.
        subject: By whom.
        figure: What it took; None where there is only a note.
        unit: Of the figure.
        ratio: The figure as a multiple of another one, a value for each round.
        beside: What the other one is.
        target: For the ratio where there is one, otherwise for the figure.
        note: What there is to say in words, such as that a peer is not installed.
        failed: Whether the note says that something went wrong.
    """

    benchmark: str
    subject: str
    figure: Figure | None = None
    unit: str = ""
    ratio: Figure | None = None
    beside: str = ""
    target: Target | None = None
    note: str = ""
    failed: bool = False

    @property
    def is_met(self) -> bool | None:
        judged = self.ratio or self.figure
        return None if self.target is None or judged is None else self.target.is_met(judged)

    def as_json(self) -> dict[str, Any]:
        out = asdict(self)
        for name in ("figure", "ratio"):
            figure = getattr(self, name)
            out[name] = figure.as_json() if figure else None
        out["target"] = str(self.target) if self.target else None
        out["met"] = self.is_met
        return out


@dataclass
class Arm:
    """One of the things that are measured in turns.

    Attributes:
        subject: Whose it is.
        measure: Measures it; gives one or more values.
        rounds: What each round gave.
        note: Why there are no more rounds, if it failed.
        failed: Whether it failed other than by not being installed.
    """

    subject: str
    measure: Callable[[], Sequence[float]]
    rounds: list[tuple[float, ...]] = field(default_factory=list)
    note: str = ""
    failed: bool = False

    def run(self) -> None:
        """Measure once more, unless it has failed before."""
        if self.note:
            return
        try:
            self.rounds.append(tuple(self.measure()))
        except NotInstalled as missing:
            self.note = str(missing)
        except Exception as error:
            self.note, self.failed = describe(error), True

    @property
    def figure(self) -> Figure | None:
        values = tuple(value for values in self.rounds for value in values)
        return Figure(values) if values else None

    def against(self, floor: Arm) -> Figure | None:
        """This as a multiple of another, round by round, so that drift of the machine cancels."""
        quotients = tuple(
            statistics.median(mine) / statistics.median(theirs)
            for mine, theirs in zip(self.rounds, floor.rounds, strict=False)
        )
        return Figure(quotients) if quotients else None

    def row(
        self,
        benchmark: str,
        unit: str,
        floor: Arm | None = None,
        beside: str = "",
        target: Target | None = None,
    ) -> Row:
        """What has come of it, as a line of the table."""
        ratio = self.against(floor) if floor is not None else None
        return Row(
            benchmark,
            self.subject,
            self.figure,
            unit,
            ratio,
            (beside or (floor.subject if floor else "")) if ratio else "",
            target,
            self.note,
            self.failed,
        )


def take_turns(arms: Sequence[Arm], rounds: int) -> None:
    """Measure A B A B, not A A B B: then a noisy minute hits both."""
    for _ in range(rounds):
        for arm in arms:
            arm.run()


def describe(error: BaseException) -> str:
    """One line for the table; the traceback goes to stderr."""
    traceback.print_exception(error, file=sys.stderr)
    lines = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}: {lines[-1] if lines else ''}"[:200]
