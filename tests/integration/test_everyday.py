"""What people type in a notebook, day by day, in a real Jupyter kernel."""

from __future__ import annotations

import pytest

from .kernel import Notebook


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    shown = notebook.run(
        "%load_ext distsession\nfrom distsession import Session\n"
        "session = Session(2, backend='gloo')"
    )
    assert not shown.error, shown
    yield notebook
    notebook.close()


# --- results --------------------------------------------------------------------------------------


def test_a_call_that_returns_nothing_shows_nothing(notebook: Notebook) -> None:
    for code in (
        "session.run(lambda: None)",
        "%distributed None",
        "display(session.run(list.clear, []))",
    ):
        shown = notebook.run(code)
        assert (shown.plain, shown.error) == ("", ""), code
    shown = notebook.run("%distributed 5 if rank else None")
    assert shown.result == "[rank 0] None\n[rank 1] 5"
    assert notebook.run("r = session.run(lambda: None); repr(r)").result == ("'[ranks 0-1] None'")


def test_tables_of_the_ranks_stand_side_by_side(notebook: Notebook) -> None:
    shown = notebook.run(
        "class Frame:\n    def __repr__(self): return 'frame'\n"
        "    def _repr_html_(self): return f'<table id={self.of}></table>'\n"
        "def make():\n    frame = Frame(); frame.of = rank; return frame\nsession.run(make)"
    )
    [data] = shown.data
    assert data["text/plain"] == "[ranks 0-1] frame"
    assert data["text/html"].count("<figure") == 2
    assert "<table id=1></table>" in data["text/html"]


def test_ranks_are_never_taken_for_values(notebook: Notebook) -> None:
    notebook.run("losses = %distributed rank + 0.5")
    assert notebook.run("import numpy as np\nfloat(np.mean(losses)), losses.mean()").result == (
        "(1.0, 1.0)"
    )
    for code in ("sum(losses)", "a, b = losses", "float(max(losses))", "[*losses]"):
        shown = notebook.run(code)
        assert shown.error.splitlines() == [shown.error], shown.error
        assert "write results.values(), results.items() or results.ranks" in shown.error


def test_ranks_that_only_look_alike_are_told_apart(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\nw = torch.full((3,), 0.5) + rank * 1e-7\nw")
    label = "[ranks 0-1 (text equal, values differ: %distributed --diff w)]"
    assert shown.result == f"{label}\ntensor([0.5000, 0.5000, 0.5000])"
    assert "text equal, values differ: %distributed --diff w" in shown.data[-1]["text/html"]
    assert notebook.run("%distributed w").result == shown.result
    assert notebook.run("session.pull('w')").result == shown.result
    shown = notebook.run("%%distributed\nm = torch.nn.Linear(9, 9)\nm")  # each has its own seed
    assert "values differ: %distributed --diff m" in shown.result
    same = notebook.run("%%distributed\ntorch.ones(5000)").result
    assert same == "[ranks 0-1] tensor([1., 1., 1.,  ..., 1., 1., 1.])"


def test_tables_that_only_look_alike_are_told_apart(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nimport pandas as pd\n"
        "df = pd.DataFrame({'a': range(100)}); df.loc[50] = -rank; df"
    )
    assert "ranks 0-1 (text equal, values differ: %distributed --diff df)" in shown.result
    assert shown.data[-1]["text/html"].count("<figure") == 1


# --- where an error is ----------------------------------------------------------------------------


def number(notebook: Notebook) -> int:
    """Of the next cell."""
    return int(notebook.run("len(In) - 1").result) + 1


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("# a comment\nx = %distributed 1 / 0", " line 2"),
        ("%distributed 1 / 0", " line 1"),
        ("if True:\n    %distributed --diff 1 / 0", " line 2"),
        ("session.execute('a = 1\\n1 / 0')", " (execute) line 2"),
        ("session.evaluate('a')\nsession[0].evaluate('1 / 0')", " (evaluate 2) line 1"),
        ("session.diff('1 / 0')", " (diff) line 1"),
    ],
)
def test_an_error_has_the_number_of_the_notebooks_cell(
    notebook: Notebook, code: str, place: str
) -> None:
    cell = number(notebook)
    shown = notebook.run(code)
    name, line = place.split(" line ")
    assert shown.error.startswith("ZeroDivisionError on rank")
    assert f" at In[{cell}]{place}: division by zero" in shown.error.splitlines()[0]
    assert f"\nCell In[{cell}]{name}, line {line}\n" in shown.error
    assert f"---->   {line} 1 / 0" in shown.error


def test_code_of_a_call_has_lines_of_its_own(notebook: Notebook) -> None:
    cell = number(notebook)
    shown = notebook.run(
        "session.execute('def fail():\\n    1 / 0')\nsession.execute('b = 2')\n"
        "session.execute('fail()')"
    )
    assert f"Cell In[{cell}] (execute 3), line 1\n---->   1 fail()" in shown.error
    assert f"Cell In[{cell}] (execute), line 2, in fail" in shown.error
    assert "---->   2     1 / 0" in shown.error


