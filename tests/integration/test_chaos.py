"""Random faults leave a session that works, with its state, and nothing else.

``make soak`` does many more.
"""

from __future__ import annotations

import pytest

from tests.integration.chaos import Chaos

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]


def test_a_session_survives_a_hundred_random_faults() -> None:
    chaos = Chaos(seed=20)
    try:
        chaos.go(100)
    finally:
        chaos.close()


def test_a_session_survives_faults_that_come_after_long_use() -> None:
    chaos = Chaos(seed=21)
    try:
        chaos.go(6, between=500)
    finally:
        chaos.close()
