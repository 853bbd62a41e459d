"""Sessions that are kept as a table: who has each, what it does, and what it uses."""

from __future__ import annotations

from collections.abc import Sequence

from distsession.cluster.deaths import agent_text
from distsession.cluster.kept import KeptSession, end_text, time_text
from distsession.display import html
from distsession.display.html import Html
from distsession.display.render import fold, state_and_since, table_text
from distsession.kernel.kept_state import KeptState
from distsession.options import duration_text
from distsession.protocol.kept_record import EndedSession
from distsession.ranks import ranks_text

__all__ = ["doing_text", "kept_html", "kept_text", "owner_text"]

NONE = "no session is kept."

_HEAD = ("name", "ranks", "backend", "started", "owner", "doing", "memory", "GPU memory", "pid")
_GPU = _HEAD.index("GPU memory")


def kept_text(states: Sequence[KeptState], ended: Sequence[EndedSession] = ()) -> str:
    """A line for each session.

    Args:
        states: Of those that live.
        ended: Those that are told of, too, since they have ended by themselves.
    """
    head, rows = _table(states)
    return "\n".join([table_text(head, rows) if rows else NONE, *map(end_text, ended)])


def kept_html(states: Sequence[KeptState], ended: Sequence[EndedSession] = ()) -> Html:
    """The same as :func:`kept_text`, for a notebook."""
    head, rows = _table(states)
    shown = html.table(head, rows) if rows else html.element("p", NONE)
    return html.join([shown, *(html.element("p", end_text(end)) for end in ended)])


def _table(states: Sequence[KeptState]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = [_row(state) for state in states]
    if any(state.gpu_memory_bytes is not None for state in states):
        return _HEAD, rows
    return _without(_HEAD), [_without(row) for row in rows]


def _without(row: tuple[str, ...]) -> tuple[str, ...]:
    return row[:_GPU] + row[_GPU + 1 :]


def _row(state: KeptState) -> tuple[str, ...]:
    kept, gpu = state.kept, state.gpu_memory_bytes
    troubles = [f"{agent_text(node)} is gone" for node in kept.gone_agents]
    troubles += [f"{agent_text(n)} (pid {p}) is stopped" for n, p in state.stopped_agents.items()]
    if kept.is_keeper_gone:
        troubles.append(f"what held the connections to its hosts (pid {kept.keeper}) is gone")
    return (
        kept.name,
        str(kept.world_size),
        kept.backend,
        time_text(kept.started),
        "; ".join([owner_text(kept), *troubles]),
        doing_text(state),
        _size(state.memory_bytes),
        "" if gpu is None else _size(gpu),
        ",".join(map(str, kept.agents)),
    )


def owner_text(kept: KeptSession) -> str:
    """Who has a session, or since when nobody has and when it ends."""
    owner = kept.owner
    if owner is None:
        return "not known yet"
    if kept.has_owner:
        return f"pid {owner.pid} since {time_text(owner.since)}"
    if owner.gone_at is None:
        return f"pid {owner.pid}, which is gone"
    left = kept.lease_left_s
    end = "" if left is None else f", ends in {_rough(left)}"
    return f"nobody since {time_text(owner.gone_at)}{end}"


def doing_text(state: KeptState) -> str:
    """What the ranks do, those together that do the same."""
    if state.problem:
        return state.problem
    shown = {rank: state_and_since(report) for rank, report in state.reports.items()}
    groups = fold({rank: text for rank, (text, _) in shown.items()})
    parts = []
    for ranks, text in groups:
        longest = max(ranks, key=lambda rank: state.reports[rank].seconds)
        since = shown[longest][1]
        who = f"{ranks_text(ranks)} " if len(groups) > 1 else ""
        parts.append(f"{who}{text}{f' for {since}' if since else ''}")
    return "; ".join(parts)


def _rough(seconds: float) -> str:
    """A duration without what does not matter in it."""
    step = 60 if seconds >= 3600 else 1
    return duration_text(seconds // step * step)


def _size(amount: int) -> str:
    if amount < 2**30:
        return f"{amount / 2**20:.0f} MiB"
    return f"{amount / 2**30:.1f} GiB"
