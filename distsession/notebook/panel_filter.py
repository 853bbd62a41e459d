"""Which ranks the panel shows: some of many, by their numbers and by what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distsession.display.html import element
from distsession.display.panel import STATES, RankRow
from distsession.errors import OptionsError
from distsession.ranks import parse_ranks

__all__ = ["RankFilter"]

ANY_STATE = "any state"


class RankFilter:
    """Two fields above the rows.

    Args:
        world_size: How many ranks there are.
        changed: Called when something else is wanted.
    """

    def __init__(self, world_size: int, changed: Callable[[], None]):
        import ipywidgets

        self._world_size = world_size
        self._ranks = ipywidgets.Text(
            placeholder="Ranks, such as 3 or 0-7,12", layout={"width": "16em"}
        )
        self._kind = ipywidgets.Dropdown(options=(ANY_STATE, *STATES), layout={"width": "auto"})
        self._note = ipywidgets.HTML()
        self.widget = ipywidgets.HBox(
            [*self.controls, self._note], layout={"flex_flow": "row wrap"}
        )
        for control in self.controls:
            control.observe(lambda _: changed(), "value")

    @property
    def controls(self) -> tuple[Any, ...]:
        """What can be typed into and chosen."""
        return self._ranks, self._kind

    def apply(self, rows: Sequence[RankRow]) -> list[RankRow]:
        """Those that are wanted."""
        note, wanted = "", range(self._world_size)
        text, kind = self._ranks.value.strip(), self._kind.value
        try:
            chosen = set(parse_ranks(text, self._world_size) if text else wanted)
        except OptionsError as error:  # shown until all of it has been typed
            note, chosen = str(error), set(wanted)
        kinds = STATES if kind == ANY_STATE else (kind,)
        shown = [row for row in rows if row.rank in chosen and row.kind in kinds]
        if not note and len(shown) < len(rows):
            note = f"{len(shown)} of {len(rows)} ranks"
        drawn = element("span", note, role="status") if note else ""
        if self._note.value != drawn:
            self._note.value = drawn
        return shown
