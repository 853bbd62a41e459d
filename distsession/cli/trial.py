"""Trying it: a session, and a notebook's kernel with one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distsession.cli.finding import Finding
from distsession.cli.packages import install_command
from distsession.errors import DOCTOR_REMEDY, DistsessionError, OptionsError
from distsession.ranks import RankInfo

__all__ = ["Cell", "notebook", "session"]

KERNEL_START_S = 60.0
CELL_S = 60.0
"""Time that each step of the notebook's trial has, on the slowest of machines."""
KERNEL_END_S = 5.0


@dataclass(frozen=True)
class Cell:
    """A cell of the notebook's trial.

    Attributes:
        what: The part that it tries.
        shows: What has to be seen under it.
    """

    what: str
    source: str
    shows: str = ""


PANEL = "import distsession.notebook.comms\nsession = %session\nsession.show_config()"
WIDGETS = "application/vnd.jupyter.widget-view+json"

CELLS = (
    Cell("%load_ext distsession", "%load_ext distsession"),
    Cell("%session start", "%session start 2 --backend gloo"),
    Cell("%%distributed", "%%distributed\ndist.barrier()\nprint(f'rank {rank} of 2')", "of 2"),
    Cell("panel", PANEL, WIDGETS),
    Cell("%%px", "%%px\nprint(f'engine {rank} of 2')", "of 2"),
    Cell("%session close", "%session close"),
)


def session(options: Mapping[str, Any]) -> Iterator[Finding]:
    """Start a session as the user would, and run something on it."""
    try:
        from distsession.session import Session
    except ImportError as error:
        yield Finding("session", str(error), "install what is missing above", fatal=True)
        return
    began = time.perf_counter()
    try:
        with Session(**options) as trial:
            yield from _ranks(trial.infos)
            started = time.perf_counter() - began
            trial.execute("dist.barrier()", timeout=60)
            total = trial.evaluate("(lambda t: (dist.all_reduce(t), t.item())[1])"
                                   "(torch.ones((), device=device))")  # fmt: skip
            right = all(value == len(trial.ranks) for value in total.values())
            mend = "" if right else f"an all_reduce of ones gave {dict(total)}"
            yield Finding("all_reduce", f"{'right' if right else 'wrong'}, start {started:.1f} s",
                          mend, fatal=not right)  # fmt: skip
    except DistsessionError as error:
        yield _no_session(error)


def _no_session(error: DistsessionError) -> Finding:
    remedy = "" if error.remedy == DOCTOR_REMEDY else error.remedy
    error.remedy = ""
    what, _, details = str(error).partition("\n")
    if isinstance(error, OptionsError):
        remedy = remedy or "try other options: `distsession doctor --help` has them all"
    mend = remedy or "mend what fails above first; if nothing does, report this with all the lines"
    return Finding("session", f"failed: {what}", mend, fatal=True, details=details)


def _ranks(infos: Sequence[RankInfo]) -> Iterator[Finding]:
    from distsession.display import render

    yield Finding("backend", infos[0].backend_text)
    if infos[0].nodes > 1:
        counts = render.ranks_per_node(infos)
        text = f"{counts[0]} rank{'s' * (counts[0] > 1)} on each"
        if len(counts) > 1:
            text = f"with {', '.join(map(str, counts))} ranks"
        yield Finding("nodes", f"{infos[0].nodes}, {text}")
    for rank, *device in render.device_rows(infos):
        yield Finding(f"rank {rank}", " ".join(device))


def notebook(
    cells: Sequence[Cell] = CELLS, *, cell_s: float = CELL_S, python: str = sys.executable
) -> Iterator[Finding]:
    """Start a notebook's kernel with this Python, and run cells in it."""
    try:
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file
    except ImportError as error:
        yield Finding("notebook's kernel", str(error), "install what is missing above", fatal=True)
        return
    with tempfile.TemporaryDirectory(prefix="distsession-doctor-") as folder:
        path, _ = write_connection_file(os.path.join(folder, "kernel.json"))
        # What the environment says of sessions is for the user's own, and may not fit this one.
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DISTSESSION_")}
        with open(os.path.join(folder, "log"), "w+b") as log:
            kernel = subprocess.Popen(
                [python, "-m", "ipykernel_launcher", "-f", path],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            client = BlockingKernelClient(connection_file=path)
            try:
                client.load_connection_file()
                client.start_channels()
                problem = _wait_until_ready(client, kernel)
                if problem:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().splitlines()
                    yield _failed("notebook's kernel", problem, said[-1] if said else "")
                else:
                    yield from _run(client, cells, cell_s)
            finally:
                client.shutdown()
                _end(kernel)
                client.stop_channels()


def _wait_until_ready(client: Any, kernel: subprocess.Popen[bytes]) -> str:
    """Why the kernel does not answer; empty once it does."""
    deadline = time.monotonic() + KERNEL_START_S
    while time.monotonic() < deadline:
        try:
            client.wait_for_ready(timeout=1)
        except RuntimeError:
            if kernel.poll() is not None:
                return f"ended with exit code {kernel.returncode} as it started"
        else:
            return ""
    return f"did not answer within {KERNEL_START_S:.0f} s"


def _run(client: Any, cells: Sequence[Cell], cell_s: float) -> Iterator[Finding]:
    began = time.perf_counter()
    for cell in cells:
        shown: list[str] = []
        try:
            reply = client.execute_interactive(
                cell.source,
                allow_stdin=True,  # as where somebody looks on, so there are widgets
                stdin_hook=lambda message: client.input(""),
                timeout=cell_s,
                output_hook=lambda message, shown=shown: shown.append(_text(message)),
            )["content"]
        except TimeoutError:
            yield _failed(cell.what, f"did not end within {cell_s:.0f} s")
            return
        text = "".join(shown)
        if reply["status"] != "ok":
            error = f"{reply.get('ename', 'error')}: {reply.get('evalue', '')}"
            yield _failed(cell.what, "failed", error.splitlines()[0])
            return
        if cell.shows not in text:
            said = text.strip().splitlines()
            yield _failed(cell.what, "shows nothing of its output", said[-1] if said else "")
            return
    what = ", ".join(cell.what for cell in cells)
    yield Finding("notebook's kernel", f"{what}: {time.perf_counter() - began:.1f} s")


def _text(message: Mapping[str, Any]) -> str:
    """What a front end would show of it."""
    content = message["content"]
    if message["msg_type"] == "stream":
        return str(content["text"])
    data = content.get("data", {})
    return "\n".join(["", *(kind for kind in data if kind == WIDGETS), data.get("text/plain", "")])


def _failed(what: str, how: str, said: str = "") -> Finding:
    mend = (
        "in a notebook this part does not work. If nothing above says why, take the newest of "
        "what makes a notebook: "
        + install_command("-U", "ipykernel", "ipython", "ipywidgets", "ipyparallel")
    )
    return Finding(what, f"{how}: {said}" if said else how, mend, fatal=True)


def _end(kernel: subprocess.Popen[bytes]) -> None:
    """Wait for the kernel, which was told to end. If it does not, its session ends without it."""
    for end in (kernel.terminate, kernel.kill):
        try:
            kernel.wait(KERNEL_END_S)
        except subprocess.TimeoutExpired:
            end()
    kernel.wait()
