"""Programs after public bug reports, and whether the first line says who, what and where.

A broken one ends by itself, or is stopped once its ranks get no further. The first line of what is
shown then names a rank at fault, the operation or the error, and the line of the cell. A right one,
of which many look like a broken one, shows no error and no remark.

``make soak`` runs all of them; ``tests/integration/test_first_lines.py`` runs every third one::

    python -m tests.integration.first_lines

That the right ones are right shows torchrun, with the plain gloo of torch::

    torchrun --nproc-per-node 4 -m tests.integration.first_lines --plain
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import TypeVar

from distsession import Session
from distsession.errors import DistsessionError
from tests.integration.broken_program import Program
from tests.integration.broken_programs import BROKEN
from tests.integration.conftest import Recorder
from tests.integration.right_programs import RIGHT
from tests.until import Press

__all__ = ["alarm_of", "begin", "every_third", "problem_of", "set_up"]

LABEL = "In[7]"
RANKS = 4
LIMIT_S = 60
SLOW_S = 1.5
V = TypeVar("V")

SETUP = """
import asyncio, contextlib, functools, os, queue, random, signal, sys, tempfile, threading, time
import torch.distributed._functional_collectives as functional
import torch.utils.data as data
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
odd = rank == 2
some = torch.ones(4)
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
other = dist.new_group([0, 1, 2, 3])
kept = 40 + rank
def model(): return DDP(nn.Linear(4, 4))
x = torch.ones(2, 4)
"""


def every_third(programs: Mapping[str, V]) -> dict[str, V]:
    """A part of them that is of all kinds."""
    return dict(islice(programs.items(), 0, None, 3))


def begin() -> Session:
    """A session that the programs can run in."""
    return Session(RANKS, threads=1, output=Recorder(), hang_grace=0.3)


def set_up(session: Session) -> None:
    """What the programs use; also after ranks have been replaced."""
    session.execute(SETUP, timeout=LIMIT_S)


def first_line(session: Session, program: Program) -> str:
    """What is shown first of a broken program; empty if nothing is."""
    output = session.output()
    assert isinstance(output, Recorder)
    output.clear()
    output.remarks.clear()
    try:
        with _stop(session) if program.is_stopped else contextmanager(_nothing)():
            session.execute(program.code, label=LABEL, timeout=LIMIT_S)
    except (DistsessionError, KeyboardInterrupt) as error:
        shown: list[str] = error._render_traceback_()  # type: ignore[union-attr]
        return "" if program.is_caught else "\n".join(shown).splitlines()[0]
    written = [text for rank in session.ranks if (text := output.text(rank, "stderr"))]
    return next((text for text in (*output.remarks, *written) if program.is_caught), "")


def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _stop(session: Session) -> Iterator[None]:
    with Press(session, session.interrupt):
        yield


def problem_of(session: Session, program: Program) -> str:
    """What its first line lacks; empty if nothing."""
    line = first_line(session, program)
    if line.startswith("RunTimeoutError"):
        return f"no end by itself: {line}"
    lines = program.line if isinstance(program.line, tuple) else (program.line,)
    places = "|".join(map(str, lines))
    wanted = {
        "the rank": rf"{program.who}(?!\d)",
        "what it did": program.what,
        "the line": rf"(In\[7\],?|\band|\w\.py) line ({places})(?!\d)",
    }
    lacks = [name for name, text in wanted.items() if not re.search(text, line)]
    return f"no {' and no '.join(lacks)} in: {line}" if lacks else after(session)


def alarm_of(session: Session, code: str) -> str:
    """What is shown of a right program, of which nothing should be."""
    output = session.output()
    assert isinstance(output, Recorder)
    output.remarks.clear()
    try:
        session.execute(code, label=LABEL, timeout=LIMIT_S)
    except (DistsessionError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    told = [text for text in output.remarks if text.startswith("Collective")]
    return told[0] if told else after(session)


def after(session: Session) -> str:
    """Whether the session is as it was; if not, what is wrong."""
    session.execute(
        "some = torch.ones(4)\nprobe = torch.ones(2)\ndist.all_reduce(probe)", timeout=LIMIT_S
    )
    found = session.evaluate("(kept, probe.tolist())")
    right = {rank: (40 + rank, [float(RANKS)] * 2) for rank in session.ranks}
    return "" if dict(found) == right else f"the next cell found {dict(found)}"


def score(
    session: Session, programs: Mapping[str, V], problem: Callable[[Session, V], str]
) -> list[str]:
    """Run programs; the names of those that have a problem, which is printed."""
    failed = []
    for name, program in programs.items():
        began = time.monotonic()
        if text := problem(session, program):
            failed.append(name)
            print(f"{name} ({time.monotonic() - began:.1f} s): {text}", flush=True)
            session.restart()
            set_up(session)
    print(f"{len(programs) - len(failed)} of {len(programs)} are as they should be", flush=True)
    return failed


def run_plain(programs: Mapping[str, str]) -> None:
    """Run right programs on this rank of torchrun; the first that fails, or hangs, ends it."""
    import torch
    import torch.distributed as dist

    from distsession.engine.namespace import rank_names

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    namespace = rank_names(rank, rank, RANKS, torch.device("cpu")) | {"__name__": "__main__"}
    for name, code in {"SETUP": SETUP, **programs, "the end": "dist.barrier()"}.items():
        if rank == 0:
            print(name, flush=True)
        began = time.monotonic()
        # Only a code object tells whether there is an await in it.
        cell = compile(code, f"<{name}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        awaits = eval(cell, namespace)
        if inspect.iscoroutine(awaits):
            asyncio.run(awaits)
        namespace["some"], probe = torch.ones(4), torch.ones(2)
        dist.all_reduce(probe)
        assert probe.tolist() == [float(RANKS)] * 2, name
        if rank == 0 and (took := time.monotonic() - began) > SLOW_S:
            print(f"  took {took:.1f} s", flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of programs; by default all")
    parser.add_argument("--plain", action="store_true", help="the right ones, under torchrun")
    arguments = parser.parse_args()
    names = arguments.names
    if arguments.plain:
        run_plain({name: p for name, p in RIGHT.items() if not names or name in names})
        return 0
    with begin() as session:
        set_up(session)
        broken = {name: p for name, p in BROKEN.items() if not names or name in names}
        right = {name: p for name, p in RIGHT.items() if not names or name in names}
        failed = score(session, broken, problem_of) + score(session, right, alarm_of)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
