"""The report and the benchmarks run from a checkout that is not installed."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.pages import ROOT

PROGRAM = """
import sys
from tests.benchmarks.processes import own_world, run_program
look = "import distsession, tests.benchmarks; print(distsession.__file__)"
with own_world():
    print(run_program([sys.executable, "-P", "-c", look]))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with what is installed here, without the files that name checkouts."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    here = {"base": str(folder), "platbase": str(folder)}
    ours = Path(sysconfig.get_path("purelib", vars=here))
    (ours / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin/python"
    if _run(python, "-P", "-c", "import distsession").returncode == 0:
        pytest.skip("distsession is installed as files, not as a link to a checkout")
    return python


def _run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_programs_of_the_benchmarks_import_the_checkout(bare: Path) -> None:
    done = _run(bare, "-c", PROGRAM)
    assert str(ROOT / "distsession") in done.stdout, done.stderr


def test_the_report_starts_its_sessions(bare: Path) -> None:
    done = _run(bare, "-m", "tests.gpu", "--backend", "gloo", "--only", "GPT with Distributed")
    assert "1 held, 0 FAILED" in done.stdout, done.stdout + done.stderr
