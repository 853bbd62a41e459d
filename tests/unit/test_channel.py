"""Requests to ranks and what comes back; the tests play the ranks and the agents."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest
import zmq

from distsession.cluster.channel import CONNECT_TIMEOUT, SocketChannel
from distsession.cluster.interrupts import InterruptHold
from distsession.cluster.monitor import NodeGone
from distsession.cluster.pending import NOBODY, OutputBudget, PendingRequest
from distsession.errors import EngineDiedError, RunTimeoutError, SessionStateError
from distsession.protocol import whole_messages
from distsession.protocol.agent_messages import AgentFailed, StoreReady
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import (
    Buffered,
    CellRequest,
    CompletionReply,
    CompletionRequest,
    ErrorInfo,
    InputReply,
    InputRequest,
    OutputEnd,
    PushRequest,
    RankFailed,
    Reply,
    Shared,
    StackReply,
    StackRequest,
    Text,
    decode,
    encode,
)
from distsession.protocol.shared_buffer import LARGEST
from distsession.protocol.shared_memory import Link, Segment, map_private
from distsession.protocol.wire import memory_path, socket_path
from tests.message_ends import MessageEnd
from tests.until import until

LONG_S = 60.0
LARGE = b"x" * (LARGEST + 1)
SOME = 100_000
"""Bytes of what goes through the buffer."""


def cell(number: int) -> CellRequest:
    return CellRequest(number, "1", "In[1]")


def death(rank: int) -> EngineDiedError:
    return EngineDiedError(f"rank {rank} is gone", rank=rank, pid=1, returncode=-9)


def wait(pending: PendingRequest) -> list[str]:
    """Wait for a request; gives the texts of its output."""
    texts: list[Any] = []
    pending.wait(texts.append, timeout=LONG_S)
    return [message.text for message in texts]


class Rank:
    """The sockets of a rank's process, as the engine opens them."""

    def __init__(self, context: zmq.Context[Any], folder: str, rank: int, generation: int = 0):
        self.rank = rank
        self._context, self._folder = context, folder
        self._identity = f"{generation}.{rank}".encode()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.link = Link.connect(memory_path(folder, 0), f"{generation}.{rank}")
        self.stream = MessageEnd(socket_path(folder, "requests", 1), self._identity)
        self.output = self._connect(zmq.PUSH, "output")
        self.control = self._connect(zmq.DEALER, "control")

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * LONG_S))
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.connect(f"ipc://{socket_path(self._folder, name, 1)}")
        self._sockets.append(socket)
        return socket

    def receive(self) -> tuple[Any, Any]:
        return decode(self.stream.receive())

    def order(self) -> Any:
        """What comes on the control socket."""
        return decode(self.control.recv_multipart())[0]

    def has_nothing(self) -> bool:
        return not self.stream.poll(50) and not self.control.poll(0)

    def reply(self, number: int, payload: Sequence[bytes] | Shared = (), **fields: Any) -> None:
        self.stream.send(encode(Reply(number, self.rank, **fields), payload))

    def write(self, number: int, text: str) -> None:
        self.output.send_multipart(encode(Text(self.rank, number, "stdout", text)))

    def tell(self) -> None:
        """Send what is no part of a run; whatever was sent before has been received then."""
        self.stream.send(encode(RankFailed(self.rank, 0, ErrorInfo("E", ""))))

    def close(self) -> None:
        self.link.close()
        self.stream.close()
        for socket in self._sockets:
            socket.close(0)


