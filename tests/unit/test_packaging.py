"""What is declared and what is shipped."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import distsession
from distsession.engine import host_info

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = DECLARED["project"], DECLARED["build-system"]
CONDA_NAMES = {"torch": "pytorch"}


def bounds(requirements: list[str]) -> dict[str, str]:
    """For each package what is asked of it, such as ``>=2.8``."""
    found = [re.fullmatch(r"([\w-]+) ?([<>=!.,*\d]*)", text) for text in requirements]
    return {match[1]: match[2] for match in found if match}


def entries(text: str) -> list[str]:
    """The entries of a YAML file's lists, or of a part of it."""
    lines = [line.strip() for line in text.splitlines()]
    return [line[2:].partition("#")[0].strip() for line in lines if line.startswith("- ")]


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


def conda_bounds() -> dict[str, str]:
    ours = bounds(PROJECT["dependencies"])
    assert len(ours) == len(PROJECT["dependencies"])
    return {CONDA_NAMES.get(name, name): bound for name, bound in ours.items()}


def test_the_conda_environment_asks_for_the_same() -> None:
    conda = bounds(entries((ROOT / "environment.yml").read_text()))
    for name, bound in conda_bounds().items():
        assert conda[name] == bound, name


def test_the_conda_recipe_asks_for_the_same_and_makes_the_same() -> None:
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    run = re.search(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    host = re.search(r"^  host:\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    assert run
    assert host
    python = {"python": PROJECT["requires-python"], "__linux": ""}
    assert bounds(entries(run[1])) == conda_bounds() | python
    assert bounds(BUILD["requires"]).items() <= bounds(entries(host[1])).items()
    assert f'version: "{distsession.__version__}"' in recipe
    ((name, target),) = PROJECT["scripts"].items()
    assert f"- {name} = {target}\n" in recipe
    assert f"summary: {PROJECT['description']}\n" in recipe


def test_what_is_cited_is_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {distsession.__version__}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation


def test_the_newest_version_of_the_changelog_is_this_one_and_has_the_date_that_is_cited() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first, newest = re.findall(r"^## (.*)$", text, re.MULTILINE)[:2]
    dated = re.search(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert dated
    assert first == "[Unreleased]"
    assert newest == f"[{distsession.__version__}] - {dated[1]}"
    for name in ("Unreleased", distsession.__version__):
        assert f"\n[{name}]: {PROJECT['urls']['Homepage']}/" in text


def test_all_files_name_one_home_of_the_project() -> None:
    home = PROJECT["urls"]["Homepage"]
    names = ("README.md", "SECURITY.md", "CITATION.cff", "CHANGELOG.md", "pyproject.toml")
    text = "".join((ROOT / name).read_text() for name in (*names, "recipe/recipe.yaml"))
    assert set(re.findall(r"https://github\.com/[\w-]+/distsession\b", text)) == {home}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme", reason="it makes the page of the package index")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_links_and_pictures_of_the_readme_lead_somewhere_from_everywhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = archive.read(name).decode().partition("\n\n")[2]
    found = re.findall(r'(?:\]\(|(?:src|href)=")([^)"\s]+)', page)
    home = PROJECT["urls"]["Homepage"].removeprefix("https://")
    raw = home.replace("github.com", "raw.githubusercontent.com")
    version = f"v{distsession.__version__}"
    for link in found:
        match = re.fullmatch(f"https://(?:{home}/blob|({raw}))/{version}/([^#]+)(?:#.*)?", link)
        assert link.startswith("https://")
        assert match or home not in link
        assert not match or (ROOT / match[2]).is_file(), link
        assert not match or bool(match[1]) is (Path(match[2]).suffix not in {".md", ""}), link
    assert any(home in link for link in found)


def test_type_checkers_are_told_that_there_are_types() -> None:
    assert Path(distsession.__file__).with_name("py.typed").is_file()


def test_the_wheel_has_all_modules_scripts_and_the_mark_for_type_checkers(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "distsession"
    files = {*package.rglob("*.py"), *package.rglob("*.js"), package / "py.typed"}
    assert names == {file.relative_to(ROOT).as_posix() for file in files}


def test_the_table_of_versions_has_the_oldest_that_are_allowed_and_nothing_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci/matrix.py")
    assert spec is not None
    assert spec.loader is not None
    matrix = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", matrix)
    spec.loader.exec_module(matrix)
    rows = {row[0]: row[1:] for row in (line[2:-2].split(" | ") for line in table(matrix))}
    assert set(rows) == {leg.name for leg in matrix.LEGS}
    assert {row[-1].split()[0] for row in rows.values()} == {"all"}
    smallest = dict(zip(matrix.COLUMNS, rows["smallest"], strict=False))
    assert smallest["numpy"] == "none"
    for name, bound in bounds(PROJECT["dependencies"]).items():
        least = re.match(r">=([\d.]+)", bound)
        assert least is not None
        if name in smallest:
            assert smallest[name].startswith(least[1]), name


def table(matrix: Any) -> list[str]:
    text = matrix.PAGE.read_text().partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    return [line for line in text.splitlines() if line.startswith("| ")][1:]
