"""A few kernels killed at random moments; ``make soak`` kills some hundred."""

from __future__ import annotations

import pytest

from tests.integration.kills import Kills


@pytest.mark.timeout(600)
def test_a_kernel_that_is_killed_at_any_moment_leaves_nothing() -> None:
    kills = Kills(seed=3)
    try:
        kills.go(12)
    finally:
        kills.close()
