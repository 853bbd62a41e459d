"""What user code forks from a rank is a plain child: nothing of the rank acts in it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from distsession import RunInterrupt, Session, errors
from tests.integration.conftest import Recorder
from tests.until import Press, until, until_settled

pytestmark = pytest.mark.timeout(240)

SUM = "t = torch.ones(1) * (rank + 1); dist.all_reduce(t); t.item()"


def check(session: Session) -> None:
    """The ranks answer, their group works, and nobody of theirs is left."""
    sums = session.execute(SUM, fetch=True)
    assert sums is not None
    assert set(sums.values()) == {3.0}


def children(session: Session) -> list[psutil.Process]:
    """What the ranks have started, but for servers of multiprocessing, which stay."""
    found: list[psutil.Process] = []
    for info in session.infos:
        for process in psutil.Process(info.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "multiprocessing" not in " ".join(process.cmdline()):
                    found.append(process)
    return found


def none_left(session: Session) -> None:
    until(lambda: not children(session), "the end of what the ranks have started")


def until_started(session: Session, count: int) -> None:
    """Wait until each rank has started so many processes and gets no further."""
    pids = [info.pid for info in session.infos]
    until(lambda: all(len(psutil.Process(pid).children()) >= count for pid in pids))
    until_settled(session)


def press_stop() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def stop_after(session: Session, seconds: float) -> threading.Thread:
    """Press Stop so long after both ranks have begun."""
    board = session.launcher.board
    assert board is not None

    def wait() -> None:
        while not all(region.request for region in board.regions):
            time.sleep(0.01)
        time.sleep(seconds)
        press_stop()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


# --- what libraries do ----------------------------------------------------------------------------


def test_pools_in_a_loop(session: Session) -> None:
    session.execute(
        "import multiprocessing\n"
        "for _ in range(60):\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]",
        timeout=90,
    )
    check(session)
    none_left(session)


def test_a_pool_in_a_function(session: Session) -> None:
    def squares(number: int) -> list[int]:
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, range(-number, 0))

    assert session.run(squares, 3) == {0: [3, 2, 1], 1: [3, 2, 1]}
    none_left(session)


CONTEXTS = ("fork", "spawn", "forkserver")


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_executor_of_processes(session: Session, context: str) -> None:
    session.execute(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        f"context = multiprocessing.get_context({context!r})\n"
        "with ProcessPoolExecutor(2, mp_context=context) as executor:\n"
        "    assert list(executor.map(abs, range(-3, 0))) == [3, 2, 1]",
        timeout=90,
    )
    check(session)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_manager_and_a_process(session: Session, context: str) -> None:
    session.execute(
        "import multiprocessing\n"
        f"context = multiprocessing.get_context({context!r})\n"
        "with context.Manager() as manager:\n"
        "    box = manager.list()\n"
        "    process = context.Process(target=box.append, args=(7,))\n"
        "    process.start(); process.join()\n"
        "    assert process.exitcode == 0 and list(box) == [7]",
        timeout=90,
    )
    check(session)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_data_loader(session: Session, persistent: bool) -> None:
    session.execute(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        f"data = TensorDataset(torch.arange(8.0))\n"
        f"loader = DataLoader(data, 2, num_workers=2, persistent_workers={persistent})\n"
        "for _ in range(3):\n"
        "    assert sum(b.sum().item() for (b,) in loader) == 28\n"
        "del loader",
        timeout=90,
    )
    check(session)
    none_left(session)


def test_programs(session: Session, output: Recorder) -> None:
    session.execute(
        "import subprocess\n"
        "assert subprocess.run(['true'], preexec_fn=lambda: None).returncode == 0\n"
        "program = subprocess.Popen(['sleep', '60']); program.terminate()\n"
        "assert program.wait(10) == -15\n"
        "program = subprocess.Popen(['sleep', '60'], preexec_fn=lambda: None)\n"
        "program.terminate()\n"
        "assert program.wait(10) == -15\n"
        "_ = subprocess.run(['echo', 'from a program'])",
        timeout=60,
    )
    assert output.text(0) == "from a program\n"
    none_left(session)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is missing")
def test_datasets_map_in_processes(session: Session) -> None:
    session.execute(
        "import datasets\n"
        "made = datasets.Dataset.from_dict({'a': list(range(16))})\n"
        "made = made.map(lambda x: {'b': x['a'] * 2}, num_proc=2)\n"
        "assert made['b'][-1] == 30",
        timeout=90,
    )
    check(session)


# --- os.fork() ------------------------------------------------------------------------------------

ENDS = {
    "os._exit": ("os._exit(7)", 7),
    "sys.exit": ("sys.exit(7)", 7),
    "sys.exit with words": ("sys.exit('it has ended')", 1),
    "an error": ("raise ValueError('of a child')", 1),
    "the end of its code": ("pass", 0),
    "SIGTERM": ("os.kill(os.getpid(), 15); time.sleep(60)", -15),
    "SIGINT": ("os.kill(os.getpid(), 2); time.sleep(60)", 130),
}


@pytest.mark.parametrize("way", ["cell", "function"])
@pytest.mark.parametrize(("code", "expected"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_fork(
    session: Session, output: Recorder, code: str, expected: int, way: str
) -> None:
    text = (
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    {code}\n"
        "else:\n"
        "    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
    )
    if way == "cell":
        found = session.execute(f"{text}ended if pid else 'a child has answered'", fetch=True)
    else:

        def call(text: str) -> Any:
            names: dict[str, Any] = {}
            exec(text, names)
            return names["ended"] if names["pid"] else "a child has answered"

        found = session.run(call, text)
    assert found == {0: expected, 1: expected}
    if "words" in code or "it has ended" in code:
        assert "it has ended" in output.text(0, "stderr")
    if "ValueError" in code:
        assert output.text(1, "stderr").count("ValueError: of a child") == 1
        assert "rank.py" not in output.text(1, "stderr")
    check(session)
    none_left(session)


def test_a_fork_in_a_thread_and_a_fork_of_a_fork(session: Session) -> None:
    session.execute(
        "import os, signal, threading\n"
        "ends = []\n"
        "def begin():\n"
        "    while True:\n"
        "        try:\n"
        "            return os.fork()\n"
        "        except RuntimeError as error:  # not two at once where it is there\n"
        "            assert 'filelock' in str(error), error\n"
        "def fork():\n"
        "    pid = begin()\n"
        "    if pid == 0:\n"
        "        inner = begin()\n"
        "        if inner == 0:\n"
        "            os._exit(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)\n"
        "        status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])\n"
        "        os._exit(status + 10 * len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))\n"
        "    ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "threads = [threading.Thread(target=fork) for _ in range(8)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()\n"
        "fork()\n"
        "assert ends == [0] * 9, ends\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        timeout=60,
    )
    check(session)


def test_a_mask_and_a_handler_of_the_users_own_stay(session: Session) -> None:
    session.execute(
        "import os, signal\n"
        "own = lambda *_: os._exit(5)\n"
        "before = signal.signal(signal.SIGTERM, own)\n"
        "old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "    os._exit(mask == {signal.SIGTERM, signal.SIGUSR1}\n"
        "             and signal.getsignal(signal.SIGTERM) is own)\n"
        "ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "mask = signal.pthread_sigmask(signal.SIG_SETMASK, old)\n"
        "signal.signal(signal.SIGTERM, before)\n"
        "assert ended == 1 and mask == {signal.SIGTERM, signal.SIGUSR1}"
    )
    check(session)


def test_exit_functions_of_the_rank_are_not_run_by_a_fork_and_its_own_are(
    session: Session, output: Recorder
) -> None:
    session.execute(
        "import atexit, os, tempfile, weakref\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "weakref.finalize(thing, print, 'a finalizer of the rank')\n"
        "atexit.register(print, 'an exit function of the rank')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    atexit.register(print, 'its own exit function')\n"
        "    weakref.finalize(thing, print, 'its own finalizer')\n"
        "else:\n"
        "    _ = os.waitpid(pid, 0)\n"
        "    atexit.unregister(print)"
    )
    assert sorted(output.text(0).splitlines()) == ["its own exit function", "its own finalizer"]


def test_what_a_fork_writes_and_shows_is_output_of_the_cell(
    session: Session, output: Recorder
) -> None:
    """Also more than a rank may be ahead of the kernel by, for which a child cannot wait."""
    session.execute(
        "import os, sys\n"
        "from IPython.display import clear_output, display\n"
        "print('before')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for number in range(1000): display(number)\n"
        "    clear_output()\n"
        "    print('in between', file=sys.stderr)\n"
        "    for _ in range(40): sys.stdout.write('x' * (1 << 20))\n"
        "    os._exit(0)\n"
        "_ = os.waitpid(pid, 0)\n"
        "print('after')",
        timeout=60,
    )
    text = output.text(1)
    assert text.startswith("before\n0\n1\n2\n")
    assert text.count("x") == 40 << 20
    assert text.endswith("after\n")
    # From Python 3.12 on a fork of a process with threads warns, with the line that forks.
    warning = re.compile(r"In\[\d+\]:4: DeprecationWarning: .*\n  pid = os.fork\(\)\n")
    assert warning.sub("", output.text(1, "stderr")) == "in between\n"
    assert not output.displays(1)


def test_python_has_nothing_to_say_of_what_a_fork_has_of_its_rank(
    session: Session, output: Recorder
) -> None:
    session.execute(
        "import os, multiprocessing, warnings\n"
        "def work():\n"
        "    print('worked')\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('always')\n"
        "    process = multiprocessing.get_context('fork').Process(target=work)\n"
        "    process.start(); process.join()"
    )
    assert output.text(1) == "worked\n"
    assert "ResourceWarning" not in output.text(1, "stderr")


def test_a_fork_writes_while_another_thread_holds_the_streams_lock(session: Session) -> None:
    session.execute(
        "import os, threading, time\n"
        "stop = threading.Event()\n"
        "def chatter():\n"
        "    while not stop.is_set(): print('x', end='')\n"
        "thread = threading.Thread(target=chatter); thread.start()\n"
        "for _ in range(40):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        print('a child'); os._exit(0)\n"
        "    _ = os.waitpid(pid, 0)\n"
        "stop.set(); thread.join()",
        timeout=60,
    )
    check(session)


def test_a_fork_is_no_member_of_the_group_and_changes_nothing_that_others_read(
    session: Session, output: Recorder
) -> None:
    session.execute(
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: dist.all_reduce(torch.ones(1))\n"
        "    except RuntimeError as error: print(type(error).__name__, error)\n"
        "    try: dist.new_group([0, 1])\n"
        "    except RuntimeError as error: print('again')\n"
        "    os._exit(0)\n"
        "_ = os.waitpid(pid, 0)",
        timeout=60,
    )
    assert "CollectiveError this process was forked from rank 0 and is no member" in output.text(0)
    assert output.text(0).endswith("again\n")
    check(session)


def test_nobody_can_be_asked_from_a_fork(session: Session, output: Recorder) -> None:
    session.execute(
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    breakpoint()\n"
        "    try: input('name? ')\n"
        "    except EOFError as error: print(error)\n"
        "    os._exit(0)\n"
        "_ = os.waitpid(pid, 0)",
        timeout=60,
    )
    assert "breakpoint() at In[" in output.text(0)
    assert "a process that was forked from a rank cannot ask" in output.text(0)


def test_an_event_loop_in_a_fork(session: Session) -> None:
    session.execute(
        "import asyncio, os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(asyncio.run(asyncio.sleep(0.01, 7)))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "assert await asyncio.sleep(0.01, 8) == 8",
        timeout=60,
    )
    check(session)


def test_a_fork_in_px_ends_with_its_code(session: Session) -> None:
    view = session.client[:]
    view.execute("import os\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1])", block=True)
    check(session)
    none_left(session)


# --- Stop and the end of a session ----------------------------------------------------------------


@pytest.mark.parametrize("number", range(5))
def test_stop_in_the_midst_of_forks(session: Session, number: int) -> None:
    timer = stop_after(session, 0.3 + number * 0.011)
    with pytest.raises(RunInterrupt) as caught:
        session.execute(
            "import os\n"
            "while True:\n"
            "    pid = os.fork()\n"
            "    if pid == 0: os._exit(0)\n"
            "    _ = os.waitpid(pid, 0)"
        )
    timer.join()
    assert "was stopped" in str(caught.value)
    check(session)
    none_left(session)


WAITS = {
    "a program": "os.system('sleep 60')",
    "a shell escape": "!sleep 60",
    "a fork": "pid = os.fork() or (time.sleep(60), os._exit(0)); os.waitpid(pid, 0)",
    "a pool": "with multiprocessing.get_context('fork').Pool(2) as p: p.map(time.sleep, [60, 60])",
}


@pytest.mark.parametrize("code", WAITS.values(), ids=WAITS)
def test_stop_reaches_what_the_rank_waits_for(session: Session, code: str) -> None:
    session.execute("import multiprocessing, os, time")
    with Press(session, press_stop, lambda: until_started(session, 1)):  # noqa: SIM117
        with pytest.raises(RunInterrupt) as caught:
            session.execute(code)
    assert "was stopped" in str(caught.value)
    check(session)
    for process in children(session):  # a fork goes on where its rank has come back at once
        process.kill()


LOADER = """
import signal, time
from torch.utils.data import DataLoader, Dataset
class Stuck(Dataset):
    def __len__(self): return 8
    def __getitem__(self, number):
        {ignore}
        time.sleep(60)
