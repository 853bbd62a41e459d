"""The operations of a process group, each described so that ranks can compare theirs.

torch calls a group's methods with lists of tensors and an options object. The names of the
operations in messages are those of torch's functions (``all_reduce``), not of these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from distsession.engine.collectives import torch_private
from distsession.protocol.operation_names import AnySource, SplitSizes, join_details

__all__ = [
    "Collectives",
    "Elements",
    "comparable",
    "describe",
    "describe_detail",
    "size",
]

_OPS = {
    hash(getattr(dist.ReduceOp, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
"""torch (2.13) hashes a reduce op to its number."""


MESSAGES = ("send", "recv")
"""Operations whose two ends are called differently."""


class Elements(int):
    """How many elements a message has."""


class Parts(tuple[int, ...]):
    """How many elements the part of each member has, where these differ: the same on all ranks."""


class Collectives(dist.ProcessGroup):
    """Describes every operation and hands it to the group that is derived from it."""

    members: list[int]
    inner: Any
    _my_rank: int
    _limit: timedelta
    _takes_parts: bool
    """Whether its backend gathers tensors whose shapes differ from rank to rank; gloo does not."""

    def _collective(
        self,
        call: Callable[[Any], Any],
        key: tuple[Any, ...],
        is_async: bool,
        tensor: torch.Tensor | None,
        has_sizes: bool = False,
    ) -> Any:
        raise NotImplementedError

    def _message(
        self,
        call: Callable[[Any], Any],
        key: tuple[Any, ...],
        ends: tuple[int, int],
        tag: int,
        tensor: torch.Tensor,
    ) -> Any:
        raise NotImplementedError

    def recorded(
        self,
        key: tuple[Any, ...],
        *,
        meets: bool = False,
        from_any: bool = False,
        limit: float | None = None,
    ) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _any_source(self, tensors: Any, tag: int) -> Any:
        raise NotImplementedError

    def check_member(self, rank: int) -> None:
        """Refuse a rank of the group that there is not."""
        if not 0 <= rank < len(self.members):
            raise ValueError(
                f"there is no rank {rank} in this process group of {len(self.members)} ranks."
            )

    def _root(self, opts: Any) -> str:
        self.check_member(opts.rootRank)
        return f"root {self.members[opts.rootRank]}"

    # --- collectives ------------------------------------------------------------------------------

    # In the place of lists and options, torch takes a tensor, an op, a root and a time limit, too.
    # Parameters bear torch's names; what has another one there is in ``named``.

    def allreduce(
        self, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any
    ) -> Any:
        if type(opts) is not AllreduceOptions:
            opts = _options(AllreduceOptions, timeout, reduceOp=named.get("op", opts))
            tensors = _listed(named.get("tensor", tensors))
        tensor = tensors[0]
        # The one that is called most: what others have functions for is done here.
        op = _OPS.get(hash(opts.reduceOp)) or _op(opts)
        key = ("all_reduce", tensor.dtype, tensor.shape, op)
        return self._collective(lambda g: g.allreduce(tensors, opts), key, opts.asyncOp, tensor)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = AllreduceCoalescedOptions() if opts is None else opts
        key = ("all_reduce_coalesced", *_kinds(tensors), _op(opts))
        return self._collective(
            lambda g: g.allreduce_coalesced(tensors, opts), key, _is_async(opts), tensors[0]
        )

    def broadcast(
        self, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any
    ) -> Any:
        if not isinstance(opts, BroadcastOptions):
            opts = _options(BroadcastOptions, timeout, rootRank=named.get("root", opts))
            tensors = _listed(named.get("tensor", tensors))
        tensor = tensors[0]
        key = ("broadcast", tensor.dtype, tensor.shape, self._root(opts))
        return self._collective(lambda g: g.broadcast(tensors, opts), key, _is_async(opts), tensor)

    def reduce(
        self,
        tensors: Any = None,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        **named: Any,
    ) -> Any:
        if not isinstance(opts, ReduceOptions):
            root = named.get("root", opts)
            opts = _options(ReduceOptions, timeout, rootRank=root, reduceOp=op)
            tensors = _listed(named.get("tensor", tensors))
        tensor = tensors[0]
        key = ("reduce", tensor.dtype, tensor.shape, _op(opts), self._root(opts))
        return self._collective(lambda g: g.reduce(tensors, opts), key, _is_async(opts), tensor)

    def allgather(
        self, output_tensors: Any, input_tensors: Any = None, opts: Any = None, **named: Any
    ) -> Any:
        outputs, inputs = output_tensors, named.get("input_tensor", input_tensors)
        if not isinstance(opts, AllgatherOptions):
            opts = _options(AllgatherOptions, named.get("timeout", opts))
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        shape = inputs[0].shape
        if self._takes_parts:
            shape = _parts(outputs[0], shape)
        key = ("all_gather", inputs[0].dtype, shape)
        return self._collective(
            lambda g: g.allgather(outputs, inputs, opts), key, _is_async(opts), inputs[0]
        )

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        key = ("all_gather_coalesced", *_kinds(input_list))
        return self._collective(
            lambda g: g.allgather_coalesced(output_lists, input_list, opts),
            key,
            _is_async(opts),
            input_list[0],
        )

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        key = ("all_gather_into_tensor", input.dtype, input.shape)
        return self._collective(
            lambda g: g._allgather_base(output, input, opts), key, _is_async(opts), input
        )

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        key = ("all_gather_into_tensor", *_kinds(inputs))
        return self._collective(
            lambda g: g.allgather_into_tensor_coalesced(outputs, inputs, opts),
            key,
            _is_async(opts),
            inputs[0],
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        **named: Any,
    ) -> Any:
        outputs, inputs = output_tensors, named.get("input_tensor", input_tensors)
        if not isinstance(opts, GatherOptions):
            opts = _options(GatherOptions, timeout, rootRank=named.get("root", opts))
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        key = ("gather", inputs[0].dtype, inputs[0].shape, self._root(opts))
        return self._collective(
            lambda g: g.gather(outputs, inputs, opts), key, _is_async(opts), inputs[0]
        )

    def gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        opts = GatherOptions() if opts is None else opts
        key = ("gather", input.dtype, input.shape, self._root(opts))
        return self._collective(
            lambda g: g.gather_single(output, input, opts), key, _is_async(opts), input
        )

    gather_into_tensor = gather_single

    def scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        **named: Any,
    ) -> Any:
        outputs, inputs = named.get("output_tensor", output_tensors), input_tensors
        if not isinstance(opts, ScatterOptions):
            opts = _options(ScatterOptions, timeout, rootRank=named.get("root", opts))
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        key = ("scatter", outputs[0].dtype, outputs[0].shape, self._root(opts))
        return self._collective(
            lambda g: g.scatter(outputs, inputs, opts), key, _is_async(opts), outputs[0]
        )

    def reduce_scatter(
        self,
        output_tensors: Any = None,
        input_tensors: Any = None,
        opts: Any = None,
        timeout: Any = None,
        **named: Any,
    ) -> Any:
        outputs, inputs = named.get("output", output_tensors), named.get("input", input_tensors)
        if not isinstance(opts, ReduceScatterOptions):
            opts = _options(ReduceScatterOptions, timeout, reduceOp=named.get("op", opts))
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        shape = _parts(inputs[0], outputs[0].shape)
        key = ("reduce_scatter", outputs[0].dtype, shape, _op(opts))
        return self._collective(
            lambda g: g.reduce_scatter(outputs, inputs, opts), key, _is_async(opts), outputs[0]
        )

    def _reduce_scatter_base(
        self,
        outputTensor: Any,
        inputTensor: Any,
        opts: Any = None,
    ) -> Any:
        opts = ReduceScatterOptions() if opts is None else opts
        output, tensor = outputTensor, inputTensor
        torch_private.warn_of_fsdp2()
        key = ("reduce_scatter_tensor", output.dtype, output.shape, _op(opts))
        return self._collective(
            lambda g: g._reduce_scatter_base(output, tensor, opts), key, _is_async(opts), output
        )

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = ReduceScatterOptions() if opts is None else opts
        key = ("reduce_scatter_tensor", *_kinds(outputs), _op(opts))
        return self._collective(
            lambda g: g.reduce_scatter_tensor_coalesced(outputs, inputs, opts),
            key,
            _is_async(opts),
            outputs[0],
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        outputs, inputs = output_tensors, input_tensors
        opts = AllToAllOptions() if opts is None else opts
        send = tuple(tensor.numel() for tensor in inputs)
        receive = tuple(tensor.numel() for tensor in outputs)
        key = ("all_to_all", inputs[0].dtype, SplitSizes(send, receive))
        call = lambda g: g.alltoall(outputs, inputs, opts)  # noqa: E731
        return self._collective(call, key, _is_async(opts), inputs[0], has_sizes=True)

    def alltoall_base(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
        **named: Any,
    ) -> Any:
        tensor, receive, send = input, output_split_sizes, input_split_sizes
        if not isinstance(opts, AllToAllOptions):
            opts = _options(AllToAllOptions, named.get("timeout", opts))
        size = len(self.members)
        # gloo would count what it refuses on this rank alone, and take what its peers send next for
        # something else.
        _check_splits(send, tensor, size)
        _check_splits(receive, output, size)
        send_sizes = list(send) or [tensor.shape[0] // size] * size
        receive_sizes = list(receive) or [output.shape[0] // size] * size
        key = (
            "all_to_all_single",
            tensor.dtype,
            tensor.shape[1:],
            SplitSizes(tuple(send_sizes), tuple(receive_sizes)),
        )
        call = lambda g: g.alltoall_base(output, tensor, receive, send, opts)  # noqa: E731
        return self._collective(call, key, _is_async(opts), tensor, has_sizes=True)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None, **named: Any) -> Any:
        if not isinstance(opts, BarrierOptions):
            opts = _options(BarrierOptions, named.get("timeout", opts))
        return self._collective(lambda g: g.barrier(opts), ("barrier",), _is_async(opts), None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        limit = self._limit if timeout is None else timeout
        with self.recorded(("monitored_barrier",), meets=True, limit=limit.total_seconds()):
            return self.inner._get_backend(torch.device("cpu")).monitored_barrier(
                limit, wait_all_ranks
            )

    # --- messages ---------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int) -> Any:
        target = dstRank
        key = ("send", tensors[0].dtype, Elements(tensors[0].numel()))
        return self._message(
            lambda g: g.send(tensors, target, tag), key, (self._my_rank, target), tag, tensors[0]
        )

    def recv(self, tensors: Any, srcRank: int, tag: int) -> Any:
        source = srcRank
        key = ("recv", tensors[0].dtype, Elements(tensors[0].numel()))
        return self._message(
            lambda g: g.recv(tensors, source, tag), key, (source, self._my_rank), tag, tensors[0]
        )

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self._any_source(tensors, tag)


def _check_splits(sizes: Sequence[int], tensor: torch.Tensor, ranks: int) -> None:
    """Refuse what torch refuses (``c10d/Utils.hpp``, ``checkSplitSizes``), in its words.

    Args:
        sizes: How many rows each rank gets or sends; none where all do as many.
        tensor: That is cut.
        ranks: How many there are.

    Raises:
        RuntimeError: It cannot be cut so.
    """
    rows = tensor.size(0)
    if not sizes and rows % ranks:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
    if sizes and len(sizes) != ranks:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sizes and sum(sizes) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def _options(kind: Any, timeout: timedelta | None, **values: Any) -> Any:
    """What torch's operations take, from what its groups take in its place; None: default."""
    opts = kind()
    for name, value in {"timeout": timeout, **values}.items():
        if value is not None:
            setattr(opts, name, value)
    return opts


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _op(opts: Any) -> str:
    """The reduce op's name. Comparing torch's own objects would cost over a microsecond."""
    op = opts.reduceOp
    return _OPS.get(hash(op)) or str(op)


