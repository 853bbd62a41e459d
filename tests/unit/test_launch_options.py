"""The options of a script's start: from keywords, flags, variables and files."""

from __future__ import annotations

import argparse
import json
from dataclasses import FrozenInstanceError, fields

import pytest

import distsession
from distsession import LaunchOptions, OptionsError, launch


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for option in fields(LaunchOptions):
        monkeypatch.delenv(f"DISTSESSION_LAUNCH_{option.name.upper()}", raising=False)


def test_the_names_stay_functions():
    assert callable(launch)
    assert distsession.launch is launch
    assert callable(distsession.start_training)


def test_the_defaults():
    options = LaunchOptions()

    assert options.distributed is True
    assert (options.world_size, options.processes, options.first_rank) == (None, None, 0)
    assert options.url == "tcp://127.0.0.1:29500"
    assert options.rank_of(3) == 3


def test_ranks_follow_from_the_first():
    options = LaunchOptions(world_size=8, first_rank=4, processes=2, host="alpha", port=4000)

    assert [options.rank_of(0), options.rank_of(1)] == [4, 5]
    assert options.url == "tcp://alpha:4000"
    with pytest.raises(OptionsError, match="no process 2 here: they go from 0 to 1"):
        options.rank_of(2)


def test_an_address_of_version_six_is_in_brackets():
    assert LaunchOptions(host="::1").url == "tcp://[::1]:29500"


def test_one_of_world_size_and_processes_gives_the_other():
    assert LaunchOptions(world_size=4).processes == 4
    assert LaunchOptions(world_size=4, first_rank=3).processes == 1
    assert LaunchOptions(processes=2).world_size == 2
    assert LaunchOptions(processes=2, first_rank=2).world_size == 4


def test_options_do_not_change():
    with pytest.raises(FrozenInstanceError):
        LaunchOptions().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distributed": 1}, "distributed=1 is not possible: it takes True or False"),
        ({"first_rank": -1}, "first_rank=-1 is not possible: it takes a whole number of at least"),
        ({"first_rank": 2}, "give world_size, too"),
        ({"first_rank": 4, "world_size": 4}, "it goes from 0 to 3"),
        ({"world_size": 0}, "world_size=0 is not possible"),
        ({"world_size": True}, "world_size=True is not possible"),
        ({"processes": 3, "world_size": 2}, "there are 2"),
        ({"backend": " "}, "backend=' ' is not possible: it takes a name"),
        ({"host": ""}, "host='' is not possible"),
        ({"port": 0}, "port=0 is not possible: it takes a whole number from 1 to 65535"),
        ({"port": 65536}, "port=65536 is not possible"),
        ({"port": "80"}, "port='80' is not possible"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(given, message):
    with pytest.raises(OptionsError) as error:
        LaunchOptions(**given)
    assert message in str(error.value)


def test_the_environment_is_read_and_what_is_given_wins():
    environ = {
        "DISTSESSION_LAUNCH_DISTRIBUTED": "off",
        "DISTSESSION_LAUNCH_FIRST_RANK": "2",
        "DISTSESSION_LAUNCH_WORLD_SIZE": "8",
        "DISTSESSION_LAUNCH_PORT": "4000",
    }
    options = LaunchOptions.from_environment(environ, port=5000)

    assert options == LaunchOptions(distributed=False, first_rank=2, world_size=8, port=5000)


@pytest.mark.parametrize(("name", "value"), [("PORT", "many"), ("DISTRIBUTED", "maybe")])
def test_a_variable_that_cannot_be_read_is_named(name, value):
    with pytest.raises(OptionsError, match=f"DISTSESSION_LAUNCH_{name}='{value}' cannot be read"):
        LaunchOptions.from_environment({f"DISTSESSION_LAUNCH_{name}": value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("o.json", json.dumps({"world_size": 4, "host": "alpha", "distributed": True})),
        ("o.toml", 'world_size = 4\nhost = "alpha"\ndistributed = true\n'),
    ],
)
def test_a_file_is_read_and_the_environment_wins(name, text, tmp_path, monkeypatch):
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("DISTSESSION_LAUNCH_FIRST_RANK", "2")
    monkeypatch.setenv("DISTSESSION_LAUNCH_HOST", "beta")

    options = LaunchOptions.from_file(tmp_path / name, port=1)

    assert options == LaunchOptions(world_size=4, first_rank=2, host="beta", port=1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("o.yaml", "", "neither a .json nor a .toml file"),
        ("o.json", "{", "cannot be read"),
        ("o.json", "[1]", "holds no names with values"),
        ("o.toml", "worldsize = 3", "there is no option 'worldsize' in .*Did you mean world_size"),
        ("o.toml", 'port = "x"', "port='x' is not possible"),
    ],
)
def test_a_file_that_is_wrong_says_so(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionsError, match=message):
        LaunchOptions.from_file(tmp_path / name)


def test_a_file_that_is_missing_says_so(tmp_path):
    with pytest.raises(OptionsError, match="No such file"):
        LaunchOptions.from_file(tmp_path / "none.json")


def test_flags_are_read_and_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("DISTSESSION_LAUNCH_PORT", "4000")
    monkeypatch.setenv("DISTSESSION_LAUNCH_BACKEND", "gloo")

    options = LaunchOptions.from_arguments(["--no-distributed", "--world-size=4", "--port", "5"])

    assert options == LaunchOptions(distributed=False, world_size=4, port=5, backend="gloo")


def test_flags_go_into_a_parser_of_the_users_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    LaunchOptions.add_arguments(parser)
    arguments = parser.parse_args(["--lr", "0.1", "--processes", "3"])

    assert LaunchOptions.from_arguments(arguments) == LaunchOptions(processes=3)
    assert "rank of this host's first process" in parser.format_help()


def test_words_that_are_not_known_are_refused(capsys):
    with pytest.raises(SystemExit):
        LaunchOptions.from_arguments(["--dist-backend", "gloo"])
    assert "--dist-backend" in capsys.readouterr().err


def test_several_hosts_are_refused_by_launch():
    with pytest.raises(OptionsError, match="nnodes=2 is not possible"):
        launch(print, nnodes=2)


def test_without_distribution_the_function_runs_here():
    results = distsession.start_training(
        lambda a, b: a + b, LaunchOptions(distributed=False), 1, b=2
    )

    assert dict(results) == {0: 3}
