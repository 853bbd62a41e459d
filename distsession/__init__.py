"""Persistent distributed PyTorch ranks for a notebook.

``from distsession import Session`` and ``%load_ext distsession`` are the two ways in. Importing
this package loads neither torch nor IPython, and starts nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from distsession import errors

if TYPE_CHECKING:
    from distsession.options import SessionOptions
    from distsession.results import RankResults
    from distsession.scripts.launch import launch, start_training
    from distsession.scripts.launch_options import LaunchOptions
    from distsession.session import Session, current_session
    from distsession.viewer import SessionViewer

__version__ = "0.1.0"

__all__ = [
    "LaunchOptions",
    "RankResults",
    "Session",
    "SessionOptions",
    "SessionViewer",
    "current_session",
    "errors",
    "launch",
    "load_ipython_extension",
    "start_training",
    "unload_ipython_extension",
]

_HOMES = {
    "Session": "distsession.session",
    "current_session": "distsession.session",
    "SessionViewer": "distsession.viewer",
    "RankResults": "distsession.results",
    "SessionOptions": "distsession.options",
    "LaunchOptions": "distsession.scripts.launch_options",
    "launch": "distsession.scripts.launch",
    "start_training": "distsession.scripts.launch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        from distsession import session, view
        from distsession.kernel import cells, outcome

        if session.output_factory is None:
            session.output_factory = _make_output
            session.panel_factory = _panel
            view.running_cell = _running_cell
            outcome.error_colors = _error_colors
            cells.cell_of_file = _cell_of_file
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in errors.__all__:
        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_output(log: Any) -> Any:
    from distsession.notebook.cell import make_output

    return make_output(log)


def _panel(session: Any) -> Any:
    from distsession.notebook import panel

    return panel.make_panel(session)


def _running_cell() -> int | None:
    from distsession.notebook.running_cell import running_cell

    return running_cell()


def _cell_of_file(filename: str) -> str:
    from distsession.notebook.running_cell import cell_of_file

    return cell_of_file(filename)


def _error_colors() -> Any:
    from distsession.notebook.colors import shell_colors

    return shell_colors()


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext distsession`` does: add the magics, and say which sessions are there."""
    from distsession.notebook import kept_hint, magics

    magics.register(shell)
    for line in kept_hint.hints():
        sys.stdout.write(f"{line}\n")


def unload_ipython_extension(shell: Any) -> None:
    """What ``%unload_ext distsession`` does: take the magics away. Sessions stay as they are."""
    from distsession.notebook import magics

    magics.unregister(shell)
