"""Rows of a run, read from its file, as the tables of README.md and docs/figures.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import OURS
from tests.benchmarks.many import AIMS, RANKS, RATIOS
from tests.benchmarks.starts import IMPORT, IMPORT_INSIDE
from tests.benchmarks.table import number

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"

Rows = Sequence[dict[str, Any]]
TIMES = "\N{MULTIPLICATION SIGN}"
UNITS = {"us": "µs"}


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        title: What the reader is told.
        benchmark: The benchmark's name in the file.
        ours: The row of ours, or how it begins.
        shown: ``figure`` or ``ratio``: what of the row is shown.
        is_main: The README shows it, too.
        has_peers: Those of the benchmark are shown; else the line before has them.
    """

    title: str
    benchmark: str
    ours: str = OURS
    shown: str = "figure"
    is_main: bool = False
    has_peers: bool = True


LINES = (
    Line("`import distsession`", "import"),
    Line("start to first barrier, 1 rank", "start to first barrier, N=1", shown="ratio"),
    Line("start to first barrier, 4 ranks", "start to first barrier, N=4", shown="ratio",
         is_main=True),
    Line("start to first barrier, 8 ranks", "start to first barrier, N=8", shown="ratio"),
    Line("fresh processes for 4 ranks", "warm restart, N=4"),
    Line("call of an empty function, 4 ranks", "call with no work, N=4"),
    Line("empty `%%distributed` cell, 4 ranks", "cell with no work in a kernel, N=4"),
    Line("private memory of an idle CPU rank", "private memory of an idle CPU rank, N=4"),
    Line("Stop in a hung collective, to the end of the cell",
         "Stop in a hung collective to ended cell, N=4"),
    Line("from Stop in a hung collective to one that works",
         "from there to a collective that works, N=4", is_main=True),
    Line("error of a rank, others in a collective, to the end of the cell",
         "error of a rank, others in a collective, to ended cell, N=4", is_main=True),
    Line("from that error to a collective that works",
         "from that error to a collective that works, N=4"),
    Line("SIGKILL of a rank, others in a collective, to the end of the cell",
         "SIGKILL of a rank, others in a collective, to ended cell, N=4"),
    Line("replacing a killed rank, until a collective works",
         "restart([1]) of a killed rank to a collective that works, N=4", is_main=True),
    Line("256 MB to each of 4 ranks, seven times, and read there", "send 256 MB of torch, N=4",
         is_main=True),
    Line("the first for seconds", "send 256 MB of torch, N=4", ours=f"{OURS}, the first",
         has_peers=False),
    Line("256 MB from each of 4 ranks, and read here", "bring 4 x 256 MB of torch"),
    Line("256 MB to each of 4 ranks, in turns with Ray", "send 256 MB, N=4, beside ray",
         ours=f"{OURS}, torch"),
    Line("256 MB from each of 4 ranks, in turns with Ray", "bring 256 MB, N=4, beside ray",
         ours=f"{OURS}, torch"),
    Line("100,000 lines from 4 ranks together, in a notebook",
         "100,000 lines in a kernel, from 4 ranks together"),
    Line("what of these is in the notebook's file", "what of these is in the notebook's file"),
    Line("rate of small `all_reduce`s with the panel shown, beside without",
         "small all_reduces in a cell, N=4", shown="ratio"),
    Line("a small `all_reduce` by `distsession.distributed`, above torch's own",
         "a small all_reduce, a group of one", ours=f"{OURS}, above"),
    Line("recording and comparing a collective, Python alone, 4 ranks",
         "Python of an all_reduce with nobody to wait for, N=4", ours=f"{OURS}, both"),
    Line("recording and comparing an operation that a device is given, 8 ranks",
         "processor time of an all_reduce that a device is given, N=8",
         ours=f"{OURS}, and comparing"),
    Line("a step of `DistributedDataParallel` on a device that the CPU plays, 2 ranks, beside "
         "torch's own group", "a step of DistributedDataParallel on standin, N=2, step by step",
         shown="ratio"),
    Line("processor time that is added to it, as a share of its wall time",
         "processor time that is added to a step of DistributedDataParallel on standin, N=2, "
         "as a share of its wall time", shown="ratio"),
    Line("processor time of the kernel for a call, 1,024 ranks on 128 simulated hosts",
         "processor time of the kernel for a call, 1024 ranks on 128 simulated hosts"),
    Line("Stop where ranks wait for such a device, to a collective that works",
         "Stop where ranks wait for a device (standin) to a collective that works, N=4"),
    *(Line(aim.name(ranks), aim.name(ranks), shown="ratio" if aim in RATIOS else "figure")
      for aim in AIMS for ranks in RANKS),
)  # fmt: skip


