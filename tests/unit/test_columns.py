"""Numbers of ranks below each other."""

from __future__ import annotations

import pytest

from distsession.display.columns import aligned, labelled
from distsession.display.render import fold_text
from distsession.notebook.output import Transcript
from distsession.notebook.output_html import section_html, section_text


def test_numbers_of_one_kind_stand_below_each_other() -> None:
    assert aligned(["loss 0.1 acc 0", "loss 10.25 acc 99", "loss nan acc -3"]) == [
        "loss   0.1  acc  0",
        "loss  10.25 acc 99",
        "loss nan    acc -3",
    ]
    assert aligned(["tensor(0.5)", "tensor(12.)"]) == ["tensor( 0.5)", "tensor(12. )"]
    assert aligned(["1e-05", "100.0"]) == ["  1e-05", "100.0"]


@pytest.mark.parametrize(
    "texts",
    [["1"], [], ["a", "b"], ["loss 1", "acc 1"], ["1\n2", "3\n4"], ["v1", "v20"], ["1", "1 2"]],
)
def test_other_lines_are_left_alone(texts: list[str]) -> None:
    assert aligned(texts) is None


def test_labels_are_a_column_too() -> None:
    assert labelled(["[rank 9]", "[rank 10]"], ["5", "50"]) == ["[rank 9]   5", "[rank 10] 50"]
    assert fold_text({0: "1.5", 1: "12.25", 2: "12.25"}) == "[rank 0]     1.5\n[ranks 1-2] 12.25"
    assert fold_text({0: "'a'", 1: "12"}) == "[rank 0] 'a'\n[rank 1] 12"


def test_so_are_the_lines_that_ranks_print() -> None:
    made = Transcript()
    for rank in range(3):
        made.write(rank, "stdout", f"loss {10**rank}.5\n")
    made.finish()
    (section,) = made
    assert section_text(section, lambda rank: "") == (
        "[rank 0] loss   1.5\n[rank 1] loss  10.5\n[rank 2] loss 100.5"
    )
    page = section_html(section, lambda rank: "")
    for line in ("loss   1.5", "loss  10.5", "loss 100.5"):
        assert f">{line}</pre>" in page
