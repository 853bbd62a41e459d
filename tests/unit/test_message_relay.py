"""Messages between the kernel and the ranks of another node; the test plays both."""

from __future__ import annotations

import os
import pickle
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import zmq

from distsession.cluster.node_links import NodeLinks
from distsession.engine import message_relay
from distsession.engine.message_relay import MessageRelay
from distsession.protocol import message_stream, node_link
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.message_stream import MessageStream, packed
from distsession.protocol.messages import MAGIC
from distsession.protocol.node_link import CONTROL, OUTPUT_WINDOW, REQUEST, WINDOW
from distsession.protocol.wire import link_path, make_node_folder, node_folder, socket_path
from tests.message_ends import MessageEnd
from tests.until import until

LONG_MS = 60_000
loaded: list[int] = []


def load(number: int) -> int:
    loaded.append(number)
    return number


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load, (os.getpid(),)


def make_board() -> Board:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(4))
    board = Board(descriptor, 4)
    os.close(descriptor)
    return board


class Rank:
    """The sockets of a rank."""

    def __init__(self, node: Node, name: bytes):
        self._node, self._name = node, name
        self.stream = MessageEnd(socket_path(node.place, "requests", 1), name)
        node.ends.append(self.stream)
        self.output = self._connect(zmq.PUSH, "output")
        self.control = self._connect(zmq.DEALER, "control")

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._node.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 32)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self._name)
        socket.connect(f"ipc://{socket_path(self._node.place, name, 1)}")
        return socket

    def receive(self) -> list[bytes]:
        """The next request, while the kernel's end does what it has to."""
        until(lambda: self._node.receive() is None or self.stream.poll(1), "a request")
        return self.stream.receive()

    def take(self, count: int) -> list[bytes]:
        """The first frames of so many requests."""
        return [self.receive()[0] for _ in range(count)]


class Node:
    """Both ends of a link, and what is at the further one."""

    def __init__(self, folder: str, board: Board | None = None, ranks: Sequence[int] = ()):
        self.place = make_node_folder(folder, 1)
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[zmq.Socket[Any]] = []
        self.ends: list[MessageEnd] = []
        self.path = link_path(folder)
        self.near = NodeLinks(self.path)
        relays: list[MessageRelay] = []
        maker = threading.Thread(
            target=lambda: relays.append(MessageRelay(folder, 1, 1, board, ranks))
        )
        maker.start()  # it is told first how its messages travel
        until(lambda: [*self.near.receive()] or relays)
        (self.far,) = relays
        maker.join()
        self._greeter = threading.Thread(target=self._serve)
        self._greeter.start()
        self.received: list[list[bytes]] = []
        until(self.receive_welcomes)

    def _serve(self) -> None:
        self.far.greet()
        self.far.serve()

    def receive_welcomes(self) -> bool:
        self.receive()
        return bool(self.near.nodes)

    def receive(self) -> list[list[bytes]]:
        """All that has come from the ranks by now."""
        self.received += self.near.receive()
        return self.received

    def wait(self, count: int) -> list[list[bytes]]:
        until(lambda: len(self.receive()) >= count, f"{count} messages of ranks")
        return self.received

    def send(self, *names: bytes, text: bytes = b"hello", kind: bytes = REQUEST) -> None:
        self.near.send(1, kind, names, [text])

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, LONG_MS)
        socket.setsockopt(zmq.SNDTIMEO, LONG_MS)
        self._sockets.append(socket)
        return socket

    def let_answers_reach_the_relay(self, rank: Rank) -> None:
        """What a rank puts out is handed on at once, after all that has come from ranks before."""
        rank.output.send_multipart([b"output"])
        before = len(self.received)
        until(lambda: [b"output"] in self.receive()[before:], "output")
        self.received.remove([b"output"])

    def end(self) -> None:
        self.far.end()
        self._greeter.join(20)
        assert not self._greeter.is_alive()

    def close(self) -> None:
        self.end()
        self.near.close(0)
        for end in self.ends:
            end.close()
        for each in self._sockets:
            each.close(0)
        self._context.term()


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder whose sockets have names that are short enough."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.fixture
def node(short_folder: str) -> Iterator[Node]:
    node = Node(short_folder)
    yield node
    node.close()


# --- to ranks -------------------------------------------------------------------------------------


