"""What ``%%distributed`` costs in a real kernel: a cell with no work, and many lines of output."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Arm, Figure, Row, Target, take_turns
from tests.benchmarks.processes import snapshot

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0
RANKS = 4
LINES = 100_000
MARK = "CELL TIMES "

PREPARE = """
import json, time
from distsession import Session
from tests.benchmarks.bench import settle
shell = get_ipython()
shell.run_line_magic("load_ext", "distsession")
shell.register_magic_function(lambda line, cell: None, "cell", "nothing")
session = Session(4)
settle(session)
"""

MEASURE = """
def cell(name):
    began = time.perf_counter()
    shell.run_cell_magic(name, "", "pass")
    return 1e3 * (time.perf_counter() - began)

cell("distributed"), cell("nothing")
times = [(cell("distributed"), cell("nothing")) for _ in range({count})]
print({mark!r} + json.dumps(times))
"""


def _execute(client: Any, code: str) -> str:
    """Run code in the kernel; gives what it printed."""
    printed: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=TIMEOUT, output_hook=hook)["content"]
    if reply["status"] != "ok":
        raise RuntimeError(f"in the kernel: {reply.get('ename')}: {reply.get('evalue')}")
    return "".join(printed)


@contextlib.contextmanager
def _kernel(bench: Bench) -> Iterator[Any]:
    """The client of a kernel with a session of four ranks."""
    from jupyter_client.manager import start_new_kernel

    before = snapshot()
    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(ROOT), extra_arguments=["--log-level=ERROR"]
    )
    try:
        _execute(client, PREPARE)
        yield client
        _execute(client, "session.close()")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        bench.sweep(OURS, before)


def lines(bench: Bench) -> Iterator[Row]:
    """The same 100,000 lines: from four ranks, from ``%%px``'s engines, and from a local cell."""
    sizes: dict[str, int] = {}

    with _kernel(bench) as client:

        def arm(subject: str, head: str, count: int) -> Arm:
            code = f"{head}for number in range({count}): print('line', number, 'of many')"

            def run() -> list[float]:
                began = time.perf_counter()
                sizes[subject] = _shown_size(client, code)
                return [time.perf_counter() - began]

            return Arm(subject, run)

        local = arm("local cell", "", LINES)
        ours = arm(OURS, "%%distributed\n", LINES // RANKS)
        px = arm("ipyparallel's %%px", "%%px\n", LINES // RANKS)
        take_turns([local, ours, px], bench.repeats)
    name = f"{LINES:,} lines in a kernel, from {RANKS} ranks together"
    yield local.row(name, "s")
    yield ours.row(name, "s", local, target=Target(2))
    yield px.row(name, "s", local)
    for subject, size in sizes.items():
        yield Row("what of these is in the notebook's file", subject, Figure((size / 1e3,)), "kB")


def _shown_size(client: Any, code: str) -> int:
    """Run a cell; gives the characters of all output that a notebook's file would keep."""
    kept: dict[str, int] = {}

    def hook(message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            kept["text"] = kept.get("text", 0) + len(content["text"])
        elif "data" in content:
            name = content.get("transient", {}).get("display_id") or f"{len(kept)}"
            kept[name] = len(json.dumps(content["data"]))

    reply = client.execute_interactive(code, timeout=TIMEOUT, output_hook=hook)["content"]
    if reply["status"] != "ok":
        raise RuntimeError(f"in the kernel: {reply.get('ename')}: {reply.get('evalue')}")
    return sum(kept.values())


def cell(bench: Bench) -> Iterator[Row]:
    """A ``%%distributed`` cell with no work, in turns with a local magic with none."""
    with _kernel(bench) as client:
        printed = _execute(client, MEASURE.format(count=200, mark=MARK))
    line = next(line for line in printed.splitlines() if line.startswith(MARK))
    ours, local = zip(*json.loads(line.removeprefix(MARK)), strict=True)
    above = tuple(a - b for a, b in zip(ours, local, strict=True))
    name = "cell with no work in a kernel, N=4"
    yield Row(name, "magic that does nothing", Figure(local), "ms")
    yield Row(name, f"{OURS}, above that", Figure(above), "ms", target=Target(3))
