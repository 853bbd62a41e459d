"""What the agent keeps of its children; the test is its kernel, and small processes its ranks.

Agents are played in this process, so they see and reap only what they have forked themselves.
The file is long because all of its tests play the same agent, with the fixtures here.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsession import engine
from distsession.engine import agent as module
from distsession.engine import deaths, rehearsal, store_server, usage
from distsession.engine import relay as engine_relay
from distsession.engine import spares as spares_module
from distsession.engine.agent import (
    HANDLED,
    LOG_TAIL_BYTES,
    MAX_STORE_ENDS,
    STORE_ENDS_WITHIN_S,
    Agent,
    Kernel,
)
from distsession.engine.collectives import torch_private
from distsession.engine.log_file import LogFile, log_path
from distsession.engine.pages import Pages
from distsession.engine.process import die_with_parent
from distsession.engine.process_state import GONE, process_state
from distsession.protocol import board as layout
from distsession.protocol import whole_messages
from distsession.protocol.agent_messages import (
    AgentFailed,
    AgentReady,
    GpuMemory,
    GpuReply,
    GpuRequest,
    PreloadReply,
    PreloadRequest,
    PrepareAgent,
    RankExited,
    StartRanks,
    StopRanks,
    StoreEnded,
    StoreReady,
    UsageReply,
    UsageRequest,
)
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import CellRequest
from distsession.ranks import HostInfo
from tests.until import until

HOST = HostInfo("alpha", 1, (), (("gloo", ("cpu",)),), "2.9.0", 4)


class Children:
    """The processes that were forked here, and nobody else's."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.in_child: Callable[[], None] = lambda: None
        self._fork, self._waitid = os.fork, os.waitid

    def fork(self) -> int:
        pid = self._fork()
        if pid:
            self.pids.append(pid)
        else:
            self.in_child()
        return pid

    def waitid(self, kind: int, number: int, options: int) -> Any:
        assert kind == os.P_ALL
        for pid in list(self.pids):
            try:
                ended = self._waitid(os.P_PID, pid, options)
            except ChildProcessError:  # it has been reaped
                self.pids.remove(pid)
                continue
            if ended is not None:
                return ended
        if not self.pids:
            raise ChildProcessError
        return None

    def end(self) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue


