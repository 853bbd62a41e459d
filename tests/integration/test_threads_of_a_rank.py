"""Two threads of a rank that use one group at once are named, with what they are in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from distsession import RunError, RunInterrupt, Session, errors
from distsession.protocol.cause import ONE_THREAD
from tests.integration.conftest import Recorder

SETUP = """
import threading, time
from concurrent.futures import ThreadPoolExecutor

def gather(group=None):
    parts = [torch.zeros(2) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    return [part.tolist() for part in parts]

def meet():
    dist.barrier()

def later(thread, seconds=0.3):
    timer = threading.Timer(seconds, thread.start)
    timer.start()
    return timer
"""
USE = "use the default group at once, for all_gather (float32 [2]) at In[1] line 7 and barrier at"


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def session(ranks: int) -> Iterator[Session]:
    """One of the test's own, for a thread may outlive the cell that has started it."""
    with Session(ranks, threads=1, output=Recorder(), hang_grace=0.3) as session:
        session.execute(SETUP)
        yield session


def rest_of(ranks: int, first: int = 1) -> str:
    return f"rank {first}" if ranks == first + 1 else f"ranks {first}-{ranks - 1}"


def told(error: BaseException) -> str:
    """All that is shown of an error, on few lines."""
    return " ".join(f"{error}".split())


def check(session: Session) -> None:
    """The session goes on, with a group on which nothing is under way."""
    session.execute("probe = torch.ones(2)\ndist.all_reduce(probe)")
    right = [float(session.world_size)] * 2
    assert dict(session.evaluate("probe.tolist()")) == dict.fromkeys(session.ranks, right)


# --- mismatches -----------------------------------------------------------------------------------


def test_threads_that_come_in_other_orders_on_other_ranks(session: Session, ranks: int) -> None:
    """The threads of rank 0 are there before its peers come."""
    with pytest.raises(RunError) as caught:
        session.execute(
            "thread = threading.Thread(target=gather)\n"
            "if rank == 0:\n"
            "    later(thread, 0.1)\n"
            "else:\n"
            "    time.sleep(1)\n"
            "    later(thread)\n"
            "dist.barrier() if rank == 0 else gather()"
        )
    assert isinstance(caught.value.first, errors.CollectiveMismatchError)
    text = told(caught.value)
    assert f"rank 0 called barrier at In[2] line 7, {rest_of(ranks)} called all_gather" in text
    assert f"Two threads of rank 0 {USE} In[2] line 7" in text
    assert ONE_THREAD in told(caught.value.first)
    check(session)


def test_a_thread_here_and_the_main_thread_there(session: Session, ranks: int) -> None:
    """When they meet, neither rank has begun what its other thread would have called."""
    with pytest.raises(RunError) as caught:
        session.execute(
            "thread = threading.Thread(target=gather)\n"
            "if rank == 0:\n"
            "    thread.start()\n"
            "    thread.join()\n"
            "else:\n"
            "    dist.barrier()"
        )
    error = caught.value.by_rank[1]
    assert isinstance(error, errors.CollectiveMismatchError)
    text = told(error)
    assert "rank 0 called all_gather (float32 [2]) at In[1] line 7 in another thread" in text
    assert f"{rest_of(ranks)} called barrier at In[2] line 6" in text
    assert "Two threads" not in text
    assert ONE_THREAD in text
    check(session)


def test_threads_of_a_pool(session: Session, ranks: int) -> None:
    """The main thread calls nothing, and waits for them."""
    with pytest.raises(RunError) as caught:
        session.execute(
            "with ThreadPoolExecutor(2) as pool:\n"
            "    calls = [gather, dist.barrier] if rank == 0 else [dist.barrier, gather]\n"
            "    if rank: time.sleep(1)\n"
            "    futures = []\n"
            "    for call in calls:\n"
            "        futures.append(pool.submit(call))\n"
            "        time.sleep(0.2)\n"
            "    futures[0].result()"
        )
    assert isinstance(caught.value.first, errors.CollectiveMismatchError)
    text = told(caught.value)
    assert "Two threads of rank 0 use the default group at once, for all_gather" in text
    check(session)


def test_what_is_no_matter_of_threads(session: Session, ranks: int) -> None:
    """Whatever else differs is told as before, also after a cell in which threads were at fault."""
    with pytest.raises(RunError):
        session.execute(
            "thread = threading.Thread(target=gather)\n"
            "if rank == 0:\n"
            "    thread.start()\n"
            "    thread.join()\n"
            "else:\n"
            "    dist.barrier()"
        )
    mismatches = {
        "while operations of the same thread are under way": "works = [\n"
        "    dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]\n"
        "dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(3))",
        "with a loader's threads": "loader = torch.utils.data.DataLoader(\n"
        "    torch.arange(8.0), batch_size=2, num_workers=1)\n"
        "for batch in loader:\n"
        "    dist.barrier() if rank == 0 else dist.all_reduce(batch)",
        "in one thread that is not the main one": "def work():\n"
        "    dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(3))\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    pool.submit(work).result()",
        "after another thread is done": "with ThreadPoolExecutor(1) as pool:\n"
        "    pool.submit(gather).result()\n"
        "dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(3))",
    }
    for what, code in mismatches.items():
        with pytest.raises(RunError) as caught:
            session.execute(code)
        assert isinstance(caught.value.first, errors.CollectiveMismatchError), what
        assert "thread" not in told(caught.value), what
        assert "thread" not in told(caught.value.first), what
        check(session)


# --- hangs, diagnose, Stop ------------------------------------------------------------------------

BOTH_WAIT = """
thread = threading.Thread(target=gather)
if rank == 0:
    thread.start()
    time.sleep(0.3)
    dist.barrier()
"""


def test_a_hang(session: Session, ranks: int) -> None:
    with pytest.raises(errors.CollectiveHangError) as caught:
        session.execute(BOTH_WAIT)
    text = told(caught.value)
    assert text.startswith(f"{rest_of(ranks)} did not come to barrier #2 at In[2] line 6")
    assert f"Two threads of rank 0 {USE} In[2] line 6. {ONE_THREAD}" in text
    session.execute("thread.join() if rank == 0 else None")
    check(session)


def test_a_time_limit(ranks: int) -> None:
    with Session(ranks, threads=1, timeout=2, output=Recorder()) as session:
        session.execute(SETUP)
        with pytest.raises(RunError) as caught:
            session.execute(
                "thread = threading.Thread(target=gather)\n"
                "if rank == 0:\n"
                "    later(thread, 1)\n"
                "    dist.barrier()\n"
                "else:\n"
                "    time.sleep(4)"
            )
        text = told(caught.value)
        assert f"{rest_of(ranks)} did not come to barrier within 2 s" in text
        assert f"Two threads of rank 0 {USE} In[2] line 4" in text
        assert ONE_THREAD in told(caught.value.by_rank[0])


def interrupted(session: Session, code: str, is_there: Callable[[str], bool]) -> tuple[str, str]:
    """Stop a cell once ``diagnose()`` says that; gives what it says, and what the Stop does."""
    seen: list[str] = []

    def stop() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            text = " ".join(str(session.diagnose()).split())
            if is_there(text):
                seen.append(text)
                break
            time.sleep(0.05)
        session.interrupt()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RunInterrupt) as caught:
        session.execute(code)
    stopper.join()
    assert seen, "diagnose() never said so"
    return seen[0], told(caught.value)


