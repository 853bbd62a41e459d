"""Naming ranks: in brackets, in a magic, in messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.errors import OptionsError
from distsession.ranks import (
    DeviceInfo,
    Host,
    RankInfo,
    format_ranks,
    host_names,
    hosts_of,
    parse_ranks,
    select_hosts,
    select_ranks,
)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 2], "0,2"),
        ([0, 1, 2, 5], "0-2,5"),
        ([5, 2, 1, 0, 5], "0-2,5"),
    ],
)
def test_ranks_are_written_the_short_way(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_what_is_written_reads_back_as_the_same_ranks(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks), 201) == tuple(sorted(ranks))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", (0,)),
        ("-1", (3,)),
        ("1-3", (1, 2, 3)),
        ("1:", (1, 2, 3)),
        (":2", (0, 1)),
        (":", (0, 1, 2, 3)),
        ("::2", (0, 2)),
        ("-2:", (2, 3)),
        ("0, 2", (0, 2)),
        ("[0,2]", (0, 2)),
        ("3,0-1,0", (0, 1, 3)),
    ],
)
def test_ranks_can_be_typed_as_numbers_spans_and_slices(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize("text", ["", "all", "0,,2", "1-", "a:b", "1.0", "::0", "0:1:2:3"])
def test_text_that_names_no_ranks_is_refused_with_examples(text: str) -> None:
    with pytest.raises(OptionsError, match="does not name ranks: write 0, 0,2, 1-3") as refused:
        parse_ranks(text, 4)
    assert repr(text) in str(refused.value)


@given(st.text(max_size=8))
def test_typed_text_gives_ranks_of_the_world_or_an_options_error(text: str) -> None:
    try:
        ranks = parse_ranks(text, 4)
    except OptionsError:
        return
    assert ranks
    assert set(ranks) <= {0, 1, 2, 3}


@given(st.integers(1, 50), st.data())
def test_brackets_choose_ranks_as_they_choose_items_of_a_list(
    world_size: int, data: st.DataObject
) -> None:
    world = list(range(world_size))
    bound = st.none() | st.integers(-60, 60)
    step = st.none() | st.integers(1, 5) | st.integers(-5, -1)
    chosen = slice(data.draw(bound), data.draw(bound), data.draw(step))
    if world[chosen]:
        assert select_ranks(chosen, world_size) == tuple(sorted(world[chosen]))
    else:
        with pytest.raises(OptionsError, match="chooses none"):
            select_ranks(chosen, world_size)
    number = data.draw(st.integers(-world_size, world_size - 1))
    assert select_ranks(number, world_size) == (world[number],)


def test_a_list_may_repeat_and_mix_and_comes_out_in_rank_order() -> None:
    assert select_ranks([3, 0, -1, 0], 4) == (0, 3)
    assert select_ranks((2,), 4) == (2,)
    assert select_ranks(range(1, 3), 4) == (1, 2)


@pytest.mark.parametrize("selector", [4, -5, [0, 4], [-5], range(5)])
def test_a_rank_outside_the_world_is_refused(selector: object) -> None:
    with pytest.raises(OptionsError, match=r"there is no rank (4|-5): .* ranks 0 to 3"):
        select_ranks(selector, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("selector", [[], (), slice(2, 2), slice(4, None)])
def test_a_selection_of_no_rank_is_refused(selector: object) -> None:
    with pytest.raises(OptionsError, match="chooses none of the 4 ranks"):
        select_ranks(selector, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("selector", [1.0, None, "1", [1.0], ["0"], [True], [None], [[0]]])
def test_what_is_no_rank_is_refused(selector: object) -> None:
    with pytest.raises(OptionsError, match="a number, a slice or a list of numbers") as refused:
        select_ranks(selector, 4)  # type: ignore[arg-type]
    assert repr(selector) in str(refused.value)


# --- hosts ----------------------------------------------------------------------------------------

HOSTS = (Host("gpu1", 0, (0, 1)), Host("gpu2", 1, (2,)), Host("0", 2, (3,)))


def test_hosts_are_in_the_order_of_their_nodes(rank_info: Callable[..., RankInfo]) -> None:
    gpu = [DeviceInfo(f"cuda:{number}", "H200") for number in range(2)]
    infos = [
        rank_info(0, host="b", nodes=2, node_rank=0, device=gpu[0]),
        rank_info(1, host="b", nodes=2, node_rank=0, device=gpu[1]),
        rank_info(2, host="a", nodes=2, node_rank=1),
    ]
    assert hosts_of(infos, lambda node: f"10.0.0.{node}") == (
        Host("b", 0, (0, 1), ("cuda:0 (H200)", "cuda:1 (H200)"), "10.0.0.0"),
        Host("a", 1, (2,), (), "10.0.0.1"),
    )
    assert host_names(infos) == {0: "b", 1: "b", 2: "a"}
    assert host_names([rank_info(0), rank_info(1)]) == {}
    assert hosts_of([], str) == ()


def test_hosts_of_one_name_are_told_by_their_nodes(rank_info: Callable[..., RankInfo]) -> None:
    infos = [rank_info(rank, host="same", nodes=2, node_rank=rank) for rank in range(2)]
    assert [host.name for host in hosts_of(infos, lambda node: "")] == ["node0", "node1"]


@pytest.mark.parametrize(
    ("wanted", "ranks"),
    [
        (("gpu2",), (2,)),
        (("gpu2", "gpu1"), (0, 1, 2)),
        ((1,), (2,)),
        (("1",), (2,)),
        (("0",), (3,)),
        (("gpu2", 1), (2,)),
    ],
)
def test_hosts_are_named_or_numbered(wanted: tuple[Any, ...], ranks: tuple[int, ...]) -> None:
    assert select_hosts(wanted, HOSTS) == ranks


@pytest.mark.parametrize("wanted", [("gpu3",), (3,), (-1,), (True,), ("gpu1", "x"), (None,), ("",)])
def test_a_host_that_is_not_there_is_refused_with_those_that_are(wanted: tuple[Any, ...]) -> None:
    with pytest.raises(OptionsError, match=r"no host .* has gpu1 \(ranks 0-1\), gpu2 \(rank 2\)"):
        select_hosts(wanted, HOSTS)


def test_no_host_at_all_is_refused() -> None:
    with pytest.raises(OptionsError, match="no host is named: this session has gpu1, gpu2, 0"):
        select_hosts((), HOSTS)
