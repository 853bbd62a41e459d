"""Copies through pinned memory. The device is played: its memory is the CPU's, and it copies late.

What would be wrong with a GPU is wrong here, too: a buffer that is read before the device has
written to it, or written to before the device has read it.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distsession.engine import pinned, tensors
from distsession.engine.pinned import DeviceBytes, Staging, copy_to_host, flat_bytes, to_device
from distsession.protocol import serialize, shared_memory
from distsession.protocol.tensor_memory import in_memory

CHUNK = 1000


class Device:
    """Copies in the order in which it is told to, in a thread of its own, and not at once."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self._delays = random.Random(0)
        self.pinned: list[torch.Tensor] = []
        self.copies = 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            time.sleep(self._delays.random() / 500)
            target, source, done = task
            target.copy_(source)
            done.set()

    def pin(self, count: int) -> torch.Tensor:
        self.pinned.append(torch.zeros(count, dtype=torch.uint8))
        return self.pinned[-1]

    def enqueue(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        if self.error is not None:
            raise self.error
        done = threading.Event()
        self._queue.put((target, source, done))
        self.copies += 1
        return Mark(done)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class Mark:
    def __init__(self, done: threading.Event):
        self._done = done

    def synchronize(self) -> None:
        assert self._done.wait(60)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


@pytest.fixture
def staging(device: Device) -> Staging:
    return Staging(device.pin, device.enqueue, lambda: "cpu", CHUNK)


def some_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK, 7 * CHUNK + 13]


@pytest.mark.parametrize("count", LENGTHS)
def test_what_a_device_has_comes_in_order(staging: Staging, count: int) -> None:
    source = some_bytes(count)
    # A copy of each, since it is there until the next is asked for only.
    assert torch.equal(torch.cat([piece.clone() for piece in staging.pieces(source)]), source)


@pytest.mark.parametrize("count", LENGTHS)
def test_what_is_copied_to_a_device_is_there_at_the_end(staging: Staging, count: int) -> None:
    source, target = some_bytes(count), torch.zeros(count, dtype=torch.uint8)
    staging.fill(target, source)
    assert torch.equal(target, source)


def test_the_device_copies_one_piece_while_the_one_before_is_used(
    staging: Staging, device: Device
) -> None:
    pieces = staging.pieces(some_bytes(5 * CHUNK))
    for ahead in (2, 3, 4, 5, 5):
        next(pieces)
        assert device.copies == 1 + ahead  # the first copy tried whether it can
    assert list(pieces) == []


def test_there_are_two_buffers_made_once_and_when_they_are_needed(
    staging: Staging, device: Device
) -> None:
    assert device.pinned == []
    for _ in range(3):
        list(staging.pieces(some_bytes(9 * CHUNK)))
        staging.fill(torch.zeros(9 * CHUNK, dtype=torch.uint8), some_bytes(9 * CHUNK))
    assert [len(buffer) for buffer in device.pinned] == [CHUNK, CHUNK]


def test_buffers_that_the_device_may_still_write_to_are_not_used_again(
    staging: Staging, device: Device
) -> None:
    pieces = staging.pieces(some_bytes(5 * CHUNK))
    next(pieces)
    pieces.close()  # as an exception of who uses them does
    again = some_bytes(3 * CHUNK)
    assert torch.equal(torch.cat([piece.clone() for piece in staging.pieces(again)]), again)
    assert len(device.pinned) == 4


def test_a_second_thread_does_not_wait_for_the_buffers(staging: Staging, device: Device) -> None:
    first, second = some_bytes(3 * CHUNK), some_bytes(3 * CHUNK)
    pieces = staging.pieces(first)
    found = [next(pieces).clone()]
    before = device.copies
    [plain] = staging.pieces(second)
    assert torch.equal(plain, second)
    assert device.copies == before
    found += [piece.clone() for piece in pieces]
    assert torch.equal(torch.cat(found), first)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), NotImplementedError("no hooks")])
def test_without_pinned_memory_copies_are_torchs_own(device: Device, error: Exception) -> None:
    tries = []

    def pin(count: int) -> torch.Tensor:
        tries.append(count)
        raise error

    staging = Staging(pin, device.enqueue, lambda: "cpu", CHUNK)
    source, target = some_bytes(3 * CHUNK), torch.zeros(3 * CHUNK, dtype=torch.uint8)
    for _ in range(2):
        [piece] = staging.pieces(source)
        assert torch.equal(piece, source)
        staging.fill(target, source)
    assert torch.equal(target, source)
    assert (len(tries), device.copies) == (1, 0)


