"""Nothing is ever stuck: stop, failures, deadlocks, deaths, and what lives on after them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from distsession import RunError, RunInterrupt, Session, errors
from distsession.kernel import watchdog
from tests.backends import GLOO, LEAVES_MESSAGE, Backend, only, places
from tests.integration.conftest import Recorder
from tests.until import LIMIT_S, Press, press_at, until, until_busy, until_settled

SETUP = """
import os, time, ctypes, asyncio
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
number = 40 + rank
x = torch.ones(4) * (rank + 1)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def loss():
    return model(torch.ones(1, 4)).sum()

def step():
    optim.zero_grad()
    loss().backward()
    optim.step()

def state():
    momenta = [s["momentum_buffer"].tolist() for s in optim.state.values()]
    return number, x.tolist(), [p.tolist() for p in model.parameters()], momenta

for _ in range(3):
    step()
"""


class Cluster:
    """A session with state, and the two questions that follow every scenario."""

    def __init__(self, ranks: int, backend: Backend = GLOO, **options: Any):
        self.output = Recorder()
        self.backend = backend
        self.session = backend.session(ranks, output=self.output, threads=1, **options)
        self.ranks = ranks
        self.prepare()

    def prepare(self) -> None:
        self.session.execute(SETUP)
        self.state = dict(self.session.evaluate("state()"))

    def check(self) -> None:
        """The next collective is right, and all state is what it was."""
        sums = self.session.execute(
            "probe = torch.ones(2) * (rank + 1)\ndist.all_reduce(probe)\nprobe.tolist()", fetch=True
        )
        assert sums is not None
        assert set(map(tuple, sums.values())) == {(self.ranks * (self.ranks + 1) / 2,) * 2}
        assert dict(self.session.evaluate("state()")) == self.state

    def stop(
        self,
        code: str,
        *,
        press: Callable[[], Any] | None = None,
        when: Callable[[], object] | None = None,
    ) -> str:
        """Run code, stop it once it gets no further, and give the message."""
        code = self.backend.program(code)
        with Press(self.session, press or self.session.interrupt, when) as pressed:
            with pytest.raises(RunInterrupt) as caught:
                self.session.execute(code, label="In[7]")
            assert time.monotonic() - pressed.pressed_at < HANG_S
        return re.sub(r" \(for \d+ s\)", "", str(caught.value))  # longer on a busy machine


HANG_S = 30
"""Tells a Stop that works from one after which ranks sleep on, for a minute."""


def wait_for_file(path: str) -> str:
    """On a rank."""
    while not os.path.exists(path):
        time.sleep(0.02)
    return "done"


def press_stop() -> None:
    """What Jupyter does."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module", params=places(gloo=(2, 4), standin=(4,)))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param.ranks, request.param.backend, hang_grace=0.5)
    yield made
    made.session.close()


# --- 1: Stop --------------------------------------------------------------------------------------

BLOCKED = {
    "all_reduce": "dist.all_reduce(x.clone()); FINISH",
    "barrier": "dist.barrier()",
    "monitored_barrier": pytest.param(
        "dist.monitored_barrier()", marks=only("gloo", "torch has it for gloo alone")
    ),
    "recv": pytest.param("dist.recv(torch.ones(1), src=1); FINISH", marks=LEAVES_MESSAGE),
    "new_group": "dist.new_group([0, 1])",
    "an async work's wait": "dist.all_reduce(x.clone(), async_op=True).wait(); FINISH",
    "a backward of DistributedDataParallel": "loss().backward(); FINISH",
    "an object collective": "dist.all_gather_object([None] * world_size, rank)",
}


@pytest.mark.parametrize("code", BLOCKED.values(), ids=BLOCKED)
def test_stop_ends_a_wait_for_a_rank_that_never_comes(cluster: Cluster, code: str) -> None:
    text = cluster.stop(f"if rank == 0:\n    {code}\nelse:\n    time.sleep(60)")
    is_pair = cluster.ranks == 2 or "src=1" in code
    others = "rank 1, which runs" if is_pair else "ranks 1-3, which run"
    if "backward" not in code:  # gradients differ from rank to rank now
        assert re.search("rank 0 waits (for its device )?in", text)
        assert f"at In[7] line 2 for {others}" in text
        assert "In[7] line 4" in text
    assert "connected anew" in text
    cluster.check()


STUCK = {
    "a receive from anyone": pytest.param(
        "dist.recv(torch.ones(1)) if rank else time.sleep(60)",
        marks=only("gloo", "NCCL receives from nobody in particular"),
    ),
    "the store": "dist.distributed_c10d._get_default_store().get('never set')",
    "a Python loop": "while True: pass",
    "a sleep": "time.sleep(60)",
    "an await": "await asyncio.sleep(60)",
    "an await that nothing wakes": "await asyncio.Event().wait()",
}


