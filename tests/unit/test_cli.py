"""The command line."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from distsession import __version__
from distsession.cli import main
from distsession.host_plan import HostPlan
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
    [("nurse",), ("doctor", "--no-such"), ("doctor", "two"), ("doctor", "--launcher", "flux")],
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


def test_the_doctor_looks_at_hosts_with_the_launchers_own_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def examine(given: dict[str, Any], *, hosts: HostPlan | None, as_json: bool) -> int:
        seen.append((given, hosts))
        return 0

    monkeypatch.setattr("distsession.cli.doctor.examine", examine)
    typed = "doctor --launcher slurm --nodes 2 --partition gpu --time 10:00 --option gres=gpu:8"
    assert main([*typed.split(), "--address", "10.0.0.1", "--folder", "/scratch"]) == 0
    options = {"partition": "gpu", "time": "10:00", "gres": "gpu:8"}
    plan = HostPlan(
        launcher="slurm", nodes=2, options=options, addresses=("10.0.0.1",), folder="/scratch"
    )
    assert seen == [({}, plan)]


def test_flags_of_hosts_that_do_not_fit_together_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--hosts", "a"]) == 2
    assert "--hosts is for several hosts: give --launcher" in capsys.readouterr().err
    assert main(["doctor", "--launcher", "mpi", "--nodes", "2", "--map-by", "x"]) == 2
    assert "launcher='mpi' has no option 'map-by'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["top"], "there is no 'top': did you mean ls? It tells what each session does"),
        (["stopp"], "there is no 'stopp': did you mean stop?"),
        (["clsoe"], "there is no 'clsoe': did you mean close?"),
        (["daignose"], "there is no 'daignose': did you mean diagnose?"),
        (["ls", "--jsn"], "unrecognized arguments: --jsn: did you mean --json?"),
        (["kill", "digits"], "there is no 'kill': did you mean stop?"),
        (["doctor", "--devices", "cpux"], "it takes GPUs, not cpux"),
    ],
)
def test_what_may_have_been_meant_is_told(
    typed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 2


def test_a_session_is_closed_by_either_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    answers = []
    for word in ("stop", "close"):
        assert main([word, "no-such"]) == 1
        answers.append(capsys.readouterr().err)
    assert answers[0] == answers[1]
    assert "no session named no-such" in answers[0]
