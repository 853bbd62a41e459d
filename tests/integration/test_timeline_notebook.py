"""``--timeline`` and ``--profile`` in a real Jupyter kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .kernel import Notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook()
    notebook.run(f"%cd {tmp_path_factory.mktemp('traces')}")
    shown = notebook.run("%load_ext distsession\n%session start 2 --backend gloo")
    assert "2 ranks, gloo" in shown.result, shown
    yield notebook
    notebook.close()


@pytest.fixture
def folder(notebook: Notebook) -> Path:
    """Where the kernel is."""
    return Path(notebook.run("import os; print(os.getcwd())").stdout.strip())


def texts(shown: Sequence[dict[str, Any]]) -> str:
    """What was shown, as text."""
    return "\n".join(data["text/plain"] for data in shown)


SLOW = "import time\ntime.sleep(0.3 * rank)\nprint('here')\ndist.barrier()\n"


def test_a_picture_follows_the_cell(notebook: Notebook) -> None:
    shown = notebook.run(f"%%distributed --timeline\n{SLOW}rank")
    *output, data = shown.data
    assert "here" in texts(output)
    assert "[rank 1] 1" in texts(output)
    assert data["text/plain"].startswith("Rank 0 waited for rank 1: 0.")
    assert "in barrier #" in data["text/plain"]
    assert "line 5." in data["text/plain"].splitlines()[0]
    assert "<svg" in data["text/html"]
    assert data["text/plain"].splitlines()[0] in data["text/html"]
    again = notebook.run("from distsession import current_session\ncurrent_session().timeline()")
    assert again.result == data["text/plain"]


def test_a_picture_follows_a_cell_that_fails(notebook: Notebook) -> None:
    shown = notebook.run(f"%%distributed --timeline\n{SLOW}1 / (1 - rank)")
    assert "ZeroDivisionError on rank 1" in shown.error
    assert "Rank 1 ended with ZeroDivisionError" in shown.result
    shown = notebook.run("%%distributed --timeline --timeout 0.5\nimport time; time.sleep(60)")
    assert shown.ename == "RunTimeoutError"
    assert "called no collective" in shown.result


def test_a_cell_that_did_not_run_shows_no_other_picture(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed --timeline --push missing\n1")
    assert "Nothing was run" in shown.error
    assert not shown.data


def test_pushes_and_pulls_are_in_the_picture(notebook: Notebook) -> None:
    notebook.run("import torch\nw = torch.ones(1000)")
    shown = notebook.run("%%distributed --timeline --push w --pull v\nv = w + 1")
    assert "push on rank 0" in shown.data[-1]["text/html"]
    assert "pull on rank 1" in shown.data[-1]["text/html"]


def test_a_profile_is_written_beside_the_notebook(notebook: Notebook, folder: Path) -> None:
    shown = notebook.run(f"%%distributed --profile\n{SLOW}")
    *output, data = shown.data
    line = data["text/plain"]
    assert "here" in texts(output)
    assert "profiler" not in texts(output)  # it would write its own steps
    assert line.startswith("wrote trace-In")
    assert "torch's profile of ranks 0-1" in line
    (written,) = folder.glob("trace-In*.json")
    events = json.loads(written.read_text())["traceEvents"]
    assert {e["pid"] for e in events if e.get("cat") == "cpu_op"} == {0, 1}
    assert {e["pid"] for e in events if e.get("cat") == "collective"} == {0, 1}


def test_a_profile_can_be_of_some_ranks_and_go_elsewhere(notebook: Notebook, folder: Path) -> None:
    code = "torch.ones(4) + 1"
    shown = notebook.run(f"%%distributed --timeline --profile 1 --profile-to mine.json\n{code}")
    assert "<svg" in shown.data[-2]["text/html"]
    assert "wrote mine.json" in shown.result
    events = json.loads((folder / "mine.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events if e.get("cat") == "cpu_op"} == {1}
    shown = notebook.run(f"%%distributed 0 --profile 1\n{code}")
    assert "the cell does not run on rank 1" in shown.error
    shown = notebook.run(f"%%distributed --profile-to no/such/file.json\n{code}")
    assert "no such folder" in shown.error