def test_a_message_for_several_ranks_crosses_once(node: Node) -> None:
    ranks = [Rank(node, b"0.2"), Rank(node, b"0.3")]
    node.near.send(1, REQUEST, [b"0.2", b"0.3"], [b"head", b"x" * 1_000_000])
    for rank in ranks:
        assert rank.receive() == [b"head", b"x" * 1_000_000]
    node.send(b"0.2", b"0.3", text=b"stop", kind=CONTROL)
    assert [rank.control.recv_multipart() for rank in ranks] == [[b"stop"]] * 2
    assert dict(node.near.sent) == {1: 2}


def test_a_rank_that_connects_late_gets_all_in_order(node: Node) -> None:
    texts = [str(number).encode() for number in range(50)]
    for text in texts:
        node.send(b"0.2", text=text)
    assert Rank(node, b"0.2").take(50) == texts


def test_a_rank_that_takes_nothing_holds_up_nobody_and_loses_nothing(node: Node) -> None:
    stuck, other = Rank(node, b"0.2"), Rank(node, b"0.3")
    big = [str(number).encode() + b"." * 20_000 for number in range(400)]
    for text in big:
        node.send(b"0.2", b"0.3", text=text)
        assert other.take(1) == [text]
        node.receive()
    waiting = node.far._waiting[node_link.key_of(REQUEST, b"0.2")]
    assert 0 < len(waiting.messages) <= WINDOW
    assert len(node.near._flows[node_link.key_of(REQUEST, b"0.2")].held) > 100
    seen: list[bytes] = []
    while len(seen) < 400:
        seen += stuck.take(1)
        node.receive()
    assert seen == big


def test_what_waits_for_a_rank_that_is_gone_is_dropped(node: Node) -> None:
    for _ in range(2 * WINDOW):
        node.send(b"0.2")
    until(lambda: len(node.far._waiting) == 1)
    node.near.forget(1, b"0.2")
    until(lambda: not node.far._waiting)
    node.send(b"0.2", text=b"next")  # such a name is never given twice, but nothing comes before
    assert Rank(node, b"0.2").take(1) == [b"next"]


def test_what_was_sent_before_the_end_reaches_its_rank(node: Node) -> None:
    rank = Rank(node, b"0.2")
    node.send(b"0.2")
    rank.take(1)
    texts = [b"%d" % number for number in range(WINDOW - 1)]
    for text in texts:
        node.send(b"0.2", text=text)
    node.end()
    assert rank.take(len(texts)) == texts


def test_what_is_held_back_is_sent_before_the_link_is_closed(node: Node) -> None:
    rank = Rank(node, b"0.2")
    texts = [b"%d" % number + b"x" * 20_000 for number in range(5 * WINDOW)]
    for text in texts:
        node.send(b"0.2", text=text)
    assert not node.near.wait_sent(0.0)
    taken: list[bytes] = []

    def read() -> None:
        for _ in texts:
            taken.extend(rank.stream.receive())

    reader = threading.Thread(target=read)
    reader.start()
    is_over = threading.Event()

    def receive() -> None:
        while not is_over.wait(0.001):
            node.receive()

    receiver = threading.Thread(target=receive)
    receiver.start()
    assert node.near.wait_sent(60)
    is_over.set()
    receiver.join()
    node.end()  # the last ones wait in the relay
    reader.join()
    assert taken == texts


