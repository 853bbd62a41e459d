"""What each request does, by the dispatcher that ranks and inline sessions share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch

from distsession.engine.execute import NOTHING, PlainFront
from distsession.engine.requests import RequestDispatcher
from distsession.engine.timeline import Trace
from distsession.errors import SerializationError
from distsession.protocol import serialize
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import (
    CallRequest,
    CellRequest,
    CommitRequest,
    DebugRequest,
    FillRequest,
    PartsRequest,
    PieceRequest,
    PullRequest,
    PushRequest,
    ReconnectRequest,
    Request,
    ReturnRequest,
    ShardsRequest,
    SummaryRequest,
    TimelineRequest,
)


class Payloads:
    """What was sent is what was given; there is shared memory if there is any."""

    whole: Any = None

    def read_private(self, payload: Any) -> Any:
        return payload

    def map_whole(self, payload: Any) -> Any:
        return self.whole


class Rank:
    def __init__(self, *, board: Board | None = None, **variables: Any):
        self.namespace: dict[str, Any] = {"__name__": "__main__", **variables}
        self.payloads = Payloads()
        self.trace = Trace(0, None)
        self.extra: list[Request] = []
        self.dispatcher = RequestDispatcher(
            0,
            self.namespace,
            PlainFront(),
            self.trace,
            self.payloads,
            extra={ReconnectRequest: self.extra.append, DebugRequest: lambda _: "no error"},
            board=board,
        )

    def __call__(self, request: Request, payload: Any = ()) -> Any:
        self.trace.begin_request(request)
        return self.dispatcher.perform(request, payload)


def test_every_request_has_its_case() -> None:
    """One that none of the tests below names would be dropped without a word."""
    tested = {
        CallRequest, CellRequest, CommitRequest, DebugRequest, FillRequest, PartsRequest,
        PieceRequest, PullRequest, PushRequest, ReconnectRequest, ReturnRequest, ShardsRequest,
        SummaryRequest, TimelineRequest,
    }  # fmt: skip
    assert set(get_args(Request)) == tested


def test_a_cell_gives_its_value_only_where_it_is_fetched() -> None:
    rank = Rank()
    assert rank(CellRequest(1, "x = 2\nx + 1", "In[1]")) == (
        NOTHING,
        ({"text/plain": "3"}, {}, ""),
    )
    assert rank(CellRequest(2, "x", "In[2]", fetch=True, expression=True)) == (2, None)
    assert rank.namespace["x"] == 2


def test_a_call_finds_the_names_of_the_rank() -> None:
    rank = Rank()
    payload = serialize.dump_call(max, (1, 5), {})
    assert rank(CallRequest(1, "max"), payload) == (5, None)


def test_a_call_that_cannot_be_rebuilt_says_on_which_rank() -> None:
    with pytest.raises(SerializationError, match=r"cannot be rebuilt on rank 0: UnpicklingError"):
        Rank()(CallRequest(1, "f"), [b"no pickle"])


def test_what_is_pushed_is_a_variable_once_it_is_committed() -> None:
    rank = Rank(x=1)
    payload = serialize.dump_value({"x": 2, "y": 3}, what="the values")
    assert rank(PushRequest(1), payload) == (NOTHING, None)
    assert rank.namespace["x"] == 1
    rank(CommitRequest(2, keep=True))
    assert rank(PullRequest(3, ("x", "y"))) == ({"x": 2, "y": 3}, None)


def test_what_is_discarded_is_gone() -> None:
    rank = Rank(x=1)
    rank(PushRequest(1), serialize.dump_value({"x": 2}, what="the values"))
    rank(CommitRequest(2, keep=False))
    rank(CommitRequest(3, keep=True))
    assert rank.namespace["x"] == 1


@pytest.fixture
def board() -> Iterator[Board]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(1))
    board = Board(descriptor, 1)
    yield board
    board.close()
    os.close(descriptor)


def test_what_is_pushed_by_word_is_set_before_the_next_request_begins(board: Board) -> None:
    rank = Rank(board=board, x=1)
    push = serialize.dump_value({"x": 2}, what="the values")
    assert rank(PushRequest(1, by_word=True), push) == (NOTHING, None)
    assert board.regions[0].staged == 1
    assert rank(PullRequest(2, ("x",))) == ({"x": 1}, None)
    board.commit_push(1)
    assert rank(PullRequest(3, ("x",))) == ({"x": 2}, None)
    assert board.regions[0].staged == 0
    rank(CellRequest(4, "x = 3", "In[1]"))
    assert rank(PullRequest(5, ("x",))) == ({"x": 3}, None)


def test_the_word_for_another_push_sets_nothing(board: Board) -> None:
    rank = Rank(board=board, x=1)
    rank(PushRequest(1, by_word=True), serialize.dump_value({"x": 2}, what="the values"))
    rank(CommitRequest(2, keep=False))
    rank(PushRequest(3, by_word=True), serialize.dump_value({"x": 3}, what="the values"))
    board.commit_push(1)
    assert rank(PullRequest(4, ("x",))) == ({"x": 1}, None)
    rank(CommitRequest(5, keep=True))
    assert rank(PullRequest(6, ("x",))) == ({"x": 3}, None)


class Ending:
    def __del__(self) -> None:
        pass


@pytest.mark.parametrize("before", [Ending(), [torch.ones(1)], np.array([None])])
def test_it_is_asked_for_where_code_may_run_at_the_end_of_what_was_there(
    board: Board, before: Any
) -> None:
    rank = Rank(board=board, x=before)
    push = serialize.dump_value({"x": 2}, what="the values")
    why, _ = rank(PushRequest(1, by_word=True), push)
    assert why == "the end of what 'x' was before may have to be stopped"
    rank(CommitRequest(2, keep=True))
    assert rank.namespace["x"] == 2


def test_a_rank_fills_its_part_of_memory_that_is_shared() -> None:
    rank = Rank(part=torch.tensor([3.0, 4.0]))
    rank.payloads.whole = bytearray(16)
    shards, _ = rank(ShardsRequest(1, "part"))
    assert (shards.kind, shards.shape) == ("tensor", (2,))
    assert rank(FillRequest(2, "part", (4,), {0: (2,)})) == (NOTHING, None)
    assert torch.frombuffer(rank.payloads.whole, dtype=torch.float32).tolist() == [0, 0, 3, 4]


def test_without_shared_memory_it_gives_pieces() -> None:
    rank = Rank(part=torch.tensor([3.0, 4.0]))
    part, _ = rank(FillRequest(1, "part", (4,), {0: (2,)}))
    assert (part.at, part.shape) == ((2,), (2,))
    assert rank(PieceRequest(2, (1,), (1,)))[0].tolist() == [4.0]
    assert rank(PieceRequest(3, None)) == (None, None)


def test_a_summary_is_kept_until_it_is_let_go() -> None:
    rank = Rank(state={"w": torch.ones(2)})
    leaves, _ = rank(SummaryRequest(1, "state", "In[1]"))
    assert "['w']" in leaves
    assert rank(PartsRequest(2, ("['w']",)))[0]["['w']"].tolist() == [1.0, 1.0]
    assert rank(PartsRequest(3, ())) == (NOTHING, None)
    assert rank(PartsRequest(4, ("['w']",))) == (NOTHING, None)


def test_a_timeline_is_that_of_an_earlier_cell() -> None:
    rank = Rank()
    rank(CellRequest(7, "1", "In[7]"))
    trace, _ = rank(TimelineRequest(8, 7))
    assert trace.label == "In[7]"
    assert rank(TimelineRequest(9, 5)) == (None, None)


def test_what_only_some_ranks_can_do_is_theirs() -> None:
    rank = Rank()
    assert rank(ReconnectRequest(1, 2)) == (None, None)
    assert rank.extra == [ReconnectRequest(1, 2)]
    assert rank(DebugRequest(2)) == ("no error", None)
