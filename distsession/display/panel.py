"""A session's configuration and its ranks' present state, as text and HTML.

Pure functions from an ``Snapshot`` to strings. The static forms are for a terminal, a printed or
an untrusted notebook; the live ones are for widgets, in colours that the notebook's theme gives.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distsession.display.render import table_html, table_text

__all__ = [
    "HISTORY",
    "Gauge",
    "Line",
    "Snapshot",
    "answer_html",
    "config_html",
    "ended",
    "rows_html",
    "snapshot_html",
    "snapshot_text",
    "status_html",
]

HISTORY = 40
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
class Line:
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
        lines: Of the ranks.
    """

    status: str
    facts: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str, str], ...]
    lines: tuple[Line, ...]


# --- static ---------------------------------------------------------------------------------------

_OPTIONS_HEAD = ("option", "value", "from")
_HEAD = ("rank", "host", "pid", "device", "state", "since")
_PLACES_HEAD = ("rank", "node rank", "local rank", "threads")


def _names(lines: Sequence[Line]) -> list[str]:
    """The gauges that any rank has, in order."""
    return list(dict.fromkeys(gauge.name for line in lines for gauge in line.gauges))


def _rows(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    names = _names(lines)
    rows = []
    for line in lines:
        texts = {gauge.name: gauge.text for gauge in line.gauges}
        cells = [str(line.rank), line.host, str(line.pid), line.device, line.state, line.since]
        rows.append([*cells, *(texts.get(name, "") for name in names), *_place(line)[1:]])
    return [*_HEAD, *names, *_PLACES_HEAD[1:]], rows


def _place(line: Line) -> tuple[str, str, str, str]:
    return str(line.rank), str(line.node_rank), str(line.local_rank), str(line.threads)


def snapshot_text(overview: Snapshot) -> str:
    """Everything, for a terminal."""
    width = max(len(name) for name, _ in overview.facts)
    facts = "\n".join(f"{name:<{width}}  {value}" for name, value in overview.facts)
    blocks = [overview.status, facts, table_text(_OPTIONS_HEAD, overview.options)]
    return "\n\n".join([*blocks, table_text(*_rows(overview.lines))])


def snapshot_html(overview: Snapshot) -> str:
    """The same as :func:`snapshot_text`, without anything that a notebook has to run."""
    return (
        f"<p>{html.escape(overview.status)}</p>"
        + table_html(*_rows(overview.lines))
        + "<details open><summary>Configuration</summary>"
        + table_html((), overview.facts)
        + table_html(_OPTIONS_HEAD, overview.options)
        + "</details>"
    )


# --- live -----------------------------------------------------------------------------------------

# JupyterLab's own colours where there are any, else those of the page.
_TEXT = "var(--jp-ui-font-color1, inherit)"
_DIM = "var(--jp-ui-font-color2, inherit)"
_BORDER = "var(--jp-border-color2, rgba(128, 128, 128, 0.4))"
_TRACK = "var(--jp-layout-color3, rgba(128, 128, 128, 0.25))"
_GROUND = "var(--jp-layout-color0, Canvas)"
_FILL = "var(--jp-brand-color1, #1976d2)"
_ERROR = "var(--jp-error-color1, #d32f2f)"
_MARKS = {
    "idle": ("○", _DIM),
    "running": ("▶", "var(--jp-success-color1, #388e3c)"),
    "waiting": ("◔", "var(--jp-warn-color1, #b26a00)"),
    "dead": ("✕", _ERROR),
    "halted": ("⏸", _ERROR),
    "ended": ("○", _DIM),
}
_FONT = f"color:{_TEXT};font-size:var(--jp-ui-font-size1, 13px);line-height:1.5"
_CELL = f"padding:2px 8px;text-align:left;white-space:nowrap;border-bottom:1px solid {_BORDER}"
_STICKY = f"{_CELL};position:sticky;top:0;background:{_GROUND};color:{_TEXT}"


def status_html(status: str) -> str:
    """The sentence above the table."""
    return f'<div style="{_FONT}"><strong>{html.escape(status)}</strong></div>'


def config_html(overview: Snapshot) -> str:
    """The configuration, to be opened."""
    facts = _table((), overview.facts)
    options = _table(_OPTIONS_HEAD, overview.options)
    places = _table(_PLACES_HEAD, [_place(line) for line in overview.lines])
    return (
        f'<details style="{_FONT}"><summary style="cursor:pointer">Configuration</summary>'
        f'<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:flex-start">'
        f"{facts}{options}{places}</div></details>"
    )


def rows_html(lines: Sequence[Line]) -> str:
    """A line for each rank."""
    names = _names(lines)
    head = "".join(
        f'<th scope="col" style="{_STICKY}">{html.escape(name)}</th>'
        for name in (*_HEAD, *names, "history")
    )
    body = "".join(_row_html(line, names) for line in lines)
    return (
        f'<table aria-label="Ranks of the session" '
        f'style="{_FONT};border-collapse:separate;border-spacing:0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def ended(lines: Sequence[Line]) -> list[Line]:
    """The same lines once their session is closed."""
    return [replace(line, kind="ended", state="ended", since="", gauges=()) for line in lines]


def answer_html(content: str, *, is_error: bool = False) -> str:
    """What has come of a button, from HTML."""
    edge = _ERROR if is_error else _BORDER
    role = "alert" if is_error else "status"
    return (
        f'<div role="{role}" style="{_FONT};border-left:3px solid {edge};padding-left:8px;'
        f'max-height:24em;overflow:auto">{content}</div>'
    )


def _row_html(line: Line, names: Sequence[str]) -> str:
    mark, color = _MARKS[line.kind]
    is_bad = line.kind in ("dead", "halted")
    emphasis = f"color:{_ERROR};font-weight:bold" if is_bad else f"color:{_TEXT}"
    state = (
        f'<span aria-hidden="true" style="color:{color}">{mark}</span> '
        f'<span style="{emphasis}">{html.escape(line.state)}</span>'
    )
    facts = "".join(_cell(text) for text in (line.host, str(line.pid), line.device))
    gauges = {gauge.name: gauge for gauge in line.gauges}
    bars = "".join(
        f'<td style="{_CELL}">{_bar(gauges[name]) if name in gauges else ""}</td>' for name in names
    )
    return (
        f'<tr><th scope="row" style="{_CELL};font-weight:bold">{line.rank}</th>{facts}'
        f'<td style="{_CELL};white-space:normal;min-width:16em">{state}</td>{_cell(line.since)}'
        f'{bars}<td style="{_CELL}">{_sparkline(line)}</td></tr>'
    )


def _cell(text: str) -> str:
    return f'<td style="{_CELL}">{html.escape(text)}</td>'


def _bar(gauge: Gauge) -> str:
    text = html.escape(gauge.text)
    if gauge.share is None:
        return text
    width = round(100 * min(1.0, max(0.0, gauge.share)))
    return (
        f'<span role="img" aria-label="{html.escape(gauge.name)} {text}" '
        f'style="display:inline-block;width:56px;height:8px;background:{_TRACK};margin-right:6px">'
        f'<span style="display:block;width:{width}%;height:8px;background:{_FILL}"></span></span>'
        f"{text}"
    )


def _sparkline(line: Line) -> str:
    """The history as a small drawing, the newest at the right."""
    if len(line.history) < 2:
        return ""
    width, height = 2 * (HISTORY - 1), 16
    begin = width - 2 * (len(line.history) - 1)
    points = " ".join(
        f"{begin + 2 * number},{height - 1 - (height - 2) * min(percent, 100) / 100:.0f}"
        for number, percent in enumerate(line.history)
    )
    label = f"use of late: now {line.history[-1]} %, at most {max(line.history)} %"
    return (
        f'<svg role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><polyline points="{points}" fill="none" '
        f'style="stroke:{_FILL}" stroke-width="1.5"/></svg>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col" style="{_CELL}">{html.escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row" style="{_CELL}">{html.escape(name)}</th>'
        + "".join(_cell(text) for text in rest)
        + "</tr>"
        for name, *rest in rows
    )
    return (
        f'<table style="{_FONT};border-collapse:collapse">'
        f"{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
    )
