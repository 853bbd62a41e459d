"""The memory of a tensor, for whoever reads its bytes. For this, torch itself is not needed."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

__all__ = ["BorrowError", "RemoteBytes", "bytes_of", "in_memory", "size_of"]


class RemoteBytes(ABC):
    """A frame of a payload in memory that the processor does not address, as that of a GPU."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes there are."""

    @abstractmethod
    def pieces(self) -> Iterator[memoryview]:
        """All of them in order; each piece is there until the next is asked for."""

    @abstractmethod
    def read(self) -> memoryview:
        """All of them, in new memory."""


class BorrowError(RuntimeError):
    """What another process has lent cannot be copied here."""


def size_of(frame: Any) -> int:
    """Bytes of a frame of a payload."""
    if type(frame) is bytes:  # as most are
        return len(frame)
    return frame.nbytes if isinstance(frame, RemoteBytes) else memoryview(frame).nbytes


def in_memory(frame: Any) -> Any:
    """A frame as something whose bytes can be read."""
    return frame.read() if isinstance(frame, RemoteBytes) else frame


def bytes_of(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor; a copy of it where it is an accelerator's.

    Without numpy, which torch's own way to it needs.

    Raises:
        ValueError: It has no memory, as a parameter whose storage has been given back.
    """
    tensor = tensor.detach().cpu()
    count = tensor.numel() * tensor.element_size()
    address = tensor.data_ptr()
    if count and not address:
        raise ValueError("the tensor has no memory")
    memory = (ctypes.c_ubyte * count).from_address(address or 1)
    memory.owner = tensor  # lives as long as the view
    return memoryview(memory).cast("B")
