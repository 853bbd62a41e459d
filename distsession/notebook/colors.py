"""The colours that IPython's own tracebacks have."""

from __future__ import annotations

import sys
from typing import Any

from distsession.display.colors import PLAIN, Colors, Paint, sgr

__all__ = ["shell_colors"]

RED, GREEN = 31, 32


def shell_colors() -> Colors:
    """Those of the shell that this runs in; none outside of one, and where it wants none."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    theme = str(getattr(shell, "colors", "nocolor")).lower()
    if theme == "nocolor":
        return PLAIN
    return Colors(name=sgr(RED), place=sgr(GREEN), source=_highlight(theme))


def _highlight(theme: str) -> Paint:
    """Colours Python as IPython does; nothing where this IPython does it in another way."""
    parser: Any = None
    try:
        from IPython.utils.PyColorize import Parser

        try:
            parser = Parser(theme_name=theme)
        except TypeError:  # before IPython 9
            parser = Parser(style={"linux": "Linux", "lightbg": "LightBG"}.get(theme, "Neutral"))
    except Exception:
        pass

    def highlight(line: str) -> str:
        try:
            colored, failed = parser.format2(line, "str")
            return line if failed else str(colored).rstrip("\n")
        except Exception:  # of an IPython that has no such method, or a line cut from a text
            return line

    return highlight
