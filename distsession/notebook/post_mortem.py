"""``%debug``, ``%pdb`` and ``pdb.pm()`` after an error of ranks: they open the debugger there.

What they would open here stands in this package, where the error was put together.
"""

from __future__ import annotations

import pdb
import sys
from typing import Any

from distsession.errors import CollectiveError, DistsessionError, RunError, SessionStateError
from distsession.session import current_session

__all__ = ["PostMortem"]


class PostMortem:
    """Hooks into a shell and into ``pdb``.

    Args:
        shell: Of the notebook.
    """

    def __init__(self, shell: Any):
        self._shell = shell
        self._pm = pdb.pm

    def register(self) -> None:
        """Hook in."""
        self._pm = pdb.pm
        pdb.pm = self._open
        self._shell.debugger = self._open_from_shell

    def unregister(self) -> None:
        """Take the hooks away."""
        if pdb.pm == self._open:
            pdb.pm = self._pm
        vars(self._shell).pop("debugger", None)

    def _open(self) -> None:
        if not _debug_ranks():
            self._pm()

    def _open_from_shell(self, force: bool = False) -> None:
        if not ((force or self._shell.call_pdb) and _debug_ranks()):
            type(self._shell).debugger(self._shell, force)


def _debug_ranks() -> bool:
    """Open the debugger of the rank that failed; False if the last error is not that of ranks."""
    if not isinstance(getattr(sys, "last_value", None), (RunError, CollectiveError)):
        return False
    try:
        session = current_session()
    except SessionStateError:  # it is closed
        return False
    if session.channel.runs_in_caller:
        return False
    try:
        session.debug()
    except DistsessionError as error:  # with %pdb this is within IPython's own showing of an error
        sys.stderr.write(f"{error}\n")
    return True
