"""What every benchmark is given: how often to measure, where to write, what was left behind."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from distsession import Session
from tests.benchmarks.figures import OURS, Figure, Row, Target
from tests.benchmarks.processes import Snapshot, end_leftovers, session_folders, snapshot

SETTLE_TIMEOUT = 60.0
GRACE = 2.0
"""Seconds that what has ended may take to be gone."""


@dataclass
class Bench:
    """One run of the benchmarks.

    Attributes:
        repeats: Rounds of each measurement.
        quick: Whether to do with less in each round, too.
        folder: For files, removed at the end.
        ends: For each subject how often it was ended.
        left: For each subject the command lines and folders that were still there then.
    """

    repeats: int
    quick: bool
    folder: Path
    ends: dict[str, int] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)

    def sweep(self, subject: str, before: Snapshot) -> None:
        """Note, and end, what a subject has left behind after its own end.

        Args:
            subject: Who has ended.
            before: What was there before it, and stays.
        """
        self.ends[subject] = self.ends.get(subject, 0) + 1
        left = self.left.setdefault(subject, [])
        left += end_leftovers(GRACE, keep=before.pids)
        for folder in session_folders() - before.folders:
            left.append(f"folder {folder.name}")
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def session(
        self, ranks: int, *, is_registered: bool = False, **options: Any
    ) -> Iterator[Session]:
        """A session that is over with the start's work, and its end.

        Args:
            ranks: How many.
            is_registered: With ipyparallel's controller, too, as when its client was asked for.
            **options: Of the session.
        """
        before = snapshot()
        session = Session(ranks, **options)
        try:
            settle(session, is_registered=is_registered)
            yield session
        finally:
            session.close()
            self.sweep(OURS, before)

    def left_behind(self) -> list[Row]:
        """What was left behind by each, as lines of the table."""
        rows = []
        for subject, count in self.ends.items():
            left = self.left[subject]
            what = f"; {left[0]}" if left else ""
            rows.append(
                Row(
                    f"left behind {GRACE:g} s after the end",
                    subject,
                    Figure((float(len(left)),)),
                    "left",
                    target=Target(0) if subject == OURS else None,
                    note=f"in all, after {count} end{'s' if count > 1 else ''}{what}",
                )
            )
        return rows


def settle(session: Session, *, is_registered: bool = False) -> None:
    """Wait until nothing of the start goes on behind: registration, the agent's later imports."""
    assert not is_registered or session.client is not None
    settle_agent(session)


def settle_agent(session: Session) -> None:
    """Wait until the agent has done what it does when there is nothing else to do.

    It imports, and forks what the next restart takes; it never pauses as long as we do here.
    """
    agent = psutil.Process(psutil.Process(session.infos[0].pid).ppid())
    deadline = time.monotonic() + SETTLE_TIMEOUT
    used = -1.0
    while time.monotonic() < deadline:
        before, used = used, sum(agent.cpu_times()[:2])
        if used - before < 0.03:
            return
        time.sleep(1.0)
