"""A wait that fails on one rank alone ends those of the others, who are told of its error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distsession import RunError, Session, errors
from tests.integration.conftest import Recorder

HEAD = """
import time
from datetime import timedelta
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel as DDP

def exchange(send, receive, how):
    given, taken = torch.arange(float(sum(send))), torch.zeros(sum(receive))
    if how == "functional":
        return funcol.all_to_all_single(given, receive, send, dist.group.WORLD).tolist()
    work = dist.all_to_all_single(taken, given, receive, send, async_op=True)
    return work.get_future().wait() if how == "future" else work.wait()
"""
HOW = ["async", "functional", "future"]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(scope="module", params=["shared", "off"])
def session(request: pytest.FixtureRequest, ranks: int) -> Iterator[Session]:
    options = {"threads": 1, "hang_grace": 0.3, "check": request.param}
    with Session(ranks, output=Recorder(), **options) as session:
        session.execute(HEAD)
        yield session


def check(session: Session) -> None:
    session.execute("probe = torch.ones(2)\ndist.all_reduce(probe)", timeout=30)
    total = [float(session.world_size)] * 2
    assert dict(session.evaluate("probe.tolist()")) == dict.fromkeys(session.ranks, total)


def first_of(session: Session, code: str) -> tuple[str, RunError]:
    """The first line that is shown of what fails on some rank; the limit is one for a hang."""
    with pytest.raises(RunError) as caught:
        session.execute(code, timeout=60)
    assert set(caught.value.by_rank) == set(session.ranks)  # no rank is left behind
    check(session)
    return str(caught.value), caught.value


@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("how", HOW)
def test_splits_of_one_rank_that_do_not_fit(
    session: Session, ranks: int, how: str, late: int | None
) -> None:
    """What rank 1 keeps for itself has two sizes, which gloo sees there alone."""
    text, error = first_of(
        session,
        f"if rank == {late}: time.sleep(0.4)\n"
        "send = [1] * world_size\n"
        "receive = [2 if to == rank == 1 else 1 for to in range(world_size)]\n"
        f"exchange(send, receive, {how!r})",
    )
    if session.options.check == "shared":
        fits = "called all_to_all_single to receive 2 from rank 1, which sends 1"
        assert text.startswith(f"CollectiveMismatchError: rank 1 {fits}, at In["), text
        return
    assert text.startswith("RuntimeError on rank 1 at In["), text
    assert "inLengthPerRank[myRank] == outLengthPerRank[myRank]" in text
    assert all(isinstance(error.by_rank[r], errors.CollectiveError) for r in range(ranks) if r != 1)


@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("how", HOW)
def test_splits_that_do_not_fit_those_of_a_peer(
    session: Session, ranks: int, how: str, late: int | None
) -> None:
    """The first two ranks send each other other sizes than they expect, and rank 1 itself."""
    text, _ = first_of(
        session,
        f"if rank == {late}: time.sleep(0.4)\n"
        "rest = [1] * (world_size - 2)\n"
        "send = [2, 1, *rest] if rank == 1 else [1, 2, *rest] if rank == 0 else [1] * world_size\n"
        "receive = [1, 2, *rest] if rank < 2 else [1] * world_size\n"
        f"exchange(send, receive, {how!r})",
    )
    if session.options.check == "shared":
        assert text.startswith("CollectiveMismatchError: rank "), text
        assert "called all_to_all_single to " in text
    else:
        assert text.startswith("RuntimeError on rank 1 at In["), text


def test_a_limit_of_one_ranks_wait(session: Session, ranks: int) -> None:
    """Only the wait of rank 1 ends; the operation does when rank 0 comes."""
    text, _ = first_of(
        session,
        "if rank == 0: time.sleep(1.5)\n"
        "work = dist.all_reduce(torch.ones(2), async_op=True)\n"
        "if rank == 1: work.wait(timedelta(seconds=0.2))\n"
        "else: work.wait()\n"
        "dist.barrier()",
    )
    late = "rank 0 did not come to all_reduce (float32 [2], sum) in time, in which rank 1 waited"
    assert text.startswith(f"CollectiveHangError: {late}"), text


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_hook_that_fails_on_one_rank(session: Session, ranks: int, where: str) -> None:
    """The rank that fails does so before its operation begins, or after it."""
    before = "if rank == 1: raise ValueError('no hook')" if where == "before" else "pass"
    after = "1 / 0 if rank == 1 else " if where == "after" else ""
    text, _ = first_of(
        session,
        "ddp = DDP(torch.nn.Linear(2, 2))\n"
        "def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:\n"
        f"    {before}\n"
        "    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n"
        f"    return future.then(lambda done: {after}done.value()[0])\n"
        "ddp.register_comm_hook(None, hook)\n"
        "ddp(torch.ones(1, 2)).sum().backward()\n"
        "dist.barrier()",
    )
    assert " on rank 1 at In[" in text
    assert ("no hook" if where == "before" else "division by zero") in text
