"""Comparing a value over ranks: summaries, and what is said of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from distsession.engine.diff import CHUNK, Summary, gap
from distsession.kernel.diff import Comparison, compare


def compared(*values: Any) -> Comparison:
    summaries = {rank: Summary(value) for rank, value in enumerate(values)}
    leaves = {rank: summary.leaves for rank, summary in summaries.items()}

    def parts(ranks: list[int], paths: list[str]) -> dict[int, dict[str, Any]]:
        return {rank: summaries[rank].values(paths) for rank in ranks}

    return compare("x", leaves, parts)


class Plain:
    def __init__(self, a: Any):
        self.a = a
        self.me = self


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).reshape(2, 3),
        lambda: torch.zeros(0),
        lambda: torch.ones(3, dtype=torch.bfloat16)[::2],
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nn.Linear(2, 2, bias=False).requires_grad_(False).weight.fill_(1),
        lambda: np.arange(3),
        lambda: np.array(["a", None], dtype=object),
        lambda: np.float32(3),
        lambda: math.nan,
        lambda: [1, "two", (3.0, None), {"k": b"x"}],
        lambda: {},
        lambda: list(range(1000)),
        lambda: OrderedDict(w=torch.ones(2)),
        lambda: {"a", "b", "c"},
        lambda: Plain(torch.ones(2)),
        lambda: lambda: 1,
        lambda: torch.float32,
        lambda: slice(1, 2),
    ],
)
def test_what_is_made_alike_is_equal(make: Any) -> None:
    found = compared(make(), make(), make())
    assert found.equal, found
    assert found.groups == ((0, 1, 2),)
    assert found.differences == ()
    assert "x is equal on ranks 0-2" in repr(found)


@pytest.mark.parametrize(
    ("first", "second", "text", "largest"),
    [
        (torch.zeros(3), torch.tensor([0, 0.5, -2]), "by up to 2 at [2] (2 of 3 elements)", 2.0),
        (torch.zeros(2, 2), torch.eye(2), "at [0, 0] (2 of 4 elements)", 1.0),
        (torch.zeros(2), torch.zeros(3), "float32 [3] instead of float32 [2]", None),
        (torch.zeros(2), torch.zeros(2).double(), "float64 [2] instead of float32 [2]", None),
        (torch.zeros(1), torch.tensor([math.nan]), "by inf", math.inf),
        (torch.zeros(2), -torch.zeros(2), "by bits only", 0.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), "(1 of 2", 1.0),
        (np.arange(3), np.arange(3) * 2, "by up to 2 at [2]", 2.0),
        (1.5, 2.0, "2.0 instead of 1.5, by 0.5", 0.5),
        (1, 1.0, "float 1.0 instead of int 1", None),
        (list(range(50)), [*range(49), 0], "by up to 49 at [49] (1 of 50", 49.0),
        ("a", "b", "str 'b' instead of 'a'", None),
        ([1, 2], [1, 2, 3], "[2] is there; rank 0 does not have it", None),
        ({"a": 1, "b": 2}, {"a": 1}, "['b'] is missing; rank 0 has it", None),
        ({}, [], "list instead of dict", None),
        ({"a", "b"}, {"a", "c"}, "set {'", None),
        (Plain(1), Plain(2), ".a 2 instead of 1, by 1", 1.0),
        (None, 0, "int 0 instead of NoneType None", None),
    ],
)
def test_a_difference_says_how(first: Any, second: Any, text: str, largest: Any) -> None:
    found = compared(first, second)
    assert not found.equal
    assert found.groups == ((0,), (1,))
    assert text in repr(found)
    if largest is not None:
        assert found.differences[0].largest == largest


def test_ranks_that_agree_are_together_and_parts_have_paths() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(4)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[2][1].bias += 0.25
    found = compared(*models)
    assert found.groups == ((0, 1, 3), (2,))
    assert [d.path for d in found.differences] == ["['1.bias']"]
    assert found.differences[0].largest == pytest.approx(0.25)
    head = "x: rank 2 differs from rank 0 in 1 of 4 parts; ranks 0-1,3 agree"
    assert repr(found).splitlines()[0] == head
    assert "<code>['1.bias']</code>" in found._repr_html_()


def test_ranks_that_differ_each_in_its_own_way_are_named_together() -> None:
    assert repr(compared(0, 1, 2, 3)).splitlines()[0] == "x: ranks 1-3 differ from rank 0"
    head = "x: ranks 1-2, ranks 3-4 differ from rank 0; ranks 1-2 agree"
    assert repr(compared(0, 7, 7, 3, 4)).splitlines()[0] == head
    assert repr(compared(0, 1)).splitlines()[0] == "x: rank 1 differs from rank 0"


def test_many_differences_are_counted_and_markup_is_escaped() -> None:
    found = compared({f"<{i}>": i for i in range(30)}, {f"<{i}>": i + 1 for i in range(30)})
    assert len(found.differences) == 30
    assert "and 10 more" in repr(found)
    assert "<0>" not in found._repr_html_()


def test_what_is_large_is_compared_in_pieces() -> None:
    a = torch.zeros(CHUNK + 10)
    b = a.clone()
    b[CHUNK + 3] = 7
    b[2] = 1
    assert gap(a, b) == gap(a.reshape(1, -1)[0], b)
    assert gap(a, b).index == (CHUNK + 3,)
    assert gap(a, b).count == 2


def test_too_many_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distsession.engine.diff.LEAVES", 5)
    with pytest.raises(TypeError, match="more than 5 parts"):
        Summary(["a"] * 10)