@pytest.mark.parametrize("code", STUCK.values(), ids=STUCK)
def test_stop_ends_what_all_ranks_are_stuck_in(cluster: Cluster, code: str) -> None:
    assert "was stopped" in cluster.stop(code)
    cluster.check()


def test_stop_by_a_signal_says_who_waited_where(cluster: Cluster) -> None:
    code = "if rank != 1:\n    dist.all_reduce(x.clone()); FINISH\nelse:\n    time.sleep(60)"
    text = cluster.stop(code, press=press_stop)
    waiting = "rank 0" if cluster.ranks == 2 else "ranks 0,2-3"
    assert f"{waiting} {cluster.backend.waits(cluster.ranks - 1)} all_reduce #" in text
    assert "(float32 [4], sum) at In[7] line 2 for rank 1, which runs In[7] line 4" in text
    cluster.check()


def test_stop_reaches_a_rank_that_swallows_errors(cluster: Cluster) -> None:
    cluster.stop(
        "while True:\n"
        "    try:\n"
        "        dist.all_reduce(x.clone()) if rank == 0 else time.sleep(60); FINISH\n"
        "    except RuntimeError:\n"
        "        pass"
    )
    cluster.check()


def test_stop_when_nothing_runs_and_stop_again_are_harmless(cluster: Cluster) -> None:
    assert cluster.session.interrupt() is False

    def twice() -> None:
        press_stop()
        time.sleep(0.02)
        press_stop()

    pressing = Press(cluster.session, twice)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.session.execute("dist.barrier() if rank == 0 else time.sleep(60)")
    with contextlib.suppress(KeyboardInterrupt):  # the second may come a little later
        pressing.join()  # by then it has come: Linux gives it to the main thread first
    cluster.check()


ENDLESS = (
    "dist.barrier() if rank == 0 else time.sleep(60)",
    "time.sleep(60)",
    "while True: dist.all_reduce(torch.ones(2)); FINISH",
)


def test_stop_is_pressed_at_any_moment_and_again(cluster: Cluster) -> None:
    """While the request is sent, begun, stopped, and while the group is connected anew."""
    dice = random.Random(0)
    for n in range(45):
        pauses = [dice.uniform(0, 0.03) for _ in range(dice.randint(1, 3))]

        def work(code: str = ENDLESS[n % 3]) -> None:
            cluster.session.execute(cluster.backend.program(code))
            pytest.fail("it ended by itself")

        press_at(pauses, press_stop, work)
        # Who presses twice does not wait for the ranks, which come back a moment later.
        until(lambda: not cluster.session.channel.pending())
        cluster.session.run(int)
    cluster.check()


def test_stop_leaves_gradients_on_and_the_default_device(cluster: Cluster) -> None:
    """torch switches both in contexts, which a Stop may come to as they are entered or left."""
    session, dice = cluster.session, random.Random(0)
    seen = "torch.is_grad_enabled(), torch._C._len_torch_function_stack()"
    before = session.evaluate(seen)
    code = (
        "image = torch.ones(1, 1, 2, 2)\n"
        "while True:\n"
        "    with torch.no_grad():\n"
        "        torch.nn.functional.unfold(image, 1)"
    )
    for _ in range(15):
        is_over = threading.Event()

        def press(is_over: threading.Event = is_over) -> None:
            while not is_over.wait(dice.uniform(0.005, 0.03)):
                session.interrupt()

        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(RunInterrupt):
            session.execute(code)
        is_over.set()
        pressing.join()
        assert session.evaluate(seen) == before
    cluster.check()


def test_what_waits_behind_a_stopped_run_is_not_run_and_says_so(cluster: Cluster) -> None:
    session = cluster.session
    first = session.submit(time.sleep, 60)
    later = session.submit(exec, "globals()['surprise'] = 1")
    until_busy(session)
    session.recovery.stop(session.channel.pending()[0])
    with pytest.raises(RunInterrupt):
        first.result(LIMIT_S)
    with pytest.raises(RunError, match="was not run"):
        later.result(LIMIT_S)
    assert session.evaluate("'surprise' in globals()")[0] is False
    cluster.check()


def test_a_run_that_is_stopped_before_it_begins_leaves_the_one_before_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    before = cluster.session.submit(wait_for_file, str(go))
    is_behind = lambda: len(cluster.session.channel.pending()) == 2  # noqa: E731
    text = cluster.stop("surprise = 1", press=press_stop, when=lambda: until(is_behind))
    assert "before it began" in text
    go.touch()
    assert before.result(LIMIT_S)[0] == "done"
    assert cluster.session.evaluate("'surprise' in globals()")[0] is False
    cluster.check()


