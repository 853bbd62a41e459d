"""What a relay writes on its node's board of the processes there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from distsession.engine.process import started_at
from distsession.engine.process_state import (
    DEAD,
    RUNS,
    ZOMBIE,
    has_ended,
    process_state,
    processor_time,
)
from distsession.engine.process_watch import LOOK_S, ProcessWatch
from distsession.protocol import board_mirror
from distsession.protocol.board import COMMITTED, REQUEST, UNSEEN, Board, file_size, make_file
from distsession.protocol.board_mirror import Mirror
from tests.until import until


def make_board() -> Board:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(2))
    board = Board(descriptor, 2)
    os.close(descriptor)
    return board


class Rank:
    """A process that plays rank 1 of two, and its relay, which watches it."""

    def __init__(self, code: str = "input()"):
        self.board = make_board()
        self.region = self.board.regions[1]
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        self.pid = self.process.pid
        self.region.set_process(self.pid, started_at(self.pid))
        self.now = 1.0
        self.watch = ProcessWatch(self.board, [1], os.getpid(), lambda: self.now)

    def look(self) -> str:
        """What is known of it after another look."""
        self.now += LOOK_S
        self.watch.look()
        return self.region.process_state(self.pid)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.board.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def test_a_process_that_is_stopped_and_goes_on_is_told(rank: Rank) -> None:
    assert rank.look() == RUNS
    rank.send(signal.SIGSTOP)
    until(lambda: rank.look() == "T")
    rank.send(signal.SIGCONT)
    until(lambda: rank.look() == RUNS)


def test_a_process_is_told_as_ended_before_and_after_its_parent_has_waited(rank: Rank) -> None:
    rank.send(signal.SIGKILL)
    until(lambda: has_ended(rank.pid))
    assert rank.look() == ZOMBIE
    rank.process.wait()
    assert rank.look() == DEAD


def test_a_process_whose_main_thread_alone_has_ended_goes_on() -> None:
    code = "import ctypes, threading; threading.Thread(target=input).start(); "
    rank = Rank(code + "ctypes.CDLL(None).pthread_exit(None)")
    try:
        until(lambda: process_state(rank.pid) == "Z")
        assert rank.look() == RUNS
    finally:
        rank.close()


def test_a_pid_that_somebody_else_got_is_of_no_rank(rank: Rank) -> None:
    rank.region.set_process(rank.pid, started_at(rank.pid) - 1)
    assert rank.look() == DEAD


def test_what_was_said_of_a_former_process_is_nothing_said_of_the_present(rank: Rank) -> None:
    rank.send(signal.SIGKILL)
    until(lambda: rank.look() == ZOMBIE)
    rank.region.set_process(os.getpid(), started_at(os.getpid()))
    assert rank.region.process_state(rank.pid) == ""
    assert rank.region.process_state(os.getpid()) == ""
    rank.region.set_process(rank.pid, 12345)  # a later one of the same number
    assert rank.region.process_state(rank.pid) == ""


def test_nothing_is_said_where_a_rank_has_no_proc_to_look_at(rank: Rank) -> None:
    rank.region.set_process(rank.pid, 0)
    assert rank.look() == ""


def test_a_process_is_still_known_when_its_generation_ends(rank: Rank) -> None:
    rank.region.clear()
    assert rank.look() == RUNS


def test_the_agent_is_looked_at_too(rank: Rank) -> None:
    rank.look()
    assert rank.region.agent_state == (os.getpid(), RUNS)
    stopped = ProcessWatch(rank.board, [1], rank.pid)
    rank.send(signal.SIGSTOP)
    until(lambda: process_state(rank.pid) == "T")
    stopped.look()
    assert rank.region.agent_state == (rank.pid, "T")


def test_processor_time_is_told_while_something_runs_and_changes_nothing_else() -> None:
    rank = Rank("while True: pass")
    mirror = Mirror(rank.board, [1])
    try:
        rank.look()
        mirror.changes()
        until(lambda: processor_time(rank.pid) > 5)
        rank.look()
        assert rank.region.processor_time == 0
        assert mirror.changes() == []  # of an idle rank nothing is sent
        rank.board.words[rank.region.start + REQUEST] = 7
        rank.look()
        first = rank.region.processor_time
        assert first > 5
        until(lambda: rank.look() == RUNS and rank.region.processor_time > first)
    finally:
        rank.close()


def test_it_looks_only_now_and_then(rank: Rank) -> None:
    assert rank.look() == RUNS
    rank.send(signal.SIGKILL)
    until(lambda: has_ended(rank.pid))
    rank.now += LOOK_S / 2
    rank.watch.look()
    assert rank.region.process_state(rank.pid) == RUNS
    assert rank.look() == ZOMBIE


def test_what_the_kernel_writes_is_not_brought_back_to_it() -> None:
    far, near = make_board(), make_board()
    mirror = Mirror(far, [0])
    near.begin_epoch(1)
    near.commit(1, 7)
    for at, word in near.kernel_words():
        far.words[at] = word
    near.commit(1, 8)  # it is on its way
    far.words[REQUEST] = far.words[UNSEEN] = 3
    board_mirror.apply(near, mirror.changes(), [0])
    assert near.committed(1) == 8
    assert near.words[COMMITTED + 1] == 8
    assert near.words[REQUEST] == near.words[UNSEEN] == 3
    for board in (far, near):
        board.close()
