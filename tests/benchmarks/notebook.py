"""What ``%%distributed`` costs in a real kernel, above a magic that does nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Bench
from tests.benchmarks.figures import OURS, Figure, Row, Target
from tests.benchmarks.processes import snapshot

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0
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


def cell(bench: Bench) -> Iterator[Row]:
    """A ``%%distributed`` cell with no work, in turns with a local magic with none."""
    from jupyter_client.manager import start_new_kernel

    before = snapshot()
    manager, client = start_new_kernel(
        kernel_name="python3", cwd=str(ROOT), extra_arguments=["--log-level=ERROR"]
    )
    try:
        _execute(client, PREPARE)
        printed = _execute(client, MEASURE.format(count=200, mark=MARK))
        _execute(client, "session.close()")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        bench.sweep(OURS, before)
    line = next(line for line in printed.splitlines() if line.startswith(MARK))
    ours, local = zip(*json.loads(line.removeprefix(MARK)), strict=True)
    above = tuple(a - b for a, b in zip(ours, local, strict=True))
    name = "cell with no work in a kernel, N=4"
    yield Row(name, "magic that does nothing", Figure(local), "ms")
    yield Row(name, f"{OURS}, above that", Figure(above), "ms", target=Target(3))
