"""The ranks' output under a notebook's cell.

While a run lasts, one block has a line for each rank: what it does, and what it wrote last. When
it is over, that block says how long it took, and what the ranks put out follows, ranks that put
out the same together. Figures do not wait for the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distsession.cluster.base import Channel
from distsession.cluster.pending import OutputMessage
from distsession.display.render import Bundle, fold_bundles, note_of, state_and_since
from distsession.display.widgets import WIDGET_VIEW, Bars, model_of
from distsession.kernel.output import Notice, Output
from distsession.notebook import stdin
from distsession.notebook.apart import InRankOrder, display_apart
from distsession.notebook.front_end import has_ipywidgets, shows_widgets
from distsession.notebook.kernel_end import kernel_ends
from distsession.notebook.lines import MAX_LIVE_BARS, Line
from distsession.notebook.output import HEAD_LINES, TAIL_LINES, RankText, Section, Transcript
from distsession.notebook.output_html import (
    LIVE_FOR_S,
    LiveRow,
    can_embed,
    live_html,
    live_text,
    section_html,
    section_text,
)
from distsession.notebook.running_cell import cell_number
from distsession.notebook.terminal import TerminalOutput
from distsession.notebook.wording import worded
from distsession.protocol.messages import ClearOutput, CommMessage, Display, RankReport, Text
from distsession.protocol.rank_state import RankState
from distsession.ranks import ranks_text

__all__ = ["CellOutput", "make_output"]

LIVE_AFTER_S = 0.5
"""Seconds that a run takes before the block of its ranks is shown."""
LIVE_INTERVAL_S = 0.2
MORE_LINES = 20_000
"""Lines of all ranks together that are shown when output is shown again."""
PLACE_AFTER_S = 2.0
"""Seconds after which ranks are asked for the line that they are at, and how often."""
DISPLAY_PAUSE_FACTOR = 10
"""How many times longer than it takes to show something the pause after it is."""


MAX_EMBEDDED = 100
"""Displays that can still be updated where they stand among those of other ranks."""
MAX_WIDGET_RANKS = 8
"""Ranks whose progress bars are shown as widgets; those of more are lines of text."""


def make_output(log: Callable[[int], str] | None) -> CellOutput | TerminalOutput:
    """A place for output: the notebook's cell, or the terminal.

    Args:
        log: Gives the path of a rank's log file; None for output that belongs to no run.
    """
    # Another thread may be half-way through importing it.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    made: CellOutput | TerminalOutput
    if not hasattr(shell, "kernel"):
        made = TerminalOutput()
    elif hasattr(getattr(shell, "display_pub", None), "outputs"):  # IPython's, within %%capture
        made = CapturedOutput()
    else:
        made = BackgroundOutput() if log is None else CellOutput(log)
    if shell is not None:
        made.cell = cell_number(shell)
    return made


class _Embedded:
    """Where displays stand that a rank may update, in this cell or in a later one."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int, str], tuple[CellOutput, Transcript]] = {}

    def keep(self, place: tuple[int, int, str], where: tuple[CellOutput, Transcript]) -> None:
        self._places.pop(place, None)
        self._places[place] = where
        while len(self._places) > MAX_EMBEDDED:
            del self._places[next(iter(self._places))]

    def get(self, place: tuple[int, int, str]) -> tuple[CellOutput, Transcript] | None:
        return self._places.get(place)


_embedded = _Embedded()


class CapturedOutput(TerminalOutput):
    """Output of a cell that ``%%capture`` keeps: lines as text, and what is rich as displays."""

    def write(self, message: OutputMessage) -> None:
        if isinstance(message, Display) and set(message.data) != {"text/plain"}:
            self._flush()
            display_apart([message.rank], (message.data, message.metadata))
        else:
            super().write(message)

    def ends_soon(self, wait: float) -> bool:
        """Whether the kernel is about to be restarted or shut down."""
        return kernel_ends(wait)

    def show(self, shown: dict[int, Bundle]) -> None:
        plain = {rank: each for rank, each in shown.items() if set(each[0]) == {"text/plain"}}
        super().show(plain)
        rich = {rank: each for rank, each in shown.items() if rank not in plain}
        for ranks, bundle in fold_bundles(rich):
            display_apart(ranks, bundle)


