"""Commands in messages, as who reads them would type them.

Messages name methods, such as ``session.restart([7])``. Where a notebook has a session by magics
alone, no variable has such a method, and ``%session restart 7`` is what can be typed.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from distsession.session import Session

__all__ = ["as_magics", "worded"]

_CALL = re.compile(
    r"\bsession\.(?P<verb>restart|reconnect|interrupt|close|diagnose)\("
    r"(?:\[(?P<ranks>[\d, ]*)\])?(?P<stacks>stacks=True)?\)"
)
_RESTORE = re.compile(r"(?<=[;,] )restore=\[\.\.\.\]")
_WITHOUT_RESTORE = " without restore= "


def worded(text: str) -> str:
    """The text as the notebook that this runs in would type what is named in it."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    if shell is None or "session" not in shell.magics_manager.magics["line"]:
        return text
    return text if _has_variable(shell.user_ns) else as_magics(text)


def _has_variable(names: dict[str, Any]) -> bool:
    """Whether a session has a name; those that IPython gives to outputs are none."""
    found = [name for name, value in list(names.items()) if isinstance(value, Session)]
    return any(not name.startswith("_") for name in found)


def as_magics(text: str) -> str:
    """The text with ``%session restart 7`` for ``session.restart([7])``, and so on."""
    if "session." not in text:
        return text
    text = _CALL.sub(_magic, text.replace(_WITHOUT_RESTORE, " without --restore "))
    return _RESTORE.sub("--restore NAMES", text)


def _magic(found: re.Match[str]) -> str:
    ranks = (found["ranks"] or "").replace(" ", "")
    return (
        f"%session {found['verb']}{' ' * bool(ranks)}{ranks}{' --stacks' * bool(found['stacks'])}"
    )
