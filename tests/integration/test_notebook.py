"""The magics in a real Jupyter kernel, as a user meets them."""

from __future__ import annotations

import re

import pytest

from .kernel import Notebook


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    shown = notebook.run("%load_ext distsession\n%session start 2 --backend gloo")
    assert "2 ranks, gloo" in shown.result, shown
    assert re.search(r"^started ranks 0-1 on \S+, cpu; backend gloo$", shown.stdout, re.M), shown
    notebook.run("from distsession import current_session\nsession = current_session()")
    yield notebook
    notebook.close()


def test_a_cell_runs_on_all_ranks_and_folds_what_they_show(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nt = torch.ones(3, device=device) * rank\ndist.all_reduce(t)\nt"
    )
    assert shown.result.startswith("[ranks 0-1] tensor([1., 1., 1.]")
    shown = notebook.run("%%distributed\nrank")
    assert shown.result == "[rank 0] 0\n[rank 1] 1"


def test_the_line_magic_gives_results(notebook: Notebook) -> None:
    assert notebook.run("%distributed rank * 2").result == "[rank 0] 0\n[rank 1] 2"
    notebook.run("x = %distributed {'a': rank, 'b': f'{rank}'}")
    assert notebook.run("type(x).__name__, x[1]").result == "('RankResults', {'a': 1, 'b': '1'})"


def test_bars_within_bars_bury_nothing(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\n"
        "from tqdm import tqdm\n"
        "for epoch in tqdm(range(24), desc='epochs'):\n"
        "    for step in tqdm(range(40), desc='steps', leave=False, mininterval=0):\n"
        "        pass\n"
        "    tqdm.write(f'loss {epoch}')"
    )
    lines = shown.plain.splitlines()
    written = lines.index("[ranks 0-1]")
    assert lines[written + 1 : written + 25] == [f"loss {epoch}" for epoch in range(24)]
    assert [line.partition("%")[0] for line in lines[written + 25 :]] == [
        "[rank 0] epochs: 100",
        "[rank 1] epochs: 100",
    ]


