"""What a rank that runs something does, as far as the board and the system know it."""

from __future__ import annotations

from distsession.protocol.board import Region
from distsession.protocol.messages import RankReport
from distsession.protocol.rank_state import RankState
from distsession.protocol.unseen import Unseen, texts

__all__ = ["running_report"]

_HALTED = {"T": RankState.STOPPED, "t": RankState.TRACED}
"""By the letter of /proc for the state of a process."""


def running_report(region: Region, letter: str) -> RankReport:
    """What a rank does that runs a request.

    Args:
        region: The rank's.
        letter: The state of its process, as /proc has it; empty where that is not known.
    """
    state, place = RankState.RUNNING, ""
    if region.is_asking:
        place = region.asks_at
        state = RankState.DEBUGGING if region.is_in_debugger else RankState.WAITING_FOR_INPUT
    return RankReport(
        region.rank,
        _HALTED.get(letter, state),
        region.seconds,
        region.request,
        place,
        None,
        region.operations(),
        region.sequences(),
        region.refused(),
        left=region.left(),
        unseen=texts(region.unseen),
        unseen_count=region.unseen_count,
        is_replaying=Unseen.REPLAY in region.unseen,
    )
