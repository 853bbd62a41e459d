"""Modules that an agent imports, so that the ranks it forks have them.

It must stay able to fork: no module may start a thread or use a device. What a session wants that
has ranks already is therefore tried in a child first, see ``Agent._preload``.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Sequence

__all__ = ["LATER_IMPORTS", "import_modules"]

LATER_IMPORTS = (
    *("sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torch.onnx"),
    "distsession.engine.px_engine",
)
"""What ranks import at a first use: ``DistributedDataParallel`` when it is constructed, for over a
second with torch 2.13, and a registration with ipyparallel. The agent imports these modules while
it has nothing else to do, so that ranks forked later have them."""

MAX_ERROR_CHARS = 2000
"""Of what a module's error says."""


def import_modules(names: Sequence[str]) -> str:
    """Import modules in this process.

    Args:
        names: Theirs.

    Returns:
        Which one does not import, or why no rank can be forked after it; empty if all is well.
    """
    from distsession.engine import host_info  # torch

    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            traceback.print_exc()
            return f"the preload module {name!r} does not import: {repr(error)[:MAX_ERROR_CHARS]}"
        if problem := host_info.fork_problem():
            return f"ranks cannot be forked: {problem}, because of {name}. Leave it out of preload."
    return ""
