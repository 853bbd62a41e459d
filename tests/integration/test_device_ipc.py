"""What is restored goes from device to device, and where it cannot, through the host's memory."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from distsession import RunError, RunInterrupt, Session
from distsession.errors import EngineDiedError
from distsession.kernel.requests import Requests
from distsession.protocol.messages import PushRequest, ReturnRequest
from tests.backends import STANDIN
from tests.until import Press, until

pytestmark = pytest.mark.skipif(STANDIN.why_not() is not None, reason=STANDIN.why_not() or "")

Start = Callable[..., Session]

MODEL = """
torch.manual_seed(rank)
model = torch.nn.Linear(1000, 600)
optim = torch.optim.SGD(model.parameters(), momentum=0.9)
model(torch.ones(1000)).sum().backward()
optim.step()
whole = torch.arange(2_000_000.) + rank
half = whole[1_000_000:]
column = (torch.arange(1_200_000).reshape(600_000, 2) * (rank + 1))[:, 1]
small = torch.full((3,), float(rank))
on_host = torch.full((400_000,), float(rank), device="cpu")
"""
NAMES = ("model", "optim", "whole", "half", "column", "small", "on_host")
SUMS = (
    "[float(t.double().sum()) for t in (*model.parameters(), *(s['momentum_buffer'] for s in "
    "optim.state.values()), whole, half, column, small, on_host)]"
)
BORROWED = "__import__('distsession.engine.device_ipc').engine.device_ipc.borrowed_bytes()"
STATE = "state = torch.full((300_000,), rank + 1.)"
BYTES = 1_200_000


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start ranks on the stand-in, whose memory is lent as is said."""

    def begin(mode: str = "", ranks: int = 2, **options: Any) -> Session:
        monkeypatch.setenv("DISTSESSION_STANDIN_IPC", mode)
        session = start(ranks, **STANDIN.options(ranks), threads=1, **options)
        session.execute(STATE)
        return session

    return begin


def found(session: Session) -> tuple[float, int]:
    """The sum of what rank 1 has for ``state``, and the bytes that it was lent."""
    sums, borrowed = session[1].evaluate(f"(state.sum().item(), {BORROWED})")[1]
    return sums, borrowed


def test_what_lies_on_a_device_goes_straight_to_the_other_and_shares_what_it_shared(
    begin: Start,
) -> None:
    session = begin()
    session.execute(MODEL)
    session.restart([1], restore=NAMES)
    sums = session.evaluate(SUMS)
    assert sums[0] == sums[1]
    assert session[1].evaluate(BORROWED)[1] >= (1_000 * 600 * 2 + 2_000_000) * 4
    assert session[1].evaluate("half.data_ptr() - whole.data_ptr()")[1] == 4_000_000
    shared = "optim.param_groups[0]['params'][0] is model.weight"
    assert session[1].evaluate(shared)[1] is True
    assert session[1].evaluate("column.is_contiguous(), str(column.device)")[1] == (
        True,
        "standin:1",
    )
    assert session[1].evaluate("str(on_host.device)")[1] == "cpu"


def test_what_was_lent_is_let_go(begin: Start) -> None:
    session = begin()
    before = session[0].evaluate("torch.accelerator.memory_allocated(0)")[0]
    session.execute(MODEL)
    session.restart([1], restore=NAMES)
    session[0].execute(f"del {', '.join(NAMES)}; __import__('gc').collect()")
    assert session[0].evaluate("torch.accelerator.memory_allocated(0)")[0] == before


@pytest.mark.parametrize("mode", ["unlent", "refused"])
def test_what_cannot_be_lent_or_opened_goes_through_the_host(
    begin: Start, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "distsession"):
        session = begin(mode)
        session.restart([1], restore="state")
    assert found(session) == (300_000.0, 0)
    if mode == "refused":
        assert "state goes through this host's memory: " in caplog.text
        assert "this memory cannot be opened here" in caplog.text


def test_it_can_be_switched_off(begin: Start) -> None:
    session = begin(device_ipc="off")
    session.restart([1], restore="state")
    assert found(session) == (300_000.0, 0)


def test_of_a_device_of_which_nothing_is_known_it_goes_through_the_host(start: Start) -> None:
    session = start(2, backend="standin", preload=["tests.standin.register", "tests.on_device"])
    session.execute(STATE)
    session.restart([1], restore="state")
    assert found(session) == (300_000.0, 0)