@pytest.mark.parametrize("call", ["meet()", "threading.Thread(target=meet).start()"])
def test_diagnose_and_stop(session: Session, ranks: int, call: str) -> None:
    """Of one thread beside the main one, and of two while the main one waits for them."""
    code = (
        "thread = threading.Thread(target=gather)\n"
        "if rank == 0:\n"
        "    thread.start()\n"
        "    time.sleep(0.3)\n"
        f"    {call}\n"
        "    thread.join()\n"
        "else:\n"
        "    time.sleep(1000)"
    )
    right = f"Two threads of rank 0 {USE} In[1] line 11. {ONE_THREAD}"
    _, said = interrupted(session, code, lambda text: right in text)
    assert said.startswith(f"the run on ranks 0-{ranks - 1} was stopped: ")
    assert right in said
    check(session)


def test_both_threads_are_named_on_every_rank(session: Session, ranks: int) -> None:
    """All but the last wait with two threads; which of them is first differs from rank to rank."""
    code = (
        "thread = threading.Thread(target=gather)\n"
        "if rank == world_size - 1:\n"
        "    time.sleep(1000)\n"
        "thread.start()\n"
        "time.sleep(0.3)\n"
        "dist.barrier()"
    )
    whose = "rank 0" if ranks == 2 else f"each of ranks 0-{ranks - 2}"
    right = f"Two threads of {whose} {USE} In[2] line 6. {ONE_THREAD}"
    _, said = interrupted(session, code, lambda text: right in text)
    assert right in said
    check(session)


# --- right programs -------------------------------------------------------------------------------


def test_threads_with_groups_of_their_own_are_right(session: Session, ranks: int) -> None:
    session.execute(
        "groups = [dist.new_group() for _ in range(3)]\n"
        "with ThreadPoolExecutor(3) as pool:\n"
        "    for turn in range(20):\n"
        "        order = groups if rank % 2 else groups[::-1]\n"
        "        futures = [pool.submit(gather, group) for group in order]\n"
        "        dist.barrier()\n"
        "        found = [future.result() for future in futures]"
    )
    right = [[[float(rank)] * 2 for rank in range(ranks)]] * 3
    assert dict(session.evaluate("found")) == dict.fromkeys(session.ranks, right)


def test_nothing_is_said_of_a_thread_that_waits_for_what_another_has_issued(
    session: Session, ranks: int
) -> None:
    """One thread issues all; another one waits for some of it meanwhile."""
    code = (
        "if rank == 0:\n"
        "    work = dist.all_reduce(torch.ones(2), async_op=True)\n"
        "    threading.Thread(target=work.wait, daemon=True).start()\n"
        "    dist.barrier()\n"
        "else:\n"
        "    time.sleep(1000)"
    )
    seen, said = interrupted(session, code, lambda text: "rank 0 waits in barrier #2" in text)
    assert "threads" not in seen
    assert "threads" not in said
    check(session)


def test_a_reducer_and_a_loader_are_no_threads_of_the_group(session: Session, ranks: int) -> None:
    """One rank stays away from a step of DistributedDataParallel; the others wait in it."""
    code = (
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2, num_workers=2)\n"
        "for number, batch in enumerate(loader):\n"
        "    if number == 2 and rank == world_size - 1:\n"
        "        time.sleep(1000)\n"
        "    model(batch).sum().backward()"
    )

    def waits(text: str) -> bool:
        return "running In[2] line 5" in text and "running In[2] line 6" in text

    seen, said = interrupted(session, code, waits)
    assert "threads" not in seen
    assert "threads" not in said
    check(session)
