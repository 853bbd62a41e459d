"""What stands by itself below a cell, as Markdown and LaTeX do, in the order of the ranks."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from distsession.display.render import Bundle, note_of, rank_label
from distsession.notebook.output_html import label_html

__all__ = ["MAX_SORTED", "InRankOrder", "display_apart"]

MAX_SORTED = 64
"""Displays of which a late one still finds its place."""


class InRankOrder:
    """Displays of several ranks: the first of each rank, then the second of each, and so on.

    Each is shown as soon as it comes. One that comes late takes its place, and those that belong
    below it move down by one.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._order: list[tuple[int, int]] = []
        self._bundles: dict[tuple[int, int], Bundle] = {}
        self._places: list[tuple[Any, Any]] = []

    @property
    def is_full(self) -> bool:
        """Whether the next one belongs below all of these."""
        return len(self._order) >= MAX_SORTED

    def add(self, rank: int, bundle: Bundle) -> None:
        """Show one more of a rank."""
        key = (self._counts[rank], rank)
        self._counts[rank] += 1
        self._bundles[key] = bundle
        at = bisect.bisect(self._order, key)
        self._order.insert(at, key)
        for number, (_, moved) in enumerate(self._order[at:-1], at):
            data, metadata = self._bundles[self._order[number]]
            label, content = self._places[number]
            label.update(_label([moved], (data, metadata)), raw=True)
            content.update(data, raw=True, metadata=metadata)
        last = self._order[-1]
        self._places.append(display_apart([last[1]], self._bundles[last], True))


def display_apart(
    ranks: Sequence[int], bundle: Bundle, display_id: str | bool = False
) -> tuple[Any, Any]:
    """Show by itself what cannot stand beside others, such as a widget, or is to be updated.

    Args:
        ranks: Whose it is.
        bundle: It.
        display_id: By which it can be updated; True where its place can be.

    Returns:
        What updates the label and it, where their places can be.
    """
    from IPython.display import display

    data, metadata = bundle
    place: dict[str, Any] = {"display_id": True} if display_id is True else {}
    own = {"display_id": display_id} if display_id else {}
    label = display(_label(ranks, bundle), raw=True, **place)
    return label, display(data, raw=True, metadata=metadata, **own)


def _label(ranks: Sequence[int], bundle: Bundle) -> dict[str, str]:
    note = note_of(bundle)
    return {"text/plain": rank_label(ranks, note), "text/html": label_html(ranks, note)}
