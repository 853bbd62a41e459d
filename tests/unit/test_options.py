"""The options: from keywords, flags and the environment."""

from __future__ import annotations

import argparse
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from distsession.errors import OptionsError
from distsession.host_plan import HostPlan
from distsession.options import (
    SessionOptions,
    add_arguments,
    duration_text,
    option_sources,
    read_duration,
    read_size,
    resolve_options,
    split_launcher_options,
)

NAMES = [option.name for option in fields(SessionOptions)]

# For each option: how a person types it, and the value that this is.
TYPED: dict[str, tuple[str, Any]] = {
    "ranks": ("4", 4),
    "nodes": ("2", 2),
    "backend": ("nccl", "nccl"),
    "devices": ("2, GPU-5f2a, MIG-31d0-7", (2, "GPU-5f2a", "MIG-31d0-7")),
    "timeout": ("1.5", 1.5),
    "seed": ("7", 7),
    "seed_per_rank": ("yes", True),
    "threads": ("3", 3),
    "preload": ("numpy, json", ("numpy", "json")),
    "launcher": ("inline", "inline"),
    "start_timeout": ("9", 9.0),
    "check": ("detail", "detail"),
    "groups": ("torch", "torch"),
    "device_ipc": ("off", "off"),
    "hang_grace": ("0.5", 0.5),
    "ipyparallel": ("eager", "eager"),
    "text_bars": ("yes", True),
    "keep": ("1h30m", 5400.0),
    "name": ("digits", "digits"),
    "keep_idle": ("2h", 7200.0),
    "keep_output": ("500M", 500 << 20),
    "hosts": ("gpu1, me@gpu2:2222", ("gpu1", "me@gpu2:2222")),
    "ranks_per_host": ("2, 1", (2, 1)),
    "launcher_options": (
        "partition=gpu --exclude=a,b comment='a b' exclusive",
        {"partition": "gpu", "exclude": "a,b", "comment": "a b", "exclusive": ""},
    ),
    "command": ("srun -N2 {agent}", "srun -N2 {agent}"),
    "addresses": ("10.0.0.1, fd00::1", ("10.0.0.1", "fd00::1")),
    "python": ("/opt/python", "/opt/python"),
    "folder": ("/scratch/me", "/scratch/me"),
}

# What has to be given with an option.
BESIDE: dict[str, dict[str, Any]] = {
    "hosts": {"launcher": "ssh"},
    "launcher_options": {"launcher": "slurm", "nodes": 2},
    "command": {"launcher": "command", "nodes": 2},
    "addresses": {"launcher": "slurm", "nodes": 2},
    "python": {"launcher": "ssh", "hosts": ("gpu1",)},
    "folder": {"launcher": "mpi", "nodes": 2},
    "keep_idle": {"keep": 86_400.0},
}

BAD: dict[str, list[Any]] = {
    "ranks": [0, -1, 2.0, "2", True],
    "nodes": [0, -1, 2.0, "2", True],
    "backend": ["", "  ", 3],
    "devices": [(), [-1], ["0"], ["GPU-"], ["cuda:0"], [True], [1.5], "0,2", 0, [[0]]],
    "timeout": [0, -1.0, float("nan"), float("inf"), "5", True],
    "seed": [-1, 1.5, "7", False],
    "seed_per_rank": [1, "yes", None],
    "threads": [0, -2, 1.0, "2", True],
    "preload": ["numpy", [1], None, 3],
    "launcher": ["flux", "", None, 1],
    "start_timeout": [0, -1, float("nan"), float("inf"), "9", None],
    "check": ["on", "", None, True],
    "groups": ["ours", "", None, True],
    "device_ipc": ["on", "", None, True],
    "hang_grace": [-1, float("nan"), float("inf"), "2", None, True],
    "ipyparallel": ["never", "", None, True],
    "text_bars": [1, "yes", None],
    "keep": [
        -1,
        float("nan"),
        float("inf"),
        "12 hrs",
        "h",
        "",
        "1..5h",
        "-1h",
        "2h30",
        "3w",
        None,
        True,
    ],
    "name": ["", "my run", "a/b", "..\n", "42", "-x", "x" * 65, 3, True],
    "keep_idle": [-1.0, float("inf"), "a while", None, False, True],
    "keep_output": [0, -1, "0", "64k", 1.5, "much", "1 Gx", "", None, True],
    "hosts": ["gpu1", [""], [1], None, 3],
    "ranks_per_host": [(), [0], [1.5], [True], ["2"], "2,1", 2],
    "launcher_options": [{"a": 1}, {1: "a"}, {"--a": "b"}, {"a b": "c"}, {"": "c"}, "a=b", ["a"]],
    "command": ["", 3],
    "addresses": ["10.0.0.1", [""], [1], None, 3],
    "python": ["", " ", 3],
    "folder": ["", 3],
}