def test_an_accelerator_without_streams_gets_torchs_own_copies(
    staging: Staging, device: Device
) -> None:
    device.error = AttributeError("no streams")
    source = some_bytes(3 * CHUNK)
    [piece] = staging.pieces(source)
    assert torch.equal(piece, source)


def test_a_device_that_is_not_the_accelerator_gets_torchs_own_copies(device: Device) -> None:
    staging = Staging(device.pin, device.enqueue, lambda: "cuda", CHUNK)
    source = some_bytes(3 * CHUNK)
    assert torch.equal(torch.cat(list(staging.pieces(source))), source)
    assert device.pinned == []


# --- payloads -------------------------------------------------------------------------------------


@pytest.fixture
def on_device(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of all tensors are as those of a device's."""
    monkeypatch.setattr(pinned, "_staging", staging)
    monkeypatch.setattr(tensors, "_frame", DeviceBytes)
    monkeypatch.setattr(serialize, "_make_reducer", tensors.Tensors)


VALUE = {
    "many": torch.arange(30_000.0),
    "rows": torch.arange(20_000).reshape(100, 200)[3:50],
    "column": torch.randn(5000, 3)[:, 1],
    "none": torch.empty(0),
    "text": "x" * 10,
}


def same(arrived: dict[str, Any]) -> bool:
    assert list(arrived) == list(VALUE)
    return all(
        torch.equal(arrived[name], value) if isinstance(value, torch.Tensor) else True
        for name, value in VALUE.items()
    )


def test_what_a_device_has_is_written_to_shared_memory(on_device: None, device: Device) -> None:
    frames = serialize.dump_value(VALUE, what="it", may_be_remote=True)
    assert any(isinstance(frame, DeviceBytes) for frame in frames)
    assert device.copies == 0
    told = []
    segment = shared_memory.offer(frames, lambda done, total: told.append((done, total)))
    assert segment is not None
    with segment:
        arrived = serialize.load(shared_memory.map_private(segment.descriptor, segment.sizes))
    assert same(arrived)
    total = shared_memory.nbytes(frames)
    assert told[-1] == (total, total)
    assert device.copies > total // CHUNK


def test_a_segment_that_is_there_is_written_to_as_well(on_device: None) -> None:
    frames = serialize.dump_value(VALUE, what="it", may_be_remote=True)
    with shared_memory.Segment([shared_memory.size_of(frame) for frame in frames]) as segment:
        for _ in range(2):  # the second time it is mapped
            segment.write(frames)
        assert same(serialize.load(shared_memory.map_private(segment.descriptor, segment.sizes)))


def test_where_frames_are_needed_in_memory_they_are_read(on_device: None) -> None:
    frames = serialize.dump_value(VALUE, what="it")
    assert not any(isinstance(frame, DeviceBytes) for frame in frames)
    assert same(serialize.load([bytearray(frame) for frame in frames]))
    frames = serialize.dump_value(VALUE, what="it", may_be_remote=True)
    assert same(serialize.load([bytearray(in_memory(frame)) for frame in frames]))


def test_tensors_of_the_cpu_are_sent_from_where_they_lie(
    staging: Staging, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_staging", staging)
    monkeypatch.setattr(serialize, "_make_reducer", tensors.Tensors)
    large = torch.zeros(1 << 20)
    frames = serialize.dump_value(large, what="it", may_be_remote=True)
    assert not any(isinstance(frame, DeviceBytes) for frame in frames)
    large[7] = 1.0
    assert serialize.load([bytearray(frame) for frame in frames])[7] == 1.0
    target = torch.zeros(1 << 20)
    copy_to_host(target, large)
    assert torch.equal(target, large)
    flat = flat_bytes(large)
    assert to_device(flat, torch.device("cpu")) is flat
    assert device.pinned == []


def test_the_bytes_of_a_part_of_a_tensor_are_its_own() -> None:
    whole = torch.arange(100, dtype=torch.int16)
    assert torch.equal(flat_bytes(whole[10:30]).view(torch.int16), whole[10:30])
    flat_bytes(whole[:1]).zero_()
    assert whole[0] == 0


def test_a_tensor_without_memory_is_refused() -> None:
    gone = torch.zeros(100)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        flat_bytes(gone)
