"""The rows as a table for people and as a file for programs."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import Figure, Row

HEAD = ("", "", "median", "min", "max", "", "ratio", "beside", "target", "")
PACKAGES = ("torch", "ipyparallel", "pyzmq", "cloudpickle", "ipykernel", "IPython")


def number(value: float) -> str:
    """Three digits or so."""
    if value and abs(value) < 0.01:
        return f"{value:.4f}"
    for limit, places in ((10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{places}f}"
    return f"{value:,.0f}"


def _figure(figure: Figure | None) -> list[str]:
    if figure is None:
        return ["", "", ""]
    facts = figure.as_json()
    return [number(facts[name]) for name in ("median", "min", "max")]


def _cells(row: Row, before: str) -> list[str]:
    target = f"{row.target}" if row.target else ""
    if row.is_met is not None:
        target += " met" if row.is_met else " MISSED"
    return [
        "" if row.benchmark == before else row.benchmark,
        row.subject,
        *_figure(row.figure),
        row.unit if row.figure else "",
        f"{number(row.ratio.median)}" if row.ratio else "",
        f"x {row.beside}" if row.ratio else "",
        target,
        row.note,
    ]


def table(rows: Sequence[Row]) -> str:
    """All rows in columns, notes last."""
    before = [""] + [row.benchmark for row in rows]
    lines = [list(HEAD), *(_cells(row, last) for row, last in zip(rows, before, strict=False))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    right = {2, 3, 4, 6}  # numbers
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write_json(path: Path, rows: Sequence[Row], bench: Bench) -> None:
    """All rows, and on what they were measured."""
    facts: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "repeats": bench.repeats,
        "quick": bench.quick,
        "left_behind": bench.left,
        "rows": [row.as_json() for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2) + "\n")