def _is_async(opts: Any) -> bool:
    """What the caller has asked for; C++ callers, and torch before 2.7, do not say: True."""
    return bool(getattr(opts, "asyncOp", True))


def _parts(tensors: Sequence[torch.Tensor], shape: torch.Size) -> torch.Size | Parts:
    """What ranks have to agree on that pass on one tensor for each: its shape, if it is one."""
    if all(tensor.shape == shape for tensor in tensors):
        return shape
    return Parts(tensor.numel() for tensor in tensors)


def _kinds(tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    for tensor in tensors:
        yield tensor.dtype
        yield tensor.shape


# --- texts and sizes ------------------------------------------------------------------------------


def describe(key: tuple[Any, ...]) -> str:
    """``all_reduce float32 [4, 2], sum`` from what was called."""
    return f"{key[0]} {describe_detail(key)}".strip()


def describe_detail(key: tuple[Any, ...]) -> str:
    """The same without the name: ``float32 [4, 2], sum``."""
    return join_details(map(_part, key[1:]))


def comparable(key: tuple[Any, ...]) -> str:
    """What of an operation has to be the same on all ranks, as text."""
    if key[0] in MESSAGES:  # its two ends
        return describe_detail(key)
    return describe(tuple(part for part in key if not isinstance(part, SplitSizes)))


def _part(part: Any) -> str:
    if isinstance(part, torch.dtype):
        return str(part).removeprefix("torch.")
    if isinstance(part, torch.Size):
        return str(list(part))
    if isinstance(part, SplitSizes | AnySource):
        return part.description
    if isinstance(part, Elements):
        return f"{int(part)} elements"
    if isinstance(part, Parts):
        return f"parts of {','.join(map(str, part))}"
    if isinstance(part, (str, int)):
        return str(part)
    if part is None:
        return ""
    if isinstance(part, tuple):
        return ", ".join(map(_part, part))
    return str(part)


def size(key: tuple[Any, ...]) -> int:
    """Bytes that the caller itself puts in, or in which it receives."""
    total = itemsize = count = 0
    for part in key[1:]:
        if isinstance(part, torch.dtype):  # each tensor is one, and a shape or what stands for it
            total += itemsize * count
            itemsize, count = part.itemsize, 1
        elif isinstance(part, torch.Size):
            count *= part.numel()
        elif isinstance(part, SplitSizes):
            count *= sum(part.send)
        elif isinstance(part, Elements):
            count *= part
        elif isinstance(part, Parts):
            count *= sum(part) // max(1, len(part))
    return total + itemsize * count
