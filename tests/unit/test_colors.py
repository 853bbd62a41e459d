"""Colours of tracebacks, by whatever this IPython or another colours Python with."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.utils import PyColorize

from distsession.display.colors import PLAIN
from distsession.notebook import colors

LINE = "    return 'a' + 1  # one"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A shell, and how it wants its colours."""
    made = SimpleNamespace(colors="neutral")
    ipython = SimpleNamespace(get_ipython=lambda: made)
    monkeypatch.setitem(colors.sys.modules, "IPython", ipython)
    return made


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


class Parser8:
    """IPython 8's: themes are named otherwise, and so is the argument."""

    def __init__(self, *, style: str = "NoColor"):
        self.style = style

    def format2(self, raw: str, out: str) -> tuple[str, bool]:
        assert out == "str"
        return f"\x1b[1m{self.style}\x1b[0m:{raw}\x1b[0m\n", False


class Failing(Parser8):
    def format2(self, raw: str, out: str) -> tuple[str, bool]:
        return "half of it", True


class Raising(Parser8):
    def format2(self, raw: str, out: str) -> tuple[str, bool]:
        raise IndexError("a line that was cut")


@pytest.mark.parametrize("theme", ["neutral", "linux", "lightbg", "Neutral", "LightBG"])
def test_a_line_is_coloured_and_says_the_same(shell: SimpleNamespace, theme: str) -> None:
    shell.colors = theme
    painted = colors.shell_colors().source(LINE)
    assert painted != LINE
    assert plain(painted) == LINE
    assert plain(colors.shell_colors().source("x = 'abc")) == "x = 'abc"


@pytest.mark.parametrize(
    ("theme", "style"),
    [("Neutral", "Neutral"), ("Linux", "Linux"), ("LightBG", "LightBG"), ("pride", "Neutral")],
)
def test_ipython_8_is_asked_in_its_own_words(
    shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, theme: str, style: str
) -> None:
    monkeypatch.setattr(PyColorize, "Parser", Parser8)
    shell.colors = theme
    assert plain(colors.shell_colors().source(LINE)) == f"{style}:{LINE}"


@pytest.mark.parametrize("parser", [Failing, Raising, None])
def test_a_line_that_nothing_can_colour_stays_as_it_is(
    shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, parser: Any
) -> None:
    monkeypatch.setattr(PyColorize, "Parser", parser)
    assert colors.shell_colors().source(LINE) == LINE


def test_there_are_no_colours_where_the_shell_wants_none_or_there_is_no_shell(
    shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for theme in ("NoColor", "nocolor"):
        shell.colors = theme
        assert colors.shell_colors() is PLAIN
    monkeypatch.delitem(colors.sys.modules, "IPython")
    assert colors.shell_colors() is PLAIN
