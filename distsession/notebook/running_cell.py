"""Which cell of the notebook runs, and which line of it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["cell_number", "cell_of_file", "running_cell", "running_line"]

CELL_NAMES = ("<module>", "<cell line: ")
"""How the code of a cell is called; the second by some releases of IPython 7 and 8."""


def running_cell() -> int | None:
    """The number of the cell that runs; None where this is no notebook or IPython terminal."""
    shell = _shell()
    return None if shell is None else cell_number(shell)


def cell_of_file(filename: str) -> str:
    """``In[3]``, as IPython's tracebacks call code that has this name for a file; else nothing."""
    shell = _shell()
    name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if name is None:
        return _cell_with_code(shell, filename)
    found = name(filename)
    return "" if found is None else str(found[1])


def _cell_with_code(shell: Any, filename: str) -> str:
    """The last cell whose code has this name, with IPython 7, which keeps no list of them."""
    name_of = getattr(getattr(shell, "compile", None), "get_code_name", None)
    if name_of is None:
        return ""
    sources = list(enumerate(shell.history_manager.input_hist_raw))
    return next(
        (f"In[{n}]" for n, raw in reversed(sources) if name_of(raw, raw, n) == filename), ""
    )


def _shell() -> Any:
    # Another thread may be half-way through importing it.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()


def cell_number(shell: Any) -> int:
    """The number that the notebook shows for the cell that runs.

    Its input is stored before it runs. Whether ``execution_count`` is one further by then differs
    between versions of IPython.
    """
    return len(shell.history_manager.input_hist_parsed) - 1


def running_line(shell: Any) -> int:
    """The line of the cell from which this is called; the first where that is not known."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_cell = frame.f_globals is shell.user_ns and frame.f_code.co_name.startswith(CELL_NAMES)
        if is_cell:
            return max(1, frame.f_lineno)
        frame = frame.f_back
    return 1
