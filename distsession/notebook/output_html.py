"""The output of the ranks as HTML and as text.

Pure functions. Styles stand in the elements, since a notebook that is not trusted, or is shown by
another program, drops everything else; colours are those of the theme, or readable on both.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distsession.display.render import Bundle, fold, fold_bundles, rank_label
from distsession.notebook.lines import parse_bar
from distsession.notebook.output import Line, Section, Written
from distsession.ranks import format_ranks

__all__ = ["Row", "can_embed", "live_html", "live_text", "section_html", "section_text"]

SHOWN = 30
"""Lines of a block that are shown unfolded."""
BUDGET = 3000
"""Lines of all blocks together that go into the notebook."""
OPEN_BLOCKS = 8
"""Blocks of more than a few lines that are shown unfolded."""
BARS = 4
"""Progress bars of one line that are shown one by one."""
LIVE_ROWS = 16

# Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), readable on white and on black.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00", "#999999")
_ANSI = dict(
    zip(
        range(30, 38),
        ("#555", "#d33", "#293", "#a80", "#37c", "#a3a", "#088", "#999"),
        strict=True,
    )
)
_SGR = re.compile(r"\x1b\[([\d;]*)m")
_OTHER_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_FONT = (
    "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px);"
    "line-height:var(--jp-code-line-height,1.4)"
)
_PRE = (
    f"margin:0;padding:0;border:0;background:none;color:inherit;{_FONT};"
    "white-space:pre-wrap;overflow-wrap:anywhere"
)
_LABEL = "flex:none;min-width:6em;opacity:.8;user-select:none"
_STDERR = "background:var(--jp-rendermime-error-background,rgba(221,51,51,.15))"
_IMAGES = ("image/png", "image/jpeg", "image/gif")
_EMBEDDED = {"text/plain", "text/html", "image/svg+xml", *_IMAGES}


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank does now.

    Attributes:
        since: For how long, as text.
        line: What it wrote last.
    """

    rank: int
    state: str
    since: str = ""
    line: str = ""


# --- while it runs --------------------------------------------------------------------------------


def live_text(rows: Sequence[Row], notice: str) -> str:
    """A line for each rank, and the notice."""
    lines = [
        f"{rank_label(ranks)} {state}{': ' if line else ''}{line}"
        for ranks, (state, _, line) in _fold_rows(rows)
    ]
    return "\n".join([*lines, *([notice] if notice else [])])


def live_html(rows: Sequence[Row], notice: str) -> str:
    """The same as :func:`live_text`, as a table that is replaced as time goes on."""
    folded = _fold_rows(rows)
    cells = [
        "<tr>"
        f'<th scope="row" style="{_CELL};font-weight:normal;opacity:.8;padding-left:.6em;'
        f'border-left:3px solid {_colour(ranks)}">'
        f"{html.escape(rank_label(ranks)[1:-1])}</th>"
        f'<td style="{_CELL}">{html.escape(state)}</td>'
        f'<td style="{_CELL};text-align:right">{html.escape(since)}</td>'
        f'<td style="{_CELL};width:100%">{_live_line(line)}</td></tr>'
        for ranks, (state, since, line) in folded
    ]
    table = (
        f'<div style="max-height:26em;overflow:auto"><table aria-label="what the ranks do" '
        f'style="border-collapse:collapse;margin:0;{_FONT}">{"".join(cells)}</table></div>'
        if cells
        else ""
    )
    said = f'<pre style="{_PRE};opacity:.8">{html.escape(notice)}</pre>' if notice else ""
    return table + said


_CELL = "text-align:left;padding:0 .8em 0 0;border:0;white-space:pre;background:none"


def _fold_rows(rows: Sequence[Row]) -> list[tuple[tuple[int, ...], tuple[str, str, str]]]:
    """Each rank by itself, or, where that is too long, those together that do the same."""
    if len(rows) <= LIVE_ROWS:
        return [((row.rank,), (row.state, row.since, row.line)) for row in rows]
    since = {row.rank: row.since for row in rows}
    alike = fold({row.rank: (row.state, row.line) for row in rows})
    return [(ranks, (state, since[ranks[0]], line)) for ranks, (state, line) in alike]


def _live_line(line: str) -> str:
    bar = parse_bar(line)
    if bar is None:
        return ansi_html(line[:200])
    name = html.escape(f"{bar.label} {bar.percent} %".strip(), quote=True)
    label = f"{html.escape(bar.label)} " if bar.label else ""
    done, _, total = bar.count.partition("/")
    return (
        f'{label}<progress max="100" value="{bar.percent}" aria-label="{name}" '
        f'style="width:12em;height:.8em;vertical-align:middle"></progress> '
        f"{bar.percent:3d} % {html.escape(f'{done:>{len(total)}}/{total} {bar.rest}')}"
    )


