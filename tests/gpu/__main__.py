"""Try everything and print a report to paste: ``python -m tests.gpu``.

The exit status is 0 where all checks have held, and 1 otherwise. ``--write`` adds the run to the
table of ``docs/backends.md`` and to the README, in the place of one of the same day and versions.
``--compare`` then measures beside bare torch, and how soon ranks are free, as the benchmarks do.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import distsession
from distsession.engine.host_info import nccl_version
from tests.benchmarks import devices
from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import Row
from tests.benchmarks.processes import own_world
from tests.benchmarks.table import table
from tests.gpu import seen
from tests.gpu.checks import CHECKS, Bed, Outcome, attempt
from tests.gpu.target import TARGETS, NotHereError, Target


def facts(target: Target) -> Iterator[tuple[str, str]]:
    """Versions, as the report's head."""
    yield "distsession", distsession.__version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", torch.__version__
    yield "CUDA of torch", str(torch.version.cuda)
    if target.is_nccl:
        yield "NCCL", ".".join(map(str, nccl_version()))
        yield "driver", _driver()
        yield "GPUs", "; ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    yield "ranks", f"{target.ranks} with {target.backend}, {target.options}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return said.stdout.split("\n")[0]


WORDS = ("held", "FAILED", "skipped")
REPEATS = 3
"""Rounds of what is measured."""
ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs/backends.md", ROOT / "README.md"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--backend", choices=TARGETS, default="nccl")
    parser.add_argument("--only", action="append", metavar="TEXT", help="checks that say this")
    parser.add_argument("--write", action="store_true", help=f"a row in {PAGE.name}: see above")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="another page with such a table, which --write rehearses with",
    )
    parser.add_argument("--compare", action="store_true", help="measure beside bare torch as well")
    arguments = parser.parse_args(argv)
    if arguments.compare and arguments.backend == "gloo":
        parser.error("--compare measures work that is given to a device, and gloo gives it none")
    if arguments.to and not arguments.write:
        parser.error("--to FILE says where --write writes: give both")
    if arguments.write and not arguments.to:
        if not arguments.backend.startswith("nccl"):
            parser.error(
                f"{PAGE.name} says what was seen on GPUs, and {arguments.backend} needs none: "
                "--write --to FILE writes to another page"
            )
        if arguments.only:
            parser.error(f"{PAGE.name} has runs of all checks: leave --only out, or give --to FILE")
    return arguments


def _seen(bed: Bed, outcomes: Sequence[Outcome]) -> seen.Seen:
    """The run as a row."""
    target, gpus = bed.target, 0
    name = driver = nccl = ""
    if target.is_nccl:
        gpus = len(set(target.options["devices"]))
        name, driver = seen.short_gpu(torch.cuda.get_device_name(0)), _driver()
        nccl = ".".join(map(str, nccl_version()))
    ran = {word: [o.check.name for o in outcomes if o.word == word] for word in WORDS}
    return seen.Seen(
        date=datetime.date.today().isoformat(),
        gpu=name,
        driver=driver,
        torch=torch.__version__.partition("+")[0],
        nccl=nccl,
        kind=bed.kind,
        ranks=seen.ranks_text(target.ranks, gpus),
        outcome=seen.outcome_text(ran, len(CHECKS)),
    )


def write(run: seen.Seen, to: Path | None) -> list[Path]:
    """Add a run to a page, or to our own and the README; gives those that were written.

    Raises:
        seen.UnknownTableError: A page has no place for it.
    """
    path = to or PAGE
    page = seen.add_row(path.read_text(), run)
    pages = {path: page}
    if to is None:
        pages[README] = seen.retell(README.read_text(), seen.rows_of(page))
    for path, text in pages.items():
        path.write_text(text)
    return list(pages)


def compare(target: Target) -> list[Row]:
    """Measure beside bare torch, with few repeats."""
    with own_world() as folder:
        bench = Bench(REPEATS, True, folder)
        return [*devices.beside_torch(bench, target), *bench.left_behind()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks one after the other."""
    arguments = _arguments(argv)
    try:
        target = TARGETS[arguments.backend]()
    except NotHereError as why:
        print(f"{arguments.backend} cannot be tried: {why}", file=sys.stderr)
        return 1
    for name, value in facts(target):
        print(f"{name + ':':15}{value}")
    for limit in target.limits:
        print(f"{'note:':15}{limit}")
    print(flush=True)
    chosen = [c for c in CHECKS if not arguments.only or any(t in c.name for t in arguments.only)]
    bed, began = Bed(target), time.monotonic()
    outcomes: list[Outcome] = []
    try:
        for each in chosen:
            outcomes.append(outcome := attempt(bed, each))
            print(f"{outcome.word:8}{outcome.seconds:6.1f} s  {each.name}")
            print(textwrap.indent(outcome.text, " " * 18), flush=True)
    finally:
        bed.close()
    words = [outcome.word for outcome in outcomes]
    counted = ", ".join(f"{words.count(word)} {word}" for word in WORDS)
    print(f"\n{counted} in {time.monotonic() - began:.0f} s")
    if arguments.write:
        written = write(_seen(bed, outcomes), arguments.to)
        print(f"written: {', '.join(map(str, written))}")
    if arguments.compare:
        print(table(compare(target)))
    return int("FAILED" in words)


if __name__ == "__main__":
    raise SystemExit(main())