def test_the_tables_here_know_every_option() -> None:
    assert set(TYPED) == set(BAD) == set(NAMES)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in BAD for v in BAD[n]])
def test_an_impossible_value_is_refused_by_the_name_of_its_option(name: str, value: Any) -> None:
    with pytest.raises(OptionsError, match=rf"^{name}=.* is not possible: it takes ."):
        SessionOptions(**{name: value})


def test_ranks_that_cannot_be_shared_out_over_the_nodes_are_refused() -> None:
    with pytest.raises(OptionsError, match=r"ranks=3 cannot .* over nodes=2: .* 2 or 4 ranks"):
        SessionOptions(ranks=3, nodes=2)
    with pytest.raises(OptionsError, match=r"ranks=1 cannot .* over nodes=3: .* 3 or 6 ranks"):
        SessionOptions(ranks=1, nodes=3)


def test_each_node_may_have_a_number_of_ranks_of_its_own() -> None:
    assert SessionOptions(ranks_per_host=[2, 1]).nodes == 2  # type: ignore[arg-type]
    assert SessionOptions(ranks=3, nodes=2, ranks_per_host=[2, 1]).counts == (2, 1)  # type: ignore[arg-type]
    assert SessionOptions(ranks=4, nodes=2).counts == (2, 2)
    assert SessionOptions(nodes=2).counts is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"ranks": 5, "nodes": 3},
            r"Ask for 3 or 6 ranks, .* ranks_per_host=\[2, 2, 1\]",
        ),
        ({"ranks": 4, "ranks_per_host": [2, 1]}, r"ranks=4, but ranks_per_host=\[2, 1\] makes 3"),
        ({"nodes": 3, "ranks_per_host": [2, 1]}, r"is for 2 hosts, but there are 3"),
        ({"ranks_per_host": [1, 1], "devices": [0]}, r"ranks=2 but devices names 1 GPUs"),
        ({"launcher": "inline", "ranks_per_host": [1, 1]}, "nodes=2 asks for more"),
        ({"hosts": ["a"]}, r"hosts=\('a',\) is for several hosts, .* give launcher='ssh'"),
        ({"command": "x {agent}"}, r"is for several hosts, .* give launcher='command'"),
        ({"launcher_options": {"a": "b"}}, r"give one of ssh, slurm, .* as launcher"),
        ({"python": "/py", "launcher": "inline"}, r"launcher='inline' starts all ranks on this"),
        ({"launcher": "ssh"}, r"launcher='ssh' needs hosts="),
        ({"launcher": "ssh", "hosts": ["a", "a"]}, r"the host a is named 2 times"),
        ({"launcher": "ssh", "hosts": ["a b"]}, r"'a b' is no host"),
        ({"launcher": "ssh", "hosts": ["a", "b"], "nodes": 3}, r"nodes=3, but 2 hosts are named"),
        ({"launcher": "ssh", "hosts": ["a", "b"], "nodes": 1}, r"nodes=1, but 2 hosts are named"),
        ({"launcher": "ssh", "hosts": ["a", "b"], "ranks": 3}, r"ranks_per_host=\[2, 1\]"),
        ({"launcher": "ssh", "hosts": ["a", "b"], "ranks_per_host": [3]}, r"for 1 host, but .* 2"),
        ({"launcher": "slurm"}, r"launcher='slurm' needs the number of hosts"),
        ({"launcher": "slurm", "nodes": 2, "hosts": ["a"]}, r"hosts= are for launcher='ssh'"),
        ({"launcher": "command", "nodes": 2}, r"launcher='command' and command="),
        ({"launcher": "command", "command": "srun", "nodes": 2}, r"has no \{agent\}"),
        ({"launcher": "mpi", "nodes": 2, "launcher_options": {"np": "2"}}, r"no option 'np'; it"),
        ({"launcher": "mpi", "nodes": 2, "ranks": 2, "devices": [0, 1]}, r"of each host.* 1, 1 ra"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused_at_once(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        SessionOptions(**given)


def test_the_number_of_hosts_follows_from_what_is_said_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert SessionOptions().nodes == 1
    assert SessionOptions().host_plan is None
    ssh = SessionOptions(launcher="ssh", hosts=["gpu1", "gpu2"], start_timeout=7)  # type: ignore[arg-type]
    assert ssh.nodes == 2
    assert ssh.host_plan == HostPlan(launcher="ssh", hosts=("gpu1", "gpu2"), nodes=2, timeout=7)
    assert SessionOptions(launcher="mpi", ranks_per_host=[1, 2]).nodes == 2  # type: ignore[arg-type]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert SessionOptions(launcher="slurm").nodes == 3


def test_hosts_of_the_environment_do_not_count_where_a_session_here_is_asked_for() -> None:
    environ = {"DISTSESSION_LAUNCHER": "ssh", "DISTSESSION_HOSTS": "a,b"}
    assert resolve_options({}, environ).hosts == ("a", "b")
    assert resolve_options({"launcher": "local"}, environ) == SessionOptions()
    with pytest.raises(OptionsError, match="is for several hosts"):
        resolve_options({}, {"DISTSESSION_HOSTS": "a,b"})


def _split(*typed: str, **environ: str) -> tuple[list[str], dict[str, str]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return split_launcher_options(parser, typed, environ)


def test_flags_that_no_option_has_are_the_launchers() -> None:
    typed = ["16", "--launcher", "slurm", "--nodes", "2", "--partition", "gpu", "--time=1:00"]
    left, taken = _split(*typed, "--exclusive", "--seed", "3", "--qos")
    assert left == ["16", "--launcher", "slurm", "--nodes", "2", "--seed", "3"]
    assert taken == {"partition": "gpu", "time": "1:00", "exclusive": "", "qos": ""}
    in_environment = {"DISTSESSION_LAUNCHER": "mpi"}
    assert _split("--args", "-x", **in_environment)[1] == {"args": ""}
    assert _split("--seed-per-rank", "--args=-x y", **in_environment)[1] == {"args": "-x y"}


@pytest.mark.parametrize("typed", [["4", "--part", "x"], ["--launcher", "local", "--time", "1"]])
def test_other_launchers_have_no_such_flags(typed: list[str]) -> None:
    assert _split(*typed, DISTSESSION_LAUNCHER="slurm" if typed[0] != "4" else "") == (typed, {})


def test_the_flags_of_a_script_are_its_own() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, ranks_flags=("-n",))
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    typed = ["-n", "4", "--launcher=slurm", "--nodes=2", "--qos", "a", "train.py", "--lr", "1"]
    left, taken = split_launcher_options(parser, typed, {})
    assert left == ["-n", "4", "--launcher=slurm", "--nodes=2", "train.py", "--lr", "1"]
    assert taken == {"qos": "a"}


def test_an_inline_session_is_one_node() -> None:
    with pytest.raises(OptionsError, match="nodes=2 asks for more"):
        SessionOptions(launcher="inline", nodes=2)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12h", 43_200),
        ("90m", 5400),
        ("2d", 172_800),
        ("1h30m", 5400),
        ("1d 2h 3m 4s", 93_784),
        ("45s", 45),
        ("0", 0),
        ("1.5h", 5400),
        (" 12H ", 43_200),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds
    assert SessionOptions(keep=text).keep == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(43_200, "12h"), (5400, "1h30m"), (86_461, "1d1m1s"), (0, "0s"), (59.7, "1m")],
)
def test_a_duration_is_written_as_it_is_typed(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert read_duration(text) == round(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1G", 1 << 30),
        ("500M", 500 << 20),
        ("64k", 1 << 16),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("3 MB", 3 << 20),
        ("1T", 1 << 40),
        ("1000", 1000),
        ("12b", 12),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert read_size(text) == size
    if size >= 1 << 20:
        assert SessionOptions(keep_output=text).keep_output == size  # type: ignore[arg-type]


def test_what_cannot_be_read_is_told_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionsError, match=r"^keep='12 hrs' is not possible: it takes 12h, 90m"):
        SessionOptions(keep="12 hrs")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=r"DISTSESSION_KEEP='12 hrs' .* it takes 12h, 90m, 2d"):
        resolve_options({}, {"DISTSESSION_KEEP": "12 hrs"})
    with pytest.raises(SystemExit):
        _from_command_line("--keep-output", "much")
    assert "argument --keep-output: it takes 1G, 500M" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--devices", "cpux"], "it takes GPUs, not cpux: without GPUs, --backend gloo is all"),
        (["--devices", "cuda"], "cuda is no GPU: it takes a list of GPU numbers, UUIDs (GPU-"),
        (["--devices", "cuda:0,cuda:1"], "of cuda:0 it takes the number alone: 0"),
        (["--ranks-per-host", "2,x"], "'2,x' cannot be read: it takes ranks of each host"),
        (["two"], "'two' cannot be read: it takes a whole number, the number of ranks"),
        (["--timeout", "soon"], "it takes a number, the seconds that a collective may wait"),
        (["--keep", "12"], "argument --keep: it needs a unit: 12h, 12m or 12s"),
    ],
)
def test_what_is_typed_wrongly_is_told_without_names_of_functions(
    typed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _from_command_line(*typed)
    said = capsys.readouterr().err
    assert says in said
    assert "_read" not in said
    assert len(said.splitlines()) == 2  # how it is called, and this


def test_how_long_ranks_may_be_idle_matters_only_where_they_are_kept() -> None:
    with pytest.raises(OptionsError, match=r"^keep_idle=2h is for a session that is kept: give"):
        SessionOptions(keep_idle="2h")  # type: ignore[arg-type]
    environ = {"DISTSESSION_KEEP_IDLE": "2h"}
    assert resolve_options({}, environ).keep_idle == 0
    assert resolve_options({"keep": 60}, environ).keep_idle == 7200


def test_a_lease_without_an_end_is_refused_with_one_that_is_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(OptionsError, match="keep='forever' is not possible: a lease has an end: "):
        SessionOptions(keep="forever")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=r"DISTSESSION_KEEP='Forever'.* such as 30d"):
        resolve_options({}, {"DISTSESSION_KEEP": "Forever"})
    with pytest.raises(SystemExit):
        _from_command_line("--keep", "forever")
    assert "argument --keep: a lease has an end: give one" in capsys.readouterr().err


