"""The errors: what catches them, how they travel and how they are shown."""

from __future__ import annotations

import pickle

import pytest

from distsession import errors
from distsession.errors import (
    CollectiveError,
    CollectiveHangError,
    CollectiveMismatchError,
    DistsessionError,
    EngineDiedError,
    ExportError,
    KeptSessionError,
    LaunchError,
    LaunchTimeoutError,
    OptionsError,
    ProcessGroupError,
    RemoteError,
    ResultsError,
    RunError,
    RunInterrupt,
    RunTimeoutError,
    SerializationError,
    SessionStateError,
)

TREE: dict[type[BaseException], tuple[type[BaseException], ...]] = {
    DistsessionError: (Exception,),
    OptionsError: (DistsessionError, ValueError),
    SessionStateError: (DistsessionError, RuntimeError),
    KeptSessionError: (SessionStateError,),
    SerializationError: (DistsessionError, TypeError),
    ResultsError: (DistsessionError, TypeError),
    LaunchError: (DistsessionError, RuntimeError),
    LaunchTimeoutError: (LaunchError, TimeoutError),
    ProcessGroupError: (LaunchError,),
    EngineDiedError: (DistsessionError, RuntimeError),
    CollectiveError: (DistsessionError, RuntimeError),
    CollectiveMismatchError: (CollectiveError,),
    CollectiveHangError: (CollectiveError,),
    RunTimeoutError: (DistsessionError, TimeoutError),
    ExportError: (DistsessionError, ValueError),
    RemoteError: (DistsessionError,),
    RunError: (DistsessionError, RuntimeError),
    RunInterrupt: (KeyboardInterrupt,),
}


def test_the_tree_here_has_every_error() -> None:
    assert {cls.__name__ for cls in TREE} == set(errors.__all__)


@pytest.mark.parametrize("cls", TREE)
def test_an_error_is_caught_as_the_builtin_that_fits_it(cls: type[BaseException]) -> None:
    assert cls.__bases__ == TREE[cls]


def test_stop_is_not_swallowed_by_code_that_catches_errors() -> None:
    assert not issubclass(RunInterrupt, Exception)


def run_error() -> RunError:
    return RunError(
        "ValueError on ranks 0,2: no",
        by_rank={2: ValueError("two"), 0: KeyError("zero")},
        results={1: "fine"},
        details="ValueError on rank 2\n\nCell In[3], line 1",
        tracebacks="Cell In[3], line 1",
    )


def test_the_death_of_an_engine_travels_with_its_facts() -> None:
    died = EngineDiedError("rank 1 is gone", rank=1, pid=7, returncode=-9, log_tail="oh\nno")
    arrived = pickle.loads(pickle.dumps(died))
    assert type(arrived) is EngineDiedError
    assert str(arrived) == "rank 1 is gone"
    assert (arrived.rank, arrived.pid, arrived.returncode) == (1, 7, -9)
    assert arrived.log_tail == "oh\nno"


def test_a_run_error_travels_with_every_ranks_exception() -> None:
    arrived = pickle.loads(pickle.dumps(run_error()))
    assert type(arrived) is RunError
    assert str(arrived) == str(run_error())
    assert {rank: repr(error) for rank, error in arrived.by_rank.items()} == {
        0: "KeyError('zero')",
        2: "ValueError('two')",
    }
    assert arrived.results == {1: "fine"}
    assert arrived._render_traceback_() == run_error()._render_traceback_()
    assert arrived.__notes__ == run_error().__notes__ == ["\nCell In[3], line 1"]


def test_a_remote_error_travels() -> None:
    arrived = pickle.loads(pickle.dumps(RemoteError("Odd", "it broke", "the traceback")))
    assert str(arrived) == "Odd: it broke"
    assert (arrived.ename, arrived.evalue, arrived.traceback) == (
        "Odd",
        "it broke",
        "the traceback",
    )


@pytest.mark.parametrize(
    "cls", [OptionsError, SerializationError, LaunchTimeoutError, RunTimeoutError, RunInterrupt]
)
def test_an_error_with_a_message_alone_travels(cls: type[BaseException]) -> None:
    arrived = pickle.loads(pickle.dumps(cls("the message")))
    assert type(arrived) is cls
    assert str(arrived) == "the message"


def test_the_cause_is_the_first_of_the_failed_ranks() -> None:
    error = run_error()
    assert list(error.by_rank) == [2, 0]
    assert error.first_rank == 2
    assert error.first is error.by_rank[2]
    assert list(error.as_group().exceptions) == [error.by_rank[2], error.by_rank[0]]


def test_a_run_error_that_has_travelled_still_knows_the_cause() -> None:
    arrived = pickle.loads(pickle.dumps(run_error()))
    assert list(arrived.by_rank) == [2, 0]
    assert str(arrived.first) == "two"
    assert str(arrived.as_group().exceptions[0]) == "two"


def test_a_run_error_as_a_group_can_be_taken_apart() -> None:
    caught = {}
    try:
        raise run_error().as_group()
    except* KeyError as group:
        caught["key"] = group.exceptions
    except* ValueError as group:
        caught["value"] = group.exceptions
    assert [str(error) for error in caught["key"]] == ["'zero'"]
    assert [str(error) for error in caught["value"]] == ["two"]


def test_a_group_may_hold_what_is_no_exception() -> None:
    error = RunError("stopped", by_rank={0: KeyboardInterrupt()}, results={})
    group = error.as_group()
    assert type(group) is BaseExceptionGroup
    assert group.message == "stopped"


def test_a_notebook_shows_the_message_of_an_error_alone() -> None:
    assert OptionsError("ranks=0")._render_traceback_() == ["OptionsError: ranks=0"]
    assert RunInterrupt("stopped")._render_traceback_() == ["KeyboardInterrupt: stopped"]


def test_a_notebook_shows_the_ranks_tracebacks_of_a_run_error() -> None:
    assert run_error()._render_traceback_() == ["ValueError on rank 2", "", "Cell In[3], line 1"]


def test_a_run_error_without_details_shows_its_message() -> None:
    assert RunError("it failed", by_rank={}, results={})._render_traceback_() == ["it failed"]
