"""The source of cells, for whoever looks for it in a file."""

from __future__ import annotations

import importlib
import linecache
from types import ModuleType

from distsession.protocol.cells import is_cell, is_notebook_file

__all__ = ["keep_in_linecache", "show_to_line_profiler"]


def keep_in_linecache() -> None:
    """Have the source of cells outlive ``linecache.clearcache()``: no file could give it again."""
    clear = linecache.clearcache

    def clearcache() -> None:
        cells = {
            name: entry
            for name, entry in linecache.cache.items()
            if is_cell(name) or is_notebook_file(name)
        }
        clear()
        linecache.cache.update(cells)

    linecache.clearcache = clearcache


def show_to_line_profiler(source: str) -> None:
    """Have line_profiler look for the source of cells, although no file has their name.

    It knows the names that IPython gives them, and takes any other for a file that is gone.

    Args:
        source: Of the cell that is about to run, which may be the first to import it.
    """
    if "line_profiler" not in source and "lprun" not in source:
        return
    try:
        profiler = importlib.import_module("line_profiler.line_profiler")
    except ImportError:
        return
    if hasattr(profiler, "is_generated_code") and not hasattr(profiler, _KNOWS_CELLS):
        _teach(profiler)


_KNOWS_CELLS = "_knows_cells_of_ranks"


def _teach(profiler: ModuleType) -> None:
    is_generated = profiler.is_generated_code

    def is_generated_code(filename: str) -> bool:
        return is_cell(filename) or bool(is_generated(filename))

    vars(profiler).update({"is_generated_code": is_generated_code, _KNOWS_CELLS: True})