# --- afterwards -----------------------------------------------------------------------------------


def section_text(section: Section, log: Callable[[int], str]) -> str:
    """What the ranks wrote and displayed, those that put out the same together."""
    parts = []
    for block in _blocks(section):
        lines = [_ANY_ESCAPE.sub("", text) for _, text in block.lines(log, len(section.texts))]
        gap = "\n" if len(lines) > 1 else " "
        parts.append(rank_label(block.ranks) + gap + "\n".join(lines))
    for ranks, (data, _) in fold_bundles(_bundles(section)):
        text = str(data.get("text/plain", f"<{', '.join(data)}>"))
        parts.append(f"{rank_label(ranks)}{chr(10) if chr(10) in text else ' '}{text}")
    return "\n".join(parts)


_ANY_ESCAPE = re.compile(f"{_SGR.pattern}|{_OTHER_ESCAPES.pattern}")


def section_html(section: Section, log: Callable[[int], str]) -> str:
    """The same as :func:`section_text`, for a notebook."""
    blocks = list(_blocks(section))
    long = sum(block.count > 3 for block in blocks)
    parts = [_block_html(block, log, len(blocks), folded=long > OPEN_BLOCKS) for block in blocks]
    folded = list(fold_bundles(_bundles(section)))
    width = "48%" if len(folded) > 1 else "100%"  # two fit beside each other on any page
    row = [_figure_html(ranks, bundle, width) for ranks, bundle in folded]
    if row:
        parts.append(
            '<div style="display:flex;flex-wrap:wrap;gap:1em;align-items:flex-start">'
            f"{''.join(row)}</div>"
        )
    return "".join(parts)


def _bundles(section: Section) -> dict[int, Bundle]:
    return {rank: (shown.data, shown.metadata) for rank, shown in section.displays.items()}


