"""What a device does and nobody sees is said to be that, on the stand-in for NCCL."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator

import pytest

from distsession import (
    CollectiveHangError,
    RunError,
    RunInterrupt,
    Session,
)
from distsession.kernel import watchdog
from distsession.kernel.snapshot import Snapshots
from distsession.protocol.diagnosis import Kind, diagnose
from tests.standin.build import why_not
from tests.until import LIMIT_S, until

from .conftest import Recorder

pytestmark = pytest.mark.skipif(
    why_not() is not None and os.environ.get("DISTSESSION_STANDIN") != "required",
    reason=why_not() or "",
)

PROGRAM = """
import time
from torch.standin import Graph

x, y = torch.ones(3, device=device), torch.ones(3, device=device)
dist.all_reduce(x)
x.tolist()
issued = lambda: dist.group.WORLD.inner.allreduce([x]).wait()

def waits():
    return x.sum().item()
"""
RANKS = 2


@pytest.fixture(scope="module")
def _shared() -> Iterator[tuple[Session, Recorder]]:
    output = Recorder()
    options = {"backend": "standin", "preload": ["tests.standin.graph"]}
    with Session(RANKS, output=output, hang_grace=0.3, **options) as session:
        yield session, output


@pytest.fixture
def session(_shared: tuple[Session, Recorder]) -> Session:
    _shared[0].execute(PROGRAM, label="In[1]")
    return _shared[0]


@pytest.fixture
def output(_shared: tuple[Session, Recorder]) -> Recorder:
    _shared[1].clear()
    return _shared[1]


@contextlib.contextmanager
def running(session: Session, code: str) -> Iterator[None]:
    """Run a cell that does not end by itself, in a thread, and stop it in the end."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(session.execute, code, label="In[2]")
        try:
            yield
            assert not future.done()
        finally:
            until(lambda: session.interrupt() or future.done())
            error = future.exception(LIMIT_S)
        assert isinstance(error, RunInterrupt), error


def is_said(session: Session, *texts: str) -> None:
    """Wait until a diagnosis says all of this."""
    until(lambda: all(text in repr(session.diagnose()) for text in texts), ", ".join(texts))


def check(session: Session) -> None:
    """Nothing is left of it: the group works."""
    session.execute("x.fill_(1)\ndist.all_reduce(x)")
    assert session.evaluate("x.tolist()") == {rank: [2.0] * 3 for rank in session.ranks}


WAITS = "waits for its device at In[1] line 11, for something that is not seen (a Graph that was "
REPLAYED = f"{WAITS}replayed at In[2] line 1)"


