"""A notebook that somebody else has run: JupyterLab does not trust it and has no widgets for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.lab import Notebook, boxes, write_notebook
from tests.integration.kernel import execute_notebook

Open = Callable[..., Notebook]

CELLS = [
    'import distsession\n%load_ext distsession\nsession = distsession.Session(2, backend="gloo")',
    "session",
    "%%distributed --timeline\nimport time\nif rank == 0: time.sleep(0.5)\nprint('of', rank)\n"
    "dist.barrier()",
    "session.timeline()",
    "%%distributed\nimport matplotlib.pyplot as plt\nplt.plot([0, rank]); plt.show()",
    "session.close()",
]


@pytest.fixture(scope="module")
def written() -> Any:
    notebook = write_notebook(CELLS)
    execute_notebook(notebook, timeout=100)
    for cell in notebook.cells:
        cell.execution_count = None  # so that it is seen which have been run again
    return notebook


def test_the_panel_is_a_table(open_notebook: Open, written: Any) -> None:
    notebook = open_notebook(written)
    rows = notebook.output(1).get_by_role("row")
    expect(rows.filter(has_text="idle", has_not_text="keep_idle")).to_have_count(2)
    expect(rows.filter(has_text="world size")).to_have_text(re.compile(r"world size\s*2"))
    expect(notebook.output(1).get_by_role("button")).to_have_count(0)
    notebook.screenshot("untrusted-panel", notebook.output(1))


def test_a_timeline_says_how_to_see_its_picture(open_notebook: Open, written: Any) -> None:
    notebook = open_notebook(written)
    notebook.expect(2, re.compile(r"rank 0\s+of 0\s+rank 1\s+of 1"))
    notebook.expect(2, "once the notebook is trusted")
    shown = notebook.text(2).partition("Rank 1 waited for rank 0")[2]
    assert "once the notebook is trusted" in shown
    assert "collective runs" not in shown  # the legend of the picture
    notebook.screenshot("untrusted-timeline", notebook.output(2))
    notebook.run(0)
    notebook.run(2)  # what this shows is trusted
    notebook.expect(2, "collective runs")
    assert "once the notebook is trusted" not in notebook.text(2)
    notebook.expect(3, "once the notebook is trusted")
    assert "collective runs" not in notebook.text(3)


def test_figures_stand_side_by_side(open_notebook: Open, written: Any) -> None:
    notebook = open_notebook(written)
    left, right = boxes(notebook.output(4).locator("figure"), 2)
    assert right["y"] == left["y"]
    assert right["x"] >= left["x"] + left["width"]
    notebook.screenshot("untrusted-figures", notebook.output(4))
