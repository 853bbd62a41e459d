"""Random faults on hosts leave a session that works, with the variables of those that lived.

``make soak-hosts`` does many more.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.host_chaos import NAMES, SPARE, HostChaos
from tests.integration.host_lab import HostLab, host_lab

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

SEED = 4
STEPS = 8
LONGEST_S = 7.0
"""Of a fault; longer than a host may be silent."""


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab((*NAMES, SPARE)) as found:
        yield found


def test_a_session_over_hosts_survives_random_faults(lab: HostLab) -> None:
    chaos = HostChaos(lab, SEED, longest_s=LONGEST_S)
    try:
        chaos.go(STEPS)
    finally:
        chaos.close()