def test_a_stop_just_as_a_rank_begins_frees_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others have not begun, and are not to."""
    session = cluster.session
    launcher, board = session.launcher, session.launcher.board
    assert board is not None
    go = tmp_path / "go"
    before = session[1:].submit(wait_for_file, str(go))
    pid = session.infos[0].pid
    refuse = launcher.refuse

    def begin_first(requests: Sequence[int]) -> None:
        os.kill(pid, signal.SIGCONT)
        until(lambda: any(op.is_waiting or op.is_enqueued for op in board.regions[0].operations()))
        refuse(requests)

    monkeypatch.setattr(launcher, "refuse", begin_first)
    os.kill(pid, signal.SIGSTOP)
    is_sent = lambda: len(session.channel.pending()) == 2  # noqa: E731
    text = cluster.stop("dist.barrier()", press=press_stop, when=lambda: until(is_sent))
    assert "what it waited for goes on" not in text
    assert "rank 0 waits in barrier" in text
    go.touch()
    before.result(LIMIT_S)
    cluster.check()


def test_a_stop_of_what_is_done_already_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = cluster.session
    launcher = session.launcher
    pids = [info.pid for info in session.infos]
    refuse = launcher.refuse

    def end_first(requests: Sequence[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        (pending,) = session.channel.pending()
        until(lambda: not pending.missing)
        refuse(requests)

    monkeypatch.setattr(launcher, "refuse", end_first)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    is_sent = lambda: session.channel.pending()  # noqa: E731
    text = cluster.stop("late = rank", press=press_stop, when=lambda: until(is_sent))
    assert "was stopped when it was done already: the variables are set" in text
    assert list(session.pull("late").values()) == list(session.ranks)
    cluster.check()


def test_a_stop_while_a_run_is_sent_reaches_all_ranks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = cluster.session.channel
    send, presses = channel._send_request, [press_stop]

    def press_once(*args: Any, **kwargs: Any) -> None:
        send(*args, **kwargs)
        if presses:
            presses.pop()()

    monkeypatch.setattr(channel, "_send_request", press_once)
    with pytest.raises(RunInterrupt, match="was stopped"):
        cluster.session.execute("dist.barrier() if rank == 0 else time.sleep(60)")
    cluster.check()


def test_a_second_stop_during_the_first_does_not_leave_ranks_where_they_are(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = cluster.session.recovery.stop

    def press_again(*args: Any) -> None:
        press_stop()
        stop(*args)

    monkeypatch.setattr(cluster.session.recovery, "stop", press_again)
    code = "dist.barrier() if rank == 0 else time.sleep(60)"
    assert "was stopped" in cluster.stop(code, press=press_stop)
    assert cluster.session.evaluate("number", timeout=HANG_S)[0] == 40
    cluster.check()


def test_stop_frees_ranks_that_wait_in_another_group_than_the_default_one(cluster: Cluster) -> None:
    cluster.stop(
        "group = dist.new_group()\n"
        "dist.all_reduce(x.clone(), group=group); FINISH\n"
        "if rank == 1: time.sleep(60)\n"
        "dist.all_reduce(x.clone(), group=group); FINISH"
    )
    cluster.check()


def test_a_rank_that_holds_the_interpreter_is_named_and_can_be_replaced(cluster: Cluster) -> None:
    text = cluster.stop(
        "ctypes.PyDLL(None).sleep(30) if rank == 1 else dist.barrier()", press=press_stop
    )
    assert "C code" in text
    assert "session.restart([1])" in text
    assert cluster.session[0].evaluate("number")[0] == 40
    with pytest.raises(RunError, match="not connected"):
        cluster.session[0].execute("dist.barrier()")
    cluster.session.restart([1])
    kept = cluster.session[0].evaluate("state()")[0]
    assert kept == cluster.state[0]
    cluster.prepare()
    cluster.check()


# --- 2 and 3: failures and deadlocks --------------------------------------------------------------

FAILURES = {
    "a collective": "dist.all_reduce(x.clone()); FINISH",
    "an asynchronous one": "dist.all_reduce(x.clone(), async_op=True).wait(); FINISH",
    "a backward": "loss().backward(); FINISH",
    "a first one of its kind": (
        "dist.all_gather_into_tensor(torch.ones(2 * world_size), torch.ones(2)); FINISH"
    ),
    "a receive": pytest.param("dist.recv(torch.ones(1), src=1); FINISH", marks=LEAVES_MESSAGE),
    "a new group": "dist.new_group(list(range(world_size)))",
}


@pytest.mark.parametrize("code", FAILURES.values(), ids=FAILURES)
def test_a_failing_rank_frees_the_others(cluster: Cluster, code: str) -> None:
    code = cluster.backend.program(code)
    with pytest.raises(RunError) as caught:
        cluster.session.execute(f"if rank == 1: raise ValueError('boom')\n{code}", label="In[8]")
    error = caught.value
    assert isinstance(error.first, ValueError)
    assert str(error).startswith("ValueError on rank 1 at In[8] line 1: boom")
    shown = "\n".join(error._render_traceback_())
    assert shown.index("boom") < shown.index("waited in")
    assert len([line for line in shown.splitlines() if "waited in" in line]) == 1
    assert all(
        isinstance(error.by_rank[r], errors.CollectiveError) for r in error.by_rank if r != 1
    )
    cluster.check()


ON_DEVICE = only("device", "gloo puts nothing together on a device")
LEFT_OPEN = {
    "on all ranks": "with dist._coalescing_manager():\n    dist.all_reduce(x.clone()); {error}",
    "on a device": pytest.param(
        "with dist._coalescing_manager(device=device):\n    dist.all_reduce(x.clone()); {error}",
        marks=ON_DEVICE,
    ),
    "on a device, on one rank": pytest.param(
        "with dist._coalescing_manager(device=device):\n"
        "    dist.all_reduce(x.clone())\n    if rank == 1: {error}",
        marks=ON_DEVICE,
    ),
    "on messages that nobody takes": (
        "ends = dist.P2POp(dist.isend, torch.ones(300_000), (rank + 1) % world_size), "
        "dist.P2POp(dist.irecv, torch.ones(500, 600).t(), (rank - 1) % world_size)\n"
        "dist.batch_isend_irecv(list(ends))"
    ),
}


@pytest.mark.parametrize("code", LEFT_OPEN.values(), ids=LEFT_OPEN)
def test_a_block_of_operations_that_an_error_leaves_is_over(cluster: Cluster, code: str) -> None:
    """torch would put the operations of the next cells into it, and never do them."""
    if cluster.backend.name == "nccl" and ".t()" in code:
        pytest.skip("NCCL takes what is not contiguous as a message")
    with pytest.raises(RunError, match=r"ValueError|contiguous"):
        cluster.session.execute(code.replace("{error}", "raise ValueError(rank)"))
    cluster.check()


def test_a_wait_that_nobody_can_end_ends_by_itself(cluster: Cluster) -> None:
    with pytest.raises(errors.CollectiveHangError) as caught:
        cluster.session.execute(
            cluster.backend.program("if rank != 1:\n    dist.all_reduce(x.clone()); FINISH"),
            label="In[9]",
        )
    assert "rank 1 did not come to all_reduce #" in str(caught.value)
    assert "at In[9] line 2: it finished its part without it" in str(caught.value)
    cluster.check()


@only("gloo", "all have begun both operations, and nobody knows how a device takes them")
def test_ranks_that_wait_for_each_other_are_freed(cluster: Cluster) -> None:
    with pytest.raises(errors.CollectiveMismatchError, match="each waits for the other"):
        cluster.session.execute(
            cluster.backend.program(
                "g = dist.new_group(list(range(world_size)))\n"
                "first, second = (None, g) if rank == 0 else (g, None)\n"
                "dist.all_reduce(x.clone(), group=first)\n"
                "dist.all_reduce(x.clone(), group=second); FINISH"
            ),
            timeout=10,
        )
    cluster.check()


def test_a_slow_rank_is_never_cut_off_and_a_notice_says_who_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_AFTER_S", 0.5)
    monkeypatch.setattr(watchdog, "NOTICE_EVERY_S", 0.3)
    cluster.output.clear()
    go, told = tmp_path / "go", "for rank 1, which runs In[5] line 1"
    is_told = lambda: any(told in text for text in cluster.output.notices)  # noqa: E731
    with Press(cluster.session, go.touch, lambda: until(is_told)):
        cluster.session.execute(
            f"while rank == 1 and not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
            + cluster.backend.program("dist.all_reduce(x.clone()); FINISH"),
            label="In[5]",
        )
    cluster.check()


def test_a_rank_that_can_still_be_given_its_part_is_waited_for(cluster: Cluster) -> None:
    waiting = cluster.session[0].submit(dist.barrier)
    time.sleep(1.5)
    assert not waiting.done()
    cluster.session[1:].run(dist.barrier)
    assert waiting.result(LIMIT_S)[0] is None
    cluster.check()


def test_a_collective_that_other_ranks_were_not_asked_for_ends_by_itself(cluster: Cluster) -> None:
    with pytest.raises(errors.CollectiveHangError, match="no part in this run"):
        cluster.session[0].run(dist.barrier)
    cluster.check()


def test_an_operation_that_ran_out_of_time_leaves_a_working_group() -> None:
    made = Cluster(2, timeout=1.0, hang_grace=0)
    try:
        with pytest.raises(RunError) as caught:
            made.session.execute("dist.all_reduce(x.clone()) if rank == 0 else time.sleep(1.5)")
        assert isinstance(caught.value.first, errors.CollectiveHangError)
        made.check()
        with pytest.raises(RunError):
            made.session.execute("if rank == 0: dist.recv(torch.ones(1), src=1)")
        made.check()
    finally:
        made.session.close()


# --- 5: diagnose ----------------------------------------------------------------------------------


def in_background(session: Session, code: str) -> concurrent.futures.Future[Any]:
    """Run a cell in a thread of its own, as another notebook cell would."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(session.execute, code, label="In[6]")
    pool.shutdown(wait=False)
    until_settled(session)
    return future


