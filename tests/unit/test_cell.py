"""Output below a cell: what is shown when, and what replaces what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import IPython.display
import pytest

from distsession.cluster.base import Channel
from distsession.display.widgets import WIDGET_VIEW
from distsession.kernel.output import NO_NOTICE, Notice
from distsession.notebook import cell
from distsession.notebook.cell import (
    LIVE_AFTER_S,
    LIVE_INTERVAL_S,
    MAX_EMBEDDED,
    PLACE_AFTER_S,
    CellOutput,
)
from distsession.notebook.comms import relay
from distsession.protocol.messages import ClearOutput, CommMessage, Display, RankReport, Text
from distsession.protocol.rank_state import Ending, Outcome


class Clock:
    """A time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def strftime(self, text: str) -> str:
        return time.strftime(text, time.gmtime(self.now))


class Screen:
    """What stands below a cell, as text: each display, with its updates."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.ids: list[str | None] = []

    def display(self, data: dict[str, Any], **options: Any) -> Any:
        at = len(self.shown)
        self.shown.append(data)
        wanted = options.get("display_id")
        self.ids.append(wanted if isinstance(wanted, str) else None)
        screen = self

        class Handle:
            def update(self, data: dict[str, Any], raw: bool, **_: Any) -> None:
                assert raw
                screen.shown[at] = data

        return Handle()

    def update_display(self, data: dict[str, Any], *, display_id: str, **_: Any) -> None:
        self.shown[self.ids.index(display_id)] = data

    @property
    def texts(self) -> list[str]:
        return [data["text/plain"] for data in self.shown]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cell, "time", made)
    return made


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(IPython.display, "display", made.display)
    monkeypatch.setattr(IPython.display, "update_display", made.update_display)
    return made


@pytest.fixture
def output(clock: Clock, screen: Screen) -> CellOutput:
    return CellOutput(lambda rank: f"/logs/{rank}")


def text(rank: int, written: str) -> Text:
    return Text(rank, 1, "stdout", written)


def test_a_short_run_shows_its_output_in_the_end_and_equal_output_once(
    output: CellOutput, screen: Screen
) -> None:
    for rank in range(3):
        output.write(text(rank, "same\n" if rank < 2 else "other\n"))
    assert screen.shown == []
    output.close()
    assert screen.texts == ["[ranks 0-1] same\n[rank 2] other"]


def test_output_that_is_cut_names_the_command_that_shows_all_of_it(
    output: CellOutput, screen: Screen
) -> None:
    output.cell = 7
    output.write(text(0, "line\n" * 500))
    output.close()
    assert "(%session output In 7 shows them)" in screen.texts[0]
    again = CellOutput(lambda rank: f"/logs/{rank}")
    again.cell = 8
    again.show_more()
    again.write(text(0, "line\n" * 30_000))
    again.close()
    assert "left out" in screen.texts[1]
    assert "%session output" not in screen.texts[1]


def test_a_longer_run_has_a_row_for_each_rank_and_then_says_how_long_it_took(
    output: CellOutput, screen: Screen, clock: Clock
) -> None:
    reports = {
        0: RankReport(0, "running", 1.0),
        1: RankReport(1, "idle", outcome=Outcome(Ending.FINISHED)),
    }
    output.tick(lambda _: reports)
    assert screen.shown == []
    clock.now += LIVE_AFTER_S
    output.write(text(0, "loss 1\n"))
    output.tick(lambda _: reports)
    assert screen.texts[0].splitlines()[0].startswith("[rank 0]")
    clock.now += 1
    output.tick(lambda _: reports)
    assert screen.texts == ["[rank 0] running: loss 1\n[rank 1] finished"]
    output.close()
    assert screen.texts == [f"ranks 0-1: {LIVE_AFTER_S + 1:.1f} s", "[rank 0] loss 1"]


def test_ranks_are_asked_for_their_lines_now_and_then_and_what_they_said_stays(
    output: CellOutput, screen: Screen, clock: Clock
) -> None:
    asked = []

    def reports(with_places: bool) -> dict[int, RankReport]:
        asked.append(with_places)
        place = "In[2] line 3" if with_places else ""
        return {0: RankReport(0, "running", request=7, place=place)}

    for _ in range(8):
        clock.now += PLACE_AFTER_S / 4
        output.tick(reports)
    assert asked == [False, False, False, True, False, True, False, True]
    assert screen.texts == ["[rank 0] running In[2] line 3"]


def test_a_notice_is_shown_at_once_and_goes_when_it_is_empty(
    output: CellOutput, screen: Screen
) -> None:
    output.notify(Notice("rank 1 waits"))
    assert screen.texts == ["rank 1 waits"]
    output.notify(NO_NOTICE)
    assert screen.texts == [""]


def test_values_that_are_alike_are_one_and_what_cannot_be_embedded_stands_by_itself(
    output: CellOutput, screen: Screen
) -> None:
    widget = {"application/x-widget": "w", "text/plain": "W"}
    output.show(
        {
            0: ({"text/plain": "3"}, {}),
            1: ({"text/plain": "3"}, {}),
            2: ({"text/html": "<b>3</b>", "text/plain": "b"}, {}),
            3: (widget, {}),
            4: (dict(widget), {}),
        }
    )
    assert screen.texts == ["[ranks 0-1] 3\n[rank 2] b", "[ranks 3-4]", "W"]


def test_two_ranks_that_update_the_same_display_do_not_overwrite_each_other(
    output: CellOutput, screen: Screen
) -> None:
    for rank in (0, 1):
        output.write(Display(rank, 1, {"text/plain": f"{rank}"}, {}, display_id="bar"))
    changed = Display(1, 1, {"text/plain": "new"}, {}, display_id="bar", update=True)
    output.write(changed)
    output.close()
    assert screen.texts == ["[rank 0] 0\n[rank 1] new"]


def test_displays_with_an_id_stand_in_the_order_of_ranks_and_change_where_they_stand(
    output: CellOutput, screen: Screen
) -> None:
    def table(rank: int, written: str, update: bool = True, **data: str) -> Display:
        data = data or {"text/html": f"<b>{written}</b>", "text/plain": written}
        return Display(rank, 1, dict(data), {}, display_id="table", update=update)

    for rank in (1, 0):
        output.write(table(rank, f"step {rank}", update=False))
    output.write(text(0, "after\n"))
    output.write(table(1, "step 8"))
    output.close()
    assert screen.texts == ["[rank 0] step 0\n[rank 1] step 8", "[rank 0] after"]
    later = CellOutput(lambda rank: f"/logs/{rank}")
    later.write(table(0, "step 9"))
    later.write(table(1, "", **{"text/latex": "$x$", "text/plain": "x"}))
    later.close()
    assert screen.texts == ["[rank 0] step 9\n[rank 1] x", "[rank 0] after"]


def test_of_displays_with_an_id_as_many_are_known_as_a_bound(
    output: CellOutput, screen: Screen
) -> None:
    for number in range(MAX_EMBEDDED + 5):
        shown = {"text/html": "<b>x</b>", "text/plain": "x"}
        output.write(Display(0, 1, shown, {}, display_id=f"number {number}"))
    output.close()
    assert len(cell._embedded._places) == MAX_EMBEDDED


def test_a_figure_does_not_wait_for_the_end(
    output: CellOutput, screen: Screen, clock: Clock
) -> None:
    output.write(text(0, "before\n"))
    clock.now += LIVE_INTERVAL_S
    output.write(Display(0, 1, {"image/png": "AAAA", "text/plain": "<Figure>"}, {}))
    output.write(text(0, "after\n"))
    assert screen.texts == ["[rank 0] before\n[rank 0] <Figure>"]
    output.close()
    assert screen.texts == ["[rank 0] before\n[rank 0] <Figure>", "[rank 0] after"]


def test_what_is_cleared_is_not_shown(output: CellOutput, screen: Screen) -> None:
    output.write(text(0, "old\n"))
    output.write(ClearOutput(0, 1, wait=False))
    output.write(text(0, "new\n"))
    output.close()
    assert screen.texts == ["[rank 0] new"]


# --- widgets --------------------------------------------------------------------------------------


class Link(Channel):
    """Ranks whose processes all live."""

    def process_of(self, rank: int) -> int | None:
        return 0

    submit = pending = forget = None  # type: ignore[assignment]


def bar(rank: int, value: float = 3) -> list[CommMessage | Display]:
    """A progress bar that a rank makes and displays."""
    model_id = f"bar-{rank}"
    state = {"_model_name": "FloatProgressModel", "max": 10, "value": value}
    content = {"data": {"state": state}, "target_name": "jupyter.widget"}
    data = {WIDGET_VIEW: {"model_id": model_id}, "text/plain": "FloatProgress()"}
    opening = CommMessage(rank, 1, 0, "comm_open", model_id, content, {})
    return [opening, Display(rank, 1, data, {})]


def change(rank: int, kind: str = "comm_msg", **state: float) -> CommMessage:
    data = {"method": "update", "state": state}
    return CommMessage(rank, 1, 0, kind, f"bar-{rank}", {"data": data}, {})


@pytest.fixture
def no_bars_stay() -> Iterator[None]:
    yield
    for rank in range(12):
        relay.receive(change(rank, "comm_close"), Link())


@pytest.mark.usefixtures("no_bars_stay")
def test_widgets_stand_in_the_order_of_ranks_wherever_they_come_from(
    output: CellOutput, screen: Screen
) -> None:
    output.connect(range(3), Link())
    for rank in (2, 0, 1):
        for message in bar(rank):
            output.write(message)
    assert WIDGET_VIEW in screen.shown[0]
    output.write(change(1, value=10))
    output.close()
    lines = screen.texts[0].splitlines()
    assert [line[:8] for line in lines] == ["[rank 0]", "[rank 1]", "[rank 2]"]
    assert [line.count("#") for line in lines] == [6, 20, 6]
    assert len(screen.shown) == 1


@pytest.mark.usefixtures("no_bars_stay")
def test_a_widget_that_is_closed_or_cleared_is_gone(output: CellOutput, screen: Screen) -> None:
    output.connect(range(3), Link())
    for message in (*bar(0), *bar(1), *bar(2)):
        output.write(message)
    output.write(change(1, "comm_close"))
    output.write(ClearOutput(2, 1, wait=True))
    for message in bar(2, 5):
        output.write(message)
    output.close()
    assert [line.count("#") for line in screen.texts[0].splitlines()] == [6, 10]


@pytest.mark.usefixtures("no_bars_stay")
@pytest.mark.parametrize(("ranks", "text_bars"), [(12, False), (2, True)])
def test_bars_are_lines_where_there_are_many_or_no_widgets(
    output: CellOutput, screen: Screen, clock: Clock, ranks: int, text_bars: bool
) -> None:
    output.text_bars = text_bars
    output.connect(range(ranks), Link())
    for rank in range(ranks):
        for message in bar(rank, 5):
            output.write(message)
    clock.now += LIVE_AFTER_S
    output.write(change(0, value=5))
    assert f"|{'#' * 10}{' ' * 10}|" in screen.texts[0]
    output.close()
    assert not any(WIDGET_VIEW in data for data in screen.shown)
    assert screen.texts[-1].startswith(f"[ranks 0-{ranks - 1}] |{'#' * 10} ")


def test_what_stands_by_itself_comes_at_once_and_in_the_order_of_ranks(
    output: CellOutput, screen: Screen
) -> None:
    def markdown(rank: int, number: int) -> Display:
        text = f"rank {rank}, {number}"
        return Display(rank, 1, {"text/markdown": text, "text/plain": text}, {})

    for count, (rank, number) in enumerate([(2, 1), (0, 1), (0, 2), (1, 1), (2, 2), (1, 2)], 1):
        output.write(markdown(rank, number))
        assert len(screen.shown) == 2 * count
    output.close()
    assert screen.texts == [
        line
        for number in (1, 2)
        for rank in (0, 1, 2)
        for line in (f"[rank {rank}]", f"rank {rank}, {number}")
    ]
