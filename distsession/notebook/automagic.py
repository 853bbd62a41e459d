"""``session`` without a percent sign is a variable, not the magic of that name.

IPython takes a line that begins with a magic's name for that magic where no variable has the name.
So ``session`` alone, and ``session[0].run(f)``, would be something else before and after
``session = %session``.
"""

from __future__ import annotations

import re
from typing import Any

from IPython.core.prefilter import PrefilterChecker

__all__ = ["SessionChecker"]

BEFORE_AUTOMAGIC = 650
_COMMAND = re.compile(r"\s+(-|[a-z]+\b(?!\s*[=.(\[]))")


class SessionChecker(PrefilterChecker):  # type: ignore[misc]
    """Keeps IPython's automagic from lines that are Python."""

    def __init__(self, shell: Any):
        super().__init__(
            shell=shell,
            prefilter_manager=shell.prefilter_manager,
            priority=BEFORE_AUTOMAGIC,
        )

    def check(self, line_info: Any) -> Any:
        """IPython's own handler of plain lines, for lines that are none of the magic's."""
        if line_info.esc or line_info.ifun != "session":
            return None
        rest = line_info.line.lstrip().removeprefix("session")
        if _COMMAND.match(rest):
            return None
        return self.prefilter_manager.get_handler_by_name("normal")
