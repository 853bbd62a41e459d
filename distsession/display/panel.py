"""A session's configuration and its ranks' present state, as text and HTML.

Pure functions from an ``Snapshot`` to strings. The static forms are for a terminal, a printed or
an untrusted notebook; the live ones are for widgets, in colours that the notebook's theme gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distsession.display import html
from distsession.display.html import Cell, Html, element
from distsession.display.render import table_text

__all__ = [
    "HISTORY_READINGS",
    "ROWS_CLASS",
    "Gauge",
    "RankRow",
    "Snapshot",
    "answer_html",
    "config_html",
    "ended_rows",
    "layout_html",
    "rows_html",
    "snapshot_html",
    "snapshot_text",
    "status_html",
]

HISTORY_READINGS = 40
"""How many readings the small line of a rank goes back."""


@dataclass(frozen=True)
class Gauge:
    """Something that is used up to a limit.

    Attributes:
        share: Of the limit, from 0 to 1; None where that is not known.
    """

    name: str
    text: str
    share: float | None = None


@dataclass(frozen=True)
class RankRow:
    """One rank.

    Attributes:
        kind: ``"idle"``, ``"running"``, ``"waiting"``, ``"dead"``, ``"halted"`` or ``"ended"``.
        state: The same in words, with the place in the code.
        since: The time of day at which that began; empty where it is not known.
        history: What share of its processors or its GPU it used of late, in percent.
    """

    rank: int
    host: str
    pid: int
    device: str
    kind: str
    state: str
    since: str
    gauges: tuple[Gauge, ...] = ()
    history: tuple[int, ...] = ()
    node_rank: int = 0
    local_rank: int = 0
    threads: int = 1


@dataclass(frozen=True)
class Snapshot:
    """What is to be shown of a session.

    Attributes:
        status: One sentence on how it is.
        facts: Names and values.
        options: Names, values, and where each value came from.
        rows: Of the ranks.
    """

    status: str
    facts: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str, str], ...]
    rows: tuple[RankRow, ...]


# --- static ---------------------------------------------------------------------------------------

_OPTIONS_HEAD = ("option", "value", "from")
_HEAD = ("rank", "host", "pid", "device", "state", "since")
_PLACES_HEAD = ("rank", "node rank", "local rank", "threads")
_LIVE_PLACES_HEAD = ("rank", "host", "pid", "device", *_PLACES_HEAD[1:])


def _names(rows: Sequence[RankRow]) -> list[str]:
    """The gauges that any rank has, in order."""
    return list(dict.fromkeys(gauge.name for row in rows for gauge in row.gauges))


def _texts(rows: Sequence[RankRow]) -> tuple[list[str], list[list[str]]]:
    names = _names(rows)
    texts = []
    for row in rows:
        used = {gauge.name: gauge.text for gauge in row.gauges}
        cells = [str(row.rank), row.host, str(row.pid), row.device, row.state, row.since]
        texts.append([*cells, *(used.get(name, "") for name in names), *_place(row)[1:]])
    return [*_HEAD, *names, *_PLACES_HEAD[1:]], texts


def _place(row: RankRow) -> tuple[str, str, str, str]:
    return str(row.rank), str(row.node_rank), str(row.local_rank), str(row.threads)


def _live_place(row: RankRow) -> tuple[str, ...]:
    """What a narrow panel leaves out of its rows, too."""
    return str(row.rank), row.host, str(row.pid), row.device, *_place(row)[1:]


def snapshot_text(snapshot: Snapshot) -> str:
    """Everything, for a terminal."""
    width = max(len(name) for name, _ in snapshot.facts)
    facts = "\n".join(f"{name:<{width}}  {value}" for name, value in snapshot.facts)
    blocks = [snapshot.status, facts, table_text(_OPTIONS_HEAD, snapshot.options)]
    return "\n\n".join([*blocks, table_text(*_texts(snapshot.rows))])


def snapshot_html(snapshot: Snapshot) -> Html:
    """The same as :func:`snapshot_text`, without anything that a notebook has to run."""
    facts = html.table((), snapshot.facts)
    options = html.table(_OPTIONS_HEAD, snapshot.options)
    return html.join(
        (
            element("p", snapshot.status),
            html.table(*_texts(snapshot.rows)),
            html.details("Configuration", facts, options, is_open=True),
        )
    )


# --- live -----------------------------------------------------------------------------------------

_MARKS = {
    "idle": ("○", html.DIM),
    "running": ("▶", html.SUCCESS),
    "waiting": ("◔", html.WARNING),
    "dead": ("✕", html.ERROR),
    "halted": ("⏸", html.ERROR),
    "ended": ("○", html.DIM),
}
_CELL = f"padding:2px 8px;{html.LEFT};white-space:nowrap;border-bottom:1px solid {html.BORDER}"
ROWS_CLASS = "distsession-ranks"
"""Of what the rows are in; how wide it is says how they are laid out."""
_MEDIUM, _NARROW = "820px", "560px"
"""Below the first, places of ranks and bars are left out, which stand in the configuration and as
numbers. Below the second, each rank has two lines, the second for its state."""
_LAYOUT = f"""
.{ROWS_CLASS}{{container-type:inline-size}}
@container (max-width:{_MEDIUM}){{
.{ROWS_CLASS} tr>:nth-child(n+2):nth-child(-n+4){{display:none}}
.{ROWS_CLASS} td>span[role=img]{{display:none!important}}
.{ROWS_CLASS} tr>:nth-child(5){{min-width:8em!important}}
}}
@container (max-width:{_NARROW}){{
.{ROWS_CLASS} table,.{ROWS_CLASS} tbody{{display:block}}
.{ROWS_CLASS} thead{{display:none}}
.{ROWS_CLASS} tbody tr{{display:flex;flex-wrap:wrap;align-items:center}}
.{ROWS_CLASS} tbody tr>*{{border-bottom:0!important}}
.{ROWS_CLASS} tbody tr>:nth-child(5){{order:1;flex-basis:100%}}
}}
"""
_STICKY = f"position:sticky;top:0;background:{html.GROUND};color:{html.TEXT}"


def status_html(status: str) -> Html:
    """The sentence above the table."""
    return element("div", element("strong", status), style=html.UI_FONT)


def layout_html() -> Html:
    """How the rows are laid out, which takes more than the styles of elements."""
    return element("style", Html(_LAYOUT))


def config_html(snapshot: Snapshot) -> Html:
    """The configuration, to be opened."""
    tables = (
        ((), snapshot.facts),
        (_OPTIONS_HEAD, snapshot.options),
        (_LIVE_PLACES_HEAD, [_live_place(row) for row in snapshot.rows]),
    )
    style = f"{html.UI_FONT};border-collapse:collapse"
    drawn = (
        html.table(head, rows, style=style, cell_style=_CELL, has_row_heads=True)
        for head, rows in tables
    )
    box = "display:flex;flex-wrap:wrap;gap:16px;align-items:flex-start"
    return html.details("Configuration", element("div", *drawn, style=box), style=html.UI_FONT)


def rows_html(rows: Sequence[RankRow]) -> Html:
    """A row for each rank."""
    names = _names(rows)
    return html.table(
        (*_HEAD, *names, "history"),
        [_row(row, names) for row in rows],
        name="Ranks of the session",
        style=f"{html.UI_FONT};border-collapse:separate;border-spacing:0",
        cell_style=_CELL,
        head_style=_STICKY,
        has_row_heads=True,
    )


def ended_rows(rows: Sequence[RankRow]) -> list[RankRow]:
    """The same rows once their session is closed."""
    return [replace(row, kind="ended", state="ended", since="", gauges=()) for row in rows]


def answer_html(
    content: str, *, title: str = "", is_error: bool = False, outdated: str = ""
) -> Html:
    """What has come of a button.

    Args:
        content: That.
        title: Which button it was, and when.
        is_error: It failed.
        outdated: Since when it is true no longer; empty while it is.
    """
    edge = html.ERROR if is_error else html.BORDER
    style = f"border-left:3px solid {edge};padding-left:8px;max-height:24em;overflow:auto"
    role = "alert" if is_error else "status"
    note = f" The ranks do something else since {outdated}." if outdated else ""
    head = element("div", element("strong", title), note) if title else ""
    body = element("div", content, style="opacity:.5") if outdated else content
    return element("div", head, body, role=role, style=f"{html.UI_FONT};{style}")


def _row(row: RankRow, names: Sequence[str]) -> list[str | Cell]:
    mark, color = _MARKS[row.kind]
    is_bad = row.kind in ("dead", "halted")
    emphasis = f"color:{html.ERROR};font-weight:bold" if is_bad else f"color:{html.TEXT}"
    state = (
        element("span", mark, aria_hidden="true", style=f"color:{color}"),
        " ",
        element("span", row.state, style=emphasis),
    )
    gauges = {gauge.name: _bar(gauge) for gauge in row.gauges}
    return [
        Cell(str(row.rank), "font-weight:bold"),
        row.host,
        str(row.pid),
        row.device,
        Cell(html.join(state), "white-space:normal;min-width:16em"),
        row.since,
        *(gauges.get(name, "") for name in names),
        _sparkline(row),
    ]


def _bar(gauge: Gauge) -> str:
    if gauge.share is None:
        return gauge.text
    width = round(100 * min(1.0, max(0.0, gauge.share)))
    size = "height:8px;background"
    filled = element("span", style=f"display:block;width:{width}%;{size}:{html.FILL}")
    bar = element(
        "span",
        filled,
        role="img",
        aria_label=f"{gauge.name} {gauge.text}",
        style=f"display:inline-block;width:56px;{size}:{html.TRACK};margin-right:6px",
    )
    return html.join((bar, gauge.text))


def _sparkline(row: RankRow) -> str:
    """The history as a small drawing, the newest at the right."""
    if len(row.history) < 2:
        return ""
    width, height = 2 * (HISTORY_READINGS - 1), 16
    begin = width - 2 * (len(row.history) - 1)
    points = " ".join(
        f"{begin + 2 * number},{height - 1 - (height - 2) * min(percent, 100) / 100:.0f}"
        for number, percent in enumerate(row.history)
    )
    stroke = {"stroke-width": "1.5", "style": f"stroke:{html.FILL}"}
    return element(
        "svg",
        element("polyline", points=points, fill="none", **stroke),
        role="img",
        aria_label=f"use of late: now {row.history[-1]} %, at most {max(row.history)} %",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
    )
