"""A session that has been used all day keeps the promises of a young one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest

from distsession import RunError, RunInterrupt, Session, errors
from tests.backends import Backend
from tests.integration.chaos import DEVICE_STREAMS
from tests.integration.conftest import Recorder
from tests.until import until

pytestmark = pytest.mark.timeout(300)

RANKS = 3
MEMORY_GROWTH = 16 << 20
"""Bytes by which a rank may be larger."""

# Broadcasts, each from another rank: an all_reduce takes twice as long and is noted alike.
OPERATIONS = """
for number in range({count}):
    dist.broadcast(torch.ones({first} + number % {shapes}), src=number % dist.get_world_size())
"""
GROUPS = """
for number in range({count}):
    group = dist.new_group([number % 3, (number + 1) % 3])
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(torch.ones(number % 50 + 1), group=group)
        dist.destroy_process_group(group)
    del group
"""
MESSAGES = """
for tag in range({count}):
    if rank == 0:
        dist.send(torch.ones(2), dst=1, tag=tag)
    elif rank == 1:
        dist.recv(torch.ones(2), src=0, tag=tag)
"""


def age(session: Session, *, operations: int, shapes: int, groups: int, cells: int) -> None:
    """Use a session for as long as someone does in a day of work."""
    session.execute(OPERATIONS.format(count=operations, first=1, shapes=shapes))
    session.execute(GROUPS.format(count=groups))
    session.execute(MESSAGES.format(count=groups))
    for number in range(cells):
        session.execute(f"dist.all_reduce(torch.ones({number % 500 + 1}, 2))")


@pytest.fixture(scope="module")
def aged(backend: Backend) -> Iterator[Session]:
    with backend.session(RANKS, output=Recorder(), threads=1, hang_grace=0.5) as session:
        session.execute("x = torch.arange(3.0) + rank")
        half = 2 if backend.is_device else 1
        age(session, operations=20_000 // half, shapes=10_000, groups=300, cells=2000 // half)
        yield session


@pytest.fixture
def old(aged: Session, backend: Backend) -> Session:
    """The same; an earlier test has connected its group anew, so it is used some more."""
    age(aged, operations=600, shapes=600, groups=70, cells=100 if backend.is_device else 300)
    return aged


def check(session: Session) -> None:
    session.execute("probe = torch.ones(2) * (rank + 1)\ndist.all_reduce(probe)")
    assert dict(session.evaluate("probe.tolist()")) == {rank: [6.0, 6.0] for rank in range(RANKS)}
    assert session.evaluate("x.tolist()")[1] == [1.0, 2.0, 3.0]


def failure(session: Session, code: str, kind: type[BaseException]) -> str:
    """What a cell raises, which must end by itself."""
    with pytest.raises(kind) as caught:
        session.execute(code, label="In[7]")
    return str(caught.value)


def test_a_failed_rank_frees_the_others(old: Session) -> None:
    text = failure(old, "if rank == 0: raise ValueError('late')\ndist.barrier()", RunError)
    assert text.startswith("ValueError on rank 0 at In[7] line 1: late")
    assert "Ranks 1-2 waited in barrier #" in text
    check(old)


def test_a_rank_that_has_finished_frees_the_others(old: Session) -> None:
    text = failure(old, "if rank:\n    dist.barrier()", errors.CollectiveHangError)
    assert "rank 0 did not come to barrier #" in text
    assert "at In[7] line 2: it finished its part without it; ranks 1-2 wait" in text
    check(old)


def test_a_rank_that_dies_frees_the_others(old: Session) -> None:
    text = failure(old, "import os\nif rank == 2: os._exit(3)\ndist.barrier()", RunError)
    assert text.startswith("EngineDiedError: rank 2 ")
    assert "Ranks 0-1 waited in barrier #" in text
    old.restart([2], restore=["x"])
    check(old)


def test_a_mismatch_is_seen_with_all_sides(old: Session) -> None:
    text = failure(old, "dist.all_reduce(torch.ones(2 + (rank == 1)))", RunError)
    assert "CollectiveMismatchError" in text
    assert "float32 [2]" in text
    assert "float32 [3]" in text
    check(old)


def test_ranks_that_wait_for_one_another_are_freed(old: Session) -> None:
    old.execute("pair = dist.new_group([0, 1])")
    code = "if rank == 0:\n    dist.barrier()\nelif rank == 1:\n    dist.barrier(group=pair)"
    text = failure(old, f"{code}\nelse:\n    dist.barrier()", errors.CollectiveMismatchError)
    assert "different orders" in text
    old.execute("del pair")
    check(old)


def test_a_receive_without_a_send_is_freed(old: Session, backend: Backend) -> None:
    code = backend.program("if rank == 1:\n    dist.recv(torch.ones(2), src=0, tag=7); FINISH")
    text = failure(old, code, errors.CollectiveHangError)
    assert "rank 0 sent nothing for recv #" in text
    assert "at In[7] line 2: it finished its part without it; rank 1 waits" in text
    check(old)


def test_an_operation_behind_a_hundred_others_is_known_while_it_is_waited_for(
    old: Session, backend: Backend
) -> None:
    code = """if rank:
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(100)]
    works[0].wait(); FINISH
