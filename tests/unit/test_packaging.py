"""What is declared and what is shipped."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import distsession
from distsession.engine import host_info

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch"}


def bounds(requirements: list[str]) -> dict[str, str]:
    """For each package what is asked of it, such as ``>=2.8``."""
    found = [re.fullmatch(r"([\w-]+)([<>=.\d]*)", text) for text in requirements]
    return {match[1]: match[2] for match in found if match}


def test_the_oldest_torch_that_is_declared_is_the_oldest_that_starts() -> None:
    least = bounds(PROJECT["dependencies"])["torch"]
    assert least == f">={'.'.join(map(str, host_info.OLDEST_TORCH))}"


@pytest.mark.parametrize(
    ("version", "works"),
    [("2.7.1+cu126", False), ("1.13.1", False), ("2.8.0", True), ("2.10.0a0+git1", True)],
)
def test_a_torch_that_is_too_old_is_named(
    version: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    problem = host_info.torch_problem()
    if works:
        assert problem == ""
    else:
        assert f"torch {version} is too old" in problem
        assert f"{sys.executable} -m pip install" in problem


def test_the_conda_environment_asks_for_the_same() -> None:
    lines = [line.strip() for line in (ROOT / "environment.yml").read_text().splitlines()]
    entries = [line[2:].partition("#")[0].strip() for line in lines if line.startswith("- ")]
    conda = bounds(entries)
    for name, bound in bounds(PROJECT["dependencies"]).items():
        assert conda[CONDA_NAMES.get(name, name)] == bound, name


def test_type_checkers_are_told_that_there_are_types() -> None:
    assert Path(distsession.__file__).with_name("py.typed").is_file()


def test_the_wheel_has_all_modules_scripts_and_the_mark_for_type_checkers(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "distsession"
    files = {*package.rglob("*.py"), *package.rglob("*.js"), package / "py.typed"}
    assert names == {file.relative_to(ROOT).as_posix() for file in files}
