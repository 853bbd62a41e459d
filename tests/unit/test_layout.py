"""Where each module runs, and what importing the package loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import distsession

PACKAGE = Path(distsession.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
KERNEL = (
    "diff.py",
    "jobs/export.py",
    "jobs/history.py",
    "jobs/launching.py",
    "jobs/script.py",
    "jobs/sources.py",
    "jobs/translate.py",
    "outcome.py",
    "overview.py",
    "questions.py",
    "recovery.py",
    "results.py",
    "session.py",
    "tracing.py",
    "transfer.py",
    "view.py",
    "waiting.py",
)
HEAVY = ("torch", "ipyparallel", "ipywidgets", "IPython", "numpy")


def place(module: str) -> str:
    """In which process a module runs, from where it lies."""
    if module == "cluster/controller_process.py":
        return "a process of its own"
    folder = module.partition("/")[0] if "/" in module else ""
    if folder in ("engine", "distributed"):
        return "an engine"
    if folder in ("cluster", "notebook") or module in KERNEL:
        return "the kernel"
    assert folder in ("", "jobs", "timeline"), f"nobody has said where the modules of {folder}/ run"
    return "both"


def test_the_modules_are_found() -> None:
    assert {"__init__.py", "errors.py", "engine/rank.py", "cluster/base.py"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_in_which_process_it_runs(module: str) -> None:
    docstring = ast.get_docstring(ast.parse((PACKAGE / module).read_text()))
    assert docstring is not None
    first, empty, runs, *_ = docstring.splitlines()
    assert first.endswith(".")
    assert empty == ""
    assert runs.removeprefix("Runs in: ").rstrip(".").split(",")[0] == place(module)
    assert runs.startswith("Runs in: ")
    assert runs.endswith(".")


@pytest.mark.parametrize(
    "statement",
    [
        "import distsession",
        "from distsession import Session, current_session",
        "from distsession import launch, LaunchOptions, start_training",
        "import distsession.cli",
    ],
)
def test_importing_the_package_loads_nothing_heavy(statement: str) -> None:
    code = f"import sys\n{statement}\nprint(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.stdout.split()) == ("", [])


@pytest.mark.parametrize("name", distsession.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(distsession, name) is not None


@pytest.mark.parametrize("name", distsession.errors.__all__)
def test_every_error_can_be_taken_from_the_package(name: str) -> None:
    assert getattr(distsession, name) is getattr(distsession.errors, name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'distsession' has no attribute 'Sesion'"):
        _ = distsession.Sesion