def test_diagnose_says_what_each_rank_does(cluster: Cluster) -> None:
    session = cluster.session
    assert "idle" in repr(session.diagnose())
    run = in_background(session, "dist.barrier() if rank == 0 else time.sleep(60)")
    text = repr(session.diagnose())
    assert "rank 0 waits in barrier #" in text
    assert "running In[6] line 1" in text
    assert "<table>" in session.diagnose()._repr_html_()
    assert "time.sleep(60)" in repr(session.diagnose(stacks=True))
    assert session.interrupt()
    with pytest.raises(RunInterrupt):
        run.result(LIMIT_S)
    cluster.check()


def test_diagnose_knows_a_stopped_process(cluster: Cluster) -> None:
    run = in_background(cluster.session, "dist.barrier() if rank == 0 else time.sleep(60)")
    pid = cluster.session.infos[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: "SIGSTOP" in repr(cluster.session.diagnose()))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert cluster.session.interrupt()
    with pytest.raises(RunInterrupt):
        run.result(LIMIT_S)
    cluster.check()


def test_diagnose_knows_a_rank_that_holds_the_interpreter(cluster: Cluster) -> None:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    run = pool.submit(cluster.session.execute, "if rank == 1: ctypes.PyDLL(None).sleep(6)")
    pool.shutdown(wait=False)
    until(lambda: run.done() or "not answering" in repr(cluster.session.diagnose()))
    assert not run.done()
    run.result(LIMIT_S)
    cluster.check()


