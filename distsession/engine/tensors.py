"""How tensors travel: their memory beside the pickle, each byte once.

torch pickles a tensor with its whole storage, through a copy. Here a tensor becomes a reference
into a buffer that is sent as it lies in memory (pickle protocol 5, PEP 574). Which bytes of a
storage are needed is only known when the whole object has been looked at. So while it is pickled
every tensor gets a number; where it lies goes into a table that is filled in at the end:

* Tensors of one message whose memory overlaps share it on the other side, too.
* Of a storage only what tensors of the message span is sent.
* Strides are kept. Only a tensor with gaps (such as a column of a matrix) whose memory no other
  tensor of the message shares is sent without them, and arrives contiguous.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pickle import PickleBuffer
from typing import Any

import torch

from distsession.engine import device_ipc, pinned
from distsession.protocol.serialize import Lend
from distsession.protocol.tensor_memory import RemoteBytes, bytes_of

__all__ = ["Tensors", "over", "set_home"]

_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda _: False)
"""Whether a tensor is one of ``torch.func``'s; not public."""

_ROW = struct.Struct("<qqq")
"""Which number's buffer, the offset in elements, and the bytes that the buffer is a handle of."""
_LARGEST = 16
"""Bytes of the largest element, complex128."""
SMALL = 16 << 10
"""Bytes of a buffer up to which it is copied, so that the tensor has memory of its own."""

_home: torch.device | None = None


def set_home(device: torch.device) -> None:
    """Where tensors of an accelerator are to arrive in this process. Default: the CPU."""
    global _home
    _home = device


class _Sent:
    """One tensor of a message."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        # Of something writable: pickle marks the buffer, and what arrives could not be changed.
        self.placeholder = PickleBuffer(bytearray())
        self.size = tensor.element_size()
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        self.elements = tensor.numel()
        last = sum(int((n - 1) * stride) for n, stride in dims)
        self.low = int(tensor.storage_offset()) * self.size
        self.high = self.low + (last + 1) * self.size if self.elements else self.low
        self.storage = tensor.untyped_storage()._cdata


class Tensors:
    """A reducer for the tensors of one message; see :class:`.serialize.Reducer`."""

    def __init__(self) -> None:
        self._sent: list[_Sent] = []
        self._table = _Table()

    def __call__(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not _is_plain(obj):
            return NotImplemented
        sent = _Sent(obj)
        self._sent.append(sent)
        arguments = (
            self._table,
            len(self._sent) - 1,
            sent.placeholder,
            obj.dtype,
            tuple(obj.shape),
            tuple(obj.stride()),
            obj.requires_grad,
            obj.device.type != "cpu",
        )
        if obj.__dict__:
            return _tensor, arguments, dict(obj.__dict__), None, None, _set_attributes
        return _tensor, arguments

    def finish(self, buffers: Sequence[PickleBuffer], lend: Lend | None = None) -> list[Any]:
        """Put memory in the place of the placeholders among a pickle's buffers."""
        if not self._sent:
            return [buffer.raw() for buffer in buffers]
        found: dict[int, Any] = {}
        rows: list[tuple[int, int, int]] = [(0, 0, 0)] * len(self._sent)
        for island in self._islands():
            owner = min(island)
            memory, lent = self._memory(island), 0
            if lend is not None and isinstance(memory, RemoteBytes):
                count, handle = memory.nbytes, lend(memory)
                if handle is not None:
                    memory, lent = handle, count
            found[id(self._sent[owner].placeholder)] = memory
            low = self._start(island)
            for number in island:
                sent = self._sent[number]
                rows[number] = owner, (sent.low - low) // sent.size, lent
            if self._has_gaps(island):
                rows[owner] = owner, -1, lent
        table = b"".join(_ROW.pack(*row) for row in rows)
        found[id(self._table.placeholder)] = table
        return [found[id(b)] if id(b) in found else b.raw() for b in buffers]

    def _islands(self) -> Iterable[list[int]]:
        """The numbers of tensors, those together that lie in one piece of memory."""
        order = sorted(
            (sent.storage, sent.low, sent.high, number) for number, sent in enumerate(self._sent)
        )
        island: list[int] = []
        where, end = None, -1
        for storage, low, high, number in order:
            if island and (storage != where or low >= end):
                yield island
                island, end = [], -1
            where, end = storage, max(end, high)
            island.append(number)
        if island:
            yield island

    def _start(self, island: list[int]) -> int:
        """The first byte that is sent, where an element of any size may begin."""
        return min(self._sent[number].low for number in island) // _LARGEST * _LARGEST

    def _has_gaps(self, island: list[int]) -> bool:
        sent = self._sent[island[0]]
        return len(island) == 1 and sent.elements * sent.size < sent.high - sent.low

    def _memory(self, island: list[int]) -> Any:
        tensor = self._sent[island[0]].tensor
        if self._has_gaps(island):
            return _frame(pinned.flat_bytes(tensor.detach().contiguous()))
        low = self._start(island)
        high = max(self._sent[number].high for number in island)
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        storage.set_(tensor.untyped_storage(), low, (high - low,), (1,))
        return _frame(storage)


def _frame(memory: torch.Tensor) -> Any:
    """The bytes of a tensor, to be written; a GPU's stay there until then, unless they are few."""
    if memory.device.type == "cpu" or memory.numel() < pinned.LEAST:
        return bytes_of(memory)
    return pinned.DeviceBytes(memory)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but a window on some memory."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not _is_wrapped(tensor)
        and not tensor._backward_hooks
    )


class _Table:
    """Where each tensor of a message lies; on arrival also the memory that has come so far."""

    def __init__(self, rows: Any = b""):
        self.placeholder = PickleBuffer(bytearray())
        self._rows = rows
        self._memory: dict[int, torch.UntypedStorage] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Table, (self.placeholder,)

    def storage(
        self, number: int, buffer: Any, is_remote: bool
    ) -> tuple[torch.UntypedStorage, int]:
        owner, offset, lent = _ROW.unpack_from(self._rows, number * _ROW.size)
        if owner == number:
            self._memory[number] = (
                device_ipc.borrow(bytes(buffer), lent, _home).untyped_storage()
                if lent
                else _storage(buffer, is_remote)
            )
        return self._memory[owner], offset


def _storage(buffer: Any, is_remote: bool) -> torch.UntypedStorage:
    view = memoryview(buffer)
    if not view.nbytes:
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
    elif view.nbytes <= SMALL or view.readonly:
        tensor = torch.frombuffer(bytearray(view), dtype=torch.uint8).clone()
    else:
        tensor = torch.frombuffer(view, dtype=torch.uint8)
    if is_remote and _home is not None:
        tensor = pinned.to_device(tensor, _home)
    return tensor.untyped_storage()


def _tensor(
    table: _Table,
    number: int,
    buffer: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_remote: bool,
) -> torch.Tensor:
    storage, offset = table.storage(number, buffer, is_remote)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    if offset < 0:
        strides = torch.empty(shape, device="meta").stride()
        tensor.set_(storage, 0, shape, strides)
    else:
        tensor.set_(storage, offset, shape, stride)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def over(memory: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over some memory, which it keeps and can change."""
    if not memoryview(memory).nbytes:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(tuple(shape))
