"""The output of the ranks as HTML and as text.

Pure functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from distsession.display import columns, html
from distsession.display.colors import OTHER_ESCAPES, SGR, without_escapes
from distsession.display.figures import IMAGES, edge, figures_html
from distsession.display.html import Cell, Html, element
from distsession.display.render import Bundle, fold, fold_bundles, fold_many, note_of, rank_label
from distsession.notebook.lines import parse_bar
from distsession.notebook.output import OutputLine, RankText, Section
from distsession.ranks import format_ranks, ranks_text

__all__ = [
    "LiveRow",
    "ansi_html",
    "can_embed",
    "label_html",
    "live_html",
    "live_text",
    "section_html",
    "section_text",
]

UNFOLDED_LINES = 30
"""Lines of a block that are shown unfolded."""
FIRST_LINES = 10
"""Those of them that are from its beginning."""
MAX_OPEN_BLOCKS = 8
"""Blocks of more than a few lines that are shown unfolded."""
LIVE_FOR_S = 4
"""Seconds after which what is live has to have been replaced."""
OUTDATED = "So it was at {}; nothing has come from the kernel since then."
_LIVE = "distsession-live"
_LIVE_STYLE = f"""
@keyframes {_LIVE}{{from,to{{opacity:1}}}}
@keyframes {_LIVE}-note{{from,to{{max-height:0}}}}
.{_LIVE}{{opacity:.5;animation:{_LIVE} {LIVE_FOR_S}s}}
.{_LIVE}-note{{overflow:hidden;animation:{_LIVE}-note {LIVE_FOR_S}s}}
"""
"""Each time it is replaced, the animations begin anew."""
MAX_BARS = 4
"""Progress bars of one line that are shown one by one."""

_ANSI = dict(
    zip(
        range(30, 38),
        ("#555", "#d33", "#293", "#a80", "#37c", "#a3a", "#088", "#999"),
        strict=True,
    )
)
_EMBEDDED = {"text/plain", "text/html", "image/svg+xml", *IMAGES}


@dataclass(frozen=True, slots=True)
class LiveRow:
    """What one rank does now.

    Attributes:
        since: For how long, as text.
        lines: What it wrote last; several, if it draws several progress bars.
    """

    rank: int
    state: str
    since: str = ""
    lines: tuple[str, ...] = ()


# --- while it runs --------------------------------------------------------------------------------


def live_text(rows: Sequence[LiveRow], notice: str) -> str:
    """A line for each rank, and the notice."""
    lines = [
        f"{rank_label(ranks)} {state}{': ' if shown else ''}{without_escapes('  '.join(shown))}"
        for ranks, (state, _, shown) in _fold_rows(rows)
    ]
    return "\n".join([*lines, *([notice] if notice else [])])


def live_html(rows: Sequence[LiveRow], notice: str, at: str = "") -> Html:
    """The same as :func:`live_text`, as a table that is replaced as time goes on.

    Should its kernel end, nobody replaces it: some seconds later it says so, as it does in a
    notebook that is opened again.

    Args:
        rows: Of the ranks.
        notice: A line below them.
        at: The time of day; empty where nothing is to replace it.
    """
    if at and (rows or notice):
        note = element("div", OUTDATED.format(at), class_=f"{_LIVE}-note", style=html.UI_FONT)
        body = element("div", live_html(rows, notice), class_=_LIVE)
        return html.join((element("style", Html(_LIVE_STYLE)), note, body))
    parts = []
    if rows:
        table = html.table(
            (),
            [_live_cells(ranks, *cells) for ranks, cells in _fold_rows(rows)],
            name="what the ranks do",
            style=f"border-collapse:collapse;margin:0;{html.CODE_FONT}",
            cell_style=f"{html.LEFT};padding:0 .8em 0 0;border:0;white-space:pre;background:none",
            has_row_heads=True,
        )
        parts.append(element("div", table, style="max-height:26em;overflow:auto"))
    if notice:
        parts.append(element("pre", notice, style=f"{html.PRE};opacity:.8"))
    return html.join(parts)


def _live_cells(
    ranks: tuple[int, ...], state: str, since: str, lines: tuple[str, ...]
) -> list[str | Cell]:
    head = f"font-weight:normal;opacity:.8;padding-left:.6em;border-left:{edge(ranks)}"
    return [
        Cell(ranks_text(ranks), head),
        state,
        Cell(since, "text-align:right"),
        Cell(html.join(_live_lines(lines)), "width:100%"),
    ]


def _live_lines(lines: Sequence[str]) -> list[Html]:
    drawn = [_live_line(line) for line in lines]
    return drawn if len(drawn) < 2 else [element("div", line) for line in drawn]


_Shown = tuple[str, str, tuple[str, ...]]
"""State, since when, and lines."""


def _fold_rows(rows: Sequence[LiveRow]) -> list[tuple[tuple[int, ...], _Shown]]:
    """Each rank by itself, or, where that is too long, those together that do the same."""
    since = {row.rank: row.since for row in rows}
    alike = fold_many({row.rank: (row.state, row.lines) for row in rows})
    return [(ranks, (state, since[ranks[0]], lines)) for ranks, (state, lines) in alike]


def _live_line(line: str) -> Html:
    bar = parse_bar(line)
    if bar is None:
        return ansi_html(line[:200])
    drawn = element(
        "progress",
        max=100,
        value=bar.percent,
        aria_label=f"{bar.label} {bar.percent} %".strip(),
        style="width:12em;height:.8em;vertical-align:middle",
    )
    text = f" {bar.percent:3d} % {bar.done:>{len(bar.total)}}/{bar.total} {bar.rest}"
    return html.join((f"{bar.label} " if bar.label else "", drawn, text))


# --- afterwards -----------------------------------------------------------------------------------


def section_text(section: Section, log: Callable[[int], str]) -> str:
    """What the ranks wrote and displayed, those that put out the same together."""
    parts: list[str] = []
    blocks = list(_blocks(section))
    labels = [rank_label(block.ranks) for block in blocks]
    lines = columns.labelled(labels, [without_escapes(text) for text in _single_lines(blocks)])
    if lines:
        parts, blocks = lines, []
    for block in blocks:
        if rows := block.only_bars():
            parts += [
                f"{rank_label(row.ranks, row.note)} {without_escapes(row.text)}" for row in rows
            ]
            continue
        lines = [without_escapes(text) for _, text in block.lines(log, len(section.texts))]
        gap = "\n" if len(lines) > 1 or block.note else " "
        parts.append(rank_label(block.ranks, block.note) + gap + "\n".join(lines))
    for ranks, bundle in fold_bundles(_bundles(section)):
        text = str(bundle[0].get("text/plain", f"<{', '.join(bundle[0])}>"))
        label = rank_label(ranks, note_of(bundle))
        parts.append(f"{label}{chr(10) if chr(10) in text else ' '}{text}")
    return "\n".join(parts)


def section_html(section: Section, log: Callable[[int], str]) -> Html:
    """The same as :func:`section_text`, for a notebook."""
    blocks = list(_blocks(section))
    long = sum(block.count > 3 for block in blocks)
    texts = columns.aligned(_single_lines(blocks))
    parts = (
        [
            _labelled_html(block.ranks, _lines_html([(block.stream, text)]))
            for block, text in zip(blocks, texts, strict=True)
        ]
        if texts
        else [
            _block_html(block, log, len(blocks), folded=long > MAX_OPEN_BLOCKS) for block in blocks
        ]
    )
    return html.join((*parts, figures_html(_bundles(section), ansi_html)))


def _single_lines(blocks: Sequence[_Block]) -> list[str]:
    """The lines of blocks that have one each; nothing where any has another number of them."""
    if any(block.count != 1 or block.note or block.only_bars() for block in blocks):
        return []
    return [block.text for block in blocks]


def _bundles(section: Section) -> dict[int, Bundle]:
    return {rank: (shown.data, shown.metadata) for rank, shown in section.displays.items()}


@dataclass(frozen=True, slots=True)
class _BarRow:
    """A progress bar, and whose it is."""

    ranks: tuple[int, ...]
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Block:
    """Text that some ranks have in common."""

    ranks: tuple[int, ...]
    written: tuple[RankText, ...]
    most: int
    note: str = ""
    is_value: bool = False
    again: str = ""

    @property
    def count(self) -> int:
        return self.written[0].count

    @property
    def text(self) -> str:
        """Its first line."""
        return self._first.text

    @property
    def stream(self) -> str:
        """To which that was written."""
        return self._first.stream

    @property
    def _first(self) -> OutputLine:
        return [*self.written[0].head, *self.written[0].tail][0]

    def parts(self, blocks: int) -> tuple[int, int]:
        """How many lines of its beginning and of its end are shown, if there are so many blocks."""
        most = max(2, self.most // max(1, blocks))
        head, tail = len(self.written[0].head), len(self.written[0].tail)
        if head + tail > most:
            head, tail = (most, 0) if self.is_value else (most // 2, most // 2)
        return head, tail

    def lines(self, log: Callable[[int], str], blocks: int) -> Iterator[tuple[str, str]]:
        """Stream and text of each line that is shown."""
        head, tail = self.parts(blocks)
        left_out = self.count - head - tail
        for at in range(head):
            yield from self._line([written.head[at] for written in self.written])
        if left_out and self.is_value:
            yield "note", f"... {left_out:,} more lines of this value are not kept"
        elif left_out:
            yield "note", f"... {left_out:,} lines are left out here{self._kept(log)}"
        for at in range(-tail, 0):
            yield from self._line([written.tail[at] for written in self.written])

    def _kept(self, log: Callable[[int], str]) -> str:
        """Who has the lines that are left out."""
        where = log(self.ranks[0])
        kept = f"; all of them: {where}" if where else ""
        return f"{kept} ({self.again} shows them)" if self.again else kept

    def _line(self, lines: Sequence[OutputLine]) -> Iterator[tuple[str, str]]:
        rows = self._bars(lines)
        if not rows:
            yield "bar" if lines[0].bar is not None else lines[0].stream, lines[0].text
        for row in rows:
            yield "bar", f"{rank_label(row.ranks, row.note)} {row.text}"

    def _bars(self, lines: Sequence[OutputLine]) -> list[_BarRow]:
        """The bars of ranks that have come to the same point, which differ in their times."""
        bars = [line.bar for line in lines if line.bar is not None]
        if len(bars) < len(lines) or len(lines) == 1:
            return []
        texts = [line.text.strip() for line in lines]
        if len(lines) <= MAX_BARS or any(bar.seconds is None for bar in bars):
            shown = zip(self.ranks[:MAX_BARS], texts, strict=False)
            rows = [_BarRow((rank,), text) for rank, text in shown]
            more = self.ranks[MAX_BARS:]
            return [*rows, _BarRow(more, f"at {bars[0].count}, too")] if more else rows
        order = sorted(range(len(bars)), key=lambda at: bars[at].seconds or 0)
        ends = (("slowest", order[-1]), ("fastest", order[0]))
        return [_BarRow((self.ranks[at],), texts[at], name) for name, at in ends]

    def only_bars(self) -> list[_BarRow]:
        """Its bars, where it has nothing else: each has a label, so that it needs none itself."""
        if self.is_value or self.note or self.written[0].left_out:
            return []
        rows = []
        for at in range(len(self.written[0].head)):
            bars = self._bars([written.head[at] for written in self.written])
            if not bars or any(row.note for row in bars):
                return []
            rows += bars
        return [] if self.written[0].tail else rows


def _blocks(section: Section) -> Iterator[_Block]:
    texts = {rank: text.finished() for rank, text in section.texts.items()}
    written = {rank: text for rank, text in texts.items() if text}
    for ranks, _ in fold({rank: text.key for rank, text in written.items()}):
        note = section.notes.get(ranks[0], "")
        together = tuple(written[rank] for rank in ranks)
        yield _Block(ranks, together, section.most, note, section.is_value, section.again)


def _block_html(block: _Block, log: Callable[[int], str], blocks: int, *, folded: bool) -> Html:
    if rows := block.only_bars():
        return html.join(
            _labelled_html(row.ranks, _lines_html([("bar", row.text)]), row.note) for row in rows
        )
    lines = list(block.lines(log, blocks))
    note = _lines_html([("note", block.note)]) if block.note else ""
    body = _value_html(lines) if block.is_value else _log_html(lines, block, blocks)
    if folded and block.count > 3:
        last = without_escapes(lines[-1][1])[:100]
        body = _details(f"{block.count:,} lines, the last: {last}", body)
    return _labelled_html(block.ranks, html.join((note, body)))


def _labelled_html(ranks: Sequence[int], body: Html, note: str = "") -> Html:
    name = ranks_text(ranks)
    return element(
        "div",
        html.label(f"{name} ({note})" if note else name, title=format_ranks(ranks)),
        element("div", body, style="flex:1;min-width:0"),
        role="group",
        aria_label=name,
        style=f"display:flex;gap:.8em;margin:.15em 0;padding-left:.6em;border-left:{edge(ranks)}",
    )


def label_html(ranks: Sequence[int], note: str = "") -> Html:
    """Whose the output below is, where that cannot be part of other HTML."""
    return _labelled_html(ranks, Html(), note)


def _log_html(lines: Sequence[tuple[str, str]], block: _Block, blocks: int) -> Html:
    """What was written: the first lines and the last, and those between behind a click."""
    if len(lines) <= UNFOLDED_LINES:
        return _lines_html(lines)
    last = FIRST_LINES - UNFOLDED_LINES
    first, between, shown = lines[:FIRST_LINES], lines[FIRST_LINES:last], lines[last:]
    left_out = block.count - sum(block.parts(blocks))
    total = left_out + len(between) - any(kind == "note" for kind, _ in between)
    summary = f"{total:,} lines between"
    if left_out:
        summary += f", {left_out:,} of them only in the log"
        summary += f" ({block.again})" if block.again else ""
    return html.join(
        (_lines_html(first), _details(summary, _lines_html(between)), _lines_html(shown))
    )


def _value_html(lines: Sequence[tuple[str, str]]) -> Html:
    """A value: the beginning of it, and what comes after behind a click."""
    if len(lines) <= UNFOLDED_LINES:
        return _lines_html(lines)
    shown, rest = lines[:UNFOLDED_LINES], lines[UNFOLDED_LINES:]
    return html.join((_lines_html(shown), _details(f"{len(rest):,} more lines", _lines_html(rest))))


def _details(summary: str, body: Html) -> Html:
    style = f"cursor:pointer;opacity:.8;user-select:none;{html.CODE_FONT}"
    return html.details(summary, body, summary_style=style)


_LINE_STYLES = {"stderr": f"background:{html.STDERR}", "note": "opacity:.7;font-style:italic"}


def _lines_html(lines: Sequence[tuple[str, str]]) -> Html:
    """One ``<pre>``, the lines of stderr marked."""
    parts = []
    for kind, run in itertools.groupby(lines, key=lambda line: line[0]):
        text = ansi_html("\n".join(text for _, text in run))
        style = _LINE_STYLES.get(kind)
        parts.append(element("span", text, style=style) if style else text)
    return element("pre", Html("\n".join(parts)), style=html.PRE)


def ansi_html(text: str) -> Html:
    """Text with its escape sequences for bold and colours as HTML; others are dropped."""
    parts: list[str] = []
    styles: dict[str, str] = {}
    at = 0
    for found in (*SGR.finditer(text), None):
        end = len(text) if found is None else found.start()
        if end > at:
            piece = OTHER_ESCAPES.sub("", text[at:end])
            style = ";".join(f"{name}:{value}" for name, value in styles.items())
            parts.append(element("span", piece, style=style) if style else piece)
        if found is not None:
            at = found.end()
            _apply(found[1], styles)
    return html.join(parts)


def _apply(codes: str, styles: dict[str, str]) -> None:
    numbers = iter([int(code or 0) for code in codes.split(";")])
    for number in numbers:
        if number in (38, 48):  # one of 256 or more colours; the theme may not go with it
            list(itertools.islice(numbers, 3 if next(numbers, 0) == 2 else 1))
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
