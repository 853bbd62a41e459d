"""Names that users of nbdistributed type, each with a hint at what does the same here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

__all__ = ["register", "unregister"]

_HINTS = {
    ("cell", "rank"): "%%distributed {line}",
    ("line", "sync"): "%distributed dist.barrier()",
    ("line", "dist_init"): "%session start 4",
    ("line", "dist_status"): "%session, or %session devices",
    ("line", "dist_debug"): "%session diagnose",
    ("line", "dist_mode"): "%session auto on",
    ("line", "dist_reset"): "%session restart",
    ("line", "dist_shutdown"): "%session close",
}
"""Kind and name of a magic of nbdistributed's (0.1), and ours."""


class _Hint:
    """Stands where nbdistributed's magic would be, and says which one is here."""

    def __init__(self, kind: str, name: str, ours: str):
        self._name = f"{'%%' if kind == 'cell' else '%'}{name}"
        self._ours = ours
        self.__doc__ = f"nbdistributed's; here it is ``{ours.format(line='')}``."

    def __call__(self, line: str = "", cell: str | None = None) -> None:
        ranks = line.strip().strip("[]").replace(" ", "")
        ours = self._ours.format(line=ranks).strip()
        raise UsageError(f"{self._name} is a magic of nbdistributed's. Here it is: {ours}")


def register(shell: Any) -> None:
    """Add the hints where no magic has such a name."""
    present: dict[str, dict[str, Callable[..., Any]]] = shell.magics_manager.magics
    for (kind, name), ours in _HINTS.items():
        present[kind].setdefault(name, _Hint(kind, name, ours))


def unregister(shell: Any) -> None:
    """Take them away again."""
    present: dict[str, dict[str, Callable[..., Any]]] = shell.magics_manager.magics
    for kind, name in _HINTS:
        if isinstance(present[kind].get(name), _Hint):
            del present[kind][name]
