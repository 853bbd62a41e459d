"""Sessions on hosts that have addresses of IPv6 only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distsession import RunError, Session, SessionStateError
from distsession.cluster import hosts as cluster_hosts
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, reduced, start
from tests.until import until

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(("gpu1", "gpu2"), ipv6=True) as found:
        yield found
        nothing_left(found)


@pytest.fixture(scope="module")
def four(lab: HostLab) -> Iterator[Session]:
    with start(lab, "gpu1", "gpu2", addresses=[lab.address]) as session:
        yield session


def test_no_host_has_an_ipv4_address(lab: HostLab) -> None:
    for host in lab.hosts:
        assert "inet " not in host.run("ip", "-o", "addr", "show", "dev", "eth0")


def test_hosts_come_to_the_kernel_without_the_help_of_ssh(lab: HostLab, four: Session) -> None:
    links = four.launcher._hosts.links  # type: ignore[attr-defined]
    assert [link.address for link in links] == [lab.address] * 2


def test_collectives_and_tensors_cross_the_hosts(four: Session) -> None:
    assert reduced(four) == {4.0}
    four.push({"sent": [1, 2]})
    assert four.evaluate("sum(sent)") == dict.fromkeys(four.ranks, 3)


def test_a_script_meets_at_the_store_that_torch_is_given(four: Session) -> None:
    four.execute("dist.destroy_process_group()\ndist.init_process_group('gloo')")
    assert reduced(four) == {4.0}
    four.reconnect()


def test_a_host_that_is_cut_off_is_named_and_comes_back(
    lab: HostLab, four: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_hosts, "LOST_S", 60.0)  # however slow the machine is
    future = four.submit(_wait_but_for_one)
    until(lambda: any(r.operations() for r in four.launcher.board.regions), "a collective")
    with lab["gpu2"].unplugged(), pytest.raises(RunError, match="gpu2 has not answered"):
        future.result(30)
    until(lambda: not four.launcher.silent_hosts(), "gpu2 to answer again")
    assert reduced(four) == {4.0}


def _wait_but_for_one() -> None:
    import time

    import torch

    time.sleep(600) if torch.distributed.get_rank() == 3 else torch.distributed.barrier()


def test_that_ipyparallel_knows_no_ipv6_is_said(four: Session) -> None:
    with pytest.raises(SessionStateError, match="gpu1 reaches this host by IPv6 only"):
        _ = four.client
