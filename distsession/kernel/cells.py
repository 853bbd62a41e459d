"""What the notebook calls its cells, for errors and for the ranks."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable
from dataclasses import replace

from distsession.display import render
from distsession.protocol.cells import is_notebook_file
from distsession.protocol.messages import ErrorInfo, FrameInfo, NotebookCell

__all__ = ["cell_of", "notebook_cells", "with_cells"]

cell_of_file: Callable[[str], str] | None = None
"""What the notebook calls the cell whose code has this name for a file; set from outside."""


def cell_of(filename: str) -> str:
    """``In[3]`` for code of the notebook's third cell; empty where that is not known."""
    known = cell_of_file is not None and is_notebook_file(filename)
    return cell_of_file(filename) if known and cell_of_file is not None else ""


def notebook_cells(files: Iterable[str]) -> tuple[NotebookCell, ...]:
    """The cells that have these names for a file, for the ranks."""
    return tuple(
        NotebookCell(file, cell_of(file), "".join(linecache.getlines(file)))
        for file in sorted(files)
    )


def with_cells(error: ErrorInfo) -> ErrorInfo:
    """The same error, with the notebook's names for its cells."""
    frames = tuple(_with_cell(frame) for frame in error.frames)
    cause = None if error.cause is None else with_cells(error.cause)
    return replace(error, frames=frames, cause=cause)


def _with_cell(frame: FrameInfo) -> FrameInfo:
    cell = cell_of(frame.filename)
    if not cell:
        return frame
    context = frame.context or render.local_lines(frame)
    return replace(frame, filename=cell, context=tuple(context))
