"""Ranks that meet on the board, each played by a thread."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from distsession.engine.collectives.recorder import MANY, Recorder, Stream
from distsession.errors import (
    CollectiveError,
    CollectiveHangError,
    CollectiveMismatchError,
)
from distsession.protocol import board as layout
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import Abort, TimedOut
from distsession.protocol.rank_state import AbortReason
from tests.until import until

RANKS = 3
SUM = ("all_reduce", torch.float32, torch.Size([4]), "sum")
WIDE = ("all_reduce", torch.float32, torch.Size([5]), "sum")
BARRIER = ("barrier",)
LONG_S = 60.0


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    """Each rank's hand on the operations of the world."""
    with recorders(RANKS) as made:
        yield world(made)


@pytest.fixture
def crowd() -> Iterator[list[Recorder]]:
    """More ranks than are compared one by one."""
    with recorders(MANY + 1) as made:
        yield made


@contextmanager
def recorders(count: int) -> Iterator[list[Recorder]]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(count))
    board = Board(descriptor, count)
    made = [Recorder(board, rank) for rank in range(count)]
    for recorder in made:
        recorder.reset()
    yield made
    board.close()
    os.close(descriptor)


def world(made: list[Recorder], name: str = "world") -> list[Stream]:
    return [recorder.stream((0, 0), name, list(range(len(made)))) for recorder in made]


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(RANKS) as pool:
        yield pool.submit


def come(stream: Stream, key: tuple[Any, ...], timeout: float | None = LONG_S) -> None:
    """Do an operation as a group does that its caller waits for."""
    at = stream.post(key)
    try:
        stream.meet(at, timeout)
    except CollectiveMismatchError:
        stream.refuse(at)
        raise
    except CollectiveError:
        stream.fail(at)
        raise
    stream.end(at)


def test_nobody_goes_on_before_all_have_come(
    streams: list[Stream], beside: Callable[..., Future[Any]]
) -> None:
    early = [beside(come, stream, SUM) for stream in streams[1:]]
    until(lambda: all(stream.count == 1 for stream in streams[1:]))
    assert not any(future.done() for future in early)
    come(streams[0], SUM)
    assert [future.result(LONG_S) for future in early] == [None, None]


def test_many_in_a_row(streams: list[Stream], beside: Callable[..., Future[Any]]) -> None:
    def work(stream: Stream) -> None:
        for number in range(300):
            come(stream, (SUM, WIDE, BARRIER)[number % 3])

    for future in [beside(work, stream) for stream in streams]:
        future.result(LONG_S)
    assert [stream.count for stream in streams] == [300] * RANKS


def test_each_rank_is_told_who_called_what(
    streams: list[Stream], beside: Callable[..., Future[Any]]
) -> None:
    came = [beside(come, stream, WIDE if n == 1 else SUM) for n, stream in enumerate(streams)]
    for future in came:
        with pytest.raises(CollectiveMismatchError) as caught:
            future.result(LONG_S)
        # On a busy machine the last one may come too late for the first two to name it.
        assert re.search(r"rank 1 (called all_reduce )?with float32 \[5\]", str(caught.value))
        assert "float32 [4]" in str(caught.value)


def test_who_comes_when_the_others_have_raised_is_told_of_all(
    streams: list[Stream], beside: Callable[..., Future[Any]]
) -> None:
    early = [beside(come, streams[0], SUM), beside(come, streams[1], WIDE)]
    for future in early:
        with pytest.raises(
            CollectiveMismatchError,
            match=r"^rank 0 called all_reduce with float32 \[4\], rank 1 with float32 \[5\]",
        ):
            future.result(LONG_S)
    with pytest.raises(
        CollectiveMismatchError,
        match=r"^rank 1 called all_reduce with float32 \[5\].*, ranks 0,2 with float32 \[4\]",
    ):
        beside(come, streams[2], SUM).result(LONG_S)


def test_a_rank_that_does_not_come_is_named(
    streams: list[Stream], beside: Callable[..., Future[Any]]
) -> None:
    came = [beside(come, stream, BARRIER, 0.3) for stream in streams[:2]]
    for future in came:
        with pytest.raises(CollectiveHangError, match="rank 2 did not come to barrier"):
            future.result(LONG_S)


