"""The panel's widgets and buttons, with a session that is made up."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from distsession.display.html import Html
from distsession.display.panel import RankRow, Snapshot
from distsession.kernel.log_text import LocalLog
from distsession.notebook.panel import PanelWidgets


class Facts:
    """What ``diagnose()`` gives."""

    def __init__(self, text: str):
        self.text = text

    def bundle(self) -> dict[str, Any]:
        return {"text/html": Html(f"<p>{self.text}</p>")}


class Channel:
    busy: frozenset[int] = frozenset()

    def is_busy(self, rank: int) -> bool:
        return rank in self.busy


class Session:
    """As much of a session as the panel needs."""

    ranks = (0, 1, 2)
    is_open = True
    refusal = ""

    def __init__(self) -> None:
        self.channel = Channel()
        self.hit = True
        self.restarted: list[int] = []
        self.held = threading.Event()
        self.held.set()

    def log_source(self, rank: int, stream: str) -> LocalLog:
        return LocalLog("")

    def status(self) -> str:
        return "closed"

    def interrupt(self) -> bool:
        assert self.held.wait(10)
        return self.hit

    def diagnose(self, stacks: bool = False) -> Facts:
        return Facts("stacks" if stacks else "states")

    def restart(self, ranks: list[int]) -> None:
        self.restarted += ranks


def snapshot(*kinds: str) -> Snapshot:
    rows = [
        RankRow(rank, "alpha", 10 + rank, "cpu", kind, f"{kind} <{rank}>", "")
        for rank, kind in enumerate(kinds)
    ]
    return Snapshot("3 ranks", (("backend", "gloo"),), (), tuple(rows))


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def widgets(session: Session) -> PanelWidgets:
    return PanelWidgets(session, None, snapshot("idle", "idle", "idle"))  # type: ignore[arg-type]


def click(widgets: PanelWidgets, name: str) -> str:
    """Press a button, and wait for what comes of it."""
    widgets._buttons[name].click()
    return answer(widgets)


def answer(widgets: PanelWidgets) -> str:
    for thread in threading.enumerate():
        if thread.name == "distsession-button":
            thread.join(10)
    return str(widgets._answer.html.value)


def test_the_widgets_show_the_status_and_the_ranks(widgets: PanelWidgets) -> None:
    assert "3 ranks" in widgets._status.value
    assert "idle &lt;2&gt;" in widgets._rows.value
    assert "backend" in widgets._config.value


def test_stop_says_whether_something_ran(widgets: PanelWidgets, session: Session) -> None:
    assert "what ran is interrupted" in click(widgets, "Stop")
    session.hit = False
    assert "nothing was running" in click(widgets, "Stop")


def test_diagnose_and_stacks_show_their_tables(widgets: PanelWidgets) -> None:
    assert "<p>states</p>" in click(widgets, "Diagnose")
    assert "<p>stacks</p>" in click(widgets, "Stacks")


def test_a_second_click_while_the_first_is_handled_does_nothing(
    widgets: PanelWidgets, session: Session
) -> None:
    session.held.clear()
    widgets._buttons["Stop"].click()
    widgets._buttons["Stop"].click()
    running = [t for t in threading.enumerate() if t.name == "distsession-button"]
    assert len(running) == 1
    session.held.set()
    running[0].join(10)


def test_a_restart_needs_a_rank_and_that_the_others_are_idle(
    widgets: PanelWidgets, session: Session
) -> None:
    assert "choose a rank first" in click(widgets, "Restart rank")
    assert 'role="alert"' in answer(widgets)
    widgets._rank.value = 1
    session.channel.busy = frozenset({1, 2})
    assert "rank 2 still runs something: press Stop first." in click(widgets, "Restart rank")
    assert session.restarted == []


def test_a_restart_of_a_rank_that_lives_is_asked_about_once(
    widgets: PanelWidgets, session: Session
) -> None:
    widgets._rank.value = 1
    session.channel.busy = frozenset({1})
    confirm = widgets._answer._confirm
    assert confirm.layout.display == "none"
    assert "its variables are lost" in click(widgets, "Restart rank")
    assert (session.restarted, confirm.layout.display) == ([], "")
    assert confirm.description == "Restart rank 1 all the same"
    widgets._rank.value = 2  # what is confirmed is what was asked
    confirm.click()
    confirm.click()
    assert "Rank 1 has a fresh process" in answer(widgets)
    assert session.restarted == [1]
    assert widgets._rank.value == -1
    assert confirm.layout.display == "none"


def test_a_question_that_is_closed_or_overtaken_is_not_confirmed_later(
    widgets: PanelWidgets, session: Session
) -> None:
    for overtake in (widgets._answer._close.click, lambda: click(widgets, "Diagnose")):
        widgets._rank.value = 1
        click(widgets, "Restart rank")
        overtake()
        assert widgets._answer._confirm.layout.display == "none"
        widgets._answer._confirm.click()
        answer(widgets)
    assert session.restarted == []


def test_a_dead_rank_is_replaced_without_a_question(
    widgets: PanelWidgets, session: Session
) -> None:
    widgets._update(snapshot("idle", "idle", "dead"))
    assert "Rank 2 has a fresh process" in click(widgets, "Restart rank")


@pytest.mark.parametrize("name", ["Diagnose", "Stacks"])
def test_an_answer_has_its_time_and_is_greyed_out_when_the_ranks_do_something_else(
    widgets: PanelWidgets, name: str
) -> None:
    assert re.search(rf"<strong>{name}, \d\d:\d\d:\d\d</strong>", click(widgets, name))
    for _ in range(2):
        widgets._update(snapshot("idle", "idle", "idle"))
        assert "opacity" not in answer(widgets)
    widgets._update(snapshot("idle", "running", "idle"))
    greyed = answer(widgets)
    assert re.search(r"do something else since \d\d:", greyed)
    assert "opacity" in greyed
    widgets._update(snapshot("idle", "running", "running"))
    assert answer(widgets) == greyed
    assert "opacity" not in click(widgets, name)


def test_what_stop_has_done_is_true_for_ever(widgets: PanelWidgets) -> None:
    said = click(widgets, "Stop")
    for kind in ("idle", "running"):
        widgets._update(snapshot("idle", kind, "idle"))
    assert answer(widgets) == said


def test_an_answer_can_be_closed_and_is_not_inherited(widgets: PanelWidgets) -> None:
    close = widgets._answer._close
    assert close.layout.display == "none"
    click(widgets, "Diagnose")
    assert close.layout.display == ""
    close.click()
    assert (answer(widgets), close.layout.display) == ("", "none")
    click(widgets, "Diagnose")
    widgets._start_updates = lambda: None  # type: ignore[method-assign]
    widgets.bundle()
    assert answer(widgets) == ""


def test_a_rank_that_has_died_is_chosen_once(widgets: PanelWidgets) -> None:
    widgets._update(snapshot("idle", "idle", "dead"))
    assert widgets._rank.value == 2
    widgets._rank.value = -1
    widgets._update(snapshot("idle", "idle", "dead"))
    assert widgets._rank.value == -1


def test_the_panel_of_a_closed_session_says_so_and_has_no_buttons(widgets: PanelWidgets) -> None:
    widgets._show_closed()
    assert "closed" in widgets._status.value
    assert "idle" not in widgets._rows.value
    assert all(button.disabled for button in widgets._buttons.values())
    assert widgets._rank.disabled


def test_buttons_that_ask_the_ranks_are_off_where_nothing_can_be_asked(
    widgets: PanelWidgets, session: Session
) -> None:
    session.refusal = "process 7 has owned it since 14:02."
    widgets._update(snapshot("idle", "idle", "idle"))
    off = {name for name, button in widgets._buttons.items() if button.disabled}
    assert off == {"Stop", "Stacks", "Restart rank"}
    assert widgets._buttons["Stop"].tooltip == "process 7 has owned it since 14:02."
    assert "process 7 has owned it" in widgets._refusal.value
    session.refusal = ""
    widgets._update(snapshot("idle", "idle", "idle"))
    assert not any(button.disabled for button in widgets._buttons.values())
    assert widgets._buttons["Stop"].tooltip == "Interrupt what runs on the ranks"
    assert widgets._refusal.value == ""


def shown_ranks(widgets: PanelWidgets) -> list[str]:
    return re.findall(r'scope="row"[^>]*>([^<]*)<', widgets._rows.value)


def test_many_ranks_are_filtered_by_rank_and_state(session: Session) -> None:
    session.ranks = tuple(range(20))  # type: ignore[assignment]
    kinds = ["idle"] * 20
    kinds[7] = kinds[12] = "dead"
    widgets = PanelWidgets(session, None, snapshot(*kinds))  # type: ignore[arg-type]
    assert widgets._filter is not None
    ranks, kind = widgets._filter.controls
    note = widgets._filter._note
    ranks.value = "5-9"
    assert shown_ranks(widgets) == ["5", "6", "7", "8", "9"]
    assert "5 of 20 ranks" in note.value
    kind.value = "dead"
    assert shown_ranks(widgets) == ["7"]
    ranks.value = " "
    assert shown_ranks(widgets) == ["7", "12"]
    widgets._update(snapshot(*["idle"] * 20))
    assert shown_ranks(widgets) == []
    assert "0 of 20 ranks" in note.value
    kind.value = "any state"
    ranks.value = "3-"
    assert "does not name ranks" in note.value
    assert len(shown_ranks(widgets)) == 20
    ranks.value = ""
    assert note.value == ""
    widgets._show_closed()
    assert ranks.disabled


def test_few_ranks_have_no_filter(widgets: PanelWidgets) -> None:
    assert widgets._filter is None
