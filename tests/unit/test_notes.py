"""Notes of exceptions in the tracebacks of a shell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.ultratb import AutoFormattedTB

from distsession.notebook.notes import Notes


class OldTracebacks:
    """Puts exceptions into words as IPython 7 does."""

    def format_exception(self, kind: type[BaseException], error: BaseException) -> list[str]:
        return [f"{kind.__name__}: {error}"]

    def _format_exception_only(self, kind: type[BaseException], error: Any) -> list[str]:
        return [] if error is None else ["a line\n", f"{kind.__name__}: {error}\n"]


def noted() -> ValueError:
    error = ValueError("what")
    error.add_note("and why")
    error.add_note("and what to do")
    return error


@pytest.fixture
def shell() -> Any:
    return SimpleNamespace(InteractiveTB=OldTracebacks())


def test_notes_stand_below_the_message(shell: Any) -> None:
    Notes(shell).register()
    formatted = shell.InteractiveTB.format_exception(ValueError, noted())
    assert formatted == ["ValueError: what\nand why\nand what to do"]
    formatted = shell.InteractiveTB._format_exception_only(ValueError, noted())
    assert formatted == ["a line\n", "ValueError: what\nand why\nand what to do\n"]


def test_without_notes_nothing_changes(shell: Any) -> None:
    Notes(shell).register()
    strange = ValueError("what")
    strange.__notes__ = "no list"  # type: ignore[assignment]
    for error in (ValueError("what"), strange):
        assert shell.InteractiveTB.format_exception(ValueError, error) == ["ValueError: what"]
    assert shell.InteractiveTB._format_exception_only(ValueError, None) == []


def test_a_shell_that_shows_them_is_left_alone(shell: Any) -> None:
    notes = Notes(shell)
    notes.register()
    before = dict(vars(shell.InteractiveTB))
    again = Notes(shell)
    again.register()
    assert vars(shell.InteractiveTB) == before
    again.unregister()
    assert vars(shell.InteractiveTB) == before


def test_the_hook_is_taken_away(shell: Any) -> None:
    notes = Notes(shell)
    notes.register()
    notes.unregister()
    assert vars(shell.InteractiveTB) == {}


def test_tracebacks_of_this_ipython_end_with_notes() -> None:
    shell = SimpleNamespace(InteractiveTB=AutoFormattedTB(mode="Context"))
    notes = Notes(shell)
    notes.register()
    try:
        raise noted()
    except ValueError as error:
        lines = shell.InteractiveTB.structured_traceback(ValueError, error, error.__traceback__)
    assert "\n".join(lines).endswith(": what\nand why\nand what to do")
    assert "\n".join(lines).count("and why") == 1
