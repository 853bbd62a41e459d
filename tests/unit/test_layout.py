"""What importing the package loads, and what it offers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import distsession

PACKAGE = Path(distsession.__file__).parent
HEAVY = (
    *("torch", "ipyparallel", "ipywidgets", "IPython", "ipykernel", "jupyter_client", "traitlets"),
    *("numpy", "pandas", "asyncio", "pynvml", "packaging"),
)
BESIDE_A_SESSION = (
    *("zmq", "cloudpickle", "cryptography", "distsession.session", "email"),
    "importlib.metadata",
)


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
    assert loaded(statement, HEAVY) == []


@pytest.mark.parametrize("statement", ["import distsession", "import distsession.cli"])
def test_the_package_alone_loads_nothing_of_a_session(statement: str) -> None:
    assert loaded(statement, BESIDE_A_SESSION) == []


def loaded(statement: str, modules: Sequence[str]) -> list[str]:
    """Which of these modules a statement has loaded, in a process of its own."""
    code = f"import sys\n{statement}\nprint(*[m for m in {modules} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("name", distsession.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(distsession, name) is not None


@pytest.mark.parametrize("name", distsession.errors.__all__)
def test_every_error_can_be_taken_from_the_package(name: str) -> None:
    assert getattr(distsession, name) is getattr(distsession.errors, name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'distsession' has no attribute 'Sesion'"):
        _ = distsession.Sesion