def test_of_a_long_value_the_beginning_is_shown(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\nprint('printed')\nlist(range(1000, 6000))")
    folded = shown.data[-1]["text/html"].partition("<details>")[2]
    assert "[1000," not in folded
    assert "1029" not in folded
    assert "1030" in folded


def test_diff_says_which_ranks_differ_and_by_how_much(notebook: Notebook) -> None:
    notebook.run("%%distributed\nw = torch.ones(2, 3)\nm = {'w': w + rank / 4, 'same': w}")
    assert notebook.run("%distributed --diff w").result == (
        "w is equal on ranks 0-1: float32 [2, 3]"
    )
    shown = notebook.run("%distributed --diff m")
    assert shown.result == (
        "m: rank 1 differs from rank 0 in 1 of 2 parts\n"
        "  rank 1: ['w'] float32 [2, 3], by up to 0.25 at [0, 0] (6 of 6 elements)"
    )
    assert "<table>" in shown.data[-1]["text/html"]
    notebook.run("from distsession import current_session\ns = current_session()")
    assert notebook.run("s.diff('rank').equal, s.diff('rank').groups").result == (
        "(False, ((0,), (1,)))"
    )
    assert notebook.run("s[1].diff('rank').equal").result == "True"
    notebook.run("%%distributed\ncount = 0\ndef once():\n    global count; count += 1")
    notebook.run("%distributed --diff once()")
    assert notebook.run("%distributed count").result == "[ranks 0-1] 1"
    assert "no_such" in notebook.run("%distributed --diff no_such").error
    assert "takes an expression" in notebook.run("%distributed --diff").error


def test_ranks_out_and_timeout(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed 1 --out kept\nprint('only one')\nrank * 7")
    assert shown.plain == "[rank 1] only one\n[rank 1] 7"
    assert notebook.run("dict(kept)").result == "{1: 7}"
    shown = notebook.run("%%distributed --timeout 0.3\nimport time\ntime.sleep(60)")
    assert shown.ename == "RunTimeoutError"
    assert "did not finish within 0.3 s" in shown.error


def test_a_cell_takes_variables_along_and_brings_some_back(notebook: Notebook) -> None:
    notebook.run("import torch\nt = torch.arange(3.)\ncfg = {'k': 2}")
    notebook.run("%%distributed --push t,cfg --pull total,k\ntotal = t.sum() + rank\nk = cfg['k']")
    assert notebook.run("[float(v) for v in total.values()], dict(k)").result == (
        "([3.0, 4.0], {0: 2, 1: 2})"
    )
    notebook.run("%%distributed 1 --pull total\ntotal = 7")
    assert notebook.run("dict(total)").result == "{1: 7}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("%%distributed 7\n1", "no rank 7: this session has ranks 0 to 1"),
        ("%%distributed first\n1", "does not name ranks"),
        ("%%distributed --nonsense\n1", "--nonsense"),
        ("%%distributed --out 1x\n1", "name of a variable"),
        ("%%distributed --push not_here,1x\n1", "names of variables"),
        ("%%distributed --push not_here\n1", "the notebook has no not_here. Nothing was run"),
        ("%%distributed --pull a.b\n1", "names of variables"),
        ("%distributed", "takes an expression"),
        ("%session nonsense", "See %session --help"),
        (
            "%session daignose",
            "there is no 'daignose': did you mean diagnose? It takes help, start",
        ),
        ("%session panel", "there is no 'panel': a cell that ends in %session, or in a session"),
        ("%session help restrat", "there is no 'restrat': did you mean restart or start? It t"),
        ("%session start 2 --devices cuda:0", "of cuda:0 it takes the number alone: 0. See %s"),
        ("%session start 2 --keep 12", "argument --keep: it needs a unit: 12h, 12m or 12s. See"),
        ("%session start 2 --keep-idle 2h", "keep_idle=2h is for a session that is kept: give"),
        ("%%distributed --timeout 0\n1", "timeout=0 is not possible: it takes a number of se"),
        (
            "%%distributed --ranks 0\n1",
            "--ranks: ranks are given without a flag, as in %%distributed 0-1. See %%d",
        ),
        ("%session restart --targets=0", "a flag, as in %session restart 0-1. See %session r"),
        ("%session diagnose --stakcs", "unrecognized arguments: --stakcs: did you mean --stacks?"),
        ("%session start 2 --bakend=gloo", "did you mean --backend? See %session start --help."),
        ("%session start 2 --launcher lcoal", "did you mean local? It takes local, inline, ssh, "),
        ("%%distributed --timeot 3\n1", "did you mean --timeout or --timeline? See %%d"),
        ("%distributed x = 1", "x = 1 is a statement, and %distributed takes an expression: "),
        ("%distributed import os; 1", "write it into a cell that begins with %%distributed."),
        ("%distributed --dif rank", "unrecognized arguments: --dif: did you mean --diff? See %d"),
        ("%distributed --timeout 3 rank", "takes no --timeout: %%distributed does"),
        ("%session restart 9", "ranks 0 to 1"),
        ("%session start 3", "It has ranks 2, not 3; backend gloo, not by default. Close it first"),
        ("%session start --backend", "expected one argument"),
    ],
)
def test_a_mistyped_magic_is_told_so_in_a_line(notebook: Notebook, code: str, message: str) -> None:
    shown = notebook.run(code)
    assert message in shown.error
    assert len(shown.error.splitlines()) == 1
    assert notebook.run("%distributed rank").result == "[rank 0] 0\n[rank 1] 1"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("%%distribted\n1", "Cell magic `%%distribted` not found: did you mean %%distributed?"),
        ("%sesion status", "Line magic function `%sesion` not found: did you mean %session?"),
        ("%diagnose", "Line magic function `%diagnose` not found: did you mean %session diagnose?"),
        ("%nothing_like_it", "Line magic function `%nothing_like_it` not found."),
    ],
)
def test_a_magic_that_there_is_not_is_answered_with_the_one_that_is_like_it(
    notebook: Notebook, code: str, message: str
) -> None:
    assert notebook.run(code).text["stderr"].strip() == f"UsageError: {message}"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("%session status", "%session"),
        ("%distributed rank", "%distributed"),
        ("if True:\n    %session", "%session"),
        ("get_ipython().run_cell_magic('distributed', '', '1')", "%%distributed"),
    ],
)
def test_a_magic_of_the_notebook_says_on_ranks_where_it_belongs(
    notebook: Notebook, code: str, name: str
) -> None:
    shown = notebook.run(f"%%distributed\n{code}")
    assert f"{name} is for the notebook, and this code runs on the ranks: put it" in shown.error


