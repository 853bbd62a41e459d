"""Random faults leave a session that works, with its state, and nothing else.

``make soak`` does many more.
"""

from __future__ import annotations

import pytest

from tests.backends import LEAVES_MESSAGE, Backend, only
from tests.integration.chaos import Chaos

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600), LEAVES_MESSAGE]

MANY = 32
FAULTS, FAULTS_WHEN_OLD = {"gloo": 100}, {"gloo": 6}
"""Fewer of a device's backend, where the ranks that a fault leaves are freed later."""


def test_a_session_survives_many_random_faults(backend: Backend) -> None:
    chaos = Chaos(20, backend)
    try:
        chaos.go(FAULTS.get(backend.name, 25))
    finally:
        chaos.close()


def test_a_session_survives_faults_that_come_after_long_use(backend: Backend) -> None:
    chaos = Chaos(21, backend)
    try:
        chaos.go(FAULTS_WHEN_OLD.get(backend.name, 4), between=500)
    finally:
        chaos.close()


@only("gloo", "32 devices that the CPU plays are tried in test_many_ranks")
def test_many_ranks_survive_one_fault_of_each_kind(backend: Backend) -> None:
    chaos = Chaos(22, backend, MANY)
    try:
        chaos.go_through()
        before = chaos.held()
        chaos.go_through()
        chaos.check_held(before)
    finally:
        chaos.close()
