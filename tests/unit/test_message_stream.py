"""Messages over a socket: whole, in order, and nobody waits."""

from __future__ import annotations

import os
import random
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distsession.protocol import message_stream, secure_stream
from distsession.protocol.message_listener import MessageListener
from distsession.protocol.message_stream import MessageStream, hand_over, lend, packed
from distsession.protocol.secure_stream import RECORD_MAX_BYTES, SecureStream
from tests.message_ends import ListeningEnd, MessageEnd
from tests.until import until

SECRET = bytes(range(32))
Ends = tuple[MessageStream, MessageStream]


def sealed_streams() -> tuple[SecureStream, SecureStream]:
    """Both ends of an encrypted stream over TCP."""
    found: list[SecureStream] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            found.append(secure_stream.accept(listener.accept()[0], SECRET)[0])

        thread = threading.Thread(target=accept)
        thread.start()
        here = secure_stream.connect(socket.create_connection(listener.getsockname()), SECRET, {})
        thread.join()
    return here, found[0]


def plain_ends() -> Ends:
    here, there = socket.socketpair()
    return MessageStream(here), MessageStream(there)


def sealed_ends() -> Ends:
    here, there = sealed_streams()
    return MessageStream(here._socket, here), MessageStream(there._socket, there)


@pytest.fixture(params=[plain_ends, sealed_ends])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    make: Callable[[], Ends] = request.param
    here, there = make()
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "socket")


def messages(count: int) -> list[list[bytes]]:
    """Of all sizes, some with many frames, some with empty ones."""
    dice = random.Random(11)
    sizes = (0, 1, 8, 300, 20_000, message_stream.SMALL_BYTES, 700_000)
    return [
        [dice.randbytes(dice.choice(sizes)) for _ in range(dice.choice((1, 1, 1, 2, 5)))]
        for _ in range(count)
    ]


def test_messages_of_all_sizes_arrive_whole_and_in_their_order(ends: Ends) -> None:
    here, there = ends
    sent, received = messages(300), list[list[bytes]]()
    for message in sent:
        here.post(packed(message))
        until(lambda: here.flush() or received.extend(there.receive()))
    until(lambda: received.extend(there.receive()) or len(received) == len(sent))
    assert received == sent


def test_an_empty_frame_behind_a_full_record_is_no_record_of_its_own(ends: Ends) -> None:
    here, there = ends
    head = 4 + 2 * 8
    message = [b"x" * (RECORD_MAX_BYTES - head), b""]
    received: list[list[bytes]] = []
    for each in (message, [b"next"]):
        here.post(packed(each))
        until(lambda: received.extend(there.receive()) or here.flush())
    until(lambda: received.extend(there.receive()) or len(received) == 2 or there.is_over)
    assert received == [message, [b"next"]]


def test_who_sends_does_not_wait_and_goes_on_later(ends: Ends) -> None:
    here, there = ends
    message = [b"x" * 50_000_000]
    here.post(packed(message))
    assert not here.flush()
    assert here.holds_something
    received: list[list[bytes]] = []
    until(lambda: received.extend(there.receive()) or here.flush())
    assert not here.holds_something
    until(lambda: received.extend(there.receive()) or received)
    assert received == [message]


def test_what_was_sent_before_the_end_is_received(ends: Ends) -> None:
    here, there = ends
    here.post(packed([b"last"]))
    assert here.flush()
    here.close()
    received: list[list[bytes]] = []
    until(lambda: received.extend(there.receive()) or there.is_over)
    assert received == [[b"last"]]
    there.post(packed([b"late"]))
    with pytest.raises(ConnectionError):
        until(lambda: there.flush() and there.post(packed([b"late"])))


def test_the_end_of_the_other_end_is_no_signal() -> None:
    here, there = plain_ends()
    there.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as code of a user may
    try:
        with pytest.raises(ConnectionError):
            here.send(packed([b"late"]))
    finally:
        signal.signal(signal.SIGPIPE, before)
        here.close()


@pytest.mark.parametrize("count", [0, message_stream.FRAMES_MAX + 1])
def test_what_is_no_message_ends_the_stream(count: int) -> None:
    here, there = socket.socketpair()
    end = MessageStream(there)
    with here:
        here.sendall(count.to_bytes(4, "little") + bytes(8))
        assert end.receive() == []
        assert end.is_over
    end.close()


def test_ten_thousand_messages_that_nobody_waits_for_leave_nothing_behind(ends: Ends) -> None:
    here, there = ends
    for number in range(10_000):
        here.post(packed([b"%d" % number]))
        assert here.flush()
        assert there.wait(20)
        assert there.receive() == [[b"%d" % number]]
    assert not there._in
    assert not here.holds_something


# --- streams that change hands --------------------------------------------------------------------


def test_a_stream_goes_on_in_another_process_where_it_was() -> None:
    here, there = sealed_streams()
    here.send(b"before")
    assert bytes(there.receive()) == b"before"
    there.send(b"answer")
    assert bytes(here.receive()) == b"answer"
    here.send(b"on its way")
    there._reader.has(1)
    there._reader.read_more()  # read by the process that hands it over, and looked at by nobody
    taken = SecureStream.resumed(there._socket, there.suspended())
    here.send(b"later")
    assert [bytes(taken.receive()) for _ in range(2)] == [b"on its way", b"later"]
    taken.send(b"from there")
    assert bytes(here.receive()) == b"from there"
    here.close()
    there.close()


