"""A hash of what a value's text leaves out."""

from __future__ import annotations

import time
import types
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from distsession.protocol.cells import name_of_value
from distsession.protocol.fingerprint import fingerprint


def large(spoilt: int | None = None) -> torch.Tensor:
    tensor = torch.zeros(1 << 20)
    if spoilt is not None:
        tensor[spoilt] = 1
    return tensor


class Holder:
    def __init__(self, held: Any):
        self.held = held
        self.itself = self


class Silent(torch.nn.Module):
    def __init__(self, number: float):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False)])
        torch.nn.init.constant_(self.layers[0].weight, number)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this may be a collective")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(0.5), torch.tensor(0.50000006)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (large(), large(spoilt=500_000)),
        ({"a": [torch.zeros(1)]}, {"a": [torch.ones(1)]}),
        (Silent(0.0), Silent(1e-9)),
        (Holder(torch.zeros(1)), Holder(torch.ones(1))),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
        (np.zeros(3), np.full(3, 1e-12)),
        (np.float32(0.1), np.float32(0.10000001)),
        (pd.DataFrame({"a": range(1000)}), pd.DataFrame({"a": [*range(999), 0]})),
        (pd.Series(["a"] * 100), pd.Series(["a"] * 99 + ["b"])),
    ],
)
def test_values_that_differ_have_other_hashes(one: Any, other: Any) -> None:
    assert fingerprint(one, 10) != fingerprint(other, 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(9.0).reshape(3, 3).t(),
        lambda: torch.arange(4, dtype=torch.bfloat16),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: torch.ones(0, 3),
        lambda: Silent(0.25),
        lambda: {"a": torch.ones(2), "b": np.ones(2)},
        lambda: np.array([object(), "a"], dtype=object),
        lambda: pd.DataFrame({"a": ["x", None], "b": [1.5, 2]}),
    ],
)
def test_equal_values_have_equal_hashes(make: Any) -> None:
    assert fingerprint(make(), 10) == fingerprint(make(), 10) != ""


@pytest.mark.parametrize(
    "value",
    [
        *(3, "text", None, [1, 2.5], {"a": 1}, Silent, torch, len),
        *(torch.empty(2, device="meta"), torch.eye(2).to_sparse()),
    ],
)
def test_nothing_is_said_of_what_has_no_numbers_behind_its_text(value: Any) -> None:
    assert fingerprint(value) == ""


def test_what_is_sharded_differs_by_intention() -> None:
    part = torch.zeros(1)
    part.placements = [types.SimpleNamespace(is_replicate=lambda: False)]  # type: ignore[attr-defined]
    assert fingerprint(part) == ""
    part.placements = [types.SimpleNamespace(is_replicate=lambda: True)]  # type: ignore[attr-defined]
    part._local_tensor = torch.ones(1)  # type: ignore[attr-defined]
    assert fingerprint(part) == fingerprint(torch.ones(1))


def test_it_ends_when_its_time_is_over() -> None:
    class Endless(list[Any]):
        def __iter__(self) -> Any:
            while True:
                yield [torch.ones(1)]

    began = time.monotonic()
    assert fingerprint(Endless(), 0.02) == ""
    assert time.monotonic() - began < 5
    assert fingerprint(torch.ones(1), 0.0) == ""


def test_of_what_is_huge_some_elements_are_looked_at() -> None:
    huge = torch.zeros(1).expand(1 << 40)
    assert fingerprint(huge, 10) == fingerprint(torch.zeros(1).expand(1 << 40), 10) != ""
    assert fingerprint(huge, 10) != fingerprint(torch.ones(1).expand(1 << 40), 10)
    assert fingerprint(huge.reshape(1 << 20, 1 << 20), 10) != ""


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x", "x"),
        ("a = 1\nmodel.fc['weight'][0]  # look", "model.fc['weight'][0]"),
        ("m = make(); m", "m"),
        ("# %%distributed\nm\n\n", "m"),
        ("step()", ""),
        ("x + 1", ""),
        ("3", ""),
        ("x = 3", ""),
        ("%time x", ""),
        ("f(\n  x)", ""),
        ("", ""),
    ],
)
def test_what_is_shown_has_a_name_or_has_none(source: str, name: str) -> None:
    assert name_of_value(source) == name
