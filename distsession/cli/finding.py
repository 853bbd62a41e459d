"""What the doctor has found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        mend: What to do about it; empty where nothing is wrong.
        fatal: A session, or a part of it, cannot work like this.
        details: What else is known, in lines.
    """

    what: str
    value: str
    mend: str = ""
    fatal: bool = False
    details: str = ""

    @property
    def mark(self) -> str:
        """In one word, how bad it is."""
        return "FAIL" if self.fatal else "warn" if self.mend else "ok"