class Kernel:
    """A channel, what it has told, and who is at its other ends."""

    def __init__(self, folder: str):
        self.folder = folder
        self.events: list[Any] = []
        self._background = PendingRequest(0, ())
        self._texts: list[Any] = []
        self.channel = SocketChannel(folder, self._handle, self._background)
        self._context: zmq.Context[Any] = zmq.Context()
        self._ranks: list[Rank] = []
        self._agents: list[Connection] = []

    def _handle(self, event: Any) -> None:
        if event == AgentFailed("raise"):
            raise ValueError("it cannot be handled")
        self.events.append(event)

    def add_agent(self, node: int = 0) -> Connection:
        ours, theirs = Pipe()
        self._agents += [ours, theirs]
        self.channel.add_agent(node, ours)
        return theirs

    def add_rank(self, rank: int, generation: int = 0) -> Rank:
        self.channel.set_identity(rank, generation)
        return self.connect(rank, generation)

    def connect(self, rank: int, generation: int = 0) -> Rank:
        self._ranks.append(Rank(self._context, self.folder, rank, generation))
        return self._ranks[-1]

    def submit(self, *ranks: int) -> PendingRequest:
        return self.channel.submit(ranks, cell, [])

    def background_texts(self) -> list[str]:
        """Texts of output that is of no run, as far as it is here."""
        with contextlib.suppress(RunTimeoutError):
            self._background.wait(self._texts.append, timeout=0.01)
        return [message.text for message in self._texts]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self.channel.close()
        self._context.destroy(0)
        for agent in self._agents:
            agent.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(folder)
        kernel.add_agent()
        yield kernel
        kernel.close()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


# --- who waits for a request receives its answers -------------------------------------------------


def received_for(kernel: Kernel, happens: Callable[[], object]) -> PendingRequest:
    """A request whose answers this thread receives until something happens, which it has to see."""
    until(lambda: kernel.channel._rank_streams.find(b"0.0"), "the rank's connection")
    with InterruptHold() as interrupts:
        pending = kernel.channel.submit([0], cell, [], interrupts=interrupts)
        timer = threading.Timer(0.05, happens)
        timer.start()
        began = time.monotonic()
        kernel.channel.receive_for(pending, began + LONG_S)
        timer.join()
        assert time.monotonic() - began < LONG_S / 2
    return pending


def test_who_is_to_receive_answers_leaves_it_where_a_rank_has_to_connect_first(
    kernel: Kernel,
) -> None:
    for generation in range(20):
        rank = kernel.add_rank(0, generation)
        with InterruptHold() as interrupts:
            began = time.monotonic()
            kernel.channel.submit([0], cell, [], interrupts=interrupts)
            assert time.monotonic() - began < CONNECT_TIMEOUT
        assert rank.receive()[0].source == "1"


