"""Notes of exceptions, below their messages in tracebacks of an IPython that leaves them out.

IPython 7, which hosted notebooks have, knows nothing of them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Notes"]

FORMATTERS = ("format_exception", "_format_exception_only")
"""Methods that put an exception without its frames into words: in ``%xmode Context``, and in Plain
and Minimal."""


class Notes:
    """Has a shell's tracebacks end with the notes of each exception.

    Args:
        shell: Of the notebook.
    """

    def __init__(self, shell: Any):
        self._tracebacks = shell.InteractiveTB
        self._added: dict[str, Any] = {}

    def register(self) -> None:
        """Hook in, where IPython does not do it by itself."""
        for name in FORMATTERS:
            plain = getattr(self._tracebacks, name, None)
            if plain is not None and not _shows_notes(plain):
                self._added[name] = _with_notes(plain)
                setattr(self._tracebacks, name, self._added[name])

    def unregister(self) -> None:
        """Take the hook away."""
        for name, added in self._added.items():
            if vars(self._tracebacks).get(name) is added:
                delattr(self._tracebacks, name)


def _shows_notes(plain: Any) -> bool:
    error, note = ValueError(), "a note"
    error.add_note(note)
    try:
        return note in "".join(plain(ValueError, error))
    except Exception:  # a method that takes something else is left alone
        return True


def _with_notes(plain: Any) -> Any:
    def format_exception(kind: Any, error: Any) -> list[str]:
        lines: list[str] = plain(kind, error)
        notes = getattr(error, "__notes__", ())
        if not lines or not isinstance(notes, list):
            return lines
        *others, last = lines
        end = "\n" if last.endswith("\n") else ""
        return [*others, "\n".join([last.removesuffix(end), *map(str, notes)]) + end]

    return format_exception
