"""What the magics' own lines may say."""

from __future__ import annotations

import pytest

from distsession.errors import OptionsError
from distsession.notebook.parsers import cell_parser, parse, session_parser


@pytest.mark.parametrize("comment", ["", " # all", "  # rank 1's", " #", ' # "both'])
def test_a_comment_may_end_the_line(comment: str) -> None:
    found = parse(session_parser(), f"restart 1 --restore model{comment}")

    assert found is not None
    assert (found.ranks, found.restore) == ("1", "model")


def test_a_line_may_be_a_comment() -> None:
    found = parse(cell_parser(), "# only the ranks see this")

    assert found == parse(cell_parser(), "")


@pytest.mark.parametrize("name", ["run#2.py", "'run # 2.py'", '"#2.py"', "'a b'\" # c\""])
def test_a_name_may_have_the_sign(name: str) -> None:
    found = parse(session_parser(), f"export {name}  # the second")

    assert found is not None
    assert "#" in found.path
    assert "the second" not in found.path


def test_an_open_quote_is_an_error() -> None:
    with pytest.raises(OptionsError, match="No closing quotation"):
        parse(session_parser(), "export 'train.py")
