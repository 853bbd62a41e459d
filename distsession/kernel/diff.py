"""One expression, compared over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distsession.display import html
from distsession.display.html import Html, element
from distsession.errors import DistsessionError
from distsession.kernel.requests import Requests
from distsession.protocol.cells import cell_name
from distsession.protocol.messages import PartsRequest, SummaryRequest
from distsession.ranks import ranks_text

if TYPE_CHECKING:
    from distsession.engine.diff import Leaf

__all__ = ["Comparison", "Difference", "compare", "diff"]

BATCH = 64 << 20
"""Bytes of a rank that are brought at a time."""
SHOWN = 20
"""Differences that are shown."""

Leaves = Mapping[str, "Leaf"]


@dataclass(frozen=True)
class Difference:
    """One part that is not the same on all ranks.

    Attributes:
        path: Where in the value, such as ``['fc.weight']``; empty for the value itself.
        ranks: The ranks that have it in this way.
        text: How it differs from that of the lowest rank.
        largest: The largest absolute difference of two numbers; None where there is none.
    """

    path: str
    ranks: tuple[int, ...]
    text: str
    largest: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What came of comparing an expression over the ranks.

    Attributes:
        expression: What was compared.
        groups: Ranks that agree; the group of the lowest rank first.
        differences: What differs from the lowest rank, part by part.
        parts: How many parts the value has.
        kind: What the value is on the lowest rank.
    """

    expression: str
    groups: tuple[tuple[int, ...], ...]
    differences: tuple[Difference, ...] = ()
    parts: int = 1
    kind: str = field(default="", compare=False)

    @property
    def equal(self) -> bool:
        """Whether it is the same on all ranks."""
        return len(self.groups) == 1

    def __bool__(self) -> bool:
        return self.equal

    @property
    def headline(self) -> str:
        """Equal, or who agrees with whom."""
        first, *others = self.groups
        parts = f" ({self.parts} parts)" if self.parts > 1 else ""
        if not others:
            return f"{self.expression} is equal on {ranks_text(first)}: {self.kind}{parts}"
        base = f"rank {first[0]}"
        agree = [f"{ranks_text(group)} agree" for group in self.groups if len(group) > 1]
        apart = [ranks_text(group) for group in others if len(group) > 1]
        if alone := sorted(group[0] for group in others if len(group) == 1):
            apart.append(ranks_text(alone))
        paths = len({difference.path for difference in self.differences})
        where = f" in {paths} of {self.parts} parts" if self.parts > 1 else ""
        together = f"; {', '.join(agree)}" if agree else ""
        be = "differs" if len(others) == 1 and len(others[0]) == 1 else "differ"
        return f"{self.expression}: {', '.join(apart)} {be} from {base}{where}{together}"

    def __repr__(self) -> str:
        lines = [self.headline]
        lines += [
            f"  {ranks_text(d.ranks)}: {d.path}{' ' * bool(d.path)}{d.text}" for d in self._shown
        ]
        return "\n".join(lines + self._more)

    def _repr_html_(self) -> str:
        return str(self._html())

    def _html(self) -> Html:
        head = element("p", self.headline)
        if self.equal:
            return head
        more = [element("p", line.strip()) for line in self._more]
        if self.parts > 1 or any(d.path for d in self._shown):
            rows = [(ranks_text(d.ranks), element("code", d.path), d.text) for d in self._shown]
            table = html.table(("ranks", "part", "difference"), rows)
        else:  # it has no parts that could be named
            table = html.table(
                ("ranks", "difference"), [(ranks_text(d.ranks), d.text) for d in self._shown]
            )
        return html.join((head, table, *more))

    @property
    def _shown(self) -> tuple[Difference, ...]:
        return self.differences[:SHOWN]

    @property
    def _more(self) -> list[str]:
        more = len(self.differences) - SHOWN
        return [f"  and {more} more: see .differences"] if more > 0 else []


def diff(requests: Requests, ranks: Sequence[int], expression: str, label: str = "") -> Comparison:
    """Compare an expression over ranks; it is evaluated once on each.

    Args:
        requests: Of the session.
        ranks: Which.
        expression: What to evaluate there.
        label: Stands for its file name in tracebacks. Default: that of the request.
    """

    def make(number: int) -> SummaryRequest:
        return SummaryRequest(number, expression, label or cell_name(number))

    summaries = requests.call(ranks, make, [])
    try:
        return compare(expression.strip(), dict(summaries), _Parts(requests))
    finally:
        with suppress(DistsessionError):  # a rank that has died needs not forget
            requests.post(ranks, lambda number: PartsRequest(number, ()))


