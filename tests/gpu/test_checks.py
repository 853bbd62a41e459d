"""The checks of ``python -m tests.gpu``, on a GPU and on the stand-in."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gpu.checks import CHECKS, Bed, Check, attempt
from tests.gpu.target import TARGETS, NotHereError


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
    bed = Bed(target)
    yield bed
    bed.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.run.__name__)
def test_on_a_device(bed: Bed, check: Check) -> None:
    outcome = attempt(bed, check)
    if outcome.word == "skipped":
        pytest.skip(outcome.text)
    assert outcome.word == "held", outcome.text
