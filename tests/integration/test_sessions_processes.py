"""What is known of the processes of other hosts, and of the logs that they have there."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from distsession import CollectiveHangError, RunError, Session
from distsession.notebook.panel_log import LogView
from tests.integration.conftest import Recorder
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, reduced, start
from tests.until import until, until_settled

NAMES = ("gpu1", "gpu2")


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(NAMES) as found:
        yield found
        nothing_left(found)


@pytest.fixture(scope="module")
def output() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def session(lab: HostLab, output: Recorder) -> Iterator[Session]:
    with start(lab, *NAMES, ranks_per_host=[1, 1], output=output) as session:
        yield session


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)  # the hosts of the lab share their pids
    try:
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_with_its_host(session: Session, rank: int) -> None:
    pid = session.infos[rank].pid
    with stopped(pid):
        session.launcher.abort("failed", "the test said so")  # type: ignore[arg-type]
        problem = session.recovery.reconnect()
        assert f"rank {rank} is stopped by SIGSTOP: kill -CONT {pid} on {NAMES[rank]}" in problem
    assert reduced(session) == {2}


def test_a_rank_that_sleeps_in_what_nobody_joins_is_a_certain_deadlock(session: Session) -> None:
    with pytest.raises(
        CollectiveHangError, match=r"rank 0 did not come to all_reduce .* rank 1 waits"
    ):
        session.execute(
            "if rank == 1:\n"
            "    work = dist.all_reduce(torch.ones(()), async_op=True)\n"
            "    torch.futures.wait_all([work.get_future()])"
        )
    assert reduced(session) == {2}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_while_its_agent_is_stopped_is_told(session: Session, rank: int) -> None:
    pid = session.infos[rank].pid
    agent = psutil.Process(pid).ppid()
    future = session.submit(_barrier_unless, rank)
    until_settled(session)
    with stopped(agent):
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunError, match=rf"rank {rank} .* has ended; the agent") as caught:
            future.result(20)
        assert f"`kill -CONT {agent}` on {NAMES[rank]} lets it go on" in str(caught.value)
    session.restart([rank])
    assert reduced(session) == {2}


def _barrier_unless(rank: int) -> None:
    import time

    import torch

    if os.environ["RANK"] == str(rank):
        time.sleep(60)
    torch.distributed.barrier()


def test_logs_of_hosts_are_read_there_and_named(session: Session) -> None:
    session.execute("print('said by', rank)")
    view = LogView(session.ranks, session.log_source)
    for rank, name in enumerate(NAMES):
        assert session.log_path(rank) is None
        view.open(rank)
        until(lambda rank=rank: view.refresh() or f"said by {rank}" in view._text.value)
        assert f", in {name}:/" in view._status.value
    source = session.log_source(1, "stdout")
    path = source.name.partition(":")[2]
    found = session[1].evaluate(f"__import__('os').path.samefile({path!r}, '/proc/self/fd/1')")
    assert found[1] is True


def test_what_hosts_put_out_can_be_shown_again(session: Session, output: Recorder) -> None:
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
    assert said[1].splitlines()[-1] == "line 999 of 1"
