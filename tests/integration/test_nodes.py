"""A session of several nodes, played by one machine: everything crosses between them by relays."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distsession import (
    CollectiveHangError,
    EngineDiedError,
    LaunchError,
    RunError,
    RunInterrupt,
    Session,
    SessionStateError,
)
from distsession.cluster.local import LocalLauncher
from distsession.cluster.relay import Relay
from distsession.protocol import shared_memory
from tests.conftest import assert_nothing_left, traces
from tests.integration.agent_children import relay_of

LARGE = 300_000  # elements, well above what goes with a message


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    """Four ranks on two nodes that the tests of this module share."""
    with Session(4, nodes=2) as session:
        yield session


def apart(ranks: int, **options: Any) -> Session:
    """Two nodes whose ranks share no board, as those of two hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalLauncher, "shares_board", False)
        session = Session(ranks, nodes=2, **options)
    session.launcher.shares_board = False
    return session


@pytest.fixture(scope="module")
def four_apart() -> Iterator[Session]:
    """The same as ``four``, with a board for each node."""
    with apart(4) as session:
        yield session


def relay(session: Session, node: int = 1) -> Relay:
    found = session.launcher.channel.payloads.relays.of(node)
    assert found is not None
    return found


def crossed(session: Session) -> tuple[int, int]:
    """Bytes of payloads that went to the second node and came from there."""
    wire = relay(session).wire
    return wire.sent, wire.received


def processes(session: Session) -> dict[str, psutil.Process]:
    """The agent and the relay of the second node."""
    agent = psutil.Process(session.launcher._agents.pid(1))
    return {"agent": agent, "relay": relay_of(agent)}


def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reduced(session: Session) -> list[float]:
    session.execute("t = torch.ones(())\ndist.all_reduce(t)")
    return [float(value) for value in session.pull("t").values()]


# --- places ---------------------------------------------------------------------------------------


def test_each_rank_knows_its_node(four: Session) -> None:
    names = ("RANK", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = four.evaluate(f"[int(__import__('os').environ[name]) for name in {names}]")
    assert list(values.values()) == [
        [0, 0, 0, 0, 2],
        [1, 0, 0, 1, 2],
        [2, 1, 1, 0, 2],
        [3, 1, 1, 1, 2],
    ]
    facts = [(info.node_rank, info.nodes, info.local_rank) for info in four.infos]
    assert facts == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]
    assert "nodes           2" in repr(four.show_config())
    assert reduced(four) == [4.0] * 4


def test_helpers_see_the_nodes(four: Session) -> None:
    four.execute("from distsession.distributed import get_nnodes, get_node_rank")
    assert dict(four.evaluate("(get_nnodes(), get_node_rank())")) == {
        0: (2, 0),
        1: (2, 0),
        2: (2, 1),
        3: (2, 1),
    }


# --- what crosses ---------------------------------------------------------------------------------


def test_a_payload_to_all_ranks_of_a_node_crosses_once(four: Session) -> None:
    x = torch.randn(LARGE)
    sent, received = crossed(four)
    four.push(x=x)
    assert x.nbytes <= crossed(four)[0] - sent < x.nbytes + 1000
    back = four.pull("x")
    assert 2 * x.nbytes <= crossed(four)[1] - received < 2 * x.nbytes + 2000
    assert all(torch.equal(value, x) for value in back.values())


def test_what_stays_on_the_kernels_node_does_not_cross(four: Session) -> None:
    before = crossed(four)
    four[:2].push(x=torch.ones(LARGE))
    assert four[:2].pull("x")[1].sum() == LARGE
    assert crossed(four) == before


def test_small_values_go_with_their_message(four: Session) -> None:
    before = crossed(four)
    four.push(x=torch.ones(100))
    assert four.pull("x")[3].sum() == 100
    assert crossed(four) == before


def test_a_part_crosses_to_its_own_node_alone(four: Session) -> None:
    whole = torch.randn(4, LARGE)
    before = crossed(four)[0]
    four.scatter("part", whole)
    assert 2 * LARGE * 4 <= crossed(four)[0] - before < 2 * LARGE * 4 + 2000
    assert torch.equal(four.pull("part")[3][0], whole[3])


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 3], [1, 2], [3]])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_what_is_scattered_is_gathered_again(four: Session, ranks: list[int], kind: str) -> None:
    whole: Any = torch.randn(101, 53, 64, dtype=torch.float64)
    whole = whole.numpy() if kind == "array" else whole
    for dim in (0, 1, 2):
        four[ranks].scatter("part", whole, dim)
        back = four[ranks].gather("part", dim)
        assert type(back) is type(whole)
        assert bool((back == whole).all())


