"""Imports that take long: what a rank notes of them, and what is said of that."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession.engine import imports
from distsession.engine.imports import ImportWatch
from distsession.kernel.imports import ImportHints
from distsession.protocol.messages import CallRequest, PullRequest

RUN = CallRequest(1, "work")
WAITS = "import builtins\nbuiltins.let_look()\n"
"""A module in the import of which somebody looks what goes on."""


class Clock:
    """Time for the watch, which goes on when somebody looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Watched:
    """A watch, and another thread that looks when it is told to."""

    def __init__(self, clock: Clock):
        self.watch = ImportWatch()
        self._clock = clock

    def look(self, seconds: float = 6.0) -> None:
        """So many seconds later another thread looks at this one."""
        self._clock.now += seconds
        thread = threading.Thread(target=self.watch.update)
        thread.start()
        thread.join()

    def run(self, work: Callable[[], object], request: Any = RUN) -> dict[str, float]:
        self.watch.begin_request(request)
        try:
            work()
        finally:
            self.watch.end_code(request, None)
        return dict(self.watch.long())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    clock = Clock()
    monkeypatch.setattr(imports, "time", clock)
    watched = Watched(clock)
    monkeypatch.setattr("builtins.let_look", watched.look, raising=False)
    return watched


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed modules, of which nothing stays."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = {*sys.modules}
    yield folder
    for name in {*sys.modules} - before:
        del sys.modules[name]


def import_(name: str) -> Callable[[], object]:
    return lambda: importlib.import_module(name)


def test_the_outermost_import_counts_with_all_that_it_imports(
    watched: Watched, installed: Path
) -> None:
    (installed / "w_inner.py").write_text(WAITS)
    (installed / "w_outer.py").write_text(f"{WAITS}import w_inner\n")
    code = compile("import w_outer", "In[1]", "exec")
    assert watched.run(lambda: exec(code)) == {"w_outer": 12.0}


@pytest.mark.parametrize("statement", ["import w_pack.part", "from w_pack import part"])
def test_a_part_of_a_package_is_called_by_its_whole_name(
    watched: Watched, installed: Path, statement: str
) -> None:
    (installed / "w_pack").mkdir()  # a namespace package
    (installed / "w_pack" / "part.py").write_text(WAITS)
    assert watched.run(lambda: exec(statement)) == {"w_pack.part": 6.0}


def test_what_a_package_loads_when_it_is_asked_for_is_named(
    watched: Watched, installed: Path
) -> None:
    (installed / "w_lazy").mkdir()
    (installed / "w_lazy" / "__init__.py").write_text(
        "import importlib\n"
        "def __getattr__(name):\n"
        "    return importlib.import_module(f'w_lazy.{name}')\n"
    )
    (installed / "w_lazy" / "part.py").write_text(WAITS)
    assert watched.run(lambda: exec("from w_lazy import part")) == {"w_lazy.part": 6.0}


def test_an_import_from_a_zip_file_counts(
    watched: Watched, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(installed / "w.zip", "w") as file:
        file.writestr("w_zipped.py", WAITS)
    monkeypatch.syspath_prepend(str(installed / "w.zip"))
    assert watched.run(import_("w_zipped")) == {"w_zipped": 6.0}


def test_only_what_is_long_is_told(watched: Watched, installed: Path) -> None:
    (installed / "w_long.py").write_text("import builtins\nbuiltins.let_look(5.0)\n")
    (installed / "w_short.py").write_text("import builtins\nbuiltins.let_look(4.9)\n")
    assert watched.run(lambda: (import_("w_long")(), import_("w_short")())) == {"w_long": 5.0}


def test_what_comes_before_and_after_an_import_is_no_part_of_it(
    watched: Watched, installed: Path
) -> None:
    (installed / "w_some.py").write_text(WAITS)

    def work() -> None:
        watched.look(50.0)
        importlib.import_module("w_some")
        watched.look(50.0)

    assert watched.run(work) == {"w_some": 6.0}
    assert watched.run(watched.look) == {}  # the next run knows nothing of it


def test_a_file_of_the_user_s_own_is_not_named(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "w_own.py").write_text(WAITS)
    assert watched.run(import_("w_own")) == {}
    assert watched.watch._seconds == {"w_own": 6.0}
    del sys.modules["w_own"]


def test_a_module_that_does_not_import_is_not_named(watched: Watched, installed: Path) -> None:
    (installed / "w_fails.py").write_text(f"{WAITS}raise ValueError('no')\n")

    def work() -> None:
        with pytest.raises(ValueError, match="no"):
            importlib.import_module("w_fails")

    assert watched.run(work) == {}


def test_what_the_agent_imports_by_itself_is_not_named(
    watched: Watched, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "w_idle.py").write_text(WAITS)
    monkeypatch.setattr(imports, "LATER_IMPORTS", ("w_idle",))
    assert watched.run(import_("w_idle")) == {}


def test_requests_of_the_session_s_own_are_not_watched(watched: Watched, installed: Path) -> None:
    (installed / "w_pulled.py").write_text(WAITS)
    assert watched.run(import_("w_pulled"), PullRequest(1, ("x",))) == {}


def test_python_s_own_modules_are_installed_and_those_of_no_file_are_not() -> None:
    import json

    assert imports._is_installed(json.__name__)
    assert imports._is_installed(pytest.__name__)
    assert not imports._is_installed("sys")
    assert not imports._is_installed("no_such_module")
    assert not imports._is_installed(__name__)


# --- what is said ---------------------------------------------------------------------------------


def test_each_module_is_said_once_with_the_longest_time() -> None:
    hints = ImportHints()
    assert hints.text({0: [("a.b", 2.04)], 1: [("a.b", 6.14)]}) == (
        "`import a.b` took 6.1 s on each of 2 ranks: `%session preload a.b`, and later restarts "
        "have it at once."
    )
    assert hints.text({0: [("a.b", 3.0)]}) == ""
    assert hints.text({0: [], 1: [("a.b", 3.0), ("c", 2.0)]}) == (
        "`import c` took 2.0 s on rank 1: `%session preload c`, and later restarts have it at once."
    )


def test_several_modules_have_one_line() -> None:
    assert ImportHints().text({0: [("a", 3.0), ("b", 2.0)], 1: [("a", 3.0)]}) == (
        "`import a` took 3.0 s on each of 2 ranks and `import b` took 2.0 s on rank 0: "
        "`%session preload a b`, and later restarts have them at once."
    )


def test_nothing_is_said_of_what_is_preloaded() -> None:
    hints = ImportHints(["a"])
    hints.forget(["b"])
    assert hints.text({0: [("a", 3.0), ("b", 3.0)]}) == ""
    assert hints.text({0: [("a.b", 3.0)]}) != ""
