"""Moving values between ranks.

Each takes a tensor, a number, a string, or any object that can be pickled, nested containers
included. What ranks bring is compared before it moves. Nothing here is part of autograd: what
arrives has no gradient; use ``torch.distributed.nn.functional`` for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distsession.distributed import rank_info
from distsession.distributed.accelerator import accelerator_of, backends_of
from distsession.distributed.groups import resolve_group
from distsession.distributed.handshake import (
    GroupView,
    as_bytes,
    exchange,
    group_view,
    mismatch,
    padded,
)
from distsession.distributed.header import Call, Header, Kind, Payload, joined, pack, unpack
from distsession.distributed.objects import device_of, gather_bytes, to_length
from distsession.errors import OptionsError

__all__ = [
    "all_gather",
    "barrier",
    "broadcast",
    "gather",
    "synchronize",
]


def all_gather(tensor: Any, group: Any = None, *, as_list: bool = False) -> Any:
    """Every rank's value, on every rank.

    Args:
        tensor: A dense tensor of any dtype. All have the same dtype and the same shape but for the
            first dimension. Or a number, a string, or any object.
        group: A process group, or a list of ranks. Default: the world. A process that is no
            member gets its very value back, or with ``as_list`` a list of it alone.
        as_list: Give a list of the tensors, one for each rank, which may then differ in shape and
            dtype.

    Returns:
        Tensors one after another along dimension 0: ranks with shapes ``(n0, *s)``, ``(n1, *s)``,
        ... give ``(n0 + n1 + ..., *s)``; those without dimensions give ``(world_size,)``. For
        anything else, and with ``as_list``, a list in rank order. It is new, on the device of
        ``tensor``, and outside autograd. Without a process group: the tensor itself (as ignite
        does), or a list of the one value.

    Raises:
        OptionsError: ``group`` is neither a group nor a list of ranks.
        CollectiveMismatchError: Some have tensors and others not, or tensors that do not fit.
        CollectiveError: A rank's object cannot be pickled. These two are raised on every rank.
    """
    view = group_view(resolve_group(group))
    if view is None:
        itself = isinstance(tensor, torch.Tensor) or dist.is_initialized()
        return tensor if itself and not as_list else [tensor]
    header, payload = pack(tensor, Call.ALL_GATHER)
    found = exchange(view, header, payload)
    is_joined = _are_joined(view, found.headers, as_list)
    parts = gather_bytes(view, found, payload)
    return _collected(found.headers, parts, tensor, is_joined)


def gather(tensor: Any, dst: int = 0, group: Any = None, *, as_list: bool = True) -> Any:
    """Every rank's value, on one rank.

    Args:
        tensor: As for :func:`all_gather`.
        dst: The (global) rank that gets them.
        group: As for :func:`all_gather`.
        as_list: False to have tensors one after another along dimension 0, as from
            :func:`all_gather`, rather than in a list.

    Returns:
        On ``dst`` a new list in rank order; its tensors may differ in shape and dtype. None on
        the others. Outside autograd.

    Raises:
        OptionsError: ``group`` is neither a group nor a list of ranks; or ``dst`` is not in it.
        CollectiveMismatchError: As for :func:`all_gather`; or ranks name different ``dst``.
        CollectiveError: As for :func:`all_gather`.
    """
    view = group_view(resolve_group(group))
    if view is None:
        if dist.is_initialized():
            return None
        return tensor if isinstance(tensor, torch.Tensor) and not as_list else [tensor]
    root = view.position_of(dst, "dst")
    header, payload = pack(tensor, Call.GATHER, dst)
    found = exchange(view, header, payload)
    headers, here = found.headers, view.position == root
    is_joined = _are_joined(view, headers, as_list)
    if (inline := found.inline()) is not None:
        return _collected(headers, inline, tensor, is_joined) if here else None
    device, length = device_of(view, headers), padded(headers)
    parts = [torch.empty(0, dtype=torch.uint8, device=device)] * view.size
    if length:
        mine = to_length(as_bytes(payload, device), length)
        if here:
            every = torch.empty(view.size * length, dtype=torch.uint8, device=device)
            parts = list(every.split(length))
        dist.gather(mine, parts if here else None, dst, group=view.group)
    return _collected(headers, parts, tensor, is_joined) if here else None


def broadcast(tensor: Any, src: int = 0, group: Any = None, safe_mode: bool = False) -> Any:
    """One rank's value, on every rank.

    Args:
        tensor: On ``src`` a dense tensor of any dtype and shape, a number, a string, or any
            object. On the others a tensor of the same shape and dtype to receive into, or None
            where they do not know these, or any number, string or object.
        src: The (global) rank that sends.
        group: A process group, or a list of ranks. Default: the world. A process that is no
            member gets its own value back.
        safe_mode: Ignore what receivers give, whatever it is; they get a new tensor.

    Returns:
        The value. On ``src`` the very one that was given. A tensor given to receive into is
        changed in place and returned. A new one is on :func:`device`. Outside autograd.

    Raises:
        OptionsError: ``src`` is not in the group, or has None.
        CollectiveMismatchError: A receiver's tensor does not fit; or ranks name different
            ``src``.
        CollectiveError: The object cannot be pickled. All are raised on every rank.
    """
    view = group_view(resolve_group(group))
    if view is None:
        if tensor is None and not dist.is_initialized():
            raise _nothing_to_send(0)
        return tensor
    root = view.position_of(src, "src")
    here = view.position == root
    # An object that a receiver gives is ignored, so it need not be pickled.
    shown = tensor if here or (isinstance(tensor, torch.Tensor) and not safe_mode) else None
    header, payload = pack(shown, Call.BROADCAST, src)
    found = exchange(view, header, payload if here else None)
    headers, sent = found.headers, found.headers[root]
    if sent.kind is Kind.NOTHING:
        raise _nothing_to_send(src)
    unlike = [
        header
        for header in headers
        if header is not sent and header.kind is Kind.TENSOR and _form(header) != _form(sent)
    ]
    if unlike:
        raise mismatch(view, "values that do not fit", [str(header) for header in headers])
    inline = found.inline(root)
    if here and inline is not None:
        return tensor
    device = device_of(view, headers if sent.kind is Kind.TENSOR else [sent])
    if here:
        if sent.nbytes:
            dist.broadcast(as_bytes(payload, device), src, group=view.group)
        return tensor
    target = shown if isinstance(shown, torch.Tensor) else None
    data: Payload = torch.empty(0, dtype=torch.uint8, device=device)
    if inline is not None:
        data = inline[0]
    elif sent.nbytes:
        into = target is not None and target.is_contiguous() and target.device == device
        if into and not (target.is_conj() or target.is_neg()):  # type: ignore[union-attr]
            data = as_bytes(target, device)
        else:
            data = torch.empty(sent.nbytes, dtype=torch.uint8, device=device)
            into = False
        dist.broadcast(data, src, group=view.group)
        if into:
            return target
    if target is None:
        return unpack(sent, data, view.device_for(True) if sent.kind is Kind.TENSOR else None)
    target.detach().copy_(unpack(sent, data))
    return target


def barrier(group: Any = None, async_op: bool = False, **options: Any) -> Any:
    """Wait until every rank is here. Nothing without a process group, or for no member.

    Args:
        group: A process group, or a list of ranks. Default: the world.
        async_op: Return torch's work at once, to wait for.
        **options: More for ``torch.distributed.barrier``: ``device_ids``.

    Returns:
        None; with ``async_op`` the work, or None where there is nobody to wait for.
    """
    view = group_view(resolve_group(group))
    if view is None:
        return None
    if "cpu" not in view.backends:
        options.setdefault("device_ids", [view.device.index])
    return dist.barrier(view.group, async_op, **options)


def synchronize(device: torch.device | int | None = None) -> None:
    """Wait until this rank's GPU, or other accelerator, has done what it was given.

    Where there is none, nothing happens.

    It waits for no other rank; see :func:`barrier`.

    Args:
        device: The GPU. Default: the current one.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)
        return
    kind = accelerator_of(backends_of()) if rank_info.is_initialized() else ""
    if kind not in ("", "cuda"):
        torch.get_device_module(kind).synchronize(device)


