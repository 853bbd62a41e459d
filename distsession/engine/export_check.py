"""Named variables of a session and of a script, compared.

Values are compared where they are: nothing has to pass through the kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distsession.engine import script
from distsession.engine.diff import Form, flatten, gap, on_cpu

if TYPE_CHECKING:
    import torch

__all__ = ["compare", "save"]

DIFFERENT = math.inf


def save(variables: Mapping[str, Any], names: Sequence[str], folder: str) -> list[str]:
    """Save variables of this rank, for :func:`compare`; gives the names that are there."""
    import torch

    values = {name: _parts(name, variables[name]) for name in names if name in variables}
    torch.save(values, _path(folder))
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
        theirs, ours = expected[name], _parts(name, found[name])
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


def _parts(name: str, value: Any) -> dict[str, Any]:
    """The plain values that a value consists of, by where they are.

    Raises:
        TypeError: There is something else in it.
    """
    import torch

    found: dict[str, Any] = {}
    for part in flatten(value, name, attributes=False, series=False):
        if part.form is Form.CONTAINER:
            if isinstance(part.value, (list, tuple)):
                found[f"len({part.path})"] = len(part.value)
        elif part.form is not Form.PLAIN:
            raise TypeError(
                f"{part.path} is a {type(part.value).__name__}, which cannot be compared: "
                "numbers, strings, tensors, arrays, lists and dictionaries of these, and what has "
                "a state_dict() can."
            )
        elif isinstance(part.value, torch.Tensor):
            found[part.path] = on_cpu(part.value).clone()
        elif type(part.value).__module__ == "numpy":
            found[part.path] = torch.as_tensor(part.value)
        else:
            found[part.path] = part.value
    return found


def _difference(at: str, theirs: Any, ours: Any) -> tuple[float, str]:
    import torch

    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        return _tensor_difference(at, theirs, ours)
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


def _tensor_difference(at: str, theirs: torch.Tensor, ours: torch.Tensor) -> tuple[float, str]:
    import torch

    if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
        kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (theirs, ours)]
        return DIFFERENT, f"{at} is {kinds[0]} in the session, {kinds[1]} in the script"
    if torch.equal(theirs, ours):
        return 0.0, ""
    found = gap(theirs, ours, relative=True)
    if theirs.dtype is torch.bool:
        return DIFFERENT, f"{found.count} elements of {at} differ"
    worst = found.largest
    return worst, f"{at} differs by up to {worst:.3g}" if worst else ""
