"""A rank keeps what it has mapped for the next payload, and no value ever changes by itself."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distsession.engine import mappings as module
from distsession.engine.mappings import FOLLOWED, Mappings
from distsession.protocol import shared_memory
from distsession.protocol.shared_memory import Handed, Pool, Segment
from tests.memory_pages import needs_pagemap

pytestmark = needs_pagemap

SIZE = 1 << 20


class Sender:
    """Writes payloads to memory that is free, as a kernel does."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.made: list[Segment] = []

    def send(self, data: bytes | bytearray, receiver: Mappings) -> list[memoryview]:
        segment = self.write(data)
        frames = receiver.map(Handed(segment.descriptor, segment.lend()), segment.sizes)
        self.pool.keep(segment)
        return frames

    def write(self, data: bytes | bytearray) -> Segment:
        segment = self.pool.take([len(data)])
        segment.write([data])
        if segment not in self.made:
            self.made.append(segment)
        return segment


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr(shared_memory, "KEEP", 60.0)
    sender = Sender()
    yield sender
    sender.pool.close()


@pytest.fixture
def mappings() -> Mappings:
    gc.collect()  # of a test before this one
    return Mappings()


def filled(number: int, size: int = SIZE) -> bytes:
    return bytes([number % 251]) * size


def mapped() -> int:
    """Views of payloads in this process that nobody else sees."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:distsession (" in line and " rw-p " in line for line in lines)


def test_memory_that_was_mapped_is_used_for_the_next_payload(
    sender: Sender, mappings: Mappings
) -> None:
    for number in range(5):
        (frame,) = sender.send(filled(number), mappings)
        assert frame == filled(number)
        assert mapped() == 1
        del frame
        mappings.tidy()
    assert len(sender.made) == 1


def test_a_payload_of_another_size_finds_room_in_it(sender: Sender, mappings: Mappings) -> None:
    (frame,) = sender.send(filled(1, 2 * SIZE), mappings)
    del frame
    mappings.tidy()
    (frame,) = sender.send(filled(2, 2 * SIZE - 5000), mappings)
    assert frame == filled(2, 2 * SIZE - 5000)
    assert len(sender.made) == 1


HOLDERS: dict[str, Callable[[memoryview], Any]] = {
    "a part of the memory": lambda frame: frame[5:10],
    "a tensor": lambda frame: torch.frombuffer(frame, dtype=torch.uint8),
    "a part of a tensor": lambda frame: torch.frombuffer(frame, dtype=torch.uint8)[3:],
    "a tensor's storage": lambda f: torch.frombuffer(f, dtype=torch.uint8).untyped_storage(),
    "an array": lambda frame: np.frombuffer(frame, dtype=np.uint8),
    "a part of an array": lambda frame: np.frombuffer(frame, dtype=np.uint8)[::7],
    "a tensor of an array": lambda f: torch.from_numpy(np.frombuffer(f, dtype=np.uint8)),
}


@pytest.mark.parametrize("holds", HOLDERS.values(), ids=HOLDERS)
def test_nothing_is_written_to_what_a_value_lies_in(
    holds: Callable[[memoryview], Any], sender: Sender, mappings: Mappings
) -> None:
    (frame,) = sender.send(filled(7), mappings)
    value = holds(frame)
    del frame
    mappings.tidy()
    (other,) = sender.send(filled(8), mappings)
    assert len(sender.made) == 2
    assert {int(byte) for byte in value[:4]} == {7}
    del value, other
    mappings.tidy()
    (frame,) = sender.send(filled(9), mappings)
    assert frame == filled(9)
    assert len(sender.made) == 2


def test_a_value_in_a_cycle_holds_its_memory_until_the_cycle_is_collected(
    sender: Sender, mappings: Mappings
) -> None:
    seen = []

    class Holder:
        def __init__(self, frame: memoryview):
            self.frame, self.self = frame, self

        def __del__(self) -> None:
            mappings.tidy()
            (other,) = sender.send(filled(4), mappings)
            seen.append(bytes(self.frame[:5]))
            del other

    Holder(sender.send(filled(3), mappings)[0])
    mappings.tidy()
    gc.collect()
    assert seen == [bytes([3]) * 5]
    mappings.tidy()
    sender.send(filled(5), mappings)
    assert len(sender.made) == 2


def test_what_a_rank_has_changed_is_not_seen_in_the_next_payload(
    sender: Sender, mappings: Mappings
) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for number, changed in enumerate(([0], [3, 4, 5], [255], range(0, 256, 2), range(256), [])):
        (frame,) = sender.send(filled(number), mappings)
        for at in changed:
            frame[at * page + 11] = 99
        assert frame[0] == number
        del frame
        mappings.tidy()
    (frame,) = sender.send(filled(50), mappings)
    assert frame == filled(50)
    assert len(sender.made) == 1


def test_a_child_that_was_forked_while_a_value_was_there_keeps_it(
    sender: Sender, mappings: Mappings
) -> None:
    (frame,) = sender.send(filled(1), mappings)
    asked, told, answers, answer = *os.pipe(), *os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        os.read(asked, 1)
        mappings.tidy()
        os.write(answer, bytes({*frame}))
        os._exit(0)
    os.close(asked)
    del frame
    mappings.tidy()
    assert mapped() == 0  # it is of no use here
    for number in (2, 3):
        (frame,) = sender.send(filled(number), mappings)
        assert frame == filled(number)
        del frame
        mappings.tidy()
    assert len(sender.made) == 2
    os.close(told)
    assert os.read(answers, 300) == bytes([1])
    os.waitpid(child, 0)
    for descriptor in (answers, answer):
        os.close(descriptor)
    assert all(segment.is_free for segment in sender.made)  # since the child is gone


def test_a_child_gives_nothing_back_that_is_its_parents(sender: Sender, mappings: Mappings) -> None:
    (frame,) = sender.send(filled(1), mappings)
    child = os.fork()
    if not child:
        del frame
        mappings.tidy()
        os._exit(0)
    os.waitpid(child, 0)
    assert not sender.made[0].is_free
    assert frame == filled(1)


def test_a_child_does_not_get_what_is_kept_for_later(sender: Sender, mappings: Mappings) -> None:
    sender.send(filled(1), mappings)
    mappings.tidy()
    assert mapped() == 1
    child = os.fork()
    if not child:
        os._exit(mapped())
    assert os.waitpid(child, 0)[1] == 0
    (frame,) = sender.send(filled(2), mappings)
    assert len(sender.made) == 1
    child = os.fork()
    if not child:
        os._exit(frame == filled(2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_fork_counts_before_and_after_it_for_what_other_threads_map_meanwhile() -> None:
    before = module._forks
    os.waitpid(os.fork() or os._exit(0), 0)
    assert module._forks == before + 2  # one before it, and one after


def test_what_is_kept_is_let_go_after_a_moment(
    sender: Sender, mappings: Mappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP", 0.05)
    sender.send(filled(1), mappings)
    mappings.tidy()
    assert mapped() == 1
    time.sleep(0.1)
    mappings.tidy()
    assert mapped() == 0
    assert sender.made[0].is_free
    (frame,) = sender.send(filled(2), mappings)
    assert frame == filled(2)


def test_what_the_sender_has_given_up_is_let_go_at_once(sender: Sender, mappings: Mappings) -> None:
    sender.send(filled(1), mappings)
    (frame,) = sender.send(filled(2), mappings)
    mappings.tidy()
    assert mapped() == 2
    sender.pool.close()
    mappings.tidy()
    assert mapped() == 1
    assert frame == filled(2)
    del frame
    assert mapped() == 0


def test_with_more_values_than_are_followed_each_is_still_as_it_was(
    sender: Sender, mappings: Mappings
) -> None:
    values = [sender.send(filled(number), mappings) for number in range(FOLLOWED + 5)]
    mappings.tidy()
    for number, (frame,) in enumerate(values):
        assert frame == filled(number)
    values.clear()
    mappings.tidy()
    for number in range(5):
        (frame,) = sender.send(filled(number), mappings)
        assert frame == filled(number)
        del frame
        mappings.tidy()


def test_what_is_too_small_or_too_large_is_mapped_for_one_time(
    sender: Sender, mappings: Mappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "RETURNED", (100_000, 200_000))
    for size in (99_000, 201_000):
        (frame,) = sender.send(filled(1, size), mappings)
        assert frame == filled(1, size)
        del frame
        assert mapped() == 0


def test_where_the_system_does_not_say_what_was_changed_nothing_is_kept(
    sender: Sender, mappings: Mappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "changed_pages", refuse)
    sender.send(filled(1), mappings)
    mappings.tidy()
    assert mapped() == 0
    assert sender.made[0].is_free  # by a lease


def test_all_receivers_have_to_return_it(sender: Sender) -> None:
    ranks = [Mappings() for _ in range(32)]
    segment = sender.write(filled(1))
    frames = [rank.map(Handed(segment.descriptor, segment.lend()), segment.sizes) for rank in ranks]
    for rank in ranks:
        assert not segment.is_free
        frames.pop(0)
        rank.tidy()
    assert segment.is_free
    segment.close()


def test_a_receiver_that_never_takes_it_is_not_waited_for_with_its_memory(
    sender: Sender, mappings: Mappings
) -> None:
    segment = sender.write(filled(1))
    mappings.map(Handed(segment.descriptor, segment.lend()), segment.sizes)
    segment.lend()
    mappings.tidy()
    assert not segment.is_free  # somebody may come to it
    segment.close()


def test_an_old_rank_keeps_every_value_as_it_was_sent(
    sender: Sender, mappings: Mappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3 * 4096
    monkeypatch.setattr(shared_memory, "RETURNED", (size // 2, 2 * size))
    seed = random.Random(5)
    held: list[tuple[int, memoryview]] = []
    for number in range(10_000):
        (frame,) = sender.send(filled(number, size), mappings)
        if seed.random() < 0.3:
            at = seed.randrange(size)
            frame[at] = frame[at]  # a page of its own
        held.append((number, frame))
        del frame
        while len(held) > seed.randrange(6):
            sent, frame = held.pop(seed.randrange(len(held)))
            assert frame == filled(sent, size)
            del frame
        if seed.random() < 0.8:
            mappings.tidy()
    assert len(sender.made) < 5_000
    held.clear()
    sender.pool.close()
    mappings.tidy()
    assert mapped() == 0


def test_two_threads_that_tidy_return_each_memory_once(sender: Sender, mappings: Mappings) -> None:
    is_over = threading.Event()

    def tidy() -> None:
        while not is_over.wait(0.0005):
            mappings.tidy()

    threads = [threading.Thread(target=tidy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(500):
            (frame,) = sender.send(filled(number), mappings)
            frame[number] = frame[0]
            assert frame == filled(number)
            del frame
    finally:
        is_over.set()
        for thread in threads:
            thread.join(10)
