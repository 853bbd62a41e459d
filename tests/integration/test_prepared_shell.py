"""The shell that ranks are forked with is each rank's own, and none of the agent's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distsession import Session
from distsession.engine.agent import LARGE_PAGES_RANKS
from tests.memory_pages import needs_large_pages
from tests.until import until

USE = """
import sys, builtins
shell = get_ipython()
mark = f"of rank {rank}"
6 * 7
%alias mine echo mine
%config InteractiveShell.ast_node_interactivity = "all"
shell.push({"pushed": mark})
shell.register_magic_function(lambda line: mark, magic_name="marked")
shell.events.register("post_run_cell", lambda *_: None)
shell.display_formatter.formatters["text/plain"].for_type(complex, lambda *_: mark)
shell.history_manager.dir_hist.append(mark)
shell.Completer.mark = mark
shell.input_transformers_cleanup.append(lambda lines: lines)
builtins.extra = mark
In.append(mark)
Out[1] = mark
%cd -q /
"""
FACTS = """
(
    sorted(name for name in globals() if name in ("pushed", "mark")),
    "marked" in get_ipython().magics_manager.magics["line"],
    get_ipython().alias_manager.is_alias("mine"),
    get_ipython().ast_node_interactivity,
    len(get_ipython().events.callbacks["post_run_cell"]),
    complex in get_ipython().display_formatter.formatters["text/plain"].type_printers,
    hasattr(get_ipython().Completer, "mark"),
    len(get_ipython().input_transformers_cleanup),
    hasattr(__import__("builtins"), "extra"),
    In,
    Out,
    [str(folder) for folder in _dh],
    __import__("os").getcwd(),
)
"""
OF_THE_PROCESS = """
import IPython, builtins, os, sys
of_process = (
    get_ipython() is IPython.get_ipython(),
    get_ipython().user_ns is globals(),
    vars(sys.modules["__main__"]) is globals(),
    get_ipython()._orig_sys_module_state["stdout"] is sys.stdout,
    hasattr(builtins, "__IPYTHON__"),
    os.environ["PAGER"],
    os.path.samefile(get_ipython().ipython_dir, os.environ["IPYTHONDIR"]),
    get_ipython().starting_dir,
    [str(folder) for folder in _dh],
)
"""
LOOKS = """
import builtins, os, sys
from IPython import get_ipython
shell = get_ipython() is not None
names = [name for name in ("__IPYTHON__", "display", "get_ipython") if hasattr(builtins, name)]
main = vars(sys.modules["__main__"]).get("get_ipython") is not None
pager = os.environ.get("PAGER")
prompt = hasattr(sys, "ps1")
pid = os.getpid()
"""


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(2, threads=1) as session:
        yield session


def test_what_a_rank_does_to_its_shell_no_other_rank_has_nor_a_later_one(session: Session) -> None:
    fresh = dict(session.evaluate(FACTS))
    assert fresh[0] == fresh[1]
    session[0].execute(USE)
    used = session.evaluate(FACTS)
    assert used[1] == fresh[1]
    assert used[0] != fresh[0]
    assert not [where for where in range(1, len(used[0])) if used[0][where] == fresh[0][where]]
    session.restart()
    assert dict(session.evaluate(FACTS)) == fresh


def test_a_shell_knows_the_process_and_the_folder_that_it_is_in(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setenv("PAGER", "less")
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / f"ipython of {folder}"))
        session.restart()
        session.execute(OF_THE_PROCESS)
        cwd = os.getcwd()
        expected = (True, True, True, True, True, "cat", True, cwd, [cwd])
        assert dict(session.evaluate("of_process")) == {0: expected, 1: expected}


def test_what_the_agent_imports_later_finds_no_shell(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "looks_for_a_shell.py").write_text(LOOKS)
    session.preload("looks_for_a_shell")
    session.restart()
    found: Any = session.evaluate(
        "(lambda m: (m.shell, m.names, m.main, m.pager, m.prompt, m.pid))"
        "(__import__('looks_for_a_shell'))"
    )[0]
    agent = psutil.Process(session.infos[0].pid).ppid()
    assert found == (False, [], False, os.environ.get("PAGER"), False, agent)


def test_the_prompts_history_is_no_file(session: Session) -> None:
    """No thread of a history's may be alive where ranks are forked, nor a file be held open."""
    agent = psutil.Process(psutil.Process(session.infos[0].pid).ppid())
    assert agent.num_threads() == 1
    assert not [file.path for file in agent.open_files() if "sqlite" in file.path]


@needs_large_pages
@pytest.mark.usefixtures("cold_agents")
def test_an_agent_that_has_nothing_to_do_puts_its_memory_into_large_pages() -> None:
    with Session(LARGE_PAGES_RANKS, threads=1) as session:
        session.execute("kept = list(range(100_000))")
        agent = psutil.Process(session.infos[0].pid).ppid()
        until(lambda: _large(agent) > 50, "large pages")
        assert session.evaluate("kept == list(range(100_000))")[1]
        session.restart()
        session.execute("total = torch.ones(1)\ndist.all_reduce(total)")
        assert list(session.evaluate("int(total)").values()) == [LARGE_PAGES_RANKS] * 4


def _large(pid: int) -> int:
    """Megabytes of large pages."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "AnonHugePages":
            return int(size.split()[0]) // 1024
    return 0


def test_the_manager_of_comms_is_made_before_the_ranks_are() -> None:
    program = (
        "import comm\n"
        "from distsession.engine import ipython\n"
        "made, make = [], comm.get_comm_manager\n"
        "comm.get_comm_manager = lambda: made.append(make())\n"
        "ipython.prepare_shell('')\n"
        "assert made == [make()]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
