"""The picture of a timeline: one SVG, which needs nothing else.

Each rank is a row. Text and lines have the colour of the page around them, so that it can be read
on light and on dark; the colours of the bars are ones that colour-blind people can tell apart, and
waiting is hatched, too. However many operations there are, the picture has a few thousand bars at
most: neighbours that are too short to be seen apart are drawn as one.
"""

from __future__ import annotations

import html
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distsession.ranks import ranks_text
from distsession.timeline.waits import Merged, Step

__all__ = ["picture", "seconds_text", "size_text"]

WIDTH = 960
LEFT, RIGHT = 84, 12
TOP = 22
INNER = WIDTH - LEFT - RIGHT
BARS = 2400
"""How many bars there are at most."""
FINEST = 0.25
"""Pixels below which neighbours are drawn as one, from the start: the picture can be enlarged."""

RUN, WAIT, MOVED, FAILED = "#0072b2", "#e69f00", "#009e73", "#d55e00"

SCRIPT = """<script>(() => {
const box = document.getElementById("distsession-timeline-MARK");
if (!box || box.dataset.zoom) return;
box.dataset.zoom = 1;
const outer = box.firstElementChild, inner = outer.querySelector("svg");
const ticks = outer.querySelector(":scope > g:last-of-type"), range = outer.lastElementChild;
const width = inner.viewBox.baseVal.width, height = inner.viewBox.baseVal.height;
let from = 0, shown = width;
const show = (begin, size) => {
  shown = Math.min(width, Math.max(width / 1000, size));
  from = Math.min(width - shown, Math.max(0, begin));
  inner.setAttribute("viewBox", `${from} 0 ${shown} ${height}`);
  const all = shown === width, unit = range.dataset.span / width;
  ticks.style.display = all ? "" : "none";
  range.textContent = all ? "" : `${(from * unit).toPrecision(4)} s to ` +
    `${((from + shown) * unit).toPrecision(4)} s (double-click with Shift shows all)`;
};
const at = e => (e.clientX - inner.getBoundingClientRect().left) /
  outer.getBoundingClientRect().width * outer.viewBox.baseVal.width / width;
const zoom = (e, by) => show(from + at(e) * shown * (1 - by), shown * by);
box.addEventListener("wheel", e => {
  if (!e.ctrlKey) return;
  e.preventDefault();
  zoom(e, e.deltaY < 0 ? 0.8 : 1.25);
}, {passive: false});
box.addEventListener("dblclick", e => e.shiftKey ? show(0, width) : zoom(e, 0.5));
let held = null;
box.addEventListener("pointerdown", e => { held = [at(e), from]; });
box.addEventListener("pointermove", e => {
  if (held && e.buttons) show(held[1] + (held[0] - at(e)) * shown, shown);
});
})()</script>"""
"""Ctrl and the wheel, or a double click, enlarge; dragging moves what is enlarged."""

UNTRUSTED = (
    "<style>.distsession-picture-MARK{display:block!important}"
    ".distsession-untrusted-MARK{display:none}</style><div class=distsession-untrusted-MARK>"
    "The picture can be seen once the notebook is trusted.</div>"
)
"""JupyterLab drops SVG's elements from a notebook that it does not trust, but not their text. It
drops style sheets, too, so it is a style sheet that shows the picture and hides this line."""

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


