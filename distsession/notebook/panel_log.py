"""The panel's view of the log of each rank: its end as it grows, older pages, and a search."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from distsession.display import html
from distsession.display.colors import without_escapes
from distsession.display.html import Html, element, join
from distsession.kernel.log_text import LogPage, LogReader, LogSource
from distsession.notebook.output_html import ansi_html

__all__ = ["LogView", "log_html"]

PAGE_LINES = 200
"""Lines that are shown of a log."""
NEAR_LINES = 8
"""Lines that are shown before and after a match."""
STREAMS = ("stdout", "stderr")

LogSourceOf = Callable[[int, str], LogSource]


class LogView:
    """A part of the panel that is closed at first.

    Args:
        ranks: Of the session.
        log_source: Gives the log file of a rank's stream.
    """

    def __init__(self, ranks: Sequence[int], log_source: LogSourceOf):
        import ipywidgets

        self._log_source = log_source
        self._lock = threading.RLock()
        self._reader = LogReader("")
        self._end: int | None = None  # of the page that is shown; None: of the log
        self._page = LogPage(0, 0, "")
        self._match = -1
        self._shown_size = -1
        auto = {"width": "auto"}
        self._rank = ipywidgets.Dropdown(
            options=[(f"rank {rank}", rank) for rank in ranks], value=ranks[0], layout=auto
        )
        self._stream = ipywidgets.Dropdown(options=STREAMS, value=STREAMS[0], layout=auto)
        self._wanted = ipywidgets.Text(
            placeholder="Find, and press Enter", continuous_update=False, layout={"width": "14em"}
        )
        self._older = ipywidgets.Button(description="Older", layout=auto)
        self._newer = ipywidgets.Button(description="Newer", layout=auto)
        self._close = ipywidgets.Button(description="Close log", layout=auto)
        self._status = ipywidgets.HTML()
        self._text = ipywidgets.HTML()
        # From its end upwards, so that the end of the log is to be seen.
        box = {"max_height": "24em", "overflow": "auto", "flex_flow": "column-reverse"}
        self.widget = ipywidgets.VBox(
            [
                ipywidgets.HBox(list(self.controls), layout={"flex_flow": "row wrap"}),
                self._status,
                ipywidgets.Box([self._text], layout=box),
            ],
            layout={"display": "none"},
        )
        for choice in (self._rank, self._stream):
            choice.observe(lambda _: self._begin(), "value")
        self._wanted.observe(lambda _: self._begin(), "value")
        self._older.on_click(lambda _: self._move(-1))
        self._newer.on_click(lambda _: self._move(1))
        self._close.on_click(lambda _: self.close())

    @property
    def controls(self) -> tuple[Any, ...]:
        """What can be clicked, chosen and typed into."""
        return (
            self._rank,
            self._stream,
            self._wanted,
            self._older,
            self._newer,
            self._close,
        )

    @property
    def is_open(self) -> bool:
        return bool(self.widget.layout.display != "none")

    def open(self, rank: int | None = None) -> None:
        """Show it.

        Args:
            rank: Whose log. Default: the one of before.
        """
        if rank is not None:
            self._rank.value = rank
        self.widget.layout.display = ""
        self._begin()

    def close(self) -> None:
        """Hide it, and read no more."""
        self.widget.layout.display = "none"

    def disable(self) -> None:
        """The session is closed, and its logs are gone."""
        for control in self.controls:
            control.disabled = control is not self._close

    def refresh(self) -> None:
        """Show what was written since."""
        with self._lock:
            if not self.is_open:
                return
            source = self._log_source(self._rank.value, self._stream.value)
            if source.name != self._reader.name:  # the rank was replaced
                self._begin()
            elif self._reader.size != self._shown_size:
                self._reader.search(self._wanted.value)
                self._show()

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Another log, or another search: from its end."""
        with self._lock:
            if not self.is_open:
                return
            source = self._log_source(self._rank.value, self._stream.value)
            if source.name != self._reader.name:
                self._reader = LogReader(source)
            self._reader.search(self._wanted.value)
            self._end, self._match = None, len(self._reader.matches) - 1
            self._show()

    def _move(self, step: int) -> None:
        with self._lock:
            reader = self._reader
            if self._wanted.value:
                last = len(reader.matches) - 1
                self._match = max(min(self._match + step, last), min(0, last))
            elif step < 0:
                self._end = self._page.begin or self._end
            elif self._end is not None:
                end = reader.after(self._end, PAGE_LINES).end
                self._end = None if end >= reader.size else end
            self._show()

    def _show(self) -> None:
        reader, wanted = self._reader, self._wanted.value
        size = self._shown_size = reader.size
        if wanted and reader.matches:
            self._match = max(self._match, 0)
            self._page = reader.around(reader.matches[self._match], NEAR_LINES)
            status = f"match {self._match + 1:,} of {len(reader.matches):,}"
        elif wanted:
            self._page = LogPage(size, size, "")
            status = f"no {wanted!r} in {size:,} bytes"
        else:
            end = size if self._end is None else self._end
            self._page = reader.before(end, PAGE_LINES)
            status = _where(self._page, size)
        if reader.note:
            status = f"{status}, {reader.note}"
        if not reader.name:
            status = "an inline session has no log: its output is the notebook's own"
        _set_value(self._status, element("div", status, role="status", style=html.UI_FONT))
        name = f"Log of rank {self._rank.value}, {self._stream.value}"
        _set_value(self._text, log_html(self._page.text, wanted, name))


def _where(page: LogPage, size: int) -> str:
    if not size:
        return "nothing was written"
    if page.begin == 0 and page.end >= size:
        return "all of it"
    place = "the end" if page.end >= size else f"up to {100 * page.end / size:.0f} %"
    return f"{place} of {size:,} bytes"


def log_html(text: str, wanted: str, name: str) -> Html:
    """A page of a log, with what was looked for marked.

    Args:
        text: Its lines.
        wanted: What was looked for.
        name: What those are told who cannot see it.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    body = "\n".join(lines)
    body = _marked(without_escapes(body), wanted) if wanted else ansi_html(body)
    return element("pre", body, role="log", aria_label=name, style=html.PRE)


def _marked(text: str, wanted: str) -> Html:
    flags = re.IGNORECASE if wanted == wanted.lower() else re.NOFLAG
    pieces = re.split(f"({re.escape(wanted)})", text, flags=flags)
    return join(element("mark", piece) if at % 2 else piece for at, piece in enumerate(pieces))


def _set_value(widget: Any, value: str) -> None:
    """Nothing is sent that the front end has already."""
    if widget.value != value:
        widget.value = value
