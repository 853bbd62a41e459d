"""Ranks that call different things are told so before a tensor is changed or a process ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distsession import RunError, Session, errors
from tests.backends import Backend, Place, only, places

SETUP = """
number = 40 + rank
odd = rank == world_size - 1

def ones(*shape, dtype=torch.float32):
    global kept
    kept = torch.ones(*shape, dtype=dtype)
    return kept
"""


@pytest.fixture(scope="module", params=places(gloo=(2, 4), standin=(2, 4)))
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    return found


@pytest.fixture(scope="module")
def session(place: Place) -> Iterator[Session]:
    with place.session(threads=1) as session:
        session.execute(SETUP)
        yield session


@pytest.fixture(scope="module")
def backend(place: Place) -> Backend:
    return place.backend


def check(session: Session) -> None:
    """The next collective is right, the state is there, no process has been replaced."""
    session.execute("probe = torch.ones(2)\ndist.all_reduce(probe)")
    right = [float(session.world_size)] * 2
    assert dict(session.evaluate("probe.tolist()")) == dict.fromkeys(session.ranks, right)
    assert dict(session.evaluate("number")) == {r: 40 + r for r in session.ranks}


# What the last rank does differently; both sides in the message.
MISMATCHES = {
    "sizes": ("dist.all_reduce(ones(4 + odd))", "[4]", "[5]"),
    "float64 for float32": (
        "dist.all_reduce(ones(4, dtype=torch.float64 if odd else torch.float32))",
        "float32",
        "float64",
    ),
    "int32 for float32": (
        "dist.all_reduce(ones(4, dtype=torch.int32 if odd else torch.float32))",
        "float32",
        "int32",
    ),
    "MAX for SUM": (
        "dist.all_reduce(ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)",
        "sum",
        "max",
    ),
    "shapes of a broadcast": ("dist.broadcast(ones(4 + odd), src=0)", "[4]", "[5]"),
    "roots of a broadcast": ("dist.broadcast(ones(4), src=int(odd))", "root 0", "root 1"),
    "shapes of an all_gather": (
        "t = ones(3 + odd); dist.all_gather([torch.zeros_like(t) for _ in range(world_size)], t)",
        "[3]",
        "[4]",
    ),
    "sizes of a reduce_scatter": (
        "out = ones(2 + odd); dist.reduce_scatter_tensor(out, torch.ones(world_size * (2 + odd)))",
        "[2]",
        "[3]",
    ),
    "operations": (
        "dist.broadcast(ones(4), src=0) if odd else dist.all_reduce(ones(4))",
        "all_reduce",
        "broadcast",
    ),
    "a barrier for an all_reduce": (
        "dist.barrier() if odd else dist.all_reduce(ones(4))",
        "all_reduce",
        "barrier",
    ),
    "splits of an all_to_all": (
        "n = world_size\n"
        "splits = [2 if odd else 1] * n\n"
        "dist.all_to_all_single(torch.zeros(sum(splits)), ones(n), splits, [1] * n)",
        "to receive 2 from rank",
        "which sends 1",
    ),
    "roots of a reduce": ("dist.reduce(ones(4), dst=int(odd))", "root 0", "root 1"),
}


def refused(session: Session, backend: Backend, error: RunError) -> set[int]:
    """The ranks that refused to begin; of a device, those that came last. The others were freed."""
    of_them = {
        rank
        for rank, own in error.by_rank.items()
        if isinstance(own, errors.CollectiveMismatchError)
    }
    assert isinstance(error.first, errors.CollectiveMismatchError)
    if backend.is_device:
        rest = {rank: own for rank, own in error.by_rank.items() if rank not in of_them}
        assert all(isinstance(own, errors.CollectiveError) for own in rest.values())
    else:
        assert of_them == set(session.ranks)
    return of_them


@pytest.mark.parametrize(("code", "one", "other"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_raises_and_changes_nothing_where_it_does(
    session: Session,
    backend: Backend,
    code: str,
    one: str,
    other: str,
) -> None:
    """On every rank; of a device, on every one that has not begun it already."""
    session.execute("kept = torch.ones(1)")
    with pytest.raises(RunError) as caught:
        session.execute(code, label="In[4]")
    ranks = refused(session, backend, caught.value)
    for rank in ranks:
        error = caught.value.by_rank[rank]
        assert one in str(error)
        assert other in str(error)
        assert "at In[4] line" in str(error)
    same = session.evaluate("bool((kept == 1).all())")
    assert all(same[rank] for rank in ranks)
    check(session)


@pytest.mark.parametrize("code", [code for code, _, _ in MISMATCHES.values()], ids=MISMATCHES)
@only("device", "there every operation is a meeting of its members")
def test_the_first_operation_of_a_communicator_is_refused_by_every_rank(
    session: Session, code: str
) -> None:
    """Before a device is given it, all members meet, as they do to make the communicator."""
    session.reconnect()
    session.execute("kept = torch.ones(1)")
    with pytest.raises(RunError) as caught:
        session.execute(code, label="In[4]")
    assert set(caught.value.by_rank) == set(session.ranks)
    for error in caught.value.by_rank.values():
        assert isinstance(error, errors.CollectiveMismatchError)
    assert all(session.evaluate("bool((kept == 1).all())").values())
    check(session)


# Operations that need every rank: a broadcast can be over on some before another one calls it.
ASYNC = {
    "sizes": "dist.all_reduce(torch.ones(4 + odd), async_op=True).wait()",
    "dtypes": "dist.all_reduce(torch.ones(4).to(torch.int32 if odd else torch.float32), "
    "async_op=True).wait()",
    "functional": "import torch.distributed._functional_collectives as f\n"
    "f.all_reduce(torch.ones(4 + odd), 'sum', dist.group.WORLD).tolist()",
}


@pytest.mark.parametrize("code", ASYNC.values(), ids=ASYNC)
def test_an_asynchronous_mismatch_raises(session: Session, backend: Backend, code: str) -> None:
    with pytest.raises(RunError) as caught:
        session.execute(code)
    refused(session, backend, caught.value)
    check(session)


MESSAGES = {
    "a receive that is too short": ("torch.ones(8)", "torch.zeros(4)"),
    "a receive that is too long": ("torch.ones(4)", "torch.zeros(8)"),
    "another dtype": ("torch.ones(4)", "torch.zeros(4, dtype=torch.int32)"),
}


@pytest.mark.parametrize(("sent", "received"), MESSAGES.values(), ids=MESSAGES)
@pytest.mark.parametrize("late", [0, 1], ids=["sender late", "receiver late"])
def test_a_message_that_does_not_fit_raises_on_both_ends(
    session: Session, sent: str, received: str, late: int
) -> None:
    with pytest.raises(RunError) as caught:
        session.execute(
            f"kept = {received}\n"
            f"import time; time.sleep(0.2 * (rank == {late}))\n"
            f"if rank == 0: dist.send({sent}, dst=1)\n"
            "if rank == 1: dist.recv(kept, src=0)"
        )
    assert set(caught.value.by_rank) == {0, 1}
    for error in caught.value.by_rank.values():
        assert isinstance(error, errors.CollectiveMismatchError)
        assert "called send" in str(error)
        assert "called recv" in str(error)
    assert session.evaluate("bool((kept == 0).all())")[1] is True
    check(session)


def test_models_that_differ_are_told_apart_by_data_parallel(session: Session) -> None:
    with pytest.raises(RunError):
        session.execute(
            "from torch.nn.parallel import DistributedDataParallel\n"
            "DistributedDataParallel(torch.nn.Linear(4, 4 + odd))"
        )
    check(session)


def test_buckets_that_differ_raise_in_the_backward(session: Session, backend: Backend) -> None:
    with pytest.raises(RunError) as caught:
        session.execute(
            "from torch.nn.parallel import DistributedDataParallel\n"
            "layer = torch.nn.Linear(4, 4 + odd)\n"
            "model = DistributedDataParallel(layer, init_sync=False)\n"
            "model(torch.ones(1, 4)).sum().backward()"
        )
    ranks = refused(session, backend, caught.value)
    own = session.evaluate("bool((layer.bias.grad == 1).all())")  # no other rank's is in it
    assert all(own[rank] for rank in ranks)
    check(session)


def test_an_operation_that_was_left_alone_is_not_taken_for_the_next_one(
    session: Session, backend: Backend
) -> None:
    session.execute("probe = torch.ones(1)\ndist.all_reduce(probe)")
    left = "if odd: 1 / 0\nelse: left = dist.all_reduce(probe, async_op=True)"
    with pytest.raises(RunError, match="ZeroDivisionError on rank"):
        session.execute(left)
    session.execute("late = torch.full((1,), 10.0)\ndist.all_reduce(late)")
    right = 10.0 * session.world_size
    assert dict(session.evaluate("late.item()")) == dict.fromkeys(session.ranks, right)
    if backend.is_device:  # its handle is torch's own, and has the stream wait for what is over
        session.execute("if not odd: left.wait(); assert left.is_completed()")
    else:
        with pytest.raises(RunError, match="issued before the process group was connected anew"):
            session.execute("if not odd: left.wait()")
    check(session)


def test_an_operation_that_all_have_issued_outlives_an_error(session: Session) -> None:
    session.execute("probe = torch.ones(1)\nwork = dist.all_reduce(probe, async_op=True)")
    with pytest.raises(RunError, match="ZeroDivisionError"):
        session.execute("1 / 0")
    session.execute("work.wait()")
    right = float(session.world_size)
    assert dict(session.evaluate("probe.item()")) == dict.fromkeys(session.ranks, right)


def test_groups_of_different_members_raise(session: Session) -> None:
    with pytest.raises((RunError, errors.CollectiveHangError)):
        session.execute("dist.new_group([0] if odd else [0, world_size - 1])", timeout=20)
    check(session)


RING = {
    False: "sent = dist.isend(torch.ones(3), (rank + 1) % n)\n"
    "dist.irecv(torch.zeros(3), (rank - 1) % n).wait()\n"
    "sent.wait()\n",
    True: "ring = [dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % n),\n"
    "        dist.P2POp(dist.irecv, torch.zeros(3), (rank - 1) % n)]\n"
    "for work in dist.batch_isend_irecv(ring): work.wait()\n",
}
"""By whether a device does it: there each first message alone would wait for the peer to come."""


def test_matching_calls_are_left_alone(session: Session, backend: Backend) -> None:
    session.execute(
        "n = world_size\n"
        "send = [rank + 1] * n\n"
        "receive = [r + 1 for r in range(n)]\n"
        "out = torch.zeros(sum(receive))\n"
        "dist.all_to_all_single(out, torch.ones(sum(send)) * rank, receive, send)\n"
        f"{RING[backend.is_device]}"
        "for _ in range(200): dist.all_reduce(torch.ones(1), async_op=True).wait()"
    )
    check(session)


def test_torchs_own_check_can_be_had_instead() -> None:
    with Session(2, check="detail") as session:
        session.execute(SETUP)
        with pytest.raises(RunError) as caught:
            session.execute("dist.all_reduce(torch.ones(4 + odd))")
        assert isinstance(caught.value.first, errors.CollectiveMismatchError)
        check(session)
