"""What a value consists of, so short that ranks can be compared by it.

A rank summarises its value; the notebook compares the summaries and asks for those parts only of
which it wants to know by how much they differ, with ``gap``. torch and numpy are used where they
are loaded. What checks an exported script takes values apart by the same ``flatten``.
"""

from __future__ import annotations

import enum
import hashlib
import io
import math
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from distsession.protocol.tensor_memory import bytes_of

__all__ = ["Form", "Gap", "Leaf", "Part", "Summary", "flatten", "gap", "on_cpu"]

DEPTH = 20
"""How deep attributes and containers are looked into; below that a pickle has to do."""
LEAVES = 200_000
"""How many parts a value may have."""
SERIES = 16
"""Numbers in a list from which on they are one part."""
CHUNK = 1 << 22
"""Elements that are compared at a time."""

_PLAIN = (bool, int, float, complex)


@dataclass(frozen=True)
class Leaf:
    """One part of a value.

    Attributes:
        kind: What has to be the same for a difference to be a number, such as
            ``"float32 [3, 4]"``; for others the name of the type.
        digest: The same where the parts are the same.
        text: The value itself, if it is short.
        size: Bytes of it; 0 where no difference can be computed.
        is_container: It only says what kind of thing holds the parts below it.
    """

    kind: str
    digest: str = ""
    text: str = ""
    size: int = 0
    is_container: bool = False


@dataclass(frozen=True)
class Gap:
    """By how much two parts differ.

    Attributes:
        largest: The largest difference; infinite where a number stands against a NaN.
        index: Where that is.
        count: How many elements differ.
        total: How many there are.
    """

    largest: float
    index: tuple[int, ...]
    count: int
    total: int


class Form(enum.Enum):
    """What a part is."""

    PLAIN = "a tensor, an array, a number, a text or None"
    SERIES = "a long list of numbers"
    CONTAINER = "what holds the parts below it"
    OPAQUE = "anything else"
    CYCLE = "a container that it is within"


class Part(NamedTuple):
    """One part of a value.

    Attributes:
        path: Where it is, such as ``['fc.weight']``.
        value: The part itself.
        form: What it is.
        above: Of a cycle, which of the containers above it is meant; 0 is the outermost.
    """

    path: str
    value: Any
    form: Form
    above: int = 0


class Summary:
    """The parts of one value, by path such as ``['fc.weight']``.

    Args:
        value: Any. Nothing of it is copied; it is to stay as it is while this is used.
    """

    def __init__(self, value: Any):
        self.leaves: dict[str, Leaf] = {}
        self._values: dict[str, Any] = {}
        for part in flatten(value):
            leaf = _leaf(part)
            if len(self.leaves) == LEAVES:
                raise TypeError(
                    f"it has more than {LEAVES} parts: compare a part of it, or put numbers into "
                    "a tensor or an array."
                )
            self.leaves[part.path] = leaf
            if leaf.size:
                self._values[part.path] = part.value

    def values(self, paths: Sequence[str]) -> dict[str, Any]:
        """Parts themselves, on the CPU."""
        return {path: on_cpu(self._values[path]) for path in paths if path in self._values}


def flatten(
    value: Any,
    path: str = "",
    *,
    attributes: bool = True,
    series: bool = True,
    above: tuple[int, ...] = (),
) -> Iterator[Part]:
    """The parts of a value, outermost first.

    Args:
        value: Any. Nothing of it is copied.
        path: Where it is.
        attributes: Look into other objects by what they store.
        series: Give a long list of numbers as one part.
        above: The ids of the containers that it is within.
    """
    if id(value) in above:
        yield Part(path, value, Form.CYCLE, above.index(id(value)))
    elif _is_plain(value):
        yield Part(path, value, Form.PLAIN)
    elif series and _is_series(value):
        yield Part(path, value, Form.SERIES)
    else:
        children = None if len(above) >= DEPTH else _children(value, attributes)
        yield Part(path, value, Form.OPAQUE if children is None else Form.CONTAINER)
        for step, child in children or ():
            yield from flatten(
                child,
                path + step,
                attributes=attributes,
                series=series,
                above=(*above, id(value)),
            )


