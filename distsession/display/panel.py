"""A session's configuration and its ranks' present state, as text and HTML.

Pure functions from an ``Snapshot`` to strings. The static forms are for a terminal, a printed or
an untrusted notebook; the live ones are for widgets, in colours that the notebook's theme gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from distsession.display import html
from distsession.display.html import Cell, Html, element
from distsession.display.render import MAX_SINGLE_ROWS, fold_many, table_text
from distsession.ranks import format_ranks

__all__ = [
    "BUTTONS_CLASS",
    "HISTORY_READINGS",
    "MAX_SINGLE_ROWS",
    "PANEL_CLASS",
    "ROWS_CLASS",
    "STATES",
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
        amount: By which those of several ranks are compared.
    """

    name: str
    text: str
    share: float | None = None
    amount: float = 0.0


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

STATES = ("idle", "running", "waiting", "dead", "halted")
"""What a rank can be seen in while its session is open, as :attr:`RankRow.kind`."""
_BAD = ("dead", "halted")
_MARKS = {
    "idle": ("○", html.DIM),
    "running": ("▶", html.SUCCESS),
    "waiting": ("◔", html.WARNING),
    "dead": ("✕", html.ERROR),
    "halted": ("⏸", html.ERROR),
    "ended": ("○", html.DIM),
}
_CELL = f"padding:2px 8px;{html.LEFT};white-space:nowrap;border-bottom:1px solid {html.BORDER}"
PANEL_CLASS = "distsession-panel"
"""Of all of it."""
BUTTONS_CLASS = "distsession-buttons"
"""Of the buttons, which stay in sight while the rest scrolls."""
ROWS_CLASS = "distsession-ranks"
"""Of what the rows are in; how wide it is says how they are laid out."""
_MEDIUM, _NARROW = "960px", "560px"
"""Below the first, places of ranks and bars are left out, which stand in the configuration and as
numbers. Below the second, each rank has two lines, the second for its state."""
_DISCONNECTED = "The kernel has ended. What was known last:"
_LAYOUT = f"""
.{PANEL_CLASS},.{PANEL_CLASS}>*{{overflow:visible}}
.{BUTTONS_CLASS}{{position:sticky;top:0;z-index:1;background:{html.GROUND}}}
.{PANEL_CLASS}.jupyter-widgets-disconnected::before{{content:"{_DISCONNECTED}"}}
.{PANEL_CLASS}.jupyter-widgets-disconnected>*{{opacity:.5}}
.{PANEL_CLASS} .jupyter-widgets-disconnected::before{{display:none}}
.{ROWS_CLASS}{{max-height:26em;overflow:auto!important}}
.jp-LinkedOutputView .{ROWS_CLASS}{{max-height:none}}
.jp-LinkedOutputView :is(.jp-OutputArea-child,.jp-OutputArea-output):has(.{PANEL_CLASS})
{{overflow:visible}}
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
    """A row for each rank; of many ranks, one for those that do the same, odd ones first."""
    names = _names(rows)
    return html.table(
        (*_HEAD, *names, "history"),
        [_row(group, names) for group in _groups(rows)],
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
    style = f"border-left:3px solid {edge};padding-left:8px;overflow-x:auto"
    role = "alert" if is_error else "status"
    note = f" The ranks do something else since {outdated}." if outdated else ""
    head = element("div", element("strong", title), note) if title else ""
    body = element("div", content, style="opacity:.5") if outdated else content
    return element("div", head, body, role=role, style=f"{html.UI_FONT};{style}")


def _groups(rows: Sequence[RankRow]) -> list[list[RankRow]]:
    of = {row.rank: row for row in rows}
    folded = fold_many({row.rank: (row.kind, row.state) for row in rows})
    groups = [[of[rank] for rank in ranks] for ranks, _ in folded]
    if len(rows) > MAX_SINGLE_ROWS:
        groups.sort(key=lambda group: (group[0].kind not in _BAD, len(group)))
    return groups


def _common(values: Sequence[str], name: str) -> str:
    """What all have, or how many different ones they have."""
    different = set(values)
    return values[0] if len(different) == 1 else f"{len(different)} {name}"


def _group_gauge(gauges: Sequence[Gauge]) -> Gauge:
    """The highest of several ranks."""
    highest = max(gauges, key=lambda gauge: gauge.amount)
    if all(gauge.text == highest.text for gauge in gauges):
        return highest
    return replace(highest, text=f"up to {highest.text}")


def _group_history(rows: Sequence[RankRow]) -> tuple[int, ...]:
    """The mean of what several ranks used of late."""
    readings = zip_longest(*(reversed(row.history) for row in rows))
    known = [[percent for percent in moment if percent is not None] for moment in readings]
    return tuple(round(sum(moment) / len(moment)) for moment in reversed(known))


def _row(group: Sequence[RankRow], names: Sequence[str]) -> list[str | Cell]:
    row = group[0]
    mark, color = _MARKS[row.kind]
    is_bad = row.kind in _BAD
    emphasis = f"color:{html.ERROR};font-weight:bold" if is_bad else f"color:{html.TEXT}"
    state = (
        element("span", mark, aria_hidden="true", style=f"color:{color}"),
        " ",
        element("span", row.state, style=emphasis),
    )
    used: dict[str, list[Gauge]] = {}
    for gauge in (gauge for row in group for gauge in row.gauges):
        used.setdefault(gauge.name, []).append(gauge)
    return [
        Cell(format_ranks(row.rank for row in group), "font-weight:bold"),
        _common([row.host for row in group], "hosts"),
        str(row.pid) if len(group) == 1 else "",
        _common([row.device.partition(" ")[0] for row in group], "devices"),
        Cell(html.join(state), "white-space:normal;min-width:16em"),
        max(row.since for row in group),  # all of them do it since then
        *(_bar(_group_gauge(used[name])) if name in used else "" for name in names),
        _sparkline(_group_history(group)),
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


def _sparkline(history: Sequence[int]) -> str:
    """The history as a small drawing, the newest at the right."""
    if len(history) < 2:
        return ""
    width, height = 2 * (HISTORY_READINGS - 1), 16
    begin = width - 2 * (len(history) - 1)
    points = " ".join(
        f"{begin + 2 * number},{height - 1 - (height - 2) * min(percent, 100) / 100:.0f}"
        for number, percent in enumerate(history)
    )
    stroke = {"stroke-width": "1.5", "style": f"stroke:{html.FILL}"}
    return element(
        "svg",
        element("polyline", points=points, fill="none", **stroke),
        role="img",
        aria_label=f"use of late: now {history[-1]} %, at most {max(history)} %",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
    )