def test_a_sharded_tensor_in_many_pieces_is_gathered(four: Session) -> None:
    four.execute(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard\n"
        "from torch.distributed.tensor import distribute_tensor\n"
        "whole = torch.arange(3_000_000.).reshape(1500, 2000)\n"
        "flat = init_device_mesh('cpu', (4,))\n"
        "rows = distribute_tensor(whole, flat, [Shard(0)])\n"
        "columns = distribute_tensor(whole, flat, [Shard(1)])\n"
        "sums = DTensor.from_local(whole / 4, flat, [Partial()])\n"
        "single = distribute_tensor(torch.tensor(7.), flat, [Replicate()])\n"
    )
    whole = torch.arange(3_000_000.0).reshape(1500, 2000)
    for name in ("rows", "columns", "sums"):
        assert torch.equal(four.gather(name), whole), name
    assert four.gather("single") == 7


def test_arguments_and_results_cross_too(four: Session) -> None:
    x = torch.arange(LARGE)
    sent = crossed(four)[0]
    results = four.run(lambda t: (t * 2).numpy(), x)
    assert x.nbytes <= crossed(four)[0] - sent < x.nbytes + 3000
    assert (results[3] == (x * 2).numpy()).all()
    results[3][0] = 5  # what has arrived can be changed
    future = four[1:3].submit(torch.Tensor.sum, x)
    assert future.result(20)[2] == x.sum()


