"""What widgets of ranks say, from the messages of their comms.

Pure: nothing here knows ipywidgets or a front end.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distsession.protocol.messages import CommMessage, Display

__all__ = ["WIDGET_TARGET", "WIDGET_VIEW", "Bars", "Model", "Models", "model_of"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_TARGET = "jupyter.widget"
BAR_CHARS = 20
"""Characters of a progress bar that is shown as text."""
_REFERENCE = "IPY_MODEL_"
_PROGRESS = ("FloatProgressModel", "IntProgressModel")
_ENDS = ("success", "danger")
_SPACES = re.compile("[\xa0\u2007]")
_TAG = re.compile(r"<[^>]*>")


@dataclass(slots=True)
class Model:
    """A widget of a rank.

    Attributes:
        state: As its comm has told it.
        metadata: Of the message that opened it.
    """

    rank: int
    state: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)


class Models:
    """The widgets of ranks that have not been closed."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def __len__(self) -> int:
        return len(self._models)

    def apply(self, message: CommMessage) -> None:
        """Take what a comm has sent."""
        data = message.content.get("data", {})
        if message.kind == "comm_close":
            self._models.pop(message.comm_id, None)
        elif message.kind == "comm_open":
            if message.content.get("target_name") == WIDGET_TARGET:
                state = _with_buffers(data, message.buffers)
                self._models[message.comm_id] = Model(message.rank, state, message.metadata)
        elif data.get("method") == "update" and message.comm_id in self._models:
            self._models[message.comm_id].state.update(_with_buffers(data, message.buffers))

    def get(self, model_id: str) -> Model | None:
        """One of them; None where it was closed or never known."""
        return self._models.get(model_id)

    def pop(self, model_id: str) -> None:
        """Forget one."""
        self._models.pop(model_id, None)

    def tree(self, model_id: str, seen: set[str] | None = None) -> Iterator[str]:
        """The ids of a widget and of all that it refers to, those first."""
        seen = set() if seen is None else seen
        model = self._models.get(model_id)
        if model is None or model_id in seen:
            return
        seen.add(model_id)
        for reference in _references(model.state):
            yield from self.tree(reference, seen)
        yield model_id

    def is_bar(self, model_id: str) -> bool:
        """Whether it is a progress bar, or a box that has one and shows nothing but text beside."""
        names = {str(self._models[each].state.get("_model_name")) for each in self.tree(model_id)}
        shown = {name for name in names if not name.endswith(("LayoutModel", "StyleModel"))}
        return bool(shown & set(_PROGRESS)) and shown <= {
            *_PROGRESS,
            *("HBoxModel", "VBoxModel", "BoxModel", "HTMLModel", "LabelModel", "HTMLMathModel"),
        }

    def has_ended(self, model_id: str) -> bool:
        """Whether a progress bar is marked as done or failed."""
        states = (self._models[each].state for each in self.tree(model_id))
        return any(state.get("bar_style") in _ENDS for state in states)

    def running_bars(self, model_id: str) -> list[str]:
        """The progress bars in it that have not come to their end."""
        return [
            each
            for each in self.tree(model_id)
            if self._models[each].state.get("_model_name") in _PROGRESS
            and not _is_complete(self._models[each].state)
        ]

    def text(self, model_id: str) -> str:
        """A progress bar as one line, such as tqdm writes; empty for what is none."""
        model = self._models.get(model_id)
        if model is None:
            return ""
        name, state = model.state.get("_model_name"), model.state
        if name in _PROGRESS:
            return _bar_text(state)
        if name in ("HTMLModel", "LabelModel", "HTMLMathModel"):
            text = html.unescape(_TAG.sub("", str(state.get("value", ""))))
            return _SPACES.sub(" ", text)
        children = state.get("children", ())
        parts = [self.text(_id(child)) for child in children if isinstance(child, str)]
        return "".join(part for part in parts if part).strip()


class Bars:
    """Progress bars that ranks have displayed, as lines of text.

    Args:
        models: Where the widgets are that they consist of.
    """

    def __init__(self, models: Models):
        self._models = models
        self._bars: dict[int, dict[str, str]] = {}

    def show(self, message: Display) -> bool:
        """Take something displayed; whether it is a progress bar, and not for others to show."""
        model_id = model_of(message)
        if model_id is None or not self._models.is_bar(model_id):
            return False
        self._bars.setdefault(message.rank, {})[model_id] = ""
        return True

    def live(self, rank: int) -> tuple[str, ...]:
        """A rank's bars as they are now."""
        self._look(rank)
        return tuple(self._bars.get(rank, {}).values())

    def take_ended(self, rank: int) -> list[str]:
        """A rank's bars that have come to their end, which are thereby forgotten."""
        self._look(rank)
        bars = self._bars.get(rank, {})
        ended = [model_id for model_id in bars if self._models.has_ended(model_id)]
        return [bars.pop(model_id) for model_id in ended]

    def take_all(self) -> Iterator[tuple[int, str]]:
        """All bars as they are now, each with its rank; they are thereby forgotten."""
        for rank in sorted(self._bars):
            self._look(rank)
            for text in self._bars[rank].values():
                yield rank, text
        self._bars.clear()

    @property
    def ranks(self) -> set[int]:
        """Those that have bars."""
        return {rank for rank, bars in self._bars.items() if bars}

    def _look(self, rank: int) -> None:
        bars = self._bars.get(rank, {})
        for model_id in list(bars):
            if self._models.get(model_id) is None:  # closed, as tqdm does with leave=False
                del bars[model_id]
            else:
                bars[model_id] = self._models.text(model_id)


def model_of(message: Display) -> str | None:
    """Which widget something displayed is a view of; None where it is none."""
    view = message.data.get(WIDGET_VIEW)
    return str(view["model_id"]) if isinstance(view, Mapping) and "model_id" in view else None


def _id(reference: str) -> str:
    return reference.removeprefix(_REFERENCE)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.startswith(_REFERENCE):
            yield _id(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _references(each)


def _is_complete(state: Mapping[str, Any]) -> bool:
    style = str(state.get("bar_style", ""))
    if style in _ENDS:
        return True
    if style == "info":  # as tqdm marks a bar that knows no end
        return False
    return float(state.get("value") or 0) >= float(state.get("max") or 0)


def _bar_text(state: Mapping[str, Any]) -> str:
    low, high = float(state.get("min") or 0), float(state.get("max") or 0)
    share = (float(state.get("value") or 0) - low) / (high - low) if high > low else 0.0
    filled = round(BAR_CHARS * min(1.0, max(0.0, share)))
    return f"|{'#' * filled}{' ' * (BAR_CHARS - filled)}|"


def _with_buffers(data: Mapping[str, Any], buffers: tuple[bytes, ...]) -> dict[str, Any]:
    """The state in a message, with the parts that are sent beside it in their places."""
    state: dict[str, Any] = dict(data.get("state", {}))
    for path, buffer in zip(data.get("buffer_paths", ()), buffers, strict=False):
        at: Any = state
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = buffer
    return state