@only("gloo", "that a rank waits for its device is its own word")
def test_a_rank_that_waits_holds_nothing_even_if_it_answers_late(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = cluster.session
    run = in_background(session, "dist.barrier() if rank == 0 else time.sleep(60)")
    with monkeypatch.context() as patched:
        patched.setattr(session.recovery.launcher, "request_stacks", lambda ranks, timeout: {})
        reports = session.recovery.reports(ask=True)
    states = [report.state for report in reports.values()]
    assert states == ["running", *["silent"] * (cluster.ranks - 1)]
    assert reports[0].place.endswith("line 1")
    assert session.interrupt()
    with pytest.raises(RunInterrupt):
        run.result(LIMIT_S)
    cluster.check()


# --- 6: deaths ------------------------------------------------------------------------------------

DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "an exit": ("os._exit(3)", "exit code 3"),
    "a segfault": ("ctypes.string_at(0)", "killed by SIGSEGV"),
}


@pytest.mark.parametrize(("code", "how"), DEATHS.values(), ids=DEATHS)
def test_a_dead_rank_is_named_and_replaced(cluster: Cluster, code: str, how: str) -> None:
    session = cluster.session
    pid = session.infos[1].pid
    before = session[0].evaluate("id(model)")[0]
    with pytest.raises(RunError) as caught:
        session.execute(
            f"if rank == 1:\n    print('last words', flush=True)\n    {code}\n"
            + cluster.backend.program("dist.all_reduce(x.clone()); FINISH")
        )
    assert isinstance(caught.value.first, errors.EngineDiedError)
    shown = "\n".join(caught.value._render_traceback_())
    assert f"rank 1 (pid {pid})" in shown
    assert how in shown
    assert "last words" in shown
    assert "session.restart([1])" in session.status()
    with pytest.raises(RunError, match="rank 1"):
        session[0].execute("dist.barrier()")
    for _ in range(2):  # what the others have can be had before that rank is replaced
        assert session[0].pull("x")[0].tolist() == cluster.state[0][1]
        assert session[0].evaluate("number")[0] == 40
    session.restart([1], restore=["model", "optim", "x", "loss", "state"])
    shared = session[1].evaluate(
        "optim.param_groups[0]['params'][0] is next(model.parameters())", timeout=LIMIT_S
    )
    assert shared[1] is True
    session[1].execute("number = 41\nx = x * 0 + 2\nimport os, time, ctypes, asyncio")
    assert session[0].evaluate("id(model)")[0] == before
    cluster.check()
    session.execute("optim.zero_grad(); loss().backward(); optim.step()")
    same = session.evaluate("[p.tolist() for p in model.parameters()]")
    assert len({repr(value) for value in same.values()}) == 1
    cluster.prepare()