@dataclass(frozen=True, slots=True)
class _Block:
    """Text that some ranks have in common."""

    ranks: tuple[int, ...]
    written: tuple[Written, ...]

    @property
    def count(self) -> int:
        return self.written[0].count

    def lines(self, log: Callable[[int], str], blocks: int) -> Iterator[tuple[str, str]]:
        """Stream and text of each line that is shown."""
        most = max(2, BUDGET // max(1, blocks))
        first = self.written[0]
        head, tail = list(range(len(first.head))), list(range(len(first.tail)))
        if len(head) + len(tail) > most:
            head, tail = head[: most // 2], tail[-(most // 2) :]
        left_out = first.count - len(head) - len(tail)
        for at in head:
            yield from self._line([written.head[at] for written in self.written])
        if left_out:
            where = log(self.ranks[0])
            kept = f"; all of them: {where}" if where else ""
            yield "note", f"... {left_out:,} lines are left out here{kept}"
        for at in tail:
            yield from self._line([written.tail[at] for written in self.written])

    def _line(self, lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
        bars = [line.bar for line in lines if line.bar is not None]
        if len(bars) < len(lines) or len(lines) == 1:
            yield "bar" if bars else lines[0].stream, lines[0].text
        elif len(lines) <= BARS or any(bar.seconds is None for bar in bars):
            for rank, line in zip(self.ranks[:BARS], lines, strict=False):
                yield "bar", f"[{rank}] {line.text.strip()}"
            if len(lines) > BARS:
                yield "note", f"... and {len(lines) - BARS} more bars at {bars[0].count}"
        else:
            order = sorted(range(len(bars)), key=lambda at: bars[at].seconds or 0)
            for name, at in (("slowest", order[-1]), ("fastest", order[0])):
                text = lines[at].text.strip()
                yield "bar", f"[{name}: rank {self.ranks[at]}] {text}"


def _blocks(section: Section) -> Iterator[_Block]:
    written = {rank: text for rank, text in section.texts.items() if text}
    for ranks, _ in fold({rank: text.key for rank, text in written.items()}):
        yield _Block(ranks, tuple(written[rank] for rank in ranks))


def _colour(ranks: Sequence[int]) -> str:
    return _COLOURS[ranks[0] % len(_COLOURS)]


def _block_html(block: _Block, log: Callable[[int], str], blocks: int, *, folded: bool) -> str:
    label = html.escape(rank_label(block.ranks)[1:-1])
    lines = list(block.lines(log, blocks))
    tail = lines[-SHOWN:]
    body = _lines_html(tail)
    if len(lines) > SHOWN:
        more = f"{len(lines) - SHOWN:,} lines before these"
        body = _details(more, _lines_html(lines[:-SHOWN])) + body
    if folded and block.count > 3:
        last = html.escape(_ANY_ESCAPE.sub("", lines[-1][1])[:100])
        body = _details(f"{block.count:,} lines, the last: {last}", body, escape=False)
    return (
        f'<div role="group" aria-label="{label}" style="display:flex;gap:.8em;margin:.15em 0;'
        f'padding-left:.6em;border-left:3px solid {_colour(block.ranks)}">'
        f'<span title="{html.escape(format_ranks(block.ranks))}" style="{_LABEL};{_FONT}">{label}'
        f'</span><div style="flex:1;min-width:0">{body}</div></div>'
    )


def _details(summary: str, body: str, *, escape: bool = True) -> str:
    text = html.escape(summary) if escape else summary
    return (
        f'<details><summary style="cursor:pointer;opacity:.8;user-select:none;{_FONT}">{text}'
        f"</summary>{body}</details>"
    )


def _lines_html(lines: Sequence[tuple[str, str]]) -> str:
    """One ``<pre>``, the lines of stderr marked."""
    parts: list[str] = []
    run: list[str] = []
    kind = ""

    def flush() -> None:
        if run:
            text = ansi_html("\n".join(run))
            style = {"stderr": _STDERR, "note": "opacity:.7;font-style:italic"}.get(kind)
            parts.append(f'<span style="{style}">{text}</span>' if style else text)
            run.clear()

    for stream, text in lines:
        if stream != kind:
            flush()
            kind = stream
        run.append(text)
    flush()
    return f'<pre style="{_PRE}">' + "\n".join(parts) + "</pre>"


def ansi_html(text: str) -> str:
    """Text with its escape sequences for bold and colours as HTML; others are dropped."""
    parts: list[str] = []
    styles: dict[str, str] = {}
    at = 0
    for found in (*_SGR.finditer(text), None):
        end = len(text) if found is None else found.start()
        if end > at:
            piece = html.escape(_OTHER_ESCAPES.sub("", text[at:end]), quote=False)
            style = ";".join(f"{name}:{value}" for name, value in styles.items())
            parts.append(f'<span style="{style}">{piece}</span>' if style else piece)
        if found is not None:
            at = found.end()
            _apply(found[1], styles)
    return "".join(parts)


def _apply(codes: str, styles: dict[str, str]) -> None:
    numbers = [int(code or 0) for code in codes.split(";")]
    if numbers[0] in (38, 48):  # one of 256 or more colours; the theme may not go with it
        return
    for number in numbers:
        if number == 0:
            styles.clear()
        elif number == 1:
            styles["font-weight"] = "bold"
        elif number == 22:
            styles.pop("font-weight", None)
        elif number == 39:
            styles.pop("color", None)
        elif number in _ANSI or number - 60 in _ANSI:
            styles["color"] = _ANSI[number if number in _ANSI else number - 60]


# --- displays -------------------------------------------------------------------------------------


def can_embed(bundle: Bundle) -> bool:
    """Whether it can stand beside others in one piece of HTML, as well as by itself."""
    return set(bundle[0]) <= _EMBEDDED and bool(bundle[0])


def _figure_html(ranks: tuple[int, ...], bundle: Bundle, width: str) -> str:
    label = html.escape(rank_label(ranks)[1:-1])
    return (
        f'<figure aria-label="{label}" style="margin:0;padding-top:.2em;max-width:{width};'
        f'border-top:3px solid {_colour(ranks)}"><figcaption style="{_LABEL};{_FONT}">{label}'
        f"</figcaption>{_content_html(bundle, label)}</figure>"
    )


def _content_html(bundle: Bundle, label: str) -> str:
    data, metadata = bundle
    if "text/html" in data:
        return f'<div style="overflow-x:auto">{data["text/html"]}</div>'
    if "image/svg+xml" in data:
        return f"<div>{data['image/svg+xml']}</div>"
    for kind in _IMAGES:
        if kind in data:
            size = metadata.get(kind, {}) if isinstance(metadata.get(kind), Mapping) else {}
            given = "".join(
                f' {name}="{html.escape(str(size[name]), quote=True)}"'
                for name in ("width", "height")
                if name in size
            )
            text = html.escape(str(data.get("text/plain", "")), quote=True)
            source = str(data[kind]).replace("\n", "")
            return (
                f'<img src="data:{kind};base64,{html.escape(source, quote=True)}" '
                f'alt="{label}: {text}"{given} style="max-width:100%">'
            )
    return f'<pre style="{_PRE}">{ansi_html(str(data["text/plain"]))}</pre>'
