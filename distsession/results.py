"""The values that the ranks gave back."""

from __future__ import annotations

import base64
import json
import math
import sys
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from numbers import Number
from typing import Any, Generic, NoReturn, TypeVar

from distsession.display import render
from distsession.display.figures import figures_html
from distsession.display.render import Bundle
from distsession.errors import ResultsError
from distsession.protocol.fingerprint import FINGERPRINT_S, fingerprint
from distsession.ranks import ranks_text

__all__ = ["RankResults"]

T = TypeVar("T")

_RICH = {
    "text/html": "_repr_html_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
}
"""How objects show themselves in a notebook, the best form first."""


class RankResults(Mapping[int, T], Generic[T]):
    """A read-only mapping from rank to value, in rank order.

    ``results[0]`` is rank 0's value whatever ranks took part; ``results.values()`` gives the
    values in rank order. ``mean()``, ``sum()``, ``max()``, ``min()``, ``stack()`` and ``cat()`` put
    the values together, and for numpy it is an array of them.

    What could be meant of the ranks as well as of their values is an error: iteration, and with it
    ``sum(results)``, ``max(results)``, ``list(results)`` and ``a, b = results``. So is the truth of
    results whose values are true or false themselves; else it says whether there are any.

    Attributes:
        duration: Seconds from the call to the last answer.
        durations: For each rank, the seconds that the user's code ran there; empty where none did,
            as in a pull.
        expression: The variable, or part of one, that the values are of; empty if they have been
            computed otherwise.
    """

    def __init__(
        self,
        values: Mapping[int, T],
        *,
        duration: float = 0.0,
        durations: Mapping[int, float] | None = None,
    ):
        self._values = {rank: values[rank] for rank in sorted(values.keys())}
        self.duration = duration
        self.durations = dict(sorted((durations or {}).items()))
        self.expression = ""

    # --- a mapping --------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that answered."""
        return tuple(self._values)

    def __getitem__(self, rank: int) -> T:
        try:
            return self._values[rank]
        except KeyError:
            raise KeyError(f"rank {rank} gave no result; these did: {list(self._values)}") from None

    def __contains__(self, rank: object) -> bool:
        return rank in self._values

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> KeysView[int]:
        """The ranks that answered."""
        return self._values.keys()

    def values(self) -> ValuesView[T]:
        """The values, in rank order."""
        return self._values.values()

    def items(self) -> ItemsView[int, T]:
        """Ranks with their values, in rank order."""
        return self._values.items()

    def __iter__(self) -> NoReturn:
        raise ResultsError(
            "results can be taken for ranks or for their values: write results.values(), "
            "results.items() or results.ranks. results.mean(), .sum(), .max(), .min(), .stack() "
            "and .cat() put the values together."
        )

    def __bool__(self) -> bool:
        if any(map(_is_truth, self._values.values())):
            raise ResultsError(
                "what is true or false on each rank is neither for all of them: write "
                "all(results.values()), any(results.values()) or results[0]."
            )
        return bool(self._values)

    # --- put together -----------------------------------------------------------------------------

    def sum(self) -> Any:
        """The sum over the ranks; of tensors and arrays element by element."""
        return self._reduce("sum")

    def mean(self) -> Any:
        """The mean over the ranks; of tensors and arrays element by element."""
        return self._reduce("mean")

    def max(self) -> Any:
        """The largest over the ranks; of tensors and arrays element by element. NaN wins."""
        return self._reduce("max")

    def min(self) -> Any:
        """The smallest over the ranks; of tensors and arrays element by element. NaN wins."""
        return self._reduce("min")

    def stack(self, dim: int = 0) -> Any:
        """Tensors or arrays of one shape as one, with the ranks as a new dimension."""
        match self._kind("stack", ("tensors", "arrays")):
            case "tensors":
                return sys.modules["torch"].stack(self._listed, dim)
        return sys.modules["numpy"].stack(self._listed, dim)

    def cat(self, dim: int = 0) -> Any:
        """Tensors, arrays or lists as one, in rank order."""
        match self._kind("cat", ("tensors", "arrays", "lists"), alike=False):
            case "tensors":
                return sys.modules["torch"].cat(self._listed, dim)
            case "arrays":
                return sys.modules["numpy"].concatenate(self._listed, dim)
        return [item for part in self._listed for item in part]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The values as one numpy array, with the ranks as its first dimension."""
        if copy is False:
            raise ValueError("the values of several ranks cannot be one array without a copy.")
        values = [_numpy(value) for value in self._listed]
        return sys.modules["numpy"].array(values, dtype=dtype)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return function(*_as_arrays(args), **_as_arrays(kwargs))

    @property
    def _listed(self) -> list[Any]:
        return list(self._values.values())

    def _reduce(self, name: str) -> Any:
        match self._kind(name, ("numbers", "tensors", "arrays")):
            case "tensors":
                return _reduce_tensors(name, self._listed)
            case "arrays":
                return getattr(sys.modules["numpy"].stack(self._listed), name)(0)
        values = self._listed
        return next(filter(_is_nan, values), None) or _REDUCTIONS[name](values)

    def _kind(self, name: str, kinds: Sequence[str], *, alike: bool = True) -> str:
        """What all values are, one of the kinds that a method takes."""
        found = render.fold({rank: _kind(value) for rank, value in self._values.items()})
        if not found:
            raise ResultsError(f"{name}() has nothing to work on: no rank has given a result.")
        if len(found) > 1 or found[0][1] not in kinds:
            raise ResultsError(
                f"{name}() takes {_listing(kinds)} of all ranks, and there are "
                f"{_per_rank(found)}. results.values() has them as they are."
            )
        kind = found[0][1]
        if alike and kind in ("tensors", "arrays"):
            held: Mapping[int, Any] = self._values
            shapes = {rank: str(list(value.shape)) for rank, value in held.items()}
            if len(set(shapes.values())) > 1:
                raise ResultsError(
                    f"{name}() takes {kind} of one shape, and there are "
                    f"{_per_rank(render.fold(shapes))}. results.cat() joins them."
                )
        return kind

    # --- shown ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        shown = {rank: repr(value) for rank, value in self._values.items()}
        return render.fold_text(shown, self._notes(shown)) or "RankResults({})"

    def _notes(self, shown: Mapping[int, str]) -> dict[int, str]:
        """What is said of ranks whose values look the same and are not."""
        end = time.monotonic() + FINGERPRINT_S

        def digest(rank: int) -> str:
            return fingerprint(self._values[rank], max(0.0, end - time.monotonic()))

        groups = [ranks for ranks, _ in render.fold(shown)]
        return render.differing_notes(groups, digest, self.expression)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("RankResults(...)" if cycle else repr(self))

    def _repr_html_(self) -> str | None:
        """Side by side, where there is more to show than text."""
        shown = {rank: _bundle(value) for rank, value in self._values.items()}
        if all(len(data) == 1 for data, _ in shown.values()):
            return None
        keys = {rank: json.dumps(data, sort_keys=True) for rank, (data, _) in shown.items()}
        return str(figures_html(shown, notes=self._notes(keys)))

    def _mime_(self) -> tuple[str, str]:
        """The best form of it, for marimo."""
        if self._values and all(value is None for value in self._values.values()):
            return "text/plain", ""
        as_html = self._repr_html_()
        return ("text/plain", repr(self)) if as_html is None else ("text/html", as_html)

    def _ipython_display_(self) -> None:
        """Show nothing where there is nothing but None, as for any call in a notebook."""
        if not self._values or any(value is not None for value in self._values.values()):
            raise NotImplementedError  # the other methods do it


# --- numbers, tensors, arrays ---------------------------------------------------------------------


def _kind(value: Any) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return "tensors"
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return "arrays"
    if isinstance(value, Number):
        return "numbers"
    return "lists" if isinstance(value, (list, tuple)) else type(value).__name__


def _listing(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _per_rank(found: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{what} on {ranks_text(ranks)}" for ranks, what in found)


def _is_truth(value: Any) -> bool:
    """Whether it says yes or no: a bool, or a tensor or array of one."""
    return isinstance(value, bool) or (
        str(getattr(value, "dtype", "")) in ("bool", "torch.bool") and value.shape in ((), (1,))
    )


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


_REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
}


def _reduce_tensors(name: str, values: list[Any]) -> Any:
    stacked = sys.modules["torch"].stack(values)
    match name:
        case "sum":
            return stacked.sum(0)
        case "mean":
            can = stacked.is_floating_point() or stacked.is_complex()
            return (stacked if can else stacked.double()).mean(0)
    return stacked.amax(0) if name == "max" else stacked.amin(0)


def _numpy(value: Any) -> Any:
    if _kind(value) != "tensors":
        return value
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    try:
        return plain.numpy()
    except TypeError:  # numpy has no such type, such as bfloat16
        return plain.float().numpy()


def _as_arrays(given: Any) -> Any:
    """What numpy was called with, results as arrays."""
    if isinstance(given, RankResults):
        return given.__array__()
    if type(given) in (list, tuple):
        return type(given)(map(_as_arrays, given))
    if type(given) is dict:
        return {name: _as_arrays(value) for name, value in given.items()}
    return given


# --- in a notebook --------------------------------------------------------------------------------


def _bundle(value: Any) -> Bundle:
    """A value as text, and in its best form beside."""
    text = {"text/plain": repr(value)}
    for kind, name in _RICH.items():
        make = getattr(type(value), name, None)
        try:
            data = make(value) if callable(make) else None
        except Exception:  # it is shown as text
            data = None
        if isinstance(data, tuple):
            data = data[0]
        if isinstance(data, bytes):
            data = base64.b64encode(data).decode()
        if isinstance(data, str):
            return {**text, kind: data}, {}
    return text, {}