def test_an_answer_ends_the_wait_of_who_receives_it(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    pending = received_for(kernel, lambda: rank.reply(1))
    assert pending.replies.keys() == {0}


def test_what_the_channels_thread_has_for_a_run_ends_that_wait(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    assert received_for(kernel, lambda: rank.write(1, "x")).has_event
    assert received_for(kernel, lambda: kernel.channel.mark_dead([death(0)])).deaths.keys() == {0}


def test_a_ctrl_c_ends_that_wait_and_is_raised_then(kernel: Kernel) -> None:
    kernel.add_rank(0)
    with pytest.raises(KeyboardInterrupt):
        received_for(kernel, lambda: os.kill(os.getpid(), signal.SIGINT))


def test_what_is_no_answer_is_left_to_the_channels_thread(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)

    def tell_and_answer() -> None:
        rank.tell()
        rank.stream.send([b"what is no message"])
        rank.reply(1)

    received_for(kernel, tell_and_answer)
    until(lambda: [type(event) for event in kernel.events] == [RankFailed])
    until(lambda: kernel.channel.malformed == 1)


# --- small payloads, which ranks copy -------------------------------------------------------------


def test_what_is_copied_out_of_the_buffer_is_there_until_all_have_answered(kernel: Kernel) -> None:
    ranks = [kernel.add_rank(number) for number in range(2)]

    def push(fill: bytes) -> PendingRequest:
        return kernel.channel.submit([0, 1], PushRequest, [fill * SOME])

    def taken(rank: Rank) -> bytes:
        _, buffered = rank.receive()
        assert isinstance(buffered, Buffered)
        return bytes(rank.link.copy(buffered)[0][:1])

    first = push(b"1")
    assert taken(ranks[0]) == b"1"
    kernel.channel.forget(first)  # nobody waits any more, and the other rank has not come to it
    second = push(b"2")
    assert [taken(rank) for rank in (ranks[0], ranks[1])] == [b"2", b"1"]
    assert taken(ranks[1]) == b"2"
    for rank in ranks:
        rank.reply(second.request)
    wait(second)
    kernel.channel.forget(second)
    third = push(b"3")
    assert [taken(rank) for rank in ranks] == [b"3", b"3"]
    kernel.channel.mark_dead([death(1)])  # it may only seem so
    ranks[0].reply(third.request)
    wait(third)
    kernel.channel.forget(third)
    kernel.channel.submit([0], PushRequest, [b"4" * SOME])
    assert taken(ranks[0]) == b"4"
    assert bytes(ranks[1].link._buffer[1][:1]) == b"3"


# --- pushes that are committed by a word ----------------------------------------------------------


@pytest.fixture
def board(kernel: Kernel) -> Iterator[Board]:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(3))
    kernel.channel.board = board = Board(descriptor, 3)
    yield board
    kernel.channel.board = None
    board.close()
    os.close(descriptor)


def test_a_push_is_committed_by_a_word_once_all_its_ranks_have_it(
    kernel: Kernel, board: Board
) -> None:
    ranks = [kernel.add_rank(number) for number in range(2)]
    pending = kernel.channel.submit([0, 1], PushRequest, [])
    for rank in ranks:
        assert not kernel.channel.commit_push(pending.request, [0, 1])
        rank.reply(rank.receive()[0].id)
    wait(pending)
    assert not board.is_push_committed(pending.request)
    assert kernel.channel.commit_push(pending.request, [0, 1])
    assert board.is_push_committed(pending.request)


def test_what_is_on_its_way_to_its_ranks_has_to_come_before_the_commit(
    kernel: Kernel, board: Board
) -> None:
    rank = kernel.add_rank(0)
    kernel.add_rank(1)
    beside = kernel.submit(0)
    assert not kernel.channel.commit_push(7, [0])
    assert kernel.channel.commit_push(8, [1])
    rank.reply(beside.request)
    wait(beside)
    assert kernel.channel.commit_push(9, [0])


def test_the_word_of_a_push_stays_until_its_ranks_have_seen_it(
    kernel: Kernel, board: Board
) -> None:
    kernel.add_rank(0)
    kernel.add_rank(1)
    assert kernel.channel.commit_push(7, [0])
    board.regions[0].set_staged(7)
    assert not kernel.channel.commit_push(8, [1])
    assert board.is_push_committed(7)
    board.regions[0].set_staged(0)
    assert kernel.channel.commit_push(8, [1])


def test_a_push_is_not_committed_where_a_rank_of_it_has_died(kernel: Kernel, board: Board) -> None:
    kernel.add_rank(0)
    kernel.channel.mark_dead([death(0)])
    with pytest.raises(EngineDiedError):
        kernel.channel.commit_push(7, [0])
    assert not board.is_push_committed(7)


def test_a_session_that_is_kept_asks_for_each_commit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        channel = SocketChannel(folder, print, PendingRequest(0, ()), is_kept=True)
        assert not channel.commits_pushes
        channel.close()


# --- requests and replies -------------------------------------------------------------------------


def test_a_request_reaches_its_ranks_and_their_replies_reach_who_waits(kernel: Kernel) -> None:
    ranks = [kernel.add_rank(number) for number in range(3)]
    pending = kernel.channel.submit([0, 2], PushRequest, [b"value"])
    for rank in (ranks[2], ranks[0]):
        message, payload = rank.receive()
        assert (message, payload) == (PushRequest(pending.request), (b"value",))
        rank.reply(message.id, [b"of rank %d" % rank.rank])
    wait(pending)
    assert {rank: payload for rank, (_, payload) in pending.replies.items()} == {
        0: [b"of rank 0"],
        2: [b"of rank 2"],
    }
    assert ranks[1].has_nothing()


def test_every_request_has_a_number_of_its_own_and_waits_for_its_own_replies(
    kernel: Kernel,
) -> None:
    rank = kernel.add_rank(0)
    first, second = kernel.submit(0), kernel.submit(0)
    assert [rank.receive()[0].id for _ in range(2)] == [first.request, second.request]
    rank.reply(second.request)
    wait(second)
    assert first.missing == (0,)
    assert kernel.channel.pending() == [first, second]


def test_large_payloads_go_through_memory_in_both_directions(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    pending = kernel.channel.submit([0], PushRequest, [LARGE])
    _, shared = rank.receive()
    assert isinstance(shared, Shared)
    with rank.link.receive(shared) as handed:
        assert map_private(handed.descriptor, shared.sizes) == [LARGE]
    with Segment([len(LARGE)]) as made:
        made.write([LARGE[::-1]])
        rank.reply(pending.request, rank.link.send(made))
    wait(pending)
    assert pending.replies[0][1] == [LARGE]


def test_a_rank_that_has_just_started_may_take_a_moment_to_connect(
    kernel: Kernel, beside: Callable[..., Future[Any]]
) -> None:
    kernel.channel.set_identity(0, 0)
    first, second = (beside(kernel.submit, 0).result(CONNECT_TIMEOUT / 2) for _ in range(2))
    assert first.missing == second.missing == (0,)
    rank = kernel.connect(0)
    assert rank.receive()[0] == cell(first.request)
    assert rank.receive()[0] == cell(second.request)


def test_a_rank_that_dies_before_it_connects_ends_what_waits_for_it(kernel: Kernel) -> None:
    kernel.channel.set_identity(0, 0)
    pending = kernel.submit(0)
    kernel.channel.mark_dead([death(0)])
    wait(pending)
    assert pending.deaths.keys() == {0}
    kernel.channel.set_identity(0, 1)
    later = kernel.submit(0)
    late = kernel.connect(0, 0)
    assert kernel.connect(0, 1).receive()[0] == cell(later.request)
    assert late.has_nothing()


def test_a_rank_is_busy_until_it_has_answered_all_its_requests(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    kernel.add_rank(1)
    assert not kernel.channel.is_busy(0)
    first, second = kernel.submit(0), kernel.submit(0)
    rank.reply(first.request)
    wait(first)
    assert kernel.channel.is_busy(0)
    rank.reply(second.request)
    wait(second)
    assert not kernel.channel.is_busy(0)
    assert not kernel.channel.is_busy(1)
    assert not kernel.channel.is_busy(7)  # which there is not


# --- what nobody waits for ------------------------------------------------------------------------


def test_what_comes_of_a_request_that_was_forgotten_is_in_the_background(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    pending = kernel.submit(0)
    kernel.channel.forget(pending)
    assert kernel.channel.pending() == []
    assert not pending.is_wanted
    rank.write(pending.request, "late")
    rank.output.send_multipart(encode(OutputEnd(0, pending.request)))
    rank.reply(pending.request)
    until(lambda: not kernel.channel.is_busy(0))
    assert pending.replies == {}
    until(lambda: "late" in kernel.background_texts())


def test_nothing_is_shown_of_a_rank_that_is_to_end_until_another_takes_its_place(
    kernel: Kernel,
) -> None:
    first, other = kernel.add_rank(0), kernel.add_rank(1)
    pending = kernel.submit(0)
    kernel.channel.mute([0])
    first.write(0, "cannot connect")
    first.write(pending.request, "of a run")
    until(lambda: texts_of(pending) == ["of a run"])
    other.write(0, "seen")
    until(lambda: "seen" in kernel.background_texts())
    kernel.add_rank(0, generation=1).write(0, "as well")
    until(lambda: "as well" in kernel.background_texts())
    assert kernel.background_texts() == ["seen", "as well"]


def texts_of(pending: PendingRequest) -> list[str]:
    """What has come of a run since this was asked last."""
    texts: list[Any] = []
    with contextlib.suppress(RunTimeoutError):
        pending.wait(texts.append, timeout=0.01)
    return [message.text for message in texts]


def test_a_rank_that_asks_for_input_in_a_run_that_was_forgotten_is_told_nobody_is_there(
    kernel: Kernel,
) -> None:
    rank = kernel.add_rank(0)
    pending = kernel.submit(0)
    kernel.channel.forget(pending)
    rank.output.send_multipart(encode(InputRequest(0, pending.request, 4, "name: ")))
    assert rank.order() == InputReply(4, None, NOBODY)


def test_a_frame_that_is_no_message_is_dropped_and_counted(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    pending = kernel.submit(0)
    good = encode(Reply(pending.request, 0))
    for frames in (
        [b"junk"],
        [b""],
        [good[0][:-4]],
        [b"ds1" + good[0][3:][::-1]],
        encode({"id": pending.request}),
        encode(AgentFailed("raise")),  # which whoever is told does not take
    ):
        rank.stream.send(frames)
    rank.reply(pending.request)
    wait(pending)
    assert kernel.channel.malformed == 6
    assert kernel.events == []


def test_a_reply_of_memory_that_never_came_is_dropped(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    first, second = kernel.submit(0), kernel.submit(0)
    rank.reply(first.request, Shared("0.9", 1, (5,)))
    rank.reply(second.request)
    wait(second)
    assert kernel.channel.malformed == 1
    assert first.missing == (0,)


# --- deaths ---------------------------------------------------------------------------------------


def test_a_death_ends_what_waits_for_that_rank_and_nothing_else(kernel: Kernel) -> None:
    for number in (0, 1):
        kernel.add_rank(number)
    lone, both, other = kernel.submit(1), kernel.submit(0, 1), kernel.submit(0)
    kernel.channel.mark_dead([death(1)])
    wait(lone)
    assert lone.deaths[1].returncode == -9
    assert (both.missing, other.missing) == ((0,), (0,))
    assert (kernel.channel.is_busy(1), kernel.channel.is_busy(0)) == (False, True)


def test_nothing_is_sent_to_a_dead_rank_and_to_nobody_who_would_wait_for_it(
    kernel: Kernel,
) -> None:
    ranks = [kernel.add_rank(number) for number in (0, 1)]
    error = death(1)
    kernel.channel.mark_dead([error])
    with pytest.raises(EngineDiedError, match="rank 1 is gone") as caught:
        kernel.submit(0, 1)
    assert caught.value is not error  # notes are added to it
    kernel.channel.send_control(1, StackRequest(1))
    assert all(rank.has_nothing() for rank in ranks)
    assert kernel.channel.pending() == []
    assert not kernel.channel.is_busy(0)


def test_a_reply_of_a_rank_that_is_dead_is_not_taken(kernel: Kernel) -> None:
    ranks = [kernel.add_rank(number) for number in (0, 1)]
    pending = kernel.submit(0, 1)
    kernel.channel.mark_dead([death(1)])
    ranks[1].reply(pending.request, [b"too late"])
    ranks[1].tell()
    until(lambda: kernel.events)
    ranks[0].reply(pending.request)
    wait(pending)
    assert list(pending.deaths) == [1]
    assert list(pending.replies) == [0]


def test_requests_go_to_the_process_of_the_last_generation(kernel: Kernel) -> None:
    old = kernel.add_rank(0)
    before = kernel.submit(0)
    old.receive()
    kernel.channel.mark_dead([death(0)])
    new = kernel.add_rank(0, generation=1)
    pending = kernel.submit(0)
    kernel.channel.send_control(0, StackRequest(1))
    assert new.receive()[0] == cell(pending.request)
    assert new.order() == StackRequest(1)
    assert old.has_nothing()
    old.reply(before.request, [b"of another time"])
    old.tell()
    until(lambda: kernel.events)
    assert before.replies == {}
    assert kernel.channel.is_busy(0)


def test_a_rank_that_is_replaced_owes_nothing_of_what_the_one_before_did(kernel: Kernel) -> None:
    kernel.add_rank(0)
    kernel.submit(0)
    kernel.add_rank(0, generation=1)
    assert not kernel.channel.is_busy(0)


# --- output ---------------------------------------------------------------------------------------


def test_output_goes_to_the_run_that_it_is_of(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    pending = kernel.submit(0)
    rank.write(0, "between runs")
    rank.write(pending.request, "of the run")
    rank.reply(pending.request, has_output=True)
    rank.output.send_multipart(encode(OutputEnd(0, pending.request)))
    assert wait(pending) == ["of the run"]
    assert kernel.background_texts() == ["between runs"]


def test_output_that_nobody_takes_is_left_in_the_socket_but_replies_are_not(
    kernel: Kernel,
) -> None:
    kernel.channel.budget = OutputBudget(limit=10)
    rank = kernel.add_rank(0)
    loud, *others = [kernel.submit(0) for _ in range(3)]
    rank.write(loud.request, "x" * 11)
    until(lambda: kernel.channel.budget.is_over)
    for other in others:
        rank.reply(other.request)
        wait(other)
        rank.write(loud.request, "more")
    time.sleep(0.05)
    assert kernel.channel.budget._held == 11
    rank.reply(loud.request, has_output=True)
    rank.output.send_multipart(encode(OutputEnd(0, loud.request)))
    assert wait(loud) == ["x" * 11, "more", "more"]


# --- questions to control threads -----------------------------------------------------------------


def test_ranks_that_do_not_answer_a_question_in_time_are_left_out(
    kernel: Kernel, beside: Callable[..., Future[Any]]
) -> None:
    ranks = [kernel.add_rank(number) for number in (0, 1)]
    asked = beside(kernel.channel.request_stacks, [0, 1], 0.5)
    questions = [rank.order() for rank in ranks]
    answer = StackReply(0, questions[0].number, (), "In[1] line 2")
    ranks[0].stream.send(encode(answer))
    assert asked.result(LONG_S) == {0: answer}
    late = StackReply(1, questions[1].number, (), "")
    ranks[1].stream.send(encode(late))
    again = beside(kernel.channel.query, [1], lambda n: CompletionRequest(n, "x."), LONG_S)
    question = ranks[1].order()
    assert question.number != late.number
    reply = CompletionReply(1, question.number)
    ranks[1].stream.send(encode(reply))
    assert again.result(LONG_S) == {1: reply}


# --- agents ---------------------------------------------------------------------------------------


def test_what_ranks_and_agents_tell_is_passed_on(kernel: Kernel) -> None:
    later = kernel.add_agent(1)  # the thread is running already
    rank = kernel.add_rank(0)
    later.send(StoreReady(4711))
    until(lambda: kernel.events)
    rank.tell()
    until(lambda: len(kernel.events) == 2)
    assert kernel.events == [StoreReady(4711), RankFailed(0, 0, ErrorInfo("E", ""))]


def test_an_agent_that_is_gone_is_told_of_once(kernel: Kernel) -> None:
    kernel.add_agent(2).close()
    until(lambda: kernel.events)
    kernel._agents[1].close()  # of the first node
    until(lambda: len(kernel.events) == 2)
    assert kernel.events == [NodeGone(2), None]
    rank = kernel.add_rank(0)
    pending = kernel.submit(0)
    rank.reply(pending.request)
    wait(pending)
    assert len(kernel.events) == 2


def test_a_malformed_message_of_an_agent_is_no_end_of_it(kernel: Kernel) -> None:
    agent = kernel.add_agent(1)
    agent.send_bytes(b"")
    agent.send_bytes(b"junk")
    agent.send(AgentFailed("raise"))
    agent.send(StoreReady(4711))
    until(lambda: kernel.events)
    assert kernel.events == [StoreReady(4711)]
    assert kernel.channel.malformed == 3


def test_an_agent_whose_message_never_comes_whole_is_given_up_and_holds_up_nobody(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_messages, "MESSAGE_TIMEOUT_S", 0.3)
    agent = kernel.add_agent(2)
    os.write(agent.fileno(), b"\0\0\1\0half")
    until(lambda: kernel.events)
    assert kernel.events == [NodeGone(2)]
    rank = kernel.add_rank(0)
    pending = kernel.submit(0)
    rank.reply(pending.request)
    wait(pending)


# --- the end --------------------------------------------------------------------------------------


def test_a_channel_that_is_closed_sends_nothing_more(kernel: Kernel) -> None:
    rank = kernel.add_rank(0)
    pending = kernel.submit(0)
    rank.receive()
    kernel.channel.close()
    with pytest.raises(SessionStateError, match="this session is closed"):
        kernel.submit(0)
    kernel.channel.send_control(0, StackRequest(1))
    assert rank.has_nothing()
    kernel.channel.close()
    kernel.channel.mark_dead([death(0)])  # which is how whoever waits is told
    wait(pending)
    assert list(pending.deaths) == [0]


@pytest.mark.parametrize("has_begun", [True, False])
def test_closing_leaves_no_thread_and_no_descriptor(has_begun: bool) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(folder)
        if has_begun:
            kernel.add_agent()
            rank = kernel.add_rank(0)
            pending = kernel.channel.submit([0], PushRequest, [LARGE])
            rank.reply(pending.request)
            wait(pending)
        kernel.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "distsession-channel" not in names
    until(lambda: descriptors() <= before, "the end of all descriptors")
