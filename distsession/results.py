"""The values that the ranks gave back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from distsession.display import render

__all__ = ["RankResults"]

T = TypeVar("T")


class RankResults(Mapping[int, T], Generic[T]):
    """A read-only mapping from rank to value, in rank order.

    ``results[0]`` is rank 0's value whatever ranks took part; ``results.values()`` gives the
    values in rank order.

    Attributes:
        duration: Seconds from the call to the last answer.
        durations: For each rank, the seconds that the user's code ran there.
    """

    def __init__(
        self,
        values: Mapping[int, T],
        *,
        duration: float = 0.0,
        durations: Mapping[int, float] | None = None,
    ):
        self._values = dict(sorted(values.items()))
        self.duration = duration
        self.durations = dict(sorted((durations or {}).items()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that answered."""
        return tuple(self._values)

    def __getitem__(self, rank: int) -> T:
        try:
            return self._values[rank]
        except KeyError:
            raise KeyError(f"rank {rank} gave no result; these did: {list(self._values)}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shown = {rank: repr(value) for rank, value in self._values.items()}
        return render.fold_text(shown) or "RankResults({})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("RankResults(...)" if cycle else repr(self))
