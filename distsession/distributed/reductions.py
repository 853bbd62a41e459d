"""Reducing values of all ranks to one."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed.containers import is_container, leaves, rebuilt
from distsession.distributed.groups import resolve_group
from distsession.distributed.handshake import (
    GroupView,
    exchange,
    group_view,
    mismatch,
)
from distsession.distributed.header import Call, Kind, pack, plain_number, unpack
from distsession.distributed.objects import gather_objects
from distsession.distributed.reduce_ops import (
    ORDER,
    check_number,
    operation_name,
    plan,
    reduce_numbers,
)

__all__ = ["Pending", "all_reduce", "reduce"]


class Pending:
    """A reduction under way, from ``all_reduce(..., async_op=True)``."""

    def __init__(self, works: list[Any], finish: Callable[[], Any]):
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._value: Any = None

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """Wait for the other ranks.

        Returns:
            What ``all_reduce`` would have returned. Until then the tensors that were given must
            neither be read nor changed.

        Raises:
            RuntimeError: The collective failed, as torch says it.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = []
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._value = finish()
        return self._value


def all_reduce(tensor: Any, op: Any = "sum", group: Any = None, async_op: bool = False) -> Any:
    """Reduce a value over all ranks; every rank gets the result.

    Args:
        tensor: A dense tensor of any shape, the same on all ranks; a number; or a nested dict,
            list or tuple of these, of the same structure on all ranks. Dtypes: all of float16,
            bfloat16, float32, float64, complex (sum and avg only), bool (min, max, and, or, xor
            only), int8 to int64, and uint8 to uint32.
        op: ``"sum"``, ``"product"``, ``"min"``, ``"max"``, ``"and"``, ``"or"``, ``"xor"`` (these
            three bitwise) or ``"avg"``, in either case, or torch's ``ReduceOp``. The average of
            whole numbers is a float; that of whole-number tensors is refused.
        group: A process group, or a list of ranks, of which one is made at its first use, by
            every rank of the world. Default: the world. A process that is no
            member gets its value back unchanged.
        async_op: Return at once. Numbers are met for all the same, so it then waits for them.

    Returns:
        The same tensor, changed in place, whatever its device and strides; a new number; a new
        container with the same tensors. With ``async_op`` a :class:`Pending` instead, whose
        ``wait()`` gives that. Without a process group the result for a world of one.

        Outside autograd: no gradient flows through it. For one that does use
        ``torch.distributed.nn.functional``.

    Raises:
        OptionsError: The operation is not known, or the backend cannot do it with this dtype; or
            ``group`` is neither a group nor a list of ranks. It is raised before anything is sent.
        TypeError: Neither tensor, number nor container of these.
        CollectiveMismatchError: Ranks have numbers with different operations, or containers of
            different structure.
    """
    name = operation_name(op)
    view = group_view(resolve_group(group))
    if isinstance(tensor, torch.Tensor):
        if view is None:
            plan(name, tensor.dtype, "gloo")
            return Pending([], lambda: tensor) if async_op else tensor
        work, finish = _reduce_tensor(tensor, name, view, None, async_op)
        return Pending([work], finish) if async_op else finish()
    works, finish = _reduce_others(tensor, name, view, None, async_op)
    return Pending(works, finish) if async_op else finish()


def reduce(tensor: Any, dst: int = 0, op: Any = "sum", group: Any = None) -> Any:
    """Reduce a value over all ranks; one rank gets the result.

    Args:
        tensor: As for :func:`all_reduce`.
        dst: The (global) rank that gets it.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`.

    Returns:
        On ``dst`` what :func:`all_reduce` returns, its tensor changed in place. On the other ranks
        None, and their tensors stay as they are. Outside autograd.

    Raises:
        OptionsError: As for :func:`all_reduce`; or ``dst`` is not in the group.
        TypeError: As for :func:`all_reduce`.
        CollectiveMismatchError: As for :func:`all_reduce`; or ranks name different ``dst``.
    """
    name = operation_name(op)
    view = group_view(resolve_group(group))
    if view is None:
        return all_reduce(tensor, op, group) if not dist.is_initialized() else None
    root = view.position_of(dst, "dst")
    if isinstance(tensor, torch.Tensor):
        finish = _reduce_tensor(tensor, name, view, dst, False)[1]
    else:
        finish = _reduce_others(tensor, name, view, dst, False)[1]
    result = finish()
    return result if root == view.position else None


