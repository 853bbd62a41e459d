"""The live panel of a session: what each rank does and uses, and buttons.

One thread for each session that is shown looks about once a second and sends what has changed, also
while the main thread waits for a cell. It ends when the session is closed, and when nobody shows
the panel any more.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from distsession.display import panel
from distsession.display.html import Html, details, element, join
from distsession.display.panel import RankRow, Snapshot
from distsession.errors import SessionStateError
from distsession.kernel.snapshot import Snapshots
from distsession.notebook.panel_answer import Answer
from distsession.notebook.panel_filter import RankFilter
from distsession.notebook.panel_log import LogView
from distsession.ranks import ranks_text
from distsession.session import Session, Table
from distsession.viewer import SessionViewer

__all__ = ["Panel", "make_panel"]

log = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 1.0
"""Seconds between two looks."""
NO_RANK_LABEL = "choose a rank"
RESTART = "Restart rank"
AGING = ("Diagnose", "Stacks")
"""Buttons whose answers are true only as long as the ranks do the same."""
LATE_CLICKS_HINT = (
    "Clicks reach this kernel between cells only: while one runs, use the notebook's own Stop."
)
"""Where the kernel has no subshells (ipykernel before 7), or the front end does not use them."""

TIPS = {
    "Stop": "Interrupt what runs on the ranks",
    "Diagnose": "Who waits for whom",
    "Stacks": "The frames of each rank's main thread",
    "Log": "What a rank has written, with a search",
    RESTART: "A fresh process for the rank that is chosen",
}
ASKING = ("Stop", "Stacks", RESTART)
"""Buttons that ask something of the ranks, which only the session's owner can."""

_widgets: dict[Session | SessionViewer, PanelWidgets] = {}


def make_panel(session: Session | SessionViewer) -> Panel | None:
    """What a notebook shows of a session; None where this is no notebook."""
    return Panel(session) if _kernel() is not None else None


class Panel(Table):
    """A session at the moment, and live where the front end can show it so."""

    def __init__(self, session: Session | SessionViewer):
        self._session = session
        self._snapshots = Snapshots(session)
        self._snapshot = self._snapshots.take()
        super().__init__(panel.snapshot_text(self._snapshot), panel.snapshot_html(self._snapshot))

    def bundle(self) -> dict[str, Any]:
        """The table in all its forms; whoever shows it takes the best that it can."""
        static = super().bundle()
        if not _has_viewer() or not self._session.is_open:
            return static
        widgets = _widgets.get(self._session)
        if widgets is None or widgets.is_closed:
            widgets = _widgets[self._session] = PanelWidgets(
                self._session, self._snapshots, self._snapshot
            )
        widgets.show_static(static)
        status = self._snapshot.status
        return {**widgets.bundle(), "text/html": element("p", status), "text/plain": status}


