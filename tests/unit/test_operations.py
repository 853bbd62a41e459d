"""How operations are described, so that ranks can compare theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distsession.engine.collectives.operations import (
    Elements,
    comparable,
    describe,
    describe_detail,
)
from distsession.protocol.operation_names import AnySource, SplitSizes

F32 = torch.float32
SIZES = SplitSizes((1, 2), (3, 4))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("barrier",), "barrier"),
        (("all_reduce", F32, torch.Size([4, 2]), "sum"), "all_reduce float32 [4, 2], sum"),
        (("send", F32, Elements(8)), "send float32, 8 elements"),
        (("recv", AnySource()), "recv any source"),
        (("all_to_all", F32, SIZES), "all_to_all float32, send 1,2 receive 3,4"),
        (("new_group", "ranks 0-1"), "new_group ranks 0-1"),
    ],
)
def test_an_operation_in_words(key: tuple[Any, ...], text: str) -> None:
    assert describe(key) == text
    assert describe_detail(key) == text.partition(" ")[2]


def test_the_two_ends_of_a_message_are_alike() -> None:
    send, receive = (("send", F32, Elements(8)), ("recv", F32, Elements(8)))
    assert comparable(send) == comparable(receive)
    assert comparable(send) != comparable(("recv", F32, Elements(4)))


def test_sizes_that_differ_from_rank_to_rank_are_compared_apart() -> None:
    other = SplitSizes((5, 5), (5, 5))
    assert comparable(("all_to_all", F32, SIZES)) == comparable(("all_to_all", F32, other))
    assert comparable(("all_to_all", F32, SIZES)) != comparable(("all_to_all", torch.int8, SIZES))
    assert comparable(("all_to_all", F32, SIZES)) != comparable(("all_gather", F32))


@pytest.mark.parametrize("sizes", [SIZES, SplitSizes((0,), (0,)), SplitSizes((7,) * 4, (1,) * 4)])
def test_sizes_are_read_from_another_ranks_description(sizes: SplitSizes) -> None:
    assert SplitSizes.from_description(describe(("all_to_all", F32, sizes))) == sizes
    assert SplitSizes.from_description(describe(("all_reduce", F32, "sum"))) is None
