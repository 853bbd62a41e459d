"""Whole messages through a zmq socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from distsession.protocol.sockets import receive, send

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.setsockopt(zmq.SNDHWM, 1)
    other.setsockopt(zmq.RCVHWM, 1)
    other.bind("inproc://pair")
    one.connect("inproc://pair")
    yield one, other
    context.destroy(0)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("frames", [[b"a"], [b"a", b""], [b"", bytes(1 << 20), b"c"]])
def test_the_frames_of_a_message_arrive_together(
    pair: Pair, frames: list[bytes], copy: bool
) -> None:
    send(pair[0], frames, copy=copy)
    send(pair[0], [b"next"])
    assert receive(pair[1]) == frames
    assert receive(pair[1]) == [b"next"]


def test_nothing_is_waited_for(pair: Pair) -> None:
    with pytest.raises(zmq.Again):
        receive(pair[1])
    for _ in range(2):  # as many as there is room for, on both sides
        send(pair[0], [b"a", b"b"], wait=False)
    with pytest.raises(zmq.Again):
        send(pair[0], [b"c", b"d"], wait=False)
    assert receive(pair[1]) == [b"a", b"b"]


def test_nothing_is_left_of_what_nobody_can_get(pair: Pair) -> None:
    context = pair[0].context
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind("inproc://router")
    dealer.setsockopt(zmq.IDENTITY, b"here")
    dealer.connect("inproc://router")
    with pytest.raises(zmq.ZMQError):
        send(router, [b"nobody", b"lost"])
    send(router, [b"here", b"sent"])
    assert dealer.poll(1000)
    assert receive(dealer) == [b"sent"]
