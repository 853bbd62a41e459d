"""Facts that a terminal shows as text and a notebook as a table."""

from __future__ import annotations

from typing import Any

__all__ = ["Table"]


class Table:
    """Facts as text in a terminal and as a table in a notebook."""

    def __init__(self, text: str, html: str):
        self._text = text
        self._html = str(html)  # marimo can send no subclass of it

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()

    def bundle(self) -> dict[str, Any]:
        """All forms of it, by MIME type."""
        return {"text/plain": self._text, "text/html": self._html}
