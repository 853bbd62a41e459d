"""Code in the ranks' namespace."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from distsession import RunError, RunInterrupt, RunTimeoutError, Session
from tests.until import until_busy

from .conftest import Recorder


def test_variables_stay_from_cell_to_cell(session: Session) -> None:
    session.execute("t = torch.ones(3, device=device) * rank\ndist.all_reduce(t)")
    assert list(session.evaluate("t.sum().item()").values()) == [3.0, 3.0]


def test_the_promised_names_are_there(session: Session) -> None:
    names = "torch, dist, rank, local_rank, world_size, device"
    assert session.evaluate(f"[type(v).__name__ for v in ({names})]")[0] == [
        "module", "module", "int", "int", "int", "device",
    ]  # fmt: skip
    assert session.evaluate("dist.is_initialized() and dist.get_rank() == rank")[1] is True


def test_the_environment_is_torchruns(session: Session) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"]
    found = session.evaluate(f"[__import__('os').environ[n] for n in {names}]")
    assert found[1] == ["1", "1", "2", "2", "0", "127.0.0.1"]
    assert session.evaluate("int(__import__('os').environ['MASTER_PORT']) > 0")[0] is True


def test_env_rendezvous_of_user_code_finds_the_store(start) -> None:
    session = start(2)
    session.execute(
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.ones(1)\n"
        "dist.all_reduce(t)"
    )
    assert session.evaluate("t.item()")[0] == 2.0


def test_the_last_expression_is_shown_and_a_semicolon_hides_it(
    session: Session, output: Recorder
) -> None:
    session.execute("rank * 2")
    assert {r: b[0]["text/plain"] for r, b in output.shown[0].items()} == {0: "0", 1: "2"}
    output.clear()
    session.execute("rank * 2;")
    session.execute("x = 5")
    session.execute("None")
    assert output.shown == []


def test_rich_values_are_shown_rich(session: Session, output: Recorder) -> None:
    session.execute("from IPython.display import HTML\nHTML(f'<b>{rank}</b>')")
    assert output.shown[0][1][0]["text/html"] == "<b>1</b>"


def test_magics_shell_escapes_and_await_work(session: Session, output: Recorder) -> None:
    session.execute("import asyncio\nx = await asyncio.sleep(0, 7)\nx")
    assert output.shown[0][0][0]["text/plain"] == "7"
    session.execute("!echo from the shell $((1+1))")
    assert "from the shell 2" in output.text(0)
    session.execute("%timeit -n1 -r1 pass")
    assert "loop" in output.text(1)
    session.execute("%%time\ny = 3")
    assert session.evaluate("y")[0] == 3


def test_fetch_brings_the_value(session: Session) -> None:
    results = session.execute("z = rank + 1\nz * 10", fetch=True)
    assert dict(results or {}) == {0: 10, 1: 20}
    assert session.execute("z") is None


def test_a_time_limit_stops_the_cell_and_the_ranks_go_on(session: Session) -> None:
    began = time.monotonic()
    with pytest.raises(RunTimeoutError, match=r"ranks 0-1 did not finish within 0\.3 s"):
        session.execute("kept = 1\nimport time\ntime.sleep(60)", timeout=0.3)
    assert time.monotonic() - began < 5
    assert session.evaluate("kept")[1] == 1


def test_a_cell_that_awaits_can_be_stopped(session: Session) -> None:
    with pytest.raises(RunTimeoutError):
        session.execute("import asyncio\nawait asyncio.sleep(60)", timeout=0.3)
    assert session.evaluate("1")[0] == 1


def test_a_syntax_error_shows_the_line(session: Session) -> None:
    with pytest.raises(RunError) as caught:
        session.execute("x = 1\ny = (2\n", label="In[9]")
    text = "\n".join(caught.value._render_traceback_())
    assert text.startswith("SyntaxError on ranks 0-1")
    assert "at In[9] line 2: '(' was never closed" in text.splitlines()[0]
    assert "  Cell In[9], line 2\n    y = (2" in text


def test_lines_are_counted_from_the_top_also_below_empty_ones(session: Session) -> None:
    with pytest.raises(RunError, match=r"at In\[9\] line 4"):
        session.execute("\n\nx = 0\n1 / x", label="In[9]")


def test_only_an_expression_can_be_evaluated(session: Session) -> None:
    with pytest.raises(RunError, match="SyntaxError"):
        session.evaluate("x = 1")


def test_exit_does_not_end_the_rank(session: Session) -> None:
    before = [info.pid for info in session.infos]
    for code in ("exit()", "quit()", "raise SystemExit(3)", "import sys; sys.exit()"):
        with pytest.raises(RunError):
            session.execute(code)
    assert list(session.evaluate("__import__('os').getpid()").values()) == before


def test_a_module_beside_the_notebook_is_found(start, tmp_path, monkeypatch) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("value = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    session = start(1)
    assert session.evaluate("__import__('beside_the_notebook').value")[0] == 42
    assert session.evaluate("__import__('os').getcwd()")[0] == os.path.realpath(tmp_path)


def test_interrupt_when_nothing_runs_is_harmless(session: Session) -> None:
    assert session.interrupt() is False
    assert session.evaluate("rank")[1] == 1


def test_interrupt_from_another_thread_stops_a_run(session: Session) -> None:
    future = session.submit(time.sleep, 60)
    until_busy(session)
    assert session.interrupt() is True
    with pytest.raises(RunInterrupt, match="was stopped"):
        future.result(10)
    assert session.evaluate("rank")[1] == 1


def test_a_run_that_waits_behind_a_stopped_one_is_not_run(session: Session) -> None:
    first = session.submit(time.sleep, 60)
    second = session.submit(exec, "global ran; ran = True")
    until_busy(session)
    assert session.interrupt() is True
    with pytest.raises(RunInterrupt):
        first.result(10)
    with pytest.raises(RunInterrupt, match="before it began"):
        second.result(10)
    assert session.evaluate("'ran' in globals()")[0] is False


LINE_PROFILER = """
import inspect, linecache, os

def is_generated_code(filename):
    return filename.startswith(("<generated", "<ipython-input-", "/tmp/ipykernel_"))

def show_func(filename, start_lineno):
    if not (os.path.exists(filename) or is_generated_code(filename)):
        return f"Could not find file {filename}"
    if os.path.exists(filename):
        linecache.clearcache()
    return "".join(inspect.getblock(linecache.getlines(filename)[start_lineno - 1 :]))
"""
"""How line_profiler 4 and 5 look for the source of a function."""


def test_profilers_find_the_source_of_a_cells_function(session: Session, tmp_path: Path) -> None:
    package = tmp_path / "line_profiler"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "line_profiler.py").write_text(LINE_PROFILER)
    session.execute("def of_cell(n):\n    return n + 1")
    session.execute(f"import sys\nsys.path.append({str(tmp_path)!r})")
    shown = session.execute(
        "from line_profiler import line_profiler\n"
        "code = of_cell.__code__\n"
        "line_profiler.show_func(code.co_filename, code.co_firstlineno)",
        fetch=True,
    )
    assert shown[0] == "def of_cell(n):\n    return n + 1\n"
    source = session.execute(
        "import inspect, linecache\n"
        "linecache.clearcache()\n"
        "linecache.checkcache()\n"
        "inspect.getsource(of_cell)",
        fetch=True,
    )
    assert source[0] == shown[0]
