"""Programs that follow the official tutorials' steps give in cells what they give under torchrun.

So do short ones after what users have reported of torch in public, which `reports/` has; each names
its report.

One session runs all of them, one after another, as a notebook does in a day: each makes its process
group and destroys it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession import Session

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
RANKS = 2
CELL_TIMEOUT_S = 100.0
TORCHRUN_TIMEOUT_S = 120.0
REPORTS_TIMEOUT_S = 600.0
"""Of all of them, one after another, under torchrun. Each has a limit of its own there."""

PROGRAMS = sorted((HERE / "programs").glob("*.py"))
LIBRARIES = sorted((HERE / "libraries").glob("*.py"))
REPORTS = sorted((HERE / "reports").glob("*.py"))


def cells(program: Path) -> list[str]:
    return [part for part in re.split(r"^# %%.*\n", program.read_text(), flags=re.M) if part]


def run_in_cells(session: Session, program: Path) -> dict[int, Any]:
    for cell in cells(program):
        session.execute(cell, timeout=CELL_TIMEOUT_S)
    results = session.evaluate("result")
    return {rank: json.loads(json.dumps(value)) for rank, value in results.items()}


def run_under_torchrun(program: Path, folder: Path) -> dict[int, Any]:
    torchrun("as_script.py", program, folder)
    return {r: json.loads((folder / f"{r}.json").read_text()) for r in range(RANKS)}


def torchrun(script: str, *arguments: Path, timeout: float = TORCHRUN_TIMEOUT_S) -> None:
    options = ["--standalone", "--nproc-per-node", str(RANKS), HERE / script]
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            _, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # and with it the program's processes
            raise
    assert process.returncode == 0, said[-4000:]


def assert_equal(mine: Any, theirs: Any) -> None:
    """Numbers may differ in their last digits: a rank here has another number of threads."""
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_equal(mine[key], theirs[key])
    elif isinstance(mine, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)
    elif isinstance(mine, float):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    else:
        assert mine == theirs


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(RANKS) as session:
        yield session


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_tutorial_gives_in_cells_what_it_gives_under_torchrun(
    session: Session, program: Path, tmp_path: Path
) -> None:
    mine = run_in_cells(session, program)
    assert_equal(mine, run_under_torchrun(program, tmp_path))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all programs after public reports give under torchrun, which is started once."""
    folder = tmp_path_factory.mktemp("reports")
    torchrun("as_scripts.py", folder, *REPORTS, timeout=REPORTS_TIMEOUT_S)
    return folder


@pytest.mark.timeout(REPORTS_TIMEOUT_S + CELL_TIMEOUT_S)
@pytest.mark.parametrize("program", REPORTS, ids=lambda program: program.stem)
def test_a_reported_program_gives_in_cells_what_it_gives_under_torchrun(
    session: Session, program: Path, reports: Path
) -> None:
    results = [reports / f"{program.stem}-{rank}.json" for rank in range(RANKS)]
    for path in results:
        assert path.exists(), path.with_suffix(".txt").read_text()
    theirs = {rank: json.loads(path.read_text()) for rank, path in enumerate(results)}
    if "init_rpc" in program.read_text():
        session.restart()  # after a second init_rpc in a process, torch fails by itself
    assert_equal(run_in_cells(session, program), theirs)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="make tutorials has it")
@pytest.mark.parametrize("program", LIBRARIES, ids=lambda program: program.stem)
def test_a_library_gives_in_cells_what_it_gives_under_torchrun(
    session: Session, program: Path, tmp_path: Path
) -> None:
    mine = run_in_cells(session, program)
    assert_equal(mine, run_under_torchrun(program, tmp_path))
