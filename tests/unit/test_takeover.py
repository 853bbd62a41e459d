"""What becomes of requests of a former owner where a rank connects later than the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsession.cluster.pending import PendingRequest
from distsession.cluster.takeover import Takeover
from distsession.protocol.messages import Addressed, CellRequest, Resume


class Channel:
    """Notes what is sent, and makes no sockets."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.pending: list[PendingRequest] = []

    def adopt(self, number: int, ranks: Any, busy: Any) -> PendingRequest:
        self.pending.append(PendingRequest(number, ranks))
        return self.pending[-1]

    def send_control(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))


class Case:
    """Ranks 0 and 1, of which the second is late."""

    def __init__(self) -> None:
        plan: Any = SimpleNamespace(nodes=1)
        info: Any = SimpleNamespace(rank=0, generation=0)
        attachment: Any = SimpleNamespace(
            state=SimpleNamespace(plan=plan, infos=(info,)), agents={}, links={}
        )
        self.channel = Channel()
        self.attached: dict[int, Any] = {0: said()}
        monitor: Any = SimpleNamespace(attached=self.attached)
        nothing: Any = None
        channel: Any = self.channel
        self.takeover = Takeover(attachment, monitor, nothing, channel, nothing)
        self.takeover._late = {1}

    def connect(self, **what: Any) -> None:
        self.attached[1] = said(**what)
        self.takeover.on_attached(1)


def said(running: int = 0, queued: Any = (), answered: Any = ()) -> Any:
    def request(number: int) -> Addressed:
        return Addressed(CellRequest(number, "x = 1", "In[1]"), (0, 1))

    return SimpleNamespace(
        running=request(running) if running else None,
        queued=[request(number) for number in queued],
        answered=[request(number) for number in answered],
    )


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.mark.parametrize("how", [{"running": 7}, {"queued": [7]}, {"answered": [7]}])
def test_what_a_late_rank_alone_was_asked_is_waited_for(case: Case, how: Any) -> None:
    pending = case.takeover.adopt_late(7, [1])
    assert pending is not None
    case.takeover.resume_late()
    case.connect(**how)
    assert pending.missing == (1,)
    assert case.channel.sent == [(1, Resume(()))]


def test_what_never_reached_a_late_rank_is_said(case: Case) -> None:
    pending = case.takeover.adopt_late(7, [1])
    assert pending is not None
    case.takeover.resume_late()
    case.connect(queued=[8])
    assert pending.missing == ()
    error = pending.replies[1][0].error
    assert error is not None
    assert "this never reached the rank" in error.evalue


@pytest.mark.parametrize(("how", "missing"), [({"queued": [7]}, ()), ({"running": 7}, (1,))])
def test_what_never_reached_the_others_does_not_begin_on_a_late_rank(
    case: Case, how: Any, missing: tuple[int, ...]
) -> None:
    pending = case.takeover.adopt_late(7, [0, 1])
    assert pending is not None
    assert pending.missing == (1,)
    case.takeover.resume_late()
    case.connect(**how)
    assert case.channel.sent == [(1, Resume((7,)))]
    assert pending.missing == missing


def test_a_late_rank_does_not_go_on_before_all_that_it_may_have_is_known(case: Case) -> None:
    case.connect(running=7)
    assert case.channel.sent == []
    assert case.takeover.adopt_late(7, [1]) is not None
    case.takeover.resume_late()
    assert case.channel.sent == [(1, Resume(()))]
    case.takeover.on_attached(1)
    assert len(case.channel.sent) == 1


def test_what_no_late_rank_may_have_is_lost(case: Case) -> None:
    assert case.takeover.adopt_late(7, [0]) is None
