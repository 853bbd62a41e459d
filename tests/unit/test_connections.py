"""What is known of a rank's connections, and when those of all ranks can stay."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from distsession.engine.collectives import torch_private
from distsession.engine.collectives.connections import MOST_UNSETTLED, Connections
from distsession.engine.collectives.recorder import Recorder
from distsession.protocol import board as layout
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.connections import begun_where_whole

RANKS = 3
WORLD = 7
"""The key of a stream of all ranks."""


class Handle:
    """Of something that is under way."""

    is_over, is_well = False, True

    def is_completed(self) -> bool:
        return self.is_over

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return future_of(self)


class Message(Handle):
    """Of a message; torch's have no future."""

    def is_success(self) -> bool:
        return self.is_well

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        raise RuntimeError("Work::getFuture not implemented.")


def future_of(handle: Handle) -> torch.futures.Future[list[torch.Tensor]]:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    if handle.is_over and handle.is_well:
        future.set_result([torch.ones(1)])
    elif handle.is_over:
        future.set_exception(RuntimeError("Connection closed by peer"))
    return future


@pytest.fixture
def board() -> Iterator[Board]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(RANKS))
    board = Board(descriptor, RANKS)
    yield board
    board.close()
    os.close(descriptor)


@pytest.fixture
def recorder(board: Board) -> Recorder:
    """That of rank 0, whose connections have just been made in generation 4."""
    recorder = Recorder(board, 0)
    recorder.connections.begin_making()
    recorder.connections.made(4)
    return recorder


@pytest.fixture
def connections(recorder: Recorder) -> Connections:
    """Those of rank 0."""
    return recorder.connections


