"""``%session auto on``: plain cells go to the ranks; ``%%local`` keeps one in the notebook."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["AUTO_FLAG", "AutoPx", "is_plain", "rewrite"]

AUTO_FLAG = "--auto"
"""What stands behind ``%%distributed`` in a cell that was sent without its user writing so."""

_OUR_MAGICS = re.compile(
    r"^\s*(?:\w+\s*=\s*)?%(?:session|distributed|px|(?:un|re)?load_ext\s+distsession)\b",
    re.MULTILINE,
)


_OF_LAST_ERROR = re.compile(r"\s*%(?:(?:debug|pdb)[ \t]*(?:on|off|[01])?|tb\b[^\n]*)\s*")
"""Magics about the error that the notebook has shown, alone in their cell."""

_HELP_ALONE = re.compile(r"\s*%%distributed\b[^\n]*\s(?:-h|--help)\b[^\n]*\s*")


def is_plain(cell: str) -> bool:
    """Whether a cell has neither a cell magic nor one of this package's, and does something."""
    if cell.lstrip().startswith("%%") or _OUR_MAGICS.search(cell) or _OF_LAST_ERROR.fullmatch(cell):
        return False
    return any(line.strip() and not line.lstrip().startswith("#") for line in cell.splitlines())


def rewrite(cell: str, is_on: bool) -> str:
    """What is run in the place of a cell.

    The line of ``%%local`` becomes a comment, so that line numbers stay. A cell magic below it
    must come first to be one. IPython takes no cell magic without a body, so one that only asks for
    help gets one.
    """
    if _HELP_ALONE.fullmatch(cell):
        return f"{cell.rstrip()}\n#\n"
    if re.match(r"%%local[ \t]*(\n|$)", cell):
        body = cell.partition("\n")[2]
        return body if body.lstrip().startswith("%%") else f"# %%local\n{body}"
    return f"%%distributed {AUTO_FLAG}\n{cell}" if is_on and is_plain(cell) else cell


class AutoPx:
    """Rewrites the cells of a shell.

    Attributes:
        is_on: Plain cells go to the ranks.
    """

    def __init__(self, shell: Any):
        self._shell = shell
        self._running_cells = 0
        self.is_on = False

        def transform(lines: list[str]) -> list[str]:
            # A cell that runs has what it runs itself transformed, too, such as the body of %%time.
            if self._running_cells:
                return lines
            return rewrite("".join(lines), self.is_on).splitlines(keepends=True)

        transform.has_side_effects = True  # type: ignore[attr-defined]  # not to see if it is complete
        self._transform = transform

    def register(self) -> None:
        """Hook in."""
        self._shell.input_transformers_cleanup.append(self._transform)
        self._shell.events.register("pre_execute", self._handle_pre_execute)
        self._shell.events.register("post_execute", self._handle_post_execute)
        self._running_cells = 1  # this is called by a cell

    def unregister(self) -> None:
        """Take the hooks away."""
        transforms = self._shell.input_transformers_cleanup
        if self._transform in transforms:
            transforms.remove(self._transform)
            self._shell.events.unregister("pre_execute", self._handle_pre_execute)
            self._shell.events.unregister("post_execute", self._handle_post_execute)

    def _handle_pre_execute(self) -> None:
        self._running_cells += 1

    def _handle_post_execute(self) -> None:
        self._running_cells = max(0, self._running_cells - 1)
