"""Runs that were stopped and go on: what is said of them, everywhere alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from distsession.cluster.pending import PendingRequest
from distsession.kernel.output import NO_NOTICE, Notice
from distsession.protocol.host_clock import host_clock
from distsession.protocol.messages import RankReport
from distsession.ranks import ranks_text

__all__ = ["END_IT", "ahead_notice", "going_on_text", "running_text", "stopped_text"]

END_IT = "%session interrupt --force (session.interrupt(force=True)) ends it."
"""What to do where an interrupt has no effect."""
MOST_TITLES = 3
"""How many runs are named."""
_TIMES = {1: "once", 2: "twice"}


def running_text(running: Sequence[PendingRequest], reports: Mapping[int, RankReport]) -> str:
    """What runs: ``"running In[2], stopped once, its code caught the interrupt at line 4"``.

    Args:
        running: Those that run.
        reports: Of the ranks of those that were stopped.
    """
    if not running:
        return ""
    parts = [part for pending in running if (part := _part(pending, reports))]
    more = len(parts) - MOST_TITLES
    told = [*parts[:MOST_TITLES], *([f"{more} more"] if more > 0 else [])]
    return f"running {'; '.join(told)}".rstrip()


def _part(pending: PendingRequest, reports: Mapping[int, RankReport]) -> str:
    title = pending.title
    if pending.since:
        minutes, seconds = divmod(int(max(0.0, host_clock() - pending.since)), 60)
        title += f" of the earlier kernel, {minutes}:{seconds:02}"
    return ", ".join(filter(None, (title, stopped_text(pending, reports))))


def ahead_notice(ahead: Sequence[PendingRequest], reports: Mapping[int, RankReport]) -> Notice:
    """That something waits for runs of an earlier kernel; empty without any.

    Args:
        ahead: Those.
        reports: Of the ranks of those that were stopped.
    """
    if not ahead:
        return NO_NOTICE
    names = ", ".join(pending.title or "a request" for pending in ahead)
    text = "; ".join(_part(pending, reports) for pending in ahead)
    return Notice(f"This waits for {names} of the earlier kernel.", f"This waits for {text}.")


def stopped_text(pending: PendingRequest, reports: Mapping[int, RankReport]) -> str:
    """How often a run was stopped, and what has come of it; empty if it was not."""
    if not pending.stops:
        return ""
    times = _TIMES.get(pending.stops, f"{pending.stops} times")
    fates = _fates(pending.title, (reports[rank] for rank in pending.missing if rank in reports))
    return ", ".join((f"stopped {times}", *fates))


def _fates(title: str, reports: Iterable[RankReport]) -> list[str]:
    together: dict[str, list[int]] = {}
    for report in reports:
        text = report.interrupted or "which has had no effect yet"
        if title:  # whose lines need not be named once more
            text = re.sub(rf" at {re.escape(title)} line ", " at line ", text)
        together.setdefault(text, []).append(report.rank)
    if len(together) == 1:
        return list(together)
    return [f"on {ranks_text(ranks)} {text}" for text, ranks in together.items()]


def going_on_text(pending: PendingRequest, reports: Mapping[int, RankReport]) -> str:
    """That a run goes on: ``"In[2] still runs on ranks 0-1, stopped once, ..."``."""
    what = pending.title or "an earlier run"
    stopped = stopped_text(pending, reports)
    return ", ".join(filter(None, (f"{what} still runs on {ranks_text(pending.missing)}", stopped)))