def picture(merged: Merged, *, title: str, late: Sequence[int] = ()) -> str:
    """A cell as SVG, with a script that enlarges it, without which it can be read as well.

    Args:
        merged: The cell.
        title: What it shows, in a sentence.
        late: The ranks that the others waited for; they are marked.
    """
    ranks = [*merged.traces]
    row = 26 if len(ranks) <= 16 else 13
    height = row * len(ranks)
    span = max(1, merged.ended - merged.began)
    mark = secrets.token_hex(4)  # a notebook that is opened again has older pictures, too

    def at(time: float) -> float:
        return INNER * (time - merged.began) / span

    chunks = _chunks(merged, span)
    labels, rows = [], []
    for index, rank in enumerate(ranks):
        labels.append(_label(rank, TOP + index * row, row, rank in late))
        rows.append(_row(merged, rank, chunks[rank], at, (index * row, row), mark))
    lines, ticks = _axis(span, at, merged.began, height)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + height + 26}" '
        f'role="img" aria-label="{html.escape(title)}" '
        'style="width:100%;min-width:480px;height:auto;background:transparent" '
        'font-family="sans-serif" font-size="11" fill="currentColor">'
        f"<title>{html.escape(title)}</title>{_hatching(mark)}{_legend(mark)}{''.join(labels)}"
        f'<svg x="{LEFT}" y="{TOP}" width="{INNER}" height="{height + 4}" '
        f'viewBox="0 0 {INNER} {height + 4}" preserveAspectRatio="none">'
        f"{lines}{''.join(rows)}</svg>{ticks}"
        f'<text x="{LEFT}" y="{TOP + height + 17}" data-span="{span / 1e9:.9f}"></text></svg>'
    )
    box = (
        f"<div style=display:none class=distsession-picture-{mark}>"
        f'<div id="distsession-timeline-{mark}" style="overflow-x:auto">{svg}</div></div>'
    )
    return UNTRUSTED.replace("MARK", mark) + box + SCRIPT.replace("MARK", mark)


def _hatching(mark: str) -> str:
    return (
        f'<defs><pattern id="distsession-wait-{mark}" width="5" height="5" '
        'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="5" height="5" fill="{WAIT}" fill-opacity="0.35"/>'
        f'<rect width="2" height="5" fill="{WAIT}"/></pattern></defs>'
    )


def _legend(mark: str) -> str:
    marks = [
        ('fill="currentColor" fill-opacity="0.13"', "cell"),
        (f'fill="url(#distsession-wait-{mark})"', "waiting for the last rank"),
        (f'fill="{RUN}"', "collective runs"),
        (f'fill="{MOVED}"', "data to or from the notebook"),
        (f'fill="{FAILED}"', "failed"),
    ]
    parts, x = [], LEFT
    for paint, text in marks:
        parts.append(
            f'<rect x="{x}" y="4" width="14" height="9" {paint}/><text x="{x + 18}" y="12">'
            f"{text}</text>"
        )
        x += 32 + 6 * len(text)
    return f'<g aria-hidden="true">{"".join(parts)}</g>'


def _axis(span: int, at: Scale, began: int, height: int) -> tuple[str, str]:
    """Lines, and below them the seconds."""
    step: float = 10 ** math.floor(math.log10(span / 4))
    step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if span / s <= 6)
    lines, texts = [], []
    for tick in range(int(span / step) + 1):
        x = at(began + tick * step)
        lines.append(f"M{x:.1f} 0v{height + 4}")
        anchor = "end" if x > INNER - 30 else "middle"
        text = seconds_text(tick * step / 1e9) if tick else "0"
        texts.append(
            f'<text x="{LEFT + x:.1f}" y="{TOP + height + 17}" text-anchor="{anchor}">{text}</text>'
        )
    path = (
        f'<path d="{"".join(lines)}" stroke="currentColor" stroke-opacity="0.18" '
        'vector-effect="non-scaling-stroke"/>'
    )
    return path, f'<g aria-hidden="true">{"".join(texts)}</g>'


def _label(rank: int, y: float, row: int, is_late: bool) -> str:
    size, middle = (11, y + row / 2 + 4) if row > 16 else (9, y + row / 2 + 3)
    weight = ' font-weight="bold"' if is_late else ""
    arrow = "\u25b8 " if is_late else ""
    return (
        f'<text x="{LEFT - 6}" y="{middle:g}" text-anchor="end" font-size="{size}"{weight}>'
        f"{arrow}rank {rank}</text>"
    )


# --- a row ----------------------------------------------------------------------------------------


