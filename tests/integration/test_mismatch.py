"""Ranks that call different things are told so before a tensor is changed or a process ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distsession import RunError, Session, errors
from tests.backends import LEAVES_MESSAGE, Backend, Place, only, places

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
@pytest.mark.parametrize(
    "late",
    [
        pytest.param(0, id="sender late"),
        pytest.param(1, id="receiver late", marks=LEAVES_MESSAGE),
    ],
)
def test_a_message_that_does_not_fit_raises_on_both_ends(
    session: Session, backend: Backend, sent: str, received: str, late: int
) -> None:
    code = (
        f"kept = {received}\n"
        f"import time; time.sleep(0.2 * (rank == {late}))\n"
        f"if rank == 0: dist.send({sent}, dst=1); FINISH\n"
        "if rank == 1: dist.recv(kept, src=0); FINISH"
    )
    with pytest.raises(RunError) as caught:
        session.execute(backend.program(code))
    # In a group that is bound to a device, a little is sent before anybody receives it.
    least = {late} if backend.name in ("standin2", "standin-lazy", "nccl") else {0, 1}
    assert least <= set(caught.value.by_rank) <= {0, 1}
    for rank in least:
        error = caught.value.by_rank[rank]
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
    # The handle of a device's operation is torch's own, and says what the backend does.
    why = {
        "gloo": "issued before the process group was connected anew",
        "standin2": "NCCL operation failed",
        "standin-lazy": "NCCL operation failed",
    }.get(backend.name, "aborted")
    with pytest.raises(RunError, match=why):
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


# --- what the backend refuses, or takes though it differs -----------------------------------------

REFUSED = """
import contextlib, random, time
random.seed(rank)
agreed = random.Random(5)
group = dist.new_group(list(range(world_size)))
lists = [ones(2)] * (world_size - 1)
refused = {
    "int16": lambda **how: dist.all_reduce(ones(4, dtype=torch.int16), **how),
    "float8": lambda **how: dist.all_reduce(ones(4).to(torch.float8_e4m3fn), **how),
    "BXOR": lambda **how: dist.all_reduce(ones(4), op=dist.ReduceOp.BXOR, **how),
    "AVG": lambda **how: dist.all_reduce(ones(4), op=dist.ReduceOp.AVG, **how),
    "sparse": lambda **how: dist.all_reduce(
        torch.eye(3).to_sparse(), op=dist.ReduceOp.MAX, **how
    ),
    "csr": lambda **how: dist.all_reduce(torch.eye(3).to_sparse_csr(), **how),
    "list": lambda **how: dist.all_gather(list(lists), ones(2), **how),
    "shape": lambda **how: dist.all_gather([ones(3)] * world_size, ones(2), **how),
    "size": lambda **how: dist.all_gather_into_tensor(ones(99), ones(3), **how),
}
caught = []
for step in range(40):
    for name in agreed.choices(list(refused), k=agreed.randint(1, 3)):
        how = {"async_op": agreed.random() < 0.5, "group": agreed.choice([None, group])}
        time.sleep(random.random() * 0.004)
        try:
            work = refused[name](**how)
            if how["async_op"]:
                work.wait()
        except (RuntimeError, ValueError) as error:
            caught.append(type(error).__name__)
    work = dist.all_reduce(ones(2), async_op=True, group=how["group"])
    work.wait()
    assert kept.tolist() == [world_size] * 2, (step, name, kept)
