"""The parts of HTML that tables, panels, output and timelines are made of, each written once.

Styles stand in the elements, since a notebook that is not trusted, or is shown by another program,
drops everything else. Colours are those of JupyterLab's theme where there are any, else those of
the page, or ones that can be read on light and on dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Cell", "Html", "cell", "details", "element", "escape", "join", "label", "table"]

TEXT = "var(--jp-ui-font-color1, inherit)"
DIM = "var(--jp-ui-font-color2, inherit)"
BORDER = "var(--jp-border-color2, rgba(128, 128, 128, 0.4))"
TRACK = "var(--jp-layout-color3, rgba(128, 128, 128, 0.25))"
GROUND = "var(--jp-layout-color0, Canvas)"
FILL = "var(--jp-brand-color1, #1976d2)"
SUCCESS = "var(--jp-success-color1, #388e3c)"
WARNING = "var(--jp-warn-color1, #b26a00)"
ERROR = "var(--jp-error-color1, #d32f2f)"
STDERR = "var(--jp-rendermime-error-background,rgba(221,51,51,.15))"

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), which colour-blind people can tell
# apart, readable on white and on black.
BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#d55e00", "#009e73", "#e69f00"
RANK_COLORS = (BLUE, VERMILION, GREEN, "#cc79a7", ORANGE, "#56b4e9", "#8a8a00", "#999999")

UI_FONT = f"color:{TEXT};font-size:var(--jp-ui-font-size1, 13px);line-height:1.5"
CODE_FONT = (
    "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px);"
    "line-height:var(--jp-code-line-height,1.4)"
)
PRE = (
    f"margin:0;padding:0;border:0;background:none;color:inherit;{CODE_FONT};"
    "white-space:pre-wrap;overflow-wrap:anywhere"
)
LABEL = f"flex:none;min-width:6em;opacity:.8;user-select:none;{CODE_FONT}"
LEFT = "text-align:left"
"""Notebooks align tables to the right, for numbers."""

_VOID = ("img",)


class Html(str):
    """Text that is HTML already. Any other is escaped where it becomes part of an element."""

    __slots__ = ()


class Cell(NamedTuple):
    """A cell that has a style beside that of its table's."""

    content: str
    style: str = ""


def escape(text: str) -> Html:
    """Text as HTML."""
    return text if isinstance(text, Html) else Html(html.escape(text, quote=False))


def join(parts: Iterable[str]) -> Html:
    """One after the other."""
    return Html("".join(map(escape, parts)))


def element(tag: str, *content: str, **attributes: str | float) -> Html:
    """An element.

    Args:
        tag: Its name.
        content: What is in it.
        attributes: ``aria_label`` for ``aria-label``, ``class_`` for ``class``; an empty one is
            left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value != ""
    )
    end = "" if tag in _VOID else f"{join(content)}</{tag}>"
    return Html(f"<{tag}{given}>{end}")


def label(text: str, *, tag: str = "span", title: str = "") -> Html:
    """Whose the output beside it is."""
    return element(tag, text, title=title, style=LABEL)


def details(
    summary: str,
    *content: str,
    style: str = "",
    summary_style: str = "cursor:pointer",
    is_open: bool = False,
) -> Html:
    """What can be opened and closed below its summary."""
    top = element("summary", summary, style=summary_style)
    return element("details", top, *content, open="open" if is_open else "", style=style)


def cell(content: str | Cell, *, style: str = "", scope: str = "") -> Html:
    """A cell of a table; one with a scope heads a ``"row"`` or a ``"col"``."""
    text, own = content if isinstance(content, Cell) else (content, "")
    styles = ";".join(filter(None, (style, own)))
    return element("th" if scope else "td", text, scope=scope, style=styles)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    *,
    name: str = "",
    style: str = "",
    cell_style: str = LEFT,
    head_style: str = "",
    has_row_heads: bool = False,
) -> Html:
    """A table; without a head where that is empty.

    Args:
        head: What each column is.
        rows: Their cells.
        name: What those are told who cannot see it.
        style: Of the table.
        cell_style: Of all cells, those of the head too.
        head_style: What the cells of the head have besides.
        has_row_heads: The first cell of each row says what it is about.
    """
    top = join(cell(Cell(text, head_style), style=cell_style, scope="col") for text in head)
    lines = [
        element(
            "tr",
            *(
                cell(each, style=cell_style, scope="row" if has_row_heads and not at else "")
                for at, each in enumerate(row)
            ),
        )
        for row in rows
    ]
    return element(
        "table",
        element("thead", element("tr", top)) if head else "",
        element("tbody", *lines),
        aria_label=name,
        style=style,
    )
