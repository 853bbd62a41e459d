"""What the system says of the processes of a node's ranks, for a kernel on another host.

The kernel cannot look into /proc of another host, so the relay there does, now and then, and writes
down on the node's board what somebody asks for: whether a rank is stopped or has ended, how much
processor time its main thread has used, and whether the agent is stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from distsession.engine.process_state import (
    DEAD,
    ENDED,
    RUNS,
    STOPPED,
    has_ended,
    main_thread,
    process_state,
)
from distsession.protocol.board import STARTED_BITS, Board, Region

__all__ = ["ProcessWatch"]

LOOK_S = 0.1
"""Seconds between two looks. A rank that runs uses processor time in most of them, so its words
change about as often, whatever the mirror's pace."""

_STARTED_MASK = (1 << STARTED_BITS) - 1


class ProcessWatch:
    """Looks at the processes of ranks that write on a board.

    Args:
        board: Of the node.
        ranks: Of the node.
        agent: Whose process to look at, too; 0 for none.
        clock: Gives seconds.
    """

    def __init__(
        self,
        board: Board,
        ranks: Sequence[int],
        agent: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._regions = [board.regions[rank] for rank in ranks]
        self._agent = agent
        self._clock = clock
        self._look_at = 0.0

    def look(self) -> None:
        """Write down what is so now, unless that was done just before."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for region in self._regions:
            _look_at_rank(region)
        if self._agent and self._regions:
            self._regions[0].set_agent_state(self._agent, _coarse(process_state(self._agent)))


def _look_at_rank(region: Region) -> None:
    process = region.process
    pid, started = process
    if not started:  # it has not come so far, or has no /proc
        return
    thread = main_thread(pid)
    if thread is None or thread.started & _STARTED_MASK != started:  # the pid may be another's
        region.set_process_state(process, DEAD)
        return
    letter = _coarse(thread.letter)
    if letter in ENDED and not has_ended(pid):  # only its main thread has
        letter = RUNS
    region.set_process_state(process, letter)
    if region.request:  # else a thread of the rank's own would make the board change
        region.set_processor_time(thread.ticks)


def _coarse(letter: str) -> str:
    """Whether it runs or sleeps changes all the time, and nobody asks for that."""
    return letter if letter in (*STOPPED, *ENDED) else RUNS
