"""Whether values that look alike are alike: a hash of the tensors and arrays within one.

The text of a tensor has four digits and leaves out the middle, and that of a module has no
numbers at all. So what ranks show as the same text may differ. Nothing of the user's runs for the
hash, no collective either, and it takes a bounded time. It tells only what differs: where all are
too large, or there is no time, equal hashes prove nothing.

torch, numpy and pandas are used where they are loaded.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from distsession.protocol.tensor_memory import bytes_of

__all__ = ["FINGERPRINT_S", "fingerprint"]

FINGERPRINT_S = 0.05
"""Seconds that a hash may take."""
MAX_WHOLE_BYTES = 8 << 20
"""Bytes of all parts together that are hashed in full."""
MAX_DEPTH = 12
SAMPLE = 4096
"""Elements of a part that are looked at where all would be too much."""

_NO_PARTS = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType)
_END = object()


def fingerprint(value: Any, seconds: float = FINGERPRINT_S) -> str:
    """A hash that differs where tensors or arrays in a value do.

    Args:
        value: Any; what it has of tensors, arrays and tables is hashed.
        seconds: The time that it may take.

    Returns:
        The hash; empty if there are none, or if there is not enough time.
    """
    if isinstance(value, _NO_PARTS):
        return ""
    deadline = time.monotonic() + seconds
    try:
        return _digest(value, deadline)
    except Exception:  # an unusual tensor, a changing container: then nothing is said
        return ""


def _digest(value: Any, deadline: float) -> str:
    parts = list(_parts(value, deadline))
    is_small = sum(int(getattr(part, "nbytes", 0)) for part in parts) <= MAX_WHOLE_BYTES
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        _check_time(deadline)
        digest.update(_bytes(part, is_small))
    return digest.hexdigest() if parts else ""


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


# --- what a value is made of ----------------------------------------------------------------------


def _parts(value: Any, deadline: float) -> Iterator[Any]:
    """Tensors, arrays and tables within a value."""
    seen: set[int] = set()
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        item = next(levels[-1], _END)
        if item is _END:
            levels.pop()
            continue
        _check_time(deadline)
        if isinstance(item, _NO_PARTS) or id(item) in seen:
            continue
        seen.add(id(item))
        if _is_tensor(item):
            item = _local(item)
            if item is not None:
                yield item
        elif _is_array(item) or _is_table(item):
            yield item
        elif len(levels) < MAX_DEPTH:
            levels.append(_children(item))


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _local(value: Any) -> Any:
    """The data of a tensor in this process; None where ranks have different data by intention."""
    torch = sys.modules["torch"]
    placements = getattr(value, "placements", None)
    if placements is not None:
        is_same = all(placement.is_replicate() for placement in placements)
        value = value._local_tensor if is_same else None
    is_usual = type(value) in (torch.Tensor, torch.nn.Parameter)
    if not is_usual or value.is_meta or value.layout != torch.strided:
        return None
    return None if value.is_quantized or value.is_nested else value.detach()


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _is_table(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    kinds = (getattr(pandas, name, ()) for name in ("DataFrame", "Series", "Index"))
    return pandas is not None and any(isinstance(value, kind) for kind in kinds)


def _children(value: Any) -> Iterator[Any]:
    """What containers hold, and what objects store."""
    if isinstance(value, dict):
        return iter(dict.values(value))
    if isinstance(value, (list, tuple)):
        return iter(value)
    held = getattr(value, "__dict__", None)
    if type(held) is not dict:
        return iter(())
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        names = ("_parameters", "_buffers", "_modules")
        return itertools.chain.from_iterable((held.get(name) or {}).values() for name in names)
    return iter(held.values())


# --- their bytes ----------------------------------------------------------------------------------


def _bytes(part: Any, is_whole: bool) -> bytes:
    head = f"{type(part).__name__} {getattr(part, 'dtype', '')} {list(part.shape)} "
    if _is_table(part):
        return head.encode() + _table_bytes(part)
    seen = part if is_whole else _sample(part)
    if _is_tensor(seen):
        plain = seen.cpu().resolve_conj().resolve_neg().contiguous()
        return head.encode() + bytes(bytes_of(plain))
    if seen.dtype.hasobject:  # its bytes are addresses
        return head.encode()
    return head.encode() + bytes(seen.tobytes())


def _sample(part: Any) -> Any:
    """Some elements, evenly spread: a view that is small, whatever the strides."""
    each = max(2, int(SAMPLE ** (1 / max(1, len(part.shape)))))
    return part[tuple(slice(None, None, -(-size // each) or 1) for size in part.shape)]


def _table_bytes(table: Any) -> bytes:
    pandas = sys.modules["pandas"]
    step = max(1, int(table.size) // SAMPLE // 4)
    rows = table[::step] if table.ndim == 1 else table.iloc[::step]
    return bytes(pandas.util.hash_pandas_object(rows).to_numpy().tobytes())
