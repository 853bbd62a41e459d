"""What is known of the ranks' processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from distsession.cluster.deaths import JobEnd, death_error
from distsession.cluster.local import LocalLauncher
from distsession.cluster.monitor import Monitor, NodeGone, RankUnreported, RelayGone
from distsession.errors import (
    EngineDiedError,
    LaunchError,
    LaunchTimeoutError,
    ProcessGroupError,
)
from distsession.options import SessionOptions
from distsession.protocol.agent_messages import (
    AgentFailed,
    AgentReady,
    GpuMemory,
    GpuReply,
    RankExited,
    StoreReady,
)
from distsession.protocol.messages import EngineRegistered, ErrorInfo, RankFailed, RankReady
from distsession.ranks import HostInfo, RankInfo

HOST = HostInfo("alpha", 1, (), (("gloo", ("cpu",)),), "2.9.0", 4)


def exited(rank: int, pid: int = 0, returncode: int = -9, log: str = "") -> RankExited:
    return RankExited(rank, 0, pid or 1000 + rank, returncode, expected=False, log_tail=log)


def now(seconds: float = 0.0) -> float:
    return time.monotonic() + seconds


class Heard:
    """A monitor, and the deaths that it told of."""

    def __init__(self, make: Callable[..., RankInfo]) -> None:
        self.deaths: list[EngineDiedError] = []
        self.monitor = Monitor(self.deaths.extend)
        self._make = make

    def ready(self, *ranks: int, generation: int = 0, **facts: int) -> None:
        for rank in ranks:
            info = self._make(rank, generation=generation, **facts)
            self.monitor.handle(RankReady(rank, info))


@pytest.fixture
def heard(rank_info: Callable[..., RankInfo]) -> Heard:
    return Heard(rank_info)


# --- the agent ------------------------------------------------------------------------------------


def test_the_host_is_known_once_the_agent_is_ready(heard: Heard) -> None:
    heard.monitor.handle(AgentReady(HOST))
    assert heard.monitor.wait_host(0, lambda: True, now()) == HOST


def test_waiting_for_the_host_ends_when_it_is_heard(heard: Heard) -> None:
    threading.Timer(0.05, heard.monitor.handle, [AgentReady(HOST)]).start()
    assert heard.monitor.wait_host(0, lambda: True, now(10)) is HOST


def test_an_agent_that_cannot_go_on_says_why(heard: Heard) -> None:
    heard.monitor.handle(AgentFailed("no module named nump"))
    with pytest.raises(LaunchError, match="no module named nump"):
        heard.monitor.wait_host(0, lambda: True, now(10))


def test_an_agent_that_ended_is_not_waited_for(heard: Heard) -> None:
    with pytest.raises(LaunchError, match="ended before it was ready"):
        heard.monitor.wait_host(0, lambda: False, now(10))
    heard.monitor.handle(None)
    with pytest.raises(LaunchError, match="ended before it was ready"):
        heard.monitor.wait_host(0, lambda: True, now(10))


def test_an_agent_that_takes_too_long_is_given_up(heard: Heard) -> None:
    with pytest.raises(LaunchTimeoutError, match="importing torch took too long"):
        heard.monitor.wait_host(0, lambda: True, now())


# --- the start ------------------------------------------------------------------------------------


def test_a_world_is_ready_when_every_rank_is(heard: Heard) -> None:
    heard.ready(0, 1)
    heard.monitor.wait_ready([0, 1], 0, now())
    assert sorted(heard.monitor.ready) == [0, 1]


def test_ranks_that_do_not_become_ready_are_named(heard: Heard) -> None:
    heard.ready(1)
    with pytest.raises(LaunchTimeoutError, match=r"^ranks 0,2 did not become ready"):
        heard.monitor.wait_ready([0, 1, 2], 0, now())


def test_a_rank_of_an_earlier_generation_does_not_count(heard: Heard) -> None:
    heard.ready(0, 1)
    heard.ready(0, generation=1)
    with pytest.raises(LaunchTimeoutError, match="rank 1 did not"):
        heard.monitor.wait_ready([0, 1], 1, now())
    heard.ready(1, generation=1)
    heard.monitor.wait_ready([0, 1], 1, now())
    assert heard.monitor.ready[1].generation == 1


def test_a_rank_that_could_not_join_says_why(heard: Heard) -> None:
    heard.monitor.handle(RankFailed(1, 0, ErrorInfo("DistNetworkError", "refused")))
    with pytest.raises(ProcessGroupError, match=r"rank 1 could not .*: DistNetworkError: refused"):
        heard.monitor.wait_ready([0, 1], 0, now(10))


def test_a_rank_that_died_at_its_start_ends_the_wait(heard: Heard) -> None:
    heard.monitor.handle(exited(1, returncode=-11, log="stack"))
    with pytest.raises(LaunchError, match="SIGSEGV while it was starting") as raised:
        heard.monitor.wait_ready([0, 1], 0, now(10))
    assert "stack" in str(raised.value)
    assert heard.deaths == []


def test_an_agent_that_is_gone_ends_the_wait(heard: Heard) -> None:
    heard.monitor.handle(None)
    with pytest.raises(LaunchError, match=r"agent .* is gone"):
        heard.monitor.wait_ready([0], 0, now(10))


# --- deaths ---------------------------------------------------------------------------------------


def test_the_death_of_a_rank_in_use_is_told_once_with_its_facts(heard: Heard) -> None:
    heard.ready(0, 1)
    heard.monitor.handle(exited(1, returncode=3, log="bye"))
    assert list(heard.monitor.dead) == [1]
    assert [(d.rank, d.pid, d.returncode, d.log_tail) for d in heard.deaths] == [
        (1, 1001, 3, "bye")
    ]


def test_the_end_of_an_earlier_process_of_a_rank_is_no_death(heard: Heard) -> None:
    heard.ready(0)
    heard.monitor.handle(exited(0, pid=999))
    assert (heard.monitor.dead, heard.deaths) == ({}, [])


def test_with_the_agent_all_living_ranks_are_gone(heard: Heard) -> None:
    heard.ready(0, 1, 2)
    heard.monitor.handle(exited(1))
    heard.monitor.handle(None)
    assert [death.rank for death in heard.deaths] == [1, 0, 2]
    assert heard.monitor.agent_gone
    assert "session.restart()" in str(heard.monitor.dead[2])
    assert "agent" in str(heard.monitor.dead[2])


def test_the_end_of_a_nodes_agent_takes_its_ranks_alone(heard: Heard) -> None:
    for rank in range(4):
        heard.ready(rank, node_rank=rank // 2, nodes=2)
    heard.monitor.handle(NodeGone(1))
    assert [death.rank for death in heard.deaths] == [2, 3]
    assert not heard.monitor.agent_gone
    text = str(heard.monitor.dead[2])
    assert "rank 2 (pid 1002) is gone: the agent of node 1" in text
    assert "session.restart([2, 3])" in text
    with pytest.raises(LaunchError, match="the agent of node 1 ended, and with it the ranks of"):
        heard.monitor.wait_ready(range(4), 1, now(10))
    heard.monitor.expect(1)
    heard.monitor.forget((2, 3))  # which are started anew
    with pytest.raises(LaunchTimeoutError):
        heard.monitor.wait_ready(range(4), 1, now())


@pytest.mark.parametrize("is_told_first", [True, False])
def test_the_end_of_a_job_is_what_all_its_ranks_have_died_of(
    heard: Heard, is_told_first: bool
) -> None:
    """Its agents end their ranks, and the news comes on another way than the loss of a host."""
    heard.ready(0, 1, node_rank=1)
    heard.monitor.may_end_with_job = lambda: True
    tell = threading.Timer(0.1, heard.monitor.note_job_end, [JobEnd("Slurm", "12", is_own=True)])
    if is_told_first:
        tell.interval = 0.0
    tell.start()
    if is_told_first:
        tell.join()
    heard.monitor.handle(replace(exited(0), expected=True, with_agent=True))
    assert heard.deaths == []
    heard.monitor.handle(NodeGone(1))
    tell.join()
    assert [death.rank for death in heard.deaths] == [0, 1]
    for death in heard.deaths:
        assert "Slurm job 12 was cancelled or preempted" in death.how
        assert death.remedy.startswith("session.restart() submits a new one")


def test_a_rank_that_a_restart_has_ended_has_died_at_once(heard: Heard) -> None:
    """Also of a restart of an earlier kernel, which this one hears of when it attaches."""
    heard.ready(0)
    heard.monitor.handle(replace(exited(0), expected=True))
    assert [death.how for death in heard.deaths] == ["was ended by session.restart() or close()"]


def test_the_end_of_a_nodes_relay_cuts_off_its_ranks(heard: Heard) -> None:
    for rank in range(4):
        heard.ready(rank, node_rank=rank // 2, nodes=2)
    heard.monitor.handle(exited(3))
    heard.monitor.handle(RelayGone(1))
    assert [death.rank for death in heard.deaths] == [3, 2]
    text = str(heard.monitor.dead[2])
    assert "rank 2 (pid 1002) cannot be reached: the relay of node 1" in text
    assert "session.restart([2])" in text
    assert heard.monitor.cut_off == {2}
    with pytest.raises(LaunchError, match="the relay of node 1 ended"):
        heard.monitor.wait_ready(range(4), 1, now(10))
    heard.monitor.expect_relay(1)  # another one has no connection to the ranks that there are
    with pytest.raises(LaunchError, match=r"rank 2 .* cannot be reached: the relay of node 1"):
        heard.monitor.wait_ready((0, 1, 2), 1, now(10))
    heard.monitor.forget((2, 3))
    with pytest.raises(LaunchTimeoutError):
        heard.monitor.wait_ready((0, 1, 2), 1, now())


def test_who_is_cut_off_is_waited_for_when_it_is_replaced(heard: Heard) -> None:
    heard.ready(2, node_rank=1, nodes=2)
    heard.monitor.handle(RelayGone(1))
    assert heard.monitor.wait_exited([2], 0.0)  # as it counts as dead
    heard.monitor.forget(heard.monitor.cut_off)
    assert not heard.monitor.wait_exited([2], 0.0)
    heard.monitor.handle(exited(2))
    assert heard.monitor.wait_exited([2], 0.0)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda monitor: monitor.handle(exited(2)), id="killed"),
        pytest.param(lambda monitor: monitor.handle(RankUnreported(2, 1002, "x")), id="unreported"),
        pytest.param(lambda monitor: monitor.mark_lost([2]), id="not started anew"),
    ],
)
def test_who_was_cut_off_and_has_ended_is_not_waited_for(
    heard: Heard, end: Callable[[Monitor], None]
) -> None:
    """The agent reports an end once; a second wait for it would last for ever."""
    heard.ready(2, node_rank=1, nodes=2)
    heard.monitor.handle(RelayGone(1))
    end(heard.monitor)
    heard.monitor.forget(heard.monitor.cut_off)
    assert heard.monitor.wait_exited([2], 0.0)
    assert 2 in heard.monitor.dead


def test_the_late_word_of_a_relays_end_does_not_fail_the_next_start(heard: Heard) -> None:
    for rank in range(4):
        heard.ready(rank, node_rank=rank // 2, nodes=2)
        heard.monitor.handle(exited(rank))
    heard.monitor.forget(range(4))
    heard.deaths.clear()
    heard.monitor.handle(RelayGone(1, is_replaced=True))
    heard.ready(0, 1, node_rank=0, nodes=2, generation=1)
    heard.ready(2, 3, node_rank=1, nodes=2, generation=1)
    heard.monitor.wait_ready(range(4), 1, now())
    assert heard.deaths == []


def test_who_stays_is_cut_off_also_where_another_relay_has_come(heard: Heard) -> None:
    heard.ready(2, 3, node_rank=1, nodes=2)
    heard.monitor.handle(exited(3))
    heard.monitor.forget([3])
    heard.monitor.handle(RelayGone(1, is_replaced=True))
    assert [death.rank for death in heard.deaths] == [3, 2]
    assert heard.monitor.cut_off == {2}
    with pytest.raises(LaunchError, match=r"rank 2 .* cannot be reached: the relay of node 1"):
        heard.monitor.wait_ready((2, 3), 1, now(10))


def test_who_was_cut_off_is_gone_with_its_agent(heard: Heard) -> None:
    heard.ready(2, node_rank=1, nodes=2)
    heard.monitor.handle(RelayGone(1))
    heard.monitor.handle(NodeGone(1))
    assert heard.monitor.cut_off == set()


def test_each_nodes_agent_is_waited_for(heard: Heard) -> None:
    heard.monitor.handle(AgentReady(HOST))
    with pytest.raises(LaunchTimeoutError):
        heard.monitor.wait_host(1, lambda: True, now())
    heard.monitor.handle(NodeGone(1))
    with pytest.raises(LaunchError, match="the agent of node 1 ended before it was ready"):
        heard.monitor.wait_host(1, lambda: True, now(10))
    heard.monitor.expect(1)
    heard.monitor.handle(AgentReady(HOST, 1))
    assert heard.monitor.wait_host(1, lambda: True, now(10)) == HOST


def test_the_port_of_the_store_is_waited_for(heard: Heard) -> None:
    threading.Timer(0.05, heard.monitor.handle, [StoreReady(4711)]).start()
    assert heard.monitor.wait_store(now(10)) == 4711
    heard.monitor.store_port = 0
    with pytest.raises(LaunchTimeoutError, match="rendezvous store"):
        heard.monitor.wait_store(now())


def test_ranks_end_with_a_session_that_is_closed(heard: Heard) -> None:
    heard.ready(0)
    heard.monitor.closing = True
    heard.monitor.handle(None)
    text = "rank 0 (pid 1000) ended with its session, which was closed."
    assert [str(death) for death in heard.deaths] == [text]
    with pytest.raises(LaunchError, match="the session was closed"):
        heard.monitor.wait_ready([0, 1], 0, now(10))


def test_closing_is_said_before_the_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = LocalLauncher(SessionOptions(ranks=1), lambda message: None)
    said = []
    close = launcher.channel.close
    monkeypatch.setattr(
        launcher.channel, "close", lambda: (said.append(launcher._monitor.closing), close())
    )
    launcher.close()
    assert said == [True]


def test_a_rank_that_is_started_anew_is_no_longer_dead(heard: Heard) -> None:
    heard.ready(0, 1)
    heard.monitor.handle(exited(1))
    heard.monitor.forget([1])
    assert heard.monitor.dead == {}
    heard.ready(0, 1, generation=1)
    heard.monitor.wait_ready([0, 1], 1, now())


def test_the_end_of_ranks_can_be_waited_for(heard: Heard) -> None:
    heard.ready(0, 1)
    heard.monitor.handle(exited(0))
    assert heard.monitor.wait_exited([0], 0.0)
    assert not heard.monitor.wait_exited([0, 1], 0.02)
    threading.Timer(0.05, heard.monitor.handle, [exited(1)]).start()
    assert heard.monitor.wait_exited([0, 1], 10)


def test_nobody_is_waited_for_when_the_agent_is_gone(heard: Heard) -> None:
    heard.ready(0)
    heard.monitor.handle(None)
    assert heard.monitor.wait_exited([0, 1], 0.0)


# --- registration ---------------------------------------------------------------------------------


def test_the_engines_of_registered_ranks_are_known(heard: Heard) -> None:
    heard.monitor.handle(EngineRegistered(0, 0, 4))
    heard.monitor.handle(EngineRegistered(1, 0, 2))
    assert heard.monitor.wait_registered([0, 1], 0.0) == {0: 4, 1: 2}


def test_engines_that_do_not_register_are_left_out(heard: Heard) -> None:
    heard.monitor.handle(EngineRegistered(0, 0, 4))
    assert heard.monitor.wait_registered([0, 1], 0.02) == {0: 4}


def test_the_engine_of_a_dead_rank_is_forgotten(heard: Heard) -> None:
    heard.ready(0)
    heard.monitor.handle(EngineRegistered(0, 0, 4))
    heard.monitor.handle(exited(0))
    assert heard.monitor.wait_registered([0], 0.0) == {}


# --- what a death reads like ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returncode", "how"),
    [
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-200, "was killed by signal 200"),
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
    ],
)
def test_a_death_says_how_the_process_ended(returncode: int, how: str) -> None:
    text = str(death_error(exited(2, pid=77, returncode=returncode)))
    assert text.startswith(f"rank 2 (pid 77) {how}.")
    assert "session.restart([2]) replaces it; restore=[...] copies variables from a rank" in text
    assert text.endswith("It wrote nothing.")


def test_a_rank_that_was_asked_to_end_says_who_did_that() -> None:
    message = RankExited(1, 0, 77, 0, expected=True, log_tail="bye")
    text = "rank 1 (pid 77) was ended by session.restart() or close()."
    assert str(death_error(message)) == text
    assert str(death_error(message, while_starting=True)) == text


def test_a_death_for_want_of_memory_is_named() -> None:
    text = str(death_error(RankExited(1, 0, 77, -9, expected=False, log_tail="", oom=True)))
    assert text.startswith(
        "rank 1 (pid 77) was killed by SIGKILL, by the system for want of memory "
        "(its count of out-of-memory kills rose). session.restart([1]) replaces it"
    )


WHERE = {
    "certain": ({"place": "In[3] line 4", "is_certain": True}, "", " at In[3] line 4."),
    "seen": ({"place": "In[3] line 4"}, "", ", last seen at In[3] line 4."),
    "in a collective": ({"place": "In[3] line 4"}, "barrier #1 at In[3] line 4", " in barrier #1 "),
    "crashed": ({"place": "In[3] line 9", "is_certain": True}, "barrier #1", " at In[3] line 9."),
    "at once": ({"runs": "In[3]"}, "", ", while it ran In[3]."),
    "idle": ({"is_idle": True}, "", " while it was idle."),
    "unknown": ({}, "", "."),
}


@pytest.mark.parametrize(("known", "operation", "text"), WHERE.values(), ids=WHERE)
def test_a_death_says_where(known: dict[str, Any], operation: str, text: str) -> None:
    message = RankExited(1, 0, 77, -9, expected=False, log_tail="", **known)
    said = str(death_error(message, operation=operation))
    assert said.startswith(f"rank 1 (pid 77) was killed by SIGKILL{text}")


def test_a_death_for_want_of_memory_tells_the_limit() -> None:
    text = str(
        death_error(
            RankExited(1, 0, 77, -9, expected=False, log_tail="", oom=True, oom_limit=600 << 20)
        )
    )
    assert "(its count of out-of-memory kills rose; its limit is 600 MiB). session" in text


def test_a_crash_shows_its_stack_before_the_last_lines() -> None:
    stack = ('File "a.py", line 1, in f', 'File "In[3]", line 2, in <module>')
    text = str(death_error(RankExited(1, 0, 77, -11, False, "bye", stack=stack)))
    assert text.splitlines()[1:] == [
        "Its Python stack, innermost line first:",
        *(f"  {line}" for line in stack),
        "Its last lines:",
        "bye",
    ]


def test_a_rank_that_its_agent_does_not_report_is_dead_until_more_is_known(
    rank_info: Callable[..., RankInfo],
) -> None:
    told: list[EngineDiedError] = []
    monitor = Monitor(told.extend)
    monitor.handle(RankReady(1, rank_info(1, generation=0)))
    pid = monitor.ready[1].pid
    monitor.handle(RankUnreported(1, pid + 1, "why"))
    assert not told
    monitor.handle(RankUnreported(1, pid, "why"))
    monitor.handle(RankUnreported(1, pid, "why"))
    assert [str(error) for error in told] == [
        f"rank 1 (pid {pid}) has ended; why. session.restart([1]) replaces it; restore=[...] "
        "copies variables from a rank that stays."
    ]
    monitor.handle(exited(1, pid))
    assert "SIGKILL" in str(monitor.dead[1])


def test_a_late_report_is_not_taken_for_the_death_of_the_next_process(
    rank_info: Callable[..., RankInfo],
) -> None:
    monitor = Monitor(lambda errors: None)
    monitor.handle(RankReady(1, rank_info(1, generation=0)))
    pid = monitor.ready[1].pid
    monitor.handle(RankUnreported(1, pid, "why"))
    monitor.forget([1])
    monitor.handle(exited(1, pid))
    assert not monitor.dead
    monitor.handle(RankReady(1, rank_info(1, generation=1)))
    monitor.wait_ready([1], 1, time.monotonic() + 1)


def test_a_death_shows_the_last_lines_that_the_rank_wrote() -> None:
    text = str(death_error(exited(0, log="".join(f"line {n}\n" for n in range(100)) + "\n\n")))
    lines = text.splitlines()
    assert lines[1] == "Its last lines:"
    assert lines[-1] == "line 99"
    assert "line 84" not in text


def test_a_death_at_the_start_says_so_and_offers_no_restart() -> None:
    text = str(death_error(exited(0, returncode=1), while_starting=True))
    assert "ended with exit code 1 while it was starting." in text
    assert "restart" not in text


def test_whoever_waits_for_an_end_goes_on_only_when_the_death_has_been_told(
    rank_info: Callable[..., RankInfo],
) -> None:
    told: list[EngineDiedError] = []

    def tell(deaths: Sequence[EngineDiedError]) -> None:
        time.sleep(0.2)
        told.extend(deaths)

    monitor = Monitor(tell)
    monitor.handle(RankReady(1, rank_info(1, generation=0)))
    pid = monitor.ready[1].pid
    thread = threading.Timer(0.05, monitor.handle, [exited(1, pid)])
    thread.start()
    assert monitor.wait_exited([1], 5)
    assert len(told) == 1
    thread.join()


def test_gpus_are_waited_for_until_each_node_has_told_of_its_own(heard: Heard) -> None:
    gpu = GpuMemory(0, "GPU-a", "A GPU", 1, 2)
    heard.monitor.handle(GpuReply(1, (gpu,)))
    assert heard.monitor.wait_gpus([0, 1], 0.01) == {1: (gpu,)}
    threading.Timer(0.05, heard.monitor.handle, [GpuReply(0, ())]).start()
    assert heard.monitor.wait_gpus([0, 1], 60) == {0: (), 1: (gpu,)}
