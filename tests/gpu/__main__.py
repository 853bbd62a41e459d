"""Try everything and print a report to paste: ``python -m tests.gpu``.

The exit status is 0 where all checks have held, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

import torch

import distsession
from distsession.engine.host_info import nccl_version
from tests.gpu.checks import CHECKS, Bed, attempt
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--backend", choices=TARGETS, default="nccl")
    parser.add_argument("--only", action="append", metavar="TEXT", help="checks that say this")
    arguments = parser.parse_args(argv)
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
    bed, began, counts = (
        Bed(target),
        time.monotonic(),
        dict.fromkeys(("held", "FAILED", "skipped"), 0),
    )
    try:
        for each in chosen:
            outcome = attempt(bed, each)
            counts[outcome.word] += 1
            print(f"{outcome.word:8}{outcome.seconds:6.1f} s  {each.name}")
            print(textwrap.indent(outcome.text, " " * 18), flush=True)
    finally:
        bed.close()
    counted = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"\n{counted} in {time.monotonic() - began:.0f} s")
    return int(counts["FAILED"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
