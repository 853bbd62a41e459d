"""A rank's end of the channel, while kernels come and go; the test is the kernel."""

from __future__ import annotations

import os
import select
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from distsession.engine.kernel_link import KernelLink, Received
from distsession.protocol import shared_memory
from distsession.protocol.agent_messages import StartRanks
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import (
    Addressed,
    CellRequest,
    Reply,
    Shared,
    StackReply,
    decode,
    encode,
)
from distsession.protocol.shared_memory import Link, LinkListener
from distsession.protocol.wire import memory_path, socket_path
from tests.message_ends import ListeningEnd
from tests.until import until

NAME = b"0.1"
LARGE = b"x" * 2_000_000


class Kernel:
    """The sockets of the owner of one epoch."""

    def __init__(self, folder: str, board: Board, epoch: int):
        self.epoch, self._board = epoch, board
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.ranks = ListeningEnd(socket_path(folder, "requests", epoch))
        self.output = self._bind(folder, zmq.PULL, "output")
        self._control = self._bind(folder, zmq.ROUTER, "control")
        self.memory = LinkListener(memory_path(folder, 0, epoch))
        board.begin_epoch(epoch)

    def _bind(self, folder: str, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{socket_path(folder, name, self.epoch)}")
        return socket

    def send(self, number: int, *, is_committed: bool = True) -> None:
        message = Addressed(CellRequest(number, f"cell {number}", f"In[{number}]"), (0, 1))

        until(lambda: self.ranks.send(NAME, encode(message)), "the rank to connect")
        if is_committed:
            self._board.commit(self.epoch, number)

    def received(self) -> tuple[Any, Any]:
        return decode(self.ranks.receive())

    def value(self) -> tuple[int, bytes]:
        """The next answer: to which request, and what."""
        reply, payload = self.received()
        if isinstance(payload, Shared):
            with self.memory.link(payload.sender).receive(payload) as handed:
                (frame,) = shared_memory.map_private(handed.descriptor, payload.sizes)
                return reply.id, bytes(frame)
        return reply.id, b"".join(map(bytes, payload))

    def has_nothing(self) -> bool:
        return not self.ranks.poll(50)

    def close(self) -> None:
        self.memory.close()
        self.ranks.close()
        self._context.destroy(0)


class Host:
    """One rank and its kernels."""

    def __init__(self, folder: str, *, keep: float = 60.0):
        self.folder = folder
        self._file = make_file()
        os.truncate(self._file, file_size(2))
        self.board = Board(self._file, 2)
        self.kernels: list[Kernel] = []
        self.attach(1)
        start = StartRanks(
            (1,), 2, 0, ("cpu",) * 2, "gloo", None, None, False, 1, "shared", self._file, folder,
            "/", (), {}, keep=keep,
        )  # fmt: skip
        self.woken = threading.Event()
        self.link = KernelLink(start, 1, self.board, self.woken.set)

    @property
    def kernel(self) -> Kernel:
        return self.kernels[-1]

    def attach(self, epoch: int) -> None:
        self.kernels.append(Kernel(self.folder, self.board, epoch))

    def replace(self) -> None:
        """The kernel is gone, and another one is there, to which the rank has connected."""
        self.link.detach()
        self.attach(self.kernel.epoch + 1)
        self.link.attach(self.kernel.epoch)

    def receive(self) -> Received:
        found: list[Received] = []

        def has_come() -> bool:
            if self.link.poll_request(50) and (received := self.link.receive_request()):
                found.append(received)
            return bool(found)

        until(has_come)
        return found[0]

    def answer(self, received: Received, value: bytes = b"value") -> None:
        segment = shared_memory.offer([value])
        self.link.answer(received, Reply(received.request.id, 1), segment or [value])

    def close(self) -> None:
        for kernel in self.kernels:
            kernel.close()
        os.close(self._file)


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as folder:
        made = Host(folder)
        yield made
        made.close()


def numbers(addressed: tuple[Addressed, ...]) -> list[int]:
    return [each.request.id for each in addressed]


def test_a_request_is_received_and_answered(host: Host) -> None:
    host.kernel.send(1)
    received = host.receive()
    assert (received.request.id, received.ranks) == (1, (0, 1))
    host.answer(received)
    assert host.kernel.value() == (1, b"value")


def test_a_request_does_not_begin_before_all_ranks_have_been_sent_it(host: Host) -> None:
    host.kernel.send(1, is_committed=False)
    begun: list[Received] = []
    thread = threading.Thread(target=lambda: begun.append(host.receive()))
    thread.start()
    assert host.kernel.has_nothing()
    assert not begun
    host.board.commit(1, 1)
    thread.join(20)
    assert begun[0].request.id == 1


def test_a_request_that_was_half_sent_is_dropped_with_its_kernel(host: Host) -> None:
    host.kernel.send(1)
    assert host.receive().request.id == 1
    host.kernel.send(2)
    host.kernel.send(3, is_committed=False)
    host.replace()
    running, queued, answered = host.link.state()
    assert running is not None
    assert (running.request.id, numbers(queued), numbers(answered)) == (1, [2], [])


def test_one_that_waits_for_the_others_is_dropped_too(host: Host) -> None:
    host.kernel.send(1, is_committed=False)
    found: list[Received | None] = []

    def take() -> None:
        until(lambda: host.link.poll_request(50))
        found.append(host.link.receive_request())

    thread = threading.Thread(target=take)
    thread.start()
    until(lambda: host.link._uncommitted is not None)
    host.replace()
    thread.join(20)
    assert found == [None]
    assert host.link.state() == (None, (), ())


def test_what_waited_is_run_for_the_next_kernel_in_its_order(host: Host) -> None:
    for number in (1, 2, 3):
        host.kernel.send(number)
    first = host.receive()
    host.replace()
    assert host.woken.is_set()
    host.answer(first)
    host.link.resume(())
    host.kernel.send(4)
    assert [host.receive().request.id for _ in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("value", [b"small", LARGE])
def test_an_answer_that_nobody_has_acknowledged_is_sent_again(host: Host, value: bytes) -> None:
    host.kernel.send(1)
    host.answer(host.receive(), value)
    host.replace()
    assert numbers(host.link.state()[2]) == [1]
    host.link.resume(())
    assert host.kernel.value() == (1, value)
    host.replace()
    host.link.resume(())
    assert host.kernel.value() == (1, value)


@pytest.mark.parametrize("value", [b"small", LARGE])
def test_an_answer_that_was_acknowledged_is_let_go_of(host: Host, value: bytes) -> None:
    host.kernel.send(1)
    host.answer(host.receive(), value)
    assert host.kernel.value() == (1, value)
    host.board.acknowledge(1, 1)
    host.link.forget_acknowledged()
    host.replace()
    host.link.resume(())
    assert host.link.state() == (None, (), ())
    assert host.kernel.has_nothing()


def test_memory_handed_to_one_kernel_is_not_told_to_the_next_as_its_own(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.kernel.send(1)
    received = host.receive()
    memory = host.link._memory

    def send(segment: Any) -> Shared:
        shared = Link.send(memory, segment)
        host.replace()  # just between the memory and the message that refers to it
        return shared

    monkeypatch.setattr(memory, "send", send)
    host.answer(received, LARGE)
    assert host.kernel.has_nothing()
    host.link.resume(())
    assert host.kernel.value() == (1, LARGE)


def test_what_ends_while_nobody_is_there_is_told_who_comes(host: Host) -> None:
    host.kernel.send(1)
    received = host.receive()
    host.link.detach()
    host.answer(received, LARGE)
    host.link.send(StackReply(1, 1, (), ""))  # of no interest to who comes
    host.replace()
    host.link.resume(())
    assert host.kernel.value() == (1, LARGE)
    assert host.kernel.has_nothing()


def test_a_kernel_that_does_not_read_keeps_nobody_from_another(host: Host) -> None:
    host.kernel.send(1)
    received = host.receive()
    ended = threading.Event()

    def flood() -> None:
        for _ in range(10_000):
            host.link.send(StackReply(1, 1, (), "x" * 1000))
        host.answer(received)
        ended.set()

    thread = threading.Thread(target=flood)
    thread.start()
    former = host.kernel.ranks.listener
    until(lambda: select.select([former.descriptor], [], [], 0)[0])
    assert not ended.wait(0.3)
    host.replace()
    host.link.detach()  # so that the rest of the flood is dropped
    assert ended.wait(20)
    host.replace()
    host.link.resume(())
    assert host.kernel.value() == (1, b"value")
    thread.join()


def test_what_the_next_kernel_drops_is_neither_begun_nor_told(host: Host) -> None:
    host.kernel.send(1)
    host.kernel.send(2)
    host.answer(host.receive())
    host.replace()
    host.link.resume((1, 2))
    host.kernel.send(3)
    assert host.receive().request.id == 3
    assert host.kernel.has_nothing()


def test_a_former_kernel_that_goes_on_reaches_nobody(host: Host) -> None:
    host.replace()
    former = host.kernels[0]
    host.board.commit(former.epoch, 99)
    host.board.acknowledge(former.epoch, 99)
    host.kernel.send(50, is_committed=False)
    begun: list[Received] = []
    thread = threading.Thread(target=lambda: begun.append(host.receive()))
    thread.start()
    assert host.kernel.has_nothing()
    assert not begun
    host.board.commit(host.kernel.epoch, 50)
    thread.join(20)
    host.answer(begun[0])
    assert host.kernel.value() == (50, b"value")
    host.link.forget_acknowledged()
    assert numbers(host.link.state()[2]) == [50]


def test_who_attaches_and_is_gone_at_once_is_no_harm(host: Host) -> None:
    host.kernel.send(1)
    host.answer(host.receive())
    host.link.detach()
    host.link.attach(2)  # nobody listens there
    assert not host.link.has_request()
    assert not select.select([host.link.descriptor], [], [], 0)[0]
    host.link.resume(())
    host.link.detach()
    host.attach(3)
    host.link.attach(3)
    host.link.resume(())
    assert host.kernel.value() == (1, b"value")
    host.kernel.send(2)
    assert host.receive().request.id == 2


def test_a_rank_whose_kernel_is_gone_is_not_kept_awake(host: Host) -> None:
    host.kernel.close()
    assert not host.link.has_request()
    assert not select.select([host.link.descriptor], [], [], 0)[0]


def test_a_session_that_is_not_kept_keeps_no_answers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        host = Host(folder, keep=0.0)
        try:
            host.kernel.send(1, is_committed=False)
            host.answer(host.receive(), LARGE)
            assert host.kernel.value() == (1, LARGE)
            assert host.link.state() == (None, (), ())
        finally:
            host.close()
