"""A reconnect that cannot succeed ends, says why, and leaves a session that can be used."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from distsession import RunError, RunInterrupt, Session, SessionStateError, errors
from distsession.cluster import reconnect
from distsession.engine.process_state import process_state
from distsession.protocol import board as layout
from distsession.protocol.messages import ReconnectRequest
from tests.backends import Backend, only
from tests.integration.conftest import Recorder
from tests.until import LIMIT_S, Press

SUM = "probe = torch.ones(1)\ndist.all_reduce(probe)\nprobe.item()"


@pytest.fixture(scope="module")
def _shared(backend: Backend) -> Iterator[tuple[Session, Recorder]]:
    recorder = Recorder()
    with backend.session(3, threads=1, output=recorder) as session:
        yield session, recorder


@pytest.fixture
def session(_shared: tuple[Session, Recorder]) -> Session:
    """Three ranks of each backend, which all tests do their harm to."""
    session, recorder = _shared
    recorder.clear()
    session.execute("import os, time\nkept = 40 + rank")
    return session


def check(session: Session, *, kept: bool = True) -> None:
    """The next collective is right, and the variables are there."""
    sums = session.execute(SUM, fetch=True)
    assert sums is not None
    assert set(sums.values()) == {float(session.world_size)}
    if kept:
        assert list(session.evaluate("kept").values()) == [40, 41, 42]


def break_group(session: Session) -> None:
    """What a failure within an operation does, without connecting the group anew."""
    session.launcher.board.regions[0].set_damaged(layout.OPERATION_FAILED)
    session.launcher.abort("failed", "the test said so")
    assert session.launcher.must_reconnect


HEAR_LATE = """
import gc, time
from distsession.engine.rank import Rank
(itself,) = (each for each in gc.get_objects() if type(each) is Rank)
plain = itself._abort
def late(message):
    time.sleep(0.05)
    plain(message)
itself._abort = late
"""


def test_what_prevents_it_is_told_also_where_ranks_hear_of_it_late(session: Session) -> None:
    """A request takes another way to them than what is said past it."""
    session.execute(HEAR_LATE)
    break_group(session)
    session.launcher.board.regions[1].set_damaged(layout.DEVICE_LOST)
    with pytest.raises(RunError, match=r"rank 1 has lost the device .* session\.restart\(\[1\]"):
        session.execute(SUM)
    session.restart()
    session.execute("kept = 40 + rank")
    check(session)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process_state(pid) == "T")


def process_of_store(session: Session) -> psutil.Process:
    """Known by the socket that it listens on."""
    path = os.path.join(session.launcher.folder, "store.sock")
    agent = psutil.Process(session.launcher._agents.pid())
    ranks = {info.pid for info in session.infos}
    for child in agent.children():
        if child.pid not in ranks and any(
            c.laddr and str(c.laddr).startswith(path) for c in child.net_connections("unix")
        ):
            return child
    raise AssertionError("there is no process of the store")


def until(is_so: Callable[[], Any], seconds: float = LIMIT_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := is_so()):
        assert time.monotonic() < deadline, "that never came to be"
        time.sleep(0.01)
    return answer


# --- a rank that is stopped -----------------------------------------------------------------------


def test_a_rank_stopped_before_the_reconnect_is_named_and_the_next_run_goes_on(
    session: Session,
) -> None:
    pid = session.infos[1].pid
    freeze(pid)
    try:
        break_group(session)
        problem = session.recovery.reconnect()
        assert f"rank 1 is stopped by SIGSTOP: kill -CONT {pid} lets it go on" in problem
        assert "session.restart([1]) replaces it" in problem
        assert f"kill -CONT {pid}" in session.status()
        assert "not connected" in session.status()
        with pytest.raises(RunError, match="not connected"):
            session[0].execute("dist.barrier()")
        assert session[0].evaluate("kept")[0] == 40  # needs no group
    finally:
        os.kill(pid, signal.SIGCONT)
    check(session)
    assert "not connected" not in session.status()


def test_a_rank_stopped_in_the_midst_of_a_reconnect_frees_the_others(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the request only when it goes on, long after it was given up."""
    pid = session.infos[2].pid
    monkeypatch.setattr(reconnect.Halted, "check_twice", lambda *_: "")
    break_group(session)
    freeze(pid)
    try:
        assert f"kill -CONT {pid}" in session.recovery.reconnect()
        until(lambda: not any(session.channel.is_busy(rank) for rank in (0, 1)))
        session[:2].execute("")
        assert list(session[:2].evaluate("kept").values()) == [40, 41]
    finally:
        os.kill(pid, signal.SIGCONT)
    check(session)


