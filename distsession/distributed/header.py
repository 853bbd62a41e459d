"""What a rank says of a value before it sends it, and the value's way into bytes and back.

Numbers travel in the header itself. Everything else follows as bytes, so that a dtype which the
backend does not know moves, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import io
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from distsession.distributed.accelerator import current_device

__all__ = [
    "FIELDS",
    "FORMS",
    "HEAD_BYTES",
    "Call",
    "Header",
    "Kind",
    "Payload",
    "copied",
    "dumps",
    "joined",
    "loads",
    "pack",
    "pickle_problems",
    "plain_number",
    "unpack",
]

MAX_DIMS = 16
FIELDS = 8 + MAX_DIMS
"""How many numbers a header is."""
_HEAD = struct.Struct(f"{FIELDS}q")
HEAD_BYTES = _HEAD.size
FORMS = 1024
"""Of how many kinds of tensors headers are kept, since most calls bring what was there before."""

_DTYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


class Call(enum.IntEnum):
    """The function that a rank is in."""

    ALL_REDUCE = 1
    REDUCE = 2
    ALL_GATHER = 3
    GATHER = 4
    BROADCAST = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    ALL_GATHER_OBJECT = 8
    BROADCAST_OBJECT_LIST = 9


class Kind(enum.IntEnum):
    """What a rank brings."""

    NOTHING = 0
    TENSOR = 1
    INT = 2
    FLOAT = 3
    BOOL = 4
    TEXT = 5
    OBJECT = 6
    UNPICKLABLE = 7

    @property
    def is_number(self) -> bool:
        return self in (Kind.INT, Kind.FLOAT, Kind.BOOL)


@dataclass(frozen=True)
class Header:
    """What one rank has said: see ``pack``."""

    call: int
    root: int
    kind: Kind
    dtype: torch.dtype
    on_gpu: bool
    nbytes: int
    bits: int
    shape: tuple[int, ...]

    def numbers(self) -> list[int]:
        shape = [*self.shape, *[0] * (MAX_DIMS - len(self.shape))]
        dtype = _DTYPE_NUMBERS[self.dtype]
        fixed = [self.call, self.root, self.kind, dtype, self.on_gpu, self.nbytes, self.bits]
        return [*fixed, len(self.shape), *shape]

    @functools.cached_property
    def raw(self) -> bytes:
        """The same as bytes."""
        return _HEAD.pack(*self.numbers())

    @classmethod
    def from_raw(cls, raw: bytes) -> Header:
        return cls.from_numbers(_HEAD.unpack(raw))

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Header:
        call, root, kind, dtype, on_gpu, nbytes, bits, dims = numbers[:8]
        shape = tuple(numbers[8 : 8 + dims])
        return cls(call, root, Kind(kind), _DTYPES[dtype], bool(on_gpu), nbytes, bits, shape)

    def __str__(self) -> str:
        if self.kind is Kind.TENSOR:
            dtype = str(self.dtype).removeprefix("torch.")
            return f"a {dtype} tensor of shape {list(self.shape)}"
        return {
            Kind.NOTHING: "nothing",
            Kind.INT: "a whole number",
            Kind.FLOAT: "a floating-point number",
            Kind.BOOL: "a bool",
            Kind.TEXT: "a string",
            Kind.UNPICKLABLE: "something that cannot be sent",
        }.get(self.kind, "an object")


Payload = bytes | torch.Tensor | None
"""What follows a header, if anything has to."""


def pack(value: Any, call: int, root: int = -1) -> tuple[Header, Payload]:
    """A value's header, and what has to follow it.

    Raises:
        TypeError: A tensor that is not dense. An object that cannot be pickled does not raise
            here but, through its header, on all ranks.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"only dense tensors can be sent, and this one is {value.layout}.")
        if value.dim() <= MAX_DIMS:
            return _of_tensor(call, root, value.dtype, _is_away(value), value.shape), value
    kind, bits, payload = _pack_other(value)
    size = 0 if payload is None else len(payload)
    return Header(call, root, kind, torch.uint8, False, size, bits, ()), payload


@functools.lru_cache(FORMS)
def _of_tensor(call: int, root: int, dtype: torch.dtype, on_gpu: bool, shape: torch.Size) -> Header:
    nbytes = shape.numel() * dtype.itemsize
    return Header(call, root, Kind.TENSOR, dtype, on_gpu, nbytes, 0, tuple(shape))


