"""Long work says what it waits for."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsession.view import Output

__all__ = ["ProgressNotice"]

SHOW_AFTER = 1.0
"""Seconds that something takes before it is shown."""
SHOW_AFTER_IN_A_FILE = 5.0
"""The same where nobody looks on, as where a script writes to a file."""
SHOW_EVERY = 0.5


class ProgressNotice:
    """While its block runs, shows after a second what it waits for, and for how long by then.

    Args:
        output: Where that is shown.
        doing: What is done, such as ``"starting ranks 0-3"``.
        waits_for: Gives what it waits for just then, such as ``"torch to be imported"``.
    """

    def __init__(self, output: Output, doing: str, waits_for: Callable[[], str]):
        self._output = output
        self._doing = doing
        self._waits_for = waits_for
        self._over = threading.Event()
        context = contextvars.copy_context()  # what is shown belongs to the cell that waits
        self._thread = threading.Thread(
            target=lambda: context.run(self._show), name="distsession-waiting", daemon=True
        )

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
        self._output.close()

    def _show(self) -> None:
        began = time.monotonic()
        is_file = getattr(self._output, "is_file", False)
        if self._over.wait(SHOW_AFTER_IN_A_FILE if is_file else SHOW_AFTER):
            return
        while True:
            reason = ""
            with suppress(Exception):  # what it looks at changes meanwhile
                reason = self._waits_for()
            waits = f", waiting for {reason}" if reason else ""
            self._output.notify(f"{self._doing}{waits} ({time.monotonic() - began:.0f} s)")
            if self._over.wait(SHOW_EVERY):
                return
