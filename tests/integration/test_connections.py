"""Connections stay after a Stop where that is certain to be right, and are made anew elsewhere."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from distsession import RunError, RunInterrupt, Session, errors
from distsession.cluster import reconnect
from distsession.engine.collectives import abort
from tests.backends import STANDIN, only
from tests.integration.conftest import Recorder
from tests.until import Press, until

pytestmark = pytest.mark.timeout(300)

RANKS = 3
SETUP = """
import gc, os, threading, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
kept = 40 + rank
pair = dist.new_group([0, 1])
rest = dist.new_group([1, 2])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))

def step():
    model.zero_grad()
    (model(torch.ones(1, 4)) * (rank + 1)).sum().backward()
    return model.module.bias.grad.tolist()

step(), step()
"""
HANG = "if rank == 1: time.sleep(60)\ndist.barrier()"
# One operation of each kind, whose outcomes tell one rank and one call from another.
WORK = """
def work(number):
    said = []
    for root in range(3):
        x = torch.full((5,), 100.0 * number + rank)
        dist.broadcast(x, root)
        said += x.tolist()
    x = torch.full((1000,), float(number + rank))
    dist.all_reduce(x)
    parts = [torch.zeros(2) for _ in range(3)]
    dist.all_gather(parts, torch.full((2,), float(number * rank)))
    said += [x.sum().item(), *torch.cat(parts).tolist()]
    for group, members in ((pair, (0, 1)), (rest, (1, 2))):
        if rank in members:
            x = torch.full((3,), float(number + rank))
            handle = dist.all_reduce(x, group=group, async_op=True)
            handle.wait()
            said += x.tolist()
    x, y = torch.full((2,), float(number + rank)), torch.zeros(2)
    sent = dist.isend(x, (rank + 1) % 3, tag=number % 7)
    dist.recv(y, (rank - 1) % 3, tag=number % 7)
    sent.wait()
    return said + y.tolist() + step()
"""


def expected(number: int, rank: int) -> list[float]:
    """What a rank should have of it."""
    said = [100.0 * number + root for root in range(3) for _ in range(5)]
    said += [1000 * (3.0 * number + 3), *(float(number * r) for r in range(3) for _ in range(2))]
    for members in ((0, 1), (1, 2)):
        if rank in members:
            said += [2.0 * number + sum(members)] * 3
    return said + [float(number + (rank - 1) % 3)] * 2 + [2.0, 2.0]


def connections() -> frozenset[int]:
    """On a rank: the sockets of gloo, each by a number that no other one gets while it is there."""
    return frozenset(
        os.fstat(descriptor).st_ino
        for _, members in abort._gloo_sets()
        for descriptor in members
        if abort._is_tcp(descriptor) and not abort._is_listening(descriptor)
    )


class Bed:
    """A session, and whether its connections are those that they were."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.number = 0
        session.execute(SETUP + WORK)
        self.note()

    def note(self) -> None:
        """Those that are there from here on; earlier ones take a moment to go."""
        seen = [self.connections()]
        until(lambda: seen.append(self.connections()) or seen[-5:] == seen[-1:] * 5)  # type: ignore[func-returns-value]
        self.before = seen[-1]

    def connections(self) -> Mapping[int, frozenset[int]]:
        return dict(self.session.run(connections))

    def stop(self, code: str) -> None:
        with Press(self.session, self.session.interrupt), pytest.raises(RunInterrupt):
            self.session.execute(code)

    def check(self) -> None:
        """Everything comes to what it should, twice."""
        for _ in range(2):
            self.number += 1
            said = self.session.execute(f"work({self.number})", fetch=True)
            assert said is not None
            for rank in range(RANKS):
                assert said[rank] == expected(self.number, rank), f"rank {rank}"
        assert list(self.session.evaluate("kept").values()) == [40, 41, 42]

    def check_kept(self) -> None:
        assert self.connections() == self.before
        self.check()
        assert self.connections() == self.before

    def check_made_anew(self) -> None:
        after = self.connections()
        assert all(after[rank] - self.before[rank] for rank in range(RANKS))
        self.check()
        self.note()
        self.stop(HANG)
        self.check_kept()


