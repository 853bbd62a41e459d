"""The timeline of a cell, as text, picture and file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

from distsession.display import html
from distsession.display.html import Html, element
from distsession.ranks import ranks_text
from distsession.timeline import chrome_trace, flight_record, svg
from distsession.timeline.svg import seconds_text, size_text
from distsession.timeline.waits import Merged, Share, Step, Wait, shares, waits

__all__ = ["BEHIND_DEVICE", "Timeline"]

BEHIND_DEVICE = (
    "That is what the ranks' own lines waited for; how long a device waited within an operation "
    "is not seen here (the profiler of torch shows it)."
)
LONG_WAIT_S = 0.001
"""Seconds from which it is told that somebody waited."""
LONG_WAIT_SHARE = 0.01
"""And as a share of the cell."""
MAX_SENTENCES = 3
"""How many waits are told."""

_HEAD = ("rank", "cell", "work", "in operations", "waiting", "operations", "bytes")


class Timeline:
    """What the ranks did in one cell, and who waited for whom.

    A notebook shows it as a picture; :meth:`save` writes it for Perfetto.

    Args:
        merged: The records of all ranks.
        names: What each rank is called in a saved trace, such as ``"rank 0 (cpu)"``.
        backend: Of the process group.
        hosts: Of the ranks, where there are several.
    """

    def __init__(
        self,
        merged: Merged,
        *,
        names: Mapping[int, str],
        backend: str,
        hosts: Mapping[int, str] | None = None,
    ):
        self.merged = merged
        self._hosts = dict(hosts or {})
        self._names = dict(names)
        self._backend = backend
        self.waits: tuple[Wait, ...] = tuple(waits(merged))

    @property
    def label(self) -> str:
        """The cell, such as ``"In[3]"``, or the function that was called."""
        return self.merged.label

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a record of it."""
        return tuple(self.merged.traces)

    @property
    def records(self) -> tuple[Step, ...]:
        """All operations of all ranks, in the order in which they were begun."""
        steps = [step for steps in self.merged.steps.values() for step in steps]
        return tuple(sorted(steps, key=lambda step: (step.record.began, step.rank)))

    @property
    def shares(self) -> dict[int, Share]:
        """Where the seconds of each rank went."""
        return {rank: shares(self.merged, rank) for rank in self.ranks}

    @property
    def sentence(self) -> str:
        """For whom the others waited."""
        return self._sentences()[0]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing.

        What torch's profiler has recorded is part of it.

        Args:
            path: The file; one that is there is overwritten.

        Returns:
            Its path.
        """
        target = Path(path)
        text = json.dumps(chrome_trace.trace(self.merged, self._names))
        target.write_text(text, encoding="utf-8")
        return target

    def save_flight_record(self, folder: str | os.PathLike[str], prefix: str = "rank_") -> Path:
        """Write it as torch's flight recorder would, for ``torchfrtrace FOLDER``.

        ``torch.distributed.flight_recorder`` names the first operation to which not all ranks came,
        or in which they differ. Its files are pickled: open only those of people whom you trust.

        Args:
            folder: Where to; it is made if it is not there. It gets a file for each rank, which
                replaces one of this name.
            prefix: How their names begin; the number of the rank follows.

        Returns:
            The folder.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for rank, content in flight_record.dumps(self.merged.traces, self._backend).items():
            (target / f"{prefix}{rank}").write_bytes(pickle.dumps(content))
        return target

    # --- words ------------------------------------------------------------------------------------

    def _sentences(self) -> list[str]:
        """The waits that matter, most of all first; or why there is nothing to tell."""
        if not any(trace.is_recorded for trace in self.merged.traces.values()):
            return [
                f"Collectives of {self._backend} are not recorded here, so it is not known who "
                "waited for whom."
            ]
        if not any(self.merged.steps.values()):
            return ["The ranks called no collective."]
        long_waits = [wait for wait in self.waits if self._is_long(wait)]
        if not long_waits:
            longest = max((max(wait.seconds.values()) for wait in self.waits), default=0.0)
            at_most = f": {seconds_text(longest)} at most" if longest else ""
            sentence = f"No rank waited long for another{at_most}."
            return [f"{sentence} {BEHIND_DEVICE}" if self._has_enqueued else sentence]
        return [self._wait_text(wait) for wait in long_waits[:MAX_SENTENCES]]

    @property
    def _has_enqueued(self) -> bool:
        steps = self.merged.steps.values()
        return any(step.record.is_enqueued for of_rank in steps for step in of_rank)

    def _is_long(self, wait: Wait) -> bool:
        total = (self.merged.ended - self.merged.began) / 1e9
        return max(wait.seconds.values()) >= max(LONG_WAIT_S, LONG_WAIT_SHARE * total)

    def _wait_text(self, wait: Wait) -> str:
        waiting, longest = sorted(wait.seconds), max(wait.seconds.values())
        others = [rank for rank in self.ranks if rank not in wait.late]
        is_all = len(others) > 1 and waiting == others
        who = "The others" if is_all else _capitalized(ranks_text(waiting))
        came = "" if self._arrived(wait) else ", which did not come"
        rank = max(wait.seconds, key=lambda r: wait.seconds[r])
        step = wait.longest[rank]
        assert step.held is not None
        part = (step.held[1] - step.held[0]) / 1e9
        times = f"in {wait.count:,} operations, the longest {seconds_text(part)} "
        of_it = "" if part > 0.9 * longest else times
        where = f" at {step.record.place}" if step.record.place else ""
        up_to = "up to " if min(wait.seconds.values()) < 0.9 * longest else ""
        return (
            f"{who} waited for {ranks_text(wait.late)}{came}: {up_to}{seconds_text(longest)} "
            f"{of_it}in {step.title}{where}."
        )

    def _arrived(self, wait: Wait) -> bool:
        return all(
            any(
                (other.record.group, other.record.sequence) == (s.record.group, s.record.sequence)
                for other in self.merged.steps.get(rank, ())
            )
            or s.record.is_from_any
            for rank in wait.late
            for s in wait.longest.values()
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What else one has to know to read it."""
        found = []
        for rank, trace in self.merged.traces.items():
            if trace.error:
                found.append(f"Rank {rank} ended with {trace.error}")
            if trace.dropped:
                kept = len(trace.operations)
                found.append(
                    f"Rank {rank} began {trace.dropped + kept:,} operations; the last {kept:,} are "
                    "kept."
                )
        if self.merged.absent:
            absent = _capitalized(ranks_text(self.merged.absent))
            found.append(f"{absent} took part, and the record is gone with the process.")
        return tuple(found)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for rank, share in self.shares.items():
            steps = self.merged.steps[rank]
            rows.append(
                (
                    str(rank),
                    *([self._hosts.get(rank, "")] if self._hosts else []),
                    seconds_text(share.total),
                    _with_percent(share.work, share.total),
                    _with_percent(share.run, share.total),
                    _with_percent(share.wait, share.total),
                    f"{len(steps):,}",
                    size_text(sum(step.record.size for step in steps)),
                )
            )
        return rows

    @property
    def _head(self) -> tuple[str, ...]:
        return (_HEAD[0], "host", *_HEAD[1:]) if self._hosts else _HEAD

    def __repr__(self) -> str:
        rows = [self._head, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([*self._sentences(), *self.notes, "", self.label, *table])

    def _repr_html_(self) -> str:
        return str(self._html())

    def _html(self) -> Html:
        first, *others = self._sentences()
        late = self.waits[0].late if self.waits and self._is_long(self.waits[0]) else ()
        table = html.table(self._head, self._rows(), cell_style="text-align:right")
        return element(
            "div",
            element("div", first, style="font-weight:bold"),
            *(element("div", line) for line in (*others, *self.notes)),
            svg.picture(self.merged, title=first, late=late, hosts=self._hosts),
            html.details(f"{self.label}, rank by rank", table),
        )


def _with_percent(seconds: float, total: float) -> str:
    share = round(100 * seconds / total) if total else 0
    return f"{seconds_text(seconds)} {share:>3}%"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
