"""The command line."""

from __future__ import annotations

import sys
from dataclasses import fields

import pytest

from distsession import __version__
from distsession.cli import main
from distsession.options import SessionOptions


def ended(*arguments: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_the_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    assert "doctor" in capsys.readouterr().out


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_the_help_of_doctor_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("doctor", "--help") == 0
    text = capsys.readouterr().out
    for option in fields(SessionOptions):
        flag = "ranks" if option.name == "ranks" else "--" + option.name.replace("_", "-")
        assert flag in text
        assert " ".join(option.metadata["help"].split()) in " ".join(text.split())


@pytest.mark.parametrize(
    "arguments",
    [("nurse",), ("doctor", "--no-such"), ("doctor", "two"), ("doctor", "--launcher", "slurm")],
)
def test_what_is_not_understood_ends_with_the_usage(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*arguments) == 2
    assert capsys.readouterr().err.startswith("usage: distsession")


def test_a_script_is_not_run_where_a_package_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distsession.scripts.run", None)
    assert main(["run", "train.py"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distsession: import of distsession.scripts.run halted")
    assert "distsession doctor" in line