loader = DataLoader(Stuck(), num_workers=2)
for _ in loader: pass
"""
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('ignores it', flush=True)"


def test_stop_ends_a_wait_for_a_stuck_worker(session: Session) -> None:
    with Press(session, press_stop, lambda: until_started(session, 2)):  # noqa: SIM117
        with pytest.raises(RunInterrupt) as caught:
            session.execute(LOADER.format(ignore="pass"))
    assert "was stopped" in str(caught.value)
    check(session)
    none_left(session)


def test_a_cell_after_a_stop_waits_for_a_worker_that_cannot_be_stopped(
    session: Session, output: Recorder
) -> None:
    """torch gives its workers five seconds each; the cell then runs, in a group that works."""

    def until_stuck() -> None:
        for rank in session.ranks:
            until(lambda rank=rank: output.text(rank).count("ignores it") >= 2)
        until_settled(session)

    output.clear()
    with Press(session, press_stop, until_stuck):  # noqa: SIM117
        with pytest.raises(RunInterrupt) as caught:
            session.execute(LOADER.format(ignore=IGNORED))
    assert "does not react, in __del__ (dataloader.py line" in str(caught.value)
    with pytest.raises(errors.RunTimeoutError, match=r"did not begin in time\. Ranks 0-1 have not"):
        session.execute("surprise = 1", timeout=1)
    is_told = lambda: any("have not come back" in n for n in output.notices)  # noqa: E731
    for press, text in (
        (press_stop, r"stopped before it began\. Ranks 0-1 have not come"),
        (session.interrupt, "stopped before it began"),
    ):
        output.clear()
        with Press(session, press, lambda: until(is_told)):  # noqa: SIM117
            with pytest.raises(RunInterrupt, match=text):
                session.execute("surprise = 1")
    output.clear()
    check(session)
    assert any("have not come back from a run that was stopped" in n for n in output.notices)
    assert output.notices[-1] == ""
    assert session.evaluate("'surprise' in globals()") == {0: False, 1: False}
    none_left(session)


@pytest.mark.parametrize("how", ["restart", "close", "SIGKILL"])
def test_forks_end_with_their_rank(start: Callable[..., Session], how: str) -> None:
    session = start(2, threads=1)
    session.execute(
        "import multiprocessing, os, signal, time\n"
        "if (child := os.fork()) == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(100); os._exit(0)\n"
        "pool = multiprocessing.get_context('fork').Pool(2)"
    )
    there = children(session)
    assert len(there) >= 6
    if how == "restart":
        session.restart()
    elif how == "close":
        session.close()
    else:
        for info in session.infos:
            os.kill(info.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(there, timeout=5)
    assert not alive


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_who_spawns_a_function_of_a_cell_is_told_what_to_do(
    start: Callable[..., Session], method: str
) -> None:
    session = start(1, threads=1)
    with pytest.raises(errors.RunError) as caught:
        session.execute(
            "import torch.multiprocessing as mp\n"
            "def train(rank, size):\n    raise ValueError('in the child')\n"
            f"mp.start_processes(train, args=(2,), nprocs=1, start_method={method!r})"
        )
    shown = "\n".join(caught.value._render_traceback_())
    hint = "The ranks are processes already: call train(rank, ...) itself"
    assert (hint in shown) == (method == "spawn")
    assert ("ProcessRaisedException" in shown) == (method == "fork")


# --- age ------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_a_thousand_forks_cost_no_descriptors_and_no_memory(start: Callable[..., Session]) -> None:
    session = start(2, threads=1)
    some = (
        "import os\n"
        "def some(number):\n"
        "    for _ in range(number):\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            print('a child'); os._exit(0)\n"
        "        assert os.waitpid(pid, 0)[1] == 0"
    )
    session.execute(some)
    session.execute("some(200)", timeout=300)
    assert session.client.ids == [0, 1]  # registering with ipyparallel takes descriptors

    def use() -> list[tuple[int, int, int]]:
        found = [psutil.Process(info.pid) for info in session.infos]
        return [(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in found]

    before = use()
    for _ in range(4):
        session.execute("some(200)", timeout=300)
    for (fds, threads, rss), (fds_now, threads_now, rss_now) in zip(before, use(), strict=True):
        assert fds_now <= fds + 1
        assert threads_now <= threads
        assert rss_now < rss + (8 << 20)
    check(session)
