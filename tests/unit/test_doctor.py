"""What the doctor finds in packages, and how it tells."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import distsession
from distsession.cli import doctor, packages, trial
from distsession.cli.finding import Finding

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
GOOD = {
    "distsession": distsession.__version__,
    "torch": "2.13.0+cpu",
    "ipyparallel": "9.2.0",
    "ipykernel": "7.1.0",
    "zmq-bindings": "27.0",
    "numpy": "2.3.0",
}
ASKED = {
    "distsession": [
        "torch>=2.8",
        "ipyparallel>=8.8,!=9.0.*",
        "ipykernel>=6.17",
        'pandas>=2; extra == "test"',
        'winreg>=1; sys_platform == "win32"',
    ],
    "ipykernel": ["zmq_bindings>=26"],
    "zmq-bindings": ["ipykernel"],
}

Find = Callable[..., dict[str, Finding]]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Find:
    """The findings, by what they are about, if these versions are installed."""

    def find(**changes: str | None) -> dict[str, Finding]:
        there = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}

        def look_up(where: Mapping[str, object], name: str) -> object:
            if name.replace("_", "-") not in there:
                raise importlib.metadata.PackageNotFoundError(name)
            return where.get(name.replace("_", "-"))

        monkeypatch.setattr(importlib.metadata, "version", lambda name: look_up(there, name))
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: look_up(ASKED, name))
        return {finding.what: finding for finding in packages.packages()}

    return find


def test_packages_that_are_as_they_are_asked_for_are_ok(find: Find) -> None:
    found = find()
    assert {name: each.value for name, each in found.items() if name in GOOD} == {
        name: GOOD[name] for name in ("distsession", "torch", "ipyparallel", "ipykernel")
    }
    assert not [each for each in found.values() if each.mend]


def test_without_numpy_it_is_said_what_does_not_work(find: Find) -> None:
    finding = find(numpy=None)["numpy"]
    assert finding.value.startswith("not installed: torch does without it")
    assert finding.mend.endswith("-m pip install numpy")
    assert not finding.fatal


def test_the_python_is_named_with_its_place(find: Find) -> None:
    assert sys.executable in find()["python"].value


@pytest.mark.parametrize(
    ("package", "version", "needed"),
    [
        ("torch", "2.7.1+cu126", ">=2.8"),
        ("ipyparallel", "8.7.0", "!=9.0.*,>=8.8"),
        ("ipyparallel", "9.0.2", "!=9.0.*,>=8.8"),
        ("ipykernel", "6.16.2", ">=6.17"),
    ],
)
def test_a_version_outside_what_is_asked_for_fails(
    package: str, version: str, needed: str, find: Find
) -> None:
    finding = find(**{package: version})[package]
    assert finding.fatal
    assert finding.value == f"{version}, but distsession needs {needed}"
    assert finding.mend == f"{sys.executable} -m pip install '{package}{needed}'"


@pytest.mark.parametrize("version", ["2.8.0", "2.15.0a0+git12", "3.0.0.dev20261101"])
def test_previews_and_builds_of_ones_own_are_versions_too(version: str, find: Find) -> None:
    assert find(torch=version)["torch"].mark == "ok"


def test_a_package_that_is_missing_fails(find: Find) -> None:
    finding = find(ipykernel=None)["ipykernel"]
    assert finding.fatal
    assert "not installed" in finding.value
    assert "pip install 'ipykernel>=6.17'" in finding.mend


def test_several_that_are_wrong_get_one_command(find: Find) -> None:
    together = find(ipykernel=None, torch="2.7")["these together"]
    assert together.mend == f"{sys.executable} -m pip install 'torch>=2.8' 'ipykernel>=6.17'"
    assert "these together" not in find(ipykernel=None)


def test_what_packages_ask_for_themselves_is_a_warning(find: Find) -> None:
    missing = find(**{"zmq-bindings": None})["for ipykernel"]
    old = find(**{"zmq-bindings": "25.1"})["for ipykernel"]
    assert (missing.mark, missing.value) == (
        "warn",
        "zmq_bindings: not installed, but ipykernel needs it",
    )
    assert (old.mark, old.value) == ("warn", "zmq_bindings: 25.1, but ipykernel needs >=26")


@pytest.mark.parametrize(
    ("versions", "how", "words"),
    [
        ({"torch": "2.7.1"}, "FAIL", "torch 2.7.1: no session starts"),
        ({"torch": "2.8.0+cpu"}, "warn", "FSDP2"),
        (
            {"ipyparallel": "9.0.0"},
            "FAIL",
            "ipyparallel 9.0.0 with ipykernel 7.1.0: a cell",
        ),
        ({"ipyparallel": "9.0.1", "ipykernel": "7.4.0"}, "FAIL", "never ends"),
    ],
)
def test_what_is_known_to_fail_is_named(
    versions: dict[str, str], how: str, words: str, find: Find
) -> None:
    (known,) = [each for name, each in find(**versions).items() if name.startswith("known")]
    assert known.mark == how
    assert words in known.value
    assert f"{sys.executable} -m pip install " in known.mend


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.9.0"},
        {"ipyparallel": "9.0.0", "ipykernel": "6.29.5"},
        {"ipyparallel": "8.8.0"},
        {"ipyparallel": None, "torch": None},
    ],
)
def test_what_works_is_not_known_to_fail(versions: dict[str, str | None], find: Find) -> None:
    assert not [name for name in find(**versions) if name.startswith("known")]


def test_what_is_advised_is_what_is_asked_for() -> None:
    """Whoever follows the advice on a failure has no other failure then."""
    bounds = {re.split("[<>=!]", text)[0]: text for text in PROJECT["dependencies"]}
    for trouble in packages.TROUBLES:
        name, _, least = trouble.mend.partition(">=")
        assert name in bounds
        assert all(part not in bounds[name] for part in (f"!={least}", f"<{least}"))


def test_two_copies_of_distsession_are_noticed(find: Find) -> None:
    finding = find(distsession="0.0.1")["distsession"]
    assert finding.mark == "warn"
    assert "0.0.1 is installed" in finding.value
    assert distsession.__file__ in finding.mend


def test_without_an_installation_the_rest_is_told(find: Find) -> None:
    found = find(distsession=None)
    assert found["distsession"].mark == "warn"
    assert "torch" not in found


def test_without_packaging_that_is_said(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    found = find()
    assert found["packaging"].fatal


def checks(*findings: Finding) -> Callable[[], Iterator[Finding]]:
    return lambda: iter(findings)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Runs the doctor on these checks alone; gives its exit code and what it printed."""

    def tell(*found: Callable[[], Iterator[Finding]], **how: bool) -> tuple[int, str]:
        first, *others = found
        monkeypatch.setattr(doctor, "packages", first)
        monkeypatch.setattr(doctor.machine, "CHECKS", tuple(others))
        monkeypatch.setattr(doctor.trial, "session", lambda options: iter(()))
        monkeypatch.setattr(doctor.trial, "notebook", checks())
        return doctor.examine({}, **how), capsys.readouterr().out

    return tell


