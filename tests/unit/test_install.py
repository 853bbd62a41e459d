"""``.ci/pip_install.py``, with a Python that only says what pip would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "pip_install.py"
SAYS = """
WARNING: an index is ignored
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-manylinux.whl (180.2 MB)
WARNING: an index is ignored
Installing collected packages: sympy, torch
Successfully installed sympy-1.14.0 torch-2.13.0
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Says what ``$SAYS`` has, and ends with ``$CODE``."""
    path = tmp_path / "venv" / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text('#!/bin/sh\necho "$SAYS"\necho "$@"\nexit "$CODE"\n')
    path.chmod(0o700)
    return path


def install(python: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env={**os.environ, "SAYS": SAYS, "CODE": str(code)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_was_installed_is_said_in_one_line(python: Path) -> None:
    done = install(python, str(python), "torch==2.13.0")
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("pip: installed 2 packages (")


def test_all_that_pip_says_is_kept(python: Path) -> None:
    install(python, str(python), "torch==2.13.0")
    log = (python.parents[1] / "pip.log").read_text()
    assert SAYS in log
    assert "-m pip install --progress-bar=off torch==2.13.0" in log


def test_a_failure_is_told_without_the_warnings(python: Path) -> None:
    done = install(python, str(python), "torch==2.13.0", code=1)
    assert done.returncode == 1
    assert done.stderr.startswith("pip: failed: torch==2.13.0")
    assert "Collecting torch==2.13.0" in done.stderr
    assert "WARNING" not in done.stderr


def test_a_try_that_fails_says_nothing(python: Path) -> None:
    done = install(python, "--try", str(python), "torch==2.13.0+cpu", code=1)
    assert (done.returncode, done.stderr) == (1, "")


def test_in_a_terminal_the_line_is_written_over(python: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(
        sys.executable,
        [str(SCRIPT), str(python), "torch==2.13.0"],
        env={**os.environ, "SAYS": SAYS, "CODE": "0"},
        encoding="utf-8",
        timeout=60,
    )
    child.expect(pexpect.EOF)
    shown = child.before.split("\r\x1b[K")
    assert any(line.startswith("pip: downloading torch, 180.2 MB") for line in shown)
    assert any(line.startswith("pip: installing 2 packages") for line in shown)
    assert child.before.count("\n") == 1
