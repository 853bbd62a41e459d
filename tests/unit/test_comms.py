"""Comms of ranks: what a rank sends, what the kernel makes of it, and the way back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import comm
import ipywidgets
import pytest

from distsession.cluster.base import Channel
from distsession.engine.comms import Comms
from distsession.notebook import comms
from distsession.notebook.comms import MAX_ENDED_MODELS, Relay
from distsession.notebook.front_end import shows_widgets
from distsession.notebook.widget_versions import instances
from distsession.protocol.messages import CommInput, CommMessage


class Link(Channel):
    """What the kernel sends to ranks, and which processes they have."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.processes: dict[int, int] = {0: 0, 1: 0}

    def send_control(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))

    def process_of(self, rank: int) -> int | None:
        return self.processes.get(rank)

    submit = pending = forget = None  # type: ignore[assignment]


class Rank:
    """A rank, of which this process plays the part."""

    def __init__(self) -> None:
        self.sent: list[CommMessage] = []
        self.comms = Comms(1, 4, self, lambda: None)  # type: ignore[arg-type]
        self.comms.install(lambda: False)
        self.running = 7

    def show(self, message: CommMessage) -> None:
        """As its capture would."""
        self.sent.append(message)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(comm, "create_comm", comm.create_comm)
    return Rank()


@contextlib.contextmanager
def plain() -> Iterator[None]:
    yield


def answer(comm_id: str, **state: Any) -> CommInput:
    return CommInput("comm_msg", comm_id, {"method": "update", "state": state}, {})


def test_a_widget_of_a_rank_says_what_it_is_and_how_it_changes(rank: Rank) -> None:
    slider = ipywidgets.IntSlider(value=3)
    last = rank.sent[-1]
    assert (last.kind, last.comm_id, last.rank, last.request, last.process) == (
        *("comm_open", slider.model_id),
        *(1, 7, 4),
    )
    assert last.content["target_name"] == "jupyter.widget"
    assert last.content["data"]["state"]["value"] == 3
    slider.value = 5
    assert rank.sent[-1].content["data"]["state"] == {"value": 5}
    rank.running = 0
    slider.value = 6
    assert rank.sent[-1].request == 0
    slider.close()
    assert rank.sent[-1].kind == "comm_close"


def test_bytes_are_sent_as_they_are(rank: Rank) -> None:
    ipywidgets.Image(value=b"\x89PNG")
    assert rank.sent[-1].buffers == (b"\x89PNG",)
    assert rank.sent[-1].content["data"]["buffer_paths"] == [["value"]]


def test_what_comes_from_the_page_changes_the_widget(rank: Rank) -> None:
    slider = ipywidgets.IntSlider()
    seen: list[int] = []
    slider.observe(lambda change: seen.append(change["new"]), "value")
    rank.comms.put(answer(slider.model_id, value=9))
    assert seen == []
    assert rank.comms.has_input
    rank.comms.handle(plain)
    assert seen == [9]
    assert not rank.comms.has_input


