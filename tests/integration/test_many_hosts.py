"""A session on many simulated hosts: the kernel is real, see ``tests.simulated_hosts``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from distsession import Session
from distsession.protocol import diagnosis
from distsession.protocol.diagnosis import Kind
from tests.simulated_hosts import simulated_session
from tests.until import until

HOSTS, RANKS = 32, 8
WORLD = HOSTS * RANKS


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with simulated_session(HOSTS, RANKS) as found:
        yield found


def test_every_rank_answers_and_every_host_gets_one_message(session: Session) -> None:
    links = session.channel.links  # type: ignore[attr-defined]
    before = Counter(links.sent)
    results = session.run(print)
    assert results.ranks == tuple(range(WORLD))
    assert Counter(links.sent) - before == dict.fromkeys(range(1, HOSTS + 1), 1)


def test_calls_to_ranks_of_some_hosts_reach_no_other(session: Session) -> None:
    links = session.channel.links  # type: ignore[attr-defined]
    before = Counter(links.sent)
    assert session[[0, 1, 9, WORLD - 1]].run(print).ranks == (0, 1, 9, WORLD - 1)
    assert Counter(links.sent) - before == {1: 1, 2: 1, HOSTS: 1}


def test_more_calls_than_a_window_holds_are_all_answered(session: Session) -> None:
    futures = [session.submit(print) for _ in range(100)]
    assert all(len(future.result(60)) == WORLD for future in futures)


def test_all_wait_for_the_one_that_comes_late(session: Session) -> None:
    found: list[diagnosis.Verdict] = []

    def is_seen() -> bool:
        found.append(session.recovery.diagnose(session.recovery.reports(ask=False), None))
        return found[-1].kind is Kind.WAIT and len(found[-1].waiting) == WORLD - 1

    caller = threading.Thread(target=session.execute, args=("pass",), kwargs={"label": "hang 3"})
    caller.start()
    until(is_seen, "a verdict of all that wait")
    assert found[-1].missing == (WORLD - 1,)
    caller.join(60)
    assert not caller.is_alive()
    assert len(session.run(print)) == WORLD