def test_an_inline_session_cannot_be_kept_and_says_why() -> None:
    with pytest.raises(OptionsError, match=r"in this process and ends with it.*\(keep=12h\)"):
        SessionOptions(launcher="inline", keep="12h")  # type: ignore[arg-type]
    assert SessionOptions(launcher="inline", keep="0").keep == 0  # type: ignore[arg-type]


def test_a_session_that_is_not_kept_may_have_a_name() -> None:
    assert SessionOptions(name="digits-2.a_b").name == "digits-2.a_b"
    assert SessionOptions(launcher="inline", name="größe").name == "größe"


@pytest.mark.parametrize("name", NAMES)
def test_every_option_can_be_given_as_a_keyword(name: str) -> None:
    value = TYPED[name][1]
    assert getattr(resolve_options({**BESIDE.get(name, {}), name: value}, {}), name) == value


@pytest.mark.parametrize("name", NAMES)
def test_every_option_can_be_set_in_the_environment(name: str) -> None:
    text, value = TYPED[name]
    beside = BESIDE.get(name, {})
    options = resolve_options(beside, {f"DISTSESSION_{name.upper()}": text})
    assert options == SessionOptions(**{**beside, name: value})


def test_what_torchs_own_groups_do_cannot_be_compared() -> None:
    with pytest.raises(OptionsError, match=r"check='strict' needs groups='session'"):
        SessionOptions(check="strict", groups="torch")