def test_a_stopped_rank_can_be_replaced_and_others_keep_their_variables(session: Session) -> None:
    pid = session.infos[1].pid
    freeze(pid)
    break_group(session)
    assert "SIGSTOP" in session.recovery.reconnect()
    session.restart([1])
    check(session, kept=False)
    assert session[[0, 2]].evaluate("kept")[2] == 42


def test_a_restart_of_one_rank_does_not_wait_for_another_that_is_stopped(session: Session) -> None:
    pid = session.infos[2].pid
    freeze(pid)
    try:
        with pytest.raises(SessionStateError, match=f"kill -CONT {pid}"):
            session.restart([1])
    finally:
        os.kill(pid, signal.SIGCONT)
    session.restart([1])
    session[1].execute("kept = 41")
    check(session)


def test_a_rank_that_is_stopped_while_another_is_replaced_frees_all(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect.Halted, "check_twice", lambda *_: "")
    pid = session.infos[2].pid
    freeze(pid)
    try:
        with pytest.raises(errors.ProcessGroupError, match="rank 2 is stopped by SIGSTOP"):
            session.restart([1])
        assert "session.restart([1])" in session.status()
        assert session[0].evaluate("kept")[0] == 40
    finally:
        os.kill(pid, signal.SIGCONT)
    session.restart([1])
    session[1].execute("kept = 41")
    check(session)