@pytest.fixture(scope="module")
def _shared() -> Iterator[Bed]:
    with Session(RANKS, threads=1, output=Recorder(), hang_grace=0.5) as session:
        yield Bed(session)


@pytest.fixture
def bed(_shared: Bed) -> Bed:
    """Three ranks, which all tests do their harm to; their connections have just been made."""
    _shared.session.reconnect()
    _shared.check()
    _shared.note()
    return _shared


# --- they stay ------------------------------------------------------------------------------------

MEETINGS = {
    "barrier": HANG,
    "a subgroup": (
        "if rank == 1: time.sleep(60)\nif rank < 2: dist.all_reduce(torch.ones(3), group=pair)"
    ),
    "two groups": (
        "if rank == 1: time.sleep(60)\n"
        "dist.all_reduce(torch.ones(3), group=(pair, None, rest)[rank])"
    ),
    "after others": "x = torch.ones(2000)\nfor _ in range(20): dist.all_reduce(x)\n" + HANG,
    "after asynchronous ones": (
        "handles = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(30)]\n"
        "for handle in handles[::2]: handle.wait()\n"
        "del handles\ndist.barrier()\n" + HANG
    ),
    "after messages": (
        "if rank == 0: dist.send(torch.ones(2), 1)\n"
        "elif rank == 1: dist.recv(torch.ones(2), 0)\n" + HANG
    ),
    "DistributedDataParallel": f"step()\nloss = model(torch.ones(1, 4)).sum()\n{HANG}",
    "a backward that failed": (
        "hook = model.module.weight.register_hook(lambda _: 1 / 0)\n"
        f"try: step()\nexcept ZeroDivisionError: pass\nhook.remove()\n{HANG}"
    ),
    "all_to_all": (
        "if rank == 1: time.sleep(60)\ndist.all_to_all_single(torch.empty(3), torch.ones(3))"
    ),
    "the making of a group": "if rank == 1: time.sleep(60)\ndist.new_group([0, 2])",
    "a group that its members make": (
        "if rank == 1: time.sleep(60)\n"
        "if rank != 2: dist.new_group([0, 1], use_local_synchronization=True)"
    ),
    "code that goes on": (
        "try:\n    if rank == 1: time.sleep(60)\n    dist.barrier()\n"
        "except KeyboardInterrupt:\n    try: dist.all_reduce(torch.ones(1))\n"
        "    except KeyboardInterrupt: pass\n    raise"
    ),
    "object collectives": "dist.all_gather_object([None] * 3, rank)\n" + HANG,
}


@pytest.mark.parametrize("code", MEETINGS.values(), ids=MEETINGS)
def test_they_stay_when_everybody_is_stopped_before_an_operation(bed: Bed, code: str) -> None:
    for _ in range(2):
        bed.stop(code)
        board = bed.session.launcher.board  # type: ignore[attr-defined]
        assert not any(region.sequences() for region in board.regions)  # they begin anew
        bed.check_kept()


def test_they_stay_when_a_rank_fails_or_has_finished(bed: Bed) -> None:
    with pytest.raises(RunError):
        bed.session.execute("if rank == 2: raise ValueError('no')\ndist.barrier()")
    bed.check_kept()
    with pytest.raises(errors.CollectiveHangError):
        bed.session.execute("if rank != 2: dist.barrier()")
    bed.check_kept()
    with pytest.raises(RunError):
        bed.session.execute("dist.all_reduce(torch.ones(2 + (rank == 1)))")
    bed.check_kept()


