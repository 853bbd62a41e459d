"""Why an operation broke off is found in whatever is raised on top of it."""

from __future__ import annotations

import pickle

import pytest

from distsession.engine import cause, failure
from distsession.errors import CollectiveError, CollectiveMismatchError
from distsession.protocol.messages import Abort, Aborted, Mismatch, Operation
from distsession.protocol.rank_state import AbortReason

IN = Operation("barrier", "world", (0, 1), 3)
ABORT = Abort(AbortReason.FAILED, "rank 1 failed", 7)


def given_up() -> CollectiveError:
    return cause.attach(CollectiveError("rank 1 failed"), Aborted(IN))


def raised(code: str) -> BaseException:
    names = {"given_up": given_up, "gloo": RuntimeError("[/gloo/pair.cc:1] closed by peer")}
    try:
        exec(code, names)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


ON_TOP = {
    "itself": "raise given_up()",
    "with a cause": "try: raise given_up()\nexcept Exception as e: raise OSError('no') from e",
    "in its handling": "try: raise given_up()\nexcept Exception: {}['gone']",
    "hidden": "try: raise given_up()\nexcept Exception: raise OSError('no') from None",
    "twice": "try:\n  try: raise given_up()\n  except Exception as e: raise OSError() from e\n"
    "except OSError as e: raise ValueError() from e",
    "in a group": "raise ExceptionGroup('many', [given_up(), given_up()])",
    "as a stop": "raise KeyboardInterrupt from given_up()",
}


@pytest.mark.parametrize("code", ON_TOP.values(), ids=ON_TOP)
def test_who_raises_on_top_of_it_only_suffered(code: str) -> None:
    error = raised(code)
    assert cause.find(error) == Aborted(IN)
    assert cause.find_handled(error) is None


OWN = {
    "an error of its own": "raise ValueError",
    "in a group with its own": "raise ExceptionGroup('many', [given_up(), ValueError()])",
    "after it was caught": "try: raise given_up()\nexcept Exception: pass\nraise ValueError",
}


@pytest.mark.parametrize("code", OWN.values(), ids=OWN)
def test_what_was_not_raised_on_top_of_it_is_its_own(code: str) -> None:
    assert cause.find(raised(code), ABORT) is None


BEFORE = {
    "at the end": "try: raise ValueError\nfinally: raise given_up()",
    "where torch raised first": "try: raise ValueError('boom')\n"
    "finally:\n  try: raise gloo\n  except RuntimeError: raise given_up() from None",
}


@pytest.mark.parametrize("code", BEFORE.values(), ids=BEFORE)
def test_an_error_of_its_own_that_came_before_is_noted_and_shown(code: str) -> None:
    error = raised(code)
    assert cause.find(error) == Aborted(IN)
    handled = cause.find_handled(error)
    assert type(handled) is ValueError
    chained = failure.describe(error).cause
    assert chained is not None
    assert chained.ename == "ValueError"
    assert chained.cause is None


def test_what_torch_raised_is_not_shown() -> None:
    error = raised("try: raise gloo\nexcept RuntimeError: raise given_up() from None")
    assert cause.find(error) == Aborted(IN)
    assert failure.describe(error).cause is None


def test_a_mismatch_is_found_too() -> None:
    mismatch = Mismatch("world", 1, ())
    error = cause.attach(CollectiveMismatchError("no"), mismatch)
    outer = RuntimeError("step")
    outer.__cause__ = error
    assert cause.find(outer) == mismatch


@pytest.mark.parametrize("text", ["CollectiveError: rank 1 failed", "[/gloo/pair.cc:1] closed"])
def test_what_passed_through_cpp_is_known_by_what_it_repeats(text: str) -> None:
    assert cause.find(RuntimeError(text), ABORT) == Aborted()
    assert cause.find(RuntimeError(text)) is None
    assert cause.find(ValueError(text), ABORT) is None


def test_an_error_with_a_broken_message_is_its_own() -> None:
    class Bad(RuntimeError):
        def __str__(self) -> str:
            raise TypeError

    assert cause.find(Bad(), ABORT) is None


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert cause.find(first, ABORT) is None


def test_the_exception_travels_with_it() -> None:
    assert str(pickle.loads(pickle.dumps(given_up()))) == "rank 1 failed"