def test_messages_name_what_this_notebook_can_type() -> None:
    notebook = Notebook()
    try:
        notebook.run("%load_ext distsession\n%session start 2 --backend gloo")
        died = notebook.run("%%distributed 1\nimport os\nos._exit(3)").error
        assert "%session restart 1 replaces it; --restore NAMES copies variables from" in died
        assert "session.restart" not in died
        assert "%session restart 1 replaces it" in notebook.run("%session").result
        named = notebook.run("session = %session\n%distributed rank").error
        assert "session.restart([1]) replaces it; restore=[...] copies" in named
    finally:
        notebook.close()


def test_the_help_is_a_page_and_tells_of_one_command(notebook: Notebook) -> None:
    assert len(notebook.run("%session --help").stdout.splitlines()) < 40
    helped = notebook.run("%session help restart").stdout
    assert helped == notebook.run("%session restart --help").stdout
    assert "--restore" in helped


def test_starting_again_with_the_same_options_is_no_second_session(notebook: Notebook) -> None:
    assert "running already" in notebook.run("%session start 2 --backend gloo").result


def test_session_facts(notebook: Notebook) -> None:
    assert "idle (2 ranks, gloo)" in notebook.run("%session").result
    config = notebook.run("%session config")
    assert "<table>" in config.data[0]["text/html"]
    assert "ranks per node" in config.data[0]["text/plain"]
    assert "idle (2 ranks, gloo)" in config.result
    assert "device" in notebook.run("%session devices").result
    assert "nothing was running" in notebook.run("%session interrupt").result
    assert "usage" in notebook.run("%session --help").stdout


