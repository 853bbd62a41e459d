"""The tables of docs/distributed.md name what there is, and each difference has a test.

A check of ``tests/integration/distributed_sources.py`` says which sentences it shows. Who edits a
table edits what shows the sentence; one that is shown by another test is named here, with it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import distsession
import distsession.distributed as dd
from tests.integration.distributed_sources import SHOWN
from tests.sentences import sentences

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/distributed.md").read_text()
SOURCES = ("ignite", "composer", "DI-engine", "flame", "torch")

HERE = "unit/test_distributed_tables.py::"
HOSTS = "unit/test_distributed_hosts.py::"
LAUNCHING = "integration/test_launching.py::"
OPTIONS = "unit/test_launch_options.py::"
NOT_THERE = f"{HERE}test_what_there_is_not_is_not_there"
LOCAL_RANK = f"{LAUNCHING}test_a_first_parameter_gets_the_local_rank_by_its_name"

CHECKS = "integration/distributed_checks.py::"
ALL = "all of them"

SHOWN_ELSEWHERE = {
    (ALL, "", "Roots (`src`, `dst`) are ranks of the world."): f"{CHECKS}check_new_group",
    (
        ALL,
        "",
        "`all_reduce` and `reduce` change a tensor in place and return it, and so does `broadcast` "
        "into a tensor.",
    ): f"{CHECKS}check_broadcast_tensors",
    (ALL, "", "What else comes from other ranks is new."): f"{CHECKS}check_all_gather_tensors",
    (ALL, "", "Before anything of unknown shape moves, ranks tell each other what they bring."): (
        f"{CHECKS}check_what_does_not_fit_is_an_error_everywhere"
    ),
    (ALL, "", "What does not fit raises `CollectiveMismatchError` on every rank."): (
        f"{CHECKS}check_what_does_not_fit_is_an_error_everywhere"
    ),
    (
        ALL,
        "",
        "What a backend cannot do with a dtype raises `OptionsError` before anything is sent.",
    ): f"{CHECKS}check_what_cannot_be_reduced_is_said_before_anyone_waits",
    (ALL, "", "Nothing here is part of autograd: no gradient flows through it."): (
        f"{CHECKS}check_all_reduce_strides_and_grad"
    ),
    (ALL, "", "The tables name where the type is another one."): (
        f"{HERE}test_each_difference_is_shown_by_a_test"
    ),
    ("ignite", "", "`import distsession.distributed as idist`, and go on."): (
        f"{HERE}test_a_name_of_ours_can_be_imported"
    ),
    ("ignite", "get_nnodes", "Hosts may have different numbers of ranks."): (
        f"{HOSTS}test_hosts_may_have_different_numbers_of_ranks"
    ),
    ("ignite", "get_node_rank", "Hosts may have different numbers of ranks."): (
        f"{HOSTS}test_hosts_may_have_different_numbers_of_ranks"
    ),
    ("ignite", "spawn", "Starts ranks, runs a function, gives each rank's value, ends them."): (
        f"{LAUNCHING}test_a_function_runs_on_all_ranks_and_gives_their_results"
    ),
    ("ignite", "spawn", "Takes the function first and its arguments as they are."): (
        f"{LAUNCHING}test_a_function_runs_on_all_ranks_and_gives_their_results"
    ),
    ("ignite", "spawn", "By default 2 ranks or one for each GPU."): (
        f"{LAUNCHING}test_an_error_comes_through_and_nothing_stays"
    ),
    ("ignite", "spawn", "Gives the local rank only to a first parameter named `local_rank`."): (
        LOCAL_RANK
    ),
    ("ignite", "spawn", "Not importable from `distsession.distributed`."): (
        f"{HERE}test_every_public_name_of_the_package_is_there"
    ),
    ("ignite", "Parallel", "For one host: `start_training` is for more."): (
        f"{OPTIONS}test_several_hosts_are_refused_by_launch"
    ),
    ("ignite", "has_xla_support, has_hvd_support", "Neither XLA nor Horovod."): NOT_THERE,
    ("ignite", "registered_computation_models", "Neither XLA nor Horovod."): NOT_THERE,
    ("composer", "all_gather_object_list_hpu", "No Habana devices."): NOT_THERE,
    ("composer", "get_node_signal_file_name, write_signal_file", "Not needed."): NOT_THERE,
    (
        "flame",
        "DistOptions, get_dist_options",
        "From arguments, the environment or a file.",
    ): f"{OPTIONS}test_flags_are_read_and_win_over_the_environment",
    (
        "flame",
        "DistOptions, get_dist_options",
        "`first_rank`, `backend`, `host`, `port`, `processes`, `url` and `rank_of` for "
        "`rank_start`, `dist_backend`, `dist_host`, `dist_port`, `nprocs`, `dist_url` and "
        "`get_rank`.",
    ): f"{OPTIONS}test_ranks_follow_from_the_first",
    ("flame", "DistOptions, get_dist_options", "Starts ranks unless told not to."): (
        f"{OPTIONS}test_the_defaults"
    ),
    (
        "flame",
        "DistOptions, get_dist_options",
        "The port is 29500, not any that is free.",
    ): f"{OPTIONS}test_the_defaults",
    (
        "flame",
        "DistOptions, get_dist_options",
        "Refuses words of the command line that it does not know.",
    ): f"{OPTIONS}test_words_that_are_not_known_are_refused",
    (
        "flame",
        "start_distributed_training, start_training",
        "Takes the options second and the function's arguments as they are, and gives its values.",
    ): f"{LAUNCHING}test_training_starts_as_the_options_say",
    (
        "flame",
        "start_distributed_training, start_training",
        "Without options it asks the environment, not the command line.",
    ): f"{LAUNCHING}test_training_takes_its_options_from_the_environment",
    (
        "flame",
        "start_distributed_training, start_training",
        "A single rank is a process of its own, too.",
    ): f"{LAUNCHING}test_lambdas_and_closures_run",
    (
        "flame",
        "start_distributed_training, start_training",
        "Gives the local rank only to a first parameter named `local_rank`.",
    ): LOCAL_RANK,
    (
        "flame",
        "start_distributed_training, start_training",
        "NCCL without a GPU is an error.",
    ): f"{LAUNCHING}test_training_with_nccl_needs_a_gpu",
}


def section(source: str) -> str:
    heading = "What holds for all of them" if source == ALL else f"Coming from {source}"
    return PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rows(source: str) -> list[list[str]]:
    lines = [line for line in section(source).splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def told(source: str) -> set[tuple[str, str, str]]:
    """Every sentence about a source, with the name that it is about."""
    around = [line for line in section(source).splitlines() if not line.startswith("|")]
    found = {(source, "", sentence) for sentence in sentences("\n".join(around))}
    for theirs, _, differs in rows(source):
        name = theirs.replace("`", "")
        found |= {(source, name, sentence) for sentence in sentences(differs)}
    return found


ROWS = [(source, *row) for source in SOURCES for row in rows(source)]


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_has_a_table(source: str) -> None:
    found = rows(source)
    assert len(found) >= 4
    assert all(len(row) == 3 for row in found)


@pytest.mark.parametrize(("source", "theirs", "ours", "differs"), ROWS)
def test_a_name_of_ours_can_be_imported(source: str, theirs: str, ours: str, differs: str) -> None:
    assert re.fullmatch(r"(`\w+`(, )?)+", theirs)
    if ours == "-":
        return
    name = re.fullmatch(r"`(distsession\.)?(\w+)`", ours)
    assert name is not None
    home = distsession if name[1] else dd
    assert name[2] in home.__all__
    assert callable(getattr(home, name[2]))


@pytest.mark.parametrize("source", [ALL, *SOURCES])
def test_each_difference_is_shown_by_a_test(source: str) -> None:
    shown = {key for key in (*SHOWN, *SHOWN_ELSEWHERE) if key[0] == source}
    page = told(source)
    assert not page - shown, "the page says this, and no test shows it"
    assert not shown - page, "a test shows this, and the page says it no more"


@pytest.mark.parametrize("test", sorted(set(SHOWN_ELSEWHERE.values())))
def test_a_test_that_shows_a_difference_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"\ndef {name}(" in (TESTS / path).read_text()


@pytest.mark.parametrize(("source", "theirs"), [(row[0], row[1]) for row in ROWS if row[2] == "-"])
def test_what_there_is_not_is_not_there(source: str, theirs: str) -> None:
    for name in theirs.replace("`", "").split(", "):
        assert not hasattr(dd, name)
        assert not hasattr(distsession, name)


def test_every_public_name_of_the_package_is_there() -> None:
    assert dd.__all__ == sorted(dd.__all__)
    for name in dd.__all__:
        assert getattr(dd, name).__doc__
    assert set(dd.__all__) <= set(dir(dd))
    with pytest.raises(AttributeError, match="'spawn'"):
        _ = dd.spawn
