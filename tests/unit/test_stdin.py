"""Whose turn it is to ask."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from distsession.cluster.pending import NOBODY, PendingRequest
from distsession.errors import EngineDiedError, RunTimeoutError
from distsession.kernel import stdin
from distsession.kernel.stdin import NO_INPUT, InputRequests
from distsession.protocol import board as layout
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import ErrorInfo, FrameInfo, InputReply, InputRequest, Reply


@pytest.fixture
def board():
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(3))
    board = Board(descriptor, 3)
    yield board
    board.close()
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdin, "FIRST_REQUEST_DELAY_S", 0.0)


def open_debugger(board: Board, rank: int, is_open: bool = True) -> None:
    board.words[board.regions[rank].start + layout.IN_DEBUGGER] = is_open


class Asked:
    """A run of three ranks whose questions are answered by a function."""

    def __init__(self, board: Board, answer: Callable[[str], str] | None):
        self.prompts: list[str] = []
        self.sent: list[tuple[int, InputReply]] = []
        self.pending = PendingRequest(
            7, (0, 1, 2), send=lambda rank, reply: self.sent.append((rank, reply))
        )

        def ask(prompt: str, _secret: bool) -> str:
            self.prompts.append(prompt)
            assert answer is not None
            return answer(prompt)

        self.questions = InputRequests(self.pending, board, ask if answer else None)

    def put(self, *ranks: int) -> None:
        for rank in ranks:
            self.questions.add(InputRequest(rank, 7, 1, "? "))


def test_the_lowest_rank_is_asked_first(board: Board) -> None:
    asked = Asked(board, str.upper)
    asked.put(2, 0, 1)
    asked.questions.check()
    assert asked.prompts == ["[rank 0] ? ", "[rank 1] ? ", "[rank 2] ? "]
    assert asked.sent[0] == (0, InputReply(1, "[RANK 0] ? "))


def test_an_open_debugger_keeps_the_turn(board: Board) -> None:
    asked = Asked(board, str.upper)
    open_debugger(board, 1)
    asked.put(1)
    asked.questions.check()
    asked.put(0)
    asked.questions.check()
    asked.put(1)  # asked at once
    assert asked.prompts == ["[rank 1] ? "] * 2
    open_debugger(board, 1, is_open=False)
    asked.questions.check()
    assert asked.prompts[2:] == ["[rank 0] ? "]


def test_a_debugger_that_waits_in_a_collective_gives_the_turn_up(board: Board) -> None:
    asked = Asked(board, str.upper)
    open_debugger(board, 1)
    asked.put(1)
    asked.questions.check()
    asked.put(0)
    region = board.regions[1]
    stream = region.add_stream(5, "world", [0, 1])
    at = stream + layout.STREAM_HEAD + layout.SLOT
    board.words[at + layout.BEGAN] = time.monotonic_ns() - 1_000_000_000
    board.words[at + layout.STATE] = layout.WAITING
    board.words[stream + layout.COUNT] = 1
    board.words[at] = region.incarnation(stream, 5) << layout.SEQUENCE_BITS | 1
    asked.questions.check()
    assert asked.prompts == ["[rank 1] ? ", "[rank 0] ? "]


def test_the_end_of_the_input_is_told(board: Board) -> None:
    def end(_: str) -> str:
        raise EOFError

    asked = Asked(board, end)
    asked.put(0)
    asked.questions.check()
    assert asked.sent == [(0, InputReply(1, None))]


def test_who_cannot_be_asked_is_told_why(board: Board) -> None:
    asked = Asked(board, None)
    asked.put(0)
    assert asked.sent == [(0, InputReply(1, None, NOBODY))]

    def refuse(_: str) -> str:
        raise NotImplementedError

    asked = Asked(board, refuse)
    asked.put(0, 1)
    asked.questions.check()
    asked.put(2)
    assert asked.sent[0] == (0, InputReply(1, None, NO_INPUT))
    assert [rank for rank, _ in asked.sent] == [0, 1, 2]
    assert len(asked.prompts) == 1


def test_a_rank_that_has_died_is_not_asked_about(board: Board) -> None:
    asked = Asked(board, str.upper)
    asked.put(0, 1)
    asked.pending.put_death(EngineDiedError("it died", rank=0, pid=1, returncode=-9))
    asked.questions.check()
    assert asked.prompts == ["[rank 1] ? "]


@pytest.mark.parametrize("missed", [0, 1], ids=["", "though a first signal came too early"])
def test_a_box_ends_when_its_rank_dies(board: Board, missed: int) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:

        def wait(_: str) -> str:
            death = EngineDiedError("it died", rank=0, pid=1, returncode=-9)
            threading.Timer(0.2, lambda: asked.pending.put_death(death)).start()
            for _ in range(missed):
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(30)
            time.sleep(30)
            return ""

        asked = Asked(board, wait)
        asked.put(0)
        asked.questions.check()
        assert asked.prompts == ["[rank 0] ? "]
        assert asked.sent == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stop_at_the_prompt_goes_on_to_the_caller(board: Board) -> None:
    def stop(_: str) -> str:
        raise KeyboardInterrupt

    asked = Asked(board, stop)
    asked.put(0)
    with pytest.raises(KeyboardInterrupt):
        asked.questions.check()


def test_time_spent_in_a_debugger_does_not_count(board: Board) -> None:
    asked = Asked(board, str.upper)
    open_debugger(board, 1)
    asked.questions.check()
    time.sleep(0.3)
    asked.questions.check()
    assert asked.pending.paused_s > 0.25
    open_debugger(board, 1, is_open=False)
    before = asked.pending.paused_s
    time.sleep(0.1)
    asked.questions.check()
    assert asked.pending.paused_s == before


def test_a_wait_without_anybody_to_ask_refuses(board: Board) -> None:
    asked = Asked(board, str.upper)
    asked.pending.put_output(InputRequest(2, 7, 1))
    with pytest.raises(RunTimeoutError):
        asked.pending.wait(lambda _: None, timeout=0.05)
    assert asked.sent == [(2, InputReply(1, None, NOBODY))]


@pytest.mark.parametrize("name", ["DebuggerQuit", "BdbQuit"])
def test_a_debugger_that_was_left_is_seen_in_the_replies(board: Board, name: str) -> None:
    pending = Asked(board, None).pending
    assert pending.debugger_quit == ""
    frames = (FrameInfo("In[3]", 4, "<module>"), FrameInfo("/usr/lib/pdb.py", 9, "x"))
    pending.put_reply(Reply(7, 1, error=ErrorInfo(name, "", frames)), [])
    assert pending.debugger_quit == "in the debugger of rank 1 at In[3] line 4"
