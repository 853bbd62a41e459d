"""Each program of ``tests/tutorials/reports`` names the public report that it is written after."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPORTS = sorted((Path(__file__).parents[1] / "tutorials/reports").glob("*.py"))


def test_programs_name_their_reports() -> None:
    told = {path.name: ast.get_docstring(ast.parse(path.read_text())) or "" for path in REPORTS}

    assert len(told) >= 20
    assert [n for n, text in told.items() if not re.search(r"[\w-]+/[\w-]+#\d+", text)] == []
