"""Variables of a session beside those of the script that was made of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from distsession.engine import export_check, script

NAN = float("nan")
INF = math.inf


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


def compared(session: Any, found: Any, folder: Path) -> tuple[float, str]:
    export_check.save({"x": session}, ["x", "y"], str(folder))
    script._variables = {"x": found}
    try:
        return export_check.compare(["x"], str(folder))["x"]
    finally:
        script._variables = {}


@pytest.mark.parametrize(
    ("session", "found", "expected"),
    [
        (torch.ones(2), torch.ones(2), (0.0, "")),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), (0.0, "")),
        (torch.tensor([4.0, 1.0]), torch.tensor([5.0, 1.0]), (0.25, "x differs by up to 0.25")),
        (torch.tensor([0.5]), torch.tensor([1.0]), (0.5, "x differs by up to 0.5")),
        (torch.tensor([1.0]), torch.tensor([NAN]), (INF, "x differs by up to inf")),
        (torch.tensor([1]), torch.tensor([3]), (2.0, "x differs by up to 2")),
        (torch.tensor([3j]), torch.tensor([0j]), (1.0, "x differs by up to 1")),
        (
            torch.tensor([True, False]),
            torch.tensor([False, True]),
            (INF, "2 elements of x differ"),
        ),
        (
            torch.ones(2),
            torch.ones(3, dtype=torch.float64),
            (INF, "x is torch.float32 (2,) in the session, torch.float64 (3,) in the script"),
        ),
        (numpy.arange(3), torch.arange(3), (0.0, "")),
        (numpy.float64(2.0), numpy.float64(1.0), (0.5, "x differs by up to 0.5")),
        (1, 1.0, (0.0, "")),
        (NAN, NAN, (0.0, "")),
        (2, 3, (0.5, "x is 2 in the session, 3 in the script")),
        (1.0, NAN, (INF, "x is 1.0 in the session, nan in the script")),
        ("a", "b", (INF, "x is 'a' in the session, 'b' in the script")),
        (None, 0, (INF, "x is None in the session, 0 in the script")),
        ([1, 2], (1, 2), (0.0, "")),
        ([1], [1, 5], (INF, "x[1] is missing in the session, 5 in the script")),
        (list(range(50)), [*range(49), 0], (1.0, "x[49] is 49 in the session, 0 in the script")),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, (0.0, "")),
        ({"a": 1}, {"b": 1}, (INF, "x['a'] is 1 in the session, missing in the script")),
    ],
    ids=str,
)
def test_what_differs_is_told_by_how_much_and_where(
    session: Any, found: Any, expected: tuple[float, str], tmp_path: Path
) -> None:
    assert compared(session, found, tmp_path) == expected


def test_a_module_is_what_its_state_says(tmp_path: Path) -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    other.load_state_dict(one.state_dict())
    assert compared(one, other, tmp_path) == (0.0, "")
    with torch.no_grad():
        one.bias.fill_(1.0)
        other.bias.fill_(2.0)
    assert compared(one, other, tmp_path) == (1.0, "x['bias'] differs by up to 1")


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1


@pytest.mark.parametrize("value", [len, Settings(), [1, {2}], {"a": object()}])
def test_what_cannot_be_compared_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="which cannot be compared: numbers, strings, tensors"):
        export_check.save({"x": value}, ["x"], str(tmp_path))


def test_a_variable_that_only_one_of_them_has_is_named(tmp_path: Path) -> None:
    assert export_check.save({"x": 1}, ["x", "y"], str(tmp_path)) == ["x"]
    assert export_check.compare(["x", "y"], str(tmp_path)) == {
        "x": (INF, "only the session has it")
    }