def test_the_environment_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTSESSION_THREADS", "5")
    assert resolve_options({}).threads == 5


@pytest.mark.parametrize("name", NAMES)
def test_every_option_can_be_typed_on_the_command_line(name: str) -> None:
    text, value = TYPED[name]
    flag = "--" + name.replace("_", "-")
    typed = [flag, text]
    if name in ("ranks", "seed_per_rank", "text_bars"):
        typed = [text] if name == "ranks" else [flag]
    beside = BESIDE.get(name, {})
    assert _from_command_line(*typed, **beside) == SessionOptions(**{**beside, name: value})


def test_flags_together_make_the_same_options_as_keywords() -> None:
    typed = _from_command_line("2", "--devices", "0,2", "--seed", "1", "--seed-per-rank")
    assert typed == SessionOptions(ranks=2, devices=(0, 2), seed=1, seed_per_rank=True)


def test_no_flags_leave_every_default() -> None:
    assert _from_command_line() == SessionOptions()


def _from_command_line(*typed: str, **beside: Any) -> SessionOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = {k: v for k, v in vars(parser.parse_args(typed)).items() if v is not None}
    return resolve_options({**beside, **given}, {})


@pytest.mark.parametrize(
    "typed",
    [
        ["x"],
        ["--devices", "a"],
        ["--devices", "0,GPU"],
        ["--launcher", "flux"],
        ["--timeout", "soon"],
    ],
)
def test_the_command_line_refuses_what_it_cannot_read(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _from_command_line(*typed)
    assert ended.value.code == 2
    assert typed[-1].rpartition(",")[2] in capsys.readouterr().err


def test_what_is_given_wins_over_the_environment() -> None:
    environ = {"DISTSESSION_RANKS": "8", "DISTSESSION_SEED": "1"}
    options = resolve_options({"ranks": 2}, environ)
    assert (options.ranks, options.seed) == (2, 1)


def test_the_source_of_each_value_is_known() -> None:
    environ = {"DISTSESSION_SEED": "3", "DISTSESSION_RANKS": "8", "DISTSESSION_THREADS": "4"}
    given = {"ranks": 2, "threads": None}
    sources = option_sources(given, environ)
    assert set(sources) == {field.name for field in fields(SessionOptions)}
    assert sources["ranks"] == "given"
    assert sources["seed"] == "DISTSESSION_SEED"
    assert sources["backend"] == "default"
    # what was given as None is the default, whatever the environment says
    assert sources["threads"] == "default"
    assert resolve_options(given, environ).threads is None


def test_a_bad_variable_does_not_matter_where_the_option_is_given() -> None:
    assert resolve_options({"ranks": 2}, {"DISTSESSION_RANKS": "many"}).ranks == 2


def test_other_variables_are_left_alone() -> None:
    assert resolve_options({}, {"RANKS": "3", "DISTSESSION_DEBUG": "1"}) == SessionOptions()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ranks", "many"),
        ("ranks", ""),
        ("devices", "0;1"),
        ("timeout", "soon"),
        ("seed_per_rank", "maybe"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(name: str, text: str) -> None:
    variable = f"DISTSESSION_{name.upper()}"
    with pytest.raises(OptionsError, match=f"{variable}='{text}' cannot be read"):
        resolve_options({}, {variable: text})


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False), ("off", False)],
)
def test_a_switch_is_set_in_the_environment_by_a_word(text: str, value: bool) -> None:
    assert resolve_options({}, {"DISTSESSION_SEED_PER_RANK": text}).seed_per_rank is value


