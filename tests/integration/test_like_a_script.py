"""A rank looks to libraries like a process that torchrun has started, not like a prompt."""

from __future__ import annotations

import pytest

from distsession import Session


def test_it_has_no_prompt(session: Session) -> None:
    code = "import sys; [hasattr(sys, name) for name in ('ps1', 'ps2', 'ps3')]"
    assert list(session.execute(code, fetch=True).values()) == [[False] * 3] * 2


def test_argparse_takes_its_defaults(session: Session) -> None:
    session.execute(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--epochs', type=int, default=3)\n"
        "arguments = parser.parse_args()"
    )
    assert list(session.evaluate("arguments.epochs").values()) == [3, 3]


def test_arguments_of_a_cells_own_are_read(session: Session) -> None:
    session.execute("import sys; sys.argv = ['train.py', '--epochs', '5']")
    session.execute("arguments = parser.parse_args()")
    assert list(session.evaluate("arguments.epochs").values()) == [5, 5]


def test_argparse_says_what_it_misses_and_the_rank_stays(session: Session) -> None:
    with pytest.raises(Exception, match="SystemExit"):
        session.execute("parser.parse_args(['--epoch', 'x', '--unknown'])")
    assert list(session.evaluate("rank").values()) == [0, 1]