def test_what_comes_with_the_welcome_is_reported_as_taken(
    short_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, wait = threading.Event(), MessageStream.wait

    def wait_longer(stream: MessageStream, timeout_s: float) -> bool:
        return may_go_on.wait(60) and wait(stream, timeout_s)

    monkeypatch.setattr(MessageStream, "wait", wait_longer)
    node = Node(short_folder)
    try:
        rank = Rank(node, b"0.2")
        texts = [b"%d" % number for number in range(2 * WINDOW)]
        for text in texts:
            node.send(b"0.2", text=text)
        time.sleep(0.5)  # until all of it is there
        may_go_on.set()

        def is_sent() -> bool:
            node.receive()
            return node.near.wait_sent(0.0)

        until(is_sent, "room for what is held back")
        assert rank.take(len(texts)) == texts
    finally:
        may_go_on.set()
        node.close()


# --- from ranks -----------------------------------------------------------------------------------


def test_replies_of_a_rank_come_in_order_as_they_were_sent(node: Node) -> None:
    rank = Rank(node, b"0.2")
    sent = [[b"%d" % number, b"payload" * number] for number in range(300)]
    for frames in sent:
        rank.stream.send(frames)
        node.receive()
    assert node.wait(300) == sent


def one_of_two_answers(node: Node) -> Rank:
    """Two ranks have the same request, and the first has answered it; gives the second."""
    first, second = Rank(node, b"0.2"), Rank(node, b"0.3")
    node.send(b"0.2", b"0.3")
    assert first.receive() == second.receive() == [b"hello"]
    first.stream.send([b"one"])
    return second


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay waits long for the other answers."""
    monkeypatch.setattr(message_relay, "GATHER_S", LONG_MS / 1000)


@pytest.mark.usefixtures("patience")
def test_answers_of_a_nodes_ranks_to_one_request_cross_together(node: Node) -> None:
    second = one_of_two_answers(node)
    node.let_answers_reach_the_relay(second)
    assert node.receive() == []
    second.stream.send([b"two"])
    assert node.wait(2) == [[b"one"], [b"two"]]
    node.send(b"0.3")  # a single rank's answer waits for nobody
    assert second.receive() == [b"hello"]
    second.stream.send([b"three"])
    assert node.wait(3)[2] == [b"three"]


def test_an_answer_does_not_wait_for_a_rank_that_gives_none(node: Node) -> None:
    one_of_two_answers(node)
    assert node.wait(1) == [[b"one"]]


@pytest.mark.usefixtures("patience")
def test_an_answer_that_waits_is_handed_on_before_a_relay_ends(node: Node) -> None:
    node.let_answers_reach_the_relay(one_of_two_answers(node))
    node.end()
    assert node.wait(1) == [[b"one"]]


def test_no_answer_passes_the_part_of_the_board_before_it(
    short_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_relay, "GATHER_S", 0.5)
    monkeypatch.setattr(message_relay, "LOOK_S", (LONG_MS / 1000, LONG_MS / 1000))
    board, came = make_board(), []
    node = Node(short_folder, board, (2, 3))
    try:
        second = one_of_two_answers(node)
        node.let_answers_reach_the_relay(second)
        node.near._on_board = lambda *_: came.append(b"board")
        board.regions[2].set_without_group(True)
        for _ in range(20):  # more than the system takes while nobody reads
            second.output.send_multipart([b"x" * 1_000_000])
        until(lambda: node.far._kernel.holds_something)
        time.sleep(2 * message_relay.GATHER_S)

        def has_come() -> bool:
            came.extend(frames[0] for frames in node.near.receive())
            return b"one" in came

        until(has_come, "the answer")
        assert came.index(b"board") < came.index(b"one")
    finally:
        node.close()
        board.close()


def test_output_is_sent_as_far_as_there_is_room_and_replies_pass_it(node: Node) -> None:
    rank = Rank(node, b"0.2")
    sent = [[b"%d" % number, b"x" * 10_000] for number in range(3000)]
    writer = threading.Thread(
        target=lambda: [rank.output.send_multipart(frames) for frames in sent]
    )
    writer.start()
    node.wait(OUTPUT_WINDOW)
    rank.stream.send([b"reply"])
    assert node.wait(OUTPUT_WINDOW + 1)[-1] == [b"reply"]
    assert len(node.receive()) == OUTPUT_WINDOW + 1
    assert writer.is_alive()  # held back
    until(lambda: node.near.grant() or len(node.receive()) == 3001)
    writer.join()
    del node.received[OUTPUT_WINDOW]
    assert node.received == sent


# --- what is no message ---------------------------------------------------------------------------


def malformed(count: int) -> Iterator[list[bytes]]:
    """Frames that nobody has sent; some are pickles that must not be read."""
    dice = random.Random(16)
    bomb = pickle.dumps(Bomb())
    for _ in range(count):
        frames = [dice.randbytes(dice.choice((0, 1, 8, 300))) for _ in range(dice.randrange(1, 5))]
        yield dice.choice((frames, [bomb], [MAGIC + bomb], [dice.choice(b"HRTWQCGFO").to_bytes()]))


@pytest.mark.parametrize("name", ["control", "output"])
def test_ten_thousand_malformed_messages_do_not_end_a_relay(node: Node, name: str) -> None:
    rank = Rank(node, b"0.2")
    intruder = node.socket(zmq.DEALER if name == "control" else zmq.PUSH)
    intruder.connect(f"ipc://{socket_path(node.place, name, 1)}")
    for frames in malformed(10_000):
        while not intruder.poll(0, zmq.POLLOUT):
            node.receive()
            node.near.grant()
        intruder.send_multipart(frames)
    assert_works(node, rank)


def test_ten_thousand_malformed_messages_of_ranks_do_not_end_a_relay(node: Node) -> None:
    rank, intruder = Rank(node, b"0.2"), Rank(node, b"0.9")
    for frames in malformed(10_000):
        send_while_receiving(node, intruder.stream, frames)
    assert_works(node, rank)


def test_ten_thousand_malformed_messages_of_the_kernel_do_not_end_a_relay(node: Node) -> None:
    rank = Rank(node, b"0.2")
    relay = node.near._listener.find(node_link.relay_name(1))
    assert relay is not None
    for frames in malformed(10_000):
        until(lambda: node.receive() is None or not relay.stream.holds_something)
        assert node.near._listener.send(node_link.relay_name(1), packed(frames))
    node.send(b"0.2")
    assert rank.take(1) == [b"hello"]
    assert node.far.malformed > 1000
    assert not loaded


def test_ten_thousand_malformed_messages_do_not_end_the_kernels_end(node: Node) -> None:
    rank = Rank(node, b"0.2")
    stranger, relay = (Connecting(node, name).end for name in (b"anybody", node_link.relay_name(7)))
    for frames in malformed(10_000):
        send_while_receiving(node, stranger, frames)
        send_while_receiving(node, relay, frames)
    assert_works(node, rank)


def test_a_board_of_a_node_without_ranks_is_dropped(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    def on_board(number: int, *_: object) -> None:
        [][number]

    node.near._on_board = on_board
    end = Connecting(node, node_link.relay_name(7)).end
    send_while_receiving(node, end, [node_link.BOARD, node_link.pack_count(1)])
    until(lambda: node.receive() is None or "cannot be read" in caplog.text)
    assert_works(node, Rank(node, b"0.2"))


def test_bytes_that_are_no_messages_end_only_the_connection_on_which_they_come(node: Node) -> None:
    rank, dice = Rank(node, b"0.2"), random.Random(4)
    for path in (socket_path(node.place, "requests", 1), node.path):
        for _ in range(1000):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(path)
                stranger.send(dice.randbytes(dice.choice((1, 5, 12, 100, 5000))))
                node.receive()
    assert_works(node, rank)


def assert_works(node: Node, rank: Rank) -> None:
    """A message passes each way, and nothing was unpickled."""
    rank.stream.send([b"reply"])
    until(lambda: node.near.grant() or [b"reply"] in node.receive())
    node.send(b"0.2")
    assert rank.take(1) == [b"hello"]
    assert not loaded


def send_while_receiving(node: Node, end: MessageEnd, frames: Sequence[bytes]) -> None:
    end.stream.post(packed(frames))
    until(lambda: end.stream.flush() or node.receive() is None)


class Connecting:
    """Somebody who connects to the kernel as a relay does."""

    def __init__(self, node: Node, name: bytes):
        made: list[MessageEnd] = []
        thread = threading.Thread(
            target=lambda: made.append(
                MessageEnd(message_stream.connect(node.path, name, asks=True))
            )
        )
        thread.start()
        until(lambda: node.receive() is None or made)
        thread.join()
        (self.end,) = made
        node.ends.append(self.end)


def test_the_sockets_of_a_node_are_in_a_folder_of_its_user_alone(node: Node) -> None:
    assert os.stat(node.place).st_mode & 0o077 == 0
    assert node_folder("/tmp/x", 0) == "/tmp/x"


# --- a relay with nothing to tell -----------------------------------------------------------------


def test_a_relay_that_has_nothing_to_tell_says_so_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_relay, "ALIVE_S", 0.05)
    board = make_board()
    with tempfile.TemporaryDirectory() as folder:
        node = Node(folder, board, (2, 3))
        try:
            assert node.near.silent_s(2) == 0.0  # of a node that has not connected
            for _ in range(3):
                before = time.monotonic()

                def is_heard(since: float = before) -> bool:
                    node.receive()
                    return node.near.silent_s(1) < time.monotonic() - since

                until(is_heard, "a sign of life")
            assert node.received == []
        finally:
            node.close()
    board.close()
