"""Random faults leave a session that works, with its state, and nothing else.

``make soak`` does many more.
"""

from __future__ import annotations

import pytest

from tests.integration.chaos import Chaos

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]


def test_a_session_survives_random_faults() -> None:
    chaos = Chaos(seed=20)
    try:
        chaos.go(40)
    finally:
        chaos.close()


def test_a_session_survives_faults_that_come_after_long_use() -> None:
    chaos = Chaos(seed=21)
    try:
        chaos.go(3, between=300)
    finally:
        chaos.close()