@pytest.mark.parametrize("alone", [False, True], ids=["by all ranks", "by its members"])
def test_a_group_that_was_stopped_while_it_was_made_can_be_made_then(bed: Bed, alone: bool) -> None:
    make = f"new = dist.new_group([0, 2], use_local_synchronization={alone})"
    bed.stop(f"if rank == 2: time.sleep(60)\nif rank != 1 or not {alone}: {make}\n{HANG}")
    said = bed.session.execute(
        f"if rank != 1 or not {alone}: {make}\nx = torch.full((2,), float(rank))\n"
        "if rank != 1: dist.all_reduce(x, group=new)\nx.tolist()",
        fetch=True,
    )
    assert said is not None
    assert list(said.values()) == [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]
    assert all(bed.before[rank] <= each for rank, each in bed.connections().items())
    bed.note()
    bed.stop(HANG)
    bed.check_kept()


def test_what_was_left_in_the_store_is_gone_then(bed: Bed) -> None:
    bed.session.execute(
        "store = lambda: dist.distributed_c10d._get_default_store()\nstore().set('left', '1')"
    )
    bed.stop(HANG)
    assert not any(bed.session.evaluate("store().check(['left'])").values())
    assert bed.session[0].evaluate("dist.group.WORLD.get_group_store().num_keys()")[0] <= 1
    bed.check_kept()


def test_ranks_that_take_no_part_are_in_the_next_generation_too(bed: Bed) -> None:
    code = "if rank == 1: time.sleep(60)\ndist.barrier(group=pair)"
    for _ in range(3):
        with Press(bed.session, bed.session.interrupt), pytest.raises(RunInterrupt):
            bed.session[:2].execute(code)
        assert len({info.generation for info in bed.session.infos}) == 1
        bed.check_kept()


WARNED_OF = """
import warnings
warnings.simplefilter("always")
torch.set_warn_always(True)
for _ in range(20):
    step()
messages = [dist.isend(torch.ones(2), (rank + 1) % 3), dist.irecv(torch.ones(2), (rank - 1) % 3)]
for handle in messages + [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(4)]:
    handle.wait()
torch.set_warn_always(False)
"""


def test_nobody_is_warned_of_what_is_asked_for_the_account_of_them() -> None:
    """In a backward torch tells its warnings as those of the user's code."""
    output = Recorder()
    with Session(RANKS, threads=1, output=output) as session:
        bed = Bed(session)
        session.execute(WARNED_OF)
        assert not [text for r in range(RANKS) if "Warning" in (text := output.text(r, "stderr"))]
        bed.stop(HANG)
        bed.check_kept()


# --- they are made anew ---------------------------------------------------------------------------

HALF_WAY = {
    "a send that nobody receives": "if rank == 0: handle = dist.isend(torch.ones(2), 2)",
    "one of a subgroup": "if rank == 2: handle = dist.isend(torch.ones(2), 1, group=rest)",
    "a receive that is let go": "if rank == 0: dist.irecv(torch.ones(2), 2)",
    "an operation that a rank never issues": (
        "if rank != 1: handle = dist.all_reduce(torch.ones(4), async_op=True)"
    ),
    "one that is over for some": (
        "if rank != 1: handle = dist.broadcast(torch.ones(4), 0, async_op=True)"
    ),
    "another thread": (
        "def beside():\n    if rank != 2: dist.all_reduce(torch.ones(2), group=pair)\n"
        "thread = threading.Thread(target=beside); thread.start(); thread.join()"
    ),
    "torch's own group": (
        "backend = pair._get_backend(torch.device('cpu')) if rank != 2 else None\n"
        "if backend: backend.allreduce([torch.ones(2)]).wait()"
    ),
    "monitored_barrier": "dist.monitored_barrier()",
    "a group that is gone on one rank": (
        "short = dist.new_group([0, 1])\n"
        "if rank == 0:\n    dist.destroy_process_group(short); del short; gc.collect()"
    ),
}


@pytest.mark.parametrize("code", HALF_WAY.values(), ids=HALF_WAY)
def test_they_are_made_anew_where_something_may_be_half_way(bed: Bed, code: str) -> None:
    bed.stop(f"{code}\n{HANG}")
    bed.check_made_anew()