class _Parts:
    """Brings parts from the ranks that have them."""

    def __init__(self, requests: Requests):
        self._requests = requests

    def __call__(self, ranks: Sequence[int], paths: Sequence[str]) -> Mapping[int, dict[str, Any]]:
        found: Mapping[int, dict[str, Any]] = self._requests.call(
            ranks, lambda number: PartsRequest(number, tuple(paths)), [], verb="bringing"
        )
        return found


def compare(expression: str, summaries: Mapping[int, Leaves], parts: Any) -> Comparison:
    """Compare summaries.

    Args:
        expression: What they are of.
        summaries: The parts of the value on each rank.
        parts: Called with ranks and paths; gives each rank's parts by path.
    """
    lowest = min(summaries)
    base = summaries[lowest]
    paths = list(dict.fromkeys(path for leaves in summaries.values() for path in leaves))
    changed = [
        path for path in paths if len({leaves.get(path) for leaves in summaries.values()}) > 1
    ]
    groups = _grouped({rank: _key(summaries[rank], changed) for rank in summaries})
    versions = {
        path: _grouped({rank: summaries[rank].get(path) for rank in summaries}) for path in changed
    }
    gaps = _gaps(summaries, versions, parts)
    count = sum(not leaf.is_container for leaf in base.values())
    return Comparison(
        expression,
        tuple(groups),
        tuple(_differences(summaries, versions, gaps, lowest)),
        max(1, len(paths) - (len(base) - count)),
        base[""].kind,
    )


def _key(leaves: Leaves, changed: Sequence[str]) -> tuple[Leaf | None, ...]:
    return tuple(leaves.get(path) for path in changed)


def _grouped(values: Mapping[int, Any]) -> list[tuple[int, ...]]:
    groups: dict[Any, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _gaps(
    summaries: Mapping[int, Leaves], versions: Mapping[str, Sequence[tuple[int, ...]]], parts: Any
) -> dict[tuple[str, int], Any]:
    """By how much parts of the same kind differ from the lowest rank's, by path and rank."""
    from distsession.engine.diff import gap

    found: dict[tuple[str, int], Any] = {}
    for batch in _batches(summaries, versions):
        ranks = sorted({rank for wanted in batch.values() for rank in wanted})
        brought = parts(ranks, list(batch))
        for path, (lowest, *others) in batch.items():
            for rank in others:
                found[path, rank] = gap(brought[lowest][path], brought[rank][path])
    return found


def _batches(
    summaries: Mapping[int, Leaves], versions: Mapping[str, Sequence[tuple[int, ...]]]
) -> Iterator[dict[str, list[int]]]:
    """Which parts are to be brought together, each with the ranks that it is wanted from."""
    batch: dict[str, list[int]] = {}
    size = 0
    for path, groups in versions.items():
        lowest = groups[0][0]
        base = summaries[lowest].get(path)
        if base is None or not base.size:
            continue
        alike = [g[0] for g in groups[1:] if _is_alike(base, summaries[g[0]].get(path))]
        if not alike:
            continue
        if batch and size + base.size > BATCH:
            yield batch
            batch, size = {}, 0
        batch[path] = [lowest, *alike]
        size += base.size
    if batch:
        yield batch


def _is_alike(base: Leaf, other: Leaf | None) -> bool:
    return other is not None and other.kind == base.kind and bool(other.size)


def _differences(
    summaries: Mapping[int, Leaves],
    versions: Mapping[str, Sequence[tuple[int, ...]]],
    gaps: Mapping[tuple[str, int], Any],
    lowest: int,
) -> Iterator[Difference]:
    for path, groups in versions.items():
        base = summaries[lowest].get(path)
        for ranks in groups[1:]:
            other = summaries[ranks[0]].get(path)
            found = gaps.get((path, ranks[0]))
            text = _text(base, other, found, lowest)
            yield Difference(path, ranks, text, None if found is None else found.largest)


def _text(base: Leaf | None, other: Leaf | None, found: Any, lowest: int) -> str:
    if other is None:
        return f"is missing; rank {lowest} has it"
    if base is None:
        return f"is there; rank {lowest} does not have it"
    if found is None:
        if other.kind != base.kind:
            return f"{_described(other)} instead of {_described(base)}"
        if other.text and other.text != base.text:
            return f"{other.kind} {other.text} instead of {base.text}"
        return f"another {other.kind}"
    if not found.count:
        return f"{other.kind}, by bits only, such as the sign of a zero"
    values = f"{other.text} instead of {base.text}" if other.text else other.kind
    where = ""
    if found.total > 1:
        index = f" at [{', '.join(map(str, found.index))}]"
        where = f"{index} ({found.count} of {found.total} elements)"
    return (
        f"{values}, by up to {found.largest:.4g}{where}"
        if where
        else (f"{values}, by {found.largest:.4g}")
    )


def _described(leaf: Leaf) -> str:
    return f"{leaf.kind} {leaf.text}".strip()
