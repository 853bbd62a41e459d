"""What the magics' own lines may say."""

from __future__ import annotations

import pytest

from distsession.errors import OptionsError
from distsession.notebook.parsers import cell_parser, parse, session_help, session_parser


@pytest.mark.parametrize("comment", ["", " # all", "  # rank 1's", " #", ' # "both'])
def test_a_comment_may_end_the_line(comment: str) -> None:
    found = parse(session_parser(), f"restart 1 --restore model{comment}")

    assert found is not None
    assert (found.ranks, found.restore) == ("1", "model")


def test_a_line_may_be_a_comment() -> None:
    found = parse(cell_parser(), "# only the ranks see this")

    assert found == parse(cell_parser(), "")


@pytest.mark.parametrize("name", ["run#2.py", "'run # 2.py'", '"#2.py"', "'a b'\" # c\""])
def test_a_name_may_have_the_sign(name: str) -> None:
    found = parse(session_parser(), f"export {name}  # the second")

    assert found is not None
    assert "#" in found.path
    assert "the second" not in found.path


def test_flags_of_a_launcher_for_hosts_are_its_options() -> None:
    line = "start 16 --launcher slurm --nodes 2 --partition gpu --gres=gpu:8 --exclusive  # all"
    found = parse(session_parser(), line)

    assert found is not None
    assert (found.verb, found.ranks, found.nodes) == ("start", 16, 2)
    assert found.launcher_options == {"partition": "gpu", "gres": "gpu:8", "exclusive": ""}
    both = parse(session_parser(), "start --launcher=slurm --launcher-options 'a=1 b=2' --b 3")
    assert both is not None
    assert both.launcher_options == {"a": "1", "b": "3"}


@pytest.mark.parametrize("launcher", ["", "--launcher local"])
def test_other_launchers_have_no_flags_of_their_own(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTSESSION_LAUNCHER", raising=False)
    with pytest.raises(OptionsError, match="unrecognized arguments: --partition gpu"):
        parse(session_parser(), f"start 2 {launcher} --partition gpu")


def test_hosts_and_their_ranks_are_lists() -> None:
    line = "start --launcher ssh --hosts gpu1,me@gpu2:22 --ranks-per-host 8,4"
    found = parse(session_parser(), line)

    assert found is not None
    assert (found.hosts, found.ranks_per_host) == (("gpu1", "me@gpu2:22"), (8, 4))
    command = parse(session_parser(), "start --launcher command --command 'srun -N2 {agent}'")
    assert command is not None
    assert (command.verb, command.command) == ("start", "srun -N2 {agent}")


@pytest.mark.parametrize("flag", ["--rank 1", "--ranks=1", "-t 1", "--targets 1"])
def test_who_chooses_ranks_by_a_flag_is_told_to_leave_it_out(flag: str) -> None:
    text = "ranks are given without a flag, as in %%distributed 0-1. See"
    with pytest.raises(OptionsError, match=text):
        parse(cell_parser(), flag)
    with pytest.raises(OptionsError, match=r"as in %session restart 0-1\. See"):
        parse(session_parser(), f"restart {flag}")
    with pytest.raises(OptionsError, match=r"unrecognized arguments: (?!.*without a flag)"):
        parse(session_parser(), f"close {flag}")


def test_an_open_quote_is_an_error() -> None:
    with pytest.raises(OptionsError, match="No closing quotation"):
        parse(session_parser(), "export 'train.py")


@pytest.mark.parametrize(("typed", "verb"), [("stop", "close"), ("close", "close"), ("ls", "list")])
def test_commands_of_the_command_line_are_taken_too(typed: str, verb: str) -> None:
    arguments = parse(session_parser(), typed)
    assert arguments is not None
    assert arguments.verb == verb
    assert "stop" not in session_help()


def test_what_is_typed_for_a_command_is_answered_with_what_to_type() -> None:
    with pytest.raises(OptionsError, match=r"there is no 'kill': %session close ends all ranks"):
        parse(session_parser(), "kill 3")


def test_the_help_of_a_command_is_its_own() -> None:
    assert "--restore" in session_help("restart")
    assert len(session_help("start").splitlines()) < 60


@pytest.mark.parametrize(("typed", "meant"), [("stopp", "stop"), ("clsoe", "close")])
def test_a_mistyped_command_is_answered_with_one_that_works(typed: str, meant: str) -> None:
    with pytest.raises(OptionsError, match=f"there is no '{typed}': did you mean {meant}"):
        parse(session_parser(), typed)
    assert parse(session_parser(), meant) is not None
