"""What is known of ranks whose processes this machine's system knows nothing of."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from distsession import CollectiveHangError, EngineDiedError, RunError, RunInterrupt, Session
from distsession.engine import process_state as system
from distsession.kernel import watchdog
from distsession.notebook.panel_log import LogView
from tests.integration.conftest import Recorder
from tests.integration.test_nodes import apart, processes, reduced
from tests.until import Press, until, until_settled

FAR = 3
"""A rank of the second of two nodes of two."""


@pytest.fixture(scope="module")
def output() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def session(output: Recorder) -> Iterator[Session]:
    with apart(4, output=output) as session:
        yield session


@pytest.fixture(autouse=True)
def blind(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process must not look at processes of the second node, nor send its ranks signals.

    Its agent is a child of this process. Tests do both: they ask psutil, and :func:`send` signals.
    """
    read, kill, killpg = system._stat, os.kill, os.killpg
    agent = psutil.Process(session.launcher._agents.pid(1))
    its = {child.pid for child in agent.children()}
    far = {agent.pid, *its}
    asked: list[Any] = []

    def stat(path: str) -> list[str]:
        if far & {int(part) for part in path.split("/") if part.isdigit()}:
            asked.append(path)
        return read(path)

    def signalled(send: Any) -> Any:
        def checked(pid: int, number: int) -> None:
            if number and pid in its and not getattr(by_test, "is_so", False):
                asked.append((pid, number))
            send(pid, number)

        return checked

    monkeypatch.setattr(system, "_stat", stat)
    monkeypatch.setattr(os, "kill", signalled(kill))
    monkeypatch.setattr(os, "killpg", signalled(killpg))
    yield
    assert asked == []


by_test = threading.local()


def send(pid: int, number: int) -> None:
    """As the test, which may."""
    by_test.is_so = True
    try:
        os.kill(pid, number)
    finally:
        by_test.is_so = False


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    send(pid, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGCONT)


# --- a rank that is stopped -----------------------------------------------------------------------


def test_a_stopped_rank_is_told_as_stopped(session: Session) -> None:
    info = session.infos[FAR]
    future = session.submit(_barrier)
    future.result(20)
    with stopped(info.pid):
        future = session.submit(_barrier)
        until(lambda: "rank 3, which is stopped (SIGSTOP)" in repr(session.diagnose()))
    future.result(20)


def _barrier() -> None:
    import torch

    torch.distributed.barrier()


