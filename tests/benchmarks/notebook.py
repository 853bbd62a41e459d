"""What things cost in a real kernel: a cell with no work, many lines of output, the panel."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

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
session = Session({ranks}, **{options})
settle(session, is_registered={is_registered})
"""
LOOK_ON = """
from distsession import Session
shell = get_ipython()
shell.run_line_magic("load_ext", "distsession")
viewer = Session.view({name!r})
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

# On each rank.
REDUCE = """%%distributed
import time
def rate(count):
    tensor = torch.ones(4)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    return count / (time.perf_counter() - began)
"""
VIEWED_RANKS = 2
PANEL_SECONDS = 5.0
"""How long the ranks reduce, while the panel looks once a second."""
HIDE = """
import time, ipywidgets
ipywidgets.Widget.close_all()
time.sleep(1.5)
"""
IS_LIVE = """
import threading
print(any(thread.name == "distsession-panel" for thread in threading.enumerate()))
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
def _kernel(
    bench: Bench, ranks: int = RANKS, *, is_registered: bool = False, **options: Any
) -> Iterator[Any]:
    """The client of a kernel with a session."""
    from jupyter_client.manager import start_new_kernel

    before = snapshot()
    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(ROOT), extra_arguments=["--log-level=ERROR"]
    )
    try:
        fields = {"ranks": ranks, "options": options, "is_registered": is_registered}
        _execute(client, PREPARE.format(**fields))
        yield client
        _execute(client, "session.close()")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        bench.sweep(OURS, before)


@contextlib.contextmanager
def _second_kernel(name: str) -> Iterator[Any]:
    """The client of a kernel that looks on at a session."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(ROOT), extra_arguments=["--log-level=ERROR"]
    )
    try:
        _execute(client, LOOK_ON.format(name=name))
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def lines(bench: Bench) -> Iterator[Row]:
    """The same 100,000 lines: from four ranks, from ``%%px``'s engines, and from a local cell."""
    sizes: dict[str, int] = {}

    with _kernel(bench, is_registered=True) as client:

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


def panel(bench: Bench) -> Iterator[Row]:
    """How many small all_reduces a second a cell does, with the panel shown and without."""
    with _kernel(bench) as client:
        _execute(client, REDUCE)
        count = int(_rate(client, 2000) * PANEL_SECONDS)

        def measure(is_shown: bool) -> list[float]:
            _show_panel(client, "session", is_shown)
            return [_rate(client, count) / 1e3]

        without = Arm("without the panel", lambda: measure(False))
        shown = Arm(f"{OURS}, with the panel", lambda: measure(True))
        take_turns([without, shown], bench.repeats)
    name = f"small all_reduces in a cell, N={RANKS}"
    yield without.row(name, "1000/s")
    yield shown.row(name, "1000/s", without, target=Target(0.97, at_least=True))


def viewer(bench: Bench) -> Iterator[Row]:
    """How long a loop of all_reduces takes, beside a second notebook that shows the panel."""
    options = {"keep": 600, "name": "bench-looked-at"}
    with _kernel(bench, VIEWED_RANKS, **options) as owner, _second_kernel(options["name"]) as other:
        _execute(owner, REDUCE)
        count = int(_rate(owner, 2000) * PANEL_SECONDS)

        own = psutil.Process(int(_execute(other, "import os; print(os.getpid())")))
        used: list[float] = []

        def measure(is_shown: bool) -> list[float]:
            _show_panel(other, "viewer", is_shown)
            before, began = own.cpu_times(), time.perf_counter()
            rate = _rate(owner, count)
            after, seconds = own.cpu_times(), time.perf_counter() - began
            if is_shown:
                used.append(1e3 * (sum(after[:2]) - sum(before[:2])) / seconds)
            return [1e3 * count / rate]

        without = Arm("nobody looks on", lambda: measure(False))
        shown = Arm(f"{OURS}, a viewer's panel", lambda: measure(True))
        take_turns([without, shown], max(bench.repeats, 5))
    name = f"{count:,} small all_reduces, N={VIEWED_RANKS}"
    yield without.row(name, "ms")
    yield shown.row(name, "ms", without, target=Target(1.01))
    name = "processor time of the viewer meanwhile"
    yield Row(name, OURS, Figure(tuple(used)), "ms/s", target=Target(10))


def _rate(client: Any, count: int) -> float:
    """All_reduces a second."""
    code = f"value = session.evaluate('rate({count})')[0]\nprint({MARK!r} + str(value))"
    return float(_execute(client, code).partition(MARK)[2])


def _show_panel(client: Any, name: str, is_shown: bool) -> None:
    _execute(client, name if is_shown else HIDE)
    if ("True" in _execute(client, IS_LIVE)) != is_shown:
        raise RuntimeError("the panel is not live" if is_shown else "the panel is live")
