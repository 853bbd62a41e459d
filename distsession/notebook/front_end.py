"""Whether the front end shows widgets, as far as a kernel can tell.

A front end does not say what it is. But some programs that show none start their kernels
themselves, and a page without ipywidgets' extension closes the comm of each widget at once.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["has_ipywidgets", "shows_widgets"]

PROGRAMS_WITHOUT_WIDGETS = {
    *("jupyter-console", "jupyter_console", "jupyter-qtconsole", "qtconsole"),
}
KERNELS_WITHOUT_WIDGETS = ("spyder_kernels",)


def shows_widgets() -> bool:
    """False where it is certain that the front end shows no widgets."""
    if not has_ipywidgets() or _is_without_widgets(os.getppid()):
        return False
    comms = sys.modules.get("distsession.notebook.comms")  # not before there is a widget
    return comms is None or not comms.relay.is_refused


def has_ipywidgets() -> bool:
    """Whether this process can import ipywidgets."""
    return "ipywidgets" in sys.modules or importlib.util.find_spec("ipywidgets") is not None


@functools.cache
def _is_without_widgets(parent: int) -> bool:
    if any(name in sys.modules for name in KERNELS_WITHOUT_WIDGETS):
        return True
    try:
        words = Path(f"/proc/{parent}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return not _shows(words)


def _shows(command: Sequence[str]) -> bool:
    """Whether a program shows widgets, by its command line."""
    # The interpreter, its options, and the program or, behind -m, the module.
    return not any(os.path.basename(word) in PROGRAMS_WITHOUT_WIDGETS for word in command[:4])