def test_a_copy_that_breaks_the_device_is_said_with_what_helps(begin: Start) -> None:
    session = begin("broken")
    with pytest.raises(RunError) as caught:
        session.restart([1], restore="state")
    assert "an illegal memory access" in str(caught.value)
    notes = "".join(caught.value.by_rank[1].__notes__)
    assert "The device standin:1 of rank 1 is lost to its process" in notes
    assert "session.restart([1]) replaces the rank" in notes
    session.restart([1])
    assert session[1].evaluate("'state' in globals()")[1] is False
    session.execute("total = torch.ones(1); dist.all_reduce(total)")
    assert dict(session.evaluate("total.item()")) == {0: 2.0, 1: 2.0}


def test_of_an_owner_that_is_killed_meanwhile_nothing_is_taken(begin: Start) -> None:
    session = begin("orphaned")
    with pytest.raises((RunError, EngineDiedError), match="rank 0"):
        session.restart([1], restore="state")
    assert 0 in session.launcher.dead_ranks()
    session.restart([0])
    assert session[1].evaluate("'state' in globals()")[1] is False
    session.execute("total = torch.ones(1); dist.all_reduce(total)")
    assert dict(session.evaluate("total.item()")) == {0: 2.0, 1: 2.0}


def test_what_has_changed_meanwhile_is_fetched_anew(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin()
    call, ran = Requests.call, list[str]()

    def changed(self: Requests, ranks: Sequence[int], make: Any, *args: Any, **more: Any) -> Any:
        result = call(self, ranks, make, *args, **more)
        if make is PushRequest:
            session[0].execute("state += 1")
            ran.append("after the copy")
        return result

    monkeypatch.setattr(Requests, "call", changed)
    session.restart([1], restore="state")
    assert ran == ["after the copy"]
    assert found(session) == (600_000.0, BYTES)


def test_several_ranks_copy_from_one(begin: Start) -> None:
    session = begin(ranks=3)
    session.restart([1, 2], restore="state")
    values = session.evaluate(f"(state.sum().item(), str(state.device), {BORROWED})")
    assert values[1] == (300_000.0, "standin:1", BYTES)
    assert values[2] == (300_000.0, "standin:2", BYTES)


def test_a_stop_in_the_midst_leaves_nothing_lent_and_nothing_there(begin: Start) -> None:
    session = begin("slow")
    before = session[0].evaluate("torch.accelerator.memory_allocated(0)")[0]

    def is_copying() -> bool:
        return session.channel.is_busy(1) and "ipc.py" in repr(session.diagnose())

    stop = partial(signal.raise_signal, signal.SIGINT)
    with pytest.raises(RunInterrupt), Press(session, stop, lambda: until(is_copying)):
        session.restart([1], restore="state")
    assert session[1].evaluate("'state' in globals()")[1] is False
    session[0].execute("del state")
    assert session[0].evaluate("torch.accelerator.memory_allocated(0)")[0] == before - BYTES


def test_an_error_of_the_pull_leaves_nothing_lent(begin: Start) -> None:
    session = begin()
    with pytest.raises(RunError, match="name 'nothing' is not defined"):
        session.restart([1], restore=["state", "nothing"])
    assert session[1].evaluate("'state' in globals()")[1] is True  # nothing was replaced
    assert session.requests.call([0], ReturnRequest, [])[0] is False  # nothing is lent


def test_a_restart_that_is_stopped_leaves_nothing_lent(begin: Start) -> None:
    session = begin()
    pid = session.infos[1].pid
    stop = partial(signal.raise_signal, signal.SIGINT)
    with (
        pytest.raises(RunInterrupt, match="the restart was stopped"),
        Press(session, stop, lambda: until(lambda: not os.path.exists(f"/proc/{pid}"))),
    ):
        session.restart([1], restore="state")
    assert session.requests.call([0], ReturnRequest, [])[0] is False  # nothing is lent
    assert session[0].evaluate("state.sum().item()")[0] == 300_000.0


def test_ranks_of_another_host_get_it_through_the_host(begin: Start) -> None:
    session = begin(nodes=2)
    session.restart([1], restore="state")
    assert found(session) == (300_000.0, 0)
