"""The dated table of ``docs/backends.md``, and the sentence of the README that says the same.

A run is a row. One of the same day, GPU, torch, NCCL and class takes the place of the row before.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

HEADING = "## What was seen where"
COLUMNS = ("Date", "GPU", "Driver", "torch", "NCCL", "Class", "Ranks", "`python -m tests.gpu`")
WIDTH = 106
IN_README = re.compile(
    r"on \d{4}-\d\d-\d\d \([^()]*\)(?:,? (?:and )?on \d{4}-\d\d-\d\d \([^()]*\))*"
)


class UnknownTableError(Exception):
    """A page that has no such table, or no such sentence."""


@dataclass(frozen=True)
class Seen:
    """What one run has shown; an empty text for what is not known.

    Attributes:
        kind: torch's class of the backend.
        ranks: How many, on how many GPUs.
        outcome: How many checks held, in words.
    """

    date: str
    gpu: str
    driver: str
    torch: str
    nccl: str
    kind: str
    ranks: str
    outcome: str

    @property
    def run(self) -> tuple[str, ...]:
        """What tells runs apart: the day, the machine and the versions."""
        return (self.date, self.gpu, self.torch, self.nccl, self.kind)

    @property
    def row(self) -> str:
        kind = f"`{self.kind}`" if self.kind else ""
        cells = (self.date, self.gpu, self.driver, self.torch, self.nccl, kind, self.ranks)
        return f"| {' | '.join((*cells, self.outcome.replace('|', '/')))} |"

    @property
    def clause(self) -> str:
        """As the README has it."""
        return f"on {self.date} ({self.gpu}, torch {self.torch}, NCCL {self.nccl}, `{self.kind}`)"


def short_gpu(name: str) -> str:
    """A GPU's model: of "NVIDIA H100 80GB HBM3" it is "H100", of "Tesla T4" it is "T4"."""
    words = [word for word in name.split() if word not in ("NVIDIA", "Tesla", "GeForce")]
    for number, word in enumerate(words, 1):
        if any(letter.isdigit() for letter in word):
            return " ".join(words[:number])
    return " ".join(words)


def ranks_text(ranks: int, gpus: int) -> str:
    return f"{ranks} on {'one GPU' if gpus == 1 else f'{gpus} GPUs'}"


def outcome_text(ran: Mapping[str, Sequence[str]], of: int) -> str:
    """What came of the checks, as a cell.

    Args:
        ran: The names of those that ``held``, have ``FAILED`` or were ``skipped``.
        of: How many checks there are.
    """
    held, failed = ran["held"], ran["FAILED"]
    run = len(held) + len(failed)
    if failed:
        return f"{len(held)} of {run} checks held; failed: {'; '.join(failed)}"
    return f"all {run} checks held" if run == of else f"{run} of {of} checks were run and held"


def rows_of(page: str) -> list[Seen]:
    """The rows of the page's table.

    Raises:
        UnknownTableError: There is no such table.
    """
    lines = page.split("\n")
    first, end = _span(lines)
    seen = []
    for line in lines[first:end]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != len(COLUMNS):
            raise UnknownTableError(f"{len(cells)} cells instead of {len(COLUMNS)} in: {line}")
        seen.append(replace(Seen(*cells), kind=cells[5].strip("`")))
    return seen


def add_row(page: str, seen: Seen) -> str:
    """The page with a run in its table, in the order of dates.

    Raises:
        UnknownTableError: There is no such table.
    """
    lines, rows = page.split("\n"), rows_of(page)
    if seen.run in [row.run for row in rows]:
        rows = [seen if row.run == seen.run else row for row in rows]
    else:
        rows = sorted([*rows, seen], key=lambda row: row.date)
    first, end = _span(lines)
    lines[first:end] = [row.row for row in rows]
    return "\n".join(lines)


def retell(readme: str, rows: Sequence[Seen]) -> str:
    """The README with a clause for each row, in the item of its list that has them.

    Raises:
        UnknownTableError: No item has any.
    """
    told = [row.clause for row in rows]
    text = ", ".join(told[:-1]) + (", and " if len(told) > 2 else " and " if told[1:] else "")
    items = re.split(r"\n(?=- |\n)", readme)
    for number, item in enumerate(items):
        joined = " ".join(item.split())
        if item.startswith("- ") and IN_README.search(joined):
            joined = IN_README.sub(lambda _: text + told[-1], joined)
            items[number] = textwrap.fill(
                joined,
                WIDTH,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            return "\n".join(items)
    raise UnknownTableError("no item of the README's lists says on which GPUs it was seen")


def _span(lines: Sequence[str]) -> tuple[int, int]:
    """Where the table's rows begin, and where they have ended."""
    head = f"| {' | '.join(COLUMNS)} |"
    if HEADING not in lines or head not in lines[lines.index(HEADING) :]:
        raise UnknownTableError(f"no table below {HEADING!r} that begins with {head!r}")
    first = lines.index(head, lines.index(HEADING)) + 2
    return first, next((n for n in range(first, len(lines)) if not lines[n].strip()), len(lines))