def _row(
    merged: Merged,
    rank: int,
    bars: Sequence[Sequence[_Bar]],
    at: Scale,
    place: tuple[int, int],
    mark: str,
) -> str:
    """The cell, the operations that held it up, and in a strip below those that did not."""
    y, row = place
    trace = merged.traces[rank]
    gap = 3 if row > 16 else 1
    inside = row - 2 * gap
    error = f"\nended with {trace.error}" if trace.error else ""
    long = seconds_text((trace.ended - trace.began) / 1e9)
    cell = f"{trace.label} on rank {rank}: {long}{error}"
    paint = 'fill="currentColor" fill-opacity="0.13"'
    parts = [_rect(trace.began, trace.ended, at, (y + gap, inside), paint, cell)]
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
        paint = f'fill="{MOVED}"'
        parts.append(_rect(moved.began, moved.ended, at, (y + gap, inside), paint, text))
    if trace.error:
        x = at(trace.ended)
        parts.append(
            f'<path d="M{x:.1f} {y + gap}v{inside}" stroke="{FAILED}" stroke-width="3" '
            'vector-effect="non-scaling-stroke">'
            f"<title>{html.escape(cell)}</title></path>"
        )
    return f"<g>{''.join(parts)}</g>"


def _rect(
    begin: float, end: float, at: Scale, place: tuple[int, int], paint: str, title: str = ""
) -> str:
    x = at(begin)
    width = max(0.4, at(end) - x)
    shape = f'<rect x="{x:.2f}" y="{place[0]}" width="{width:.2f}" height="{place[1]}" {paint}'
    return f"{shape}><title>{html.escape(title)}</title></rect>" if title else f"{shape}/>"


def _bar(bar: _Bar, at: Scale, place: tuple[int, int], mark: str) -> str:
    until = bar.begin + bar.wait
    parts = []
    if bar.wait:
        paint = f'fill="url(#distsession-wait-{mark})"'
        parts.append(_rect(bar.begin, until, at, place, paint))
    if bar.end > until or not bar.wait:
        paint = f'fill="{FAILED if bar.failed else RUN}"'
        parts.append(_rect(until, bar.end, at, place, paint))
    return f"<g><title>{html.escape(bar.title)}</title>{''.join(parts)}</g>"


# --- from operations to bars ----------------------------------------------------------------------


def _chunks(merged: Merged, span: int) -> dict[int, tuple[list[_Bar], list[_Bar]]]:
    """The bars of each rank: of what held it up, and of what did not."""
    pixel = span / INNER
    shortest = FINEST * pixel
    while True:
        found = {}
        for rank, steps in merged.steps.items():
            blocking = sorted((step for step in steps if _blocks(step)), key=_begin)
            others = [step for step in steps if not _blocks(step)]
            found[rank] = (
                list(_together(blocking, shortest)),
                list(_together(others, shortest)),
            )
        if sum(len(a) + len(b) for a, b in found.values()) <= BARS or shortest > span:
            return found
        shortest *= 2


def _blocks(step: Step) -> bool:
    return not step.record.is_async or step.held is not None


def _begin(step: Step) -> int:
    """From where on it is drawn: what was issued before is drawn when the rank waits for it."""
    return step.held[0] if step.record.is_async and step.held else step.record.began


def _together(steps: Sequence[Step], shortest: float) -> Iterator[_Bar]:
    """Neighbours that are shorter than that, as one."""
    group: list[Step] = []
    begin = end = 0
    for step in steps:
        is_short = step.ended - _begin(step) < shortest
        if group and (not is_short or _begin(step) - end >= shortest or end - begin >= shortest):
            yield _joined(group)
            group = []
        if not is_short:
            yield _joined([step])
            continue
        begin = begin if group else _begin(step)
        end = max(end, step.ended) if group else step.ended
        group.append(step)
    if group:
        yield _joined(group)


def _joined(steps: Sequence[Step]) -> _Bar:
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
