"""Ends of hosts and of ssh under a session of which ssh carries everything."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from distsession import EngineDiedError, RunError, RunInterrupt, Session
from distsession.cluster import hosts as cluster_hosts
from distsession.cluster.host_links import HostLinks
from tests.integration.host_chaos import ssh_clients
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import count, nothing_left, reduced, start
from tests.until import Press, until, until_settled

pytestmark = pytest.mark.timeout(90)

NAMES = ("gpu1", "gpu2")
PATIENCE_S = 8.0
"""Of hosts with a kernel that is silent; shorter than theirs, for a test waits for it."""
GONE = r"rank 1 \(pid \d+\) is gone: the agent on gpu2 .* is gone, and with it rank 1"


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(NAMES) as found:
        yield found
        nothing_left(found)
        assert not list(found.folder.glob("distsession-*"))


@pytest.fixture(scope="module")
def session(lab: HostLab) -> Iterator[Session]:
    rule = ("OUTPUT", "-d", lab.address, "-p", "tcp", "!", "--sport", "22", "-j", "DROP")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            stack.enter_context(lab[name].firewall(*rule))
        patch.setattr(cluster_hosts, "HostLinks", partial(HostLinks, patience_s=PATIENCE_S))
        with start(lab, *NAMES, ranks_per_host=[1, 1]) as made:
            yield made


@pytest.fixture(autouse=True)
def _keeps_its_variables(lab: HostLab, session: Session) -> Iterator[None]:
    """Whatever a test does, ranks that it does not harm keep what they have."""
    session.execute("kept = rank")
    before = [info.pid for info in session.infos]
    yield
    assert reduced(session) == {2.0}
    kept = session.pull("kept")
    assert kept[0] == 0
    assert session.infos[0].pid == before[0]
    links = session.launcher._hosts.links  # type: ignore[attr-defined]
    assert [link.address for link in links] == ["ssh", "ssh"]
    assert [len(host.left()) for host in lab.hosts] == [EACH, EACH]


EACH = 3
"""What a host has: a folder, and the two sockets that ssh carries."""


def _wait() -> None:
    import os

    import torch

    time.sleep(600) if os.environ["RANK"] == "1" else torch.distributed.barrier()


def silent(session: Session) -> list[Any]:
    return list(session.launcher.silent_hosts())


def test_a_host_that_is_cut_off_for_a_while_is_named_and_costs_nothing(
    lab: HostLab, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_hosts, "LOST_S", 60.0)  # however slow the machine is
    pids = [info.pid for info in session.infos]
    future = session.submit(count, 20)
    until(lambda: all(r.request for r in session.launcher.board.regions), "the call's beginning")
    with lab["gpu2"].unplugged():
        until(lambda: "gpu2 has not answered for" in session.status(), "its name")
    assert list(future.result(60).values()) == [20 * 2.0] * 2
    until(lambda: not silent(session), "gpu2 to answer again")
    assert [info.pid for info in session.infos] == pids


def test_a_host_that_stays_cut_off_counts_as_gone_and_is_taken_in_again(
    lab: HostLab, session: Session
) -> None:
    future = session.submit(_wait)
    until_settled(session)
    with lab["gpu2"].unplugged():
        with pytest.raises(RunError, match=f"^EngineDiedError: {GONE}"):
            future.result(60)
        assert session[0].evaluate("kept") == {0: 0}
        with pytest.raises(EngineDiedError, match=GONE):
            session.run(int)
        until(lambda: not lab["gpu2"].processes(), "the end of what is cut off")
    session.restart(hosts=["gpu2"], restore="kept")
    assert session.evaluate("kept") == {0: 0, 1: 0}


def test_the_end_of_ssh_is_the_end_of_its_host(lab: HostLab, session: Session) -> None:
    future = session.submit(_wait)
    until_settled(session)
    (client,) = ssh_clients("gpu2")
    client.kill()
    with pytest.raises(RunError, match=f"^EngineDiedError: {GONE}"):
        future.result(60)
    assert session[0].evaluate("kept") == {0: 0}
    until(lambda: not lab["gpu2"].processes(), "the end of what ssh has started")
    session.restart(hosts=["gpu2"], restore="kept")
    assert session.evaluate("kept") == {0: 0, 1: 0}


def test_stop_frees_ranks_that_wait_for_each_other(session: Session) -> None:
    with Press(session, lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(RunInterrupt):
        session.run(_wait)
    assert session.evaluate("kept") == {0: 0, 1: 1}


def test_a_host_can_be_started_anew(lab: HostLab, session: Session) -> None:
    before = session.infos[1].pid
    session.restart(hosts=["gpu2"], restore="kept")
    assert session.infos[1].pid != before
    assert session.evaluate("kept") == {0: 0, 1: 0}
