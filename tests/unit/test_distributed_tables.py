"""The tables of docs/distributed.md name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import distsession
import distsession.distributed as dd

PAGE = (Path(__file__).parents[2] / "docs/distributed.md").read_text()
SOURCES = ("ignite", "composer", "DI-engine", "flame", "torch")


def rows(source: str) -> list[list[str]]:
    section = PAGE.partition(f"## Coming from {source}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROWS = [(source, *row) for source in SOURCES for row in rows(source)]


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_has_a_table(source: str) -> None:
    found = rows(source)
    assert len(found) >= 4
    assert all(len(row) == 3 for row in found)


@pytest.mark.parametrize(("source", "theirs", "ours", "differs"), ROWS)
def test_a_name_of_ours_can_be_imported(source: str, theirs: str, ours: str, differs: str) -> None:
    assert re.fullmatch(r"(`\w+`(, )?)+", theirs)
    if ours == "-":
        return
    name = re.fullmatch(r"`(distsession\.)?(\w+)`", ours)
    assert name is not None
    home = distsession if name[1] else dd
    assert name[2] in home.__all__
    assert callable(getattr(home, name[2]))


def test_every_public_name_of_the_package_is_there() -> None:
    assert dd.__all__ == sorted(dd.__all__)
    for name in dd.__all__:
        assert getattr(dd, name).__doc__
    assert set(dd.__all__) <= set(dir(dd))
    with pytest.raises(AttributeError, match="'spawn'"):
        _ = dd.spawn