def test_a_run_on_a_stopped_rank_says_so(
    session: Session, output: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_AFTER_S", 0.3)
    output.clear()
    pid = session.infos[FAR].pid
    with stopped(pid):
        is_told = lambda: any("rank 3 is stopped (SIGSTOP)" in text for text in output.notices)  # noqa: E731
        with Press(session, lambda: send(pid, signal.SIGCONT), lambda: until(is_told)):
            session.execute("pass")


def test_a_group_that_waits_for_a_stopped_rank_names_it_and_its_host(session: Session) -> None:
    info = session.infos[FAR]
    with stopped(info.pid):
        session.launcher.abort("failed", "the test said so")
        problem = session.recovery.reconnect()
        where = f"kill -CONT {info.pid} on {info.host} lets it go on"
        assert f"rank 3 is stopped by SIGSTOP: {where}" in problem
        assert where in session.status()
    assert reduced(session) == [4.0] * 4


# --- a rank that sleeps ---------------------------------------------------------------------------


def test_a_rank_that_sleeps_in_what_nobody_joins_is_a_certain_deadlock(session: Session) -> None:
    with pytest.raises(
        CollectiveHangError, match=r"ranks 0-2 did not come to all_reduce .* rank 3 waits"
    ):
        session.execute(
            "if rank == 3:\n"
            "    work = dist.all_reduce(torch.ones(()), async_op=True)\n"
            "    torch.futures.wait_all([work.get_future()])"
        )
    assert reduced(session) == [4.0] * 4


def test_a_rank_that_computes_is_not_taken_for_one_that_sleeps(session: Session) -> None:
    session.execute(
        "import time\n"
        "x, end = torch.ones(()), time.monotonic() + 6\n"
        "if rank == 3:\n"
        "    work = dist.all_reduce(x, async_op=True)\n"
        "    while time.monotonic() < end:\n"
        "        torch._tensor_str._str(torch.rand(900))  # code of torch's\n"
    )
    session.execute("work.wait() if rank == 3 else dist.all_reduce(x)")
    assert [float(value) for value in session.pull("x").values()] == [4.0] * 4


# --- a rank that ends -----------------------------------------------------------------------------


def test_a_killed_rank_is_told(session: Session) -> None:
    future = session.submit(_barrier_unless_far, 60)
    until_settled(session)
    pid = session.infos[FAR].pid
    send(pid, signal.SIGKILL)
    with pytest.raises(RunError, match=rf"rank 3 \(pid {pid}\) was killed by SIGKILL"):
        future.result(20)
    session.restart([FAR])
    assert reduced(session) == [4.0] * 4


def _barrier_unless_far(seconds: float) -> None:
    import time

    if os.environ["RANK"] == str(FAR):
        time.sleep(seconds)
    _barrier()


def test_a_rank_that_ends_while_its_agent_is_stopped_is_told(session: Session) -> None:
    info = session.infos[FAR]
    agent = processes(session)["agent"].pid
    future = session.submit(_barrier_unless_far, 60)
    until_settled(session)
    with stopped(agent):
        send(info.pid, signal.SIGKILL)
        where = f"`kill -CONT {agent}` on {info.host} lets it go on"
        with pytest.raises(RunError, match=r"rank 3 .* has ended; the agent of node 1") as caught:
            future.result(20)
        assert where in str(caught.value)
        assert where in session.launcher.problems()
        assert "rank 3 is dead" in session.status()
        with pytest.raises(EngineDiedError, match="the agent of node 1"):
            session.run(int)
    session.restart([FAR])
    assert session.infos[FAR].pid != info.pid
    assert reduced(session) == [4.0] * 4


def test_what_was_said_of_a_replaced_rank_is_not_taken_for_the_fresh_one(session: Session) -> None:
    send(session.infos[FAR].pid, signal.SIGKILL)
    until(lambda: "rank 3 is dead" in session.status())
    session.restart([FAR])
    region = session.launcher.board.regions[FAR]  # type: ignore[union-attr]
    assert session.launcher.process_state(FAR) in ("", system.RUNS)
    until(lambda: session.launcher.process_state(FAR) == system.RUNS)
    assert region.process[0] == session.infos[FAR].pid


# --- a relay that is stopped ----------------------------------------------------------------------


def test_a_relay_that_says_nothing_is_named(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.cluster.health.SILENT_RELAY_S", 2.0)
    pid = processes(session)["relay"].pid
    said = f"Nothing has come from the relay of node 1 (pid {pid}) on {session.infos[FAR].host}"
    with stopped(pid):
        until(lambda: said in session.status())
    until(lambda: said not in session.status())
    assert reduced(session) == [4.0] * 4


# --- logs -----------------------------------------------------------------------------------------


def test_a_log_of_another_host_is_named_and_read_there(session: Session) -> None:
    session.execute("print('said by', rank)")
    near, far = (session.log_path(rank) for rank in (0, FAR))
    assert near is not None
    assert "said by 0" in near.read_text()
    assert far is None
    source = session.log_source(FAR, "stdout")
    host = session.infos[FAR].host
    assert source.name.startswith(f"{host}:{session.launcher.folder}/logs/rank3-")
    until(lambda: b"said by 3" in b"".join(data for _, data in source.read(0, source.size)))
    assert source.note == f"in {source.name}"


def test_the_panel_shows_a_log_of_another_host(session: Session) -> None:
    session.execute("print('shown by', rank)")
    view = LogView(session.ranks, session.log_source)
    view.open(FAR)
    until(lambda: view.refresh() or "shown by 3" in view._text.value)  # type: ignore[func-returns-value]
    assert "rank3-" in view._status.value
    view._rank.value = 0
    assert "shown by 0" in view._text.value


def test_a_stopped_agent_is_asked_once_for_a_log(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.cluster.local.LOG_PIECE_S", 0.2)
    source = session.log_source(FAR, "stdout")
    monitor = session.launcher._monitor
    size = source.size
    with stopped(processes(session)["agent"].pid):
        asked = monitor._log_asked[1]
        assert source.size == source.size == size
        assert source.note.endswith("which cannot be read now")
        assert monitor._log_asked[1] == asked + 1
    until(lambda: source.size == size and source.note == f"in {source.name}")


def test_what_ranks_of_another_host_put_out_can_be_shown_again(
    session: Session, output: Recorder
) -> None:
    output.clear()
    output.cell = 7
    try:
        session.execute("for i in range(1000): print('line', i, 'of', rank, flush=True)")
        said = [output.text(rank) for rank in session.ranks]
        output.clear()
        text = session.show_output(cell=7)
    finally:
        output.cell = None
    assert "Not kept" not in str(text)
    assert [output.text(rank) for rank in session.ranks] == said
    assert said[FAR].splitlines()[-1] == "line 999 of 3"


# --- an end ---------------------------------------------------------------------------------------


def test_an_interrupt_frees_a_rank_that_waits(session: Session) -> None:
    future = session.submit(_barrier_unless_far, 60)
    until_settled(session)
    assert session.interrupt()
    with pytest.raises(RunInterrupt):
        future.result(20)
    assert reduced(session) == [4.0] * 4


def test_an_agent_that_is_stuck_is_ended_without_signals_to_its_ranks(session: Session) -> None:
    ranks = [info.pid for info in session.infos[2:]]
    send(processes(session)["agent"].pid, signal.SIGSTOP)
    send(processes(session)["relay"].pid, signal.SIGSTOP)
    session.launcher._agents.end(1)
    until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
