"""The event loop of a rank's main thread, and waiting outside of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from distsession.engine.event_loop import RankLoop
from distsession.engine.listeners import RequestListener, told
from distsession.protocol.messages import Request


@pytest.fixture
def loop() -> Iterator[RankLoop]:
    made = RankLoop()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


async def _nothing() -> None:
    pass


def test_a_new_loop_is_not_used(loop: RankLoop) -> None:
    assert not loop.is_used


@pytest.mark.parametrize(
    "give",
    [
        lambda loop, end: loop.call_soon(print),
        lambda loop, end: loop.call_later(60, print),
        lambda loop, end: loop.call_soon_threadsafe(print),
        lambda loop, end: loop.create_task(_nothing()).add_done_callback(print),
        lambda loop, end: loop.add_reader(end, print),
        lambda loop, end: loop.add_writer(end, print),
    ],
    ids=["soon", "later", "from-a-thread", "task", "reader", "writer"],
)
def test_whatever_it_is_given_is_noted(
    loop: RankLoop, pipe: tuple[int, int], give: Callable[[RankLoop, int], object]
) -> None:
    give(loop, pipe[0])
    assert loop.is_used
    loop.remove_reader(pipe[0])
    loop.remove_writer(pipe[0])
    loop.run_until_complete(_nothing())


def test_a_wait_ends_when_the_descriptor_is_readable(loop: RankLoop, pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"x")
    assert loop.wait_outside(pipe[0])


def test_a_wait_says_that_only_the_descriptor_has_ended_it(
    loop: RankLoop, pipe: tuple[int, int]
) -> None:
    assert not loop.wait_outside(pipe[0], 0)
    loop.wake()
    assert not loop.wait_outside(pipe[0])
    os.write(pipe[1], b"x")
    loop.wake()
    assert not loop.wait_outside(pipe[0])
    assert loop.wait_outside(pipe[0])


def test_a_wait_for_another_descriptor_is_for_that_one_alone(
    loop: RankLoop, pipe: tuple[int, int]
) -> None:
    reader, writer = os.pipe()
    assert not loop.wait_outside(pipe[0], 0)
    os.write(pipe[1], b"x")
    assert not loop.wait_outside(reader, 0)
    os.write(writer, b"x")
    assert loop.wait_outside(reader)
    for end in (reader, writer):
        os.close(end)
    assert loop.wait_outside(pipe[0])


@pytest.mark.parametrize("wake", ["wake", "call_soon_threadsafe"])
def test_a_wait_is_ended_from_another_thread(
    loop: RankLoop, pipe: tuple[int, int], wake: str
) -> None:
    argument = () if wake == "wake" else (print,)
    thread = threading.Timer(0.05, getattr(loop, wake), argument)
    thread.start()
    loop.wait_outside(pipe[0])
    thread.join()


def test_one_that_was_ended_before_it_began_does_not_wait_and_the_next_does(
    loop: RankLoop, pipe: tuple[int, int]
) -> None:
    loop.wake()
    loop.wake()
    loop.wait_outside(pipe[0])
    thread = threading.Timer(0.05, os.write, (pipe[1], b"x"))
    thread.start()
    loop.wait_outside(pipe[0])
    assert os.read(pipe[0], 1) == b"x"
    thread.join()


def test_asyncio_makes_the_same_of_it(loop: RankLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)


def test_only_listeners_with_a_method_of_their_own_are_told() -> None:
    class One(RequestListener):
        def begin_request(self, request: Request) -> None: ...

    class Other(RequestListener):
        def end_request(self, request: Request) -> None: ...

    one, other = One(), Other()
    assert told([one, other], "begin_request") == (one.begin_request,)
    assert told([one, other], "end_request") == (other.end_request,)
    assert told([one, other], "end_code") == ()
