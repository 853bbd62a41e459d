"""A word on imports that take the ranks long: which of them to preload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["ImportHints"]


class ImportHints:
    """Says of each module once that it would be worth preloading.

    Args:
        preloaded: Modules of which nothing is to be said.
    """

    def __init__(self, preloaded: Iterable[str] = ()):
        self._known = set(preloaded)

    def forget(self, names: Iterable[str]) -> None:
        """Say nothing of these any more: they are preloaded."""
        self._known.update(names)

    def text(self, imports: Mapping[int, Iterable[tuple[str, float]]]) -> str:
        """What to say after a run; empty if there is nothing new.

        Args:
            imports: For each rank the modules that took it long, with the seconds.
        """
        found: dict[str, dict[int, float]] = {}
        for rank, modules in imports.items():
            for name, seconds in modules:
                if name not in self._known:
                    found.setdefault(name, {})[rank] = seconds
        self._known.update(found)
        lines = [_took(name, seconds) for name, seconds in found.items()]
        if not lines:
            return ""
        them = "it" if len(found) == 1 else "them"
        return (
            f"{' and '.join(lines)}: `%session preload {' '.join(found)}`, and later restarts have "
            f"{them} at once."
        )


def _took(name: str, seconds: Mapping[int, float]) -> str:
    ranks = f"each of {len(seconds)} ranks" if len(seconds) > 1 else f"rank {min(seconds)}"
    return f"`import {name}` took {max(seconds.values()):.1f} s on {ranks}"
