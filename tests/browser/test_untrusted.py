"""A notebook that somebody else has run: JupyterLab does not trust it and has no widgets for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nbclient import NotebookClient

from tests.browser.lab import Notebook, write_notebook

CELLS = [
    'import distsession\n%load_ext distsession\nsession = distsession.Session(2, backend="gloo")',
    "session",
    "%%distributed --timeline\nprint('alike')\nprint('of', rank)\nt = torch.ones(4)\n"
    "dist.all_reduce(t)\nt",
    "session.timeline()",
    "%%distributed\nimport matplotlib.pyplot as plt\nplt.plot([0, rank]); plt.show()\n"
    "print('drawn by', rank)",
    "%%distributed\nif rank == 1:\n    1 / 0",
    "%distributed --diff rank",
    "session.close()",
]


@pytest.fixture(scope="module")
def written() -> Iterator[Any]:
    notebook = write_notebook(CELLS)
    NotebookClient(notebook, timeout=100, allow_errors=True).execute()
    return notebook


def test_what_was_shown_can_be_read(open_notebook: Callable[..., Notebook], written: Any) -> None:
    notebook = open_notebook(written)
    for n in range(8):
        print("-----", n)
        print(notebook.text(n))
    notebook.screenshot("untrusted")
    for n in range(8):
        notebook.screenshot(f"untrusted-{n}", notebook.cell(n))
