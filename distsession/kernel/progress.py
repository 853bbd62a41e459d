"""Long work says what it waits for, and transfers how far they are."""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from distsession.kernel.output import Notice, Output
from distsession.ranks import ranks_text

__all__ = ["ProgressNotice", "TransferProgress"]

SHOW_AFTER_S = 1.0
"""Seconds that something takes before it is shown."""
SHOW_AFTER_IN_A_FILE_S = 5.0
"""The same where nobody looks on, as where a script writes to a file."""
SHOW_EVERY_S = 0.5
SHOW_TRANSFER_EVERY_S = 0.2
BAR_WIDTH = 24


class ProgressNotice:
    """While its block runs, shows after a second what it waits for, and for how long by then.

    Args:
        output: Where that is shown.
        doing: What is done, such as ``"starting ranks 0-3"``.
        waits_for: Gives what it waits for just then, such as ``"torch to be imported"``.
    """

    def __init__(self, output: Output, doing: str, waits_for: Callable[[], str]):
        self._over = threading.Event()
        context = contextvars.copy_context()  # what is shown belongs to the cell that waits
        self._thread = threading.Thread(
            target=context.run,
            args=(_show_waiting, output, doing, waits_for, self._over),
            name="distsession-waiting",
            daemon=True,
        )
        # Of a block that a Ctrl-C ends as it is entered or left, nobody may call the end.
        weakref.finalize(self, self._over.set)

    def __enter__(self) -> ProgressNotice:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()


def _show_waiting(
    output: Output, doing: str, waits_for: Callable[[], str], over: threading.Event
) -> None:
    began = time.monotonic()
    pause = SHOW_AFTER_IN_A_FILE_S if output.is_file else SHOW_AFTER_S
    try:
        while not over.wait(pause):
            reason = ""
            with suppress(Exception):  # what it looks at changes meanwhile
                reason = waits_for()
            what = f"{doing}{f', waiting for {reason}' if reason else ''}"
            output.notify(Notice(what, f"{what} ({time.monotonic() - began:.0f} s)"))
            pause = SHOW_EVERY_S
    finally:
        output.close()


class TransferProgress:
    """Shows how far a transfer is, once it takes long.

    Args:
        show: Takes a line that replaces the one before.
        verb: What is done: ``"sending"`` or ``"bringing"``.
    """

    def __init__(self, show: Callable[[Notice], None], verb: str):
        self._show = show
        self._verb = verb
        self._began = time.monotonic()
        self._shown = 0.0
        self._ranks: dict[int | None, tuple[int, int]] = {}
        self._lock = threading.Lock()
        """Threads send to nodes: a line must not take the place of a later one."""

    def __call__(self, done: int, total: int, rank: int | None = None) -> None:
        with self._lock:
            self._ranks[rank] = done, total
            now = time.monotonic()
            if now - self._began < SHOW_AFTER_S or now - self._shown < SHOW_TRANSFER_EVERY_S:
                return
            self._shown = now
            self._show(Notice(self.text(now - self._began)))

    def text(self, seconds: float) -> str:
        """``sending [######----] 512 of 1024 MB, 850 MB/s``, with the slowest rank if known."""
        done = sum(done for done, _ in self._ranks.values())
        total = max(1, sum(total for _, total in self._ranks.values()))
        filled = BAR_WIDTH * done // total
        bar = "#" * filled + "-" * (BAR_WIDTH - filled)
        text = (
            f"{self._verb} [{bar}] {done / 1e6:.0f} of {total / 1e6:.0f} MB, "
            f"{done / 1e6 / max(seconds, 1e-3):.0f} MB/s"
        )
        behind = [rank for rank, (d, t) in self._ranks.items() if rank is not None and d < t]
        return f"{text}, waiting for {ranks_text(sorted(behind))}" if behind else text