@pytest.fixture
def signals() -> Iterator[None]:
    """Agents and what stands for their kernel handle signals; afterwards all is as before."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    wakeup = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(wakeup)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def children(signals: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    children = Children()
    monkeypatch.setattr(os, "fork", children.fork)
    monkeypatch.setattr(os, "waitid", children.waitid)
    yield children
    children.end()


def pause(*_: Any, **__: Any) -> None:
    die_with_parent()
    signal.alarm(60)
    signal.pause()


class PlayedKernel:
    """What an agent knows of its kernel by signals."""

    def __init__(self) -> None:
        self.is_leaving = False
        self.lives: Callable[[], bool] = lambda: True

    @property
    def is_alive(self) -> bool:
        return self.lives()


class Host:
    """An agent, the kernel's end of its link, and what its ranks are to do."""

    def __init__(self, folder: str, children: Children, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.children = children
        self.programs: dict[int, Callable[[Any], None]] = {}
        self.kernel = PlayedKernel()
        self.link, self._its = Pipe()
        children.in_child = self.link.close  # or the agent would not see that the kernel has
        self.messages: list[Any] = []
        self._agents: list[Agent] = []
        self._board = os.memfd_create("board")
        os.mkdir(os.path.join(folder, "logs"))
        self.begin: Callable[..., None] = lambda *_, **__: None
        """What a rehearsal does."""
        rank = SimpleNamespace(main=self._rank, begin=lambda *a, **k: self.begin(*a, **k))
        monkeypatch.setattr(engine, "rank", rank, raising=False)
        group = SimpleNamespace(inherited_environment=lambda: None)  # the real one needs torch
        monkeypatch.setattr(engine, "process_group", group, raising=False)
        monkeypatch.setattr(engine, "store", SimpleNamespace(serve_tcp=pause), raising=False)
        self.agent = self.make()

    def make(self, node: int = 0) -> Agent:
        """An agent whose ranks need no store."""
        self.agent = Agent(self._its, node, self.kernel, self.folder)  # type: ignore[arg-type]
        self._agents.append(self.agent)
        self.agent._store_pid = self.agent._tcp_store_pid = -1
        return self.agent

    def _rank(self, message: StartRanks, rank: int, *, memory: Any, **_: Any) -> None:
        signal.alarm(60)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        self.programs[rank](memory)

    def message(self, *ranks: int, generation: int = 0, node: int = 0) -> StartRanks:
        return StartRanks(
            ranks, 4, generation, ("cpu",) * 4, "gloo", None, None, False, 1, "full", self._board,
            self.folder, "/", (), {}, node=node, nodes=2, store_port=4711 if node else 0,
        )  # fmt: skip

    def start(self, *programs: Callable[[Any], None], generation: int = 0) -> list[int]:
        """Start ranks that do this; gives their pids."""
        before = set(self.children.pids)
        self.programs = dict(enumerate(programs))
        self.agent._handle(self.message(*self.programs, generation=generation))
        self.messages = [m for m in self.received() if not isinstance(m, StoreReady)]
        return [pid for pid in self.children.pids if pid not in before]

    def received(self) -> list[Any]:
        """What the kernel has been told by now."""
        while self.link.poll():
            self.messages.append(self.link.recv())
        return self.messages

    def reap(self, count: int) -> list[Any]:
        """Let the agent look after its children until it has told of so many things."""

        def has_told() -> bool:
            self.agent._reap()
            return len(self.received()) >= count

        until(has_told, "the end of a process")
        return self.messages

    def path(self, stream: str, rank: int = 0, generation: int = 0) -> str:
        return log_path(self.folder, rank, generation, stream)

    def close(self) -> None:
        self.link.close()
        self._its.close()
        os.close(self._board)
        signal.set_wakeup_fd(-1)
        for agent in self._agents:
            agent._finalizers.give_back()
            os.close(agent._wake)
            os.close(agent._wake_writer)


@pytest.fixture
def host(children: Children, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder:
        host = Host(folder, children, monkeypatch)
        yield host
        host.close()


# --- ends of ranks --------------------------------------------------------------------------------


def test_the_end_of_a_rank_is_told_once_with_its_code_and_its_last_words(host: Host) -> None:
    def program(memory: Any) -> None:
        for stream in ("out", "err"):
            with open(host.path(stream, generation=7), "w") as file:
                file.write("x" * LOG_TAIL_BYTES + f"the last of {stream}\n")
        os._exit(3)

    [pid] = host.start(program, generation=7)
    [ended] = host.reap(1)
    assert isinstance(ended, RankExited)
    assert (ended.rank, ended.generation, ended.pid, ended.returncode) == (0, 7, pid, 3)
    assert (ended.expected, ended.oom) == (False, False)
    first, second, rest = ended.log_tail.split("\n")
    assert first.endswith("xthe last of out")
    assert second.endswith("xthe last of err")
    assert (len(ended.log_tail), rest) == (2 * LOG_TAIL_BYTES, "")
    host.agent._reap()
    assert len(host.received()) == 1


def test_a_child_that_is_told_to_end_as_it_begins_runs_no_handler_of_the_agent(host: Host) -> None:
    # The agent's would end the store, the relay and all ranks.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
    host.children.in_child = lambda: os.kill(os.getpid(), signal.SIGTERM)
    host.start(pause)
    [ended] = host.reap(1)
    assert ended.returncode == -signal.SIGTERM


def test_a_rank_without_logs_that_is_killed_is_told_of_too(host: Host) -> None:
    pids = host.start(pause, pause)
    os.kill(pids[1], signal.SIGKILL)
    [ended] = host.reap(1)
    assert (ended.rank, ended.pid, ended.returncode) == (1, pids[1], -signal.SIGKILL)
    assert (ended.expected, ended.log_tail, ended.is_idle) == (False, "", True)
    assert list(host.agent._ranks) == [pids[0]]


def test_an_error_of_a_rank_never_returns_into_the_agent(host: Host) -> None:
    def leave(memory: Any) -> None:
        sys.exit(7)

    def fail(memory: Any) -> None:
        raise ValueError

    host.start(leave, fail)
    assert {m.rank: m.returncode for m in host.reap(2)} == {0: 7, 1: 1}


def test_ranks_that_are_stopped_are_expected_to_end_and_others_go_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXIT_GRACE_S", 60.0)
    pids = host.start(pause, pause, pause)
    host.agent._handle(StopRanks((0, 2)))
    assert sorted((m.rank, m.returncode, m.expected) for m in host.received()) == [
        (0, -signal.SIGTERM, True),
        (2, -signal.SIGTERM, True),
    ]
    assert list(host.agent._ranks) == [pids[1]]


def test_a_rank_that_does_not_leave_when_it_is_asked_to_is_killed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXIT_GRACE_S", 0.1)

    def ignore(memory: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        memory[:2] = b"b\0"
        pause()

    host.start(ignore)
    [rank] = host.agent._ranks.values()
    until(lambda: rank.memory[:1] == b"b")
    host.agent._handle(StopRanks((0,)))
    [ended] = host.received()
    assert (ended.returncode, ended.expected) == (-signal.SIGKILL, True)


def test_ranks_that_share_a_processor_have_time_to_leave(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXIT_LIMIT_S", 60.0)
    cpu = min(os.sched_getaffinity(0))

    def leave_slowly(memory: Any) -> None:
        os.sched_setaffinity(0, {cpu})
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        memory[:2] = b"b\0"
        signal.sigwait({signal.SIGTERM})
        until_used = time.process_time() + 0.1
        while time.process_time() < until_used:
            pass
        os._exit(7)

    host.start(*[leave_slowly] * 12)  # 1.2 s together, with 0.4 s for each
    until(lambda: all(rank.memory[:1] == b"b" for rank in host.agent._ranks.values()))
    host.agent._handle(StopRanks(tuple(range(12))))
    assert [ended.returncode for ended in host.received()] == [7] * 12


def test_a_rank_that_gets_no_processor_has_time_to_leave(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXIT_LIMIT_S", 60.0)
    mine = os.sched_getaffinity(0)
    cpu = min(mine)
    if len(mine) == 1:
        pytest.skip("the agent needs a processor as well")

    def leave(memory: Any) -> None:
        os.sched_setaffinity(0, {cpu})
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        memory[:2] = b"b\0"
        signal.sigwait({signal.SIGTERM})
        os._exit(7)

    def take_the_processor(memory: Any) -> None:
        os.sched_setaffinity(0, {cpu})
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except PermissionError:
            memory[:2] = b"p\0"
            signal.pause()
        memory[:2] = b"b\0"
        until_used = time.process_time() + 0.7  # less than the system lets it go on for
        while time.process_time() < until_used:
            pass
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        signal.pause()

    os.sched_setaffinity(0, mine - {cpu})
    try:
        host.start(leave, take_the_processor)
        memories = {rank.rank: rank.memory for rank in host.agent._ranks.values()}
        until(lambda: all(memory[:1] in (b"b", b"p") for memory in memories.values()))
        if memories[1][:1] == b"p":
            pytest.skip("needs the right to take a processor for itself")
        host.agent._handle(StopRanks((0,)))
    finally:
        os.sched_setaffinity(0, mine)
    [ended] = host.received()
    assert ended.returncode == 7


def test_a_rank_whose_crash_could_not_be_written_says_which_and_what_it_ran(host: Host) -> None:
    def program(memory: Any) -> None:
        deaths.LastLine(memory).begin_request(CellRequest(1, "", "In[9]"))
        Path(host.path("fault")).write_text("Fatal Python error: Bus error\n\n")
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)  # of faulthandler itself

    host.start(program)
    [ended] = host.reap(1)
    assert (ended.returncode, ended.runs) == (-signal.SIGBUS, "In[9]")


def test_what_a_rank_has_started_ends_with_it(host: Host) -> None:
    reader, writer = os.pipe()

    def program(memory: Any) -> None:
        if os.fork():
            os._exit(0)
        signal.alarm(60)
        signal.pause()

    host.start(program)
    os.close(writer)
    host.reap(1)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b""  # nobody has its other end any more


def test_a_rank_says_what_it_ran_when_it_was_killed(host: Host) -> None:
    def program(memory: Any) -> None:
        deaths.LastLine(memory).begin_request(CellRequest(1, "", "In[9]"))
        os.kill(os.getpid(), signal.SIGKILL)

    host.start(program)
    [ended] = host.reap(1)
    assert (ended.runs, ended.is_idle, ended.is_certain) == ("In[9]", False, False)


FAULT = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "In[7]", line 3 in work
"""


@pytest.mark.parametrize(
    ("stream", "number", "is_read"),
    [
        ("fault", signal.SIGSEGV, True),
        ("err", signal.SIGABRT, True),  # where the user's code has it written
        ("err", signal.SIGKILL, False),  # of an earlier crash, of a child perhaps
    ],
)
def test_the_stack_of_a_crash_is_read_where_it_was_written(
    host: Host, stream: str, number: int, is_read: bool
) -> None:
    def program(memory: Any) -> None:
        with open(host.path(stream), "w") as file:
            file.write(FAULT)
        os.kill(os.getpid(), number)

    host.start(program)
    [ended] = host.reap(1)
    assert ended.returncode == -number
    assert ended.stack == (('File "In[7]", line 3, in work',) if is_read else ())
    assert ended.is_certain == is_read


@pytest.mark.parametrize(
    ("number", "is_stopped", "is_oom"),
    [(signal.SIGKILL, False, True), (signal.SIGTERM, False, False), (signal.SIGKILL, True, False)],
)
def test_only_a_kill_that_nobody_asked_for_is_one_for_want_of_memory(
    host: Host, number: int, is_stopped: bool, is_oom: bool
) -> None:
    watched: list[int] = []
    looked_up: list[int] = []
    kills = SimpleNamespace(
        look_up=looked_up.append, watch=watched.append, check=lambda pid: (True, 1 << 30)
    )
    host.agent._oom_kills = kills  # type: ignore[assignment]
    [pid] = host.start(pause)
    assert (looked_up, watched) == ([os.getpid()], [pid])
    host.agent._ranks[pid].stopping = is_stopped
    os.kill(pid, number)
    [ended] = host.reap(1)
    assert (ended.oom, ended.oom_limit) == (is_oom, 1 << 30)


def test_an_agent_that_a_signal_ends_as_it_reaps_a_rank_waits_for_it_no_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    reap = os.waitpid

    def reap_and_end(pid: int, options: int) -> None:
        reap(pid, options)
        raise SystemExit(0)

    host.start(lambda _: os._exit(0))
    with monkeypatch.context() as context:
        context.setattr(os, "waitpid", reap_and_end)
        with pytest.raises(SystemExit):
            host.reap(1)
    host.agent._end()


def test_a_process_that_is_nobodys_is_reaped_in_silence(host: Host) -> None:
    [pid] = host.start(pause)
    if (other := os.fork()) == 0:
        os._exit(5)
    until(lambda: host.agent._reap() or host.children.pids == [pid])
    assert other not in host.children.pids
    assert host.received() == []


def test_finalizers_of_the_agent_run_when_it_ends_and_not_in_ranks(host: Host) -> None:
    finalizer = weakref.finalize(host, print)
    host.start(lambda memory: os._exit(finalizer.atexit))
    [ended] = host.reap(1)
    assert (ended.returncode, finalizer.atexit) == (0, False)
    host.agent._end()
    assert finalizer.atexit
    finalizer.detach()


# --- stores ---------------------------------------------------------------------------------------


def greeting(folder: str) -> bytes:
    """What the store says to whoever connects: who it is."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(store_server.socket_path(folder))
        return client.recv(100)


def test_a_store_that_ends_is_started_again_at_the_same_place(host: Host) -> None:
    host.agent._start_store()
    pid, before = host.agent._store_pid, greeting(host.folder)
    os.kill(pid, signal.SIGKILL)
    assert host.reap(1) == [StoreEnded(pid, -signal.SIGKILL, is_tcp=False, is_replaced=True)]
    assert host.agent._store_pid not in (0, pid)
    after = greeting(host.folder)
    assert after
    assert after != before


def test_a_store_at_a_port_is_started_again_at_that_port(host: Host, port: int) -> None:
    host.agent._start_tcp_store(port)
    assert host.agent._store_port == port
    pid = host.agent._tcp_store_pid
    os.kill(pid, signal.SIGTERM)
    assert host.reap(1) == [StoreEnded(pid, -signal.SIGTERM, is_tcp=True, is_replaced=True)]
    assert host.agent._tcp_store_pid not in (0, pid)
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        assert host.agent._store_port == port


class Clock:
    """Time as the agent sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
        monkeypatch.setattr(module, "time", clock)


def end_store(host: Host) -> bool:
    """End the store; whether there is another one."""
    os.kill(host.agent._store_pid, signal.SIGKILL)
    host.messages.clear()
    [told] = host.reap(1)
    assert bool(host.agent._store_pid) == told.is_replaced
    return bool(told.is_replaced)


def test_a_store_that_ends_too_often_is_not_started_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(store_server, "serve", pause)
    host.agent._start_store()
    told = []
    for _ in range(MAX_STORE_ENDS):
        told.append(end_store(host))
        clock.now += 0.9 * STORE_ENDS_WITHIN_S / MAX_STORE_ENDS
    assert told == [True] * (MAX_STORE_ENDS - 1) + [False]


def test_a_store_that_ends_now_and_then_is_always_started_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(store_server, "serve", pause)
    host.agent._start_store()
    for _ in range(MAX_STORE_ENDS + 2):
        assert end_store(host)
        clock.now += 1.1 * STORE_ENDS_WITHIN_S / (MAX_STORE_ENDS - 1)


def test_a_store_that_cannot_be_started_again_is_told_of(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "serve", pause)
    host.agent._start_store()
    host.agent._folder = os.path.join(host.folder, "gone")
    assert not end_store(host)


def test_the_first_start_brings_the_stores_up_and_a_later_one_leaves_them(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "serve", pause)
    host.agent._store_pid = host.agent._tcp_store_pid = 0
    host.programs = {0: lambda memory: os._exit(0)}
    host.agent._handle(host.message(0))
    stores = host.agent._store_pid, host.agent._tcp_store_pid
    assert host.children.pids[:2] == list(stores)
    host.reap(2)
    host.agent._handle(host.message())
    first, ended, second = host.received()
    assert isinstance(ended, RankExited)
    assert first == second == StoreReady(host.agent._store_port)
    assert (host.agent._store_pid, host.agent._tcp_store_pid) == stores
    assert not os.get_inheritable(host._board)  # what ranks start has no part in it
    host.agent._end()
    assert not any(map(lives, stores))


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- other nodes ----------------------------------------------------------------------------------


def test_another_nodes_agent_has_a_relay_in_the_place_of_stores(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_relay, "serve", lambda _, ready, *__: (ready.close(), pause()))
    agent = host.make(node=1)
    for _ in range(2):
        agent._handle(host.message(node=1))
    assert host.received() == [StoreReady(4711)] * 2
    [relay] = host.children.pids
    os.kill(relay, signal.SIGKILL)
    until(lambda: agent._reap() or not agent._relay_pid)
    agent._handle(host.message(node=1))
    assert agent._relay_pid not in (0, relay)
    assert len(host.received()) == 3  # it is not told of


# --- usage ----------------------------------------------------------------------------------------


def test_what_living_ranks_use_is_read_by_the_agent_itself_where_there_is_no_gpu(
    host: Host,
) -> None:
    pids = host.start(pause, pause)
    os.kill(pids[0], signal.SIGKILL)
    host.reap(1)
    host.agent._handle(UsageRequest(8, {}))
    reply = host.received()[-1]
    assert isinstance(reply, UsageReply)
    assert (reply.number, [(use.rank, use.pid) for use in reply.uses]) == (8, [(1, pids[1])])
    assert host.children.pids == [pids[1]]


def test_the_memory_of_gpus_is_asked_for_by_a_process_of_its_own(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML is played: one GPU, without any process on it."""
    played = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUUID=lambda handle: "GPU-a",
        nvmlDeviceGetName=lambda handle: b"A GPU",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=3, used=5, total=8),
    )
    monkeypatch.setitem(sys.modules, "pynvml", played)
    host.agent._handle(GpuRequest(2))
    link = host.agent._usage_link
    assert link is not None
    assert link.poll(60)
    host.agent._forward_usage()
    assert host.received() == [GpuReply(2, (GpuMemory(0, "GPU-a", "A GPU", 3, 8),))]
    link.close()


def test_without_that_process_no_gpu_is_known(host: Host) -> None:
    host.agent._usage_pid = -1
    host.agent._handle(GpuRequest(0))
    assert host.received() == [GpuReply(0, ())]


def test_the_process_that_asks_about_gpus_may_end_with_questions_unread(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "serve", pause)
    question = UsageRequest(8, {0: "GPU-x"})
    host.agent._handle(question)
    [pid] = host.children.pids
    link = host.agent._usage_link
    assert link is not None
    os.kill(pid, signal.SIGKILL)
    assert link.poll(60)
    host.agent._forward_usage()
    until(lambda: host.agent._reap() or host.agent._usage_pid == -1)
    assert host.received() == []
    host.agent._handle(question)
    assert host.received() == [UsageReply(8, ())]
    assert host.children.pids == []  # it would end again
    link.close()


# --- the link to the kernel -----------------------------------------------------------------------


def test_ranks_end_with_the_link_to_the_kernel(host: Host) -> None:
    host.agent._start_store()
    pids = host.start(pause, pause)
    host.link.close()
    host.agent.serve()
    assert host.kernel.is_leaving
    assert host.agent._ranks == {}
    assert not any(map(lives, [*pids, host.agent._store_pid]))


def test_a_message_of_the_kernel_that_never_comes_whole_is_the_end_of_its_link(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_messages, "MESSAGE_TIMEOUT_S", 0.3)
    [pid] = host.start(pause)
    os.write(host.link.fileno(), b"\0\0\1\0half")
    host.agent.serve()
    assert not lives(pid)


def test_ranks_end_when_the_kernel_is_no_longer_the_parent(host: Host) -> None:
    pids = host.start(pause)
    host.kernel.lives = lambda: False
    host.agent.serve()
    assert [(m.rank, m.expected) for m in host.received()] == [(0, True)]
    assert not any(map(lives, pids))


def test_what_is_no_message_for_an_agent_is_dropped(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.link.send_bytes(b"")
    host.link.send_bytes(b"junk")
    host.link.send(StoreReady(1))
    host.link.send(UsageRequest(8, {}))
    host.kernel.lives = lambda: host.agent._link.poll()  # until it has read all of it
    host.agent.serve()
    assert host.received() == [UsageReply(8, ())]
    assert caplog.text.count("dropped a malformed message of the kernel") == 2
    assert "not for an agent: StoreReady(port=1)" in caplog.text


def test_a_child_of_the_agent_that_ends_wakes_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARENT_POLL_S", 60.0)
    monkeypatch.setattr(module, "LATER_IMPORTS", ())

    def program(memory: Any) -> None:
        time.sleep(0.1)
        os._exit(4)

    host.start(program)
    report = host.agent._report

    def leave(*args: Any) -> None:
        report(*args)
        host.kernel.lives = lambda: False

    monkeypatch.setattr(host.agent, "_report", leave)
    began = time.monotonic()
    host.agent.serve()
    assert time.monotonic() - began < 30
    assert [m.returncode for m in host.received()] == [4]


# --- getting ready --------------------------------------------------------------------------------


@pytest.fixture
def torch_here(host: Host, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the agent finds of torch and of this host."""
    found = SimpleNamespace(
        torch_problem=lambda: "", fork_problem=lambda: "", host_info=lambda _: HOST
    )
    ipython = SimpleNamespace(prepare_shell=lambda folder: None)
    monkeypatch.setattr(engine, "host_info", found, raising=False)
    monkeypatch.setattr(engine, "ipython", ipython, raising=False)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # all of what the tests have
    monkeypatch.setattr(sys, "path", ["/here", "/there"])
    return found


def test_an_agent_is_ready_when_it_has_imported_what_it_was_told_to(
    host: Host, torch_here: SimpleNamespace
) -> None:
    assert host.agent._handle(PrepareAgent(("json",), ("/elsewhere", "/there")))
    assert host.received() == [AgentReady(HOST, 0)]
    assert sys.path == ["/elsewhere", "/there", "/here"]  # the kernel's, and then its own


def test_an_agent_does_what_ranks_would_do_after_all_that_it_imports(
    host: Host, torch_here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch_private, "prepare_ranks", lambda: done.append("prepared"))
    monkeypatch.setattr(module, "import_modules", lambda names: done.extend(names) or "")
    monkeypatch.setattr(module, "_import_quietly", done.append)
    monkeypatch.setattr(module, "LATER_IMPORTS", ("ddp",))
    monkeypatch.setattr(module, "PRELOAD_IDLE_S", 0.0)
    monkeypatch.setattr(host.agent, "_use_large_pages", lambda: done.append("large pages"))
    host.agent._handle(PrepareAgent(("first",), ()))
    host.agent._handle(PreloadRequest(8, ("second",), ()))
    host.start(pause)
    host.kernel.lives = lambda: "large pages" not in done
    host.agent.serve()
    names = [name for name in done if name != "numpy.random"]
    assert names == [
        "first", "prepared", "second", "prepared", "ddp", "prepared", "large pages",
    ]  # fmt: skip


def test_what_it_imports_leaves_the_environment_of_ranks_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'import os; os.environ["CACHE_DIR"] = "here"; del os.environ["KEPT"]'
    (tmp_path / "like_dynamo.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KEPT", "1")
    before = dict(os.environ)
    module._import_quietly("like_dynamo")
    assert "like_dynamo" in sys.modules
    assert dict(os.environ) == before


def test_an_agent_without_ranks_does_nothing_for_them(
    host: Host, torch_here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch_private, "prepare_ranks", lambda: done.append("prepared"))
    host.agent._handle(PrepareAgent((), (), has_ranks=False))
    host.agent._handle(PreloadRequest(8, ("json",), ()))
    assert not done


@pytest.fixture
def spares(host: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Has an idle agent make its spares; gives the pids of those that there are."""
    monkeypatch.setattr(module, "SPARES_AFTER_S", 0.0)

    def make() -> list[int]:
        while host.agent._later or host.agent._rehearsal is not None:
            if (rehearsal := host.agent._rehearsal) is not None:
                until(lambda: rehearsal.is_over, "the rehearsal")
                host.agent._on_rehearsal(rehearsal)
            else:
                host.agent._later.pop(0)()
        return [spare.pid for spare in host.agent._spares]

    return make


def become(host: Host, *ranks: int) -> list[int]:
    """Start these ranks again; gives their pids."""
    host.agent._handle(StopRanks(ranks))
    host.agent._handle(replace(host.message(generation=1), ranks=ranks))
    found = {rank.rank: pid for pid, rank in host.agent._ranks.items()}
    return [found[rank] for rank in ranks]


def test_an_idle_agent_forks_ahead_what_the_next_ranks_will_be(
    host: Host, spares: Callable[[], list[int]]
) -> None:
    started = []

    def program(memory: Any) -> None:
        started.append(os.getpid())
        memory[:2] = b"b\0"
        pause()

    host.start(pause, program)
    ahead = spares()
    assert len(ahead) == 4  # the message says that four ranks are here
    host.programs[1] = program
    [pid] = become(host, 1)
    assert pid in ahead
    until(lambda: host.agent._ranks[pid].memory[:1] == b"b", "the rank to run its program")
    assert spares() == [each for each in ahead if each != pid] + [host.children.pids[-1]]


def test_spares_do_at_once_what_a_rank_that_is_rehearsed_does_with_its_memory(
    host: Host, spares: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Path(host.path("taken"))
    seen = Pages([(1, 2)], [(3, 4)])
    monkeypatch.setattr(rehearsal, "copied_pages", lambda pid, limit: seen.copied)
    monkeypatch.setattr(rehearsal, "mapped_pages", lambda pid: seen.mapped)

    def take(pages: Pages) -> None:
        with taken.open("a") as file:
            file.write(f"{pages == seen}\n")

    monkeypatch.setattr(spares_module, "take_pages", take)
    host.start(pause)
    assert len(spares()) == 4
    whole = "False\n" + 4 * "True\n"  # the first was forked before the rehearsal
    until(lambda: taken.read_text() == whole, "what the spares take")


def test_a_rehearsal_has_a_folder_a_board_and_sockets_of_its_own_and_leaves_none(
    host: Host, spares: Callable[[], list[int]]
) -> None:
    written = Path(host.path("written"))

    def begin(start: StartRanks, rank: int, *, memory: Any) -> None:
        sockets = sorted(name for name in os.listdir(start.folder) if name.endswith(".sock"))
        facts = (start.folder != host.folder, start.board != host._board, start.world_size, sockets)
        written.write_text(repr(facts))

    host.begin = begin
    host.start(pause)
    assert len(spares()) == 4
    sockets = ["memory-1.sock", "requests-1.sock", "store.sock"]
    assert written.read_text() == repr((True, True, 1, sockets))
    assert os.listdir(host.folder) == ["logs"]


def test_agents_of_one_folder_rehearse_apart(host: Host) -> None:
    host.begin = pause
    two = [rehearsal.begin_rehearsal(os.fork, host.message(0)) for _ in range(2)]
    folders = [each.folder for each in two]
    try:
        sockets = [os.path.join(folder, "memory-1.sock") for folder in folders]
        until(lambda: all(map(os.path.exists, sockets)), "both")
        two[0].end()
        assert list(map(os.path.exists, folders)) == [False, True]
    finally:
        two[1].end()
    assert os.listdir(host.folder) == ["logs"]


def rehearsing(host: Host) -> int:
    """Have a rehearsal that never comes to its end; gives its pid."""
    host.begin = pause
    host.start(pause)
    while host.agent._rehearsal is None:
        host.agent._later.pop(0)()
    return host.agent._rehearsal.pid


def test_preloading_ends_a_rehearsal_and_begins_with_another(
    host: Host, spares: Callable[[], list[int]], torch_here: SimpleNamespace
) -> None:
    pid = rehearsing(host)
    for _ in range(2):
        host.agent._handle(PreloadRequest(8, ("json",), ()))
    assert process_state(pid) in GONE
    assert host.agent._rehearsal is None
    host.begin = lambda *_, **__: None
    assert len(spares()) == 4


def reserved(path: str) -> int:
    """Blocks of a file behind its end."""
    facts = os.stat(path)
    return facts.st_blocks - -(-facts.st_size // 512)


@pytest.mark.parametrize("is_asked", [True, False], ids=["as it was told to", "by itself"])
def test_room_that_a_rank_has_reserved_in_its_logs_is_given_back_when_it_has_ended(
    host: Host, spares: Callable[[], list[int]], is_asked: bool
) -> None:
    paths = [host.path(stream) for stream in ("out", "err")]
    for path in paths:
        Path(path).write_text("what it wrote\n")
        LogFile(path, 1 << 20).maintain(0)
    assert all(reserved(path) > 100 for path in paths)
    [pid] = host.start(pause)
    if is_asked:
        host.agent._handle(StopRanks((0,)))
        assert all(reserved(path) > 100 for path in paths)  # somebody waits for that end
        host.start(pause, generation=1)
        spares()
    else:
        os.kill(pid, signal.SIGKILL)
        [message] = host.reap(1)
        assert message.log_tail == 2 * "what it wrote\n"
    assert [reserved(path) < 10 for path in paths] == [True, True]
    assert [Path(path).read_text() for path in paths] == 2 * ["what it wrote\n"]


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no rank can begin here")


def end(*_: Any, **__: Any) -> None:
    os._exit(3)


@pytest.mark.parametrize("begin", [fail, end, pause], ids=["fails", "ends", "hangs"])
def test_a_rehearsal_that_comes_to_nothing_keeps_no_spare_from_being_made(
    host: Host,
    spares: Callable[[], list[int]],
    begin: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearsal, "TIMEOUT_S", 0.5)
    host.begin = begin
    host.agent._pages = before = Pages([(1, 2)])
    monkeypatch.setattr(spares_module, "take_pages", lambda _: None)
    host.start(pause)
    assert len(spares()) == 4
    assert host.agent._pages == before
    assert os.listdir(host.folder) == ["logs"]


@pytest.mark.parametrize("ends", ["by itself", "with the agent", "as ranks are started"])
def test_a_rehearsal_that_is_under_way_is_not_left(
    host: Host, spares: Callable[[], list[int]], ends: str
) -> None:
    pid = rehearsing(host)
    match ends:
        case "by itself":
            os.kill(pid, signal.SIGKILL)
            until(lambda: (host.agent._reap(), host.agent._rehearsal is None)[1])
            assert host.agent._later == [host.agent._make_spares]
        case "with the agent":
            host.agent._end()
        case _:
            become(host, 0)
            assert host.agent._rehearse in host.agent._later  # once more
    assert host.agent._rehearsal is None
    assert process_state(pid) in GONE
    assert os.listdir(host.folder) == ["logs"]


def test_a_spare_that_was_killed_is_not_waited_for(
    host: Host, spares: Callable[[], list[int]]
) -> None:
    host.start(pause)
    ahead = spares()
    for pid in ahead:
        os.kill(pid, signal.SIGKILL)
    until(lambda: (host.agent._reap(), not set(ahead) & set(host.children.pids))[1])
    [pid] = become(host, 0)
    assert pid not in ahead
    assert host.agent._ranks[pid].rank == 0


def test_spares_have_what_was_imported_last(
    host: Host, spares: Callable[[], list[int]], torch_here: SimpleNamespace
) -> None:
    host.start(pause)
    before = spares()
    host.agent._handle(PreloadRequest(8, ("json",), ()))
    after = spares()
    assert len(after) == len(before)
    assert not set(after) & set(before)
    assert not [pid for pid in before if process_state(pid) not in GONE]


def test_spares_end_with_their_agent(host: Host, spares: Callable[[], list[int]]) -> None:
    host.start(pause)
    ahead = spares()
    host.agent._end()
    assert not [pid for pid in ahead if process_state(pid) not in GONE]


def test_a_host_of_many_ranks_has_few_spares(
    host: Host, spares: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPARES", 2)
    host.start(pause, pause, pause)
    assert len(spares()) == 2


def test_an_agent_that_cannot_fork_ahead_goes_on(
    host: Host, spares: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start(pause)

    def fork() -> int:
        raise BlockingIOError("too many processes")

    with monkeypatch.context() as context:
        context.setattr(os, "fork", fork)
        assert spares() == []
    assert os.listdir(host.folder) == ["logs"]
    assert len(become(host, 0)) == 1


@pytest.mark.parametrize(
    ("preload", "torch", "fork", "said"),
    [
        ((), "no torch", "", "no torch"),
        (("no_such_thing",), "", "", "the preload module 'no_such_thing' does not import: Module"),
        (("json",), "", "2 threads run", "cannot be forked: 2 threads run, because of json"),
        ((), "", "2 threads run", "because of something that Python runs at its start"),
    ],
)
def test_an_agent_that_cannot_go_on_says_why_and_ends(
    host: Host,
    torch_here: SimpleNamespace,
    preload: tuple[str, ...],
    torch: str,
    fork: str,
    said: str,
) -> None:
    torch_here.torch_problem = lambda: torch
    torch_here.fork_problem = lambda: fork
    host.link.send(PrepareAgent(preload, ()))
    host.agent.serve()  # it returns though the kernel lives
    [failed] = host.received()
    assert isinstance(failed, AgentFailed)
    assert said in failed.reason


def test_a_trial_imports_nothing_here_and_says_how_it_goes(
    host: Host, torch_here: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "tried_here.py").write_text("")
    request = PreloadRequest(7, ("tried_here", "json"), (str(tmp_path),), is_trial=True)
    host.agent._handle(request)
    assert host.reap(1) == [PreloadReply(7, 0, "", ("json",))]
    assert "tried_here" not in sys.modules
    assert sys.path == ["/here", "/there"]


def test_what_was_tried_is_imported_here_when_the_kernel_says_so(
    host: Host, torch_here: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "imported_here.py").write_text("")
    host.agent._handle(PreloadRequest(8, ("imported_here",), (str(tmp_path),)))
    assert host.received() == [PreloadReply(8, 0)]
    assert sys.path == [str(tmp_path), "/here", "/there"]
    del sys.modules["imported_here"]


@pytest.mark.parametrize(
    ("text", "fork", "said"),
    [
        ("raise ValueError('x' * 100_000)", "", "'bad' does not import: ValueError('xxx"),
        ("import os; os._exit(3)", "", "importing bad ends the process: exit code 3"),
        ("import os, signal; os.kill(os.getpid(), 9)", "", "ends the process: SIGKILL"),
        ("", "2 threads run", "ranks cannot be forked: 2 threads run, because of bad."),
    ],
)
def test_a_trial_that_goes_wrong_says_why(
    host: Host, torch_here: SimpleNamespace, tmp_path: Path, text: str, fork: str, said: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    torch_here.fork_problem = lambda: fork
    host.agent._handle(PreloadRequest(7, ("bad",), (str(tmp_path),), is_trial=True))
    [reply] = host.reap(1)
    assert said in reply.problem


@pytest.mark.parametrize("way", ["request", "end"])
def test_a_trial_that_nobody_waits_for_ends_with_what_it_has_started(
    host: Host, torch_here: SimpleNamespace, tmp_path: Path, way: str
) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "endless.py").write_text(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    host.agent._handle(PreloadRequest(7, ("endless",), (str(tmp_path),), is_trial=True))
    until(lambda: pid_file.exists() and pid_file.read_text(), "the import")
    child = int(pid_file.read_text())
    if way == "request":
        host.agent._handle(PreloadRequest(8, is_trial=True))
    else:
        host.agent._end()
    until(lambda: not _runs(child), "the end of what it has started")
    host.agent._reap()
    assert host.received() == []  # and nobody is told


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the kernel, as far as signals tell -----------------------------------------------------------


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_collected_while_torch_is_imported_and_nothing_of_it_later(
    is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    # All of what the tests have would stay.
    monkeypatch.setattr(gc, "freeze", lambda: seen.append(f"frozen {gc.isenabled()}"))
    gc.callbacks.append(lambda phase, _: seen.append(phase))
    if not is_on:
        gc.disable()
    try:
        with module._without_collections():
            made = [[number] for number in range(3 * gc.get_threshold()[0])]
        assert seen[:1] == ["frozen False"]
        assert made
        assert gc.isenabled() is is_on
    finally:
        gc.callbacks.pop()
        gc.enable()


@pytest.fixture
def kernel(signals: None, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    asked: list[int] = []
    monkeypatch.setattr(module, "signal_when_parent_ends", asked.append)
    kernel = Kernel(os.getppid())
    assert asked == [signal.SIGHUP]
    return kernel


def test_the_kernel_lives_as_long_as_it_is_the_parent(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernel.is_alive
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not kernel.is_alive


def test_a_kernel_that_says_so_ends_this_process_once(kernel: Kernel) -> None:
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 0
    assert (kernel.has_terminated, kernel.is_leaving) == (True, True)
    signal.raise_signal(signal.SIGTERM)  # while it ends its ranks


def test_the_end_of_the_kernel_ends_this_process_but_not_that_of_one_of_its_threads(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.raise_signal(signal.SIGHUP)
    assert not kernel.is_leaving
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGHUP)
    assert (kernel.has_terminated, kernel.is_leaving) == (False, True)


def test_ranks_of_other_hosts_are_idle_only_once_somebody_has_looked_at_them() -> None:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(2))
    board = Board(descriptor, 2)
    try:
        left_at = SimpleNamespace(left_at_ns=time.monotonic_ns())
        agent: Any = SimpleNamespace(_board=board, _has_ranks=False, _owners=left_at)
        assert not Agent._is_idle(agent)  # they may have begun as the owner left
        board.regions[0].seen_at_ns = time.monotonic_ns()
        assert not Agent._is_idle(agent)
        board.regions[1].seen_at_ns = time.monotonic_ns()
        assert Agent._is_idle(agent)
        board.words[board.regions[1].start + layout.REQUEST] = 7
        assert not Agent._is_idle(agent)
    finally:
        board.close()
        os.close(descriptor)
