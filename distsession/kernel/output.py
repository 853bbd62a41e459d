"""Where the ranks' output goes; the session itself never prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distsession.cluster.base import Channel
from distsession.cluster.pending import OutputMessage
from distsession.display.render import Bundle
from distsession.protocol.messages import RankReport

__all__ = ["NO_NOTICE", "Notice", "Output", "Silent"]


@dataclass(frozen=True)
class Notice:
    """A line about a run. Two are equal if they say the same, however much time lies between.

    Attributes:
        what: The line, without how long something has lasted.
        timed: The line with it; empty where it says nothing of time.
    """

    what: str = ""
    timed: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """What people read."""
        return self.timed or self.what


NO_NOTICE = Notice()
"""Takes the one before away."""


class Output:
    """A place for the output of one run. This one drops everything; others override what they show.

    Attributes:
        is_file: Nobody looks on, so less is told of what is under way.
        can_ask: Somebody can be asked here, by :meth:`ask`.
        text_bars: Progress bars that are widgets are to be shown as text.
        cell: The number of the notebook's cell that it is of; None where there is none.
    """

    is_file: bool = False
    can_ask: bool = False
    text_bars: bool = False
    cell: int | None = None

    def connect(self, ranks: Sequence[int], channel: Channel) -> None:
        """Called before all else: these ranks put out something, and can be answered so."""

    def write(self, message: OutputMessage) -> None:
        """Take one piece of output."""

    def tick(self, reports: Callable[[bool], Mapping[int, RankReport]]) -> None:
        """Called several times a second while ranks work.

        Args:
            reports: Gives what each rank does; called with True it asks the ranks for the line
                that they are at, which takes some milliseconds.
        """

    def show(self, shown: dict[int, Bundle]) -> None:
        """Show the value of a cell's last expression on each rank."""

    def go_on(self, seconds: float) -> None:
        """Called before all else of a run that an earlier kernel began so many seconds ago."""

    def fail(self, text: str) -> None:
        """Say how a run has failed of which nobody else is told."""

    def show_more(self) -> None:
        """Called before all else where output is shown again: as much of it as can be read."""

    def remark(self, text: str) -> None:
        """Say something about a run, below its output, where it stays."""

    def notify(self, notice: Notice) -> None:
        """Show a line about the run that replaces the one before; an empty one takes it away."""

    def ask(self, prompt: str, secret: bool) -> str:
        """Put to somebody what a rank asks, in the main thread.

        Raises:
            EOFError: At the end of the input.
            NotImplementedError: This front end takes no input.
        """
        raise NotImplementedError

    def ends_soon(self, wait: float) -> bool:
        """Whether a Ctrl-C came because this process is to end, and not to stop what runs.

        Args:
            wait: Seconds within which that is known, at the latest.
        """
        return False

    def close(self) -> None:
        """The run is over."""


Silent = Output
"""Drops all output."""
