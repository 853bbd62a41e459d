"""How methods went on ranks and in plain processes, and what that says of the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["WORST_FIRST", "Outcome", "Result", "Verdict", "exit_code", "summary"]

WORST_FIRST = ("died", "timeout", "failed", "skipped", "passed")
ENDED = ("died", "timeout")
"""What no rank can be used after, of a session or not."""
SHOWN_LINES = 6
"""Of what the ranks say of a fault."""


@dataclass(frozen=True)
class Outcome:
    """How a method went.

    Attributes:
        status: The worst of the ranks'.
        texts: What each rank says about it.
        seconds: What it took.
        unusable: Why the session cannot be used after it.
    """

    status: str
    texts: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    unusable: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed" and not self.unusable


class Verdict(Enum):
    """What a method's two outcomes come to."""

    PASSED = "pass"
    SKIPPED = "are skipped by torch"
    FAILED_IN_BOTH = "fail in plain processes, too"
    EXCEPTION = "are exceptions that are listed"
    FAULT = "are faults"


@dataclass(frozen=True)
class Result:
    """A method's outcomes.

    Attributes:
        suite: Its suite.
        method: Its name.
        plain: How it went in plain processes.
        here: How it went on the ranks that had run the methods before it. This one counts.
        anew: How it went on new ranks after that, which tells what the methods before it have to do
            with it.
        is_ours: Whether the method is no test of torch's. It has to pass in plain processes.
    """

    suite: str
    method: str
    plain: Outcome
    here: Outcome | None = None
    anew: Outcome | None = None
    is_ours: bool = False

    @property
    def name(self) -> str:
        return f"{self.suite}.{self.method}"

    def verdict(self, exceptions: Mapping[str, str]) -> Verdict:
        if self.is_ours and not self.plain.passed:
            return Verdict.FAULT
        if self.here is None:
            return Verdict.SKIPPED
        if self.here.passed:
            return Verdict.PASSED
        if self.here.unusable and self.plain.status not in ENDED:
            return Verdict.FAULT
        if self.name in exceptions:
            return Verdict.EXCEPTION
        return Verdict.FAULT if self.plain.passed else Verdict.FAILED_IN_BOTH


def summary(results: Iterable[Result], exceptions: Mapping[str, str]) -> str:
    """How many came to what; each fault, and each exception that is none."""
    results = list(results)
    counts = Counter(result.verdict(exceptions) for result in results)
    lines = [f"{len(results)} methods"]
    lines += [f"  {counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]]
    lines += [
        f"{r.name} passes, but is listed as an exception"
        for r in results
        if r.name in exceptions and r.verdict(exceptions) is Verdict.PASSED
    ]
    lines += [
        f"{r.name} fails in plain processes, too"
        for r in results
        if r.verdict(exceptions) is Verdict.FAILED_IN_BOTH
    ]
    for result in results:
        if result.verdict(exceptions) is Verdict.FAULT:
            lines += _fault(result)
    return "\n".join(lines)


def _fault(result: Result) -> list[str]:
    here = result.here or Outcome("not run")
    then = f"; on new ranks: {result.anew.status}" if result.anew else ""
    lines = [f"{result.name}: plain {result.plain.status}, here {here.status}{then}"]
    if here.unusable:
        lines.append(f"  the session cannot be used after it: {here.unusable.splitlines()[0]}")
    for rank, text in (here.texts or result.plain.texts).items():
        lines += [f"  [rank {rank}] {line}" for line in text.splitlines()[-SHOWN_LINES:]]
    return lines


def exit_code(results: Iterable[Result], exceptions: Mapping[str, str]) -> int:
    """0 if there is no fault, 1 if there is one, 2 if nothing has run."""
    verdicts = [result.verdict(exceptions) for result in results]
    if not verdicts:
        return 2
    return int(Verdict.FAULT in verdicts)
