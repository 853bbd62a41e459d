"""``%session output`` in a real Jupyter kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .kernel import Notebook

MUCH = """\
%%distributed
import os, sys
from IPython.display import HTML, display
for number in range(1000):
    print("line", number)
display(HTML(f"<b>{rank}</b>"))
os.system("echo from a shell")
print("differs", rank, file=sys.stderr)
rank * 2"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    made.run("import distsession\n%load_ext distsession\nsession = distsession.Session(2)")
    yield made
    made.run("session.close()")
    made.close()


def shown_again(notebook: Notebook, arguments: str = "") -> str:
    again = notebook.run(f"%session output {arguments}")
    assert again.error == ""
    return re.sub(r"\x1b\[[\d;]*m", "", again.plain)


def test_a_cell_is_shown_again_in_full_and_folded_as_at_first(notebook: Notebook) -> None:
    first = notebook.run(MUCH)
    assert "line 500" not in first.plain
    again = shown_again(notebook).splitlines()
    lines = [f"line {number}" for number in range(1000)]
    assert again[:1001] == ["[ranks 0-1]", *lines]
    assert again[1001:-1] == first.plain.splitlines()[-len(again[1001:-1]) :]
    assert again[-1].startswith("This was the output of In[2], which began at ")
    only = shown_again(notebook, "In 2 --rank 1")
    assert "line 999" in only
    assert "differs 1" in only
    assert "[rank 0]" not in only


def test_a_cell_that_failed_shows_its_error_again(notebook: Notebook) -> None:
    cell = notebook.run("%%distributed\nprint('before')\nif rank: raise ValueError('no')")
    assert cell.ename == "RunError"
    again = shown_again(notebook)
    assert again.startswith("[ranks 0-1] before\n")
    assert "ValueError on rank 1" in again


def test_calls_of_a_cell_are_shown_one_after_the_other(notebook: Notebook) -> None:
    notebook.run("for i in range(3):\n    session.run(lambda: print('call', i))")
    assert shown_again(notebook).splitlines()[:3] == [f"[ranks 0-1] call {i}" for i in range(3)]


def test_what_a_rank_wrote_is_there_after_its_restart(notebook: Notebook) -> None:
    notebook.run("%%distributed 1\nprint('of before')")
    notebook.run("%session restart 1")
    assert shown_again(notebook).startswith("[rank 1] of before\n")
    wrong = notebook.run("%session output --rank 0")
    assert "ran on rank 1, not on rank 0" in wrong.error
