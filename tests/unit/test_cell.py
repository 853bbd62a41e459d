"""Output below a cell: what is shown when, and what replaces what."""

from __future__ import annotations

from typing import Any

import IPython.display
import pytest

from distsession.notebook import cell
from distsession.notebook.cell import LIVE_AFTER_S, LIVE_INTERVAL_S, PLACE_AFTER_S, CellOutput
from distsession.protocol.messages import ClearOutput, Display, RankReport, Text
from distsession.protocol.rank_state import Ending, Outcome


class Clock:
    """A time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


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
            def update(self, data: dict[str, Any], raw: bool) -> None:
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
    output.notify("rank 1 waits")
    assert screen.texts == ["rank 1 waits"]
    output.notify("")
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
    assert screen.texts == ["[rank 0]", "0", "[rank 1]", "new"]


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
