"""The line on the standard error that says what a run or a start waits for."""

from __future__ import annotations

import shutil
import sys
import time

from distsession.kernel.output import NO_NOTICE, Notice

__all__ = ["NoticeLine"]

AGAIN_AFTER_S = 60.0
"""Seconds after which a file gets a line again that it has already: reasons come and go."""


class NoticeLine:
    """Of a terminal the last line, which is replaced; elsewhere a new one when it changes."""

    def __init__(self) -> None:
        self._written: dict[str, float] = {}
        self._is_terminal = sys.stderr.isatty()
        self._shown = ""

    def show(self, notice: Notice) -> None:
        """Show it in place of the one before; an empty one takes that away."""
        if self._is_terminal:
            self._show_in_place(notice)
            return
        now = time.monotonic()
        if notice != NO_NOTICE and now >= self._written.get(notice.what, now):
            self._written[notice.what] = now + AGAIN_AFTER_S
            sys.stderr.write(f"distsession: {notice.text}\n")
            sys.stderr.flush()

    def clear(self) -> None:
        """Other text is about to be written."""
        if self._shown:
            self._shown = ""
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show_in_place(self, notice: Notice) -> None:
        if notice == NO_NOTICE:
            self.clear()
            return
        text = f"distsession: {notice.text}"[: shutil.get_terminal_size().columns - 1]
        if text != self._shown:
            self._shown = text
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
