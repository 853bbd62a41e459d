"""A Jupyter kernel, and cells run in it as a notebook would."""

from __future__ import annotations

import functools
import queue
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from traitlets.config import Config


def start_kernel(folder: Path, **options: Any) -> tuple[KernelManager, BlockingKernelClient]:
    """A kernel that listens on sockets in a folder, and its client.

    On ports it would fail now and then: jupyter_client looks for five free ones and lets go of
    them, and the kernel listens there a second later. Any connection made meanwhile, of which a
    suite that starts sessions makes thousands, may have got one; ipykernel 7 then hangs.

    Args:
        folder: Empty. A socket's path has at most 107 characters.
        options: As for ``KernelManager.start_kernel``.
    """
    manager = KernelManager(transport="ipc", ip=str(folder / "kernel"))
    manager.start_kernel(**options)
    client = manager.client()
    # After an error a kernel drops for a moment what comes next, unless the cell said otherwise.
    client.execute = functools.partial(client.execute, stop_on_error=False)
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
    except RuntimeError:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        raise
    return manager, client


def execute_notebook(notebook: Any, **options: Any) -> None:
    """Execute a notebook in place with nbclient, in a kernel that listens on no port.

    Args:
        notebook: One of nbformat's; keeps its outputs.
        options: As for ``NotebookClient``.
    """
    from nbclient import NotebookClient  # which other versions are tried without

    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        config = Config(ConnectionFileMixin={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(notebook, kernel_name="python3", config=config, **options).execute()


@dataclass
class Shown:
    """What a notebook would show under a cell."""

    text: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    data: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    colored: str = ""
    ename: str = ""
    prompts: list[str] = field(default_factory=list)
    order: list[str | int] = field(default_factory=list)
    """Text as it was written, and the numbers of displays."""

    @property
    def transcript(self) -> str:
        """All that stands under the cell as text, from top to bottom."""
        parts = [
            f"{self.data[part].get('text/plain', '')}\n" if isinstance(part, int) else part
            for part in self.order
        ]
        return "".join([*parts, self.error])

    @property
    def stdout(self) -> str:
        return self.text["stdout"]

    @property
    def plain(self) -> str:
        """What the displays say as text, without those that are empty."""
        return "\n".join(text for d in self.data if (text := str(d.get("text/plain", ""))))

    @property
    def result(self) -> str:
        return str(self.data[-1]["text/plain"])


Answer = str | Callable[[], str | None]
"""What is typed into the box; or what is done instead, which may give what is typed then."""


class Notebook:
    """A kernel and the cells run in it."""

    def __init__(self, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-")
        try:
            self.manager, self.client = start_kernel(Path(self._folder.name), **options)
        except BaseException:
            self._folder.cleanup()
            raise

    def run(self, code: str, timeout: float = 60, answers: Sequence[Answer] = ()) -> Shown:
        return self.collect(self.client.execute(code), timeout, answers)

    def collect(
        self,
        request: str,
        timeout: float = 60,
        answers: Sequence[Answer] = (),
        stop_at: Sequence[str] = (),
    ) -> Shown:
        """What a cell shows until it has ended; asks are answered in turn.

        Args:
            request: The cell.
            timeout: Seconds.
            answers: To what is asked.
            stop_at: Stop is pressed, once, as soon as the cell shows all of this.
        """
        shown, displays, left = Shown(), {}, deque(answers)
        deadline = time.monotonic() + timeout
        while True:
            if stop_at and all(text in shown.plain for text in stop_at):
                stop_at = ()
                self.manager.interrupt_kernel()
            self._answer(shown, left)
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                assert time.monotonic() < deadline, f"it does not end: {shown}"
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.text[content["name"]] += content["text"]
                shown.order.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                shown.order.append(len(shown.data))
                shown.data.append(content["data"])
                display_id = content.get("transient", {}).get("display_id")
                if display_id:
                    displays[display_id] = len(shown.data) - 1
            elif kind == "update_display_data":
                shown.data[displays[content["transient"]["display_id"]]] = content["data"]
            elif kind == "error":
                shown.ename = content["ename"]
                shown.colored = "\n".join(content["traceback"])
                shown.error = re.sub(r"\x1b\[[\d;]*m", "", shown.colored)
            elif kind == "status" and content["execution_state"] == "idle":
                return shown

    def _answer(self, shown: Shown, answers: deque[Answer]) -> None:
        try:
            question = self.client.get_stdin_msg(timeout=0)["content"]
        except queue.Empty:
            return
        shown.prompts.append(question["prompt"])
        assert answers, f"nothing is left to answer: {shown}"
        answer = answers.popleft()
        text = answer if isinstance(answer, str) else answer()
        if text is not None:
            self.client.input(text)

    def updates(self, request: str, timeout: float = 60) -> list[str]:
        """All texts that the displays of a cell had, one after the other."""
        texts = []
        deadline = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] in ("display_data", "update_display_data"):
                texts.append(str(content["data"]["text/plain"]))
            elif content.get("execution_state") == "idle":
                return texts

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self._folder.cleanup()