def test_a_group_that_is_given_up_frees_who_waits_and_refuses_who_comes(
    streams: list[Stream], beside: Callable[..., Future[Any]]
) -> None:
    waits = beside(come, streams[0], SUM)
    until(lambda: streams[0].count == 1)
    abort = Abort("failed", "rank 1 has failed.", 0)
    for stream in streams:
        stream.recorder.abort = abort
    with pytest.raises(CollectiveError, match=r"rank 1 has failed\."):
        waits.result(LONG_S)
    with pytest.raises(CollectiveError, match=r"rank 1 has failed\."):
        streams[2].post(SUM)
    assert streams[2].count == 0


def test_the_more_ranks_share_a_processor_the_longer_they_sleep_and_never_much_of_their_wait(
    streams: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    def longest(ranks: int) -> float:
        here = range(ranks)
        return Recorder(streams[0].recorder.board, 0, here=here).pause_after(LONG_S)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert [longest(ranks) for ranks in (2, 4, 16, 64)] == [0.001, 0.001, 0.004, 0.016]
    crowd = Recorder(streams[0].recorder.board, 0, here=range(64))
    assert [crowd.pause_after(waited) for waited in (0.01, 0.5)] == [0.001, 0.01]


@pytest.mark.parametrize(("ranks", "spins"), [(1, 40), (2, 40), (3, 0), (64, 0)])
def test_ranks_look_without_sleeping_only_where_processors_are_left_for_others(
    streams: list[Stream],
    beside: Callable[..., Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    spins: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    recorder = streams[1].recorder
    recorder.spins = Recorder(recorder.board, 1, here=range(ranks)).spins
    yields: list[None] = []
    sleeping = threading.Event()
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(None))
    monkeypatch.setattr(recorder, "pause_after", lambda _: sleeping.set() or 0.001)
    waiting = beside(come, streams[1], SUM, None)
    assert sleeping.wait(LONG_S)
    for stream in (streams[0], *streams[2:]):
        stream.post(SUM)
    waiting.result(LONG_S)
    assert len(yields) == spins


def test_an_abort_wakes_who_sleeps(
    streams: list[Stream], beside: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[float] = []
    recorder = streams[1].recorder
    monkeypatch.setattr(recorder, "pause_after", lambda waited: sleeps.append(waited) or 3600.0)
    waiting = beside(come, streams[1], SUM, None)
    until(lambda: sleeps)
    recorder.abort = Abort(AbortReason.FAILED, "given up", 1)
    recorder.aborted.open()
    with pytest.raises(CollectiveError, match="given up"):
        waiting.result(LONG_S)
    assert len(sleeps) == 1


def test_stop_is_a_keyboard_interrupt(streams: list[Stream]) -> None:
    recorder = streams[0].recorder
    recorder.abort = Abort("stop", "was stopped.", 0)
    with pytest.raises(KeyboardInterrupt, match="was stopped"):
        streams[0].post(SUM)


def test_what_is_issued_is_compared_by_the_one_who_comes_later(streams: list[Stream]) -> None:
    first = streams[0].post(SUM)
    streams[0].compare(first)  # nobody else is there: nothing is wrong
    second = streams[1].post(WIDE)
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 with float32 \[5\]"):
        streams[1].compare(second)


def test_what_failed_on_one_rank_alone_is_not_begun_for_its_peers(streams: list[Stream]) -> None:
    at = streams[0].post(WIDE)
    streams[0].withdraw(at)
    assert streams[0].count == 0
    later = streams[1].post(SUM)
    streams[1].compare(later)  # it is compared with nothing
    again = streams[0].post(SUM)
    streams[0].compare(again)
    assert streams[1].posted_by(0) == 1


def test_who_comes_to_what_a_peer_has_withdrawn_does_not_wait_for_it(streams: list[Stream]) -> None:
    late = streams[1].post(SUM)
    streams[0].withdraw(streams[0].post(SUM))
    streams[2].withdraw(streams[2].post(SUM))
    streams[1].meet(late, 0.0)  # each of them has been there
    first = streams[0].post(WIDE)
    streams[1].meet(late, 0.0)
    streams[0].compare(first)  # rank 1 is about to withdraw, too
    streams[1].withdraw(late)
    streams[1].compare(streams[1].post(WIDE))
    assert [stream.count for stream in streams] == [1, 1, 0]


def test_what_a_peer_does_for_which_this_rank_has_withdrawn_it_is_a_mismatch(
    streams: list[Stream],
) -> None:
    its = streams[1].post(SUM)
    streams[0].withdraw(streams[0].post(SUM))
    mine = streams[0].post(WIDE)
    streams[0].compare(mine)
    streams[1].accepted(its)
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 with float32 \[4\]"):
        streams[0].compare(mine)


def test_who_repeats_what_a_peer_has_withdrawn_once_is_compared(streams: list[Stream]) -> None:
    for stream in streams[:2]:
        stream.withdraw(stream.post(SUM))
    streams[0].post(WIDE)
    with pytest.raises(CollectiveMismatchError):
        streams[1].compare(streams[1].post(SUM))


def test_an_operation_is_seen_while_it_is_waited_for_and_not_after(streams: list[Stream]) -> None:
    region = streams[0].recorder.region
    at = streams[0].post(SUM)
    streams[0].recorder.block(at)
    [seen] = region.operations()
    assert (seen.name, seen.sequence, seen.is_waiting) == ("all_reduce", 1, True)
    streams[0].recorder.block(0)
    streams[0].end(at)
    assert region.operations() == ()


def test_only_the_main_thread_is_marked_as_waiting(streams: list[Stream]) -> None:
    recorder = streams[0].recorder
    at = streams[0].post(SUM)
    thread = threading.Thread(target=recorder.block, args=(at,))
    thread.start()
    thread.join()
    assert not recorder.is_blocked


# --- time limits of what a device was given -------------------------------------------------------


class Work:
    """A handle of an operation that a device was given."""

    is_over = False

    def is_completed(self) -> bool:
        return self.is_over


def give(stream: Stream, limit: float) -> Work:
    """Give a device an operation that is never complete by itself."""
    work = Work()
    stream.enqueued(stream.post(SUM), work, limit)
    return work


def overdue(recorder: Recorder) -> TimedOut:
    found: list[TimedOut | None] = []
    until(lambda: found.append(recorder.find_overdue()) or found[-1])
    assert found[-1] is not None
    return found[-1]


def test_what_a_device_has_had_for_too_long_is_found_with_who_is_missing(
    streams: list[Stream],
) -> None:
    recorder = streams[0].recorder
    give(streams[0], 0.05)
    streams[2].post(SUM)
    found = overdue(recorder)
    assert (found.operation.name, found.operation.sequence) == ("all_reduce", 1)
    assert found.missing == (1,)
    assert found.limit == 0.05


def test_what_is_complete_is_not_found_however_late_that_is_seen(streams: list[Stream]) -> None:
    work = give(streams[0], 0.01)
    recorder = streams[0].recorder
    until(recorder.find_overdue)
    work.is_over = True
    assert recorder.find_overdue() is None
    assert len(recorder.in_flight) == 0


def test_an_operation_is_found_whose_slot_is_anothers_by_now(streams: list[Stream]) -> None:
    recorder = streams[0].recorder
    give(streams[0], 0.01)
    for _ in range(100):
        give(streams[0], LONG_S)
    found = overdue(recorder)
    assert (found.operation.name, found.operation.group) == ("all_reduce", "world")
    assert found.missing == (1, 2)


def test_what_the_main_thread_is_blocked_in_is_found(streams: list[Stream]) -> None:
    recorder = streams[0].recorder
    recorder.block(streams[0].post(BARRIER), 0.05)
    found = overdue(recorder)
    assert found.operation.name == "barrier"
    recorder.block(0)
    assert recorder.find_overdue() is None


def test_no_limit_counts_while_somebody_is_asked_for_input(streams: list[Stream]) -> None:
    recorder, other = streams[0].recorder, streams[1].recorder.region
    asks = other.start + layout.ASKS
    other._words[asks] = 1
    give(streams[0], 0.0)
    assert recorder.find_overdue() is None
    other._words[asks] = 0
    assert overdue(recorder).missing == (1, 2)


def test_a_limit_is_not_over_that_has_not_begun(streams: list[Stream]) -> None:
    give(streams[0], LONG_S)
    recorder = streams[0].recorder
    assert recorder.find_overdue() is None


def test_a_group_that_a_rank_gives_up_at_a_limit_says_so_to_whoever_asks(
    streams: list[Stream],
) -> None:
    recorder = streams[0].recorder
    give(streams[0], 0.01)
    recorder.abort = recorder.give_up(overdue(recorder), 0)
    with pytest.raises(CollectiveHangError, match="ranks 1-2 did not come to all_reduce"):
        streams[0].post(SUM)
    assert recorder.region.is_damaged
    recorder.abort = Abort("failed", "ranks 1-2 came too late for the others", 0)
    with pytest.raises(CollectiveHangError, match="ranks 1-2 did not come to all_reduce"):
        streams[0].post(SUM)


# --- many ranks, which are compared at once -------------------------------------------------------


def find_each_other(streams: list[Stream]) -> None:
    """Do an operation all together, by which each finds where the others' begin."""
    places = [stream.post(BARRIER) for stream in streams]
    for stream, at in zip(streams, places, strict=True):
        stream.meet(at, LONG_S)
        stream.end(at)


def test_of_many_the_last_one_is_not_overlooked(crowd: list[Recorder]) -> None:
    streams = world(crowd)
    find_each_other(streams)
    assert all(stream._row is not None for stream in streams)
    for number in range(3 * layout.RING):
        places: list[int] = []
        for stream in streams:
            assert not any(
                other._are_all_here(at) for other, at in zip(streams, places, strict=False)
            )
            # The same as was posted in that slot of the ring before.
            places.append(stream.post((SUM, WIDE)[number % 2]))
        for stream, at in zip(streams, places, strict=True):
            assert stream._are_all_here(at)
            stream.compare(at)
            stream.end(at)


@pytest.mark.parametrize("odd", [0, 4, MANY])
def test_of_many_the_odd_one_is_named(crowd: list[Recorder], odd: int) -> None:
    streams = world(crowd)
    find_each_other(streams)
    places = [stream.post(WIDE if rank == odd else SUM) for rank, stream in enumerate(streams)]
    for stream, at in zip(streams, places, strict=True):
        with pytest.raises(CollectiveMismatchError, match=rf"rank {odd} .*float32 \[5\]"):
            stream.meet(at, LONG_S)


def test_of_many_one_that_is_withdrawn_is_not_there(crowd: list[Recorder]) -> None:
    streams = world(crowd)
    find_each_other(streams)
    places = [stream.post(SUM) for stream in streams]
    streams[3].withdraw(places[3])
    assert not streams[0]._are_all_here(places[0])
    places[3] = streams[3].post(SUM)
    assert streams[0]._are_all_here(places[0])


def test_many_whose_places_are_uneven_are_compared_one_by_one(crowd: list[Recorder]) -> None:
    world(crowd[:4], "of some")
    streams = world(crowd)  # behind another one, with these four
    find_each_other(streams)
    assert all(stream._row is None for stream in streams)
    places = [stream.post(WIDE if rank == 8 else SUM) for rank, stream in enumerate(streams)]
    with pytest.raises(CollectiveMismatchError, match=r"rank 8 .*float32 \[5\]"):
        streams[0].compare(places[0])


def test_of_many_whose_room_is_anothers_nothing_is_taken_for_ones_own(
    crowd: list[Recorder],
) -> None:
    streams = world(crowd)
    find_each_other(streams)
    find_each_other(others := world(crowd, "another"))
    for recorder, other in zip(crowd, others, strict=True):
        recorder.drop_streams(recorder.epoch, [other.key])
    third = [recorder.stream((0, 0), "third", list(range(MANY + 1))) for recorder in crowd[:-1]]
    assert [stream.at for stream in third] == [other.at for other in others[:-1]]
    places = [stream.post(BARRIER) for stream in third]
    assert not any(
        stream._are_all_here(at) for stream, at in zip(third, places, strict=True)
    )  # the last one has posted the same there, as another operation
    with pytest.raises(CollectiveHangError, match=rf"rank {MANY} did not come"):
        third[0].meet(places[0], 0.05)