def elsewhere(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def seen(board: Board) -> int:
    return board.regions[0].connected_in


# --- one rank -------------------------------------------------------------------------------------


def test_they_are_whole_from_when_all_are_made(board: Board) -> None:
    made = Connections(board.regions[0])
    assert (made.are_whole, seen(board)) == (False, -1)
    made.begin_making()
    assert (made.are_whole, seen(board)) == (False, -1)
    made.made(0)
    assert (made.are_whole, seen(board)) == (True, 0)
    made.begin_making()
    assert (made.are_whole, seen(board)) == (False, -1)


def test_a_new_process_in_the_place_of_another_has_none(
    board: Board, connections: Connections
) -> None:
    connections.issue()
    Connections(board.regions[0])
    assert seen(board) == -1
    assert not board.words[board.regions[0].start + layout.IS_UNSETTLED]


def test_those_that_were_lost_while_they_were_made_are_not_whole(
    board: Board, recorder: Recorder
) -> None:
    made = recorder.connections
    made.begin_making()
    elsewhere(recorder.enter)
    made.made(4)
    assert (made.are_whole, seen(board)) == (False, -1)


def test_an_operation_that_is_over_leaves_them_whole(
    board: Board, connections: Connections, recorder: Recorder
) -> None:
    recorder.enter()
    assert not connections.are_whole
    recorder.leave()
    connections.note_rest()
    assert (connections.are_whole, seen(board)) == (True, 4)
    assert not connections.give_up()


def test_they_are_given_up_while_an_operation_is_within_gloo(
    board: Board, connections: Connections, recorder: Recorder
) -> None:
    recorder.enter()
    assert connections.give_up()
    assert seen(board) == -1
    recorder.leave()
    connections.note_rest()
    assert (connections.are_whole, seen(board)) == (False, -1)


def test_an_operation_within_another_leaves_that_one_within(
    connections: Connections, recorder: Recorder
) -> None:
    recorder.enter()
    recorder.enter()  # in a handler of a signal
    recorder.leave()
    assert connections.give_up()


def test_an_operation_that_was_interrupted_between_two_lines_is_found_at_the_end(
    board: Board, connections: Connections, recorder: Recorder
) -> None:
    recorder.enter()
    connections.note_rest()
    assert seen(board) == -1
    connections.begin_making()
    connections.made(5)
    assert (connections.are_whole, seen(board)) == (True, 5)


def test_of_other_threads_nobody_keeps_account(
    board: Board, connections: Connections, recorder: Recorder
) -> None:
    elsewhere(recorder.enter)
    elsewhere(recorder.leave)
    assert (connections.are_whole, seen(board)) == (False, -1)


def test_what_was_issued_is_unsettled_until_it_has_ended_well(
    board: Board, connections: Connections
) -> None:
    numbers = [connections.issue(), connections.issue()]
    assert (connections.are_whole, seen(board)) == (False, -1)
    connections.settle(numbers[0])
    connections.note_rest()
    assert (connections.are_whole, seen(board)) == (False, -1)
    connections.settle(numbers[1])
    assert connections.are_whole
    connections.note_rest()
    assert seen(board) == 4
    assert not connections.give_up()


def test_a_handle_is_asked_where_nobody_waits_for_it(
    board: Board, connections: Connections
) -> None:
    handle = Handle()
    connections.follow(connections.issue(), handle)
    connections.note_rest()
    assert seen(board) == -1
    handle.is_over = True
    connections.note_rest()
    assert seen(board) == 4


def test_handles_that_are_over_are_let_go_when_others_are_issued(connections: Connections) -> None:
    for _ in range(MOST_UNSETTLED * 2):
        handle = Handle()
        handle.is_over = True
        connections.follow(connections.issue(), handle)
        assert len(connections._unsettled) <= 2
    assert connections.are_whole


def test_what_failed_and_nobody_has_waited_for_loses_them(
    board: Board, connections: Connections
) -> None:
    handle = Handle()
    handle.is_over, handle.is_well = True, False
    connections.follow(connections.issue(), handle)
    connections.note_rest()
    assert (connections.are_whole, seen(board)) == (False, -1)


def test_they_are_given_up_while_something_is_unsettled(
    board: Board, connections: Connections
) -> None:
    connections.issue()
    assert connections.give_up()
    assert seen(board) == -1


def test_no_account_is_kept_of_ever_more_that_nobody_waits_for(
    board: Board, connections: Connections
) -> None:
    for _ in range(2 * MOST_UNSETTLED):
        connections.issue()
    assert not connections._unsettled
    connections.note_rest()
    assert (connections.are_whole, seen(board)) == (False, -1)


# --- all ranks ------------------------------------------------------------------------------------


@pytest.fixture
def all_whole(board: Board) -> Board:
    """All ranks have begun five operations of the world; two of them, two of a smaller group."""
    for region in board.regions:
        region.set_connected_in(4)
        begin(board, region.rank, WORLD, 5, range(RANKS))
    for rank in (0, 2):
        begin(board, rank, 9, 2, (0, 2))
    return board


def begin(board: Board, rank: int, key: int, count: int, members: Any) -> int:
    at = board.regions[rank].add_stream(key, f"group {key}", members)
    board.words[at + layout.COUNT] = board.words[at + layout.BEGUN] = count
    return at


def test_where_all_are_whole_and_all_have_begun_as_much_it_is_said_how_much(
    all_whole: Board,
) -> None:
    assert begun_where_whole(all_whole.regions) == (7, 5, 7)


def test_what_was_posted_and_not_begun_does_not_count(all_whole: Board) -> None:
    at = all_whole.regions[0].find_stream(WORLD)
    all_whole.words[at + layout.COUNT] += 1
    begin(all_whole, 1, 11, 0, (0, 1))
    assert begun_where_whole(all_whole.regions) == (7, 5, 7)


@pytest.mark.parametrize("key", [WORLD, 9])
@pytest.mark.parametrize("rank", [0, 2])
def test_not_where_a_member_has_begun_one_more(all_whole: Board, rank: int, key: int) -> None:
    all_whole.words[all_whole.regions[rank].find_stream(key) + layout.BEGUN] += 1
    assert begun_where_whole(all_whole.regions) == ()


def test_not_where_a_member_has_begun_none(all_whole: Board) -> None:
    begin(all_whole, 0, 11, 1, (0, 1))
    assert begun_where_whole(all_whole.regions) == ()


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("generation", [-1, 3])
def test_not_where_one_has_lost_its_own_or_has_others(
    all_whole: Board, rank: int, generation: int
) -> None:
    all_whole.regions[rank].set_connected_in(generation)
    assert begun_where_whole(all_whole.regions) == ()


@pytest.mark.parametrize("how", [layout.OPERATION_FAILED, layout.DEVICE_LOST, layout.CUT_OFF])
def test_not_where_an_operation_or_a_device_has_failed(all_whole: Board, how: int) -> None:
    all_whole.regions[1].set_damaged(how)
    assert begun_where_whole(all_whole.regions) == ()


def test_not_where_something_was_issued_that_has_not_ended(all_whole: Board) -> None:
    all_whole.regions[1].set_unsettled(True)
    assert begun_where_whole(all_whole.regions) == ()


def test_not_before_anybody_has_connected(board: Board) -> None:
    assert begun_where_whole(board.regions) == ()


@pytest.mark.parametrize("kind", [Handle, Message])
@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("is_well", [True, False])
def test_an_operation_has_succeeded_when_it_is_over_and_came_to_no_error(
    kind: type[Handle], is_over: bool, is_well: bool
) -> None:
    handle = kind()
    handle.is_over, handle.is_well = is_over, is_well
    assert torch_private.has_succeeded(handle) is (is_over and is_well)