LOST = """
w = torch.arange(3.) + 5
store = dist.distributed_c10d._get_default_store()
if rank == world_size - 1:
    store.wait(["lost"])  # the others are in it, and one of them has no device any more
t = torch.ones(300_000)
dist.all_reduce(t)
if rank == 1:
    BREAK
    store.set("lost", "")
t.sum().item()
"""


@only("device", "the CPU is lost with its process alone")
def test_a_rank_that_loses_its_device_in_a_collective_is_named_and_replaced(
    cluster: Cluster,
) -> None:
    session = cluster.session
    session.execute("dist.all_reduce(x.clone()); torch.accelerator.synchronize()")
    with pytest.raises(RunError) as caught:
        session.execute(LOST.replace("BREAK", cluster.backend.break_device), label="In[7]")
    assert caught.value.first_rank == 1
    assert re.search(r"^\w+Error on rank 1 at In\[7\] line 1[12]: ", str(caught.value))
    text = "\n".join(caught.value._render_traceback_())
    assert re.search(r"The device \w+:\d of rank 1 is lost to its process", text)
    assert "session.restart([1]) replaces the rank" in text
    with pytest.raises(RunError, match=r"session\.restart\(\[1\]"):
        session.execute("dist.barrier()")
    session.restart([1], restore=["w", "model", "optim", "x", "loss", "state"])
    found = session.evaluate("(w.tolist(), w.device == device)")
    assert dict(found) == dict.fromkeys(session.ranks, ([5.0, 6.0, 7.0], True))
    session[1].execute("number = 41\nx = x * 0 + 2\nimport os, time, ctypes, asyncio")
    cluster.check()
    session.execute("optim.zero_grad(); loss().backward(); optim.step()")
    cluster.prepare()


def test_a_rank_that_dies_idle_is_replaced(cluster: Cluster) -> None:
    session = cluster.session
    os.kill(session.infos[0].pid, signal.SIGKILL)
    until(lambda: "dead" in session.status())
    with pytest.raises(errors.EngineDiedError, match="rank 0"):
        session.run(lambda: None)
    assert session[1].evaluate("number")[1] == 41
    session.restart([0])
    cluster.prepare()
    cluster.check()


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("modle", "name 'modle' is not defined. Did you mean: 'model'?"),
        (["model", "modle"], "name 'modle' is not defined"),
        (["number", "model.wieght"], "wieght"),
        (["number", "lock"], "lock cannot be sent"),
        ("number + 1", "no name of a variable"),
    ],
)
def test_nothing_is_replaced_where_something_cannot_be_restored(
    cluster: Cluster, names: str | list[str], why: str
) -> None:
    session, before = cluster.session, cluster.session.infos
    session.execute("import threading; lock = threading.Lock()")
    with pytest.raises(RunError, match=re.escape(why)) as raised:
        session.restart([1], restore=names)
    assert "No rank was replaced." in raised.value._render_traceback_()
    assert session.infos == before
    cluster.check()


def test_nothing_is_replaced_where_no_rank_stays_to_restore_from(cluster: Cluster) -> None:
    with pytest.raises(errors.SessionStateError, match="none does"):
        cluster.session.restart(restore="number")
    cluster.check()


def test_what_fresh_ranks_cannot_take_is_said(cluster: Cluster) -> None:
    session, before = cluster.session, cluster.session.infos
    session[0].execute(
        "import sys, types\n"
        "only_here = sys.modules['only_here'] = types.ModuleType('only_here')\n"
        "exec('class Thing: pass', vars(only_here))\n"
        "thing = only_here.Thing()"
    )
    with pytest.raises(RunError, match="only_here") as raised:
        session.restart([1], restore=["number", "thing"])
    told = raised.value._render_traceback_()[-1]
    assert told == "rank 1 has a fresh process, without number, thing."
    assert session.infos[0].pid == before[0].pid
    assert session.infos[1].pid != before[1].pid
    cluster.prepare()
    cluster.check()