WITHIN = {
    "a wait for a handle": (
        "if rank == 1: time.sleep(60)\ndist.all_reduce(torch.ones(4), async_op=True).wait()"
    ),
    "a receive": "if rank == 1: time.sleep(60)\ndist.recv(torch.ones(2), 1)",
    "a backward": "if rank == 1: time.sleep(60)\nstep()",
}


@pytest.mark.parametrize("code", WITHIN.values(), ids=WITHIN)
def test_they_are_made_anew_when_somebody_waits_within_gloo(bed: Bed, code: str) -> None:
    bed.stop(code)
    bed.check_made_anew()


def test_they_are_made_anew_when_that_is_asked_for(bed: Bed) -> None:
    bed.session.reconnect()
    bed.check_made_anew()


def test_they_are_made_anew_after_a_time_limit(bed: Bed) -> None:
    bed.session.execute(
        "from datetime import timedelta\nsoon = dist.new_group(timeout=timedelta(seconds=1))"
    )
    bed.note()
    with pytest.raises((RunError, errors.CollectiveHangError)):
        bed.session.execute("if rank == 1: time.sleep(3)\ndist.barrier(group=soon)")
    after = bed.connections()
    assert all(after[rank] - bed.before[rank] for rank in range(RANKS))
    bed.check()


