"""Running a script on a rank, as ``python SCRIPT.py`` would.

torch is imported where it is used: the kernel imports this module to send its functions.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from distsession.engine.world import leave_group

__all__ = ["run_script", "set_place", "variables"]

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_variables: dict[str, Any] = {}


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``__main__``, in the place of the session's own group.

    The session's process group is left before, so that ``init_process_group()`` makes the
    script's, as under torchrun. Since it is made by the same means, it is watched as the session's.

    Args:
        path: Absolute path of the script.
        arguments: ``sys.argv``.

    Raises:
        SystemExit: The script ended itself with a code that is not 0.
    """
    leave_group()
    with io.open_code(path) as file:
        source = file.read()
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = __builtins__
    main.__dict__["__cached__"] = None
    global _variables
    _variables = main.__dict__
    code = compile(source, path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    sys.argv = list(arguments)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    before = set(threading.enumerate())
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:  # Python, too, waits for these
            thread.join()


def _set_first_path(folder: str) -> None:
    """``sys.path[0]`` is where the script lies, unless Python was told otherwise (``-P``)."""
    if sys.flags.safe_path:
        return
    if sys.path and os.path.abspath(sys.path[0]) != _PACKAGE_ROOT:
        sys.path.pop(0)  # the folder of the command, or the working folder
    sys.path.insert(0, folder)


def set_place(places: Mapping[int, Mapping[str, str]]) -> None:
    """Have the environment say where other ranks of the same numbers are."""
    os.environ.update(places[int(os.environ["RANK"])])


def variables() -> dict[str, Any]:
    """The variables of the script that ran last in this process."""
    return _variables
