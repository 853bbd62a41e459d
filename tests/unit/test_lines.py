"""Pieces of a stream become lines, and a progress bar's line says how far it is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsession.notebook.lines import Bar, Line, Lines, parse_bar


def feed(*pieces: str) -> tuple[list[str], str]:
    """The finished lines, and the one that is not."""
    lines = Lines()
    finished = [line.text for piece in pieces for line in lines.feed(piece)]
    return finished, lines.partial


@pytest.mark.parametrize(
    ("pieces", "finished", "partial"),
    [
        (["a\nb\n"], ["a", "b"], ""),
        (["a", "b\n"], ["ab"], ""),
        (["a\nb"], ["a"], "b"),
        (["", "\n", ""], [""], ""),
        (["\n\n"], ["", ""], ""),
        (["a\r\nb\r\n"], ["a", "b"], ""),
        (["a\r", "\n"], ["a"], ""),
        (["10%\r20%\r"], [], "20%"),
        (["10%", "\r20%", "\r100%\n"], ["100%"], ""),
        (["\r10%", "\r20%\ndone\n"], ["20%", "done"], ""),
        (["loading\rdone\n"], ["doneing"], ""),
        (["ab\r\rc\n"], ["cb"], ""),
        (["\rab\n"], ["ab"], ""),
    ],
)
def test_pieces_become_the_lines_that_a_terminal_would_show(
    pieces: list[str], finished: list[str], partial: str
) -> None:
    assert feed(*pieces) == (finished, partial)


@given(st.text(st.characters(exclude_characters="\r\x08\x1b"), max_size=60), st.data())
def test_nothing_is_lost_wherever_the_text_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    finished, partial = feed(*pieces)
    assert "\n".join([*finished, partial]) == text
    assert "\n" not in partial


@given(st.lists(st.text("ab 1%\r\n", max_size=8), max_size=6))
def test_lines_never_hold_what_would_move_the_cursor(pieces: list[str]) -> None:
    finished, partial = feed(*pieces)
    assert len(finished) == sum(piece.count("\n") for piece in pieces)
    assert not {"\r", "\n"} & set("".join([*finished, partial]))


def test_a_line_that_was_overwritten_is_told_from_one_that_was_not() -> None:
    lines = Lines()

    def drawn(given: list[Line]) -> list[tuple[str, bool]]:
        return [(line.text, line.drawn) for line in given]

    assert drawn(lines.feed("10%\r20%\nplain\r\n")) == [("20%", True), ("plain", False)]
    assert lines.feed("10%\r20%") == []
    assert drawn(lines.finish()) == [("20%", True)]
    assert drawn(lines.feed("next\n")) == [("next", False)]


@pytest.mark.parametrize(
    ("line", "bar"),
    [
        (
            "train:  45%|####5     | 45/100 [00:01<00:02, 30.0it/s]",
            Bar("train", 45, "45", "100", "[00:01<00:02, 30.0it/s]", 1),
        ),
        (
            "100%|##########| 7/7 [1:02:03<00:00,  9.9it/s]",
            Bar("", 100, "7", "7", "[1:02:03<00:00,  9.9it/s]", 3723),
        ),
        ("  0%|          | 0/5 [00:00<?, ?it/s]", Bar("", 0, "0", "5", "[00:00<?, ?it/s]", 0)),
        (
            "x: 10%|#    | 1.2M/12M [00:00<00:09, 1MB/s]",
            Bar("x", 10, "1.2M", "12M", "[00:00<00:09, 1MB/s]", 0),
        ),
        ("loss 45% better", None),
        ("", None),
        ("train:  10%|#   | 4/40 [00:00<00:01, 19it/s]careful", None),
    ],
)
def test_a_bar_says_how_far_it_is(line: str, bar: Bar | None) -> None:
    assert parse_bar(line) == bar


@given(st.text(max_size=80))
def test_any_other_line_is_no_bar_and_no_error(line: str) -> None:
    found = parse_bar(line)
    assert found is None or 0 <= found.percent <= 100