def test_an_error_shows_the_cell_with_the_notebooks_line_numbers(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\na = 1\nb = a / 0")
    assert shown.ename == "RunError"
    assert shown.error.startswith("ZeroDivisionError on ranks 0-1")
    assert shown.error.count("ZeroDivisionError: division by zero") == 1
    # line 1 is the magic's own, as in the editor
    assert "line 3" in shown.error
    assert "---->   3 b = a / 0" in shown.error


def test_a_function_of_the_notebook_shows_its_lines(notebook: Notebook) -> None:
    shown = notebook.run("def broken(x):\n    return x / 0\n\nsession.run(broken, 1)")
    assert "return x / 0" in shown.error
    assert "in broken" in shown.error
    assert "site-packages" not in shown.error


def test_notebook_functions_classes_and_globals_work(notebook: Notebook) -> None:
    notebook.run("class Point:\n    def __init__(self, x): self.x = x\noffset = 5")
    shown = notebook.run("session.run(lambda p: (p.x + offset, rank), Point(1))")
    assert shown.result == "[rank 0] (6, 0)\n[rank 1] (6, 1)"


def test_equal_output_is_folded_and_figures_stand_side_by_side(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nimport sys\nfrom IPython.display import HTML, display\n"
        "print('a'); print(f'b{rank}', file=sys.stderr)\ndisplay(HTML(f'<b>{rank}</b>'))\n"
        "print('after')"
    )
    assert (shown.stdout, shown.text["stderr"]) == ("", "")
    first, second = shown.data
    assert "<b>0</b>" in first["text/html"]
    assert "<b>1</b>" in first["text/html"]
    assert first["text/plain"].startswith("[rank 0]\na\nb0\n[rank 1]\na\nb1\n[rank 0] <")
    assert second["text/plain"] == "[ranks 0-1] after"


def test_a_progress_bar_is_one_line(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nimport sys, time\nfor i in range(21):\n"
        "    print(f'\\r{5 * i}%', end='', file=sys.stderr, flush=True)\n    time.sleep(0.03)\n"
        "print(file=sys.stderr)"
    )
    assert shown.plain.endswith("[ranks 0-1] 100%")
    assert shown.text["stderr"] == ""


def test_bars_of_tqdm_are_kept_as_one_line_for_each_rank(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nfrom tqdm import tqdm\nimport time\n"
        "for i in tqdm(range(5), desc='fit'): time.sleep(0.02 * (rank + 1))"
    )
    lines = shown.result.splitlines()
    assert [line[:19] for line in lines] == ["[rank 0] fit: 100%|", "[rank 1] fit: 100%|"]


def test_while_a_cell_runs_a_block_says_what_each_rank_does(notebook: Notebook) -> None:
    request = notebook.client.execute(
        "%%distributed\nimport time\nprint('at work')\nif rank: time.sleep(3.5)\ndist.barrier()"
    )
    seen = notebook.updates(request)
    assert any("[rank 0] in barrier #" in text and ": at work" in text for text in seen), seen
    assert any("[rank 1] running In[" in text and "line 4" in text for text in seen), seen
    assert any(text.startswith("ranks 0-1: ") for text in seen), seen
    assert seen[-1] == "[ranks 0-1] at work"


def test_many_lines_stay_small_and_the_log_has_them_all(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\nfor i in range(30_000): print('line', i, 'of', rank)")
    assert len(str(shown.data)) < 100_000
    assert "line 29999 of 1" in shown.result
    assert "29,800 lines are left out here; all of them: /" in shown.result
    counted = notebook.run("len(open(session.log_path(1)).read().split('line 29999 of 1'))")
    assert counted.result == "2"


def test_clear_output_clears_what_the_rank_itself_has_put_out(notebook: Notebook) -> None:
    cell = (
        "from IPython.display import clear_output\nprint('old')\n"
        "if rank == 1:\n    clear_output()\nprint('new')"
    )
    shown = notebook.run(f"print('mine')\nsession.execute({cell!r})")
    assert shown.stdout == "mine\n"
    assert shown.plain == "[rank 0]\nold\nnew\n[rank 1] new"


def test_a_display_that_is_updated_changes_where_it_stands(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed 1\nfrom IPython.display import display\n"
        "handle = display('one', display_id=True)\nhandle.update('two')"
    )
    assert shown.plain == "[rank 1] 'two'"
    later = notebook.client.execute("%%distributed 1\nhandle.update('three')")
    assert notebook.updates(later) == ["[rank 1] 'three'"]


def test_what_is_written_between_runs_is_shown_too(notebook: Notebook) -> None:
    shown = notebook.run(
        "import time\nsession[0].run(lambda: __import__('threading').Timer(\n"
        "    0.3, lambda: print('from a thread')).start())\ntime.sleep(1)"
    )
    assert shown.stdout == "[0] from a thread\n"


def test_px_shares_the_engines(notebook: Notebook) -> None:
    notebook.run("%%distributed\nshared = rank + 1")
    shown = notebook.run("%%px\nprint('px', shared)")
    assert "px 1" in str(shown)
    assert "px 2" in str(shown)


def test_stop_ends_the_cell_and_keeps_the_state(notebook: Notebook) -> None:
    notebook.run("%%distributed\nkept = rank + 100")
    request = notebook.client.execute("%%distributed\nimport time\ntime.sleep(600)")
    shown = notebook.collect(request, stop_at=["[rank 0] running In[", "[rank 1] running In["])
    assert shown.ename == "RunInterrupt"
    assert "was stopped" in shown.error
    assert notebook.run("%distributed kept").result == "[rank 0] 100\n[rank 1] 101"


def test_stop_frees_a_hung_collective_and_keeps_the_state(notebook: Notebook) -> None:
    notebook.run("%%distributed\nkept = rank + 7")
    request = notebook.client.execute(
        "%%distributed\nif rank == 0:\n    dist.barrier()\nelse:\n    import time; time.sleep(600)"
    )
    shown = notebook.collect(request, stop_at=["[rank 0] in barrier #", "line 5"])
    assert shown.ename == "RunInterrupt"
    assert "rank 0 waits in barrier" in shown.error
    assert re.search(r"line 3( \(for \d+ s\))? for rank 1, which runs", shown.error)
    assert notebook.run("%distributed kept").result == "[rank 0] 7\n[rank 1] 8"
    shown = notebook.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert shown.result == "[ranks 0-1] 2.0"


def test_diagnose_and_restart_are_magics(notebook: Notebook) -> None:
    assert "idle" in notebook.run("%session diagnose").result
    notebook.run("%%distributed\nkept = rank + 9")
    assert notebook.run("%session restart 1 --restore kept").result.endswith(
        "idle (2 ranks, gloo). Rank 1 is fresh: its variables are gone, but for kept, which were "
        "restored. The other ranks keep theirs."
    )
    assert notebook.run("%distributed kept").result == "[ranks 0-1] 9"
    assert notebook.run("%session restart").result.endswith(
        "idle (2 ranks, gloo). All ranks are fresh: their variables are gone."
    )
    shown = notebook.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert shown.result == "[ranks 0-1] 2.0"


def test_close_and_what_comes_after(notebook: Notebook) -> None:
    assert "closed" in notebook.run("%session close").result
    assert "no session is open" in notebook.run("%%distributed\n1").error
    assert "no session is open" in notebook.run("%session").result
    assert "2 ranks" in notebook.run("%session start 2 --backend gloo").result
    assert notebook.run("%distributed rank").result == "[rank 0] 0\n[rank 1] 1"


def test_unloading_takes_the_magics_away(notebook: Notebook) -> None:
    assert not notebook.run("%unload_ext distsession").error
    assert "not found" in notebook.run("%session status").text["stderr"] + str(
        notebook.run("%session status").error
    )
    assert not notebook.run("%load_ext distsession").error


def test_capture_keeps_what_the_ranks_print_and_display(notebook: Notebook) -> None:
    notebook.run(
        "%%capture kept\n%%distributed\nfrom IPython.display import HTML, display\n"
        "print('said by', rank)\ndisplay(HTML('<b>bold</b>'))\nrank"
    )
    shown = notebook.run("(kept.stdout, [each.data for each in kept.outputs])")
    for line in ("[0] said by 0\\n", "[1] said by 1\\n", "[rank 1] 1\\n"):
        assert line in shown.result
    assert shown.result.count("<b>bold</b>") == 2


def test_an_error_of_a_function_names_the_notebooks_cells(notebook: Notebook) -> None:
    notebook.run("def inner(x):\n    return 1 // x")
    notebook.run("def outer(x):\n    one = 1\n    return inner(x)")
    notebook.run("from distsession import current_session\nsession = current_session()")
    shown = notebook.run("session.run(outer, 0)")
    first = re.search(r"^ZeroDivisionError on ranks .* at In\[(\d+)\] line 2: ", shown.error)
    assert first is not None, shown.error
    cell = int(first[1])
    assert f"Cell In[{cell + 1}], line 3, in outer" in shown.error
    assert f"Cell In[{cell}], line 2, in inner\n        1 def inner(x):" in shown.error
    assert "notebook cell" not in shown.error


def test_helper_functions_of_other_cells_are_named_where_ranks_wait(notebook: Notebook) -> None:
    helper = "import torch\nimport torch.distributed as dist\ndef helper(size):\n"
    notebook.run(helper + "    dist.all_reduce(torch.ones(size))")
    cell = notebook.run("len(In) - 2").result
    notebook.run("def train():\n    helper(3 + dist.get_rank())")
    notebook.run("from distsession import current_session\nsession = current_session()")
    shown = notebook.run("session.run(train)")
    assert "CollectiveMismatchError" in shown.error
    assert f"at In[{cell}] line 4" in shown.error
    notebook.run("class Step:\n    def __call__(self, size):\n        helper(size)")
    notebook.run("session.push(step=Step())")
    shown = notebook.run("%%distributed\nstep(3 + rank)")
    assert f"at In[{cell}] line 4" in shown.error


def test_a_syntax_error_begins_with_its_line_and_its_reason(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\nif rank > 5:\n    x = 1\n  y = 2")
    first, *rest = shown.error.splitlines()
    assert re.match(r"IndentationError on ranks .* at In\[\d+\] line 4: unindent", first)
    assert re.fullmatch(r"  Cell In\[\d+\], line 4", next(line for line in rest if line))
    assert "tokenize" not in shown.error
