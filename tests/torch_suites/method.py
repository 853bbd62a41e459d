"""One method of a suite in a process that is a rank, of a session or of none."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import unittest
from functools import cache
from pathlib import Path

from tests.torch_suites import suites

__all__ = ["load", "load_torch", "run"]

LINES = 40
"""Of a traceback are kept."""


def run(suite_name: str, method: str, rank: int, folder: str) -> None:
    """Run it and write down how it went, in a file of the folder that bears the rank's number."""
    before = {name: os.environ.get(name) for name in ("TEMP_DIR", "BACKEND", "WORLD_SIZE")}
    try:
        status, text = _run(suite_name, method, rank, Path(folder))
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    path = Path(folder) / f"{rank}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"status": status, "text": text}))
    part.rename(path)
    sys.stdout.flush()


def load(suite_name: str) -> None:
    """Import all that its methods need, which takes seconds, outside of their time limits."""
    load_torch()
    _made(suite_name)


def load_torch() -> None:
    """Import what methods of all suites need."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.testing._internal.common_distributed")


@cache
def _made(name: str) -> type:
    suite = _suite(name)
    suites.prepare(suite)
    return suite.make()


def _suite(name: str) -> suites.Suite:
    return next(suite for suite in suites.SUITES if suite.name == name)


def _run(suite_name: str, method: str, rank: int, folder: Path) -> tuple[str, str]:
    suite = _suite(suite_name)
    suites.prepare(suite)
    os.environ["TEMP_DIR"] = str(folder)
    try:
        from torch.testing._internal.common_utils import set_rng_seed

        case = _made(suite_name)(method)
        case.rank = rank
        case.file_name = str(folder / "init")
        set_rng_seed()
        with suite.around(case, suite.ranks, folder):
            getattr(case, method)()
    except unittest.SkipTest as reason:
        return "skipped", str(reason)
    except SystemExit as end:  # torch's tests end their process, skipped or not
        if end.code in _skips():
            return "skipped", f"exit code {end.code}"
        if end.code:
            return "failed", f"SystemExit: {end.code}"
    except Exception:
        lines = traceback.format_exc().splitlines()
        return "failed", "\n".join(lines[-LINES:])
    return "passed", ""


def _skips() -> set[int]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return {skip.exit_code for skip in TEST_SKIPS.values()}
