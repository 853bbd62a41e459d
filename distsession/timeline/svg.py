"""The picture of a timeline: one SVG, which needs nothing else.

Each rank is a row. Text and lines have the colour of the page around them, so that it can be read
on light and on dark; the colours of the bars are ones that colour-blind people can tell apart, and
waiting is hatched, too. However many operations there are, the picture has a few thousand bars at
most: neighbours that are too short to be seen apart are drawn as one.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from distsession.display import html
from distsession.display.html import Html, element
from distsession.ranks import ranks_text
from distsession.timeline.waits import Merged, Step

__all__ = ["picture", "seconds_text", "size_text"]

WIDTH = 960
LEFT, RIGHT = 84, 12
TOP = 22
INNER = WIDTH - LEFT - RIGHT
MAX_BARS = 2400
"""How many bars there are at most."""
MIN_BAR_PX = 0.25
"""Pixels below which neighbours are drawn as one, from the start: the picture can be enlarged."""

RUN, WAIT, MOVED, FAILED = html.BLUE, html.ORANGE, html.GREEN, html.VERMILION
_CELL_PAINT = {"fill": "currentColor", "fill-opacity": "0.13"}
_THIN = {"vector-effect": "non-scaling-stroke"}
"""Lines keep their width when the picture is enlarged."""

Scale = Callable[[float], float]


@dataclass(frozen=True)
class _Bar:
    """Some operations of a rank that are drawn as one."""

    begin: int
    end: int
    wait: int
    title: str
    failed: bool = False
    count: int = 1


def picture(
    merged: Merged, *, title: str, late: Sequence[int] = (), hosts: Mapping[int, str] | None = None
) -> Html:
    """A cell as SVG, with a script that enlarges it, without which it can be read as well.

    Args:
        merged: The cell.
        title: What it shows, in a sentence.
        late: The ranks that the others waited for; they are marked.
        hosts: Of the ranks, where there are several; shown where the mouse is on a rank.
    """
    ranks = [*merged.traces]
    row = 26 if len(ranks) <= 16 else 13
    height = row * len(ranks)
    span = max(1, merged.ended - merged.began)
    mark = secrets.token_hex(4)  # a notebook that is opened again has older pictures, too

    def at(time: float) -> float:
        return INNER * (time - merged.began) / span

    bars = _bars_by_rank(merged, span)
    labels, rows = [], []
    for index, rank in enumerate(ranks):
        host = (hosts or {}).get(rank, "")
        labels.append(_label(rank, TOP + index * row, row, rank in late, host))
        rows.append(_row(merged, rank, bars[rank], at, (index * row, row), mark))
    lines, ticks = _axis(span, at, merged.began, height)
    drawing = element(
        "svg",
        element("title", title),
        _hatching(mark),
        _legend(mark),
        *labels,
        element(
            "svg",
            lines,
            *rows,
            x=LEFT,
            y=TOP,
            width=INNER,
            height=height + 4,
            viewBox=f"0 0 {INNER} {height + 4}",
            preserveAspectRatio="none",
        ),
        ticks,
        element("text", x=LEFT, y=TOP + height + 17, data_span=f"{span / 1e9:.9f}"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {TOP + height + 26}",
        role="img",
        aria_label=title,
        style="width:100%;min-width:480px;height:auto;background:transparent",
        font_family="sans-serif",
        font_size=11,
        fill="currentColor",
    )
    box = element("div", drawing, class_="distsession-timeline", style="overflow-x:auto")
    script = files("distsession.timeline").joinpath("zoom.js").read_text("utf-8")
    return html.join((*_shown_if_trusted(box, mark), element("script", Html(script))))


def _shown_if_trusted(box: Html, mark: str) -> tuple[Html, ...]:
    """The picture, or a line where it cannot be seen.

    JupyterLab drops SVG's elements from a notebook that it does not trust, but not their text. It
    drops style sheets, too, so it is a style sheet that shows the picture and hides the line.
    """
    picture, untrusted = f"distsession-picture-{mark}", f"distsession-untrusted-{mark}"
    sheet = f".{picture}{{display:block!important}}.{untrusted}{{display:none}}"
    line = "The picture can be seen once the notebook is trusted."
    return (
        element("style", sheet),
        element("div", line, class_=untrusted),
        element("div", box, style="display:none", class_=picture),
    )


def _waiting(mark: str) -> dict[str, str]:
    return {"fill": f"url(#distsession-wait-{mark})"}


def _hatching(mark: str) -> Html:
    pattern = element(
        "pattern",
        element("rect", width=5, height=5, fill=WAIT, fill_opacity=0.35),
        element("rect", width=2, height=5, fill=WAIT),
        id=f"distsession-wait-{mark}",
        width=5,
        height=5,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return element("defs", pattern)


def _legend(mark: str) -> Html:
    marks = [
        (_CELL_PAINT, "cell"),
        (_waiting(mark), "waiting for the last rank"),
        ({"fill": RUN}, "collective runs"),
        ({"fill": MOVED}, "data to or from the notebook"),
        ({"fill": FAILED}, "failed"),
    ]
    parts, x = [], LEFT
    for paint, text in marks:
        parts.append(element("rect", x=x, y=4, width=14, height=9, **paint))
        parts.append(element("text", text, x=x + 18, y=12))
        x += 32 + 6 * len(text)
    return element("g", *parts, aria_hidden="true")


def _axis(span: int, at: Scale, began: int, height: int) -> tuple[Html, Html]:
    """Lines, and below them the seconds."""
    step: float = 10 ** math.floor(math.log10(span / 4))
    step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if span / s <= 6)
    lines, texts = [], []
    for tick in range(int(span / step) + 1):
        x = at(began + tick * step)
        lines.append(f"M{x:.1f} 0v{height + 4}")
        anchor = "end" if x > INNER - 30 else "middle"
        text = seconds_text(tick * step / 1e9) if tick else "0"
        below = TOP + height + 17
        texts.append(element("text", text, x=f"{LEFT + x:.1f}", y=below, text_anchor=anchor))
    path = element("path", d="".join(lines), stroke="currentColor", stroke_opacity=0.18, **_THIN)
    return path, element("g", *texts, aria_hidden="true")


def _label(rank: int, y: float, row: int, is_late: bool, host: str) -> Html:
    size, middle = (11, y + row / 2 + 4) if row > 16 else (9, y + row / 2 + 3)
    return element(
        "text",
        *([element("title", host)] if host else []),
        f"{'▸ ' if is_late else ''}rank {rank}",
        x=LEFT - 6,
        y=f"{middle:g}",
        text_anchor="end",
        font_size=size,
        font_weight="bold" if is_late else "",
    )


# --- a row ----------------------------------------------------------------------------------------


def _row(
    merged: Merged,
    rank: int,
    bars: Sequence[Sequence[_Bar]],
    at: Scale,
    place: tuple[int, int],
    mark: str,
) -> Html:
    """The cell, the operations that held it up, and in a strip below those that did not."""
    y, row = place
    trace = merged.traces[rank]
    gap = 3 if row > 16 else 1
    inside = row - 2 * gap
    error = f"\nended with {trace.error}" if trace.error else ""
    long = seconds_text((trace.ended - trace.began) / 1e9)
    cell = f"{trace.label} on rank {rank}: {long}{error}"
    parts = [_rect(trace.began, trace.ended, at, (y + gap, inside), _CELL_PAINT, cell)]
    low = max(2, inside // 4)
    blocking, others = bars
    for bar in blocking:
        parts.append(_bar(bar, at, (y + gap + 2, inside - low - 3), mark))
    for bar in others:
        parts.append(_bar(bar, at, (y + gap + inside - low, low), mark))
    for moved in merged.transfers[rank]:
        text = (
            f"{moved.name} on rank {rank}\n{size_text(moved.size)} in "
            f"{seconds_text((moved.ended - moved.began) / 1e9)}"
        )
        paint = {"fill": MOVED}
        parts.append(_rect(moved.began, moved.ended, at, (y + gap, inside), paint, text))
    if trace.error:
        x = at(trace.ended)
        line = {"d": f"M{x:.1f} {y + gap}v{inside}", "stroke": FAILED, "stroke-width": "3"}
        parts.append(element("path", element("title", cell), **line, **_THIN))
    return element("g", *parts)


def _rect(
    begin: float,
    end: float,
    at: Scale,
    place: tuple[int, int],
    paint: Mapping[str, str],
    title: str = "",
) -> Html:
    x = at(begin)
    return element(
        "rect",
        element("title", title) if title else "",
        x=f"{x:.2f}",
        y=place[0],
        width=f"{max(0.4, at(end) - x):.2f}",
        height=place[1],
        **paint,
    )


def _bar(bar: _Bar, at: Scale, place: tuple[int, int], mark: str) -> Html:
    until = bar.begin + bar.wait
    parts = []
    if bar.wait:
        parts.append(_rect(bar.begin, until, at, place, _waiting(mark)))
    if bar.end > until or not bar.wait:
        paint = {"fill": FAILED if bar.failed else RUN}
        parts.append(_rect(until, bar.end, at, place, paint))
    return element("g", element("title", bar.title), *parts)


# --- from operations to bars ----------------------------------------------------------------------


def _bars_by_rank(merged: Merged, span: int) -> dict[int, tuple[list[_Bar], list[_Bar]]]:
    """The bars of each rank: of what held it up, and of what did not."""
    pixel = span / INNER
    shortest = MIN_BAR_PX * pixel
    while True:
        found = {}
        for rank, steps in merged.steps.items():
            blocking = sorted((step for step in steps if _is_blocking(step)), key=_begin)
            others = [step for step in steps if not _is_blocking(step)]
            found[rank] = (
                list(_merge_short(blocking, shortest)),
                list(_merge_short(others, shortest)),
            )
        if sum(len(a) + len(b) for a, b in found.values()) <= MAX_BARS or shortest > span:
            return found
        shortest *= 2


def _is_blocking(step: Step) -> bool:
    return not step.record.is_async or step.held is not None


def _begin(step: Step) -> int:
    """From where on it is drawn: what was issued before is drawn when the rank waits for it."""
    return step.held[0] if step.record.is_async and step.held else step.record.began


def _merge_short(steps: Sequence[Step], shortest: float) -> Iterator[_Bar]:
    """Neighbours that are shorter than that, as one."""
    group: list[Step] = []
    begin = end = 0
    for step in steps:
        is_short = step.ended - _begin(step) < shortest
        if group and (not is_short or _begin(step) - end >= shortest or end - begin >= shortest):
            yield _merged_bar(group)
            group = []
        if not is_short:
            yield _merged_bar([step])
            continue
        begin = begin if group else _begin(step)
        end = max(end, step.ended) if group else step.ended
        group.append(step)
    if group:
        yield _merged_bar(group)


def _merged_bar(steps: Sequence[Step]) -> _Bar:
    first = steps[0]
    failed = any(step.record.failed for step in steps)
    if len(steps) == 1:
        begin = _begin(first)
        wait = max(0, first.record.began + first.wait - begin)
        return _Bar(begin, first.ended, wait, _step_title(first), failed)
    begin, end = _begin(first), max(step.ended for step in steps)
    wait, run = sum(step.wait for step in steps), sum(step.run for step in steps)
    names = sorted({step.record.name for step in steps})
    title = (
        f"{len(steps):,} operations on rank {first.rank}: {', '.join(names[:4])}"
        f"{', ...' if len(names) > 4 else ''}\n"
        f"waited {seconds_text(wait / 1e9)}, ran {seconds_text(run / 1e9)}, "
        f"{size_text(sum(step.record.size for step in steps))}"
    )
    hatched = round((end - begin) * wait / (wait + run)) if wait else 0
    return _Bar(begin, end, hatched, title, failed, len(steps))


def _step_title(step: Step) -> str:
    record = step.record
    detail = f" ({record.detail})" if record.detail else ""
    group = "" if record.group == "world" else f" of {record.group.removeprefix('world ')}"
    lines = [f"{step.title}{group} on rank {step.rank}{detail}"]
    if record.size:
        lines.append(size_text(record.size))
    if step.wait:
        waited = "was issued before" if record.is_async else "waited for"
        lines.append(f"{waited} {ranks_text(step.late)}: {seconds_text(step.wait / 1e9)}")
    lines.append(f"ran {seconds_text(step.run / 1e9)}{', and failed' if record.failed else ''}")
    if record.is_async:
        lines.append("asynchronous")
    if record.place:
        lines.append(f"at {record.place}")
    return "\n".join(lines)


# --- numbers --------------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    """``12.3 s``, ``0.31 s``, ``4.2 ms`` or ``15 us``."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-4:
        return f"{seconds * 1e3:.{1 if seconds < 1e-2 else 0}f} ms"
    return f"{seconds * 1e6:.0f} us"


def size_text(size: int) -> str:
    """``16 B``, ``4.2 kB`` or ``1.3 GB``."""
    if size < 1000:
        return f"{size} B"
    for unit, scale in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if size < 1000 * scale or unit == "GB":
            return f"{size / scale:.1f} {unit}"
    return ""