def test_they_are_made_anew_where_a_rank_has_begun_something_since(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have gone over by then, and come back from it."""
    look, looks = reconnect.begun_where_whole, list[Any]()

    def then_begin(regions: Any) -> tuple[int, ...]:
        looks.append(begun := look(regions))
        return (*begun[:-1], begun[-1] + 1)

    with monkeypatch.context() as patch:
        patch.setattr(reconnect, "begun_where_whole", then_begin)
        bed.stop(HANG)
    [begun] = looks
    assert len(set(begun)) > 1  # of several groups
    bed.check_made_anew()


def test_they_are_made_anew_where_a_rank_has_lost_its_own_since(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, path = reconnect.begun_where_whole, tmp_path / "looked"

    def then_lose(regions: Any) -> tuple[int, ...]:
        begun = look(regions)
        assert begun
        path.write_text("")
        until(lambda: regions[0].connected_in == -1)
        return begun

    bed.session[0].execute(
        "def beside():\n"
        f"    while not os.path.exists({str(path)!r}): time.sleep(0.01)\n"
        "    pair._get_backend(torch.device('cpu'))\n"
        "thread = threading.Thread(target=beside); thread.start()"
    )
    with monkeypatch.context() as patch:
        patch.setattr(reconnect, "begun_where_whole", then_lose)
        bed.stop(HANG)
    bed.session[0].execute("thread.join()")
    bed.check_made_anew()


def test_a_wait_in_a_group_of_the_users_own_is_ended_too(bed: Bed) -> None:
    """One that was made past the session's, of which nothing is known."""
    bed.session.execute(
        "store = dist.distributed_c10d._get_default_store()\n"
        "own = dist.ProcessGroupGloo(dist.PrefixStore('own', store), rank, 3)\n"
        "own.barrier().wait()"
    )
    bed.note()
    began = time.monotonic()
    bed.stop("if rank == 1: time.sleep(60)\nown.barrier().wait()")
    assert time.monotonic() - began < 30
    bed.session.execute("del own; gc.collect()")
    bed.check()


# --- other sessions -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"check": "off"}, {"check": "detail"}, {"nodes": 3}], ids=str)
def test_they_are_made_anew_where_ranks_do_not_meet(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "nodes" in options:
        from distsession.cluster.local import LocalLauncher

        monkeypatch.setattr(LocalLauncher, "shares_board", False)
    with Session(RANKS, threads=1, output=Recorder(), **options) as session:
        bed = Bed(session)
        bed.stop(HANG)
        after = bed.connections()
        assert all(after[rank] - bed.before[rank] for rank in range(RANKS))
        bed.check()


def test_they_stay_where_several_nodes_share_a_board_and_where_the_check_is_strict() -> None:
    with Session(RANKS, nodes=3, threads=1, check="strict", output=Recorder()) as session:
        bed = Bed(session)
        bed.stop(HANG)
        bed.check_kept()


def test_they_stay_again_after_a_rank_was_replaced() -> None:
    with Session(RANKS, threads=1, output=Recorder()) as session:
        bed = Bed(session)
        bed.stop(HANG)
        bed.check_kept()
        killed = session.infos[1].pid
        with Press(session, lambda: os.kill(killed, signal.SIGKILL)), pytest.raises(RunError):
            session.execute(HANG)
        session.restart([1])
        session[[0, 2]].execute("pair = rest = model = None; gc.collect()")
        bed = Bed(session)
        bed.stop(HANG)
        bed.check()
        bed.note()
        bed.stop(HANG)
        bed.check_kept()


def test_groups_that_user_code_makes_itself_are_right_after_each_stop() -> None:
    with Session(RANKS, threads=1, output=Recorder()) as session:
        session.execute("import time, gc")
        session.execute("dist.destroy_process_group()\ndist.init_process_group('gloo')")
        for _ in range(3):
            with Press(session, session.interrupt), pytest.raises(RunInterrupt):
                session.execute(HANG)
            said = session.execute("x = torch.ones(2); dist.all_reduce(x); x.tolist()", fetch=True)
            assert said is not None
            assert set(map(tuple, said.values())) == {(3.0, 3.0)}


@only("standin", "it is about groups of a device")
@pytest.mark.parametrize("backend", [STANDIN], ids=str)
def test_groups_of_a_device_are_made_anew(backend: Any) -> None:
    with backend.session(2, threads=1, output=Recorder()) as session:
        session.execute(
            "import time\nx = torch.ones(2)\ndist.all_reduce(x)\ninner = dist.group.WORLD.inner"
        )
        with Press(session, session.interrupt), pytest.raises(RunInterrupt):
            session.execute("if rank == 1: time.sleep(60)\ndist.all_reduce(x); x.tolist()")
        assert not any(session.evaluate("dist.group.WORLD.inner is inner").values())
        session.execute("x = torch.ones(2)\ndist.all_reduce(x)")
        assert session.evaluate("x.tolist()")[0] == [2.0, 2.0]


def leave_meetings_late() -> None:
    """On a rank: the main thread gets no processor for a while after an abort."""
    from distsession.engine import control
    from distsession.engine.collectives.recorder import Recorder

    (aborted,) = [each.aborted for each in gc.get_objects() if isinstance(each, Recorder)]
    wait, seconds = aborted.wait, control.ABORT_GRACE_S + 2 * control.STUCK_AFTER_S

    def wait_longer(timeout: float | None = None) -> bool:
        is_aborted = wait(timeout)
        if is_aborted:
            time.sleep(seconds)
        return is_aborted

    aborted.wait = wait_longer  # type: ignore[method-assign]


def test_who_is_slow_to_leave_a_meeting_is_not_stuck() -> None:
    with Session(RANKS, threads=1, output=Recorder(), hang_grace=0.2) as session:
        bed = Bed(session)
        session.run(leave_meetings_late)
        with pytest.raises(RunError, match="ValueError"):
            session.execute("if rank == 2:\n    time.sleep(0.2); raise ValueError\ndist.barrier()")
        bed.check_kept()


def test_they_stay_through_more_stops_than_anything_has_room_for() -> None:
    with Session(RANKS, threads=1, output=Recorder(), hang_grace=0.2) as session:
        bed = Bed(session)
        for number in range(1100):
            session.launcher.abort("failed", "the test said so")
            assert session.recovery.reconnect() == ""
            if number % 20 == 0:
                bed.check()
            if number % 100 == 0:
                with contextlib.suppress(RunError):
                    session.execute("if rank == 2: raise ValueError\ndist.barrier()")
            session.execute("dist.all_reduce(torch.ones(2))")
        bed.check_kept()
        assert {info.generation for info in session.infos} == {1111}
        bed.stop(HANG)
        bed.check_kept()