def test_a_run_on_a_stopped_rank_says_so(
    session: Session, output: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsession.kernel.watchdog.NOTICE_AFTER_S", 0.3)
    pid = session.infos[1].pid
    freeze(pid)
    is_told = lambda: any("rank 1 is stopped (SIGSTOP)" in text for text in output.notices)  # noqa: E731
    with Press(session, lambda: os.kill(pid, signal.SIGCONT), lambda: until(is_told)):
        session.execute("kept")


# --- a reconnect that takes too long --------------------------------------------------------------


def test_a_rank_that_does_not_answer_is_named_after_the_limit(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "RECONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(reconnect, "RECONNECT_TIMEOUT_PER_RANK_S", 0.0)
    monkeypatch.setattr(reconnect, "FREED_S", 0.2)
    # Idle, and yet it takes no request: a task of ipyparallel's event loop holds the lock.
    session[1].execute(
        "import asyncio, ctypes\n"
        "_ = asyncio.get_event_loop_policy().get_event_loop().call_later("
        "0.2, ctypes.PyDLL(None).sleep, 4)"
    )
    time.sleep(0.5)
    break_group(session)
    problem = session.recovery.reconnect()
    assert "rank 1 did not begin with it within" in problem
    assert "session.restart([1])" in problem
    assert "session.restart([1])" in session.status()
    until(lambda: not session.channel.is_busy(1))
    check(session)


@pytest.mark.parametrize("by_signal", [True, False], ids=["Ctrl-C", "interrupt()"])
def test_stop_ends_a_reconnect_and_the_next_run_tries_again(
    session: Session, monkeypatch: pytest.MonkeyPatch, by_signal: bool
) -> None:
    press = (lambda: os.kill(os.getpid(), signal.SIGINT)) if by_signal else session.interrupt
    monkeypatch.setattr(reconnect, "HALTED_S", 60.0)
    monkeypatch.setattr(reconnect.Halted, "check_twice", lambda *_: "")
    pid = session.infos[1].pid
    freeze(pid)
    break_group(session)
    pressing = Press(session, press, lambda: until(lambda: session.launcher._reconnect))
    pressing.start()
    try:
        if by_signal:
            with pytest.raises(KeyboardInterrupt):
                session.execute("kept")
        else:
            assert "it was stopped" in session.recovery.reconnect()
    finally:
        os.kill(pid, signal.SIGCONT)
    pressing.join()
    check(session)


def test_a_reconnect_is_no_run_from_its_first_moment_on(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many ranks it takes some time to ask all of them."""
    channel, launcher = session.channel, session.launcher
    send, seen = channel._send_to_all, []

    def look(message: Any, number: int, *args: Any) -> None:
        if isinstance(message, ReconnectRequest):
            seen.append(launcher.is_reconnecting_by(channel._pending[number]))
        send(message, number, *args)

    break_group(session)
    monkeypatch.setattr(channel, "_send_to_all", look)
    check(session)
    assert seen == [True]


@pytest.mark.parametrize("moment", ["before", "meanwhile", "after"])
def test_an_interrupt_during_a_reconnect_ends_the_run_that_waits_for_it(
    session: Session, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whoever interrupts is told that something was, so the run may not begin all the same."""
    launcher = session.launcher
    connect = launcher.reconnect
    is_hit: list[bool] = []

    def press(delay_s: float) -> None:
        time.sleep(delay_s)
        is_hit.append(session.interrupt())

    def connect_and_press(**options: Any) -> str:
        if is_hit:
            return connect(**options)
        other = threading.Thread(target=press, args=[0.02 * (moment == "meanwhile")])
        if moment != "after":
            other.start()
        problem = connect(**options)
        if moment == "after":
            other.start()
        other.join()
        return problem

    break_group(session)
    monkeypatch.setattr(launcher, "reconnect", connect_and_press)
    with pytest.raises(RunInterrupt, match="was stopped before it began"):
        session.execute("kept = 'run'")
    assert is_hit == [True]
    check(session)


def test_a_message_may_take_as_long_after_a_reconnect_as_before(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit for connecting anew is not that of later messages."""
    monkeypatch.setattr(reconnect, "RECONNECT_TIMEOUT_S", 1.0)
    session.reconnect()
    received = session.execute(
        "message = torch.ones(1) * rank\n"
        "if rank == 1:\n    time.sleep(6)\n    dist.send(message, 0)\n"
        "if rank == 0:\n    dist.recv(message, 1)\n"
        "message.item()",
        fetch=True,
    )
    assert received is not None
    assert received[0] == 1.0
    check(session)


FAILS = """
from distsession.engine.collectives import group as groups, torch_private

def fail():
    torch_private.refresh_modules = refresh
    if rank == 2:
        raise AttributeError("on purpose")
    refresh()

def connect_late(self, *args):
    if not self.is_world:
        groups.SwappableGroup.connect = connect
        if rank == late:
            time.sleep(1.5)
    connect(self, *args)

pair = dist.new_group([0, 1])
refresh, connect = torch_private.refresh_modules, groups.SwappableGroup.connect
"""


def test_a_rank_that_fails_as_it_joins_holds_up_none_that_is_late(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are told that it is given up, and so the rank that is late does not wait for others."""
    monkeypatch.setattr(reconnect, "RECONNECT_TIMEOUT_S", 3 * LIMIT_S)
    session.execute(FAILS)
    for late in (0, 1, 0, 1):  # which of two waits for the other within gloo depends on their ports
        session.execute(
            f"late, torch_private.refresh_modules = {late}, fail\n"
            "groups.SwappableGroup.connect = connect_late"
        )
        break_group(session)
        with contextlib.suppress(RunError):  # or it is tried again at once
            session.execute("pass", timeout=LIMIT_S)
        session.execute(
            "dist.all_reduce(torch.ones(1), group=pair) if rank < 2 else None", timeout=LIMIT_S
        )
    check(session)


def test_a_rank_killed_during_a_reconnect_frees_the_others(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "HALTED_S", 60.0)
    monkeypatch.setattr(reconnect.Halted, "check_twice", lambda *_: "")
    pid = session.infos[1].pid
    freeze(pid)
    break_group(session)
    is_sent = lambda: session.launcher.board.regions[0].request  # noqa: E731
    with Press(session, lambda: os.kill(pid, signal.SIGKILL), lambda: until(is_sent)):
        assert "rank 1 died and has to be replaced first" in session.recovery.reconnect()
    assert session[0].evaluate("kept")[0] == 40
    session.restart([1])
    session[1].execute("kept = 41")
    check(session)


# --- the store ------------------------------------------------------------------------------------


def test_a_store_that_dies_idle_is_replaced_and_told_of(session: Session) -> None:
    before = process_of_store(session)
    before.kill()
    status = until(lambda: "rendezvous store" in session.status() and session.status())
    assert f"(pid {before.pid}) was killed by SIGKILL" in status
    assert "another one is in its place" in status
    assert "rendezvous store" in repr(session.show_config())
    check(session)
    assert "rendezvous store" not in session.status()
    assert process_of_store(session).pid != before.pid
    session.execute("pair = dist.new_group([0, 1, 2])\ndist.barrier(group=pair)")


def test_a_store_that_dies_in_a_run_ends_who_waits_in_it_and_nobody_else(session: Session) -> None:
    store = process_of_store(session)
    with (
        Press(session, store.kill),
        pytest.raises(RunError, match="rendezvous store has ended") as caught,
    ):
        session.execute(
            "if rank == 0:\n"
            "    dist.distributed_c10d._get_default_store().get('never')\n"
            "time.sleep(5)\n"
            "done = rank"
        )
    assert list(caught.value.by_rank) == [0]
    assert list(session[1:].evaluate("done").values()) == [1, 2]
    check(session)


def test_collectives_go_on_without_the_store(session: Session) -> None:
    is_under_way = lambda: all(region.request for region in session.launcher.board.regions)  # noqa: E731
    with Press(session, process_of_store(session).kill, lambda: until(is_under_way)):
        session.execute("for _ in range(200):\n    time.sleep(0.005)\n    dist.barrier()")
    check(session)


def test_a_store_that_dies_in_a_reconnect_is_replaced_and_it_is_tried_again(
    session: Session,
) -> None:
    pid = session.infos[1].pid
    break_group(session)
    freeze(pid)  # until the others wait for it in the store
    looked = []

    def disturb() -> None:
        until(lambda: session.launcher.board.regions[0].request)
        time.sleep(0.2)
        process_of_store(session).kill()
        looked.append(1)
        os.kill(pid, signal.SIGCONT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconnect.Halted, "check_twice", lambda *_: "")
        patch.setattr(reconnect, "HALTED_S", 60.0)
        thread = threading.Thread(target=disturb)
        thread.start()
        assert session.recovery.reconnect() == ""
        thread.join()
    assert looked
    check(session)


def test_a_store_that_ends_again_and_again_is_said_and_a_restart_brings_it_back(
    session: Session,
) -> None:
    is_given_up = lambda: "session.restart() starts it again" in session.status()  # noqa: E731
    while not is_given_up():  # after five of them, with those of the tests before
        pid = until(lambda: process_of_store(session)).pid
        os.kill(pid, signal.SIGKILL)
        until(lambda p=pid: f"(pid {p})" in session.status())
    assert "there is no rendezvous store" in session.recovery.reconnect()
    assert session[0].evaluate("kept")[0] == 40
    session.restart()
    check(session, kept=False)


@only("gloo", "a wait for the store, of some 15 seconds, is the same on each")
def test_a_stopped_store_is_waited_for_and_stop_ends_that(session: Session) -> None:
    store = process_of_store(session)
    store.suspend()
    try:
        with Press(session, session.interrupt), pytest.raises(RunInterrupt):
            session.execute("dist.distributed_c10d._get_default_store().set('x', 'y')")
    finally:
        store.resume()
    check(session)


# --- age ------------------------------------------------------------------------------------------


def test_reconnects_leave_nothing_behind(session: Session) -> None:
    """Descriptors, threads and keys of earlier generations."""

    def state() -> list[int]:
        processes = [psutil.Process(info.pid) for info in session.infos]
        processes += [psutil.Process(), process_of_store(session)]
        keys = session.evaluate(
            "dist.distributed_c10d._get_default_store()._store.num_keys()"
        ).values()
        held = [count for p in processes for count in (p.num_fds(), p.num_threads())]
        return held + list(keys)

    def age(times: int) -> None:
        for _ in range(times):
            break_group(session)
            assert session.recovery.reconnect() == ""

    session.client  # noqa: B018  ipyparallel's part takes descriptors, too, as it comes up
    session.execute("pair = dist.new_group([0, 1, 2])")
    age(5)
    before = until(lambda: (a := state()) == (time.sleep(0.3), state())[1] and a)
    age(40)
    until(lambda: all(now <= then for now, then in zip(state(), before, strict=True)))
    check(session)
