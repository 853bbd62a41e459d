"""The code blocks of the documentation run, and what is shown below them is what comes.

Each page's blocks run in order, in one kernel and one folder. ``tests/pages.py`` says what a page's
comments do; where another module of tests runs a page, :data:`tests.pages.ELSEWHERE` names it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distsession.cluster.end_kept import end_session
from distsession.cluster.kept import kept_sessions
from tests.pages import ELSEWHERE, PAGES, ROOT, Block, Step, blocks, is_as_shown, steps

from .kernel import Notebook, Shown

HERE = [page for page in PAGES if page.name not in ELSEWHERE and blocks(page.read_text())]
LIMIT_S = 200.0
"""For one block; some start a process that imports torch for each rank."""

pytestmark = pytest.mark.timeout(600)

_LABEL = re.compile(r"^\[(ranks? [\d,-]+)\]\s", re.MULTILINE)
_PROGRESS = re.compile(r"^(took|ranks? [\d,-]+:) [\d.]+ s\n", re.MULTILINE)


class Reader:
    """Does what a page has its reader do.

    Args:
        folder: Where files are written and programs run.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._notebook: Notebook | None = None

    def follow(self, step: Step) -> None:
        """Run a block; what is shown below it has to come."""
        block = step.block
        if block.is_marked:
            return
        if block.file:
            (self._folder / block.file).write_text(block.text)
        elif block.language == "shell":
            self._compare(step, self._command(block.text))
        else:
            self._cell(step)

    def _cell(self, step: Step) -> None:
        self._notebook = self._notebook or Notebook(cwd=str(self._folder))
        shown = self._notebook.run(step.block.text, timeout=LIMIT_S, answers=step.block.typed)
        assert step.shown or not shown.error, _said(step.block, shown.error)
        if shown.prompts and step.shown:
            self._compare_typed(step, shown)
        else:
            self._compare(step, _as_in_a_page(shown))

    def _command(self, text: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=self._folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _compare_typed(self, step: Step, shown: Shown) -> None:
        """Prompts come by another way than output, so their order among each other is not known."""
        assert step.shown is not None
        asked = [
            f"{prompt}{answer}"
            for prompt, answer in zip(shown.prompts, step.block.typed, strict=True)
        ]
        lines = step.shown.text.splitlines()
        assert [line for line in lines if line in asked] in (asked, [])
        rest = "\n".join(line for line in lines if line not in asked)
        came = _as_in_a_page(shown)
        assert is_as_shown(rest, came), _said(step.shown, came)

    def _compare(self, step: Step, came: str) -> None:
        if step.shown is not None:
            assert is_as_shown(step.shown.text, came), _said(step.shown, came)

    def close(self) -> None:
        if self._notebook is not None:
            self._notebook.close()
        for kept in kept_sessions():
            if os.path.dirname(kept.folder) == tempfile.gettempdir():
                end_session(kept, "the page has ended")


def _as_in_a_page(shown: Shown) -> str:
    """Its text. What is shown as HTML has the names of ranks beside it, not in brackets."""
    for data in shown.data:
        if "text/html" in data:
            text = _LABEL.sub(r"\1  ", str(data.get("text/plain", "")))
            data["text/plain"] = _PROGRESS.sub("", f"{text}\n").rstrip("\n")
    return shown.transcript


def _said(block: Block, came: str) -> str:
    return f"line {block.line} of the page has\n{block.text}\n--- but this came:\n{came}"


@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_a_page_does_what_it_shows(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        for step in steps(page.read_text()):
            reader.follow(step)
    finally:
        reader.close()
