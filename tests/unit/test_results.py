"""Results: a mapping from rank to value, and what is put together of them."""

from __future__ import annotations

import copy
import math
import pickle
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from distsession.display.html import Html
from distsession.errors import ResultsError
from distsession.results import RankResults
from distsession.session import Table

LOSSES = RankResults({2: 4.0, 0: 0.5, 1: 1.5})
ROWS = RankResults({0: torch.tensor([1.0, 4.0]), 1: torch.tensor([3.0, 2.0])})


# --- a mapping that is taken for nothing else -----------------------------------------------------


def test_it_maps_ranks_to_values_in_rank_order() -> None:
    assert LOSSES.ranks == (0, 1, 2)
    assert list(LOSSES.values()) == [0.5, 1.5, 4.0]
    assert list(LOSSES.keys()) == [0, 1, 2]
    assert dict(LOSSES.items()) == dict(LOSSES) == {**LOSSES} == {0: 0.5, 1: 1.5, 2: 4.0}
    assert (len(LOSSES), 2 in LOSSES, 3 in LOSSES, LOSSES.get(7, "no")) == (3, True, False, "no")
    assert LOSSES == {0: 0.5, 1: 1.5, 2: 4.0} == RankResults(LOSSES)
    assert pickle.loads(pickle.dumps(LOSSES)) == copy.copy(LOSSES) == LOSSES
    with pytest.raises(KeyError, match=r"rank 3 gave no result; these did: \[0, 1, 2\]"):
        LOSSES[3]


def unpacked(results: Any) -> Any:
    a, b, c = results
    return a, b, c


@pytest.mark.parametrize(
    "use",
    [
        *(sum, max, min, list, tuple, set, sorted, enumerate, unpacked, statistics.mean),
        *(lambda r: [*r], lambda r: dict(zip(r, "abc", strict=False)), lambda r: [x for x in r]),
    ],
)
def test_what_could_mean_ranks_or_values_is_an_error(use: Callable[[Any], Any]) -> None:
    with pytest.raises(ResultsError, match=r"results.values\(\), results.items\(\) or"):
        use(RankResults({1: 0.5, 2: 1.5, 3: 4.0}))


def test_torch_makes_no_tensor_of_ranks() -> None:
    for ranks in ((0, 1), (1, 2)):
        with pytest.raises((TypeError, ValueError, KeyError)):
            torch.tensor(RankResults(dict.fromkeys(ranks, 0.5)))


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor, lambda x: np.array([x])])
def test_what_each_rank_says_of_itself_is_no_truth_of_all(kind: Callable[[bool], Any]) -> None:
    with pytest.raises(ResultsError, match=r"all\(results.values\(\)\)"):
        assert RankResults({0: kind(False), 1: kind(True)})


def test_whether_there_are_results_can_be_asked() -> None:
    assert (LOSSES or {}) is LOSSES
    assert (RankResults({}) or "none") == "none"
    assert pd.Series(LOSSES).to_dict() == dict(LOSSES)
    assert pd.DataFrame(ROWS).shape == (2, 2)


def test_nothing_goes_backwards() -> None:
    with pytest.raises(TypeError):
        reversed(LOSSES)


# --- put together ---------------------------------------------------------------------------------


def test_numbers_are_put_together_over_the_ranks() -> None:
    assert (LOSSES.sum(), LOSSES.mean(), LOSSES.max(), LOSSES.min()) == (6.0, 2.0, 4.0, 0.5)
    assert RankResults({0: True, 1: False, 2: True}).sum() == 2
    assert RankResults({0: 2**70, 1: 1}).sum() == 2**70 + 1


def test_tensors_are_put_together_element_by_element() -> None:
    assert ROWS.sum().tolist() == [4.0, 6.0]
    assert ROWS.mean().tolist() == [2.0, 3.0]
    assert ROWS.max().tolist() == [3.0, 4.0]
    assert ROWS.min().tolist() == [1.0, 2.0]
    assert ROWS.stack().tolist() == [[1.0, 4.0], [3.0, 2.0]]
    assert ROWS.stack(dim=1).tolist() == [[1.0, 3.0], [4.0, 2.0]]
    assert ROWS.cat().tolist() == [1.0, 4.0, 3.0, 2.0]
    counts = RankResults({0: torch.tensor(1), 1: torch.tensor(2)})
    assert counts.mean().item() == 1.5


def test_arrays_and_lists_are_put_together_as_tensors_are() -> None:
    arrays = RankResults({0: np.array([1, 2]), 1: np.array([3, 5])})
    assert arrays.mean().tolist() == [2.0, 3.5]
    assert arrays.stack().tolist() == [[1, 2], [3, 5]]
    assert arrays.cat().tolist() == [1, 2, 3, 5]
    assert RankResults({0: np.float32(1), 1: np.float32(2)}).max() == 2
    assert RankResults({0: ["a"], 1: ["b", "c"]}).cat() == ["a", "b", "c"]


