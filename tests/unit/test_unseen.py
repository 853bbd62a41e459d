"""What a device is given that nobody sees is noted, where no GPU is, with objects like torch's."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distsession.engine.collectives import torch_private
from distsession.engine.collectives.in_flight import is_device_wait
from distsession.engine.collectives.recorder import Recorder
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.board_report import running_report
from distsession.protocol.unseen import Unseen, texts

SUM = ("all_reduce", torch.float32, torch.Size([4]), "sum")


class Stream:
    device_index = 0
    device = torch.device("cpu")

    def __init__(self, number: int = 0):
        self.stream_id = number


class Event:
    """Of ``torch.Event``: over when the test says so."""

    made: list[Event]
    is_broken = False

    def __init__(self, device: torch.device):
        self.is_over = False
        self.asked = 0
        self.made.append(self)

    def record(self, stream: Stream) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        if self.is_broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self.is_over


class Work:
    """A handle that fails if it is asked during a capture."""

    is_captured = False

    def __init__(self) -> None:
        self.asked = 0

    def is_completed(self) -> bool:
        assert not self.is_captured, "asking it ends the capture"
        self.asked += 1
        return False


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(2))
    board = Board(descriptor, 2)
    recorder = Recorder(board, 0)
    recorder.reset()
    yield recorder
    del recorder
    board.close()
    os.close(descriptor)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What was put behind replays."""
    Event.made = []
    Event.is_broken = False
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    return Event.made


@pytest.fixture
def graph(recorder: Recorder) -> Any:
    """With the methods of ``torch.cuda.CUDAGraph``."""

    class CUDAGraph:
        problem: str = ""

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            if self.problem:
                raise RuntimeError(self.problem)

        def capture_end(self) -> None:
            if self.problem:
                raise RuntimeError(self.problem)

        def replay(self) -> str:
            assert Unseen.REPLAY in recorder.region.unseen, "a launch may block"
            return "replayed"

    recorder.unseen.watch_graphs(CUDAGraph)
    recorder.unseen.watch_graphs(CUDAGraph)  # which is once
    return CUDAGraph()


def test_a_replayed_graph_is_under_way_until_its_end_is_seen(
    recorder: Recorder, events: list[Event], graph: Any
) -> None:
    assert recorder.region.unseen == Unseen(0)
    assert graph.replay() == "replayed"
    assert recorder.region.unseen == Unseen.REPLAY
    assert recorder.region.unseen_count == 1
    (text,) = recorder.unseen.texts()
    assert text.startswith("a CUDAGraph that was replayed at test_unseen.py line ")
    recorder.note_completed()
    assert recorder.region.unseen == Unseen.REPLAY
    events[-1].is_over = True
    recorder.note_completed()
    assert recorder.region.unseen == Unseen(0)
    assert recorder.unseen.texts() == ()


def test_only_the_last_replay_of_a_stream_counts(
    recorder: Recorder, events: list[Event], graph: Any
) -> None:
    graph.replay()
    graph.replay()
    events[-1].is_over = True
    recorder.note_completed()
    assert not recorder.unseen.is_replaying
    assert recorder.region.unseen_count == 2


def test_a_broken_device_works_at_nothing(
    recorder: Recorder, events: list[Event], graph: Any
) -> None:
    graph.replay()
    Event.is_broken = True
    recorder.note_completed()
    assert not recorder.unseen.is_replaying


def test_without_events_a_replay_is_under_way_until_the_next_request(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, graph: Any
) -> None:
    monkeypatch.delattr(torch, "Event")
    graph.replay()
    recorder.note_completed()
    assert recorder.unseen.is_replaying
    recorder.unseen.begin_request()
    assert not recorder.unseen.is_replaying
    assert recorder.region.unseen == Unseen(0)


def test_what_is_given_up_is_not_under_way(
    recorder: Recorder, events: list[Event], graph: Any
) -> None:
    graph.replay()
    recorder.reset()
    assert not recorder.unseen.is_replaying
    assert recorder.region.unseen == Unseen(0)


def test_nothing_is_asked_during_a_capture_and_what_is_captured_is_not_under_way(
    recorder: Recorder, events: list[Event], graph: Any
) -> None:
    stream = recorder.stream((0, 0), "world", [0, 1])
    before, within = Work(), Work()
    stream.enqueued(stream.post(SUM), before, 60)
    graph.replay()
    graph.capture_begin(capture_error_mode="global")
    asked = before.asked, events[0].asked
    Work.is_captured = True
    try:
        stream.enqueued(stream.post(SUM), within, 60)
        recorder.note_completed()
        assert not recorder.in_flight.is_waited_for(sys._getframe, is_other_under_way=False)
    finally:
        Work.is_captured = False
    graph.capture_end()
    assert (before.asked, events[0].asked) == asked
    assert within.asked == 0
    (operation,) = recorder.region.operations()  # the one of before
    assert operation.sequence == 1
    assert recorder.region.sequences() == {"world": 2}  # both are compared
    recorder.note_completed()
    assert (before.asked, events[0].asked) > asked
    assert len(recorder.in_flight) == 1