"""
    text = failure(old, backend.program(code), errors.CollectiveHangError)
    assert "rank 0 did not come to all_reduce #" in text
    assert "at In[7] line 2: it finished its part without it; ranks 1-2 wait" in text
    check(old)


def test_stop_says_who_waits_for_whom(old: Session) -> None:
    def stop() -> None:
        until(lambda: "ranks 1-2 wait in barrier #" in repr(old.diagnose()))
        old.interrupt()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RunInterrupt) as caught:
        old.execute("import time\nif rank: dist.barrier()\nelse: time.sleep(60)", label="In[7]")
    stopper.join()
    assert "ranks 1-2 wait in barrier #" in str(caught.value)
    assert "at In[7] line 2 for rank 0, which runs In[7] line 3" in str(caught.value)
    check(old)


def test_a_group_that_a_rank_does_not_make_is_told(old: Session) -> None:
    text = failure(old, "if rank < 2:\n    dist.new_group([0, 1])", errors.CollectiveHangError)
    assert "rank 2 did not come to new_group #" in text
    assert "it finished its part without it; ranks 0-1 wait" in text
    check(old)


def test_a_group_made_of_other_ranks_on_one_rank_is_told(old: Session) -> None:
    text = failure(old, "dist.new_group([0, 1] if rank != 1 else [1, 2])", RunError)
    told = "rank 1 called new_group with ranks 1-2, ranks 0,2 with ranks 0-1, at In[7] line 1"
    assert text.startswith(f"CollectiveMismatchError: {told}")
    check(old)


LATE_MISMATCHES = {
    "an async operation that is waited for": (
        "dist.all_reduce(x.clone(), async_op=True).wait(); FINISH"
    ),
    "a backward of DistributedDataParallel": "model(torch.ones(1, 4)).sum().backward(); FINISH",
}


@pytest.mark.parametrize("code", LATE_MISMATCHES.values(), ids=LATE_MISMATCHES)
def test_who_has_begun_what_another_refuses_is_freed(
    old: Session, backend: Backend, code: str
) -> None:
    old.execute("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))")
    late = f"import time\nif rank != 1:\n    {code}\nelse:\n    time.sleep(0.5)\n    dist.barrier()"
    text = failure(old, backend.program(late), RunError)
    assert text.startswith("CollectiveMismatchError: rank 1 called barrier at In[7] line 6")
    assert "and were freed" in text
    check(old)
    old.execute("model(torch.ones(1, 4)).sum().backward()\ndel model")


def test_groups_that_members_make_alone_agree_also_with_a_fresh_rank(old: Session) -> None:
    code = """if rank < 2:
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    dist.barrier(group=pair)
    dist.destroy_process_group(pair)
    del pair
"""
    old.execute("mine = dist.new_group([0, 1], use_local_synchronization=True)")
    old.execute(code)
    old.restart([1])
    old[1].execute("x = torch.arange(3.0) + rank")
    old.execute(code)
    old.execute(code)
    old[0].execute("del mine")
    check(old)


def test_more_use_takes_no_more_memory_and_no_more_handles(old: Session, backend: Backend) -> None:
    """What a device's streams have a thread for are used again, up to so many."""
    ranks = [psutil.Process(info.pid) for info in old.infos]

    def held() -> list[tuple[int, int, int]]:
        return [(p.num_fds(), p.num_threads(), p.memory_info().rss) for p in ranks]

    streams = DEVICE_STREAMS if backend.is_device else 0

    def has_grown() -> bool:
        return any(
            now[0] > then[0] or now[1] > then[1] + streams or now[2] > then[2] + MEMORY_GROWTH
            for now, then in zip(held(), before, strict=True)
        )

    before = held()
    age(old, operations=1000, shapes=1000, groups=100, cells=100)
    until(lambda: not has_grown(), "what was held before")


# --- many ranks -----------------------------------------------------------------------------------


def test_sizes_that_make_a_long_text_are_compared_in_full() -> None:
    with Session(16, output=Recorder(), threads=1) as session:
        code = """
def exchange(wrong):
    send = [1000 + rank + to for to in range(world_size)]
    receive = [1000 + source + rank for source in range(world_size)]
    if wrong and rank == 15:
        receive[14] += 1
    output, data = torch.zeros(sum(receive)), torch.ones(sum(send))
    dist.all_to_all_single(output, data, receive, send)
"""
        session.execute(code)
        session.execute("exchange(False)")
        text = failure(session, "exchange(True)", RunError)
        assert "CollectiveMismatchError" in text
        session.execute("exchange(False)")
