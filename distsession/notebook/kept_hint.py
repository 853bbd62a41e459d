"""What is said of sessions that earlier kernels have left, when the extension is loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from distsession.cluster.kept import KeptSession, kept_sessions, time_text
from distsession.display.render import fold
from distsession.kernel.kept_state import KeptState, look_at
from distsession.kernel.session_record import known_runs
from distsession.protocol.messages import RankReport
from distsession.ranks import ranks_text

__all__ = ["hints"]

log = logging.getLogger(__name__)


def hints() -> list[str]:
    """A line for each session that is kept and that nobody owns."""
    try:
        return list(_hints())
    except Exception:  # the extension is loaded all the same
        log.exception("could not look for sessions that are kept")
        return []


def _hints() -> Iterator[str]:
    for kept in kept_sessions():
        if not kept.has_owner and kept.is_of_this_version:
            doing = _doing(look_at(kept))
            if kept.is_keeper_gone:
                yield (
                    f"{kept} is lost: what held the connections to its hosts has ended. "
                    f"`distsession stop {kept.name}`"
                )
                continue
            yield f"{kept} is still there: {doing}. %session attach {kept.name}"


def _doing(state: KeptState) -> str:
    """What its ranks run, those together that run the same."""
    if state.problem:
        return state.problem
    busy = {rank: report for rank, report in state.reports.items() if report.request}
    if not busy:
        return f"its ranks are idle{_end(state.kept)}"
    names = {number: run.title for number, run in known_runs(state.kept.folder).began.items()}
    texts = {rank: _place(report, names) for rank, report in busy.items()}
    parts = []
    for ranks, text in fold(texts):
        since = time.time() - max(busy[rank].seconds for rank in ranks)
        verb = "runs" if len(ranks) == 1 else "run"
        parts.append(f"{ranks_text(ranks)} {verb} {text} since {time_text(since)}")
    return ", ".join(parts)


def _place(report: RankReport, names: dict[int, str]) -> str:
    """``In[7] line 12``; without the line where only the rank itself knows it."""
    name = names.get(report.request, f"request {report.request}")
    place = report.place or (report.operations[-1].place if report.operations else "")
    return place if place.startswith(f"{name} line ") else name


def _end(kept: KeptSession) -> str:
    ends_at = kept.lease_ends_at
    return "" if ends_at is None else f", and it ends at {time_text(ends_at)}"