# --- parts --------------------------------------------------------------------------------------


def _nothing_to_send(src: int) -> OptionsError:
    return OptionsError(f"broadcast: rank {src} has None, which says nothing to the others.")


def _form(header: Header) -> tuple[Any, ...]:
    return header.kind, header.dtype, header.shape


def _are_joined(view: GroupView, headers: Sequence[Header], as_list: bool) -> bool:
    """Whether what the ranks have becomes one tensor.

    Raises:
        CollectiveMismatchError: It should, but does not fit.
    """
    first = headers[0]
    if all(header is first for header in headers):
        return first.kind is Kind.TENSOR and not as_list
    tensors = sum(header.kind is Kind.TENSOR for header in headers)
    if as_list or not tensors:
        return False
    same = {(header.dtype, len(header.shape), header.shape[1:]) for header in headers}
    if tensors < len(headers) or len(same) > 1:
        raise mismatch(view, "values that do not fit together", [str(header) for header in headers])
    return True


def _collected(
    headers: Sequence[Header], parts: Sequence[Payload], own: Any, is_joined: bool
) -> Any:
    """The ranks' values from their bytes, as one tensor or as a list."""
    device = own.device if isinstance(own, torch.Tensor) else None
    first = headers[0]
    inline = [part for part in parts if isinstance(part, bytes)]
    if (
        is_joined
        and len(inline) == len(headers)
        and all(each is first or each.shape == first.shape for each in headers)
    ):
        length = len(headers) * (first.shape[0] if first.shape else 1)
        whole = joined(inline, first.dtype, (length, *first.shape[1:]))
        return whole if device is None or device.type == "cpu" else whole.to(device)
    values = [
        unpack(header, part, device if header.kind is Kind.TENSOR else None)
        for header, part in zip(headers, parts, strict=True)
    ]
    if not is_joined:
        return values
    return torch.cat([value.unsqueeze(0) if value.dim() == 0 else value for value in values])
