"""``distsession doctor`` in environments that work, and in some that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distsession
from distsession.cli.trial import Cell, notebook

pytestmark = pytest.mark.timeout(300)

Examine = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    """Runs the doctor; what is in ``tmp_path`` comes before all that is installed."""

    def examine(*options: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
        path = os.pathsep.join([str(tmp_path), str(Path(distsession.__file__).parents[1])])
        done = subprocess.run(
            [sys.executable, "-m", "distsession", "doctor", "--json", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, {each["what"]: each for each in json.loads(done.stdout)}

    return examine


def pretend(folder: Path, package: str, version: str, *requires: str) -> None:
    """What is installed says that it is of this version."""
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_an_environment_that_works_has_no_failure(examine: Examine) -> None:
    """What the environment asks of sessions is for those of the user, not for the notebook's."""
    code, found = examine(DISTSESSION_RANKS="3", DISTSESSION_NODES="3")
    assert [each for each in found.values() if each["mark"] == "FAIL"] == []
    assert code == 0
    assert found["all_reduce"]["value"].startswith("right")
    assert found["nodes"]["value"] == "3, 1 rank on each"
    assert found["rank 2"]["mark"] == "ok"
    assert "panel, %%px" in found["notebook's kernel"]["value"]


def test_versions_and_options_that_distsession_does_not_take_fail(
    examine: Examine, tmp_path: Path
) -> None:
    pretend(tmp_path, "distsession", distsession.__version__, "ipyparallel>=9.1", "torch>=2.8")
    pretend(tmp_path, "ipyparallel", "9.0.1")
    code, found = examine("4", "--nodes", "3")
    assert code == 1
    assert "ranks=4 cannot be shared out over nodes=3" in found["session"]["value"]
    assert found["ipyparallel"]["value"] == "9.0.1, but distsession needs >=9.1"
    assert "%%px never ends" in found["known to fail"]["value"]


def test_what_cannot_be_loaded_into_a_notebook_fails(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "ipywidgets.py").write_text("raise ImportError('made for another Python')\n")
    code, found = examine()
    assert code == 1
    assert found["all_reduce"]["mark"] == "ok"
    (failed,) = [each for each in found.values() if each["mark"] == "FAIL"]
    assert "made for another Python" in failed["value"]
    assert "pip install -U" in failed["mend"]


def test_a_module_that_is_missing_is_told_and_not_raised(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('No module named cloudpickle')\n")
    code, found = examine()
    assert code == 1
    assert "cloudpickle" in found["session"]["value"]


def test_a_cell_that_does_not_end_is_named_and_nothing_stays() -> None:
    first, hangs = Cell("first", "1"), Cell("%%px", "import time\nwhile True: time.sleep(1)")
    (finding,) = notebook([first, hangs, first], cell_s=2)
    assert finding.fatal
    assert (finding.what, finding.value) == ("%%px", "did not end within 2 s")


def test_a_cell_that_fails_is_named_with_its_error() -> None:
    (finding,) = notebook([Cell("sum", "1/0")])
    assert (finding.what, finding.value) == ("sum", "failed: ZeroDivisionError: division by zero")


def test_output_that_does_not_arrive_is_noticed() -> None:
    (finding,) = notebook([Cell("print", "print('nothing of it')", "engine")])
    assert (finding.what, finding.fatal) == ("print", True)
    assert finding.value == "shows nothing of its output: nothing of it"