def _reduce_tensor(
    tensor: torch.Tensor, name: str, view: GroupView, dst: int | None, async_op: bool
) -> tuple[Any, Callable[[], torch.Tensor]]:
    """Begin a reduction; the function that is returned ends it."""
    if tensor.layout != torch.strided:
        raise TypeError(f"only dense tensors can be reduced, and this one is {tensor.layout}.")
    kind = tensor.device.type
    if kind not in view.backends:
        kind = view.device.type
    how = plan(name, tensor.dtype, view.backends[kind])
    target = tensor.detach() if tensor.requires_grad else tensor
    work = target if kind == target.device.type else target.to(view.device)
    if how.dtype is not None:
        work = work.to(how.dtype)
    if not work.is_contiguous():
        work = work.contiguous()
    if work.is_conj() or work.is_neg():
        work = work.resolve_conj().resolve_neg()
    if dst is None:
        handle = dist.all_reduce(work, how.op, view.group, async_op)
    else:
        here = dst == view.ranks[view.position]
        if work is target and not here:
            work = work.clone()  # torch may leave anything in it
        handle = dist.reduce(work, dst, how.op, view.group, async_op)
        if not here:
            return handle, lambda: tensor

    def finish() -> torch.Tensor:
        if how.divide:
            work.div_(view.size)
        if work is not target:
            target.copy_(work)
        return tensor

    return handle, finish


def _reduce_others(
    value: Any, name: str, view: GroupView | None, dst: int | None, async_op: bool
) -> tuple[list[Any], Callable[[], Any]]:
    if not is_container(value):
        number = _reduced_number(_number(value, name), name, view, dst)
        return [], lambda: number
    paths = list(leaves(value))
    for _, leaf in paths:
        if isinstance(leaf, torch.Tensor):
            plan(name, leaf.dtype, _backend_of(leaf, view))
        else:
            _number(leaf, name)
    results = _reduced_leaves(paths, name, view, dst, async_op)

    def finish() -> Any:
        done = iter([end() for _, end in results])
        return rebuilt(value, lambda: next(done))

    return [work for work, _ in results], finish


def _reduced_leaves(
    paths: list[tuple[str, Any]], name: str, view: GroupView | None, dst: int | None, async_op: bool
) -> list[tuple[Any, Callable[[], Any]]]:
    """A work and an end for each leaf, in order; the structure is compared first."""
    counted = [(path, leaf) for path, leaf in paths if not isinstance(leaf, torch.Tensor)]
    mine = [_number(leaf, name) for _, leaf in counted]
    every = [mine] if view is None else _agreed(paths, mine, name, view, dst)
    sums = iter([reduce_numbers(name, values) for values in zip(*every, strict=True)])
    results: list[tuple[Any, Callable[[], Any]]] = []
    for _, leaf in paths:
        if not isinstance(leaf, torch.Tensor):
            results.append((None, _giving(next(sums))))
        elif view is None:
            results.append((None, _giving(leaf)))
        else:
            results.append(_reduce_tensor(leaf, name, view, dst, async_op))
    return results


def _giving(value: Any) -> Callable[[], Any]:
    return lambda: value


def _backend_of(tensor: torch.Tensor, view: GroupView | None) -> str:
    if view is None:
        return "gloo"
    return view.backends.get(tensor.device.type) or view.backends[view.device.type]


def _number(value: Any, name: str) -> Any:
    if not isinstance(value, numbers.Number):
        plain = plain_number(value)  # numpy's bool is no Number, but gives one
        if not isinstance(plain, numbers.Number):
            raise TypeError(
                f"a {type(value).__name__} cannot be reduced: tensors and numbers can, and nested "
                "dicts, lists and tuples of them."
            )
        value = plain
    number = plain_number(value) if not isinstance(value, int | float | complex) else value
    check_number(name, number)
    return number


def _reduced_number(number: Any, name: str, view: GroupView | None, dst: int | None) -> Any:
    """Every rank gets all numbers and reduces them in the same order: alike to the last bit."""
    if view is None:
        return reduce_numbers(name, [number])
    root = ORDER.index(name) + (0 if dst is None else 1000 * (dst + 1))
    call = Call.ALL_REDUCE if dst is None else Call.REDUCE
    header, payload = pack(number, call, root)
    found = exchange(view, header, payload)
    headers = found.headers
    if all(header.kind.is_number for header in headers):
        return reduce_numbers(name, [unpack(header, None) for header in headers])
    if not all(header.kind.is_number or header.kind is Kind.OBJECT for header in headers):
        raise mismatch(view, "different things to reduce", [str(header) for header in headers])
    return reduce_numbers(name, gather_objects(view, found, payload))


def _agreed(
    paths: list[tuple[str, Any]], mine: list[Any], name: str, view: GroupView, dst: int | None
) -> list[list[Any]]:
    """Every rank's numbers, once it is known that all have the same structure."""
    described = "; ".join(_described(path, leaf) for path, leaf in paths)
    call = Call.ALL_REDUCE if dst is None else Call.REDUCE
    header, payload = pack([f"{name} to {dst}: {described}", mine], call, -2)
    found = exchange(view, header, payload)
    headers = found.headers
    if any(header.kind is not Kind.OBJECT for header in headers):
        raise mismatch(view, "different things to reduce", [str(header) for header in headers])
    every = gather_objects(view, found, payload)
    if any(entry[0] != every[0][0] for entry in every):
        raise mismatch(view, "containers of different structure", [entry[0] for entry in every])
    return [entry[1] for entry in every]


def _described(path: str, leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return f"{path} number"
    return f"{path} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
