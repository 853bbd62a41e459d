"""Comms of ranks and the page: what a rank's widget sends is published, and answers go back.

Everything that leans on ipywidgets' inside is here, and in ``widget_versions``.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ipywidgets
from ipywidgets.widgets import widget as _widget

from distsession.cluster.base import Channel
from distsession.display.figures import edge
from distsession.display.html import CODE_FONT, LABEL, element, join
from distsession.display.widgets import WIDGET_TARGET, WIDGET_VIEW, Models
from distsession.notebook import widget_versions
from distsession.notebook.widget_versions import instances
from distsession.protocol.messages import CommInput, CommMessage

__all__ = ["Relay", "WidgetRows", "relay"]

log = logging.getLogger(__name__)

MAX_ENDED_MODELS = 500
"""Widgets of ranks that have ended which the page keeps as they were, with all that belongs to
them. Those that ended first become text."""


@dataclass(slots=True)
class _Remote:
    """A comm of a rank, and what stands for it in this process."""

    rank: int
    process: int
    channel: Channel
    comm: Any = None  # once it is published
    opening: CommMessage | None = None

    @property
    def place(self) -> tuple[Channel, int, int]:
        """Where its process is."""
        return self.channel, self.rank, self.process


class _RemoteModel:
    """A rank's widget among those of this process: a page that is loaded again asks for all."""

    def __init__(self, models: Models, model_id: str):
        self._models = models
        self.model_id = model_id

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        model = self._models.get(self.model_id)
        return {} if model is None else dict(model.state)

    def _get_embed_state(self, drop_defaults: bool = False) -> dict[str, Any]:
        state, paths, buffers = _widget._remove_buffers(self.get_state())
        embedded = {
            "model_name": self._model_name,
            "model_module": self._model_module,
            "model_module_version": self._model_module_version,
            "state": state,
        }
        if buffers:
            embedded["buffers"] = [
                {"encoding": "base64", "path": path, "data": base64.b64encode(buffer).decode()}
                for path, buffer in zip(paths, buffers, strict=True)
            ]
        return embedded

    def __getattr__(self, name: str) -> Any:
        if name in ("_model_name", "_model_module", "_model_module_version"):
            return self.get_state().get(name, "")
        raise AttributeError(name)

    def close(self) -> None:
        """It is the rank's to close it."""


class _Child(ipywidgets.Widget):
    """Stands for a rank's widget within a box of this process."""

    def __init__(self, model_id: str):
        self._remote_id = model_id
        super().__init__()

    def open(self) -> None:
        """It is open already."""

    def close(self) -> None:
        """It is the rank's to close it."""

    @property
    def model_id(self) -> str:
        return self._remote_id


