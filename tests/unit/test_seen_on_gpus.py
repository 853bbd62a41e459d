"""README and documentation say the same of what was seen on which GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.gpu import seen
from tests.gpu.__main__ import main
from tests.pages import PAGES, ROOT

BACKENDS = (ROOT / "docs/backends.md").read_text()
README = (ROOT / "README.md").read_text()
IN_README = re.compile(
    r"on (?P<date>[\d-]{10}) \((?P<gpu>[^,()]+), torch (?P<torch>[\d.]+), NCCL (?P<nccl>[\d.]+), "
    r"`(?P<kind>\w+)`\)"
)
UNSEEN = re.compile(
    r"\bon (?:no GPUs?|GPUs?) (?:yet|so far)|(?:not|never|nothing)[^.]{0,30} seen on (?:a )?GPU"
)


class Seen(NamedTuple):
    """What was tried on a GPU."""

    date: str
    gpu: str
    torch: str
    nccl: str
    kind: str


def told_by_docs() -> list[Seen]:
    """The rows of the table, by the names of its columns."""
    return table_of(BACKENDS)


def table_of(page: str) -> list[Seen]:
    lines = page.partition("## What was seen where")[2].partition("\n\n")[2].splitlines()
    head, _, *rows = (cells(line) for line in lines[: lines.index("")])
    wanted = ("Date", "GPU", "torch", "NCCL", "Class")
    return [Seen(*(row[head.index(name)].strip("`") for name in wanted)) for row in rows]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def told_by_readme() -> list[Seen]:
    return clauses_of(README)


def clauses_of(readme: str) -> list[Seen]:
    return [Seen(*found.groups()) for found in IN_README.finditer(" ".join(readme.split()))]


def test_both_name_the_same_machines_and_classes() -> None:
    assert told_by_readme() == told_by_docs()
    assert len(set(told_by_docs())) == len(told_by_docs())


def test_each_is_dated_and_complete() -> None:
    for row in told_by_docs():
        assert all(row), row
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date), row
        assert row.kind.startswith("ProcessGroupNCCL"), row


def test_no_page_says_that_nothing_was_seen() -> None:
    for page in PAGES:
        assert not UNSEEN.findall(" ".join(page.read_text().split())), page.name


def test_what_was_seen_is_not_named_as_not_seen() -> None:
    [unseen] = re.findall(r"Not seen: ([^.]*(?:\.\d[^.]*)*)\.", " ".join(BACKENDS.split()))
    kinds = set(re.findall(r"ProcessGroup\w+", unseen))
    known = {"ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"}
    assert kinds == known - {row.kind for row in told_by_docs()}


ROW = seen.Seen(
    *("2026-11-27", "RTX 4090", "590.1", "2.16.0", "2.33.1", "ProcessGroupNCCL2"),
    *("4 on one GPU", "all 25 checks held"),
)


def test_a_run_becomes_a_row_and_a_clause_of_the_readme() -> None:
    page = seen.add_row(BACKENDS, ROW)
    expected = Seen("2026-11-27", "RTX 4090", "2.16.0", "2.33.1", "ProcessGroupNCCL2")
    assert table_of(page) == [*told_by_docs(), expected]
    readme = seen.retell(README, seen.rows_of(page))
    assert clauses_of(readme) == table_of(page)
    rest = [line for line in page.splitlines() if line != ROW.row]
    assert rest == BACKENDS.splitlines()
    assert max(map(len, readme.splitlines())) == max(map(len, README.splitlines()))


def test_the_same_run_again_takes_the_place_of_the_row() -> None:
    page = seen.add_row(BACKENDS, ROW)
    assert seen.add_row(page, ROW) == page
    worse = replace(ROW, outcome="24 of 25 checks held; failed: start")
    again = seen.add_row(page, worse)
    assert again == page.replace(ROW.row, worse.row)
    assert seen.retell(README, seen.rows_of(again)) == seen.retell(README, seen.rows_of(page))
    other_day = seen.add_row(page, replace(ROW, date="2026-11-25"))
    assert table_of(other_day)[0].date == "2026-11-25"
    assert len(table_of(other_day)) == len(table_of(page)) + 1


def test_the_pages_are_as_the_command_writes_them() -> None:
    rows = seen.rows_of(BACKENDS)
    assert seen.add_row(BACKENDS, rows[0]) == BACKENDS
    assert seen.retell(README, rows) == README


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(seen.UnknownTableError, match="no table below '## What was seen where'"):
        seen.add_row(BACKENDS.replace("| Ranks |", "|"), ROW)
    with pytest.raises(seen.UnknownTableError, match="no item of the README"):
        seen.retell("# Nothing\n\n- on GPUs\n", [ROW])


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_a_gpu_is_named_by_its_model(name: str, short: str) -> None:
    assert seen.short_gpu(name) == short


def test_checks_are_counted_in_words() -> None:
    ran = {"held": ["start", "end"], "FAILED": [], "skipped": ["graph"]}
    assert seen.outcome_text(ran, 3) == "2 of 3 checks were run and held"
    assert seen.outcome_text(ran, 2) == "all 2 checks held"
    ran["FAILED"] = ["stop"]
    assert seen.outcome_text(ran, 4) == "2 of 3 checks held; failed: stop"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--backend", "standin", "--write"], "standin needs none: --write --to FILE"),
        (["--write", "--only", "start"], "leave --only out"),
        (["--to", "page.md"], "give both"),
    ],
)
def test_what_was_not_seen_on_a_gpu_is_not_written(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert why in " ".join(capsys.readouterr().err.split())
    assert (ROOT / "docs/backends.md").read_text() == BACKENDS