def test_a_cell_that_calls_is_exported_by_its_number(notebook: Notebook, tmp_path: object) -> None:
    cell = number(notebook)
    notebook.run("session.execute('exported = 1')")
    path = f"{tmp_path}/script.py"
    shown = notebook.run(
        f"session.export({path!r}, cells=[{cell}]).read_text().count('exported = 1')"
    )
    assert shown.result == "1"


# --- how an error looks ---------------------------------------------------------------------------


def test_errors_that_differ_in_a_number_are_shown_once(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\ntorch.empty(10**14 + rank)")
    assert shown.error.count("Cell In[") == 1
    assert "you tried to allocate <a> bytes" in shown.error
    assert "\n  rank 0: <a> 400000000000000\n  rank 1: <a> 400000000000004" in shown.error
    assert len(shown.error.splitlines()) == 9


def test_errors_have_the_colours_of_ipython(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\nraise ValueError('no')")
    red, green, end = "\x1b[31m", "\x1b[32m", "\x1b[39m"
    assert shown.colored.startswith(f"{red}ValueError{end} on ranks 0-1")
    assert f"{green}---->   2{end} " in shown.colored
    assert f"{red}ValueError{end}: no" in shown.colored
    own = notebook.run("raise ValueError('no')").colored
    raised = own.split("raise")[0].rpartition("\x1b")[2]  # how IPython colours a keyword
    assert f"\x1b{raised}raise" in shown.colored
    notebook.run("%colors nocolor")
    shown = notebook.run("%%distributed\nraise ValueError('no')")
    assert shown.colored == shown.error
    notebook.run("%colors neutral")


def test_a_hang_is_told_in_two_lines(notebook: Notebook) -> None:
    cell = number(notebook)
    shown = notebook.run("%%distributed\nif rank == 0: dist.barrier()")
    assert shown.error.splitlines() == [
        f"CollectiveHangError: rank 1 did not come to barrier #1 at In[{cell}] line 2: it finished "
        "its part without it; rank 0 waits. No wait can help.",
        "The waiting ranks were freed. The process group is connected anew, and all variables are "
        "kept.",
    ]


# --- the variable that the documentation speaks of ------------------------------------------------


def test_session_is_a_variable_once_somebody_says_so(notebook: Notebook) -> None:
    notebook.run("del session")
    for code in ("session", "session[0].run(f)", "session.pull('x')", "x = 1\nsession"):
        shown = notebook.run(code)
        assert shown.ename == "NameError", code
        assert shown.error.endswith(
            "The session that is running has no variable yet. Type: session = %session"
        )
        assert not shown.data
    assert "idle (2 ranks, gloo)" in notebook.run("session status").result  # IPython's automagic
    assert "idle (2 ranks, gloo)" in notebook.run("%session").result
    assert notebook.run("session = %session").data == []
    assert notebook.run("type(session).__name__, session.world_size").result == "('Session', 2)"
    assert "ranks per node" in notebook.run("session").data[0]["text/plain"]  # the panel


def test_the_magic_gives_the_session_that_it_starts(notebook: Notebook) -> None:
    notebook.run("first = session\nsession = %session start 1 --launcher inline")
    assert notebook.run("session.world_size, session is first").result == "(1, False)"
    shown = notebook.run("%session start 1 --launcher inline")
    assert "It was running already" in shown.result
    assert notebook.run("_ is session").result == "True"
    notebook.run("session.close()\nsession = first")
    assert "idle (2 ranks" in notebook.run("%session").result


# --- a name that is on the other side -------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (
            "there + 1",
            "there is on ranks 0-1, not in the notebook. Type: there = %distributed there",
        ),
        ("one", "one is on rank 1, not in the notebook. Type: one = %distributed one"),
        ("step()", "step is on ranks 0-1, not in the notebook. Begin the cell with: %%distributed"),
        ("dist.barrier()", "dist is on ranks 0-1, not in the notebook. Begin the cell with: "),
        ("%distributed here", "Begin the cell with: %%distributed --push here"),
        ("%%distributed\nhere", "here is in the notebook, not on the ranks. Begin the cell with: "),
        ("session.execute('osp')", "not on the ranks. Type there: import posixpath as osp"),
        ("session.evaluate('json')", "not on the ranks. Type there: import json"),
        ("%%distributed\nsession.pull('x')", "a cell that uses it begins without %%distributed"),
    ],
)
def test_a_missing_name_is_looked_up_on_the_other_side(
    notebook: Notebook, code: str, hint: str
) -> None:
    notebook.run("%%distributed\nthere = 1\ndef step(): pass\nif rank: one = 2")
    notebook.run("here = 1\nimport json, os.path as osp")
    assert hint in notebook.run(code).error.splitlines()[-1]


def test_no_hint_where_there_is_nothing_to_tell(notebook: Notebook) -> None:
    for code in ("nowhere", "%distributed nowhere", "%%distributed\nraise NameError('odd')"):
        shown = notebook.run(code)
        assert shown.error.splitlines()[-1].startswith("NameError: "), code
    notebook.run("%%distributed\nthere = 1")
    shown = notebook.run(
        "import time\nfuture = session.submit(time.sleep, 60)\n"
        "while not session.channel.pending(): pass\nthere"
    )
    assert shown.error.splitlines()[-1] == "NameError: name 'there' is not defined"
    notebook.run("%session interrupt")
    notebook.run("import contextlib\nwith contextlib.suppress(BaseException): future.result()")
