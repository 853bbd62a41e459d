"""The names that cells have in tracebacks, in place of a file."""

from __future__ import annotations

__all__ = ["cell_name", "is_cell"]

_BEGIN = "In["


def cell_name(number: int) -> str:
    """``In[3]``, as the notebook's prompt says it."""
    return f"{_BEGIN}{number}]"


def is_cell(filename: str) -> bool:
    """Whether that is the name of a cell rather than of a file."""
    return filename.startswith(_BEGIN)
