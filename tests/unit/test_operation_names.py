"""What is written on the board as text is read again as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.protocol.operation_names import WORLD, AnySource, Pair, SplitSizes

ranks = st.integers(0, 4096)
tags = st.integers(0, 2**31)


@given(
    st.sampled_from((WORLD, "group tp (ranks 0-3)", "group a->b (ranks 0,2)", "group 7 tag 3")),
    st.none() | ranks,
    ranks,
    tags,
)
def test_a_pair_is_read_from_its_name(
    group: str, source: int | None, target: int, tag: int
) -> None:
    pair = Pair(group, source, target, tag)
    assert Pair.from_name(pair.name) == pair


@pytest.mark.parametrize("name", [WORLD, "group tp (ranks 0-3)", "", "group a->b (ranks 0,2)"])
def test_a_group_is_no_pair(name: str) -> None:
    assert Pair.from_name(name) is None


@given(tags)
def test_a_receive_from_any_rank_is_read_from_its_description(tag: int) -> None:
    assert AnySource.from_description(AnySource(tag).description) == AnySource(tag)


@given(st.lists(ranks), st.lists(ranks))
def test_sizes_are_read_from_the_end_of_a_description(send: list[int], receive: list[int]) -> None:
    sizes = SplitSizes(tuple(send), tuple(receive))
    text = f"all_to_all float32 [4], {sizes.description}"
    assert SplitSizes.from_description(text) == sizes


def test_other_descriptions_say_neither() -> None:
    assert SplitSizes.from_description("all_reduce float32 [4], sum") is None
    assert AnySource.from_description("float32 [4], from rank 1") is None
