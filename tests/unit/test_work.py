"""Handles of what has been issued: waiting is seen, and ends when the group is given up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distsession.engine.collectives.recorder import Recorder, Stream
from distsession.engine.collectives.work import IssuedWork, await_collective
from distsession.errors import CollectiveError
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import Abort

SUM = ("all_reduce", torch.float32, torch.Size([4]), "sum")


class Inner:
    """What gloo would give: it ends when it is told to."""

    def __init__(self, stream: Stream | None = None) -> None:
        self.is_over = False
        self.problem: RuntimeError | None = None
        self.waits = 0
        self._stream = stream
        self.was_seen = False

    def wait(self, limit: timedelta | None = None) -> bool:
        self.waits += 1
        if self._stream is not None:
            self.was_seen = self._stream.recorder.is_blocked
        if self.problem is not None:
            raise self.problem
        if not self.is_over and limit is not None:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.is_over

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        if self.is_over and self.problem is None:
            future.set_result([])
        elif self.is_over:
            future.set_exception(self.problem)
        return future


@pytest.fixture
def stream() -> Iterator[Stream]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(2))
    board = Board(descriptor, 2)
    recorder = Recorder(board, 0)
    recorder.reset()
    yield recorder.stream((0, 0), "world", [0, 1])
    board.close()
    os.close(descriptor)


def test_a_wait_marks_its_rank_and_ends_the_operation(stream: Stream) -> None:
    inner = Inner(stream)
    inner.is_over = True
    work = IssuedWork(inner, stream, stream.post(SUM), SUM)
    assert len(stream.recorder.region.operations()) == 1
    assert work.wait()
    assert inner.was_seen
    assert not stream.recorder.is_blocked
    assert stream.recorder.region.operations() == ()


def test_to_look_whether_it_is_over_ends_it_too(stream: Stream) -> None:
    inner = Inner()
    work = IssuedWork(inner, stream, stream.post(SUM), SUM)
    assert not work.is_completed()
    assert len(stream.recorder.region.operations()) == 1
    inner.is_over = True
    assert work.is_completed()
    assert stream.recorder.region.operations() == ()


def test_it_is_waited_for_in_steps_until_the_group_is_given_up(stream: Stream) -> None:
    inner, recorder = Inner(), stream.recorder

    def wait(limit: timedelta | None = None) -> bool:
        inner.waits += 1
        if inner.waits == 3:
            recorder.abort = Abort("failed", "rank 1 has failed.", 0)
        raise RuntimeError("Operation timed out!")

    inner.wait = wait  # type: ignore[method-assign]
    work = IssuedWork(inner, stream, stream.post(SUM), SUM)
    with pytest.raises(CollectiveError, match=r"rank 1 has failed\."):
        work.wait()
    assert inner.waits == 4
    assert not recorder.is_blocked


def test_what_was_issued_before_a_reconnect_is_gone_unless_it_was_over(stream: Stream) -> None:
    done, lost = Inner(), Inner()
    done.is_over = True
    works = [IssuedWork(inner, stream, stream.post(SUM), SUM) for inner in (done, lost)]
    stream.recorder.reset()
    assert works[0].wait()
    with pytest.raises(CollectiveError, match=r"issued before the process group was connected"):
        works[1].wait()
    assert lost.waits == 0


def test_a_thread_that_waits_over_a_reconnect_is_told(stream: Stream) -> None:
    inner, recorder = Inner(), stream.recorder

    def wait(limit: timedelta | None = None) -> bool:
        recorder.reset()
        raise RuntimeError("Operation timed out!")

    inner.wait = wait  # type: ignore[method-assign]
    with pytest.raises(CollectiveError, match="was connected anew"):
        await_collective(inner, recorder)


def test_an_error_of_another_kind_is_not_changed(stream: Stream) -> None:
    inner = Inner()
    inner.problem = RuntimeError("no such thing")
    work = IssuedWork(inner, stream, stream.post(SUM), SUM)
    with pytest.raises(RuntimeError, match=r"^no such thing$"):
        work.wait()
    assert isinstance(work, dist.Work)