class Relay:
    """The comms of all ranks of all sessions of this kernel."""

    def __init__(self) -> None:
        self.models = Models()
        self.is_refused = False
        """The page closes what it is told of, as one does that knows no widgets."""
        self._is_answered = False
        self._remotes: dict[str, _Remote] = {}
        self._processes: dict[tuple[Channel, int, int], dict[str, None]] = {}
        self._rows: dict[str, list[WidgetRows]] = {}
        self._apart: set[str] = set()
        self._ended: dict[str, _Remote] = {}
        self._ended_trees: dict[str, tuple[str, ...]] = {}
        """By what is shown, in the order in which it ended."""
        self._lock = threading.RLock()  # a run is waited for by the main thread or by another

    def __len__(self) -> int:
        return len(self._remotes)

    def receive(self, message: CommMessage, channel: Channel, *, publish: bool = True) -> None:
        """Take what a comm of a rank has sent.

        Args:
            message: What it sent.
            channel: Carries answers to the rank.
            publish: Tell the page at once. Otherwise it is told when the widget is displayed.
        """
        with self._lock:
            self._receive(message, channel, publish)

    def _receive(self, message: CommMessage, channel: Channel, publish: bool) -> None:
        remote = self._remotes.get(message.comm_id)
        if message.kind == "comm_open":
            remote = self._remotes[message.comm_id] = _Remote(
                message.rank, message.process, channel, opening=message
            )
            self._processes.setdefault(remote.place, {})[message.comm_id] = None
        elif remote is None:
            return
        self.models.apply(message)
        if message.kind == "comm_open":
            if publish or message.content.get("target_name") != WIDGET_TARGET:
                self._open(message.comm_id, remote)
        elif remote.comm is not None:
            widget_versions.publish(
                remote.comm,
                message.kind,
                data=message.content.get("data"),
                metadata=message.metadata,
                buffers=list(message.buffers),
            )
        if message.kind == "comm_close":
            self._forget(message.comm_id, remote)

    def publish(self, model_id: str) -> None:
        """Tell the page of a widget, and of what belongs to it, as they are now."""
        with self._lock:
            for each in self.models.tree(model_id):
                remote = self._remotes.get(each)
                if remote is not None and remote.comm is None:
                    self._open(each, remote)

    def close_ended(self) -> None:
        """End the comms of processes that have ended. What they show stays, within bounds."""
        with self._lock:
            for place in list(self._processes):
                channel, rank, process = place
                if channel.process_of(rank) != process:
                    self._end(self._processes.pop(place))
            while len(self._ended) > MAX_ENDED_MODELS and self._ended_trees:
                self._freeze(next(iter(self._ended_trees)))

    def show_apart(self, model_id: str) -> None:
        """A widget is displayed by itself, not in rows."""
        with self._lock:
            self.publish(model_id)
            if model_id in self._remotes:
                self._apart.add(model_id)

    def keep_row(self, model_id: str, rows: WidgetRows) -> None:
        """A widget stands in these rows, until it is closed."""
        with self._lock:
            self._rows.setdefault(model_id, []).append(rows)

    def forget_row(self, model_id: str, rows: WidgetRows) -> None:
        """It does not stand there any more."""
        with self._lock:
            all_rows = self._rows.get(model_id, [])
            if rows in all_rows:
                all_rows.remove(rows)
            if not all_rows:
                self._rows.pop(model_id, None)
                if self._ended_trees.pop(model_id, None) is not None:
                    self._drop_unseen()

    # --- inside -----------------------------------------------------------------------------------

    def _open(self, comm_id: str, remote: _Remote) -> None:
        opening = remote.opening
        assert opening is not None
        remote.opening = None
        target = opening.content.get("target_name", "comm")
        made = remote.comm = widget_versions.make_comm(comm_id, target)
        made.on_msg(self._answer(comm_id, "comm_msg"))
        made.on_close(self._answer(comm_id, "comm_close"))
        widget_versions.comm_manager().register_comm(made)
        data, buffers = opening.content.get("data") or {}, list(opening.buffers)
        if self.models.get(comm_id) is not None:
            instances()[comm_id] = _RemoteModel(self.models, comm_id)
            state, paths, buffers = _widget._remove_buffers(instances()[comm_id].get_state())
            data = {**data, "state": state, "buffer_paths": paths}
        widget_versions.publish(
            made,
            "comm_open",
            data=data,
            metadata=opening.metadata,
            buffers=buffers,
            target_name=target,
            target_module=opening.content.get("target_module"),
        )

    def _answer(self, comm_id: str, kind: str) -> Callable[[dict[str, Any]], None]:
        def answer(message: dict[str, Any]) -> None:
            remote = self._remotes.get(comm_id)
            if remote is None:
                return
            self._is_answered = self._is_answered or kind == "comm_msg"
            if not self._is_answered:
                self.is_refused = True  # it keeps on saying its text
                return
            self.is_refused = False
            if remote.channel.process_of(remote.rank) != remote.process:
                self.close_ended()
                return
            self._note(comm_id, message)
            buffers = tuple(bytes(buffer) for buffer in message.get("buffers") or ())
            data, metadata = message["content"].get("data") or {}, message.get("metadata") or {}
            remote.channel.send_control(
                remote.rank, CommInput(kind, comm_id, data, metadata, buffers)
            )
            if kind == "comm_close":
                with self._lock:
                    self._forget(comm_id, remote)

        return answer

    def _note(self, comm_id: str, message: dict[str, Any]) -> None:
        """The page has changed a widget: the rank sends nothing back of what it agrees with."""
        model, data = self.models.get(comm_id), message["content"].get("data") or {}
        if model is not None and data.get("method") == "update":
            model.state.update(data.get("state", {}))

    def _forget(self, comm_id: str, remote: _Remote) -> None:
        self._remotes.pop(comm_id, None)
        comms = self._processes.get(remote.place)
        if comms is not None:
            comms.pop(comm_id, None)
            if not comms:
                del self._processes[remote.place]
        self._let_go(comm_id, remote)
        for rows in self._rows.pop(comm_id, ()):
            rows.remove(comm_id)

    def _let_go(self, comm_id: str, remote: _Remote) -> None:
        self.models.pop(comm_id)
        self._apart.discard(comm_id)
        if remote.comm is not None:
            remote.comm._closed = True  # or it would tell the page when it is collected
            instances().pop(comm_id, None)
            with contextlib.suppress(KeyError):
                widget_versions.comm_manager().unregister_comm(remote.comm)

    # --- what is left of ranks that have ended ----------------------------------------------------

    def _end(self, comm_ids: Collection[str]) -> None:
        """Their process has ended: keep those that are shown, and have the page drop the others."""
        for comm_id in comm_ids:
            self._ended[comm_id] = self._remotes.pop(comm_id)
        for comm_id in comm_ids:
            if comm_id in self._rows or comm_id in self._apart:
                for rows in self._rows.get(comm_id, ()):
                    rows.mark_ended(comm_id)
                self._mark_stopped(comm_id)
                self._ended_trees[comm_id] = tuple(self.models.tree(comm_id))
        self._drop_unseen()

    def _mark_stopped(self, model_id: str) -> None:
        """A bar that was not at its end looks like one that has failed."""
        for each in self.models.running_bars(model_id):
            model, remote = self.models.get(each), self._ended.get(each)
            if model is not None and remote is not None and remote.comm is not None:
                state = {"bar_style": "danger"}
                model.state.update(state)
                data = {"method": "update", "state": state, "buffer_paths": []}
                widget_versions.publish(remote.comm, "comm_msg", data=data)

    def _freeze(self, model_id: str) -> None:
        """Have text stand for a widget, so that the page can drop it."""
        del self._ended_trees[model_id]
        for rows in self._rows.pop(model_id, ()):
            rows.freeze(model_id)
        self._drop_unseen()

    def _drop_unseen(self) -> None:
        seen = {each for tree in self._ended_trees.values() for each in tree}
        for comm_id in self._ended.keys() - seen:
            remote = self._ended.pop(comm_id)
            if remote.comm is not None:
                widget_versions.publish(remote.comm, "comm_close", data={})
            self._let_go(comm_id, remote)