def _is_plain(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return not value.dtype.hasobject
    return value is None or isinstance(value, (str, bytes, *_PLAIN))


def _is_series(value: Any) -> bool:
    is_long = type(value) in (list, tuple) and len(value) > SERIES
    return is_long and all(type(item) in (int, float) for item in value)


def _children(value: Any, attributes: bool) -> list[tuple[str, Any]] | None:
    """What a container or an object holds; None where one cannot look into it."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, type):
        return None
    if callable(getattr(type(value), "state_dict", None)):
        return _children(value.state_dict(), attributes)
    if not attributes:
        return None
    kind = type(value)
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__")
    is_usual = not hasattr(kind, "__slots__") and all(
        getattr(kind, hook, None) is getattr(object, hook, None) for hook in hooks
    )
    if is_usual and isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        return [(f".{name}", item) for name, item in vars(value).items()]
    return None


def _leaf(part: Part) -> Leaf:
    """What a part is like."""
    value, name = part.value, _type_name(part.value)
    match part.form:
        case Form.PLAIN:
            return _plain_leaf(value)
        case Form.SERIES:
            text = repr(value).encode()
            return Leaf(f"{name} of {len(value)} numbers", _digest(text), "", len(text))
        case Form.CONTAINER:
            return Leaf(name, name, is_container=True)
        case Form.CYCLE:
            return Leaf("what it is part of", f"{part.above}")
    return _opaque_leaf(value)


def _plain_leaf(value: Any) -> Leaf:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_leaf(value)
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        data = numpy.ascontiguousarray(value)
        is_number = value.dtype.kind in "biufc"
        return Leaf(
            f"array {value.dtype} {list(value.shape)}",
            _digest(data.tobytes()),
            _short(value) if value.size == 1 else "",
            max(1, value.nbytes) if is_number and value.size else 0,
        )
    size = 8 if isinstance(value, _PLAIN) else 0
    return Leaf(_type_name(value), _digest(repr(value).encode()), _short(value), size)


def _tensor_leaf(value: Any) -> Leaf:
    import torch

    part = " local part" if hasattr(value, "to_local") else ""
    kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{part}"
    if value.is_meta:
        return Leaf(f"{kind} without data")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return Leaf(f"{kind} {value.layout}", _digest(repr(value).encode()))
    data = on_cpu(value)
    if part:
        kind = f"{kind} {list(data.shape)}"
    digest = _digest(bytes_of(data.contiguous()))
    text = _short(data.item()) if data.numel() == 1 else ""
    return Leaf(kind, digest, text, data.numel() * data.element_size())


def on_cpu(value: Any) -> Any:
    """A part, with the data of a tensor as this process has them; others as they are."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.detach().cpu().resolve_conj().resolve_neg()
    return value


# --- others ---------------------------------------------------------------------------------------


class _DigestPickler(pickle.Pickler):
    """Pickles the same for the same value: tensors without where they are, nothing by reference."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            leaf = _tensor_leaf(obj)
            return str, (repr(leaf),)
        if isinstance(obj, Set):
            return str, (repr(sorted(_pickled(item) for item in obj)),)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    target = io.BytesIO()
    pickler = _DigestPickler(target, protocol=5)
    pickler.fast = True
    pickler.dump(value)
    return target.getvalue()


def _opaque_leaf(value: Any) -> Leaf:
    """Compared by its pickle; where it has none, by what it prints as."""
    text = re.sub(r" at 0x[0-9a-f]+", "", _safe_repr(value))
    try:
        digest = _digest(_pickled(value))
    except Exception:
        digest = _digest(text.encode(errors="replace"))
    return Leaf(_type_name(value), digest, _short(text, quote=False))


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{_type_name(value)} whose repr raises {type(error).__name__}>"


def _short(value: Any, *, quote: bool = True) -> str:
    text = " ".join((repr(value) if quote else str(value)).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _type_name(value: Any) -> str:
    return type(value).__name__


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- by how much ----------------------------------------------------------------------------------


def gap(first: Any, second: Any, *, relative: bool = False) -> Gap:
    """By how much two parts differ that are of the same kind.

    Args:
        first: A tensor, an array, a number, or a list of numbers.
        second: The same of another rank, or of another time.
        relative: Divide each difference by what is in ``first``, if that is more than one.
    """
    import torch

    a, b = (v if isinstance(v, torch.Tensor) else torch.as_tensor(v) for v in (first, second))
    shape = a.shape
    a, b = a.reshape(-1), b.reshape(-1)
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest, at, count = -1.0, 0, 0
    for start in range(0, a.numel(), CHUNK):
        x, y = (t[start : start + CHUNK].to(wide) for t in (a, b))
        same = (x == y) | (x.isnan() & y.isnan())
        count += int((~same).sum())
        apart = (x - y).abs()
        if relative:
            apart = apart / x.abs().clamp(min=1.0)
        apart = torch.where(same, 0.0, apart).nan_to_num(math.inf, posinf=math.inf)
        worst = int(apart.argmax())
        if float(apart[worst]) > largest:
            largest, at = float(apart[worst]), start + worst
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), shape)) if shape else ()
    return Gap(max(largest, 0.0), index, count, a.numel())
