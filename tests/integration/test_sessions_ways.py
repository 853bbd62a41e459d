"""Which way a host and the kernel come together: either connects, or ssh carries all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distsession import RunError, Session
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, reduced, start

NAMES = ("gpu1", "gpu2")
LATE_S = 0.05


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(NAMES) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: HostLab) -> Iterator[None]:
    yield
    nothing_left(lab)


def addresses(session: Session) -> list[str]:
    """By which the hosts have come."""
    return [link.address for link in session.launcher._hosts.links]  # type: ignore[attr-defined]


def try_all(session: Session) -> None:
    """What goes by each of the connections: messages, payloads, the stores."""
    ranks = session.world_size
    assert reduced(session) == {ranks}
    large = torch.ones(4 << 20)
    session.push(large=large)
    assert all(torch.equal(part, large) for part in session.pull("large").values())
    session.execute(
        "import os\n"
        "from torch.distributed import TCPStore\n"
        "store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "store.set(f'of {rank}', 'here'); value = store.get(f'of {(rank + 1) % world_size}')"
    )
    assert dict(session.pull("value")) == dict.fromkeys(range(ranks), b"here")
    session.restart([ranks - 1])
    assert reduced(session) == {ranks}


def test_hosts_come_to_the_kernel(lab: HostLab) -> None:
    with start(lab, *NAMES, ranks_per_host=[1, 1]) as session:
        assert addresses(session) == [lab.address] * 2
        try_all(session)


def test_the_kernel_goes_to_a_host_that_cannot_come(lab: HostLab) -> None:
    syn = ("OUTPUT", "-d", lab.address, "-p", "tcp", "--syn", "-j", "REJECT")
    with lab["gpu2"].firewall(*syn), start(lab, *NAMES, ranks_per_host=[1, 1]) as session:
        assert addresses(session) == [lab.address, ""]
        try_all(session)


def test_ssh_carries_all_where_it_alone_gets_through(lab: HostLab) -> None:
    rule = ("OUTPUT", "-d", lab.address, "-p", "tcp", "!", "--sport", "22", "-j", "DROP")
    with (
        lab["gpu1"].firewall(*rule),
        lab["gpu2"].firewall(*rule),
        start(lab, *NAMES, ranks_per_host=[1, 1]) as session,
    ):
        assert addresses(session) == ["ssh", "ssh"]
        try_all(session)


def test_a_host_may_be_far_away(lab: HostLab) -> None:
    with lab.delayed("gpu2", LATE_S), start(lab, *NAMES, ranks_per_host=[1, 1]) as session:
        (_, late) = session.launcher._hosts.links  # type: ignore[attr-defined]
        assert late.round_trip > 2 * LATE_S
        assert abs(late.offset) < LATE_S  # of the clocks, which are one
        try_all(session)
        with pytest.raises(RunError, match=r"rank 0 called all_reduce with float32 \[3\], rank 1 "):
            session.execute("dist.all_reduce(torch.ones(3 + rank))")
        assert reduced(session) == {2}
