"""What widgets of ranks say, from the messages of their comms alone."""

from __future__ import annotations

from typing import Any

import pytest

from distsession.display.widgets import WIDGET_VIEW, Bars, Models, model_of
from distsession.notebook.lines import parse_bar
from distsession.protocol.messages import CommMessage, Display


def opened(comm_id: str, name: str, rank: int = 0, **state: Any) -> CommMessage:
    content = {"data": {"state": {"_model_name": name, **state}}, "target_name": "jupyter.widget"}
    return CommMessage(rank, 1, 0, "comm_open", comm_id, content, {})


def updated(comm_id: str, rank: int = 0, **state: Any) -> CommMessage:
    data = {"method": "update", "state": state}
    return CommMessage(rank, 1, 0, "comm_msg", comm_id, {"data": data}, {})


def closed(comm_id: str, rank: int = 0) -> CommMessage:
    return CommMessage(rank, 1, 0, "comm_close", comm_id, {"data": {}}, {})


def shown(model_id: str, rank: int = 0) -> Display:
    return Display(rank, 1, {WIDGET_VIEW: {"model_id": model_id}, "text/plain": "x"}, {})


@pytest.fixture
def models() -> Models:
    """A bar as tqdm makes one: ``bar`` of ``left``, ``middle`` and ``right``."""
    made = Models()
    children = ["IPY_MODEL_left", "IPY_MODEL_middle", "IPY_MODEL_right"]
    for message in (
        opened("layout", "LayoutModel"),
        opened("left", "HTMLModel", value="fit&amp;go:\u2007 40%", layout="IPY_MODEL_layout"),
        opened("middle", "FloatProgressModel", min=0, max=50.0, value=20),
        opened("right", "HTMLModel", value="\u200720/50 [00:02&lt;00:03, 9it/s]"),
        opened("bar", "HBoxModel", children=children),
    ):
        made.apply(message)
    return made


def test_a_bar_is_the_line_that_tqdm_would_write(models: Models) -> None:
    line = models.text("bar")
    assert line == "fit&go:  40%|########            | 20/50 [00:02<00:03, 9it/s]"
    bar = parse_bar(line)
    assert bar is not None
    assert (bar.label, bar.percent, bar.count) == ("fit&go", 40, "20/50")
    models.apply(updated("middle", value=50.0))
    assert f"|{'#' * 20}|" in models.text("bar")


@pytest.mark.parametrize("value", [None, -5, 80, 50])
def test_any_value_makes_a_bar(models: Models, value: float | None) -> None:
    models.apply(updated("middle", value=value))
    assert len(models.text("bar").split("|")[1]) == 20
    models.apply(updated("middle", max=None))
    assert len(models.text("bar").split("|")[1]) == 20


def test_what_a_widget_refers_to_comes_before_it(models: Models) -> None:
    assert list(models.tree("bar")) == ["layout", "left", "middle", "right", "bar"]
    models.apply(opened("round", "BoxModel", children=["IPY_MODEL_round", "IPY_MODEL_lost"]))
    assert list(models.tree("round")) == ["round"]


def test_a_bar_is_told_from_other_widgets(models: Models) -> None:
    assert models.is_bar("bar")
    assert models.is_bar("middle")
    models.apply(opened("slider", "IntSliderModel"))
    models.apply(opened("both", "HBoxModel", children=["IPY_MODEL_slider", "IPY_MODEL_middle"]))
    assert not models.is_bar("slider")
    assert not models.is_bar("both")
    assert not models.is_bar("left")
    assert not models.is_bar("lost")


def test_bytes_beside_a_message_stand_in_their_places() -> None:
    models = Models()
    data = {"state": {"a": {"b": [None, 1]}}, "buffer_paths": [["a", "b", 0], ["c"]]}
    content = {"data": data, "target_name": "jupyter.widget"}
    models.apply(CommMessage(0, 1, 0, "comm_open", "x", content, {}, (b"one", b"two")))
    model = models.get("x")
    assert model is not None
    assert model.state == {"a": {"b": [b"one", 1]}, "c": b"two"}


def test_what_is_closed_is_forgotten_and_what_is_unknown_passed_over(models: Models) -> None:
    models.apply(updated("lost", value=1))
    models.apply(closed("lost"))
    for model_id in ("bar", "left", "middle", "right", "layout"):
        models.apply(closed(model_id))
    assert len(models) == 0
    assert models.text("bar") == ""


def test_bars_of_a_run_are_lines_until_they_end(models: Models) -> None:
    bars = Bars(models)
    assert bars.show(shown("bar", rank=3))
    assert not bars.show(shown("left"))
    assert not bars.show(Display(0, 1, {"text/plain": "x"}, {}))
    assert bars.ranks == {3}
    assert bars.live(3)[0].startswith("fit&go:  40%|")
    assert bars.take_ended(3) == []
    models.apply(updated("middle", bar_style="success", value=50))
    assert [text[:13] for text in bars.take_ended(3)] == ["fit&go:  40%|"]
    assert list(bars.take_all()) == []


def test_a_bar_that_is_closed_is_gone_and_one_that_is_not_is_kept(models: Models) -> None:
    bars = Bars(models)
    models.apply(opened("other", "IntProgressModel", max=4, value=1))
    bars.show(shown("bar"))
    bars.show(shown("other"))
    models.apply(closed("bar"))
    assert [text for _, text in bars.take_all()] == [f"|{'#' * 5}{' ' * 15}|"]


def test_the_widget_of_a_display_is_found() -> None:
    assert model_of(shown("abc")) == "abc"
    assert model_of(Display(0, 1, {WIDGET_VIEW: {}}, {})) is None
    assert model_of(Display(0, 1, {"text/plain": "x"}, {})) is None