def test_several_threads_may_move_at_the_same_time(four: Session) -> None:
    values = {f"x{number}": torch.full((LARGE,), number) for number in range(6)}
    threads = [
        threading.Thread(target=four.push, kwargs={name: value}) for name, value in values.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for name, value in values.items():
        assert torch.equal(four.pull(name)[3], value)


def test_memory_is_given_back_with_the_last_holder(four: Session) -> None:
    def held() -> list[int]:
        pids = [processes(four)["relay"].pid, *(info.pid for info in four.infos[2:])]
        opened = len(os.listdir(f"/proc/{pids[0]}/fd"))
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
        own = [len(re.findall(r" rw-p .*memfd:distsession \(", text)) for text in maps]
        return [opened, *own, *(text.count("memfd:distsession (") for text in maps)]

    clean = "import gc; globals().update(dict.fromkeys([n for n in dir() if n[0] == 'x'])); "
    four.execute(clean + "held = part = whole = None; gc.collect()")
    time.sleep(shared_memory.KEEP + 0.5)
    before = held()
    four.push(held=torch.zeros(LARGE))
    assert [now - then for now, then in zip(held()[2:4], before[2:4], strict=True)] == [1, 1]
    four.execute("held = None")
    gc.collect()
    until(lambda: held() == before)


def test_the_kernel_holds_one_copy_of_what_it_sends_and_brings() -> None:
    code = """
import threading, time, torch
from distsession import Session

def memory():
    with open("/proc/self/status") as status:
        facts = dict(line.split(":") for line in status)
    return sum(int(facts[name].split()[0]) for name in ("RssAnon", "RssShmem")) >> 10

def peak(work):
    before, seen, over = memory(), [0], threading.Event()
    def watch():
        while not over.wait(0.001):
            seen.append(memory() - before)
    thread = threading.Thread(target=watch)
    thread.start()
    value = work()
    over.set()
    thread.join()
    return max(seen)

x = torch.ones(128 << 18)  # 128 MB
with Session(4, nodes=2) as session:
    session.push(y=torch.ones(1 << 20))
    session.pull("y")
    session.gather("y")
    far = session[2:]
    print(peak(lambda: far.push(x=x)))
    print(peak(lambda: far.pull("x")))
    print(peak(lambda: session.scatter("p", x)))
    print(peak(lambda: session.gather("p")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True
    )
    push, pull, scatter, gather = map(int, done.stdout.split())
    assert push < 13  # straight from the value
    assert pull < 256 * 1.1  # two values
    assert scatter < 128 * 1.1
    assert gather < 128 * 1.1


# --- boards ---------------------------------------------------------------------------------------


def test_the_ranks_of_a_node_have_a_board_of_their_own(four_apart: Session) -> None:
    def boards(pid: int) -> set[int]:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {int(line.split()[4]) for line in maps if "distsession-board" in line}

    found = [boards(info.pid) for info in four_apart.infos]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert not found[0] & found[2]
    assert [len(each) for each in found] == [1] * 4


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "dist.all_reduce(t, op=dist.ReduceOp.MAX if rank > 1 else dist.ReduceOp.SUM)",
            "ranks 0-1 called all_reduce with sum, ranks 2-3 with max, at In",
        ),
        (
            "dist.all_reduce(t) if rank < 2 else dist.barrier()",
            r"ranks 0-1 called all_reduce \(float32 \[4\], sum\), ranks 2-3 called barrier, at In",
        ),
        (
            "dist.all_reduce(t, op=dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)",
            "rank 2 called all_reduce with max, ranks 0-1,3 with sum, at In",
        ),
        (
            "for i in range(300):\n"
            "    odd = rank > 1 and i == 17\n"
            "    dist.all_reduce(t, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)",
            "called different operations before|called all_reduce with sum, ranks 2-3 with max",
        ),
    ],
    ids=["operation that ends", "operation that hangs", "within a node", "among many"],
)
def test_what_ranks_of_two_nodes_call_is_compared(
    four_apart: Session, code: str, said: str
) -> None:
    four_apart.execute("t = torch.ones(4)")
    with pytest.raises(RunError, match=rf"^CollectiveMismatchError: .*({said})") as caught:
        four_apart.execute(code)
    shown = "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]
    assert "so its tensors may have changed" in shown
    assert reduced(four_apart) == [4.0] * 4


def test_a_mismatch_of_which_a_rank_dies_comes_first() -> None:
    said = r"^CollectiveMismatchError: rank 0 called .* rank 1 with"
    with apart(2) as session:
        with pytest.raises(RunError, match=said):
            session.execute("dist.all_reduce(torch.ones(4 + rank))")
        session.restart()
        assert reduced(session) == [2.0] * 2


def test_who_waits_for_whom_is_known_of_both_nodes(four_apart: Session) -> None:
    future = four_apart.submit(_barrier_unless_last, 60)
    until(lambda: "ranks 0-2 wait in barrier" in repr(four_apart.diagnose()))
    assert "for rank 3, which runs" in repr(four_apart.diagnose())
    assert four_apart.interrupt()
    with pytest.raises(RunInterrupt):
        future.result(20)
    assert reduced(four_apart) == [4.0] * 4


def test_a_certain_deadlock_across_nodes_is_ended(four_apart: Session) -> None:
    with pytest.raises(
        CollectiveHangError, match=r"ranks 1-3 did not come to all_reduce .* rank 0 waits"
    ):
        four_apart.execute("if rank == 0:\n    dist.all_reduce(torch.ones(()))")
    with pytest.raises(RunError, match=r"^ZeroDivisionError on rank 3"):
        four_apart.execute("dist.barrier() if rank < 3 else 1 / 0")
    assert reduced(four_apart) == [4.0] * 4


@pytest.mark.parametrize("receiver", [0, 3])
def test_a_message_is_received_from_whichever_node_sends(
    four_apart: Session, receiver: int
) -> None:
    four_apart.execute(
        f"if rank == {receiver}:\n"
        "    seen = sorted(dist.recv(torch.zeros(3)) for _ in range(3))\n"
        "else:\n"
        f"    dist.send(torch.ones(3), {receiver})"
    )
    others = sorted({0, 1, 2, 3} - {receiver})
    assert four_apart[receiver].evaluate("seen")[receiver] == others


def test_operations_that_match_are_never_said_not_to(four_apart: Session) -> None:
    four_apart.execute(
        "t = torch.ones(4)\n"
        "pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]\n"
        "for i in range(500):\n"
        "    dist.all_reduce(t, op=dist.ReduceOp.MAX)\n"
        "    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=pairs[rank % 2])\n"
        "    work = dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True)\n"
        "    dist.send(t, 3 - rank) if rank < 2 else dist.recv(t, 3 - rank)\n"
        "    work.wait()"
    )
    assert four_apart.evaluate("float(t[0])")[3] == 1.0
    assert four_apart.status().endswith("idle (4 ranks, gloo)")


# --- messages -------------------------------------------------------------------------------------


def messages(session: Session) -> int:
    """Messages that went to the second node by now."""
    return session.launcher.channel.links.sent[1]


def test_a_call_is_one_message_for_a_node(four: Session) -> None:
    before = messages(four)
    for _ in range(10):
        four.run(int)
    assert messages(four) - before == 10
    four.diagnose()  # asks the control threads
    assert messages(four) - before <= 11
    four[:2].run(int)
    assert messages(four) - before <= 11


def test_a_large_payload_comes_with_one_message_for_a_node(four: Session) -> None:
    x = torch.randn(LARGE)
    before = messages(four)
    assert [float(value) for value in four.run(torch.Tensor.numel, x).values()] == [LARGE] * 4
    assert messages(four) - before == 1


def test_many_calls_leave_nothing_in_a_relay(four: Session) -> None:
    def resident() -> int:
        return sum(process.memory_info().rss for process in (processes(four)["relay"], kernel))

    kernel = psutil.Process()
    for _ in range(2000):
        four.run(int)
    before = resident()
    for _ in range(5000):
        four.run(int)
        four[2:].submit(print, "x" * 100).result(20)
    assert resident() - before < 8 << 20
    flows = four.launcher.channel.links._flows.values()
    assert not any(flow.held for flow in flows)
    assert all(flow.under_way < 64 for flow in flows)


def test_a_stopped_rank_does_not_hold_up_the_others_of_its_node(
    start: Callable[..., Session],
) -> None:
    session = start(4, nodes=2)
    stopped = session.infos[3].pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        futures = [session[3].submit(bytes.__len__, bytes(10_000)) for _ in range(2000)]
        for _ in range(100):
            assert dict(session[:3].evaluate("rank")) == {0: 0, 1: 1, 2: 2}
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [future.result(60)[3] for future in futures] == [10_000] * 2000
    assert reduced(session) == [4.0] * 4


# --- stop -----------------------------------------------------------------------------------------


def stop_when(condition: Callable[[], bool]) -> threading.Thread:
    def stop() -> None:
        until(condition)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def test_a_stop_in_the_middle_of_a_push_leaves_the_names(start: Callable[..., Session]) -> None:
    session = start(4, nodes=2)
    session.push(x=1)
    before = crossed(session)[0]
    large = torch.ones(50_000_000)
    thread = stop_when(lambda: crossed(session)[0] > before + 10_000_000)
    with pytest.raises(RunInterrupt, match="nothing was sent"):
        session[2:].push(x=large)
    thread.join()
    assert crossed(session)[0] < before + large.nbytes
    assert set(session.pull("x").values()) == {1}
    session.push(x=large[:LARGE])
    assert session.pull("x")[3].sum() == LARGE


def test_a_stop_while_results_arrive_ends_the_transfer(start: Callable[..., Session]) -> None:
    session = start(4, nodes=2)
    session[2:].execute("x = torch.ones(100_000_000)")
    began = crossed(session)[1]
    thread = stop_when(lambda: crossed(session)[1] > began + 10_000_000)
    with pytest.raises(RunInterrupt, match="stopped"):
        session[2].pull("x")
    thread.join()
    assert crossed(session)[1] < began + 400_000_000
    assert session.evaluate("1 + rank")[3] == 4
    assert session[2].evaluate("x.numel()")[2] == 100_000_000
    assert torch.equal(session[2].evaluate("x[:100_000]")[2], torch.ones(100_000))
    assert reduced(session) == [4.0] * 4


def test_an_interrupt_while_a_result_arrives_ends_the_transfer(
    start: Callable[..., Session],
) -> None:
    session = start(4, nodes=2)
    future = session[2].submit(torch.ones, 100_000_000)
    until(lambda: crossed(session)[1] > 10_000_000)
    assert session.interrupt()
    with pytest.raises(RunInterrupt, match="while what it gave was brought here"):
        future.result(20)
    assert crossed(session)[1] < 400_000_000
    assert session.evaluate("1 + rank")[3] == 4


def test_a_stopped_relay_can_be_left(start: Callable[..., Session]) -> None:
    session = start(2, nodes=2)
    session.push(x=1)
    found = processes(session)["relay"]
    found.send_signal(signal.SIGSTOP)
    try:
        threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(RunInterrupt, match="nothing was sent"):
            session.push(x=torch.ones(5_000_000))
        assert f"The relay of node 1 (pid {found.pid}) is stopped by SIGSTOP" in session.status()
        assert session[0].pull("x")[0] == 1  # no relay is needed for it
        threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(RunInterrupt):
            session.run(int)
        with pytest.raises(SessionStateError, match=rf"`kill -CONT {found.pid}` lets it go on"):
            session.restart([1])
    finally:
        found.send_signal(signal.SIGCONT)
    assert dict(session.pull("x")) == {0: 1, 1: 1}
    session.push(x=torch.ones(LARGE))
    assert session.pull("x")[1].sum() == LARGE


# --- ends -----------------------------------------------------------------------------------------


def test_the_end_of_a_nodes_relay_is_told_and_mended(
    start: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    session = start(4, nodes=2)
    session.execute("x = torch.full((300_000,), rank)")
    pids = {info.pid for info in session.infos}
    future = session.submit(torch.distributed.barrier)
    future.result(20)
    future = session[2:].submit(time.sleep, 60)
    with caplog.at_level(logging.WARNING):
        processes(session)["relay"].kill()
        with pytest.raises(
            RunError, match=r"ranks 2-3: each cannot be reached: the relay of node 1 .* ranks 2-3"
        ):
            future.result(20)
    assert "the relay of node 1" in caplog.text
    with pytest.raises(
        EngineDiedError, match=r"ranks 2-3: each cannot be reached: the relay of node 1"
    ):
        session.run(int)
    assert "ranks 2-3 are dead" in session.status()
    assert dict(session[:2].evaluate("float(x[0])")) == {0: 0.0, 1: 1.0}
    session.restart([3], restore="x")  # and rank 2, which nobody reaches either
    assert [float(value[0]) for value in session.pull("x").values()] == [0.0, 1.0, 0.0, 0.0]
    assert reduced(session) == [4.0] * 4
    fresh = {info.pid for info in session.infos}
    assert len(fresh & pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids - fresh)


def test_ranks_that_wait_for_some_behind_a_killed_relay_are_freed(
    start: Callable[..., Session],
) -> None:
    session = start(4, nodes=2)
    future = session.submit(_barrier_unless_last, 60)
    until(lambda: "barrier" in repr(session.diagnose()))
    processes(session)["relay"].kill()
    with pytest.raises(RunError, match="cannot be reached: the relay of node 1"):
        future.result(20)
    session.restart()
    assert reduced(session) == [4.0] * 4


def _barrier_unless_last(seconds: float) -> None:
    if os.environ["RANK"] == "3":
        time.sleep(seconds)
    torch.distributed.barrier()


def test_a_relay_that_dies_in_the_middle_of_a_transfer_is_told(
    start: Callable[..., Session],
) -> None:
    session = start(4, nodes=2)
    found = processes(session)["relay"]
    session[2].execute("x = torch.ones(100_000_000)")
    began = crossed(session)[1]

    def kill(which: int) -> None:
        until(lambda: crossed(session)[which] > began + 10_000_000)
        found.kill()

    thread = threading.Thread(target=kill, args=[1])
    thread.start()
    with pytest.raises(
        RunError, match=r"on rank 2 \(node1\): the result did not arrive: the relay of node 1"
    ):
        session[2].pull("x")
    thread.join()
    until(lambda: "ranks 2-3 are dead" in session.status())
    session.restart()
    found = processes(session)["relay"]
    began = 0
    thread = threading.Thread(target=kill, args=[0])
    thread.start()
    with pytest.raises(RunError, match="ranks 2-3: each cannot be reached: the relay of node 1"):
        session[2:].push(y=torch.ones(50_000_000))
    thread.join()
    assert dict(session[:2].evaluate("rank")) == {0: 0, 1: 1}
    session.restart([2, 3])
    assert reduced(session) == [4.0] * 4


def test_a_killed_rank_is_told_during_a_transfer_and_replaced(
    start: Callable[..., Session],
) -> None:
    session = start(4, nodes=2)
    session.execute("x = torch.ones(50_000_000)")
    began = crossed(session)[1]
    victim = session.infos[3].pid

    def kill() -> None:
        until(lambda: crossed(session)[1] > began + 10_000_000)
        os.kill(victim, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RunError, match=r"rank 3 \(pid \d+\) was killed by SIGKILL"):
        session[2:].run(_wait_on_rank_three)
    thread.join()
    session.restart([3], restore="x")
    assert session.pull("x")[3].sum() == 50_000_000
    assert reduced(session) == [4.0] * 4


def _wait_on_rank_three() -> Any:
    if os.environ["RANK"] == "3":
        time.sleep(30)
    return torch.ones(50_000_000)


def test_single_ranks_of_any_node_are_replaced(start: Callable[..., Session]) -> None:
    session = start(4, nodes=2)
    session.push(x=torch.arange(LARGE))
    for rank in (3, 0):
        session.restart([rank], restore="x")
        assert torch.equal(session.pull("x")[rank], torch.arange(LARGE))
    session.restart([1, 2])
    assert reduced(session) == [4.0] * 4
    session.restart()
    session.push(x=torch.ones(LARGE))
    assert session.gather("x").sum() == 4 * LARGE


def test_the_end_of_a_nodes_agent_is_told_and_mended(start: Callable[..., Session]) -> None:
    session = start(4, nodes=2)
    session.execute("x = torch.full((300_000,), rank)")
    future = session[2:].submit(time.sleep, 60)
    processes(session)["agent"].kill()
    with pytest.raises(RunError, match=r"ranks 2-3: each is gone: the agent of node 1 .* ranks"):
        future.result(20)
    with pytest.raises(EngineDiedError, match=r"ranks 2-3: each is gone: the agent of node 1"):
        session.run(int)
    assert "ranks 2-3 are dead" in session.status()
    assert dict(session[:2].evaluate("float(x[0])")) == {0: 0.0, 1: 1.0}
    session.restart([2, 3], restore="x")
    assert [float(value[0]) for value in session.pull("x").values()] == [0.0, 1.0, 0.0, 0.0]
    assert reduced(session) == [4.0] * 4


def test_an_agent_is_replaced_whose_process_takes_long_to_end(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(2, nodes=2)
    agents = session.launcher._agents
    old, runs = agents.pid(1), agents.runs
    monkeypatch.setattr(
        agents, "runs", lambda node=0: (node == 1 and agents.pid(1) == old) or runs(node)
    )
    processes(session)["agent"].kill()
    until(lambda: "rank 1 is dead" in session.status())
    session.restart([1])
    assert reduced(session) == [2.0] * 2


def test_with_the_first_agent_the_session_ends_and_starts_anew(
    start: Callable[..., Session],
) -> None:
    session = start(4, nodes=2)
    pids = [info.pid for info in session.infos]
    os.kill(session.launcher._agents.pid(0), signal.SIGKILL)
    until(lambda: "its agent is gone" in session.status())
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    with pytest.raises(EngineDiedError, match="agent"):
        session.run(int)
    session.restart()
    assert reduced(session) == [4.0] * 4


@pytest.mark.usefixtures("cold_agents")
def test_a_node_that_does_not_start_is_named_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = traces()
    (tmp_path / "fragile.py").write_text(
        "import os, sys\nif sys.argv[2] == '1':\n    os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        LaunchError, match="the agent of node 1 ended with exit code 3 before it was ready"
    ):
        Session(4, nodes=2, preload=["fragile"])
    assert_nothing_left(before)


def test_close_and_a_killed_kernel_leave_nothing() -> None:
    before = traces()
    code = """
    import sys, time, torch
    from distsession import Session
    session = Session(4, nodes=2)
    session.push(x=torch.ones(1_000_000))
    print("ready", flush=True)
    session[2:].push(x=torch.ones(200_000_000))
    time.sleep(60)
    """
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.kill()
        process.wait()
        process.stdout.close()
        assert_nothing_left(before)
    with Session(4, nodes=2) as session:
        session.push(x=torch.ones(LARGE))
    assert_nothing_left(before)


def test_three_nodes_of_one_rank(start: Callable[..., Session]) -> None:
    session = start(nodes=3)
    session.push(x=torch.arange(LARGE))
    assert all(torch.equal(value, torch.arange(LARGE)) for value in session.pull("x").values())
    session.scatter("y", torch.arange(LARGE))
    assert torch.equal(session.gather("y"), torch.arange(LARGE))


def test_no_socket_of_a_relay_is_open_to_others(four: Session) -> None:
    folder = Path(four.launcher.folder)
    assert folder.stat().st_mode & 0o077 == 0
    for process in processes(four).values():
        listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening == []
        paths = [c.laddr for c in process.net_connections("unix") if c.laddr]
        assert all(str(path).startswith(str(folder)) for path in paths)


# --- check="strict" over nodes that have boards of their own --------------------------------------


@pytest.fixture(scope="module")
def strict_apart() -> Iterator[Session]:
    with apart(4, check="strict", hang_grace=0.5) as session:
        yield session


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
def test_strict_ranks_of_several_nodes_meet_before_each_operation(
    strict_apart: Session, name: str
) -> None:
    call = {
        "all_reduce": "dist.all_reduce(t)",
        "broadcast": "dist.broadcast(t, 3)",
        "all_gather": "dist.all_gather([torch.empty(4) for _ in range(4)], t)",
    }[name]
    strict_apart.execute(f"t = torch.ones(4)\nfor _ in range(20): {call}")
    assert reduced(strict_apart) == [4.0] * 4


def test_strict_ranks_of_several_nodes_alter_nothing_where_they_differ(
    strict_apart: Session,
) -> None:
    # It is said soon after two differ. On a busy machine others may not have come by then.
    named = r"(?=.*ranks? (0-1|0|1)\b.* sum)(?=.*ranks? (2-3|2|3)\b.* max).* called all_reduce with"
    strict_apart.execute("t = torch.ones(4) * (1 + rank)")
    for _ in range(3):
        with pytest.raises(RunError, match=named):
            strict_apart.execute(
                "dist.all_reduce(t, op=dist.ReduceOp.MAX if rank > 1 else dist.ReduceOp.SUM)"
            )
    assert [float(t[0]) for t in strict_apart.pull("t").values()] == [1.0, 2.0, 3.0, 4.0]
    assert reduced(strict_apart) == [4.0] * 4


def test_a_strict_rank_that_others_of_another_node_miss_is_named(strict_apart: Session) -> None:
    with pytest.raises(
        CollectiveHangError, match=r"rank 2 did not come to all_reduce #\d+ .* ranks 0-1,3 wait"
    ):
        strict_apart.execute("if rank != 2: dist.all_reduce(torch.ones(4))")
    assert reduced(strict_apart) == [4.0] * 4


def test_a_stop_frees_strict_ranks_that_wait_for_another_node(strict_apart: Session) -> None:
    strict_apart.execute("kept = rank")
    code = "import time\nif rank > 1: time.sleep(60)\ndist.all_reduce(torch.ones(4))"
    thread = stop_when(lambda: "wait in all_reduce" in repr(strict_apart.diagnose()))
    with pytest.raises(RunInterrupt):
        strict_apart.execute(code)
    thread.join()
    assert list(strict_apart.pull("kept").values()) == [0, 1, 2, 3]
    assert reduced(strict_apart) == [4.0] * 4


def test_strict_subgroups_over_nodes_meet_too(strict_apart: Session) -> None:
    strict_apart.execute(
        "group = dist.new_group([1, 2])\nt = torch.ones(1)\n"
        "if rank in (1, 2): dist.all_reduce(t, group=group)"
    )
    assert [float(t) for t in strict_apart.pull("t").values()] == [1.0, 2.0, 2.0, 1.0]
    strict_apart.execute("t = torch.ones(1) * (1 + rank)")
    with pytest.raises(RunError, match=r"rank 1 called .* rank 2"):
        strict_apart.execute(
            "op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM\n"
            "if rank in (1, 2): dist.all_reduce(t, op=op, group=group)"
        )
    assert [float(t) for t in strict_apart.pull("t").values()] == [1.0, 2.0, 3.0, 4.0]
    assert reduced(strict_apart) == [4.0] * 4