def test_an_error_of_a_callback_is_told_and_the_next_is_called(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    slider = ipywidgets.IntSlider()
    slider.observe(lambda change: 1 // (change["new"] - 1), "value")
    for value in (1, 2):
        rank.comms.put(answer(slider.model_id, value=value))
    rank.comms.put(answer("nobody", value=value))
    rank.comms.handle(plain)
    assert slider.value == 2

    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    rank.comms.put(answer(slider.model_id, value=3))
    rank.comms.handle(stopped)
    assert "KeyboardInterrupt" in capsys.readouterr().err


def test_where_somebody_else_has_comms_ours_are_not_taken(rank: Rank) -> None:
    made: list[Any] = []
    comm.create_comm = lambda **_: made.append(1)
    rank.comms.install(lambda: True)
    comm.create_comm(target_name="x")
    assert (made, rank.sent) == ([1], [])


# --- in the kernel --------------------------------------------------------------------------------


def message(
    comm_id: str, kind: str = "comm_open", rank: int = 1, process: int = 0, **state: Any
) -> CommMessage:
    data: dict[str, Any] = {"state": {"_model_name": "IntSliderModel", **state}}
    if kind == "comm_msg":
        data = {"method": "update", "state": state}
    content = {"data": data, "target_name": "jupyter.widget"}
    return CommMessage(rank, 1, process, kind, comm_id, content, {"version": "2.1.0"})


def sizes(relay: Relay) -> tuple[int, ...]:
    manager = comm.get_comm_manager()
    return len(relay), len(relay.models), len(manager.comms), len(instances())


def test_what_the_page_sends_goes_to_the_rank_of_the_comm() -> None:
    relay, link = Relay(), Link()
    relay.receive(message("a", rank=0), link)
    relay.receive(message("b", rank=1), link)
    manager = comm.get_comm_manager()
    content = {"comm_id": "b", "data": {"method": "update", "state": {"value": 8}}}
    manager.comm_msg(None, "", {"content": content, "buffers": [memoryview(b"x")], "metadata": {}})
    assert link.sent == [(1, CommInput("comm_msg", "b", content["data"], {}, (b"x",)))]
    model = relay.models.get("b")
    assert model is not None
    assert model.state["value"] == 8
    manager.comm_close(None, "", {"content": {"comm_id": "b", "data": {}}})
    assert link.sent[-1][1].kind == "comm_close"
    relay.receive(message("a", "comm_close", rank=0), link)
    assert len(relay) == 0


def test_ten_thousand_comms_that_are_closed_leave_nothing() -> None:
    relay, link = Relay(), Link()
    before = sizes(relay)
    for number in range(10_000):
        relay.receive(message(str(number)), link, publish=bool(number % 2))
        relay.receive(message(str(number), "comm_msg", value=number), link)
        relay.receive(message(str(number), "comm_close"), link)
    assert sizes(relay) == before
    assert relay._processes == {}
    assert relay._rows == {}


def test_the_comms_of_a_process_that_has_ended_are_closed() -> None:
    relay, link = Relay(), Link()
    before = sizes(relay)
    for rank in (0, 1):
        relay.receive(message(f"comm-{rank}", rank=rank), link)
    relay.close_ended()
    assert len(relay) == 2
    del link.processes[0]
    relay.close_ended()
    assert len(relay) == 1
    link.processes[1] = 5  # replaced
    content = {"comm_id": "comm-1", "data": {}}
    comm.get_comm_manager().comm_msg(None, "", {"content": content})
    assert link.sent == []
    assert sizes(relay) == before


def test_a_widget_that_is_shown_later_is_told_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay, link = Relay(), Link()
    published: list[tuple[str, str, Any]] = []

    class Published(comm.base_comm.BaseComm):
        def publish_msg(self, kind: str, data: Any = None, **_: Any) -> None:
            published.append((kind, self.comm_id, data))

    monkeypatch.setattr(comm, "create_comm", Published)
    relay.receive(message("part", value=1), link, publish=False)
    relay.receive(message("whole", children=["IPY_MODEL_part"]), link, publish=False)
    relay.receive(message("part", "comm_msg", value=2), link, publish=False)
    assert published == []
    relay.publish("whole")
    relay.publish("whole")
    assert [(kind, comm_id) for kind, comm_id, _ in published] == [
        ("comm_open", "part"),
        ("comm_open", "whole"),
    ]
    assert published[0][2]["state"]["value"] == 2
    relay.receive(message("part", "comm_msg", value=3), link, publish=False)
    assert published[-1][0] == "comm_msg"
    for comm_id in ("part", "whole"):
        relay.receive(message(comm_id, "comm_close"), link)


def test_a_page_that_is_loaded_again_hears_of_ranks_widgets() -> None:
    relay, link = Relay(), Link()
    relay.receive(message("again", value=4), link)
    state = ipywidgets.Widget.get_manager_state()["state"]["again"]
    assert (state["model_name"], state["state"]["value"]) == ("IntSliderModel", 4)
    assert instances()["again"].get_state()["value"] == 4
    relay.receive(message("again", "comm_close"), link)
    assert "again" not in instances()


# --- of ranks that have ended ---------------------------------------------------------------------


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """What the page is told: kind, comm and data."""
    told: list[tuple[str, str, Any]] = []

    class Published(comm.base_comm.BaseComm):
        def publish_msg(self, kind: str, data: Any = None, **_: Any) -> None:
            told.append((kind, self.comm_id, data))

    monkeypatch.setattr(comm, "create_comm", Published)
    return told


class Rows:
    """Notes what a relay tells those in which widgets stand."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda model_id: self.told.append((name, model_id))


def closed(published: list[tuple[str, str, Any]]) -> list[str]:
    return [comm_id for kind, comm_id, _ in published if kind == "comm_close"]


def test_what_a_rank_showed_stays_when_it_ends_and_the_rest_is_closed(
    published: list[tuple[str, str, Any]],
) -> None:
    relay, link, rows = Relay(), Link(), Rows()
    before = sizes(relay)
    relay.receive(message("part", value=1), link)
    relay.receive(message("shown", children=["IPY_MODEL_part"]), link)
    relay.receive(message("unseen"), link)
    relay.receive(message("apart"), link)
    relay.keep_row("shown", rows)  # type: ignore[arg-type]
    relay.show_apart("apart")
    del link.processes[1]
    relay.close_ended()
    assert closed(published) == ["unseen"]
    assert rows.told == [("mark_ended", "shown")]
    assert instances()["part"].get_state()["value"] == 1  # for a page that is loaded again
    relay.forget_row("shown", rows)  # type: ignore[arg-type]
    assert sorted(closed(published)) == ["part", "shown", "unseen"]
    relay._freeze("apart")
    assert sizes(relay) == before


def test_a_bar_that_was_running_when_its_rank_was_killed_looks_failed(
    published: list[tuple[str, str, Any]],
) -> None:
    relay, link, rows = Relay(), Link(), Rows()
    for comm_id, value in (("running", 4), ("done", 9)):
        state = {"_model_name": "IntProgressModel", "value": value, "max": 9}
        relay.receive(message(comm_id, **state), link)
        relay.keep_row(comm_id, rows)  # type: ignore[arg-type]
    published.clear()
    del link.processes[1]
    relay.close_ended()
    told = [(comm_id, data["state"]) for _, comm_id, data in published]
    assert told == [("running", {"bar_style": "danger"})]


def test_what_a_hundred_replaced_ranks_have_shown_takes_no_more_than_a_bound(
    published: list[tuple[str, str, Any]],
) -> None:
    relay, link, rows = Relay(), Link(), Rows()
    before = sizes(relay)
    for process in range(100):
        link.processes[1] = process
        for number in range(20):
            comm_id = f"{process}-{number}"
            relay.receive(message(comm_id, process=process), link)
            relay.keep_row(comm_id, rows)  # type: ignore[arg-type]
        relay.close_ended()
        assert len(relay._ended) <= MAX_ENDED_MODELS
    frozen = [comm_id for what, comm_id in rows.told if what == "freeze"]
    assert frozen[0] == "0-0"
    assert sorted(frozen) == sorted(closed(published))
    assert len(frozen) == 99 * 20 - MAX_ENDED_MODELS
    now = sizes(relay)
    assert [after - first for first, after in zip(before, now, strict=True)] == [
        *(20, MAX_ENDED_MODELS + 20, MAX_ENDED_MODELS + 20, MAX_ENDED_MODELS + 20),
    ]
    del link.processes[1]
    relay.close_ended()
    for comm_id in list(relay._ended_trees):
        relay.forget_row(comm_id, rows)  # type: ignore[arg-type]
    assert sizes(relay) == before


def test_a_page_that_closes_what_it_hears_of_shows_no_widgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relay, link = Relay(), Link()
    monkeypatch.setattr(comms, "relay", relay)
    assert shows_widgets()
    relay.receive(message("a", value=3), link)
    manager = comm.get_comm_manager()
    manager.comm_close(None, "", {"content": {"comm_id": "a", "data": {}}})
    assert not shows_widgets()
    assert link.sent == []  # the widget lives on, and is shown as text
    relay.receive(message("a", "comm_msg", value=5), link)
    model = relay.models.get("a")
    assert model is not None
    assert model.state["value"] == 5
    relay.receive(message("b"), link)  # another page, which knows widgets
    data = {"method": "update", "state": {"value": 8}}
    manager.comm_msg(None, "", {"content": {"comm_id": "b", "data": data}})
    assert shows_widgets()
    for comm_id in "ab":
        relay.receive(message(comm_id, "comm_close"), link)


def test_text_stands_for_a_widget_that_the_page_drops(
    monkeypatch: pytest.MonkeyPatch, published: list[tuple[str, str, Any]]
) -> None:
    relay, link, rows = Relay(), Link(), comms.WidgetRows()
    monkeypatch.setattr(comms, "relay", relay)
    monkeypatch.setattr(comms, "MAX_ENDED_MODELS", 1)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    for comm_id, value in (("first", 3), ("second", 9)):
        state = {"_model_name": "IntProgressModel", "value": value, "max": 9}
        relay.receive(message(comm_id, **state), link)
        rows.add(1, comm_id, "IntProgress(...)")
    first, second = rows._box.children
    del link.processes[1]
    relay.close_ended()
    assert [type(child).__name__ for child in first.children] == ["HTML"]
    assert [type(child).__name__ for child in second.children] == ["HTML", "_Child"]
    assert "rank 1 (ended)" in first.children[0].value
    assert "|#######             |" in first.children[0].value
    assert "(ended)" not in second.children[0].value  # it had come to its end
    assert closed(published) == ["first"]
    text = rows._bundle()["text/plain"].splitlines()
    assert [line.count("#") for line in text] == [7, 20]
    rows.clear(1)
    assert [name for name in closed(published) if name in ("first", "second")][1:] == ["second"]
