"""One process, one table, one file: ``python -m tests.benchmarks``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.benchmarks import (
    calls,
    check,
    devices,
    helpers,
    hosts,
    keep,
    many,
    memory,
    moving,
    notebook,
    output,
    peers,
    recovery,
    scale,
    starts,
    streams,
)
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Row, describe
from tests.benchmarks.markdown import print_markdown
from tests.benchmarks.processes import own_world
from tests.benchmarks.table import table, write_json

BENCHMARKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "import": starts.imports,
    "start": starts.start,
    "restart": starts.restart,
    "call": calls.call,
    "cell": notebook.cell,
    "panel": notebook.panel,
    "viewer": notebook.viewer,
    "growth": calls.growth,
    "calls": calls.many,
    "memory": memory.memory,
    "output": output.output,
    "lines": notebook.lines,
    "stop": recovery.stop,
    "failure": recovery.failure,
    "replace": recovery.replace,
    "check": check.check,
    "devices": devices.devices,
    "moving": moving.moving,
    "helpers": helpers.helpers,
    "streams": streams.streams,
    "hosts": hosts.hosts,
    "scale": scale.scale,
    "keep": keep.keep,
    "many": many.many,
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds (5; 2 with --quick)")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="may be repeated")
    parser.add_argument("--json", type=Path, default=peers.RESULTS / "latest.json", metavar="PATH")
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print the last run's tables for README.md and docs/figures.md, and end",
    )
    parser.add_argument(
        "--install-peers", action="store_true", help="install Ray and nbdistributed aside, and end"
    )
    arguments = parser.parse_args(argv)
    if arguments.repeats is not None and arguments.repeats < 1:
        parser.error("--repeats takes a number of at least 1")
    return arguments


def measure(names: Sequence[str], bench: Bench) -> list[Row]:
    """All rows of some benchmarks; one that fails is a row that says so."""
    rows: list[Row] = []
    for name in names:
        began = time.monotonic()
        print(f"{name} ...", end=" ", flush=True, file=sys.stderr)
        try:
            rows += BENCHMARKS[name](bench)
        except Exception as error:
            rows.append(Row(name, OURS, note=describe(error), failed=True))
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return rows + bench.left_behind()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where one of our own figures could not be had."""
    arguments = _arguments(argv)
    if arguments.install_peers:
        return int(not peers.install())
    if arguments.markdown:
        if not arguments.json.exists():
            print(f"{arguments.json} is not there: measure first", file=sys.stderr)
            return 1
        print_markdown(arguments.json)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all of it is ended
    with own_world() as folder:
        repeats = arguments.repeats or (2 if arguments.quick else 5)
        bench = Bench(repeats, arguments.quick, folder)
        rows = measure(arguments.only or list(BENCHMARKS), bench)
        print(table(rows))
        write_json(arguments.json, rows, bench)
        print(f"\n{arguments.json}")
    return int(any(row.failed and row.subject.startswith(OURS) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
