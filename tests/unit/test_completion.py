"""Completion and inspection by a namespace; nothing of the user's may run."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest
import torch

from distsession.engine.completion import complete, describe, handle_request
from distsession.notebook.completion import RankCode, rank_code
from distsession.protocol.messages import CompletionRequest

RAN: list[str] = []


class Tricky:
    """Runs something whenever it can."""

    kept = 1

    def __init__(self) -> None:
        self.inner = {"a key": 1}

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        RAN.append("dir")
        return []

    def __repr__(self) -> str:
        RAN.append("repr")
        return ""

    @property
    def prop(self) -> int:
        """A property."""
        RAN.append("prop")
        return 1

    def method(self, lr: float, *, momentum: float = 0.9) -> None:
        """Do it."""


def train_one(model: Any, lr: float = 0.1) -> None:
    """Train a model.

    For a while.
    """


NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "os": os,
    "tricky": Tricky(),
    "train_one": train_one,
    "rank": 3,
    "state": {"alpha": {"beta": 1}, "it's": 2},
    "losses": [Tricky()],
    "model": torch.nn.Sequential(torch.nn.Linear(2, 2)),
    "t": torch.ones(2, 3),
    "counts": defaultdict(lambda: RAN.append("default")),
    "named": torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 2)}),
}


def texts(code: str) -> list[str]:
    start, matches = complete(code, NAMESPACE)
    assert 0 <= start <= len(code)
    return [text for text, _ in matches]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("tra", "train_one"),
        ("x = 1\ny = ra", "rank"),
        ("tricky.", "prop"),
        ("tricky.ke", "kept"),
        ("tricky.inner['a", "a key']"),
        ("losses[0].", "method"),
        ("torch.nn.func", "functional"),
        ("torch.nn.functional.rel", "relu"),
        ("model[0].we", "weight"),
        ("model.", "forward"),
        ("named['fc'].bi", "bias"),
        ("state['alpha']['b", "beta']"),
        ('state["it', "it's\"]"),
        ("t.rel", "relu"),
        ("train_one(model, l", "lr="),
        ("tricky.method(1, ", "momentum="),
        ("local_name = 1\nloc", "local_name"),
        ("impo", "import"),
        ("print(le", "len"),
        ("f(torch.ones_l", "ones_like"),
    ],
)
def test_what_is_there_is_offered(code: str, expected: str) -> None:
    RAN.clear()
    assert expected in texts(code)
    assert not RAN


@pytest.mark.parametrize(
    "code",
    [
        "tricky.prop.",
        "counts['x'].",
        "tricky.nothing.",
        "f().",
        "'abc",
        "# tra",
        "nothing.x",
        "1.",
        "state['",
        "",
    ],
)
def test_what_is_not_known_is_not_run(code: str) -> None:
    RAN.clear()
    found = texts(code)
    assert not RAN
    assert code == "state['" or found == []


def test_matches_have_a_type_and_a_place() -> None:
    start, matches = complete("x = torch.nn.Lin", NAMESPACE)
    assert start == len("x = torch.nn.")
    assert ("Linear", "class") in matches
    assert ("prop", "property") in complete("tricky.p", NAMESPACE)[1]
    assert ("rank", "instance") in complete("ran", NAMESPACE)[1]


def test_inspection_gives_signature_and_docstring() -> None:
    RAN.clear()
    text = describe("train_one", NAMESPACE)
    assert "Signature: train_one(model: 'Any', lr: 'float' = 0.1)" in text
    assert "For a while." in text
    assert "float32 [2, 3]" in describe("t", NAMESPACE)
    assert "Value:     3" in describe("rank", NAMESPACE)
    assert "A property." in describe("tricky.prop", NAMESPACE)
    assert "momentum" in describe("losses[0].method", NAMESPACE)
    assert "Type:      Tricky" in describe("tricky", NAMESPACE)
    assert "(input" in describe("model[0]", NAMESPACE).lower()
    assert describe("nothing", NAMESPACE) == ""
    assert describe("1 +", NAMESPACE) == ""
    assert not RAN


def test_an_answer_is_limited() -> None:
    many = {f"name{i}": i for i in range(2000)}
    assert len(handle_request(CompletionRequest(1, "name"), 0, many).matches) == 500


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("%%distributed 0 --out x\na.b|\nc", RankCode("a.b\nc", 3, " 0 --out x")),
        ("%%distributed --o|\nx", None),
        ("%distributed model.|", RankCode("model.", 6)),
        ("x = 1\ny = %distributed --diff mo|", RankCode("mo", 2)),
        ("%dis|tributed model", None),
        ("plain.|", None),
        ("%%time\nx.|", None),
    ],
)
def test_which_part_is_for_the_ranks(cell: str, expected: RankCode | None) -> None:
    assert rank_code(cell.replace("|", ""), cell.index("|")) == expected


def test_plain_cells_are_for_the_ranks_when_they_are_sent_there() -> None:
    assert rank_code("a.b", 2, True) == RankCode("a.b", 2)
    assert rank_code("%%local\na.b", 9, True) is None


def test_only_what_python_can_read_is_offered_behind_a_dot() -> None:
    assert "0" not in [text for text, _ in complete("model.", NAMESPACE)[1]]
    assert "forward" in [text for text, _ in complete("model.", NAMESPACE)[1]]
    held = torch.nn.ModuleDict({"class": torch.nn.ReLU(), "head": torch.nn.ReLU()})
    assert complete("held.", {"held": held})[1][:1] != [("class", "instance")]
    assert "class" not in [text for text, _ in complete("held.c", {"held": held})[1]]
    assert ("head", "instance") in complete("held.h", {"held": held})[1]
