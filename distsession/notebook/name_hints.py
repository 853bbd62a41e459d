"""What to type instead, at the end of a NameError: what is on one side may be on the other.

The notebook does not see the ranks' variables, and the ranks do not see the notebook's. A name that
is missing on one side is looked up on the other, in a moment or not at all. Of a magic that IPython
does not know it is said which one of ours is like it.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from IPython.core.error import UsageError

from distsession.errors import DistsessionError, RunError
from distsession.notebook.parsers import session_parser
from distsession.parsing import near
from distsession.ranks import ranks_text
from distsession.session import current_session

__all__ = ["NameHints"]

HINT_TIMEOUT_S = 0.3
"""Seconds that ranks have to say whether they know a name."""
SESSION = "session"

_MISSING = re.compile(r"name '(\w+)' is not defined")
_NO_MAGIC = re.compile(r"(?:Cell|Line) magic (?:function )?`(%%?)(\w+)` not found")


class NameHints:
    """Puts a hint below NameErrors of the notebook and of ranks, as the shell shows them.

    And below the error of a magic that is mistyped.

    Args:
        shell: Of the notebook.
    """

    def __init__(self, shell: Any):
        self._shell = shell
        self._show: Any = None

    def register(self) -> None:
        """Hook in."""
        self._show = self._shell.showtraceback
        self._shell.showtraceback = self._show_with_hint

    def unregister(self) -> None:
        """Take the hook away."""
        if vars(self._shell).get("showtraceback") == self._show_with_hint:
            del self._shell.showtraceback

    def _show_with_hint(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> Any:
        error = (exc_tuple or sys.exc_info())[1]
        with suppress(Exception):  # whatever the hint cannot do, the error itself is shown
            if isinstance(error, UsageError) and (hint := _hint_of_magic(str(error))):
                error.args = (f"{str(error).rstrip('.')}{hint}",)
            text = self._hint(error)
            if error is not None and text and text not in getattr(error, "__notes__", ()):
                error.add_note(text)
        return self._show(exc_tuple, *args, **kwargs)

    def _hint(self, error: Any) -> str:
        if isinstance(error, RunError):
            found = _MISSING.match(str(error.first)) if _is_name_error(error.first) else None
            return "" if found is None else self._hint_of_rank(found[1])
        if not _is_name_error(error) or not isinstance(error.name, str):
            return ""
        return session_hint() if error.name == SESSION else _hint_of_notebook(error.name)

    def _hint_of_rank(self, name: str) -> str:
        """About a name that ranks lack."""
        if name not in self._shell.user_ns:
            return ""
        value = self._shell.user_ns[name]
        head = f"{name} is in the notebook, not on the ranks"
        if isinstance(value, ModuleType):
            same = value.__name__ == name
            return f"{head}. Type there: import {value.__name__}{'' if same else f' as {name}'}"
        if name == SESSION:
            return f"{head}: a cell that uses it begins without %%distributed, or with %%local."
        return f"{head}. Begin the cell with: %%distributed --push {name}"


def _hint_of_magic(text: str) -> str:
    """What may have been meant by a magic that there is not."""
    if (found := _NO_MAGIC.match(text)) is None:
        return ""
    percent, name = found.groups()
    if name in session_parser().commands:
        return f": did you mean %session {name}?"
    names = ("session", "distributed", "px") if percent == "%" else ("distributed", "px")
    hint = near(f"{percent}{name}", [f"{percent}{each}" for each in names])
    return hint if hint != "." else ""


def session_hint() -> str:
    """How the variable that the documentation speaks of comes to be."""
    try:
        current_session()
    except DistsessionError:
        return "No session is running. Type: session = %session start 4"
    return "The session that is running has no variable yet. Type: session = %session"


def _hint_of_notebook(name: str) -> str:
    """About a name that the notebook lacks."""
    try:
        session = current_session()
    except DistsessionError:
        return ""
    if session.channel.runs_in_caller or session.channel.pending():
        return ""
    launcher = session.launcher
    living = [rank for rank in session.ranks if rank not in launcher.dead_ranks()]
    answers = launcher.complete(living, name, False, HINT_TIMEOUT_S)
    kinds = {
        rank: kind
        for rank, answer in sorted(answers.items())
        for text, kind in answer.matches
        if text == name and kind != "keyword"
    }
    if not kinds:
        return ""
    head = f"{name} is on {ranks_text(list(kinds))}, not in the notebook"
    if set(kinds.values()) == {"instance"}:
        return f"{head}. Type: {name} = %distributed {name}"
    return f"{head}. Begin the cell with: %%distributed"


def _is_name_error(error: Any) -> bool:
    return isinstance(error, NameError)
