"""A program whose agents are forked: run in the place of ``python -m``, by ``warm_agents.py``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls functions with modules, once these have been imported."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]):
        self._functions = functions

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        function = self._functions.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if function else None
        if function is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    import warm_agents  # beside this file, whose folder is the first that is looked into

    os.set_inheritable(warm_agents.LINK, False)
    warm = warm_agents.WarmAgents(socket.socket(fileno=warm_agents.LINK))
    functions = {
        "distsession.cluster.agents": partial(warm_agents.fork_agents, warm=warm),
        "jupyter_client.provisioning.local_provisioner": partial(
            warm_agents.fork_agents_of_kernels, warm=warm
        ),
    }
    sys.meta_path.insert(0, AfterImport(functions))
    sys.path[0] = os.getcwd()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
