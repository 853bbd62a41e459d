"""The timeline of a session's last cell, from the records of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsession.errors import SessionStateError
from distsession.protocol.messages import TimelineRequest
from distsession.timeline.timeline import Timeline
from distsession.timeline.waits import merge

if TYPE_CHECKING:
    from distsession.view import RankView

__all__ = ["LastRun", "bring"]


@dataclass(frozen=True)
class LastRun:
    """The cell or call that the user has run last.

    Attributes:
        number: Of its request.
        ranks: Where.
    """

    number: int
    ranks: tuple[int, ...]


def bring(everyone: RankView, run: LastRun | None, *, waits: bool = True) -> Timeline:
    """Ask the ranks for their records and put them together.

    Args:
        everyone: All ranks of the session.
        run: Of what.
        waits: Wait for ranks that are busy; otherwise they are left out.

    Raises:
        SessionStateError: There is no record.
    """
    session = everyone.session
    if run is None:
        raise SessionStateError(
            "there is no timeline yet: it shows the last cell, or the last function of run()."
        )
    dead = session.recovery.launcher.dead_ranks()
    asked = [
        rank
        for rank in run.ranks
        if rank not in dead and (waits or not session.channel.is_busy(rank))
    ]
    number = run.number
    found = everyone.part(asked).ask(lambda n: TimelineRequest(n, number), []) if asked else {}
    traces = {rank: trace for rank, trace in found.items() if trace is not None}
    if not traces:
        raise SessionStateError(
            "the record of the last cell is gone with the processes of its ranks: run it again."
        )
    infos = {info.rank: info for info in session.infos}
    names = {rank: f"rank {rank} ({infos[rank].device.device})" for rank in traces}
    absent = [rank for rank in run.ranks if rank not in traces]
    return Timeline(
        merge(traces.values(), absent=absent), names=names, backend=session.infos[0].backend
    )