def test_an_impossible_variable_names_the_option() -> None:
    with pytest.raises(OptionsError, match="ranks=0 is not possible"):
        resolve_options({}, {"DISTSESSION_RANKS": "0"})


def test_an_unknown_option_suggests_the_one_that_was_meant() -> None:
    with pytest.raises(OptionsError, match=r"no option 'device'\. Did you mean devices"):
        resolve_options({"device": [0]}, {})


def test_an_option_that_resembles_none_lists_all() -> None:
    with pytest.raises(OptionsError, match=f"no option 'zzz'. There are: {', '.join(NAMES)}"):
        resolve_options({"zzz": 1}, {})


def test_none_leaves_the_default() -> None:
    assert resolve_options(dict.fromkeys(NAMES), {}) == SessionOptions()


def test_lists_become_tuples_and_options_cannot_be_changed() -> None:
    options = SessionOptions(devices=[1, 0], preload=["json"])  # type: ignore[arg-type]
    assert (options.devices, options.preload) == ((1, 0), ("json",))
    with pytest.raises(FrozenInstanceError):
        options.seed = 3  # type: ignore[misc]


def test_ranks_that_contradict_the_devices_are_refused() -> None:
    with pytest.raises(OptionsError, match="ranks=3 but devices names 2 GPUs"):
        SessionOptions(ranks=3, devices=(0, 1))


def test_an_inline_session_has_one_rank() -> None:
    assert SessionOptions(launcher="inline", ranks=1).ranks == 1
    with pytest.raises(OptionsError, match="ranks=2 asks for more: use launcher='local'"):
        SessionOptions(launcher="inline", ranks=2)
