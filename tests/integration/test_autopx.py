"""``%session auto`` in a real Jupyter kernel."""

from __future__ import annotations

import pytest

from .kernel import Notebook

SENT = "on ranks 0-1 (%session auto is on; %%local keeps a cell here)\n"


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    shown = notebook.run("%load_ext distsession\n%session start 2 --backend gloo")
    assert "2 ranks, gloo" in shown.result, shown
    yield notebook
    notebook.close()


def test_plain_cells_go_to_the_ranks_while_it_is_on(notebook: Notebook) -> None:
    assert notebook.run("where = 'notebook'\nwhere").result == "'notebook'"
    assert "auto is on" in notebook.run("%session auto on").result
    assert notebook.run("where = rank + 10").stdout == SENT
    shown = notebook.run("where")
    assert (shown.stdout, shown.plain) == (SENT, "[rank 0] 10\n[rank 1] 11")
    assert "auto is on" in notebook.run("%session").result
    assert notebook.run("%distributed where").result == "[rank 0] 10\n[rank 1] 11"
    assert notebook.run("%%distributed 1\nwhere").result == "[rank 1] 11"
    assert notebook.run("%%local\nwhere").result == "'notebook'"
    assert notebook.run("%%local\n1 / 0").ename == "ZeroDivisionError"
    # what a cell magic runs stays here
    notebook.run("%%time\nwhere = 'timed'")
    assert notebook.run("%%local\nwhere").result == "'timed'"
    assert notebook.run("%%local\nimport asyncio\nawait asyncio.sleep(0)\n3").result == "3"


def test_line_numbers_are_those_of_the_cell(notebook: Notebook) -> None:
    shown = notebook.run("a = 1\nb = a / 0")
    assert "---->   2 b = a / 0" in shown.error
    assert notebook.run("where").stdout.startswith(SENT)
    assert notebook.run("a +").ename
    assert notebook.run("where").stdout.startswith(SENT)


def test_completion_follows(notebook: Notebook) -> None:
    notebook.run("sent_there = 1")
    code = "sent_th"
    reply = notebook.client.complete(code, len(code), reply=True, timeout=60)["content"]
    assert reply["matches"] == ["sent_there"]
    shown = notebook.run("%%local\nget_ipython().check_complete('x = 1')[0]")
    assert shown.result == "'complete'"


def test_off_ends_it(notebook: Notebook) -> None:
    assert "auto is off" in notebook.run("%session auto off").result
    assert notebook.run("where").result == "'timed'"
    assert notebook.run("%%local\nwhere").result == "'timed'"
    assert "auto" not in notebook.run("%session").result


def test_closing_and_unloading_end_it(notebook: Notebook) -> None:
    notebook.run("%session auto on")
    assert "auto is off" in notebook.run("%session close").result
    assert notebook.run("where").result == "'timed'"
    assert "no session is open" in notebook.run("%session auto on").error
    assert "2 ranks" in notebook.run("%session start 2 --backend gloo").result
    notebook.run("%session auto on")
    assert not notebook.run("%unload_ext distsession").error
    assert notebook.run("where").result == "'timed'"
    assert notebook.run("%load_ext distsession\n%session auto").result.startswith("auto is off")