class PanelWidgets:
    """The widgets of one session, wherever and however often they are shown.

    Args:
        session: Which.
        snapshots: Looks at it, from here on for these widgets alone.
        snapshot: What to show first.
    """

    def __init__(self, session: Session | SessionViewer, snapshots: Snapshots, snapshot: Snapshot):
        import ipywidgets

        self._session = session
        self._snapshots = snapshots
        self._shown = snapshot
        self._static_class = f"distsession-static-{secrets.token_hex(4)}"
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._was_viewed = False
        self._dead: frozenset[int] = frozenset()
        self._is_beside_cells = True
        """Whether the last click came on a subshell, so that it need not wait for a cell."""
        self._status = ipywidgets.HTML()
        self._rows = ipywidgets.HTML()
        hidden = element("style", f".{self._static_class}{{display:none}}")
        self._layout = ipywidgets.HTML(join((hidden, panel.layout_html())))
        self._config = ipywidgets.HTML()
        self._answer = Answer(lambda action: self._handle_click(RESTART, action))
        self._rank = ipywidgets.Dropdown(
            options=[(NO_RANK_LABEL, -1), *((f"rank {rank}", rank) for rank in session.ranks)],
            value=-1,
            layout={"width": "auto"},
        )
        self._log = LogView(session.ranks, session.log_source)
        self._buttons = {
            name: ipywidgets.Button(description=name, tooltip=tip, layout={"width": "auto"})
            for name, tip in TIPS.items()
        }
        self._refusal = ipywidgets.HTML()
        # The box scrolls, not its content, which is replaced at each change.
        rows = ipywidgets.Box([self._rows])
        rows.add_class(panel.ROWS_CLASS)
        buttons = ipywidgets.HBox(
            [*self._buttons.values(), self._rank], layout={"flex_flow": "row wrap"}
        )
        buttons.add_class(panel.BUTTONS_CLASS)
        is_large = len(session.ranks) > panel.MAX_SINGLE_ROWS
        self._filter = RankFilter(len(session.ranks), self._show_rows) if is_large else None
        self._widget = ipywidgets.VBox(
            [
                self._status,
                buttons,
                self._refusal,
                *([] if _has_subshells() else [ipywidgets.HTML(element("p", LATE_CLICKS_HINT))]),
                self._answer.widget,
                self._log.widget,
                *([] if self._filter is None else [self._filter.widget]),
                rows,
                self._config,
                self._layout,
            ],
            _view_count=0,  # the front end then counts
        )
        self._widget.add_class(panel.PANEL_CLASS)
        self._widget.observe(self._handle_view_count, "_view_count")
        self._actions: dict[str, Callable[[], Html | None]] = {
            "Stop": self._stop,
            "Diagnose": self._diagnose,
            "Stacks": self._stacks,
            "Log": self._open_log,
            RESTART: self._restart,
        }
        self._running_actions: set[str] = set()
        for name, button in self._buttons.items():
            button.on_click(lambda _, name=name: self._handle_button(name))
        own = (*self._buttons.values(), self._rank, self._widget)
        for widget in (
            *own,
            *self._answer.controls,
            *self._log.controls,
            *self._filter_controls,
        ):
            _handle_on_subshell(widget)
        self._update(snapshot)

    @property
    def _filter_controls(self) -> tuple[Any, ...]:
        return () if self._filter is None else self._filter.controls

    def show_static(self, bundle: dict[str, Any]) -> None:
        """Put out what is to be seen where the widgets are not; while they are, they hide it.

        JupyterLab takes widgets alone for an output that has them, and has but an error to show for
        those of a kernel that has ended, as in a notebook that is opened again.
        """
        from IPython.display import display

        folded = details(f"{self._shown.status} (as it was then)", Html(bundle["text/html"]))
        table = element("div", folded, class_=self._static_class)
        display({**bundle, "text/html": table}, raw=True)

    def bundle(self) -> dict[str, Any]:
        """What the front end needs to show the widgets; they are live from here on.

        What came of a button before belongs to where it was pressed.
        """
        from distsession.notebook.widget_versions import view

        self._answer.clear()
        self._was_viewed = False
        self._start_updates()
        return view(self._widget)

    @property
    def is_closed(self) -> bool:
        """Whether the user has closed the widgets, by ``Widget.close_all()`` for example."""
        return self._widget.comm is None

    # --- updates ----------------------------------------------------------------------------------

    def _start_updates(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive() or self._stopped.is_set():
                self._stopped = threading.Event()
                self._thread = threading.Thread(
                    target=self._update_repeatedly,
                    args=(self._stopped,),
                    name="distsession-panel",
                    daemon=True,
                )
                self._thread.start()

    def _handle_view_count(self, change: Any) -> None:
        """The front end shows one view more or less."""
        if change.new:
            self._was_viewed = True
            self._start_updates()
        elif self._was_viewed:
            self._stopped.set()

    def _update_repeatedly(self, stopped: threading.Event) -> None:
        while not stopped.wait(UPDATE_INTERVAL_S):
            if self.is_closed:
                break
            if not self._session.is_open:
                self._show_closed()
                break
            try:
                self._update(self._snapshots.take())
            except Exception:
                # The session is being restarted or closed. The next look will tell; and what is
                # wrong here must not become an error beside the user's own.
                log.debug("the panel could not look", exc_info=True)
                if not self._session.infos:  # after the end of their agent, all start anew
                    self._show_ended()

    def _update(self, snapshot: Snapshot) -> None:
        self._shown = snapshot
        _set_value(self._status, panel.status_html(snapshot.status))
        self._show_rows()
        _set_value(self._config, panel.config_html(snapshot))
        self._update_buttons(self._session.refusal)
        self._answer.check(tuple((row.rank, row.pid, row.kind, row.since) for row in snapshot.rows))
        dead = frozenset(row.rank for row in snapshot.rows if row.kind == "dead")
        if dead - self._dead and self._rank.value not in dead:
            self._rank.value = min(dead - self._dead)
        self._dead = dead
        self._log.refresh()

    def _show_rows(self) -> None:
        rows: Sequence[RankRow] = self._shown.rows
        if self._filter is not None:
            rows = self._filter.apply(rows)
        _set_value(self._rows, panel.rows_html(rows))

    def _show_ended(self) -> None:
        _set_value(self._status, panel.status_html(self._session.status()))
        _set_value(self._rows, panel.rows_html(panel.ended_rows(self._shown.rows)))

    def _update_buttons(self, refusal: str) -> None:
        """Switch those off by which nothing can be asked here, and say why."""
        _set_value(self._refusal, element("p", refusal) if refusal else "")
        for name in ASKING:
            button = self._buttons[name]
            if button.disabled != bool(refusal):
                button.disabled = bool(refusal)
                button.tooltip = refusal or TIPS[name]

    def _show_closed(self) -> None:
        """Show that the session is closed."""
        _widgets.pop(self._session, None)
        for control in (*self._buttons.values(), self._rank, *self._filter_controls):
            control.disabled = True
        self._log.disable()
        self._answer.check("closed")
        _set_value(self._refusal, "")
        self._show_ended()

    # --- buttons ----------------------------------------------------------------------------------

    def _handle_button(self, name: str) -> None:
        self._is_beside_cells = threading.current_thread() is not threading.main_thread()
        self._handle_click(name)

    def _handle_click(self, name: str, action: Callable[[], Html | None] | None = None) -> None:
        """Do what a button says, in a thread of its own: Stop must work beside a slow restart."""
        if name in self._running_actions:
            return
        self._running_actions.add(name)
        threading.Thread(
            target=self._run_action,
            args=(name, action or self._actions[name]),
            name="distsession-button",
            daemon=True,
        ).start()

    def _run_action(self, name: str, action: Callable[[], Html | None]) -> None:
        if name != "Log":
            self._answer.show(name, element("p", "..."))
        try:
            content = action()
            if content is not None:
                self._answer.show(name, content, ages=name in AGING)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._answer.show(name, element("pre", text), is_error=True)
        finally:
            self._running_actions.discard(name)

    def _stop(self) -> Html:
        if self._session.interrupt():
            return element("p", "Stop: what ran is interrupted.")
        late = "" if self._is_beside_cells else f" {LATE_CLICKS_HINT}"
        return element("p", f"Stop: nothing was running.{late}")

    def _open_log(self) -> None:
        self._log.open(self._rank.value if self._rank.value >= 0 else None)

    def _diagnose(self) -> Html:
        return Html(self._session.diagnose().bundle()["text/html"])

    def _stacks(self) -> Html:
        return Html(self._session.diagnose(stacks=True).bundle()["text/html"])

    def _restart(self) -> Html | None:
        rank = self._rank.value
        if rank < 0:
            raise SessionStateError("choose a rank first, beside the button.")
        self._check_others_idle(rank)
        if rank in self._dead:
            return self._restart_now(rank)
        question = (
            f"Rank {rank} lives. With a fresh process its variables are lost; "
            f"session.restart([{rank}], restore=[...]) copies some from another rank."
        )
        self._answer.ask(
            RESTART, question, f"Restart rank {rank} all the same", lambda: self._restart_now(rank)
        )
        return None

    def _check_others_idle(self, rank: int) -> None:
        # A restart gives the process group up, so whoever uses it must be asked first.
        session = self._session
        busy = [r for r in session.ranks if r != rank and session.channel.is_busy(r)]
        if busy:
            raise SessionStateError(
                f"{ranks_text(busy)} still run{'s' if len(busy) == 1 else ''} something: press "
                "Stop first."
            )

    def _restart_now(self, rank: int) -> Html:
        self._check_others_idle(rank)
        self._session.restart([rank])
        self._rank.value = -1
        return element("p", f"Rank {rank} has a fresh process, without variables.")


def _set_value(widget: Any, value: str) -> None:
    """Nothing is sent that the front end has already."""
    if widget.value != value:
        widget.value = value


def _handle_on_subshell(widget: Any) -> None:
    """Let a widget's messages be handled while the main thread is busy.

    JupyterLab sends them to a thread beside it (a subshell) where the kernel has such. ipykernel
    7.4 sends them back to the main thread all the same if the widget was made there.
    """
    with contextlib.suppress(AttributeError):
        if hasattr(widget.comm, "_reply_subshell_for"):
            widget.comm._reply_subshell_for = lambda data, default: default


def _has_subshells() -> bool:
    return bool(getattr(_kernel(), "_supports_kernel_subshells", False))


def _kernel() -> Any:
    """The kernel of this process, if it is a notebook's; without importing IPython."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return getattr(shell, "kernel", None)


def _has_viewer() -> bool:
    """Whether somebody looks on: nbconvert and its like, which can be asked nothing, do not."""
    kernel = _kernel()
    if kernel is None:
        return False
    content = kernel.get_parent().get("content", {})
    return bool(content.get("allow_stdin", True))