def _pack_other(value: Any) -> tuple[Kind, int, bytes | None]:
    if value is None:
        return Kind.NOTHING, 0, None
    if isinstance(value, Number):
        value = plain_number(value)
    if type(value) is bool:
        return Kind.BOOL, int(value), None
    if type(value) is int and -(2**63) <= value < 2**63:
        return Kind.INT, value, None
    if type(value) is float:
        return Kind.FLOAT, struct.unpack("q", struct.pack("d", value))[0], None
    if type(value) is str:
        return Kind.TEXT, 0, value.encode("utf-8", "surrogatepass")
    try:
        return Kind.OBJECT, 0, dumps(value)
    except Exception as error:
        pickle_problems.append(f"{type(error).__name__}: {error}")
        return Kind.UNPICKLABLE, 0, None


pickle_problems: list[str] = []
"""Why this rank's last value could not be pickled."""


def plain_number(value: Any) -> Any:
    """Numpy's numbers as Python's; others as they are."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def unpack(header: Header, data: Payload, device: torch.device | None = None) -> Any:
    """The value of a header.

    Args:
        header: What the sender said.
        data: The bytes that followed; as a tensor, of dtype uint8.
        device: Where a tensor belongs. Default: where the bytes are.
    """
    if header.kind is Kind.NOTHING:
        return None
    if header.kind is Kind.BOOL:
        return bool(header.bits)
    if header.kind is Kind.INT:
        return header.bits
    if header.kind is Kind.FLOAT:
        return struct.unpack("d", struct.pack("q", header.bits))[0]
    if header.kind is Kind.TENSOR:
        if isinstance(data, bytes):
            here = joined([data], header.dtype, header.shape)
            return here if device is None else here.to(device)
        if data is None:
            data = torch.empty(0, dtype=torch.uint8, device=device)
        here = data[: header.nbytes].view(header.dtype).view(header.shape)
        return here if device is None else here.to(device)
    if isinstance(data, torch.Tensor):
        data = _bytes(data[: header.nbytes])
    raw = data or b""
    return raw.decode("utf-8", "surrogatepass") if header.kind is Kind.TEXT else loads(raw)


def joined(parts: Sequence[bytes], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor on the CPU of some bytes, one after another."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    if raw := b"".join(parts):
        _write_to(made, raw)
    return made


# For small tensors each operation of torch takes longer than all that the bytes need.


def copied(tensor: torch.Tensor) -> bytes:
    """The bytes of a dense tensor on the CPU."""
    size = tensor.numel() * tensor.element_size()
    is_plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous()
    if is_plain and not (tensor.is_conj() or tensor.is_neg()):
        with contextlib.suppress(RuntimeError):  # torch.func wraps them
            if address := tensor.data_ptr():  # zeros that have no memory have none
                return ctypes.string_at(address, size)
    raw = bytearray(size)
    if raw:
        room = torch.frombuffer(raw, dtype=tensor.dtype)
        room.view(tensor.shape).copy_(tensor.detach())
    return bytes(raw)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Others may lie elsewhere than they say."""


def _write_to(tensor: torch.Tensor, raw: bytes) -> None:
    ctypes.memmove(tensor.data_ptr(), raw, len(raw))


def _bytes(data: torch.Tensor) -> bytes:
    """A uint8 tensor's bytes, without numpy."""
    raw = bytearray(data.numel())
    if raw:
        torch.frombuffer(raw, dtype=torch.uint8).copy_(data)
    return bytes(raw)


class _GpuTensorPickler(pickle.Pickler):
    """A GPU's tensors are unpickled on the receiver's GPU, not on the sender's."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _is_away(value):
            kind = value.device.type
            return _on_my_device, (value.detach().cpu(), value.requires_grad, kind)
        return NotImplemented


def _is_away(value: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU, or on another accelerator."""
    return value.device.type not in ("cpu", "meta")


def _on_my_device(value: torch.Tensor, requires_grad: bool, kind: str) -> torch.Tensor:
    return value.to(current_device(kind)).requires_grad_(requires_grad)


def dumps(value: Any) -> bytes:
    """The pickle of any object."""
    buffer = io.BytesIO()
    _GpuTensorPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(raw: bytes) -> Any:
    """The object of a pickle, which comes from another rank of this program."""
    return pickle.loads(raw)
