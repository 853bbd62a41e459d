"""Modules that the agents of a session that runs import, for ranks that are started later."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from distsession import OptionsError, RunInterrupt, Session
from tests.conftest import assert_nothing_left, traces
from tests.until import Press, until

from .conftest import Recorder
from .kernel import Notebook

HAS = "__import__('sys').modules.get({!r}) is not None"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed modules, of this test alone."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = {*sys.modules}
    yield folder
    for name in {*sys.modules} - before:
        if os.path.dirname(getattr(sys.modules[name], "__file__", None) or "") == str(folder):
            del sys.modules[name]


def has(session: Session, name: str) -> list[bool]:
    """Which ranks have a module."""
    return list(session.evaluate(HAS.format(name)).values())


@pytest.mark.parametrize("options", [{}, {"nodes": 2}])
def test_ranks_that_are_started_later_have_a_module_that_was_preloaded(
    start: Callable[..., Session], modules: Path, options: dict[str, int]
) -> None:
    session = start(2, **options)
    (modules / "late_library.py").write_text("import os\npid = os.getpid()\n")
    session.execute("kept = 7")
    assert session.preload("late_library", "json") == ("json",)
    assert session.options.preload == ("late_library", "json")
    assert session.option_sources["preload"] == "preload()"
    assert has(session, "late_library") == [False, False]
    assert list(session.pull("kept").values()) == [7, 7]
    session.restart([1])
    assert has(session, "late_library") == [False, True]
    session.restart()
    assert has(session, "late_library") == [True, True]
    found = session.evaluate("(__import__('late_library').pid, __import__('os').getppid())")
    assert all(imported_by == agent for imported_by, agent in found.values())
    assert session.preload("late_library") == ("late_library",)


@pytest.mark.parametrize("options", [{}, {"nodes": 2}])
def test_an_agent_that_is_started_anew_imports_it_too(
    start: Callable[..., Session], modules: Path, options: dict[str, int]
) -> None:
    session = start(2, **options)
    (modules / "again_library.py").write_text("")
    session.preload("again_library")
    agent = psutil.Process(session.evaluate("__import__('os').getppid()")[1])
    agent.kill()
    until(lambda: session.launcher.dead_ranks(), "the end of the agent")
    session.restart()
    assert has(session, "again_library") == [True, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "'bad_library' does not import: ModuleNotFoundError"),
        ("raise ValueError('not today')", r"'bad_library' does not import: ValueError\('not today"),
        ("import sys; sys.exit(3)", r"'bad_library' does not import: SystemExit\(3"),
        ("import os; os._exit(3)", "importing good_library, bad_library ends .*: exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ends .*: SIGKILL"),
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(60,), daemon=True, name='its own').start()",
            r"its own.*because of bad_library",
        ),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_named_and_nothing_changes(
    start: Callable[..., Session], modules: Path, text: str | None, said: str
) -> None:
    session = start(2)
    (modules / "good_library.py").write_text("")
    if text is not None:
        (modules / "bad_library.py").write_text(text)
    session.execute("kept = 7")
    with pytest.raises(OptionsError, match=f"(?s){said}.*Nothing is changed"):
        session.preload("good_library", "bad_library")
    assert session.options.preload == ()
    assert list(session.pull("kept").values()) == [7, 7]
    session.restart()
    assert has(session, "good_library") == [False, False]


def test_no_host_has_a_module_that_one_of_them_cannot_import(
    start: Callable[..., Session], modules: Path
) -> None:
    session = start(2, nodes=2)
    (modules / "partly.py").write_text(
        "import sys\nif sys.argv[2] == '1':\n    raise OSError('it is not here')\n"
    )
    with pytest.raises(OptionsError, match="on node 1, the preload module 'partly' does not"):
        session.preload("partly")
    session.restart()
    assert has(session, "partly") == [False, False]


def test_a_stop_ends_the_trial_and_all_works_as_before(
    start: Callable[..., Session], modules: Path, tmp_path: Path
) -> None:
    session = start(2, nodes=2)
    (modules / "endless.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"with open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w') as file:\n"
        "    file.write(str(child.pid))\n"
        "time.sleep(600)\n"
    )

    def pids() -> list[int]:
        written = [path for path in tmp_path.iterdir() if path.is_file() and path.stat().st_size]
        return [pid for path in written for pid in (int(path.name), int(path.read_text()))]

    def are_importing() -> bool:
        return len(pids()) == 4

    with (
        Press(session, lambda: os.kill(os.getpid(), signal.SIGINT), lambda: until(are_importing)),
        pytest.raises(RunInterrupt, match="importing endless was stopped: nothing is changed"),
    ):
        session.preload("endless")
    until(lambda: not any(map(psutil.pid_exists, pids())), "the end of what tried it")
    assert session.options.preload == ()
    assert list(session.run(abs, -3).values()) == [3, 3]
    (modules / "good_library.py").write_text("")
    session.preload("good_library")
    session.restart()
    assert has(session, "good_library") == [True, True]


def test_a_stop_while_the_agent_imports_it_only_ends_the_wait(
    start: Callable[..., Session], modules: Path, tmp_path: Path
) -> None:
    session = start(2)
    agent, begun, go = (
        session.evaluate("__import__('os').getppid()")[0],
        *map(str, (tmp_path / "begun", tmp_path / "go")),
    )
    (modules / "slow_in_agent.py").write_text(
        "import os, time\n"
        f"if os.getpid() == {agent}:\n"
        f"    open({begun!r}, 'w').close()\n"
        f"    while not os.path.exists({go!r}):\n"
        "        time.sleep(0.01)\n"
    )

    def is_importing() -> bool:
        return os.path.exists(begun)

    with (
        Press(session, lambda: os.kill(os.getpid(), signal.SIGINT), lambda: until(is_importing)),
        pytest.raises(RunInterrupt, match="slow_in_agent is still being imported"),
    ):
        session.preload("slow_in_agent")
    assert session.options.preload == ("slow_in_agent",)
    assert list(session.run(abs, -3).values()) == [3, 3]
    open(go, "w").close()
    session.restart()
    assert has(session, "slow_in_agent") == [True, True]


def test_a_rank_that_dies_while_a_module_is_tried_is_told_of_meanwhile(
    start: Callable[..., Session], modules: Path, tmp_path: Path
) -> None:
    session = start(2)
    begun, go = str(tmp_path / "begun"), str(tmp_path / "go")
    (modules / "waits.py").write_text(
        "import os, time\n"
        f"open({begun!r}, 'w').close()\n"
        f"while not os.path.exists({go!r}):\n"
        "    time.sleep(0.01)\n"
    )

    def kill_and_see() -> None:
        until(lambda: os.path.exists(begun))
        os.kill(session.infos[1].pid, signal.SIGKILL)
        until(lambda: session.launcher.dead_ranks(), "the death")

    with Press(session, lambda: open(go, "w").close(), kill_and_see):
        session.preload("waits")
    session.restart([1])
    assert has(session, "waits") == [False, True]


def test_another_kernel_that_attaches_knows_what_was_preloaded(modules: Path) -> None:
    before = traces()
    (modules / "kept_library.py").write_text("")
    with Session(2, keep="5m", name="preloaded") as session:
        session.preload("kept_library")
        session.detach()
        with Session.attach("preloaded") as attached:
            assert attached.options.preload == ("kept_library",)
            attached.restart()
            assert has(attached, "kept_library") == [True, True]
    assert_nothing_left(before)


def test_an_inline_session_imports_it_here(modules: Path) -> None:
    (modules / "inline_library.py").write_text("")
    (modules / "bad_inline_library.py").write_text("raise ValueError('not today')")
    with Session(launcher="inline") as session:
        assert session.preload("inline_library", "json") == ("json",)
        assert "inline_library" in sys.modules
        with pytest.raises(OptionsError, match="'bad_inline_library' does not import: ValueError"):
            session.preload("bad_inline_library")
        assert session.options.preload == ("inline_library", "json")


def test_preload_without_a_name_says_what_it_takes(session: Session) -> None:
    with pytest.raises(OptionsError, match="names of modules"):
        session.preload()


# --- the hint -------------------------------------------------------------------------------------


def test_an_import_that_takes_long_is_said_once_to_be_worth_preloading(
    start: Callable[..., Session], modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import time\ntime.sleep(5.5)\n"
    (modules / "slow_library.py").write_text(f"import slow_part\n{slow}")
    (modules / "slow_part.py").write_text(slow)
    (modules / "other_library.py").write_text(slow)
    (tmp_path / "my_own.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    output = Recorder()
    session = start(2, output=output)
    session.execute("import json, sys\nimport slow_library")
    [said] = output.remarks
    assert said.startswith("`import slow_library` took ")
    assert " s on each of 2 ranks: `%session preload slow_library`, and later rest" in said
    session.execute("del sys.modules['slow_library'], sys.modules['slow_part']")
    session.execute("import slow_library")
    assert output.remarks == [said]
    session[1].run(lambda: __import__("other_library"))  # in a call, and on one rank
    assert output.remarks[1].startswith("`import other_library` took ")
    assert " s on rank 1: `%session preload other_library`" in output.remarks[1]
    session.execute("import my_own")  # its user may edit it
    assert len(output.remarks) == 2


def test_nothing_is_said_of_a_module_that_was_preloaded_or_of_one_that_is_fast(
    start: Callable[..., Session], modules: Path
) -> None:
    (modules / "slow_library.py").write_text("import time\ntime.sleep(5.5)\n")
    (modules / "fast_library.py").write_text("")
    output = Recorder()
    session = start(2, output=output)
    session.preload("slow_library")
    session.execute("import fast_library, slow_library")  # these ranks are from before
    session.restart()
    session.execute("import fast_library, slow_library")
    assert output.remarks == []


# --- in a notebook --------------------------------------------------------------------------------


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    shown = notebook.run("%load_ext distsession\n%session start 2 --backend gloo")
    assert "2 ranks, gloo" in shown.result, shown
    yield notebook
    notebook.close()


def test_the_magic_and_the_hint_of_a_notebook(notebook: Notebook, modules: Path) -> None:
    for name in ("first_slow", "second_slow"):
        (modules / f"{name}.py").write_text("import time\ntime.sleep(5.5)\n")
    notebook.run(f"import sys\nsys.path.insert(0, {str(modules)!r})\n%session restart")
    shown = notebook.run("%%distributed\nprint('before')\nimport first_slow\nrank + 10")
    said = shown.transcript.splitlines()
    assert said[:-1][-2:] == ["[rank 0] 10", "[rank 1] 11"]
    assert said[-1].startswith("`import first_slow` took ")
    assert said[-1].endswith("`%session preload first_slow`, and later restarts have it at once.")
    shown = notebook.run("%session preload first_slow,json second_slow")
    assert shown.result == (
        "json is imported already. first_slow, second_slow are imported once per host from now on: "
        "%session restart gives them to the ranks."
    )
    assert "It was running already" in notebook.run("%session start 2 --backend gloo").result
    assert notebook.run("%session preload json").result == "json is imported already."
    notebook.run("%session restart")
    shown = notebook.run("%%distributed\nimport first_slow, second_slow")
    assert (shown.stdout, shown.error) == ("", "")
    assert "preload()" in notebook.run("%session config").plain
    shown = notebook.run("%session preload no_such_module")
    assert shown.error.splitlines()[-1] == (
        "OptionsError: the preload module 'no_such_module' does not import: ModuleNotFoundError("
        "\"No module named 'no_such_module'\"). Nothing is changed: import it in a cell instead."
    )
