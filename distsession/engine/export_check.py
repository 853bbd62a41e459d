"""Named variables of a session and of a script, compared.

Values are compared where they are: nothing has to pass through the kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distsession.engine import script

__all__ = ["compare", "save"]

DIFFERENT = math.inf


def save(variables: Mapping[str, Any], names: Sequence[str], folder: str) -> list[str]:
    """Save variables of this rank, for :func:`compare`; gives the names that are there."""
    import torch

    values = {name: _leaves(name, variables[name]) for name in names if name in variables}
    torch.save({name: dict(leaves) for name, leaves in values.items()}, _path(folder))
    return list(values)


def compare(names: Sequence[str], folder: str) -> dict[str, tuple[float, str]]:
    """Compare variables of the script that ran here with what the session's rank saved.

    Returns:
        For each name the largest difference relative to the session's value (infinite where two
        values cannot be subtracted), and where and what it is.
    """
    import torch

    expected = torch.load(_path(folder), weights_only=False)
    found = script.variables()
    result = {}
    for name in names:
        if name not in expected or name not in found:
            if name in expected or name in found:
                where = "session" if name in expected else "script"
                result[name] = (DIFFERENT, f"only the {where} has it")
            continue
        theirs, ours = expected[name], dict(_leaves(name, found[name]))
        differences = [
            _difference(at, theirs.get(at, _Missing), ours.get(at, _Missing))
            for at in {**theirs, **ours}
        ]
        result[name] = max(differences, key=lambda each: each[0], default=(0.0, ""))
    return result


class _Missing:
    pass


def _path(folder: str) -> str:
    return os.path.join(folder, f"rank{os.environ['RANK']}")


def _leaves(at: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values that a value consists of, each with where it is.

    Raises:
        TypeError: There is something else in it.
    """
    import torch

    if isinstance(value, torch.Tensor):
        local = getattr(value, "to_local", None)
        yield at, (local() if local is not None else value).detach().cpu().clone()
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        yield at, torch.as_tensor(value)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield at, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{at}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        yield f"len({at})", len(value)
        for index, item in enumerate(value):
            yield from _leaves(f"{at}[{index}]", item)
    elif callable(getattr(value, "state_dict", None)):
        yield from _leaves(at, value.state_dict())
    else:
        raise TypeError(
            f"{at} is a {type(value).__name__}, which cannot be compared: numbers, strings, "
            "tensors, arrays, lists and dictionaries of these, and what has a state_dict() can."
        )


def _difference(at: str, theirs: Any, ours: Any) -> tuple[float, str]:
    import torch

    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (theirs, ours)]
            return DIFFERENT, f"{at} is {kinds[0]} in the session, {kinds[1]} in the script"
        if torch.equal(theirs, ours):
            return 0.0, ""
        if theirs.dtype is torch.bool:
            return DIFFERENT, f"{int((theirs != ours).sum())} elements of {at} differ"
        wide = torch.complex128 if theirs.is_complex() else torch.float64
        a, b = theirs.to(wide), ours.to(wide)
        gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        gap = gap / a.abs().clamp(min=1.0)
        worst = float(gap.nan_to_num(DIFFERENT).max())
        return worst, f"{at} differs by up to {worst:.3g}" if worst else ""
    numbers = (bool, int, float, complex)
    if isinstance(theirs, numbers) and isinstance(ours, numbers):
        if theirs == ours or (theirs != theirs and ours != ours):
            return 0.0, ""
        share = float(abs(theirs - ours) / max(1.0, abs(theirs)))
        return (DIFFERENT if math.isnan(share) else share), (
            f"{at} is {theirs!r} in the session, {ours!r} in the script"
        )
    if type(theirs) is type(ours) and theirs == ours:
        return 0.0, ""
    texts = ["missing" if v is _Missing else repr(v)[:60] for v in (theirs, ours)]
    return DIFFERENT, f"{at} is {texts[0]} in the session, {texts[1]} in the script"