relay = Relay()
"""That of this kernel."""


_Row = tuple[int, str, Any, Any]
"""A rank, the id of its widget, the row that has it, and its label."""


class WidgetRows:
    """Widgets of ranks below each other, each beside the name of its rank, in the ranks' order."""

    def __init__(self) -> None:
        self._layout = ipywidgets.Layout(margin="0", overflow="visible", align_items="center")
        self._column = ipywidgets.Layout(margin="0", overflow="visible")
        self._style = widget_versions.html_style()
        self._rows: list[_Row] = []
        self._bars: set[str] = set()
        self._texts: dict[str, str] = {}
        self._box = ipywidgets.VBox(layout=self._column)
        self._handle: Any = None

    def add(self, rank: int, model_id: str, text: str) -> None:
        """Show one more, after those of the same rank."""
        from IPython.display import display

        relay.publish(model_id)
        if relay.models.is_bar(model_id):
            self._bars.add(model_id)
        relay.keep_row(model_id, self)
        label = ipywidgets.HTML(_label(rank), layout=self._column, style=self._style)
        row = ipywidgets.HBox([label, _Child(model_id)], layout=self._layout)
        self._texts[model_id] = text
        self._rows.append((rank, model_id, row, label))
        self._rows.sort(key=lambda row: row[0])
        self._fill()
        if self._handle is None:
            self._handle = display(self._bundle(), raw=True, display_id=True)

    def remove(self, model_id: str) -> None:
        """It was closed."""
        self._take_away([row for row in self._rows if row[1] == model_id])

    def clear(self, rank: int) -> None:
        """Take away those of a rank, which may be shown again."""
        gone = [row for row in self._rows if row[0] == rank]
        self._take_away(gone)
        for _, model_id, _, _ in gone:
            relay.forget_row(model_id, self)

    def _take_away(self, gone: list[_Row]) -> None:
        self._rows = [row for row in self._rows if row not in gone]
        self._fill()
        for _, model_id, row, label in gone:
            self._texts.pop(model_id, None)
            self._bars.discard(model_id)
            row.close()
            label.close()

    def mark_ended(self, model_id: str) -> None:
        """Its rank has ended: nothing answers it any more, which is no news of a finished bar."""
        if model_id in self._bars and not relay.models.running_bars(model_id):
            return
        for rank, each, _, label in self._rows:
            if each == model_id:
                label.value = _label(rank, " (ended)")

    def freeze(self, model_id: str) -> None:
        """Show text in the place of a widget."""
        for _, each, row, label in self._rows:
            if each == model_id:
                text = self._texts[model_id] = relay.models.text(model_id) or self._texts[model_id]
                label.value += element("span", text, style=f"white-space:pre;{CODE_FONT}")
                row.children = [label]

    def update_text(self) -> None:
        """Say as text, for who sees no widgets, how far they have come."""
        if self._handle is not None:
            self._handle.update(self._bundle(), raw=True)

    def finish(self) -> None:
        """The run is over. Bars that are at their end stay as text, without widgets.

        A notebook that is opened again without this kernel has nothing but an error to show for
        widgets.
        """
        if self._handle is None:
            return
        bundle = self._bundle()
        if all(each in self._bars and not relay.models.running_bars(each) for each in self._texts):
            bundle.pop(WIDGET_VIEW)
        self._handle.update(bundle, raw=True)

    def _fill(self) -> None:
        self._box.children = [row for _, _, row, _ in self._rows]

    def _bundle(self) -> dict[str, Any]:
        lines = [
            (rank, relay.models.text(model_id) or self._texts.get(model_id, ""))
            for rank, model_id, _, _ in self._rows
        ]
        style = f"white-space:pre;{CODE_FONT}"
        rows = [
            element("div", _label(rank), " ", element("span", t, style=style)) for rank, t in lines
        ]
        return {
            **widget_versions.view(self._box),
            "text/html": join(rows),
            "text/plain": "\n".join(f"[rank {rank}] {text}" for rank, text in lines),
        }


def _label(rank: int, more: str = "") -> str:
    """As beside other output of a rank."""
    border = f"padding-left:.6em;margin-right:.8em;border-left:{edge((rank,))}"
    style = f"display:inline-block;white-space:nowrap;{border};{LABEL}"
    return element("span", f"rank {rank}{more}", style=style)
