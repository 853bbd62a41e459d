"""``%%distributed --timeline`` and ``--profile``."""

from __future__ import annotations

import argparse
import itertools
import logging
from pathlib import Path

from distsession.errors import DistsessionError, OptionsError
from distsession.ranks import parse_ranks, ranks_text
from distsession.timeline.timeline import Timeline
from distsession.view import RankView

__all__ = ["TimelineOutput", "add_arguments"]

log = logging.getLogger(__name__)

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``%%distributed`` for it."""
    parser.add_argument(
        "--timeline", action="store_true", help="show afterwards who waited for whom"
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const=ALL,
        metavar="RANKS",
        help="run torch's profiler on these ranks, or on all of the cell's, and write a trace",
    )
    parser.add_argument(
        "--profile-to", metavar="FILE", help="where to; trace-In3.json or the like by default"
    )


class TimelineOutput:
    """What is to be done when a cell is over, well or not.

    Args:
        arguments: Of the magic.
        view: The ranks of the cell.
        label: Of the cell.

    Raises:
        OptionsError: It cannot be done.
    """

    def __init__(self, arguments: argparse.Namespace, view: RankView, label: str):
        self._view = view
        self._shows = arguments.timeline
        self._before = view.session.last_run
        self.profile: tuple[int, ...] = ()
        self._path: Path | None = None
        wanted = arguments.profile or (ALL if arguments.profile_to else None)
        if wanted is None:
            return
        self.profile = view.ranks
        if wanted != ALL:
            self.profile = parse_ranks(wanted, view.session.world_size)
        elsewhere = [rank for rank in self.profile if rank not in view.ranks]
        if elsewhere:
            raise OptionsError(
                f"--profile {wanted}: the cell does not run on {ranks_text(elsewhere)}."
            )
        self._path = Path(arguments.profile_to) if arguments.profile_to else _free_path(label)
        if not self._path.absolute().parent.is_dir():
            raise OptionsError(f"--profile-to {self._path}: there is no such folder.")

    def show(self, *, failed: bool = False) -> None:
        """Show what was asked for. After a failure, what cannot be shown is only logged."""
        if not (self._shows or self._path) or self._view.session.last_run is self._before:
            return
        try:
            timeline = self._view.session.timeline(waits=not failed)
            self._write(timeline)
        except (DistsessionError, OSError) as error:
            if not failed:
                raise
            log.warning("there is no timeline: %s", error)

    def _write(self, timeline: Timeline) -> None:
        from IPython.display import display

        if self._shows:
            display(timeline)
        if self._path is not None:
            timeline.save(self._path)
            size = self._path.stat().st_size / 1e6
            line = (
                f"wrote {self._path} ({size:.1f} MB, with torch's profile of "
                f"{ranks_text(self.profile)}): open it in https://ui.perfetto.dev"
            )
            display({"text/plain": line}, raw=True)


def _free_path(label: str) -> Path:
    """``trace-In3.json``, or with a number behind it that no file has yet."""
    name = "trace-" + "".join(c for c in label if c.isalnum())
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for each in names if not (path := Path(f"{each}.json")).exists())
