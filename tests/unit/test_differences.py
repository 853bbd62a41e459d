"""Texts that differ in some words, as one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.display.differences import MAX_LINES, MAX_PLACES, merge_texts


@pytest.mark.parametrize(
    ("texts", "merged", "differing"),
    [
        (("same", "same"), "same", ({}, {})),
        (("bad 17 in 3", "bad 18 in 3"), "bad <a> in 3", ({"a": "17"}, {"a": "18"})),
        (("'k'", "'l'"), "<a>", ({"a": "'k'"}, {"a": "'l'"})),
        (
            ("12.5 MiB of GPU 0, 3 free", "1.20 GiB of GPU 1, 3 free"),
            "<a> of GPU <b>, 3 free",
            ({"a": "12.5 MiB", "b": "0"}, {"a": "1.20 GiB", "b": "1"}),
        ),
        (("a b", "a b c"), "<a>", ({"a": "a b"}, {"a": "a b c"})),
        (("", "x"), "<a>", ({"a": ""}, {"a": "x"})),
        (("on\n1 line", "on\n2 line"), "on\n<a> line", ({"a": "1"}, {"a": "2"})),
    ],
)
def test_words_that_differ_are_told_apart(texts, merged, differing) -> None:
    found = merge_texts({rank: (text,) for rank, text in enumerate(texts)})
    assert found.texts == (merged,)
    assert tuple(found.differing.values()) == differing


def test_letters_go_on_from_text_to_text() -> None:
    found = merge_texts({2: ("x 1", "same", "y 3"), 5: ("x 2", "same", "y 4")})
    assert found.texts == ("x <a>", "same", "y <b>")
    assert found.differing == {2: {"a": "1", "b": "3"}, 5: {"a": "2", "b": "4"}}


def test_of_long_texts_that_differ_all_over_one_is_given_whole() -> None:
    one, other = (" same ".join(f"{rank}{n}" for n in range(200)) for rank in "ab")
    found = merge_texts({0: (one,), 1: (other,), 2: (one,)})
    assert found.texts == (one,)
    assert found.differing == {0: {}, 1: {}, 2: {}}
    assert found.instead == {0: [], 1: [other], 2: []}
    assert MAX_PLACES < 200


def test_of_texts_of_lines_those_are_told_that_differ() -> None:
    texts = "in:\n\tmissing: a\n\tother: x y", "in:\n\tmissing: a, b c", "in:\n\tother: x y"
    found = merge_texts({rank: (text,) for rank, text in enumerate(texts)})
    assert found.texts == texts[:1]
    assert found.instead == {0: [], 1: ["missing: a, b c"], 2: ["(not: missing: a)"]}


def test_of_very_many_lines_the_first_and_the_last_are_told() -> None:
    found = merge_texts({0: ("one\ntext of it",), 1: ("\n".join(map(str, range(1000))),)})
    assert found.instead[1][0] == "0"
    assert found.instead[1][-1] == "999"
    assert f"({1000 - MAX_LINES} more lines)" in found.instead[1]


words = st.lists(st.sampled_from(["a", "b", "1", "2"]), max_size=6).map(" ".join)


@given(st.dictionaries(st.integers(0, 9), words, min_size=1))
def test_each_text_can_be_put_together_again(by_rank: dict[int, str]) -> None:
    found = merge_texts({rank: (text,) for rank, text in by_rank.items()})
    for rank, text in by_rank.items():
        differing = found.differing[rank]
        assert re.sub("<(.)>", lambda m, d=differing: d[m[1]], found.texts[0]) == text
