"""Python's debugger on ranks, opened from a real Jupyter kernel."""

from __future__ import annotations

import re
import sys
import time

import pytest

from .kernel import Notebook

STOPS_AT_CALL = sys.version_info >= (3, 13)
"""Where ``breakpoint()`` stops: at its own line, or at the next."""
TO_NEXT = ["n"] * STOPS_AT_CALL
"""What is typed to be there in any case."""


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    shown = notebook.run("%load_ext distsession\n%session start 2 --backend gloo --timeout 2")
    assert "2 ranks, gloo" in shown.result, shown
    notebook.run("import distsession, threading\nsession = distsession.current_session()")
    yield notebook
    notebook.close()


@pytest.fixture(autouse=True)
def _next_cell_works(notebook: Notebook):
    notebook.run("%%distributed\nkept = 7")
    yield
    shown = notebook.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\n(t.item(), kept)")
    assert shown.plain.endswith("[ranks 0-1] (2.0, 7)"), shown
    left = "[n for n in globals() if n.startswith('__') and ('pdb' in n or 'return' in n)]"
    assert notebook.run(f"%distributed {left}").result == "[ranks 0-1] []"


def later(text: str, seconds: float):
    def answer() -> str:
        time.sleep(seconds)
        return text

    return answer


WAITING = "%%distributed\nx = rank\nif rank == 1:\n    breakpoint()\n    x = 5\ndist.barrier()\nx"


def test_the_others_wait_longer_than_their_groups_time_limit(notebook: Notebook) -> None:
    shown = notebook.run(WAITING, answers=[later("p x + 40", 3.0), later("c", 2.5)])
    assert shown.prompts == ["[rank 1] (Pdb) "] * 2
    assert "> In[" in shown.plain
    assert f"-> {'breakpoint()' if STOPS_AT_CALL else 'x = 5'}\n[rank 1] 41\n" in shown.plain
    assert shown.plain.endswith("[rank 0] 0\n[rank 1] 5")
    assert not shown.error


def test_the_time_limit_of_a_group_still_holds_without_a_debugger(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nimport time\nif rank: time.sleep(4)\ndist.all_reduce(torch.ones(1))"
    )
    assert "rank 1 did not come to all_reduce (float32 [1], sum) within 2 s" in shown.error


def test_commands_of_pdb_show_the_cell(notebook: Notebook) -> None:
    cell = (
        "%%distributed 1\ndef inner(a):\n    b = a + 1\n    breakpoint()\n    return b\n"
        "total = inner(3)\nafter = total\nprint('after', after, total)"
    )
    commands = [*TO_NEXT, "l", "w", "u", "p 'here', a if 'a' in dir() else 'outside'", "d",
                "!b = 10", "n", "n", "tbreak 8", "c", "p after", "c"]  # fmt: skip
    shown = notebook.run(cell, answers=commands)
    assert not shown.error, shown
    lines = shown.plain.replace("\t", " ")
    assert "  1   # %%distributed 1\n" in lines
    assert "  5  ->     return b\n" in lines
    assert "-> total = inner(3)\n" in lines
    assert "distsession" not in lines.replace("%%distributed", "")
    assert "('here', 'outside')\n" in lines
    assert "--Return--\n" in lines
    assert "[rank 1] after 10 10" in lines
    assert "[rank 1] 10\n" in lines


def test_q_ends_the_cell_on_all_ranks(notebook: Notebook) -> None:
    shown = notebook.run(WAITING.replace("x = 5", "try: x = 5\n    except Exception: pass"),
                         answers=[*TO_NEXT, "n", "q"])  # fmt: skip
    assert shown.ename == "RunInterrupt"
    assert len(shown.error.splitlines()) == 2
    assert "stopped in the debugger of rank 1 at In[" in shown.error
    assert "line 7" in shown.error
    assert "all variables are kept" in shown.error
    assert notebook.run("%distributed x").result == "[rank 0] 0\n[rank 1] 5"


