"""Waiting in tests for what happens in other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

from distsession import Session

__all__ = ["until", "until_busy"]

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