def test_a_wait_for_a_replayed_graph_is_said_to_be_that(
    session: Session, output: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_AFTER_S", 0.3)
    monkeypatch.setattr(watchdog, "NOTICE_EVERY_S", 0.3)
    with running(session, "if rank == 0: Graph(issued).replay()\nif rank == 0: waits()"):
        is_said(session, f"rank 0 {REPLAYED}; rank 1 finished its part")
        assert "no rank waits" not in repr(session.diagnose())
        until(lambda: any(f"rank 0 {REPLAYED}" in notice for notice in output.notices))
        until(
            lambda: REPLAYED.replace("waits", "waiting") in Snapshots(session).take().rows[0].state
        )
        reports = session.recovery.reports(ask=True)
        assert diagnose(reports).kind is Kind.NOTHING  # so it goes on, though a rank has finished
    check(session)


def test_what_was_issued_behind_a_graph_is_not_certainly_waited_for(session: Session) -> None:
    code = "if rank == 0: Graph(issued).replay(); dist.all_reduce(y)\nif rank == 0: waits()"
    with running(session, code):
        is_said(session, "for all_reduce #", "or for something that is not seen (a Graph that was")
        assert diagnose(session.recovery.reports(ask=True)).kind is Kind.NOTHING
    check(session)


def test_a_rank_whose_device_works_at_a_graph_has_not_finished(session: Session) -> None:
    group = "if True: pair = dist.new_group([0, 1]); dist.all_reduce(x, group=pair); x.tolist()"
    rank_0 = "dist.all_reduce(x, group=pair); waits()"
    code = f"{group}\nif rank == 1: Graph(issued).replay()\nelse: {rank_0}"
    with running(session, code):
        is_said(
            session,
            "rank 0 waits for its device in all_reduce #",
            "for rank 1, which finished its part without it, its device not: a replayed graph",
        )
        assert diagnose(session.recovery.reports(ask=True)).kind is Kind.WAIT
    check(session)


def test_a_rank_whose_device_is_done_with_its_graph_has_finished(session: Session) -> None:
    with pytest.raises(
        CollectiveHangError, match=r"rank 1 did not come to all_reduce .* it finished its part"
    ):
        session.execute(
            "if rank == 1: Graph(lambda: y.add_(1)).replay()\n"
            "else: dist.all_reduce(x); waits(); time.sleep(60)"
        )
    check(session)


def test_a_graph_that_is_complete_is_no_excuse(session: Session) -> None:
    with pytest.raises(
        CollectiveHangError, match=r"did not come to all_reduce #.* rank 0 waits for its device"
    ):
        session.execute(
            "Graph(lambda: y.add_(1)).replay()\ny.tolist()\n"
            "if rank == 0: dist.all_reduce(x); waits(); time.sleep(60)"
        )
    check(session)


def test_replays_on_all_ranks_work_and_leave_nothing(session: Session) -> None:
    session.execute("x.fill_(1)\ngraph = Graph(issued)\nfor _ in range(3): graph.replay()\nwaits()")
    assert session.evaluate("x.tolist()") == {rank: [8.0] * 3 for rank in session.ranks}
    assert not any(report.unseen for report in session.recovery.reports(ask=True).values())


def test_operations_of_a_capture_are_compared_and_not_under_way(session: Session) -> None:
    session.execute("graph = Graph(issued)\ngraph.capture_begin()\ndist.all_reduce(x)")
    reports = session.recovery.reports(ask=True)
    assert not any(report.operations for report in reports.values())
    before = {rank: report.sequences["world"] for rank, report in reports.items()}
    session.execute("dist.all_reduce(x)\ngraph.capture_end()")
    assert {
        rank: report.sequences["world"] - 1
        for rank, report in session.recovery.reports(ask=False).items()
    } == before
    session.execute("pair = dist.new_group([0, 1])\ndist.all_reduce(x, group=pair)\nx.tolist()")
    with pytest.raises(RunError, match=r"float32 \[[34]\], "):
        session.execute(
            "z = torch.ones(3 + rank, device=device)\n"
            "graph = Graph(issued)\n"
            "graph.capture_begin()\n"
            "try: dist.all_reduce(z, group=pair, async_op=True)\n"
            "finally: graph.capture_end()"
        )
    check(session)


DIRECT = """
native = type(dist.group.WORLD.inner._get_backend(torch.device(device)))
options = native.Options()
options._timeout = datetime.timedelta(minutes=5)
store = dist.PrefixStore("own", dist.TCPStore("localhost", port, wait_for_workers=False))
own = native(store, rank, world_size, options)
own.allreduce([x]).wait()
x.tolist()
if rank == 0: own.allreduce([x]).wait()
if rank == 0: waits()
"""


def test_a_backend_that_code_makes_directly_is_named(session: Session) -> None:
    session.execute("import datetime, os\nport = int(os.environ['MASTER_PORT'])")
    with running(session, DIRECT.strip()):
        is_said(
            session,
            "rank 0 waits for its device at In[1] line 11, for something that is not seen "
            "(a ProcessGroupStandin that was made directly at In[2] line 5)",
        )
    session.restart()  # it stays for as long as its process lives
    assert not any(report.unseen for report in session.recovery.reports(ask=True).values())