def test_a_busy_survivor_is_not_torn_away_by_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = cluster.session[0].submit(wait_for_file, str(go))
    until(lambda: cluster.session.channel.is_busy(0))
    with pytest.raises(errors.SessionStateError, match="rank 0 still runs something"):
        cluster.session.restart([1])
    go.touch()
    assert run.result(LIMIT_S)[0] == "done"
    cluster.check()


@pytest.mark.parametrize("restore", [(), "number"])
def test_a_restart_that_is_refused_ends_nothing(
    cluster: Cluster, tmp_path: Path, restore: str
) -> None:
    session, go, before = cluster.session, tmp_path / "go", cluster.session.infos

    def meet(path: str) -> list[float]:
        for _ in range(3):
            dist.barrier()
        while not os.path.exists(path):
            time.sleep(0.01)
        total = torch.ones(2)
        dist.all_reduce(total)
        values: list[float] = total.tolist()
        return values

    run = session.submit(meet, str(go))
    until_busy(session)
    for _ in range(3):
        with pytest.raises(errors.SessionStateError, match=r"still runs? something"):
            session.restart([0], restore=restore)
        with pytest.raises(errors.SessionStateError, match="still run something"):
            session.reconnect()
    assert not session.launcher.is_broken
    go.touch()
    ranks = float(session.world_size)
    assert dict(run.result(LIMIT_S)) == {rank: [ranks, ranks] for rank in session.ranks}
    assert session.infos == before
    cluster.check()


def test_a_restart_is_refused_first_where_a_rank_is_stopped(cluster: Cluster) -> None:
    session, before = cluster.session, cluster.session.infos
    os.kill(session.infos[0].pid, signal.SIGSTOP)
    until(lambda: session.launcher.process_state(0) == "T")
    try:
        for refused in (lambda: session.restart([1], restore="number"), session.reconnect):
            with pytest.raises(errors.SessionStateError, match="stopped by SIGSTOP"):
                refused()
    finally:
        os.kill(session.infos[0].pid, signal.SIGCONT)
    assert session.infos == before
    assert not session.launcher.is_broken
    cluster.check()


def test_a_run_of_replaced_ranks_alone_keeps_no_rank(cluster: Cluster) -> None:
    session = cluster.session
    run = session[1].submit(time.sleep, 60)
    until(lambda: session.channel.is_busy(1))
    session.restart([1], restore=["number"])
    with pytest.raises((RunError, errors.EngineDiedError)):
        run.result(LIMIT_S)
    cluster.prepare()
    cluster.check()


def test_the_end_of_the_agent_is_said_and_restart_brings_all_back(cluster: Cluster) -> None:
    agent = psutil.Process(cluster.session.infos[0].pid).ppid()
    os.kill(agent, signal.SIGKILL)
    with pytest.raises((errors.EngineDiedError, RunError), match="agent"):
        cluster.session.run(time.sleep, 5)
    assert "agent is gone" in cluster.session.status()
    cluster.session.restart()
    cluster.prepare()
    cluster.check()


def test_the_end_of_ipyparallels_controller_is_said_and_restart_brings_it_back() -> None:
    made = Cluster(2)
    try:
        session = made.session
        assert session.client.ids == [0, 1]
        controller = session.launcher._registration.controller._cluster.controller.process
        os.killpg(controller.pid, signal.SIGKILL)
        until(lambda: "controller has died" in session.status())
        made.check()
        with pytest.raises(errors.LaunchError, match=r"session\.restart\(\)"):
            session.client  # noqa: B018
        session.restart()
        assert session.client.ids == [0, 1]
        made.prepare()
        made.check()
    finally:
        made.session.close()


# --- 7: what lives on -----------------------------------------------------------------------------

GROUPS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import torch.distributed._functional_collectives as functional
pair = dist.new_group([0, 1])
mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
sharded = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Shard(1)])

def use():
    t = torch.ones(1)
    if rank < 2:
        dist.all_reduce(t, group=pair)
    total = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item()
    return t.item() if rank < 2 else 2.0, total, sharded.full_tensor().sum().item()
