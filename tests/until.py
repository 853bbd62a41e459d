"""Waiting in tests for what happens in other threads and processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from distsession import Session
from distsession.protocol.messages import RankReport
from distsession.protocol.rank_state import RankState

__all__ = ["LIMIT_S", "Press", "press_at", "until", "until_busy", "until_settled"]

Point = tuple[object, ...]
LOOKS, SILENT_LOOKS = 5, 10
"""How often ranks are seen at one point; one that does not answer may only be slow."""
LIMIT_S = 60.0
"""Tells an end from a hang, on a busy machine too."""


def until(condition: Callable[[], object], what: str = "what was waited for") -> None:
    """Wait until this holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {LIMIT_S:g} s"
        time.sleep(0.01)


def until_busy(session: Session, *texts: str) -> None:
    """Wait until no rank is idle, and until a diagnosis says all of this."""

    def is_so() -> bool:
        said = repr(session.diagnose())
        return "idle" not in said and all(text in said for text in texts)

    until(is_so, f"ranks that run something ({', '.join(texts)})")


def until_settled(session: Session) -> None:
    """Wait until something runs, and until no rank that it was given to gets any further in it."""
    seen: list[dict[int, Point]] = []

    def is_so() -> bool:
        ranks = {rank for pending in session.channel.pending() for rank in pending.missing}
        reports = session.recovery.reports(ask=True)
        seen.append({rank: _point(reports[rank]) for rank in ranks})
        is_silent = any(report.state is RankState.SILENT for report in reports.values())
        looks = SILENT_LOOKS if is_silent else LOOKS
        last = seen[-looks:]
        return bool(ranks) and all(last[-1].values()) and last == [last[-1]] * looks

    until(is_so, "ranks that get no further")


def _point(report: RankReport) -> Point:
    """Where a rank is; nothing where it has not begun."""
    if report.state is RankState.IDLE or not report.request:
        return ()
    waits = tuple(op.sequence for op in report.operations if op.is_waiting)
    awaits = bool(report.stack) and report.stack[-1].filename.endswith("selectors.py")
    if report.state is RankState.RUNNING and not (report.place or waits or awaits):
        return ()
    return report.state, report.request, report.place, waits, awaits


def press_at(pauses: Sequence[float], press: Callable[[], object], work: Callable[[], Any]) -> None:
    """Press Stop again and again beside some work, and leave when the last press has come.

    Args:
        pauses: Seconds before each press.
        press: Sends SIGINT to this process.
        work: Ends when it is pressed, or by itself.
    """
    pressed = threading.Event()

    def go() -> None:
        for pause in pauses:
            time.sleep(pause)
            press()
        pressed.set()

    with contextlib.suppress(KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            threading.Thread(target=go).start()
            work()
        pressed.wait(LIMIT_S)
    while True:  # the last may come a little later
        with contextlib.suppress(KeyboardInterrupt):
            assert pressed.wait(LIMIT_S)
            time.sleep(0.01)
            return


class Press(threading.Thread):
    """Does something as soon as all ranks are in the midst of what they were given.

    Args:
        session: Whose.
        what: Is done then.
        when: Waits; by default until no rank gets any further.
    """

    def __init__(
        self, session: Session, what: Callable[[], Any], when: Callable[[], object] | None = None
    ):
        super().__init__(daemon=True)
        self._what = what
        self._when = when or (lambda: until_settled(session))
        self.pressed_at = 0.0

    def run(self) -> None:
        try:
            self._when()
        finally:  # or what it should have ended would go on
            self.pressed_at = time.monotonic()
            self._what()

    def __enter__(self) -> Press:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
