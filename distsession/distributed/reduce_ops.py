"""Reduce operations: their names, and what a backend does with which dtype."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distsession.devices import is_nccl
from distsession.errors import OptionsError

__all__ = ["Plan", "operation_name", "plan", "reduce_numbers"]

_NAMES = {
    "SUM": "SUM",
    "PRODUCT": "PRODUCT",
    "PROD": "PRODUCT",
    "MIN": "MIN",
    "MAX": "MAX",
    "AND": "AND",
    "BAND": "AND",
    "OR": "OR",
    "BOR": "OR",
    "XOR": "XOR",
    "BXOR": "XOR",
    "AVG": "AVG",
    "AVERAGE": "AVG",
    "MEAN": "AVG",
}
ORDER = ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR", "AVG")
_BITWISE = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_WHOLE = {torch.int8, torch.uint8, torch.int32, torch.int64}
_FLOATING = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex64, torch.complex128}


@dataclass(frozen=True)
class Plan:
    """How to reduce tensors of one dtype.

    Attributes:
        op: torch's operation.
        dtype: What to convert them to; None to leave them as they are.
        divide: Whether to divide the result by the number of ranks.
    """

    op: Any
    dtype: torch.dtype | None = None
    divide: bool = False


@functools.lru_cache(maxsize=64)
def _name(op: str) -> str:
    name = _NAMES.get(op.upper())
    if name is None:
        raise OptionsError(
            f"op={op!r} is not known: sum, product, min, max, and, or, xor and avg are, in either "
            "case."
        )
    return name


def operation_name(op: Any) -> str:
    """An operation's one name.

    Args:
        op: A name in either case, or torch's ``ReduceOp``.

    Raises:
        OptionsError: There is no such operation.
    """
    if isinstance(op, str):
        return _name(op)
    for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
        if op == getattr(dist.ReduceOp, name):
            return _NAMES[name]
    raise OptionsError(f"op={op!r} is not an operation's name, nor a ReduceOp that is known here.")


@functools.lru_cache(maxsize=256)
def plan(name: str, dtype: torch.dtype, backend: str) -> Plan:
    """How a backend reduces tensors of a dtype.

    Args:
        name: From :func:`operation_name`.
        dtype: Of the tensors.
        backend: That moves them.

    Raises:
        OptionsError: It cannot, or what would come out has no meaning.
    """
    torch_name = {"AND": "BAND", "OR": "BOR", "XOR": "BXOR"}.get(name, name)
    op = getattr(dist.ReduceOp, "SUM" if name == "AVG" else torch_name)
    if dtype is torch.bool:
        return _plan_bool(name, op, backend)
    if dtype in _COMPLEX:
        if name not in ("SUM", "AVG"):
            raise _cannot(name, dtype, "complex numbers have only sum and avg")
        return Plan(op, divide=name == "AVG")
    if name in _BITWISE and dtype not in _WHOLE | set(_WIDER):
        raise _cannot(name, dtype, "bitwise operations need whole numbers or bools")
    if name in _BITWISE and is_nccl(backend):
        raise _cannot(name, dtype, "NCCL has no bitwise operations; move the tensor to the CPU")
    if name == "AVG" and dtype in _WHOLE | set(_WIDER):
        raise _cannot(name, dtype, "it would not be a whole number; convert it with .float()")
    if dtype in _WIDER:
        return Plan(op, dtype=_WIDER[dtype])
    if dtype not in _WHOLE | _FLOATING and (backend == "gloo" or is_nccl(backend)):
        raise _cannot(name, dtype, f"{backend} does not know this dtype; convert it")
    return Plan(op, divide=name == "AVG")


def _plan_bool(name: str, op: Any, backend: str) -> Plan:
    """Bools travel as 0 and 1 of uint8, of which min and max are "and" and "or"."""
    if name in ("SUM", "PRODUCT", "AVG"):
        raise _cannot(name, torch.bool, "it would not be a bool; convert it with .int()")
    if name == "XOR" and is_nccl(backend):
        raise _cannot(name, torch.bool, "NCCL has no bitwise operations")
    same = {"AND": dist.ReduceOp.MIN, "OR": dist.ReduceOp.MAX}
    return Plan(same.get(name, op), dtype=torch.uint8)


def _cannot(name: str, dtype: torch.dtype, why: str) -> OptionsError:
    kind = str(dtype).removeprefix("torch.")
    return OptionsError(f"op={name.lower()!r} cannot reduce {kind} tensors: {why}.")


def reduce_numbers(name: str, values: Sequence[Any]) -> Any:
    """Reduce Python numbers, exactly, in the order in which they are given.

    Returns:
        An int where all are ints and it is no average; a bool where all are bools and it is no
        sum, product or average.
    """
    if name == "SUM":
        return sum(values)
    if name == "AVG":
        return sum(values) / len(values)
    if name == "PRODUCT":
        return math.prod(values)
    if name in _BITWISE:
        return functools.reduce(_BITWISE[name], values)
    return min(values) if name == "MIN" else max(values)


def check_number(name: str, value: Any) -> None:
    """Refuse a number that the operation does not take.

    Raises:
        OptionsError: It takes others only.
    """
    if name in _BITWISE and not isinstance(value, int):
        raise OptionsError(f"op={name.lower()!r} needs whole numbers or bools, not {value!r}.")
    if name in ("MIN", "MAX") and isinstance(value, complex):
        raise OptionsError(f"op={name.lower()!r} cannot order complex numbers.")
