"""Looking on at a session that another process owns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from distsession.cluster.kept_session import KeptSession, time_text
from distsession.display import panel as static_panel
from distsession.display import render
from distsession.display.html import element
from distsession.display.table import Table
from distsession.errors import SessionStateError
from distsession.kernel.kept_ranks import KeptRanks, NotThereError
from distsession.kernel.kept_state import KeptState
from distsession.kernel.kept_table import doing_text, owner_text
from distsession.kernel.log_tail import texts_of_all
from distsession.kernel.log_text import LogSource
from distsession.kernel.output import Output
from distsession.kernel.replay import show_again
from distsession.kernel.snapshot import Snapshots
from distsession.options import SessionOptions
from distsession.protocol.diagnosis import diagnose
from distsession.ranks import (
    Host,
    RankInfo,
    RankSelector,
    count_text,
    host_names,
    hosts_of,
    select_ranks,
)

__all__ = ["SessionViewer"]

NEEDS_OWNER = frozenset(
    (
        *("run", "submit", "execute", "evaluate", "diff", "push", "pull", "scatter", "gather"),
        *("restart", "reconnect", "interrupt", "debug", "timeline", "export", "check_export"),
        *("client", "pending", "follow", "detach", "activate", "on", "preload"),
    )
)
"""What a session has and somebody who looks on has not."""
INTERNAL = frozenset(("check_open", "launcher", "recovery"))
"""Attributes that other modules use: completion and ``dir()`` do not show them."""


class SessionViewer:
    """A session that is kept, as one sees it who does not own it.

    :meth:`Session.view` gives one. It reads what the ranks write, and asks nothing of them, so
    they do not notice::

        viewer = Session.view("digits")
        viewer.diagnose()

    Whatever else a session can do is a ``SessionStateError`` that says who owns it.

    Args:
        kept: The session.
        make_output: Makes the place for what is shown of a cell.
        make_panel: Makes what a notebook shows of it; nothing elsewhere.
    """

    def __init__(
        self,
        kept: KeptSession,
        make_output: Callable[[SessionViewer], Output],
        make_panel: Callable[[SessionViewer], Table | None],
    ):
        self.name = kept.name
        try:
            self._ranks = KeptRanks(kept)
        except OSError:
            raise SessionStateError(f"{_ended_text(self.name)}.") from None
        self._make_output = make_output
        self._make_panel = make_panel
        self._closed = False

    # --- what it is -------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the session is there, and this has not been closed."""
        if not self._closed:
            self._ranks.look()
        return not (self._closed or self._ranks.has_ended)

    @property
    def options(self) -> SessionOptions:
        """Those that the session was started with."""
        return self._ranks.state.options

    @property
    def option_sources(self) -> dict[str, str]:
        return dict.fromkeys(vars(self.options), "the session")

    @property
    def infos(self) -> tuple[RankInfo, ...]:
        """The facts of each rank."""
        return self._ranks.infos

    @property
    def job(self) -> str:
        """Empty: only its owner knows of a scheduler's job."""
        return ""

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that the ranks are on, in the order of their ranks."""
        return hosts_of(self.infos, lambda node: "")

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.infos)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    @property
    def refusal(self) -> str:
        """Who owns the session, and how one becomes its owner."""
        kept = self._ranks.look()
        if self._closed or self._ranks.has_ended:
            return f"{self.status()}."
        if kept.has_owner and kept.owner is not None:
            since = time_text(kept.owner.since)
            return (
                f"process {kept.owner.pid} has owned session {self.name} since {since}, and this "
                f"one only looks on (status, panel, diagnose, output): %session attach {self.name} "
                f"--take, or Session.attach({self.name!r}, take=True), makes this process its "
                "owner, and the other one can ask nothing of it any more then."
            )
        return (
            f"session {self.name} has no owner, and this process only looks on (status, panel, "
            f"diagnose, output): %session attach {self.name}, or Session.attach({self.name!r}), "
            "makes this process its owner."
        )

    # --- looking ----------------------------------------------------------------------------------

    def status(self) -> str:
        """One line on how the session is, and who owns it."""
        if self._closed:
            return f"{self.name} is not looked at any more"
        kept = self._ranks.look()
        if self._ranks.has_ended:
            return _ended_text(self.name)
        try:
            doing = doing_text(KeptState(kept, self._ranks.reports()))
        except NotThereError:
            doing = "its ranks are being started"
        facts = f"{count_text(kept.world_size)}, {kept.backend}" if kept.backend else ""
        return f"{self.name}: {doing} ({facts}), owned by {owner_text(kept)}; only looked at here"

    def show_config(self) -> Table:
        """What the session is made of, and what each rank does and uses; live in a notebook."""
        self.check_open()
        try:
            if (panel := self._make_panel(self)) is not None:
                return panel
            overview = Snapshots(self).take()
        except NotThereError as error:
            raise self._not_now(error) from None
        return Table(static_panel.snapshot_text(overview), static_panel.snapshot_html(overview))

    def devices(self) -> Table:
        """The device of each rank."""
        self.check_open()
        return Table(render.devices_text(self.infos), render.devices_html(self.infos))

    def diagnose(self, *, stacks: bool = False) -> Table:
        """What each rank does, and who waits for whom, as far as the ranks write it down.

        Args:
            stacks: Not for who only looks: a rank has to be asked for its frames.
        """
        self.check_open()
        if stacks:
            raise SessionStateError(f"only the ranks know their stacks, and {self.refusal}")
        try:
            reports = self._ranks.reports()
        except NotThereError as error:
            raise self._not_now(error) from None
        return render.diagnosis_table(reports, diagnose(reports), hosts=host_names(self.infos))

    def show_output(
        self,
        cell: int | None = None,
        ranks: RankSelector | None = None,
        kernel: int | None = None,
    ) -> Table:
        """Show what the ranks put out in a cell of any of the session's notebooks.

        Of a cell that runs still, there is the text that it has written so far.

        Args:
            cell: The number of the notebook's cell. Default: the last one.
            ranks: Whose. Default: all that it ran on.
            kernel: Which of the kernels that had the session, from 1. Default: the last that ran a
                cell of that number.

        Returns:
            Of which cell it is and of when, what is missing, and the cell's error.

        Raises:
            SessionStateError: There is no output of that cell, or not of these ranks.
        """
        self.check_open()
        wanted = self.ranks if ranks is None else select_ranks(ranks, self.world_size)
        try:
            outputs = self._ranks.outputs()
        except NotThereError as error:
            raise self._not_now(error) from None
        text = show_again(outputs, wanted, lambda: self._make_output(self), cell, kernel)
        return Table(text, element("pre", text))

    def watch(self, lines: int = 10) -> None:
        """Show what all ranks write as they write it, until Ctrl-C or the session's end.

        Args:
            lines: How many lines of each rank that are there already come first.
        """
        self.check_open()
        output = self._make_output(self)
        output.cell = None  # it is of no cell of this notebook
        try:
            for texts in texts_of_all(self._ranks.look(), lines):
                for text in texts:
                    output.write(text)
                with contextlib.suppress(NotThereError):
                    reports = self._ranks.reports()
                    output.tick(lambda with_places, found=reports: found)  # type: ignore[misc]
        except KeyboardInterrupt:
            pass  # that is how one stops looking
        finally:
            output.close()

    def log_path(self, rank: int, stream: str = "stdout") -> Path | None:
        """The file that has what a rank has written; that of the process that it is now.

        Args:
            rank: Which.
            stream: ``"stdout"`` or ``"stderr"``.

        Returns:
            The path; None where there is none, and of a rank on another host, where the file is.
        """
        return self._ranks.log_path(rank, stream)

    def log_source(self, rank: int, stream: str) -> LogSource:
        """The same file, also of another host, to be looked through."""
        return self._ranks.log_source(rank, stream)

    def close(self) -> None:
        """Look no longer. The session goes on. Harmless when repeated."""
        self._closed = True
        self._ranks.close()

    def __enter__(self) -> SessionViewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SessionViewer {self.status()}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.show_config().bundle() if self.is_open else {"text/plain": repr(self)}

    # --- what only its owner can do ---------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in NEEDS_OWNER:
            return self._refuse
        raise AttributeError(f"a SessionViewer has no attribute {name!r}", name=name, obj=self)

    def __getitem__(self, selector: RankSelector) -> NoReturn:
        self._refuse()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SessionStateError(self.refusal)

    # --- for the panel ----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse to show what was true earlier as if it were so now."""
        if not self.is_open:
            raise SessionStateError(f"{self.status()}.")

    @property
    def recovery(self) -> KeptRanks:
        """Says what the ranks do."""
        return self._ranks

    @property
    def launcher(self) -> KeptRanks:
        """Says what the ranks use."""
        return self._ranks

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - INTERNAL)

    def _not_now(self, error: NotThereError) -> SessionStateError:
        if not self.is_open:
            return SessionStateError(f"{self.status()}.")
        return SessionStateError(
            f"what the ranks of {self.name} do cannot be read just now: {error}."
        )


def _ended_text(name: str) -> str:
    return f"session {name} has ended"