def test_keys_go_on_changing_after_a_stream_was_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_stream, "REKEY_RECORDS", 8)
    here, there = sealed_streams()
    for number in range(100):
        if number % 7 == 0:
            there = SecureStream.resumed(there._socket, there.suspended())
        here.send(b"%d" % number)
        assert bytes(there.receive()) == b"%d" % number
    here.close()
    there.close()


@pytest.mark.parametrize("state", [b"", b"x" * 79])
def test_what_is_no_state_of_a_stream_is_refused(state: bytes) -> None:
    mine, its = socket.socketpair()
    with mine, its, pytest.raises(ValueError, match="80 bytes"):
        SecureStream.resumed(mine, state)


def test_a_relay_gets_the_stream_of_who_leads_to_the_kernel(path: str) -> None:
    here, there = sealed_streams()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        leader = threading.Thread(target=lambda: lend(here, listener.accept()[0]))
        leader.start()
        relay = MessageEnd(message_stream.connect(path, b"node 1", asks=True))
        kernel = MessageEnd(MessageStream(there._socket, there))
        assert kernel.receive() == [b"node 1"]
        kernel.send([b"welcome"])
        assert relay.receive() == [b"welcome"]
        relay.send([b"the last word"])
        relay.close()
        leader.join(20)
        assert not leader.is_alive()
        assert kernel.receive() == [b"the last word"]
        until(lambda: kernel.poll(0) or kernel.stream.is_over)
        kernel.close()


def test_who_does_not_ask_gets_no_stream(path: str) -> None:
    here, there = sealed_streams()
    mine, its = socket.socketpair()
    mine.sendall(b"?")
    lend(here, its)
    assert mine.recv(1) == b""
    with pytest.raises(ConnectionError):
        there.receive()
    mine.close()
    there.close()


def test_a_stream_that_breaks_is_handed_over_no_longer() -> None:
    here, there = sealed_streams()
    mine, its = socket.socketpair()
    thread = threading.Thread(target=hand_over, args=(here, its))
    thread.start()
    end = message_stream._take_over(mine)
    here.abort()
    thread.join(20)
    assert not thread.is_alive()
    until(lambda: end.receive() == [] and end.is_over)
    end.close()
    there.close()


# --- a listener -----------------------------------------------------------------------------------


def test_who_connects_is_known_by_name_and_others_are_not_held_up(path: str) -> None:
    kernel = ListeningEnd(path)
    slow, quick = MessageEnd(path, b"slow"), MessageEnd(path, b"quick")
    until(lambda: kernel.poll(0) or kernel.listener.find(b"slow"))
    big = [b"x" * 20_000_000]
    assert kernel.send(b"slow", big)
    assert kernel.send(b"quick", [b"small"])
    assert quick.receive() == [b"small"]
    assert not kernel.send(b"nobody", [b"small"])
    taken: list[list[bytes]] = []
    reader = threading.Thread(target=lambda: taken.append(slow.receive()))
    reader.start()
    until(lambda: kernel.poll(0) or taken)
    reader.join()
    assert taken == [big]
    for end in (slow, quick, kernel):
        end.close()
    assert not Path(path).exists()


def test_one_that_is_gone_is_forgotten_and_its_name_can_be_given_again(path: str) -> None:
    kernel = ListeningEnd(path)
    for number in range(100):
        end = MessageEnd(path, b"0.1")
        end.send([b"%d" % number])
        assert kernel.receive() == [b"%d" % number]
        end.close()
    until(lambda: kernel.poll(0) or kernel.listener.find(b"0.1") is None)
    assert not kernel.listener._peers
    assert not kernel.send(b"0.1", [b"late"])
    kernel.close()


def test_what_is_kept_for_a_name_comes_first_when_it_connects_and_can_be_forgotten(
    path: str,
) -> None:
    kernel = ListeningEnd(path)
    texts = [b"%d" % number + b"x" * 300_000 for number in range(20)]
    for name in (b"0.1", b"0.2"):
        for text in texts:
            assert not kernel.listener.send(name, packed([text]), keep=True)
    kernel.listener.forget(b"0.2")
    ends = [MessageEnd(path, b"0.1"), MessageEnd(path, b"0.2")]
    for name in (b"0.1", b"0.2"):
        until(lambda name=name: kernel.poll(0) or kernel.listener.find(name))
        assert kernel.send(name, [b"last"])
    received: list[list[bytes]] = []
    while len(received) < 21:
        kernel.poll(0)
        if ends[0].poll(10):
            received.append(ends[0].receive())
    assert received == [[text] for text in (*texts, b"last")]
    assert ends[1].receive() == [b"last"]
    for end in (*ends, kernel):
        end.close()


def test_a_socket_that_a_killed_process_has_left_is_no_obstacle(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    kernel = ListeningEnd(path)
    end = MessageEnd(path, b"0.1")
    end.send([b"hello"])
    assert kernel.receive() == [b"hello"]
    end.close()
    kernel.close()


def test_what_was_sent_may_take_a_while_to_leave_at_the_end(path: str) -> None:
    kernel = ListeningEnd(path)
    end = MessageEnd(path, b"0.1")
    until(lambda: kernel.poll(0) or kernel.listener.find(b"0.1"))
    assert kernel.send(b"0.1", [b"x" * 5_000_000])
    closer = threading.Thread(target=lambda: kernel.listener.close(20_000))
    closer.start()
    assert len(end.receive()[0]) == 5_000_000
    closer.join()
    end.close()


def test_a_listener_that_is_asked_refuses_who_says_something_else(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = MessageListener(path, is_asked=True)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        stranger.sendall(b"GET / HTTP/1.1")
        until(lambda: [*listener.receive()] or "is refused" in caplog.text)
        assert stranger.recv(1) == b""
    listener.close()