def markdown(facts: dict[str, Any], *, main_only: bool = False) -> str:
    """A table between its marks, and a line on how it came about.

    Args:
        facts: What a run has written; lines that it did not measure are left out.
        main_only: Only the lines that the README shows.
    """
    lines = [BEGIN, f"| | {OURS} | beside |", "|---|---|---|"]
    rows: Rows = facts["rows"]
    unit = " `import torch`"  # of the first ratio; the others are understood
    for line in [each for each in LINES if each.is_main or not main_only]:
        theirs = [row for row in rows if row["benchmark"] == line.benchmark]
        mine = [row for row in theirs if row["subject"].startswith(line.ours)]
        ours = next((row for row in mine if row["subject"] == line.ours), next(iter(mine), None))
        if ours is None:
            continue
        shown = _figure(ours)
        if line.shown == "ratio":
            shown, unit = _ratio(ours, unit), ""
        peers = theirs if line.has_peers else []
        beside = [_beside(row, line) for row in peers if not row["subject"].startswith(OURS)]
        cells = (line.title, shown, ", ".join(filter(None, beside)))
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    lines += [*([] if main_only else _left_behind(rows)), "", _origin(facts), END]
    return "\n".join(lines)


def _ratio(row: dict[str, Any], unit: str = "") -> str:
    ratio, note = row["ratio"], row["note"]
    return f"{number(ratio['median'])} {TIMES}{unit}" if ratio else f"{note}"


def _figure(row: dict[str, Any]) -> str:
    figure = row["figure"]
    if not figure:
        note: str = row["note"]
        return note
    median, unit = figure["median"], row["unit"]
    if unit == "s" and median < 0.1:
        median, unit = 1e3 * median, "ms"
    elif unit == "ms" and median < 0.01:
        median, unit = 1e3 * median, "us"
    return f"{number(median)} {UNITS.get(unit, unit)}"


def _beside(row: dict[str, Any], line: Line) -> str:
    """A peer's part; nothing where it is not here, or failed, or is the unit of the ratio."""
    if row["failed"] or row["note"].startswith("not installed"):
        return ""
    if line.shown == "ratio":
        return f"{row['subject']} {_ratio(row)}" if row["ratio"] else ""
    return f"{row['subject']} {_figure(row)}"


def _left_behind(rows: Rows) -> list[str]:
    found = [row for row in rows if row["benchmark"].startswith("left behind")]
    mine = [row for row in found if row["subject"] == OURS]
    if not mine:
        return []
    others = [
        f"{row['subject']} {row['figure']['median']:g} {_ends(row)}"
        for row in found
        if row["subject"] != OURS
    ]
    count = f"{mine[0]['figure']['median']:g} processes or folders {_ends(mine[0])}"
    return [f"| {mine[0]['benchmark']} | {count} | {', '.join(others)} |"]


def _ends(row: dict[str, Any]) -> str:
    words: str = row["note"].partition(";")[0]
    return words.removeprefix("in all, ")


def _origin(facts: dict[str, Any]) -> str:
    version, _, build = facts["packages"]["torch"].partition("+")
    kind = " for the CPU" if build == "cpu" else ""
    text = f"Medians on {facts['cpus']} cores with torch {version}{kind}"
    rows: Rows = facts["rows"]
    unit = [row["figure"] for row in rows if row["subject"] == IMPORT]
    if unit and unit[0]:
        text += f"; one `import torch` takes about {unit[0]['median']:.1f} s there"
    inside = [row["figure"] for row in rows if row["subject"] == IMPORT_INSIDE]
    if inside and inside[0]:
        text += f" as a process, and {inside[0]['median']:.1f} s as a statement"
    command = "python -m tests.benchmarks --quick" if facts.get("quick") else "make bench"
    return f"{text}.\n`{command}` made them."


def print_markdown(path: Path) -> None:
    """Print the tables of the run that wrote this file: README.md's, then docs/figures.md's."""
    facts = json.loads(path.read_text())
    print(markdown(facts, main_only=True), markdown(facts), sep="\n\n")