class BackgroundOutput(TerminalOutput):
    """Output between runs, in a notebook: text as it comes, and anything else as in a run."""

    _source: tuple[Sequence[int], Channel] | None = None

    def connect(self, ranks: Sequence[int], channel: Channel) -> None:
        self._source = ranks, channel

    def write(self, message: OutputMessage) -> None:
        if isinstance(message, (Display, CommMessage)):
            output = CellOutput(lambda _: "")
            output.text_bars = self.text_bars
            if self._source is not None:
                output.connect(*self._source)
            output.write(message)
            output.close()
        else:
            super().write(message)


class CellOutput(Output):
    """One run's output in a notebook.

    Args:
        log: Gives the path of a rank's log file, which has everything that is left out here.
    """

    can_ask = True

    def __init__(self, log: Callable[[int], str]):
        self._log = log
        self._transcript = Transcript()
        self._began = time.monotonic()
        self._live: Any = None
        self._live_shown: tuple[list[LiveRow], str] = ([], "")
        self._live_until = 0.0
        """When it is sent again though it has not changed."""
        self._next_live = self._began + LIVE_AFTER_S
        self._next_sections = 0.0
        self._next_place = self._began + PLACE_AFTER_S
        self._states: dict[int, RankReport] = {}
        self._places: dict[int, tuple[int, str]] = {}
        self._notice = ""
        self._channel: Channel | None = None
        self._has_widgets = True
        self._widget_rows: dict[int, Any] = {}
        self._apart: dict[int, InRankOrder] = {}
        self._cleared: set[int] = set()
        self._bars: Bars | None = None
        self._shows_more = False

    # --- what a run tells -------------------------------------------------------------------------

    def connect(self, ranks: Sequence[int], channel: Channel) -> None:
        """These ranks put out something, and their widgets can be answered so."""
        self._channel = channel
        self._has_widgets = (
            len(ranks) <= MAX_WIDGET_RANKS and not self.text_bars and shows_widgets()
        )
        _close_ended_comms()

    def write(self, message: OutputMessage) -> None:
        """Take one piece of output of one rank."""
        if isinstance(message, CommMessage):
            self._relay(message)
        elif isinstance(message, Text):
            self._clear_widgets(message.rank)
            self._transcript.write(message.rank, message.stream, message.text)
        elif isinstance(message, ClearOutput):
            self._transcript.clear(message.rank, message.wait)
            self._clear_widgets(message.rank, message.wait)
        elif isinstance(message, Display):
            self._handle_display(message)
        self._refresh()

    def tick(self, reports: Callable[[bool], Mapping[int, RankReport]]) -> None:
        """Called several times a second while ranks work."""
        now = time.monotonic()
        if now < self._next_live:
            return
        with_places = now >= self._next_place
        if with_places:
            self._next_place = now + PLACE_AFTER_S / 2
        self._states = dict(reports(with_places))
        if with_places:
            self._places = {
                rank: (report.request, report.place) for rank, report in self._states.items()
            }
        self._refresh()

    def go_on(self, seconds: float) -> None:
        """An earlier kernel began the run."""
        self._began -= seconds

    def fail(self, text: str) -> None:
        """Say it on the standard error, below the output."""
        sys.stderr.write(f"{worded(text)}\n")

    def remark(self, text: str) -> None:
        """Say it below the output."""
        self._finish()
        sys.stdout.write(f"{worded(text)}\n")
        sys.stdout.flush()

    def ends_soon(self, wait: float) -> bool:
        """Whether the kernel is about to be restarted or shut down."""
        return kernel_ends(wait)

    def show_more(self) -> None:
        """Show as much as a page can take."""
        self._shows_more = True
        self._transcript = Transcript(MORE_LINES)

    def notify(self, notice: Notice) -> None:
        """Show a line about the run that replaces the one before."""
        self._notice = worded(notice.text)
        self._refresh_live()

    def show(self, shown: dict[int, Bundle]) -> None:
        """Show the last value of a cell, ranks that show the same folded into one."""
        self._finish()
        section = Section(is_value=True)
        separate: dict[int, Bundle] = {}
        for rank, (data, metadata) in shown.items():
            if set(data) == {"text/plain"}:
                section.notes[rank] = note_of((data, metadata))
                written = section.texts[rank] = RankText(HEAD_LINES + TAIL_LINES, 0)
                written.add([Line(line) for line in data["text/plain"].split("\n")])
            elif can_embed((data, metadata)):
                section.displays[rank] = Display(rank, 0, data, metadata)
            elif not self._show_widget(Display(rank, 0, data, metadata)):
                separate[rank] = data, metadata
        self._show_section(section)
        for ranks, bundle in fold_bundles(separate):
            display_apart(ranks, bundle)

    def close(self) -> None:
        """The run is over."""
        self._finish()

    def ask(self, prompt: str, secret: bool) -> str:
        """Have somebody answer a rank, below all that has been put out so far."""
        if self._live is not None:
            self._update_live("", "")
            self._live = None
        self._finish()
        self._transcript = Transcript()  # what comes from now on belongs below the answer
        try:
            return stdin.read_input(prompt, secret)
        finally:
            self._next_live = time.monotonic() + LIVE_AFTER_S

    # --- displays ---------------------------------------------------------------------------------

    def _handle_display(self, message: Display) -> None:
        self._clear_widgets(message.rank)
        if message.display_id or message.update:
            self._show_apart(message)
        if message.update:
            self._update(message)
        elif self._show_widget(message):
            pass
        elif not can_embed((message.data, message.metadata)):
            self._show_displays()
            self._display_apart(message)
        elif set(message.data) == {"text/plain"} and not message.display_id:
            text = f"{message.data['text/plain']}\n"
            self._transcript.write(message.rank, "stdout", text)
        else:
            self._transcript.display(message)
            if message.display_id:
                _embedded.keep(self._place(message), (self, self._transcript))

    def _display_apart(self, message: Display) -> None:
        bundle = message.data, message.metadata
        if message.display_id or WIDGET_VIEW in message.data:  # which keeps its place
            display_apart([message.rank], bundle, _rank_display_id(message))
            return
        at = self._transcript.position(message.rank)
        if at not in self._apart or self._apart[at].is_full:
            self._apart[at] = InRankOrder()
        self._apart[at].add(message.rank, bundle)

    def _update(self, message: Display) -> None:
        """Show what something displayed is now: in this output, in an earlier one, or by itself."""
        found = _embedded.get(self._place(message))
        if found is None:
            _update(message)
            return
        output, transcript = found
        if not can_embed((message.data, message.metadata)):
            text = str(message.data.get("text/plain", f"<{', '.join(message.data)}>"))
            message = replace(message, data={"text/plain": text})
        if transcript.update(message) and transcript is not self._transcript:
            for section in transcript:
                if section.changed:
                    output._show_section(section)

    def _place(self, message: Display) -> tuple[int, int, str]:
        return id(self._channel), message.rank, message.display_id

    # --- widgets ----------------------------------------------------------------------------------

    def _relay(self, message: CommMessage) -> None:
        if self._channel is None or not has_ipywidgets():
            return
        from distsession.notebook.comms import relay

        relay.receive(message, self._channel, publish=self._has_widgets)

    def _show_apart(self, message: Display) -> None:
        """A widget that is about to be displayed by itself has to be known to the page."""
        model_id = model_of(message)
        if model_id is not None and has_ipywidgets():
            from distsession.notebook.comms import relay

            relay.show_apart(model_id)

    def _show_widget(self, message: Display) -> bool:
        """Show a widget beside those of other ranks, or a bar as a line; False if it is neither."""
        model_id = model_of(message)
        if model_id is None or message.display_id or not has_ipywidgets():
            return False
        from distsession.notebook.comms import WidgetRows, relay

        if relay.models.get(model_id) is None:
            return False
        if not self._has_widgets:
            self._bars = self._bars or Bars(relay.models)
            if self._bars.show(message):
                return True
        self._show_displays()
        at = self._transcript.position(message.rank)
        if at not in self._widget_rows:
            self._widget_rows[at] = WidgetRows()
        self._widget_rows[at].add(message.rank, model_id, str(message.data.get("text/plain", "")))
        return True

    def _clear_widgets(self, rank: int, wait: bool | None = None) -> None:
        """Take a rank's widgets away: now, or when it next puts something out."""
        if wait is None and rank not in self._cleared:
            return
        if wait:
            self._cleared.add(rank)
            return
        self._cleared.discard(rank)
        for rows in self._widget_rows.values():
            rows.clear(rank)

    def _finish_widgets(self) -> None:
        for rank, text in () if self._bars is None else self._bars.take_all():
            self._transcript.add_bar(rank, text)
        for rows in self._widget_rows.values():
            rows.finish()
        self._widget_rows.clear()
        _close_ended_comms()

    def _show_section(self, section: Section) -> None:
        from IPython.display import display

        section.changed = False
        if self.cell is not None and not self._shows_more:
            section.again = f"%session output In {self.cell}"
        as_html = section_html(section, self._log)
        data = {"text/html": as_html, "text/plain": section_text(section, self._log)}
        if section.handle is not None:
            section.handle.update(data, raw=True)
        elif as_html:
            section.handle = display(data, raw=True, display_id=True)

    # --- showing ----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        now = time.monotonic()
        if now >= self._next_sections:
            self._show_displays()
        if now >= self._next_live:
            self._refresh_live()

    def _show_displays(self) -> None:
        """Sections that have something displayed, without waiting for the end."""
        began = time.monotonic()
        last = max(
            (at for at, section in enumerate(self._transcript) if section.displays), default=-1
        )
        for section in self._transcript.sections[: last + 1]:
            if section.changed:
                self._show_section(section)
        now = time.monotonic()
        self._next_sections = now + max(LIVE_INTERVAL_S, DISPLAY_PAUSE_FACTOR * (now - began))

    def _refresh_live(self) -> None:
        self._next_live = max(self._next_live, time.monotonic() + LIVE_INTERVAL_S)
        if self._widget_rows and not shows_widgets():
            for widgets in self._widget_rows.values():
                widgets.update_text()
        rows = [] if time.monotonic() - self._began < LIVE_AFTER_S else self._live_rows()
        now = time.monotonic()
        is_same = (rows, self._notice) == self._live_shown
        if is_same and (now < self._live_until or not (rows or self._notice)):
            return
        self._live_shown, self._live_until = (rows, self._notice), now + LIVE_FOR_S / 4
        at = time.strftime("%H:%M:%S")
        self._update_live(live_html(rows, self._notice, at), live_text(rows, self._notice))

    def _update_live(self, as_html: str, as_text: str) -> None:
        from IPython.display import display

        data = {"text/html": as_html, "text/plain": as_text}
        if self._live is not None:
            self._live.update(data, raw=True)
        elif as_text:
            self._live = display(data, raw=True, display_id=True)

    def _live_rows(self) -> list[LiveRow]:
        rows = []
        with_bars = set() if self._bars is None else self._bars.ranks
        for rank in sorted({*self._states, *self._transcript.ranks, *with_bars}):
            state, since = "", ""
            report = self._states.get(rank)
            if report is not None:
                state, since = _state(report, self._places.get(rank, (0, "")))
            bars = () if self._bars is None else self._bars.live(rank)[-MAX_LIVE_BARS:]
            rows.append(LiveRow(rank, state, since, bars or self._transcript.live(rank)))
        return rows

    def _finish(self) -> None:
        """Show everything, and have the block say how long it took."""
        self._finish_widgets()
        self._transcript.finish()
        if self._live is not None:
            seconds = time.monotonic() - self._began
            who = f"{ranks_text(sorted(self._states))}: " if self._states else "took "
            text = f"{who}{seconds:.1f} s"
            self._update_live(live_html([], text), text)
            self._live = None
        for section in self._transcript:
            if section.changed:
                self._show_section(section)
        self._notice, self._live_shown = "", ([], "")


def _state(report: RankReport, place: tuple[int, str]) -> tuple[str, str]:
    """What a rank does, and since when; the place is that of the last time it was asked."""
    if report.state == RankState.IDLE and report.outcome is not None:
        return report.outcome.text, ""
    if not report.place and place[0] == report.request:
        report = replace(report, place=place[1])
    return state_and_since(report)


def _close_ended_comms() -> None:
    """Where no widget was ever relayed, there is nothing to close, nor to import for it."""
    comms = sys.modules.get("distsession.notebook.comms")
    if comms is not None:
        comms.relay.close_ended()


def _rank_display_id(message: Display) -> str:
    """Two ranks may use the same id; they must not overwrite each other."""
    return f"{message.display_id}-rank{message.rank}" if message.display_id else ""


def _update(message: Display) -> None:
    from IPython.display import update_display

    update_display(
        message.data, raw=True, display_id=_rank_display_id(message), metadata=message.metadata
    )
