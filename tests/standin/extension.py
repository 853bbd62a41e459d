"""The stand-in's library, loaded into this process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from types import ModuleType
from typing import Any

from tests.standin.build import build


def load() -> ModuleType:
    path = str(build())
    loader = importlib.machinery.ExtensionFileLoader("_standin", path)
    spec = importlib.util.spec_from_file_location("_standin", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


native: Any = load()
