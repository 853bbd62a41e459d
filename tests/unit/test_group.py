"""The group that user code holds: what it records, what it refuses, and what it is connected to."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions
from torch.distributed import distributed_c10d as c10d

from distsession.engine.collectives import torch_private
from distsession.engine.collectives.group import NAMES_PER_GENERATION, Groups, SwappableGroup
from distsession.engine.collectives.recorder import Recorder
from distsession.errors import CollectiveError, CollectiveHangError, CollectiveMismatchError
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import Abort, Operation
from tests.until import until

RANKS = 4
LONG_S = 60.0
GIVEN_UP = Abort("failed", "rank 1 has failed.", 0)


class Done:
    """An operation that was over at once."""

    def wait(self, limit: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class Given(Done):
    """An operation that a device was given."""

    is_over = False

    def is_completed(self) -> bool:
        return self.is_over


class Inner:
    """What torch's own group would do: it notes what is asked of it, and has done it at once."""

    _device_types: tuple[torch.device, ...] = ()

    def __init__(self, store: dist.Store | None = None) -> None:
        self.store = store
        self.calls: list[tuple[Any, ...]] = []
        self.on_call: Callable[[], None] = lambda: None
        self.make_work: Callable[[], Any] = Done

    def _call(self, *what: Any) -> Any:
        self.calls.append(what)
        self.on_call()
        return self.make_work()

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(("start",))

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._call("end")

    def allreduce(self, tensors: Any, opts: Any) -> Done:
        return self._call("allreduce")

    def broadcast(self, tensors: Any, opts: Any) -> Done:
        return self._call("broadcast")

    def send(self, tensors: Any, target: int, tag: int) -> Done:
        return self._call("send", target, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Done:
        return self._call("recv", source, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Done:
        return self._call("recv_anysource", tag)

    def abort(self) -> None:
        self._call("abort")


class Process:
    """One rank: its hand on the board, its groups, and what torch was told to call for them."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank = rank
        self.recorder = Recorder(board, rank)
        self.recorder.reset()
        self.region = self.recorder.region
        self.groups = Groups(self.recorder)
        self.make, self.meet, self.name_of = _installed[-1]

    def hold(
        self,
        members: Sequence[int] = range(RANKS),
        name: str = "0",
        limit_s: float = LONG_S,
        backend: str = "gloo",
    ) -> SwappableGroup:
        """A group that is connected to something that does nothing."""
        is_world, limit = len(members) == RANKS, timedelta(seconds=limit_s)
        position = list(members).index(self.rank)
        recipe = torch_private.Recipe(backend)
        group = SwappableGroup(self.groups, name, members, position, limit, is_world, recipe)
        group.inner = Inner()
        return group

    def options(self, members: Sequence[int], name: str = "0") -> Any:
        """What torch passes to whoever makes a group; the default one has no list of ranks."""
        is_world = len(members) == RANKS
        return SimpleNamespace(
            global_ranks_in_group=[] if is_world else list(members),
            group_size=len(members),
            group_rank=list(members).index(self.rank),
            group_id=name,
            timeout=timedelta(seconds=LONG_S),
            store=dist.HashStore(),
        )


_installed: list[tuple[Callable[..., Any], ...]] = []


@pytest.fixture
def board() -> Iterator[Board]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(RANKS))
    board = Board(descriptor, RANKS)
    yield board
    board.close()
    os.close(descriptor)


@pytest.fixture
def ranks(board: Board, monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """All ranks, played in this process; torch is not told of them."""
    monkeypatch.setattr(
        torch_private, "install_group_factory", lambda *hooks: _installed.append(hooks)
    )
    monkeypatch.setattr(torch_private, "make_native_group", lambda store, *_, **__: Inner(store))
    return [Process(board, rank) for rank in range(RANKS)]


@pytest.fixture
def rank(ranks: list[Process]) -> Process:
    """The first one, where the others do not matter."""
    return ranks[0]


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(RANKS) as pool:
        yield pool.submit


def all_reduce(group: SwappableGroup, size: int = 4, *, is_async: bool = False) -> Any:
    opts = AllreduceOptions()
    opts.asyncOp = is_async
    return group.allreduce([torch.ones(size)], opts)


def under_way(process: Process) -> list[Operation]:
    return list(process.region.operations())


# --- collectives ----------------------------------------------------------------------------------


def test_an_operation_is_seen_while_the_inner_group_does_it_and_not_after(rank: Process) -> None:
    group = rank.hold([0], "3")
    seen: list[Operation] = []
    group.inner.on_call = lambda: seen.extend(under_way(rank))
    all_reduce(group)
    [operation] = seen
    assert (operation.name, operation.group) == ("all_reduce", "group 3 (ranks 0)")
    assert operation.is_waiting
    assert under_way(rank) == []
    assert not rank.recorder.is_blocked
    assert rank.region.sequences() == {"group 3 (ranks 0)": 1}


def test_the_default_group_is_called_the_world_and_others_by_their_ranks(rank: Process) -> None:
    for group in (rank.hold(), rank.hold([0, 2, 3], "7")):
        all_reduce(group, is_async=True)
    assert rank.region.sequences() == {"world": 1, "group 7 (ranks 0,2-3)": 1}


def test_a_collective_that_does_not_match_is_refused_before_the_inner_group_hears_of_it(
    ranks: list[Process],
) -> None:
    mine, others = ranks[0].hold(), [process.hold() for process in ranks[1:]]
    for other in others:
        all_reduce(other, 5, is_async=True)
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 .*float32 \[4\]"):
        all_reduce(mine, 4)
    assert mine.inner.calls == []
    assert ranks[0].region.refused() == (("world", 1),)
    assert under_way(ranks[0]) == []


def test_what_a_peer_refuses_to_begin_is_not_issued_either(ranks: list[Process]) -> None:
    mine = ranks[0].hold()
    all_reduce(ranks[1].hold(), 5, is_async=True)
    with pytest.raises(CollectiveMismatchError):
        all_reduce(mine, 4, is_async=True)
    assert mine.inner.calls == []
    assert ranks[0].region.sequences() == {"world": 0}


def test_a_rank_that_does_not_come_within_the_groups_limit_is_named(ranks: list[Process]) -> None:
    mine = ranks[0].hold([0, 2], "5", limit_s=0.05)
    with pytest.raises(CollectiveHangError, match=r"rank 2 did not come to all_reduce.*0\.05 s"):
        all_reduce(mine)
    assert mine.inner.calls == []
    assert under_way(ranks[0]) == []
    assert ranks[0].region.is_damaged


def test_what_fails_in_the_inner_group_is_withdrawn_and_raised(rank: Process) -> None:
    group = rank.hold([0])

    def fail() -> None:
        raise ValueError("no such dtype")

    group.inner.on_call = fail
    for is_async in (False, True):
        with pytest.raises(ValueError, match=r"^no such dtype$"):
            all_reduce(group, is_async=is_async)
        assert rank.region.sequences() == {"group 0 (ranks 0)": 0}
        assert not rank.recorder.is_blocked


def test_what_fails_once_the_inner_group_has_accepted_it_uses_up_its_number(rank: Process) -> None:
    group = rank.hold([0])

    class Failing(Given):
        def wait(self, *_: Any) -> bool:
            raise RuntimeError("Invalid scalar type")

    group.inner.make_work = Failing
    with pytest.raises(RuntimeError, match=r"^Invalid scalar type$"):
        all_reduce(group)
    assert rank.region.sequences() == {"group 0 (ranks 0)": 1}
    assert rank.region.refused() == (("group 0 (ranks 0)", 1),)  # for it runs nothing any more
    assert under_way(rank) == []


def test_a_connection_that_breaks_since_the_group_was_given_up_says_why(rank: Process) -> None:
    group = rank.hold([0])

    def fail() -> None:
        rank.recorder.abort = GIVEN_UP
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    group.inner.on_call = fail
    with pytest.raises(CollectiveError, match=r"^rank 1 has failed\. \(torch: Connection closed"):
        all_reduce(group)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_group_that_was_given_up_begins_nothing(rank: Process, is_async: bool) -> None:
    group = rank.hold([0])
    all_reduce(group)
    rank.recorder.abort = GIVEN_UP
    with pytest.raises(CollectiveError, match=r"^rank 1 has failed\. \(torch: Connection closed"):
        all_reduce(group, is_async=is_async)
    assert len(group.inner.calls) == 1
    assert rank.region.sequences() == {"group 0 (ranks 0)": 1}


def test_a_root_that_is_no_member_is_refused_before_anything_is_recorded(rank: Process) -> None:
    group = rank.hold([0, 2], "5")
    opts = BroadcastOptions()
    for root in (-1, 2):
        opts.rootRank = root
        with pytest.raises(ValueError, match=rf"no rank {root} in this process group of 2 ranks"):
            group.broadcast([torch.ones(1)], opts)
    assert rank.region.sequences() == {}


# --- what is given to a device --------------------------------------------------------------------


@pytest.fixture
def on_devices(ranks: list[Process]) -> list[SwappableGroup]:
    """The default group of each rank, of a backend that waits on a device."""
    groups = [process.hold(backend="nccl") for process in ranks]
    for group in groups:
        group.inner.make_work = Given
        group._met.add("cuda")  # its communicator has been made
    return groups


def test_members_meet_before_the_first_operation_of_a_communicator_and_not_later(
    ranks: list[Process], beside: Callable[..., Future[Any]]
) -> None:
    groups = [process.hold(backend="nccl") for process in ranks]
    first = beside(all_reduce, groups[0])
    until(lambda: any(operation.in_thread for operation in under_way(ranks[0])))
    assert groups[0].inner.calls == []
    others = [beside(all_reduce, group) for group in groups[1:]]
    for done in (first, *others):
        done.result(LONG_S)
    all_reduce(groups[0])  # nobody else has come
    assert len(groups[0].inner.calls) == 2


def test_what_a_device_was_given_is_enqueued_until_it_is_complete(
    ranks: list[Process], on_devices: list[SwappableGroup]
) -> None:
    work = all_reduce(on_devices[0])
    assert isinstance(work, Given)  # torch's own handle
    [operation] = under_way(ranks[0])
    assert (operation.is_enqueued, operation.is_waiting) == (True, False)
    work.is_over = True
    ranks[0].recorder.note_completed()
    assert under_way(ranks[0]) == []


def test_of_a_mismatch_on_devices_the_later_rank_hears_and_its_device_does_not(
    ranks: list[Process], on_devices: list[SwappableGroup]
) -> None:
    all_reduce(on_devices[1], 5)
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 .*float32 \[4\]") as caught:
        all_reduce(on_devices[0], 4)
    assert "elsewhere its tensors may have changed" in str(caught.value.remedy)
    assert (on_devices[0].inner.calls, on_devices[1].inner.calls) == ([], [("allreduce",)])
    assert ranks[0].region.refused() == (("world", 1),)


def test_with_check_strict_members_meet_before_each_operation(
    ranks: list[Process], on_devices: list[SwappableGroup], beside: Callable[..., Future[Any]]
) -> None:
    for process in ranks:
        process.groups.strict = True
    first = beside(all_reduce, on_devices[0], 4)
    until(lambda: any(operation.in_thread for operation in under_way(ranks[0])))
    others = [beside(all_reduce, group, 5) for group in on_devices[1:]]
    for done in (first, *others):
        with pytest.raises(CollectiveMismatchError):
            done.result(LONG_S)
    assert all(group.inner.calls == [] for group in on_devices)


def test_what_is_put_together_is_enqueued_at_the_end_of_that(
    ranks: list[Process], on_devices: list[SwappableGroup]
) -> None:
    group = on_devices[0]
    group._start_coalescing(torch.device("cpu"))
    group.send([torch.ones(2)], 1, 0)
    group.recv([torch.ones(2)], 3, 0)
    assert [operation.is_enqueued for operation in under_way(ranks[0])] == [False, False]
    work = group._end_coalescing(torch.device("cpu"))
    assert [operation.is_enqueued for operation in under_way(ranks[0])] == [True, True]
    work.is_over = True
    ranks[0].recorder.note_completed()
    assert under_way(ranks[0]) == []


def test_what_an_error_leaves_open_is_ended_and_connected_anew(
    ranks: list[Process], on_devices: list[SwappableGroup]
) -> None:
    group, cpu = on_devices[0], torch.device("cpu")
    group.leave_coalescing(cpu)
    group._start_coalescing(cpu)
    group.leave_coalescing(cpu)
    assert group.inner.calls == [("start",), ("end",)]
    assert not ranks[0].region.is_damaged  # nothing was put into it
    group._start_coalescing(cpu)
    group.send([torch.ones(2)], 1, 0)
    group.leave_coalescing(cpu)
    assert group.inner.calls[-1] == ("end",)
    assert ranks[0].region.is_damaged
    group.send([torch.ones(2)], 1, 0)
    assert all(operation.is_enqueued for operation in under_way(ranks[0]))


def test_a_mixed_group_does_each_operation_as_its_tensors_device_does(rank: Process) -> None:
    group = rank.hold([0], "3", backend="cpu:gloo,cuda:nccl")
    group.inner.make_work = Given
    all_reduce(group)
    assert under_way(rank) == []  # it was waited for
    assert group._enqueued_on(torch.ones(1)) == ""
    assert group._enqueued_on(None) == "cuda"  # a barrier


# --- messages -------------------------------------------------------------------------------------


def test_messages_are_counted_for_each_pair_and_tag_by_the_worlds_ranks(
    ranks: list[Process],
) -> None:
    group = ranks[1].hold([1, 3], "7")
    for target, tag in ((1, 0), (1, 0), (1, 9)):
        group.send([torch.ones(1)], target, tag)
    group.recv([torch.ones(1)], 1, 0)
    pair = "group 7 (ranks 1,3)"
    assert ranks[1].region.sequences() == {
        f"{pair} 1->3": 2,
        f"{pair} 1->3 tag 9": 1,
        f"{pair} 3->1": 1,
    }
    assert group.inner.calls[-2:] == [("send", 1, 9), ("recv", 1, 0)]


def test_both_ends_of_a_message_are_compared_in_one_stream(ranks: list[Process]) -> None:
    ranks[0].hold().send([torch.ones(3)], 1, 0)
    with pytest.raises(CollectiveMismatchError, match=r"3 elements"):
        ranks[1].hold().recv([torch.ones(4)], 0, 0)


def test_no_message_goes_to_or_comes_from_a_rank_that_there_is_not(rank: Process) -> None:
    group = rank.hold([0, 2], "5")
    with pytest.raises(ValueError, match="no rank 2 in this process group of 2 ranks"):
        group.send([torch.ones(1)], 2, 0)
    with pytest.raises(ValueError, match="no rank -1 in this process group"):
        group.recv([torch.ones(1)], -1, 0)
    assert rank.region.sequences() == {}


def test_who_has_begun_to_send_is_known_until_the_message_is_taken(ranks: list[Process]) -> None:
    mine, its = ranks[0].hold([0, 2, 3], "5"), ranks[3].hold([0, 2, 3], "5")
    assert mine.sender(0) == -1
    its.send([torch.ones(1)], 0, 4)
    assert mine.sender(0) == -1
    assert mine.sender(4) == 2  # within the group
    mine.recv([torch.ones(1)], 2, 4)
    assert mine.sender(4) == -1


def test_a_receive_from_anyone_is_from_whoever_sends_first(ranks: list[Process]) -> None:
    mine, its = ranks[0].hold(), ranks[2].hold()
    work = mine.recv_anysource([torch.ones(1)], 0)
    assert not work.is_completed()
    its.send([torch.ones(1)], 0, 0)
    assert work.wait()
    assert work.source_rank() == 2
    assert mine.inner.calls == [("recv", 2, 0)]
    assert ranks[0].region.sequences()["world any->0"] == 1
    assert under_way(ranks[0]) == []


def test_a_receive_from_anyone_ends_when_the_group_is_given_up(
    ranks: list[Process], beside: Callable[..., Future[Any]]
) -> None:
    work = ranks[0].hold().recv_anysource([torch.ones(1)], 0)
    waits = beside(work.wait)
    until(lambda: ranks[0].region.sequences().get("world any->0") == 1)
    ranks[0].recorder.abort = GIVEN_UP
    with pytest.raises(CollectiveError, match=r"^rank 1 has failed\. \(torch: Connection closed"):
        waits.result(LONG_S)


def test_where_nothing_is_compared_torch_itself_receives_from_anyone(rank: Process) -> None:
    group = rank.hold()
    rank.recorder.check = False
    group.recv_anysource([torch.ones(1)], 3)
    assert group.inner.calls == [("recv_anysource", 3)]


# --- what is no collective of torch's -------------------------------------------------------------


def test_what_is_recorded_is_seen_for_as_long_as_it_lasts(rank: Process) -> None:
    group = rank.hold()
    with group.recorded(("reshape",)):
        [operation] = under_way(rank)
        assert (operation.name, operation.is_waiting) == ("reshape", True)
    assert under_way(rank) == []
    assert not rank.recorder.is_blocked
    with group.recorded(("recv",), from_any=True):
        assert [operation.group for operation in under_way(rank)] == ["world any->0"]


def test_what_meets_begins_when_all_members_have_come(
    ranks: list[Process], beside: Callable[..., Future[Any]]
) -> None:
    begun: list[int] = []

    def come(process: Process) -> None:
        with process.hold([0, 1, 2], "5").recorded(("reshape",), meets=True):
            begun.append(process.rank)

    early = [beside(come, process) for process in ranks[:2]]
    until(lambda: all(len(under_way(process)) == 1 for process in ranks[:2]))
    assert begun == []
    come(ranks[2])
    for future in early:
        future.result(LONG_S)
    assert sorted(begun) == [0, 1, 2]


def test_what_does_not_meet_within_its_own_limit_ends(rank: Process) -> None:
    group = rank.hold([0, 1], "5")
    with (
        pytest.raises(CollectiveHangError, match=r"rank 1 did not come to reshape.*0\.05 s"),
        group.recorded(("reshape",), meets=True, limit=0.05),
    ):
        pytest.fail("it has begun")
    assert under_way(rank) == []


def test_what_meets_something_else_is_refused(ranks: list[Process]) -> None:
    all_reduce(ranks[1].hold([0, 1], "5"), is_async=True)
    with (
        pytest.raises(CollectiveMismatchError, match="rank 1 called all_reduce"),
        ranks[0].hold([0, 1], "5").recorded(("reshape",), meets=True),
    ):
        pytest.fail("it has begun")
    assert ranks[0].region.refused() == (("group 5 (ranks 0-1)", 1),)


def test_what_is_recorded_ends_also_where_it_fails_and_says_why(rank: Process) -> None:
    group = rank.hold()
    with pytest.raises(ValueError, match="no such shape"), group.recorded(("reshape",)):
        raise ValueError("no such shape")

    def break_off() -> None:
        with group.recorded(("reshape",)):
            rank.recorder.abort = GIVEN_UP
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    with pytest.raises(CollectiveError, match=r"^rank 1 has failed\. \(torch: Connection closed"):
        break_off()
    assert under_way(rank) == []
    assert not rank.recorder.is_blocked
    assert rank.region.sequences() == {"world": 2}


def test_a_wait_for_the_store_is_recorded_with_the_keys_as_the_user_knows_them(
    rank: Process,
) -> None:
    rank.groups.generation = 3
    for is_limited, name in ((False, "store_wait"), (True, "limited_store_wait")):
        with rank.groups.record_store_wait(["generation3/a", "b"], is_limited):
            [operation] = under_way(rank)
            assert (operation.name, operation.detail) == (name, "keys 'a', 'b'")
            assert operation.is_waiting
        assert under_way(rank) == []


def test_a_wait_for_the_store_is_not_recorded_where_it_is_for_a_group(
    rank: Process, beside: Callable[..., Future[Any]]
) -> None:
    def wait() -> None:
        with rank.groups.record_store_wait(["a"], False):
            assert [operation.name for operation in under_way(rank)] == expected

    expected: list[str] = []
    beside(wait).result(LONG_S)  # in another thread
    rank.groups.prepare(dist.HashStore(), 0)
    wait()  # while the groups are connected
    rank.groups._meeting = None
    expected = ["reshape"]
    with rank.hold().recorded(("reshape",)):
        wait()  # within an operation


# --- connections ----------------------------------------------------------------------------------


def test_connecting_replaces_the_inner_group_and_lets_the_old_one_go(rank: Process) -> None:
    group = rank.hold()
    old, store = weakref.ref(group.inner), dist.HashStore()
    group.connect(store)
    assert group.inner.store is store
    until(lambda: old() is None, "the end of the old group")
    group.abort()
    assert group.inner.calls == [("abort",)]


def test_a_group_that_could_not_be_connected_says_so_until_it_is(
    rank: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = rank.hold([0])

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "make_native_group", fail)
        with pytest.raises(RuntimeError, match="refused"):
            group.connect(dist.HashStore())
    for use in (
        lambda: all_reduce(group),
        lambda: group.send([torch.ones(1)], 0, 0),
        lambda: group.recv_anysource([torch.ones(1)], 0),
        lambda: group.recorded(("reshape",)).__enter__(),
        group.check_usable,
    ):
        with pytest.raises(CollectiveError, match=r"^this process group is not connected\.$"):
            use()
    assert rank.region.sequences() == {}
    group.connect(dist.HashStore())
    all_reduce(group)
    assert group.inner.calls == [("allreduce",)]


def test_a_group_of_torchs_own_works_before_and_after_it_is_replaced(board: Board) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "install_group_factory", lambda *_: None)
        groups = Groups(Recorder(board, 0))
    group = SwappableGroup(groups, "0", [0], 0, timedelta(seconds=LONG_S), True)
    inner = []
    for _ in range(2):
        group.connect(dist.HashStore())
        inner.append(group.inner)
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()
        assert tensor.tolist() == [1, 1]
    assert inner[0] is not inner[1]
    assert groups.recorder.region.sequences() == {"own group (rank 0)": 4}
    assert groups.recorder.region.operations() == ()


def test_a_new_generation_counts_from_the_beginning(rank: Process) -> None:
    group = rank.hold([0])
    for _ in range(3):
        all_reduce(group)
    rank.recorder.reset()
    rank.groups.prepare(dist.HashStore(), 1)
    all_reduce(group)
    assert rank.region.sequences() == {"group 0 (ranks 0)": 1}


def test_time_to_connect_is_limited_only_while_the_ranks_meet(
    ranks: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[timedelta | None] = []

    def make(*_: Any, connect_timeout: timedelta | None = None, **__: Any) -> Inner:
        limits.append(connect_timeout)
        return Inner()

    monkeypatch.setattr(torch_private, "make_native_group", make)
    ranks[0].groups.prepare(dist.HashStore(), 1, connect_timeout=7)
    group = ranks[0].hold()
    group.connect(dist.HashStore())
    ranks[0].groups._meeting = None
    group.connect(dist.HashStore())
    assert limits == [timedelta(seconds=7), None]


@pytest.fixture
def rejoined(rank: Process, monkeypatch: pytest.MonkeyPatch) -> SwappableGroup:
    """The default group of rank 0, as torch knows it, in a new generation."""
    world = rank.hold()
    monkeypatch.setattr(c10d._world, "default_pg", world)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    monkeypatch.setattr(torch_private, "set_store", lambda *_: None)
    monkeypatch.setattr(torch_private, "refresh_modules", lambda: None)
    return world


def test_the_default_group_meets_in_its_generations_part_of_the_store(
    rank: Process, rejoined: SwappableGroup
) -> None:
    assert rank.groups.has_world
    meeting = dist.HashStore()
    rank.groups.prepare(meeting, 1)
    rank.groups.reconnect_world(meeting)
    rejoined.inner.store.set("port", "1")
    assert meeting.check(["world/port"])


def test_groups_that_all_members_know_are_connected_anew_and_others_say_why_not(
    rank: Process, rejoined: SwappableGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch_private, "set_group_count", counts.append)
    rank.recorder.check = False  # nobody else makes them
    known = rank.make(rank.options([0, 1], "5"))
    unknown = rank.make(rank.options([0, 2, 3], "6"))
    meeting = dist.HashStore()
    theirs = {"5": [0, 1], "6": [0, 2, 3]}
    for other, groups in ((1, theirs), (2, theirs), (3, {"6": [0, 3]})):
        meeting.set(f"groups/{other}", json.dumps(groups))
    before = known.inner
    rank.groups.prepare(meeting, 2)
    rank.groups.reconnect_others(meeting, alone=False)
    assert json.loads(meeting.get("groups/0")) == theirs
    assert counts == [2 * NAMES_PER_GENERATION]
    assert known.inner is not before
    known.inner.store.set("port", "1")
    assert meeting.check(["group5/port"])
    with pytest.raises(CollectiveError, match=r"before rank 3 was replaced.*new_group\(\[0, 2, 3"):
        all_reduce(unknown)
    with pytest.raises(CollectiveError, match=r"before rank 3 was replaced"):
        _ = unknown.inner.options


def test_where_every_rank_is_new_there_is_nothing_to_agree_on(
    rank: Process, rejoined: SwappableGroup
) -> None:
    meeting = dist.HashStore()
    rank.groups.prepare(meeting, 1)
    rank.groups.reconnect_others(meeting, alone=True)
    assert not meeting.check(["groups/0"])
    with rank.groups.record_store_wait(["a"], False):  # nobody is meeting any more
        assert len(under_way(rank)) == 1


# --- the making of groups -------------------------------------------------------------------------


def test_the_default_group_is_made_of_all_ranks_in_the_part_of_the_store_where_they_meet(
    rank: Process,
) -> None:
    alone = rank.make(rank.options(range(RANKS)))
    assert alone.members == list(range(RANKS))
    meeting = dist.HashStore()
    rank.groups.prepare(meeting, 1)
    rank.make(rank.options(range(RANKS))).inner.store.set("port", "1")
    assert meeting.check(["world/port"])
    assert rank.region.sequences() == {}


def test_the_making_of_a_group_waits_for_its_members(
    ranks: list[Process], beside: Callable[..., Future[Any]]
) -> None:
    first = beside(ranks[0].make, ranks[0].options([0, 2], "5"))
    until(lambda: len(under_way(ranks[0])) == 1)
    [operation] = under_way(ranks[0])
    assert (operation.name, operation.group) == ("new_group", "group 5 (ranks 0,2)")
    assert not first.done()
    ranks[2].make(ranks[2].options([0, 2], "5"))
    assert first.result(LONG_S).inner is not None


def test_ranks_that_make_different_groups_are_told_before_they_meet(
    ranks: list[Process], rejoined: SwappableGroup
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for process in ranks[1:]:
            process.recorder.check = False  # they do not wait
            patch.setattr(c10d._world, "default_pg", process.hold())
            process.meet([0, 1] if process.rank < 3 else None)
    with pytest.raises(CollectiveMismatchError, match=r"rank 3 .*ranks 0-3") as caught:
        ranks[0].meet([0, 1])
    assert "ranks 0-1" in str(caught.value)
    assert ranks[0].region.refused() == (("world", 1),)


@pytest.mark.parametrize("asked", [[0, 0], [0, RANKS]])
def test_nobody_meets_for_a_group_that_torch_refuses(
    rank: Process, rejoined: SwappableGroup, asked: list[int]
) -> None:
    rank.meet(asked)
    assert rank.region.sequences() == {}


def test_nobody_meets_where_the_default_group_is_not_ours(rank: Process) -> None:
    rank.meet(None)
    assert rank.region.sequences() == {}


def test_groups_of_one_name_are_numbered_so_none_is_compared_with_the_one_before(
    rank: Process,
) -> None:
    options = rank.options([0], "5")
    first = rank.make(options)
    all_reduce(first)
    second, other = rank.make(options), rank.make(rank.options([0], "6"))
    assert (first.number, second.number, other.number) == (0, 1, 0)
    streams = [group._own_stream() for group in (first, second)]
    assert streams[0].key != streams[1].key
    assert [stream.count for stream in streams] == [2, 1]  # each with its new_group
    rank.groups.prepare(dist.HashStore(), 1)
    assert rank.make(options).number == 0


def test_a_name_that_went_on_into_a_generation_is_taken_there(
    rank: Process, rejoined: SwappableGroup
) -> None:
    group = rank.make(rank.options([0], "5"))
    meeting = dist.HashStore()
    for other in range(1, RANKS):
        meeting.set(f"groups/{other}", "{}")
    rank.groups.prepare(meeting, 1)
    rank.groups.reconnect_others(meeting, alone=False)
    assert group.number == 0
    assert rank.make(rank.options([0], "5")).number == 1


def test_members_name_a_group_alike_however_many_groups_they_are_in(ranks: list[Process]) -> None:
    first, second, fresh = ranks[0], ranks[1], ranks[2]
    first.name_of([0, 3])
    names = [process.name_of([0, 1]) for process in (first, second)]
    assert names[0] == names[1]
    again = first.name_of([0, 1])
    fresh.groups.prepare(dist.HashStore(), 1)
    assert len({names[0], again, first.name_of([0, 2]), fresh.name_of([0, 1])}) == 4


def test_the_room_of_a_group_that_is_gone_is_given_to_another(rank: Process) -> None:
    group = rank.hold([0], "5")
    all_reduce(group)
    at = group._own_stream().at
    del group
    other = rank.hold([0], "6")
    all_reduce(other)
    assert other._own_stream().at == at
    assert rank.region.sequences() == {"group 6 (ranks 0)": 1}


def test_torch_can_name_and_describe_a_group(rank: Process) -> None:
    group = rank.hold([0, 2], "5")
    assert group.group_name == "5"
    group._set_group_name("8")
    group._set_group_desc("my pair")
    assert (group.getGroupName(), group.group_desc, group.name()) == ("8", "my pair", "gloo")
    assert repr(group) == "<process group 8 of ranks 0,2>"


# --- whether connections are whole ----------------------------------------------------------------


@pytest.fixture
def whole(rank: Process, rejoined: SwappableGroup) -> Process:
    """Rank 0, whose groups have just been connected."""
    rank.groups._alive["0"] = rejoined
    connect(rank)
    return rank


def connect(process: Process) -> None:
    meeting = dist.HashStore()
    process.recorder.reset()
    process.groups.prepare(meeting, 1)
    process.groups.reconnect_others(meeting, alone=True)


def is_whole(process: Process) -> bool:
    process.recorder.connections.note_rest()
    return process.recorder.connections.are_whole and process.region.connected_in == 1


def test_operations_that_are_over_leave_the_connections_whole(whole: Process) -> None:
    group = whole.hold([0], "3")
    for is_async in (False, True):
        all_reduce(group, is_async=is_async)
    group.send([torch.ones(2)], 0, 0).wait()
    assert is_whole(whole)
    assert whole.recorder.begun == 3
    assert sum(count for count, _ in whole.region.handed_on().values()) == 3
    assert not whole.recorder.connections.give_up()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_operation_that_fails_within_loses_them(whole: Process, is_async: bool) -> None:
    group = whole.hold([0], "3")

    def fail() -> None:
        raise KeyboardInterrupt

    group.inner.on_call = fail
    with pytest.raises(KeyboardInterrupt):
        all_reduce(group, is_async=is_async)
    assert not is_whole(whole)


@pytest.mark.parametrize("is_async", [False, True])
def test_within_an_operation_they_would_have_to_be_shut(whole: Process, is_async: bool) -> None:
    group, said = whole.hold([0], "3"), list[bool]()
    group.inner.on_call = lambda: said.append(whole.recorder.connections.give_up())
    all_reduce(group, is_async=is_async)
    assert said == [True]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_was_given_up_just_before_it_begins_is_not_begun(
    whole: Process, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has given it up then has seen that nobody is within, and shuts nothing."""
    group, connections = whole.hold([0], "3"), whole.recorder.connections
    enter = whole.recorder.enter

    def give_up_first(*given: Any) -> None:
        whole.recorder.abort = GIVEN_UP
        assert not connections.give_up()
        enter(*given)

    monkeypatch.setattr(whole.recorder, "enter", give_up_first)
    with pytest.raises(CollectiveError, match="rank 1 has failed"):
        all_reduce(group, is_async=is_async)
    assert group.inner.calls == []
    assert is_whole(whole)
    assert whole.recorder.begun == 0
    assert whole.region.handed_on() == {}


def test_a_message_ends_when_it_is_waited_for(whole: Process) -> None:
    group = whole.hold([0, 1], "3")
    work = group.send([torch.ones(2)], 1, 0)
    assert not is_whole(whole)
    work.wait()
    assert is_whole(whole)


def test_an_operation_ends_when_its_handle_says_so_or_is_waited_for(whole: Process) -> None:
    group, given = whole.hold([0], "3"), Given()
    group.inner.make_work = lambda: given
    work = all_reduce(group, is_async=True)
    assert not is_whole(whole)
    work.wait()
    assert is_whole(whole)
    all_reduce(group, is_async=True)
    assert not is_whole(whole)
    given.is_over = True
    assert is_whole(whole)


def test_what_another_thread_does_loses_them(
    whole: Process, beside: Callable[..., Future[Any]]
) -> None:
    beside(all_reduce, whole.hold([0], "3")).result(LONG_S)
    assert not is_whole(whole)


def test_a_group_that_is_gone_loses_them(whole: Process) -> None:
    group = whole.make(whole.options([0], "5"))
    assert is_whole(whole)
    del group
    assert not is_whole(whole)


@pytest.mark.parametrize("name", ["_get_backend", "abort", "shutdown"])
def test_what_user_code_takes_from_within_loses_them_and_what_torch_takes_does_not(
    whole: Process, name: str
) -> None:
    group = whole.hold([0], "3")
    setattr(group.inner, name, lambda *_: None)
    for filename, expected in ((torch.__file__, True), (__file__, False)):
        exec(compile(f"group.{name}()", filename, "exec"), {"group": group})
        assert is_whole(whole) is expected


def test_a_monitored_barrier_loses_them(whole: Process) -> None:
    group = whole.hold([0], "3")
    group.inner._get_backend = lambda _: SimpleNamespace(monitored_barrier=lambda *_: None)
    group.monitored_barrier()
    assert not is_whole(whole)


def test_a_group_of_the_users_own_world_loses_them(whole: Process) -> None:
    made = whole.make(whole.options(range(RANKS)))
    assert made.is_world
    assert not is_whole(whole)


def test_a_group_whose_making_breaks_off_loses_them_and_one_that_was_not_begun_does_not(
    whole: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole.recorder.check = False  # nobody else makes it
    enter = whole.recorder.enter

    def give_up_first(*given: Any) -> None:
        whole.recorder.abort = GIVEN_UP
        enter(*given)

    with monkeypatch.context() as patch:
        patch.setattr(whole.recorder, "enter", give_up_first)
        with pytest.raises(CollectiveError, match="rank 1 has failed"):
            whole.make(whole.options([0, 1], "5"))
    whole.recorder.abort = None
    assert is_whole(whole)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(torch_private, "make_native_group", fail)
    with pytest.raises(RuntimeError, match="refused"):
        whole.make(whole.options([0, 1], "6"))
    assert not is_whole(whole)


@pytest.mark.parametrize(
    "why", ["no check", "other hosts", "torch compares", "connects later", "a device"]
)
def test_they_are_never_whole_where_not_everything_is_known(
    rank: Process, rejoined: SwappableGroup, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [rejoined]
    match why:
        case "no check":
            rank.recorder.check = False
        case "other hosts":
            rank.recorder.here = frozenset({0, 1})
        case "torch compares":
            rank.groups._detail = True
        case "connects later":
            monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        case "a device":
            kept.append(rank.hold([0, 1], "5", backend="cpu:gloo,cuda:nccl"))
            rank.groups._alive["5"] = kept[-1]
            monkeypatch.setattr(torch_private, "abort_backends", lambda _: None)
    connect(rank)
    assert not is_whole(rank)


def test_a_generation_goes_on_with_the_groups_that_there_are(
    whole: Process, rejoined: SwappableGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch_private, "set_group_count", counts.append)
    stores: list[tuple[Any, dist.Store]] = []
    monkeypatch.setattr(torch_private, "set_store", lambda *what: stores.append(what))
    group, meeting = whole.make(whole.options([0], "5")), dist.HashStore()
    before, name = group.inner, whole.name_of([0, 1])
    all_reduce(group)
    whole.recorder.reset()
    whole.groups.keep(meeting, 2)
    assert stores == [(rejoined, meeting)]
    assert group.inner is before
    assert counts == [2 * NAMES_PER_GENERATION]
    assert whole.name_of([0, 1]) != name
    all_reduce(group)
    assert whole.recorder.begun == 1
    assert whole.region.sequences() == {"group 5 (ranks 0)": 1}
