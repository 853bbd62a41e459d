"""The names that cells have in tracebacks, in place of a file, and what they show at their end."""

from __future__ import annotations

import ast
import re

from distsession.errors import OptionsError

__all__ = [
    "CellNames",
    "cell_name",
    "is_cell",
    "is_notebook_file",
    "name_of_value",
    "number_in",
    "parse_cell",
]

_BEGIN = "In["


def cell_name(number: int) -> str:
    """``In[3]``, as the notebook's prompt says it."""
    return f"{_BEGIN}{number}]"


class CellNames:
    """Names of code that cells send; each has lines of its own, so none is named twice.

    Attributes:
        kernel: Which of the session's kernels has these cells, from 1.
        taken: Numbers that cells of earlier kernels have in the names that ranks know.
        seen: Those that cells of this kernel have there.
    """

    def __init__(self) -> None:
        self._cell = 0
        self._count = 0
        self.kernel = 1
        self.taken: set[int] = set()
        self.seen: set[int] = set()

    def name(self, cell: int) -> str:
        """``In[3]``; and ``In[3] (kernel 2)`` if an earlier kernel's cell has that name."""
        which = self._which(cell)
        return f"{cell_name(cell)} ({which})" if which else cell_name(cell)

    def next(self, cell: int, how: str) -> str:
        """``In[3] (execute)``, and ``In[3] (execute 2)`` for the next one of the same cell.

        Args:
            cell: The number of the cell.
            how: What it calls.
        """
        self._count = self._count + 1 if cell == self._cell else 1
        self._cell = cell
        call = f"{how} {self._count}" if self._count > 1 else how
        return f"{cell_name(cell)} ({', '.join(filter(None, (self._which(cell), call)))})"

    def _which(self, cell: int) -> str:
        return f"kernel {self.kernel}" if cell in self.taken else ""


def number_in(name: str) -> tuple[int, ...]:
    """The number in the name of a cell, if that is one."""
    found = re.match(r"In\[(\d+)\]", name)
    return (int(found[1]),) if found else ()


def parse_cell(text: str) -> int | None:
    """The number in ``3``, ``In 3`` or ``In[3]``; None in an empty text.

    Raises:
        OptionsError: It is something else.
    """
    if not text.strip():
        return None
    found = re.fullmatch(r"\s*(?:[iI]n\s*)?\[?\s*(\d+)\s*\]?:?\s*", text)
    if found is None:
        raise OptionsError(f"{text!r} names no cell: write 3, In 3 or In[3], as its prompt says.")
    return int(found[1])


def is_cell(filename: str) -> bool:
    """Whether that is the name of a cell rather than of a file."""
    return filename.startswith(_BEGIN)


def is_notebook_file(filename: str) -> bool:
    """Whether that is what IPython names the code of a notebook's cell, in place of a file."""
    return "ipykernel_" in filename or filename.startswith("<ipython-input-")


def name_of_value(source: str) -> str:
    """What code shows at its end, if that is a name, or a part of what has one.

    Such a thing can be looked at again without running anything twice.
    """
    last = source.strip().rpartition("\n")[2]
    try:
        statements = ast.parse(last).body
    except (SyntaxError, ValueError):
        return ""
    if not statements or not isinstance(statements[-1], ast.Expr):
        return ""
    value = statements[-1].value
    kinds = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)
    is_name = all(isinstance(node, kinds) for node in ast.walk(value))
    return ast.unparse(value) if is_name and not isinstance(value, ast.Constant) else ""
