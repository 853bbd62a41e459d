"""Copies between an accelerator and this host's memory, through memory that is pinned.

A copy to or from ordinary memory, which the system may move, is done by the driver through a small
buffer of its own, a piece at a time, while the caller waits. Here it goes through two buffers of
pinned memory: while the device copies to one of them, what the other has is written to where it
belongs, which may be memory that is shared with the kernel. So the bytes pass the processor once.

The buffers are made when they are first needed, and kept. Where there can be none (the accelerator
has no pinned memory, or there is too little), or another thread uses them, copies are torch's own.
Nothing here is for tensors on the CPU, which need no copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from distsession.protocol.tensor_memory import RemoteBytes, bytes_of

__all__ = ["LEAST", "DeviceBytes", "Staging", "copy_to_host", "flat_bytes", "to_device"]

log = logging.getLogger(__name__)

CHUNK = 16 << 20
"""Bytes of each of the two buffers, and of what is copied at a time."""
LEAST = 1 << 20
"""Bytes below which the detour costs more than it gains."""


class Mark(Protocol):
    """A point in the work of a device, such as ``torch.Event``."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


def _pin(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)


def _enqueue(target: torch.Tensor, source: torch.Tensor) -> Mark:
    """Have the device copy, behind what it has to do; gives the point at which it has."""
    with torch.no_grad():
        target.copy_(source, non_blocking=True)
    device = target.device if source.device.type == "cpu" else source.device
    mark: Mark = torch.accelerator.current_stream(device).record_event()
    return mark


def _accelerator() -> str:
    """The type of this process's accelerator; empty if it has none."""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


class Staging:
    """Two buffers of pinned memory, and copies through them.

    All tensors are flat and of dtype uint8. The arguments are for devices that are not torch's.

    Args:
        pin: Makes a buffer of so many bytes.
        enqueue: Has the device copy.
        accelerator: Gives the type of the devices for which that is right.
        chunk: Bytes of a buffer.
    """

    def __init__(
        self,
        pin: Callable[[int], torch.Tensor] = _pin,
        enqueue: Callable[[torch.Tensor, torch.Tensor], Mark] = _enqueue,
        accelerator: Callable[[], str] = _accelerator,
        chunk: int = CHUNK,
    ):
        self._pin, self._enqueue = pin, enqueue
        self._accelerator, self._chunk = accelerator, chunk
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._lock = threading.Lock()
        self._has_failed = False

    def pieces(self, source: torch.Tensor) -> Iterator[torch.Tensor]:
        """What a tensor of a device has, in order; each piece is there until the next is asked for.

        Args:
            source: Of at least one byte.
        """
        with self._held(source.device) as buffers:
            if not buffers:
                yield source.cpu()
                return
            parts = self._parts(source, buffers)
            ahead = self._enqueue(*parts[0])
            for number, (piece, _) in enumerate(parts):
                mark = ahead
                if number + 1 < len(parts):  # to the buffer whose piece the caller is done with
                    ahead = self._enqueue(*parts[number + 1])
                mark.synchronize()
                yield piece

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to a tensor of a device; it is there when this returns.

        Args:
            target: On the device.
            source: On the CPU, of the same length.
        """
        with torch.no_grad(), self._held(target.device) as buffers:
            if not buffers:
                target.copy_(source)
                return
            marks: dict[int, Mark] = {}
            at = 0
            for number, (piece, part) in enumerate(self._parts(target, buffers)):
                if earlier := marks.get(number % len(buffers)):
                    earlier.synchronize()  # the device has read what the buffer had
                piece.copy_(source[at : at + len(piece)])
                marks[number % len(buffers)] = self._enqueue(part, piece)
                at += len(piece)
            for mark in marks.values():
                mark.synchronize()

    def _parts(
        self, tensor: torch.Tensor, buffers: tuple[torch.Tensor, ...]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pieces of a tensor, each with its place in one of the buffers, in turn."""
        parts = tensor.split(self._chunk)
        return [
            (buffers[number % len(buffers)][: len(part)], part) for number, part in enumerate(parts)
        ]

    @contextlib.contextmanager
    def _held(self, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
        """The buffers, for this thread alone; none where there are none for that device."""
        if device.type != self._accelerator() or not self._lock.acquire(blocking=False):
            yield ()
            return
        try:
            yield self._made(device)
        except BaseException:
            # The device may be copying still. torch uses the memory again once it is not.
            self._buffers = ()
            raise
        finally:
            self._lock.release()

    def _made(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        if not self._buffers and not self._has_failed:
            try:
                with torch.inference_mode(False):  # else they could be written to in that mode only
                    buffers = self._pin(self._chunk), self._pin(self._chunk)
                probe = torch.zeros(1, dtype=torch.uint8, device=device)
                self._enqueue(buffers[0][:1], probe).synchronize()
                self._buffers = buffers
            except (RuntimeError, AttributeError, TypeError) as error:
                self._has_failed = True
                log.info("there is no pinned memory, copies are torch's own: %s", error)
        return self._buffers


_staging = Staging()


class DeviceBytes(RemoteBytes):
    """A frame of a payload that lies on an accelerator until it is written somewhere.

    Args:
        tensor: Flat, of dtype uint8.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()

    def pieces(self) -> Iterator[memoryview]:
        for piece in _staging.pieces(self.tensor):
            yield bytes_of(piece)

    def read(self) -> memoryview:
        whole = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        _copy(whole, self.tensor)
        return bytes_of(whole)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat one of dtype uint8 over the same memory.

    Raises:
        ValueError: It has no memory, as a parameter whose storage has been given back.
    """
    first = int(tensor.storage_offset()) * tensor.element_size()
    count = tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.nbytes() < first + count:
        raise ValueError("the tensor has no memory")
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, first, (count,), (1,))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    at = 0
    for piece in _staging.pieces(source):
        target[at : at + len(piece)].copy_(piece)
        at += len(piece)


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of any device to one on the CPU, of the same shape.

    Args:
        target: On the CPU, such as memory that processes share.
        source: Of any strides.
    """
    is_plain = (
        source.device.type not in ("cpu", "meta")
        and source.dtype == target.dtype
        and source.numel() * source.element_size() >= LEAST
        and target.is_contiguous()
        and not (source.is_conj() or source.is_neg())
    )
    with torch.no_grad():
        if is_plain:
            _copy(flat_bytes(target), flat_bytes(source.detach().contiguous()))
        else:
            target.copy_(source)


def to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of bytes on a device; on the CPU the tensor itself.

    Args:
        source: Flat, of dtype uint8, on the CPU.
        device: Where to.
    """
    if device.type == "cpu" or source.numel() < LEAST:
        return source.to(device)
    target = torch.empty(source.numel(), dtype=torch.uint8, device=device)
    _staging.fill(target, source)
    return target