"""


@only("gloo", "it is gloo that refuses these")
def test_what_the_backend_refuses_on_all_ranks_is_no_mismatch(session: Session) -> None:
    session.execute(REFUSED)
    for caught in session.evaluate("caught").values():
        assert len(caught) >= 40
        assert "CollectiveMismatchError" not in caught
    check(session)


@only("gloo", "it is gloo that refuses these")
def test_who_comes_late_to_what_the_backend_refuses_hears_of_that(session: Session) -> None:
    session.execute(
        "import time\n"
        "if odd: time.sleep(0.3)\n"
        "try: dist.all_reduce(ones(4, dtype=torch.int16))\n"
        "except RuntimeError as error: first = str(error)\n"
        "if rank == 0: time.sleep(0.1)\n"
        "try: dist.all_gather([ones(2)], ones(2))\n"
        "except (RuntimeError, ValueError) as error: second = str(error)\n"
        "dist.all_reduce(ones(2))"
    )
    assert set(session.evaluate("first").values()) == {"Invalid scalar type"}
    assert all("tensor list" in text for text in session.evaluate("second").values())
    check(session)


@only("gloo", "it is gloo that refuses these")
@pytest.mark.parametrize("how", ["", ", async_op=True"], ids=["waited for", "issued"])
def test_a_rank_may_be_late_by_many_refusals(session: Session, how: str) -> None:
    session.execute(
        "import time\n"
        "if odd: time.sleep(0.5)\n"
        "texts = set()\n"
        "for _ in range(200):\n"
        "    try:\n"
        f"        work = dist.all_reduce(ones(4, dtype=torch.int16){how})\n"
        "        work.wait()\n"
        "    except RuntimeError as error:\n"
        "        texts.add(str(error))\n"
        "dist.all_reduce(ones(2))\n"
        "assert kept.tolist() == [world_size] * 2"
    )
    assert session.evaluate("sorted(texts)")[0] == ["Invalid scalar type"]
    check(session)


WRONG_ON_ONE = """
outputs = [torch.zeros(2) for _ in range(world_size)]
try:
    dist.all_gather(outputs[: 1 if odd else world_size], ones(2))
except (RuntimeError, ValueError):
    {then}
"""


@only("gloo", "it is gloo that refuses these")
def test_what_one_ranks_backend_refuses_it_may_call_again(session: Session) -> None:
    session.execute(WRONG_ON_ONE.format(then="dist.all_gather(outputs, ones(2))"))
    assert set(session.evaluate("sum(outputs).tolist()[0]").values()) == {session.world_size}
    check(session)


@only("gloo", "it is gloo that refuses these")
def test_who_goes_on_after_a_refusal_of_its_own_is_told_of_a_mismatch(session: Session) -> None:
    with pytest.raises(RunError, match=r"called all_gather \(float32 \[2\]\)") as caught:
        session.execute(WRONG_ON_ONE.format(then="if odd: dist.all_reduce(ones(3))"))
    assert "called all_reduce (float32 [3], sum)" in str(caught.value)
    check(session)


def test_each_rank_may_get_a_part_of_another_size(session: Session) -> None:
    session.execute(
        "part = torch.zeros(rank + 1)\n"
        "dist.reduce_scatter(part, [ones(n + 1) for n in range(world_size)])"
    )
    for rank, part in session.evaluate("part.tolist()").items():
        assert part == [float(session.world_size)] * (rank + 1)
    code = (
        "sizes = range(world_size, 0, -1) if odd else range(1, world_size + 1)\n"
        "dist.reduce_scatter(torch.zeros(1 if odd else rank + 1), [ones(n) for n in sizes])"
    )
    with pytest.raises(RunError, match=r"reduce_scatter with parts of .* with parts of "):
        session.execute(code)
    check(session)


def test_the_members_of_a_group_divide_it_alone(session: Session) -> None:
    session.execute(
        "sub = dist.new_group([0, 1])\n"
        "if rank < 2:\n"
        "    mine, subgroups = dist.new_subgroups(1, group=sub)\n"
        "    pair, _ = dist.new_subgroups(2, group=sub)\n"
        "    dist.all_reduce(ones(1), group=pair)\n"
        "    assert kept.item() == 2\n"
        "    assert subgroups[1 - rank] == dist.GroupMember.NON_GROUP_MEMBER\n"
        "    assert dist.get_process_group_ranks(mine) == [rank]\n"
        "everyone = dist.new_group()\n"
        "dist.all_reduce(ones(1), group=everyone)\n"
        "assert kept.item() == world_size"
    )
    with pytest.raises(RunError, match=r"new_group .*with ranks 0, rank 1 with ranks 0-1"):
        session.execute("if rank < 2: dist.new_subgroups(1 + rank, group=sub)")
    check(session)