"""


def test_groups_and_meshes_live_on_after_a_rebuild(cluster: Cluster) -> None:
    session = cluster.session
    session.execute(GROUPS)
    expected = {rank: (2.0, float(cluster.ranks), 120.0) for rank in range(cluster.ranks)}
    assert dict(session.evaluate("use()")) == expected
    with pytest.raises(RunError):
        session.execute("if rank == 0: raise ValueError\nsharded.full_tensor()")
    assert dict(session.evaluate("use()")) == expected
    cluster.check()


def test_sharded_parameters_live_on_after_a_rebuild(cluster: Cluster) -> None:
    session = cluster.session
    session.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.manual_seed(1)\n"
        "sharded_model = fully_shard(torch.nn.Linear(8, 8))\n"
        "adam = torch.optim.Adam(sharded_model.parameters())\n"
        "def sharded_step():\n"
        "    adam.zero_grad()\n"
        "    total = sharded_model(torch.ones(2, 8)).sum()\n"
        "    total.backward()\n"
        "    adam.step()\n"
        "    return total.item()"
    )
    first = session.evaluate("sharded_step()")[0]
    with pytest.raises(RunError, match="waited in all_gather"):
        session.execute("if rank == 1: raise ValueError\nsharded_step()")
    second = session.evaluate("sharded_step()")
    assert len(set(second.values())) == 1
    assert second[0] < first
    cluster.check()


def test_gradients_of_sharded_parameters_outlive_a_rebuild(cluster: Cluster) -> None:
    """Those of a cell before, which the next one is to make a step of."""
    session = cluster.session
    session.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.manual_seed(1)\n"
        "graded = fully_shard(torch.nn.Linear(8, 8))\n"
        "graded(torch.ones(2, 8)).sum().backward()"
    )
    gradients = "[p.grad.to_local().tolist() for p in graded.parameters()]"
    before = dict(session.evaluate(gradients))
    code = cluster.backend.program(
        "if rank == 1: raise ValueError\ndist.all_reduce(x.clone()); FINISH"
    )
    with pytest.raises(RunError, match="connected anew"):
        session.execute(code)
    assert dict(session.evaluate(gradients)) == before
    cluster.check()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13 cannot begin a pass anew"
)
@only("gloo", "a device goes on behind what is given up, also with the step; the error says so")
def test_sharded_parameters_live_on_after_a_pass_that_was_given_up(cluster: Cluster) -> None:
    session = cluster.session
    session.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)\n"
        "    def forward(self, x, fails):\n"
        "        hidden = self.first(x)\n"
        "        if fails: hidden.register_hook(fail)\n"
        "        return self.last(hidden)\n"
        "def fail(grad): raise ValueError\n"
        "def make():\n"
        "    torch.manual_seed(2)\n"
        "    net = Net()\n"
        "    fully_shard(net.first)\n"
        "    return fully_shard(net)\n"  # which has the other's parameters itself
        "def sharded_step(model, fails=False, fails_in_backward=False):\n"
        "    sgd = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "    sgd.zero_grad()\n"
        "    total = model(torch.ones(2, 8), fails_in_backward).sum()\n"
        "    if fails: raise ValueError\n"
        "    total.backward()\n"
        "    sgd.step()\n"
        "    return total.item()\n"
        "undisturbed, disturbed = make(), make()\n"
        "expected = [sharded_step(undisturbed) for _ in range(5)]\n"
        "found = [sharded_step(disturbed)]"
    )
    for who in ("rank == 1", "rank != 0"):
        for how in ("fails", "fails_in_backward"):
            with pytest.raises(RunError, match="ValueError"):
                session.execute(f"sharded_step(disturbed, {how}={who})")
            session.execute("found.append(sharded_step(disturbed))")
    assert dict(session.evaluate("found == expected")) == dict.fromkeys(session.ranks, True)
    cluster.check()


def test_a_group_that_a_replaced_rank_does_not_know_says_so(cluster: Cluster) -> None:
    session = cluster.session
    session.execute("pair = dist.new_group([0, 1])")
    session.restart([1])
    for call in (
        "dist.all_reduce(t, group=pair)",
        "dist.barrier(pair)",
        "dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1, pair)])",
    ):
        with pytest.raises(RunError, match=r"dist\.new_group\(\[0, 1\]\)"):
            session[0].execute(f"t = torch.ones(1); {call}")
    session.execute("pair = dist.new_group([0, 1])")
    total = session[:2].execute(
        "t = torch.ones(1); dist.all_reduce(t, group=pair); t.item()", fetch=True
    )
    assert total is not None
    assert dict(total) == {0: 2.0, 1: 2.0}
    cluster.prepare()
    cluster.check()


def test_groups_that_a_replaced_rank_does_not_know_can_be_left(cluster: Cluster) -> None:
    session = cluster.session
    session.execute("pair = dist.new_group([0, 1])\nother = dist.new_group([0, 1])")
    session.restart([1])
    session[0].execute("dist.destroy_process_group(pair)")
    session.execute("dist.destroy_process_group()")
    cluster.prepare()
    cluster.check()