def test_what_another_stream_issues_during_a_capture_is_under_way(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, graph: Any
) -> None:
    monkeypatch.setattr(torch_private, "is_stream_capturing", lambda: False)
    stream = recorder.stream((0, 0), "world", [0, 1])
    graph.capture_begin()
    stream.enqueued(stream.post(SUM), Work(), 60)
    assert len(recorder.in_flight) == 1
    graph.capture_end()


def test_a_capture_that_fails_is_over(recorder: Recorder, graph: Any) -> None:
    graph.problem = "this stream cannot be captured"
    with pytest.raises(RuntimeError, match="captured"):
        graph.capture_begin()
    assert not recorder.in_flight.captures
    graph.problem = ""
    graph.capture_begin()
    graph.problem = "the capture was invalidated"
    with pytest.raises(RuntimeError, match="invalidated"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="invalidated"):
        graph.capture_end()
    assert not recorder.in_flight.captures


def test_a_capture_begins_when_nothing_is_being_asked(recorder: Recorder, graph: Any) -> None:
    is_asking, may_end = threading.Event(), threading.Event()

    def question() -> None:
        is_asking.set()
        may_end.wait(60)

    asking = threading.Thread(target=recorder.in_flight.ask, args=(question,))
    asking.start()
    assert is_asking.wait(60)
    capturing = threading.Thread(target=graph.capture_begin)
    capturing.start()
    assert not recorder.in_flight.captures
    may_end.set()
    for thread in (asking, capturing):
        thread.join(60)
    assert recorder.in_flight.captures
    assert not recorder.in_flight.ask(lambda: None)
    graph.capture_end()
    assert recorder.in_flight.ask(lambda: None)


def test_a_backend_that_code_makes_is_noted_and_one_of_torchs_groups_is_not(
    recorder: Recorder,
) -> None:
    class ProcessGroupNCCL:
        def __init__(self, store: object, rank: int, size: int):
            self.rank = rank

    recorder.unseen.watch_backends(ProcessGroupNCCL)
    with torch_private.native_groups():
        assert ProcessGroupNCCL(None, 1, 2).rank == 1
    assert recorder.region.unseen == Unseen(0)
    assert ProcessGroupNCCL(None, 1, 2).rank == 1
    assert recorder.region.unseen == Unseen.GROUP
    (text,) = recorder.unseen.texts()
    assert text.startswith("a ProcessGroupNCCL that was made directly at test_unseen.py line ")
    recorder.reset()  # it is still there
    assert recorder.region.unseen == Unseen.GROUP


def test_symmetric_memory_is_noted_once_there_is_some(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        @staticmethod
        def empty_strided_p2p(size: int) -> int:
            if size < 0:
                raise RuntimeError("no allocator")
            return size

    monkeypatch.setattr(
        torch_private, "symmetric_memory_functions", lambda: [(Memory, "empty_strided_p2p")]
    )
    monkeypatch.setattr(torch_private, "graph_classes", list)
    monkeypatch.setattr(torch_private, "native_backends", list)
    recorder.unseen.install()
    with pytest.raises(RuntimeError, match="no allocator"):
        Memory.empty_strided_p2p(-1)
    assert recorder.unseen.texts() == ()
    assert Memory.empty_strided_p2p(4) == 4
    (text,) = recorder.unseen.texts()
    assert text.startswith("symmetric memory in use at test_unseen.py line ")


def test_torchcomms_is_noted_where_torch_makes_groups_by_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.unseen.begin_request()
    assert recorder.unseen.texts() == ()
    monkeypatch.setattr(torch_private, "uses_torchcomms", lambda: True)
    recorder.unseen.begin_request()
    assert recorder.unseen.texts() == ("torchcomms",)


def test_the_kernel_reads_it_from_the_board(
    recorder: Recorder, events: list[Event], graph: Any
) -> None:
    graph.replay()
    report = running_report(recorder.region, "R")
    assert report.unseen == ("a replayed graph",)
    assert report.unseen_count == 1
    assert report.is_replaying
    assert len(set(map(texts, Unseen))) == len(Unseen)


class Tensor:
    """Its methods are of C, and give the code that calls them, and where that is."""

    def __getattr__(self, name: str) -> Any:
        return partial(lambda: (sys._getframe(1).f_code, sys._getframe(1).f_lasti))


@pytest.mark.parametrize(
    ("is_wait", "is_certain", "call"),
    [
        (True, True, lambda x: x.item()),
        (True, True, lambda x: x.synchronize()),
        (True, False, lambda x: x.to()),
        (True, False, lambda x: x.replay()),
        (False, False, lambda x: x.matmul()),
    ],
)
def test_what_waits_for_something_unknown_does_nothing_else(
    is_wait: bool, is_certain: bool, call: Any
) -> None:
    code, instruction = call(Tensor())
    frame: Any = SimpleNamespace(f_code=code, f_lasti=instruction, f_back=None)
    assert is_device_wait(frame) is is_wait
    assert is_device_wait(frame, is_certain=True) is is_certain


def test_no_frame_waits() -> None:
    assert not is_device_wait(None)
