"""The checks of ``python -m tests.gpu``, on a GPU and on the stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.checks import CHECKS, Bed, Check, attempt, gpt_with_ddp, gpt_with_fsdp
from tests.gpu.seen import rows_of
from tests.gpu.target import TARGETS, NotHereError
from tests.pages import ROOT

STEPS = 50
"""Of programs, which take 200 in the report."""


@pytest.fixture(
    scope="module", params=[pytest.param("nccl", marks=pytest.mark.gpu), pytest.param("standin")]
)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    try:
        target = TARGETS[request.param]()
    except NotHereError as why:
        is_required = request.param == "standin" and os.environ.get("DISTSESSION_STANDIN")
        if is_required == "required":
            pytest.fail(str(why))
        pytest.skip(str(why))
    bed = Bed(target, STEPS)
    yield bed
    bed.close()


@pytest.mark.parametrize(
    "check",
    # Programs take minutes there.
    [check for check in CHECKS if check.needs_device],
    ids=lambda check: check.run.__name__,
)
def test_on_a_device(bed: Bed, check: Check) -> None:
    outcome = attempt(bed, check)
    if outcome.word == "skipped":
        pytest.skip(outcome.text)
    assert outcome.word == "held", outcome.text


@pytest.mark.timeout(460)
@pytest.mark.parametrize("program", [gpt_with_ddp, gpt_with_fsdp])
def test_a_program_on_the_cpu(program: Callable[[Bed], str]) -> None:
    (check,) = (check for check in CHECKS if check.run is program)
    bed = Bed(TARGETS["gloo"](), STEPS)
    try:
        outcome = attempt(bed, check)
    finally:
        bed.close()
    assert outcome.word == "held", outcome.text


def test_the_report_writes_its_row(tmp_path: Path) -> None:
    try:
        TARGETS["standin"]()
    except NotHereError as why:
        pytest.skip(str(why))
    page = tmp_path / "page.md"
    shutil.copy(ROOT / "docs/backends.md", page)
    before = rows_of(page.read_text())
    command = [sys.executable, "-m", "tests.gpu", "--backend", "standin", "--only", "the end"]
    for _ in range(2):
        done = subprocess.run(
            [*command, "--write", "--to", str(page)],
            **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"written: {page}" in done.stdout
    *others, row = sorted(rows_of(page.read_text()), key=lambda row: not row.gpu)
    assert others == before
    assert row.kind
    assert row.outcome == f"1 of {len(CHECKS)} checks were run and held"
