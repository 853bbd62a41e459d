"""What a look at a session makes of what its agents say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distsession.kernel.snapshot import Snapshots
from distsession.protocol.agent_messages import RankUsage, UsageReply


def use(rank: int, *, at: float, seconds: float, pid: int = 0) -> RankUsage:
    return RankUsage(rank, pid or 70 + rank, at, seconds, 1 << 20)


def observe(*answers: tuple[RankUsage, ...]) -> Snapshots:
    """An observer that has read these answers of the agents."""
    told = iter(answers)
    launcher = SimpleNamespace(usage=lambda patience: UsageReply(1, next(told)))
    session: Any = SimpleNamespace(launcher=launcher)
    observer = Snapshots(session)
    for _ in answers:
        observer._read()
    return observer


def test_a_share_of_the_processor_is_by_the_clock_of_the_ranks_host() -> None:
    observer = observe(
        (use(0, at=100.0, seconds=1.0), use(1, at=9000.0, seconds=1.0)),
        (use(0, at=102.0, seconds=2.0), use(1, at=9001.0, seconds=2.0)),
    )
    assert observer._percent == {0: 50, 1: 100}


def test_an_answer_that_is_told_again_counts_once() -> None:
    first, second = (use(0, at=1.0, seconds=0.0),), (use(0, at=2.0, seconds=0.5),)
    observer = observe(first, second, second)
    assert observer._percent == {0: 50}
    assert list(observer._history[0]) == [50]


def test_a_fresh_process_begins_anew() -> None:
    observer = observe(
        (use(0, at=1.0, seconds=0.0),),
        (use(0, at=2.0, seconds=0.5),),
        (use(0, at=3.0, seconds=0.1, pid=99),),
    )
    assert observer._percent == {}
    assert list(observer._history[0]) == []