OK = Finding("sleep", "8 h")
WARNED = Finding("coffee", "3 cups", "drink water")
FAILED = Finding("heart", "stopped", "start it", fatal=True, details="since\nnoon")


@pytest.mark.parametrize(
    ("findings", "code", "end"),
    [
        ([OK], 0, "Nothing is missing."),
        ([OK, WARNED], 0, "0 that stop a session or a part of it, 1 that may limit one."),
        ([FAILED, WARNED], 1, "1 that stop a session or a part of it, 1 that may limit one."),
    ],
)
def test_only_what_fails_gives_exit_code_1(
    findings: Sequence[Finding], code: int, end: str, told: Callable
) -> None:
    result, text = told(checks(*findings))
    assert result == code
    assert text.splitlines()[-1] == end


def test_what_was_found_is_told_with_what_to_do(told: Callable) -> None:
    _, text = told(checks(OK, FAILED))
    assert text.splitlines()[:5] == [
        "  ok  sleep                  8 h",
        "FAIL  heart                  stopped",
        f"{'':30}since",
        f"{'':30}noon",
        f"{'':30}-> start it",
    ]


def test_as_json_it_is_one_list(told: Callable) -> None:
    code, text = told(checks(OK, FAILED), as_json=True)
    assert code == 1
    assert [(each["mark"], each["what"], each["mend"]) for each in json.loads(text)] == [
        ("ok", "sleep", ""),
        ("FAIL", "heart", "start it"),
    ]


def test_a_check_that_fails_itself_does_not_hide_the_others(told: Callable) -> None:
    def broken() -> Iterator[Finding]:
        yield OK
        raise OSError("no thermometer")

    code, text = told(broken, checks(WARNED))
    assert code == 1
    assert "OSError: no thermometer" in text
    assert "sleep" in text
    assert "coffee" in text


def test_a_kernel_that_does_not_start_is_told_with_its_last_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho first\necho no module of that name\nexit 3\n")
    python.chmod(0o700)
    (finding,) = trial.notebook(python=str(python))
    assert finding.fatal
    assert finding.value == "ended with exit code 3 as it started: no module of that name"
