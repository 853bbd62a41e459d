"""Some kernels killed at random moments; ``make soak-keep`` kills a thousand."""

from __future__ import annotations

import pytest

from tests.integration.keep_kills import KeepKills


@pytest.mark.timeout(600)
def test_kernels_that_are_killed_at_any_moment_lose_nothing_and_tell_nothing_twice() -> None:
    kills = KeepKills(seed=5, megabytes=16)
    try:
        kills.go(50)
    finally:
        kills.close()