def test_q_on_a_single_rank_ends_the_cell(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed 1\nx = 2\nbreakpoint()\nx = 3", answers=["q"])
    assert "stopped in the debugger of rank 1" in shown.error
    assert notebook.run("%%distributed 1\nx").plain == "[rank 1] 2"


def test_stop_at_the_prompt_ends_the_cell_on_all_ranks(notebook: Notebook) -> None:
    def stop() -> None:
        time.sleep(0.5)
        notebook.manager.interrupt_kernel()

    shown = notebook.run(WAITING, answers=[stop])
    assert shown.ename == "RunInterrupt"
    assert "rank 0 waits in barrier" in shown.error
    assert "for rank 1, which is in the debugger at In[" in shown.error


def test_ranks_are_asked_one_after_the_other(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nbreakpoint()\na = rank\nb = rank",
        answers=["n", "p a + 5", "c", "p rank * 7", "c"],
    )
    assert not shown.error, shown
    assert shown.prompts == ["[rank 0] (Pdb) "] * 3 + ["[rank 1] (Pdb) "] * 2
    assert shown.plain.endswith("[rank 1] 7")


def test_stepping_into_a_collective_gives_the_turn_to_the_others(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nbreakpoint()\ndist.barrier()\na = rank",
        answers=[*TO_NEXT, "n", "c", "c"],
    )
    assert not shown.error, shown
    asked = [*[0] * len(TO_NEXT), 0, 1, 0]
    assert shown.prompts == [f"[rank {rank}] (Pdb) " for rank in asked]


def test_debug_stops_at_the_first_line(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed --debug 1\na = 1\nb = a + 1\ndist.barrier()\nb",
        answers=["n", "p a", "n", "n", "n"],
    )
    assert not shown.error, shown
    assert set(shown.prompts) == {"[rank 1] (Pdb) "}
    assert "(2)<module>()\n-> a = 1\n" in shown.plain
    assert "--Call--" not in shown.plain
    assert "(5)<module>()\n-> b\n" in shown.plain
    assert shown.plain.endswith("[ranks 0-1] 2")
    shown = notebook.run("%%distributed 0 --debug 1\na = 1")
    assert "rank 1 cannot be debugged: the code runs on rank 0" in shown.error
    shown = notebook.run("%%distributed --debug 0,1\na = 1", answers=["c", "q"])
    assert "stopped in the debugger of rank 1" in shown.error


def test_breakpoints_are_forgotten_with_the_cell(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed 0 --debug 0\ndef f(): return 1\na = f()\nb = f()",
        answers=["n", "b f", "c", "q"],
    )
    assert "stopped" in shown.error
    assert notebook.run("%%distributed 0\nfor _ in range(3): f()\nf()").plain == "[rank 0] 1"


def test_functions_and_modules_stop_too(notebook: Notebook, tmp_path) -> None:
    (tmp_path / "their_module.py").write_text("def f(a):\n    breakpoint()\n    return a + 1\n")
    notebook.run(
        "from distsession import current_session\nsession = current_session()\n"
        "def call(n):\n    local = n * 2\n    breakpoint()\n    return local"
    )
    shown = notebook.run("session[0].run(call, 4)", answers=["p local", "l", "c"])
    assert "8\n" in shown.plain
    assert "return local" in shown.plain
    assert shown.result == "[rank 0] 8"
    shown = notebook.run(
        f"%%distributed 0\nimport sys; sys.path.append({str(tmp_path)!r})\n"
        "import their_module\nprint(their_module.f(5))",
        answers=[*TO_NEXT, "p a", "u", "c"],
    )
    assert "-> return a + 1\n[rank 0] 5\n" in shown.plain
    assert "[rank 0] 6" in shown.plain
    assert "-> print(their_module.f(5))" in shown.plain


@pytest.mark.parametrize(
    "call",
    [
        "import pdb; pdb.set_trace()",
        "from IPython.core.debugger import set_trace; set_trace()",
    ],
)
def test_other_ways_into_a_debugger(notebook: Notebook, call: str) -> None:
    cell = f"%%distributed\nif rank == 0:\n    x = 3\n    {call}\n    x = 4\ndist.barrier()\nx = 9"
    shown = notebook.run(cell, answers=["p x * 11", "c"])
    assert "33" in shown.plain
    assert not shown.error
    shown = notebook.run(cell, answers=["q"])
    assert "stopped in the debugger of rank 0" in shown.error, shown
    request = notebook.client.execute(cell.replace("x = 9", "import time; time.sleep(60)"))

    shown = notebook.collect(request, answers=["c"], stop_at=["[rank 0] running In[", "line 7"])
    assert "was stopped" in shown.error


def test_python_is_told_to_pass_over_breakpoints(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nimport os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\n"
        "del os.environ['PYTHONBREAKPOINT']\n1"
    )
    assert shown.plain == "[ranks 0-1] 1"


def test_the_hook_survives_what_ipyparallel_imports(notebook: Notebook) -> None:
    shown = notebook.run("%%px\nprint('px')")
    assert "px" in str(shown)
    shown = notebook.run("%%distributed 0\nbreakpoint()\n1", answers=["c"])
    assert shown.prompts == ["[rank 0] (Pdb) "]
    shown = notebook.run("%%px\nbreakpoint()\nprint('went on')")
    assert "went on" in str(shown)


def test_the_failed_rank_is_looked_at_post_mortem(notebook: Notebook) -> None:
    assert (
        "nothing has failed"
        in notebook.run(
            "import distsession\n"
            "distsession.current_session().requests.failed_rank = None\n%session debug"
        ).error
    )
    shown = notebook.run(
        "%%distributed\ndef f(a):\n    local = a * 2\n    return local / 0\n"
        "if rank == 1:\n    f(21)\ndist.barrier()"
    )
    assert "ZeroDivisionError on rank 1" in shown.error
    notebook.run("%distributed kept")
    shown = notebook.run("%session debug", answers=["p local", "u", "p rank", "q"])
    assert not shown.error, shown
    assert set(shown.prompts) == {"[rank 1] (Pdb) "}
    assert "ZeroDivisionError: division by zero\n" in shown.plain
    assert "-> return local / 0\n[rank 1] 42\n" in shown.plain
    assert "-> f(21)\n" in shown.plain
    assert "rank 0 keeps no error" in notebook.run("%session debug 0").error
    assert "42" in notebook.run("%session debug 1", answers=["p local", "q"]).plain
    notebook.run("%%distributed\n1")
    assert "rank 1 keeps no error" in notebook.run("%session debug 1").error
    assert "no rank 5" in notebook.run("%session debug 5").error


FAILS = (
    "%%distributed\ndef f(a):\n    local = a * 2\n    return local / 0\nif rank == 1:\n    f(21)"
)


def test_ipythons_own_ways_open_the_debugger_of_the_rank(notebook: Notebook) -> None:
    notebook.run(FAILS)
    for way in ("%debug", "import pdb; pdb.pm()", "%debug"):
        shown = notebook.run(way, answers=["p local", "q"])
        assert shown.prompts == ["[rank 1] (Pdb) "] * 2, shown
        assert "-> return local / 0\n[rank 1] 42" in shown.plain
    assert "ZeroDivisionError on rank 1" in notebook.run("%tb").error
    notebook.run("%%distributed\n1")
    shown = notebook.run("%debug", answers=["q"])
    assert shown.text["stderr"].startswith("rank 1 keeps no error: only that of the last cell")
    assert not shown.prompts
    notebook.run("try: 1 / 0\nexcept ZeroDivisionError as e: raise OSError('mine') from e")
    assert notebook.run("%debug", answers=["q"]).prompts == ["ipdb> "]  # an error of the notebook's


def test_pdb_on_opens_the_debugger_of_the_rank_that_fails(notebook: Notebook) -> None:
    notebook.run("%pdb on")
    try:
        shown = notebook.run(FAILS, answers=["p local", "q"])
        assert shown.prompts == ["[rank 1] (Pdb) "] * 2
        assert "[rank 1] 42" in shown.plain
        assert "ZeroDivisionError on rank 1" in shown.error
        shown = notebook.run(
            "%%distributed\nif rank == 0: dist.barrier()", answers=["p 2 + 3", "q"]
        )
        assert shown.plain.endswith("-> if rank == 0: dist.barrier()\n[rank 0] 5")
    finally:
        notebook.run("%pdb off")


@pytest.mark.parametrize("way", ["%debug", "import pdb; pdb.pm()"])
def test_they_do_so_in_a_cell_of_the_ranks(notebook: Notebook, way: str) -> None:
    notebook.run(FAILS)
    for _ in range(2):  # what looks back keeps the error
        shown = notebook.run(f"%%distributed\n{way}", answers=["p local", "q"])
        assert shown.prompts == ["[rank 1] (Pdb) "] * 2, shown
        assert "[rank 0] rank 0 keeps no error: only that of the last cell" in shown.plain
        assert "-> return local / 0\n[rank 1] 42" in shown.plain


LAST = "%%distributed\nimport sys\nhasattr(sys, 'last_value')"


def test_tb_in_a_cell_of_the_ranks_shows_the_users_frames(notebook: Notebook) -> None:
    notebook.run(FAILS)
    shown = notebook.run("%%distributed 1\n%tb")
    assert "----> 6     f(21)" in shown.plain
    assert "----> 4     return local / 0" in shown.plain
    assert "distsession" not in shown.plain
    shown = notebook.run(
        "%%distributed 1\nimport sys\ntype(sys.last_value), sys.last_traceback.tb_lineno"
    )
    assert shown.plain == "[rank 1] (ZeroDivisionError, 6)"
    notebook.run("%%distributed\n1")
    assert notebook.run(LAST).plain == "[ranks 0-1] False"


def test_in_auto_mode_they_are_about_what_the_notebook_has_shown(notebook: Notebook) -> None:
    notebook.run("%session auto on")
    try:
        notebook.run(FAILS.partition("\n")[2])
        shown = notebook.run("%debug", answers=["p local", "q"])
        assert shown.prompts == ["[rank 1] (Pdb) "] * 2, shown
        assert "ZeroDivisionError on rank 1" in notebook.run("%tb").error
    finally:
        notebook.run("%session auto off")


def test_a_frame_is_kept_until_the_next_cell_only(notebook: Notebook) -> None:
    notebook.run(
        "%%distributed\nimport weakref, gc\nclass Big: pass\nseen = []\n"
        "def f():\n    big = Big()\n    seen.append(weakref.ref(big))\n    raise ValueError\nf()"
    )
    shown = notebook.run("%%distributed\ngc.collect()\nseen[0]() is None")
    assert shown.plain == "[ranks 0-1] True"


def test_code_can_ask_for_input(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%distributed\nprint('before')\nname = input('name? ')\nprint('hello', name)",
        answers=["Ada", "Grace"],
    )
    assert shown.prompts == ["[rank 0] name? ", "[rank 1] name? "]
    assert "[rank 0] hello Ada" in shown.plain
    assert "[rank 1] hello Grace" in shown.plain
    shown = notebook.run(
        "%%distributed 1\nimport getpass\ngetpass.getpass()[::-1]", answers=["terces"]
    )
    assert shown.plain == "[rank 1] 'secret'"


def test_a_time_limit_does_not_count_a_person(notebook: Notebook) -> None:
    shown = notebook.run(
        WAITING.replace("%%distributed", "%%distributed --timeout 2"), answers=[later("c", 3.0)]
    )
    assert not shown.error, shown
    shown = notebook.run(
        "%%distributed --timeout 1\nimport time\ninput()\ntime.sleep(60)",
        answers=[later("", 1.5), later("", 1.5)],
    )
    assert "did not finish within 1 s" in shown.error


def test_a_run_that_nobody_waits_for_passes_over_breakpoints(notebook: Notebook) -> None:
    notebook.run("session = distsession.current_session()")
    shown = notebook.run(
        "def f():\n    for _ in range(3): breakpoint()\n    return 5\nsession.submit(f).result(30)"
    )
    assert shown.result == "[ranks 0-1] 5"
    shown = notebook.run(
        "def g():\n    import threading\n    t = threading.Thread(target=breakpoint)\n"
        "    t.start(); t.join()\nsession[0].run(g)"
    )
    assert "breakpoint() at threading.py" in shown.plain
    assert "is passed over: only a rank's main thread can ask" in shown.plain


def test_a_rank_that_dies_at_its_prompt_does_not_keep_the_cell(notebook: Notebook) -> None:
    pid = notebook.run("import os\npid = session.infos[1].pid\npid").result

    def kill() -> None:
        import os
        import signal

        time.sleep(0.3)
        os.kill(int(pid), signal.SIGKILL)

    shown = notebook.run(WAITING, answers=[kill])
    assert "rank 1" in shown.error
    assert "was killed by SIGKILL" in shown.error
    notebook.run("%session restart 1 --restore kept")


@pytest.mark.parametrize("what", ["session.restart()", "session.close()", "session.interrupt()"])
def test_another_thread_ends_what_waits_at_a_prompt(notebook: Notebook, what: str) -> None:
    shown = notebook.run(
        f"import threading\nthreading.Timer(1.5, lambda: {what}).start()\n"
        "session.execute('if rank == 1: breakpoint()\\ndist.barrier()')",
        answers=[lambda: None],
    )
    assert shown.error
    notebook.run("import time; time.sleep(2)")
    if "close" in what:
        notebook.run("%session start 2 --backend gloo --timeout 2")
        notebook.run("session = distsession.current_session()")
    notebook.run("%%distributed\nkept = 7")


def test_who_is_in_the_debugger_can_be_seen(notebook: Notebook) -> None:
    notebook.run(
        "import threading, time\nseen = []\n"
        "def look():\n    seen.extend([session.status(), repr(session.diagnose()),"
        " repr(session.show_config())])\n"
    )
    shown = notebook.run(
        "threading.Timer(1.0, look).start()\n"
        "session.execute('if rank == 1: breakpoint()\\ndist.barrier()', label='In[77]')",
        answers=[later("c", 3.0)],
    )
    assert not shown.error, shown
    assert (
        "running In[77], rank 1 is in the debugger at In[77] line 1"
        in notebook.run("seen[0]").result
    )
    report = notebook.run("print(seen[1])").stdout
    assert "for rank 1, which is in the debugger at In[77] line 1." in report
    assert "1     in the debugger at In[77] line 1" in report
    panel = notebook.run("print(seen[2])").stdout
    assert re.search(r"^0 .* waiting in barrier at In\[77\] line 2 ", panel, re.MULTILINE)
    assert re.search(r"^1 .* in the debugger at In\[77\] line 1 ", panel, re.MULTILINE)


def test_the_notebooks_own_debugger_serves_an_inline_session(notebook: Notebook) -> None:
    notebook.run("inline = distsession.Session(launcher='inline')")
    try:
        shown = notebook.run(
            "inline.execute('y = 3\\nbreakpoint()\\ny = 4')", answers=["p y * 11", "c"]
        )
        assert not shown.error, shown
        assert "33" in shown.stdout
        assert all("[rank" not in prompt for prompt in shown.prompts)
        shown = notebook.run("inline.execute('1', debug=[0])")
        assert "write breakpoint() there" in shown.error
        assert "keeps no errors" in notebook.run("inline.debug()").error
    finally:
        notebook.run("inline.close()")


def test_a_front_end_without_input_passes_over_breakpoints(notebook: Notebook) -> None:
    request = notebook.client.execute(WAITING, allow_stdin=False)
    shown = notebook.collect(request)
    assert not shown.error
    assert "The debugger is passed over: this front end takes no input." in shown.plain
