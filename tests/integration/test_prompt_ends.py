"""What ends a wait does so at once: without a look whose turn it is, and asking nobody in vain."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from distsession import RunError, RunInterrupt, Session, errors
from distsession.cluster.pending import PendingRequest
from distsession.kernel.watchdog import Watchdog
from distsession.protocol.messages import CommInput
from tests.until import Press, until

RANKS = 4

WAIT = """
import os, time
if rank == 1:
    while not os.path.exists({path!r}):
        time.sleep(0.01)
    {then}
else:
    dist.all_reduce(torch.ones(4))
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(RANKS, threads=1, hang_grace=0.3) as session:
        session.execute("number = 40 + rank")
        yield session


@pytest.fixture(autouse=True)
def works_after(session: Session) -> Iterator[None]:
    yield
    session.restart([1])
    total = session.execute("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()", fetch=True)
    assert total is not None
    assert set(total.values()) == {RANKS}
    assert session[0].evaluate("number")[0] == 40


@pytest.mark.parametrize("then", ["raise ValueError('boom')", "os.kill(os.getpid(), 9)"])
def test_a_rank_that_fails_ends_the_wait_for_it_before_the_next_look(
    session: Session, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.cluster.pending.CHECKS", ((math.inf, 1000.0),))
    path = tmp_path / "go"
    with Press(session, path.touch), pytest.raises(RunError) as caught:
        session.execute(WAIT.format(path=str(path), then=then), label="In[7]")
    assert caught.value.first_rank == 1
    about = re.findall(r"Ranks 0,2-3 waited in all_reduce", str(caught.value))
    assert len(about) == 1


def test_a_deadlock_is_ended_at_the_end_of_its_grace_and_not_at_the_next_look(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dues: list[float] = []
    act_on = Watchdog._act_on

    def noted(watchdog: Watchdog, *args: Any, **options: Any) -> None:
        act_on(watchdog, *args, **options)
        if watchdog.due is not None:
            dues.append(watchdog.due)

    def interval(_pending: PendingRequest, _seconds: float) -> float:
        return 1000.0 if dues else 0.05

    monkeypatch.setattr(Watchdog, "_act_on", noted)
    monkeypatch.setattr(PendingRequest, "_check_interval_s", interval)
    path = tmp_path / "go"
    with Press(session, path.touch), pytest.raises(errors.CollectiveHangError) as caught:
        session.execute(WAIT.format(path=str(path), then="pass"), label="In[7]")
    assert ": it finished its part without it; " in str(caught.value)
    assert len(dues) == 1


def test_stop_asks_nobody_who_waits_in_a_collective(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[int]] = []
    request_stacks = session.launcher.request_stacks

    def noted(ranks: Sequence[int], timeout: float) -> Any:
        asked.append(tuple(ranks))
        return request_stacks(ranks, timeout)

    def press() -> None:
        asked.clear()
        session.interrupt()

    monkeypatch.setattr(session.launcher, "request_stacks", noted)
    code = WAIT.format(path=str(tmp_path / "never"), then="pass")
    with Press(session, press), pytest.raises(RunInterrupt) as caught:
        session.execute(code, label="In[7]")
    assert asked == [(1,)]
    assert re.search(
        r"anks 0,2-3 wait in all_reduce #\d+ \(float32 \[4\], sum\) at In\[7\] line 8\s"
        r"for rank 1, which runs In\[7\] line [45]",
        str(caught.value),
    )


def count_looks(path: str) -> None:
    """On a rank: note each look for sockets that are to be shut."""
    from distsession.engine.collectives import abort

    original = getattr(abort, "original", abort.abort_gloo)

    def noted() -> int:
        with open(path, "a") as file:
            file.write("x")
        return int(original())

    abort.original = original  # type: ignore[attr-defined]
    abort.abort_gloo = noted


HELD_BY: dict[str, str] = {
    "an operation": "work = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None",
    "a thread of the user's": (
        "import threading\nover = threading.Event()\n"
        "if rank == 0: threading.Thread(target=over.wait, daemon=True).start()"
    ),
}


@pytest.mark.parametrize("code", HELD_BY.values(), ids=HELD_BY)
def test_where_something_may_wait_for_a_peer_connections_are_shut(
    session: Session, code: str, tmp_path: Path
) -> None:
    paths = [tmp_path / str(rank) for rank in range(RANKS)]
    for rank, path in enumerate(paths):
        session[rank].run(count_looks, str(path))
    session.execute(code)
    session.launcher.abort("failed", "the test said so")
    until(paths[0].exists)
    session.execute("if rank == 0 and 'over' in globals(): over.set()")


def begin_callback(folder: str) -> str:
    """On a rank: make a comm whose callback goes on until it is told to end."""
    import os

    import comm

    def callback(_message: Any) -> None:
        Path(folder, "begun").touch()
        while not os.path.exists(os.path.join(folder, "over")):
            time.sleep(0.01)

    made = comm.create_comm(target_name="test")
    made.on_msg(callback)
    return str(made.comm_id)


def test_so_they_are_where_a_widgets_callback_runs(session: Session, tmp_path: Path) -> None:
    looks = tmp_path / "looks"
    session[0].run(count_looks, str(looks))
    number = session[0].run(begin_callback, str(tmp_path))[0]
    session.channel.send_control(0, CommInput("comm_msg", number, {}, {}))
    until((tmp_path / "begun").exists)
    session.launcher.abort("failed", "the test said so")
    until(looks.exists)
    (tmp_path / "over").touch()


def test_where_nothing_waits_for_a_peer_no_connection_is_looked_for(
    session: Session, tmp_path: Path
) -> None:
    paths = [tmp_path / str(rank) for rank in range(RANKS)]
    for rank, path in enumerate(paths):
        session[rank].run(count_looks, str(path))
    threads = session.run(lambda: [thread.name for thread in threading.enumerate()])
    session.launcher.abort("failed", "the test said so")
    time.sleep(0.5)
    assert not any(path.exists() for path in paths), threads
