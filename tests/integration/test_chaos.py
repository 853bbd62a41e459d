"""Random faults leave a session that works, with its state, and nothing else.

``make soak`` does many more.
"""

from __future__ import annotations

import pytest

from tests.backends import Backend
from tests.integration.chaos import Chaos

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]


FAULTS = {"gloo": 100}
"""Fewer of a device's backend, where the ranks that a fault leaves are freed later."""


def test_a_session_survives_many_random_faults(backend: Backend) -> None:
    chaos = Chaos(20, backend)
    try:
        chaos.go(FAULTS.get(backend.name, 25))
    finally:
        chaos.close()


def test_a_session_survives_faults_that_come_after_long_use() -> None:
    chaos = Chaos(seed=21)
    try:
        chaos.go(6, between=500)
    finally:
        chaos.close()