@pytest.mark.parametrize("place", [0, 1])
def test_not_a_number_is_not_lost_among_others(place: int) -> None:
    values = [1.0, 2.0]
    values[place] = math.nan
    for kind in (float, torch.tensor, np.float64):
        found = RankResults(dict(enumerate(map(kind, values))))
        assert math.isnan(float(found.max()))
        assert math.isnan(float(found.min()))


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        ({}, "sum", "sum() has nothing to work on: no rank has given a result."),
        ({0: "a", 1: "b"}, "max", "there are str on ranks 0-1"),
        ({0: {}, 1: 2.0}, "mean", "there are dict on rank 0, numbers on rank 1"),
        ({0: None, 1: None}, "sum", "there are NoneType on ranks 0-1"),
        ({0: 1.0}, "stack", "stack() takes tensors or arrays of all ranks"),
        (
            {0: torch.ones(2), 1: torch.ones(3), 2: torch.ones(3)},
            "stack",
            "stack() takes tensors of one shape, and there are [2] on rank 0, [3] on ranks 1-2",
        ),
        ({0: torch.ones(1), 1: torch.ones(3)}, "mean", "[1] on rank 0, [3] on rank 1"),
        ({0: torch.ones(1), 1: np.ones(1)}, "cat", "tensors on rank 0, arrays on rank 1"),
    ],
)
def test_what_cannot_be_put_together_is_told(
    values: dict[int, Any], name: str, message: str
) -> None:
    with pytest.raises(ResultsError) as caught:
        getattr(RankResults(values), name)()
    assert message in str(caught.value)


# --- for numpy ------------------------------------------------------------------------------------


def test_numpy_takes_the_values() -> None:
    assert np.array(LOSSES).tolist() == [0.5, 1.5, 4.0]
    assert np.asarray(LOSSES, dtype="float32").dtype == np.float32
    assert (np.mean(LOSSES), np.sum(LOSSES), np.max(LOSSES), np.median(LOSSES)) == (2, 6, 4, 1.5)
    assert np.stack([LOSSES, LOSSES]).shape == (2, 3)
    assert np.add(LOSSES, 1).tolist() == [1.5, 2.5, 5.0]
    assert np.mean(ROWS) == 2.5
    assert np.mean(ROWS, axis=0).tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(LOSSES, copy=False)


def test_tensors_that_numpy_does_not_know_arrive_all_the_same() -> None:
    values = {
        0: torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        1: torch.full((2,), 3, dtype=torch.bfloat16),
    }
    assert np.array(RankResults(values)).tolist() == [[1.0, 1.0], [3.0, 3.0]]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert np.array(RankResults({0: conjugate})).tolist() == [[1 - 2j]]


# --- shown ----------------------------------------------------------------------------------------


class Frame:
    """Shows itself as a table."""

    def __init__(self, cell: object):
        self.cell = cell

    def __repr__(self) -> str:
        return "frame"

    def _repr_html_(self) -> str:
        return f"<table><tr><td>{self.cell}</td></tr></table>"


class Picture:
    def _repr_html_(self) -> str:
        raise ValueError("not today")

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return b"\x89PNG", {"width": 3}


def test_tables_stand_side_by_side_and_equal_ones_are_shown_once() -> None:
    shown = RankResults({0: Frame(1), 1: Frame(1), 2: Frame(2), 3: "<text>"})._repr_html_()
    assert shown is not None
    assert shown.count("<table>") == 2
    assert shown.count("<figure") == 3
    assert "ranks 0-1" in shown
    assert "&lt;text&gt;" in shown
    assert "iVBORw==" in str(RankResults({0: Picture()})._repr_html_())


def test_what_is_only_text_has_no_html() -> None:
    assert LOSSES._repr_html_() is None
    assert RankResults({0: Frame})._repr_html_() is None  # the class itself
    assert repr(LOSSES) == "[rank 0] 0.5\n[rank 1] 1.5\n[rank 2] 4.0"
    assert repr(RankResults({})) == "RankResults({})"


def test_a_front_end_that_takes_one_form_gets_the_best() -> None:
    assert LOSSES._mime_() == ("text/plain", repr(LOSSES))
    assert RankResults({0: None, 1: None})._mime_() == ("text/plain", "")
    assert RankResults({})._mime_() == ("text/plain", repr(RankResults({})))
    kind, shown = RankResults({0: Frame(1), 1: Frame(2)})._mime_()
    assert kind == "text/html"
    assert type(shown) is str  # marimo can send nothing else
    assert type(Table("text", Html("<p>text</p>")).bundle()["text/html"]) is str


def test_values_that_only_look_alike_are_told_apart() -> None:
    values = dict(enumerate([torch.tensor(0.5), torch.tensor(0.5), torch.tensor(0.50000006)]))
    results = RankResults(values)
    assert repr(results) == "[ranks 0-2 (text equal, values differ)]\ntensor(0.5000)"
    results.expression = "loss"
    assert repr(results).startswith(
        "[ranks 0-2 (text equal, values differ: %distributed --diff loss)]\n"
    )
    assert repr(RankResults({0: values[0], 1: values[1]})) == "[ranks 0-1] tensor(0.5000)"


def test_tables_that_only_look_alike_are_told_apart() -> None:
    frames = {rank: pd.DataFrame({"a": range(100)}) for rank in range(2)}
    frames[1].loc[50] = -1
    shown = str(RankResults(frames)._repr_html_())
    assert shown.count("<figure") == 1
    assert "ranks 0-1 (text equal, values differ)" in shown
