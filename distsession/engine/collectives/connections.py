"""Whether a rank's connections are as they are between two operations.

A wait in gloo ends only when its connections are shut, and then all of them have to be made anew. A
rank that waits for its peers before an operation has sent nothing, and needs none of that. So each
rank keeps account of what it has handed to gloo: of what is under way, and what came to no good
end. When in doubt, its connections count as lost, until all are made anew; with that only some time
is lost, where a byte that nobody has read would be taken for a part of what comes next.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

from distsession.engine.collectives import torch_private
from distsession.protocol.board import Region

__all__ = ["Connections"]

CHECKED_AT_ONCE = 2
"""How many handles are asked whenever another operation is issued."""
MOST_UNSETTLED = 1000
"""Up to how many handles that nobody waits for are kept account of."""


class Connections:
    """What is known of the connections of all groups of this process.

    Args:
        region: Of this rank on the board, where it is written.
    """

    def __init__(self, region: Region):
        self._region = region
        self._is_whole = False
        self._was_lost = True
        """Since they have begun to be made: from another thread, or by a group that is gone."""
        self.depth = 0
        """Operations within gloo that the main thread is in, see ``Recorder.enter``."""
        self._unsettled: dict[int, Any] = {}
        """What was issued and has not been seen to end: handles, where these can be asked."""
        self._numbers = itertools.count(1)
        self._is_shown = False
        region.set_connected_in(-1)
        region.set_unsettled(False)

    # --- what becomes of them ---------------------------------------------------------------------

    def begin_making(self) -> None:
        """All are made anew from here on."""
        self.lose()
        self._was_lost = False

    def made(self, generation: int) -> None:
        """All have been made, and nothing is under way."""
        self.depth, self._unsettled = 0, {}
        self._show(False)
        self._is_whole = True
        self._region.set_connected_in(generation)
        if self._was_lost:  # asked last: who loses them now writes that down himself
            self.lose()

    def lose(self) -> None:
        """From any thread: it is not certain any more that nothing is half-way."""
        self._was_lost = True
        self._is_whole = False
        self._region.set_connected_in(-1)
        self._unsettled = {}

    @property
    def are_whole(self) -> bool:
        """From the main thread, between two operations: whether nothing is half-way."""
        self._look_at_handles(len(self._unsettled))
        return self._is_whole and not self.depth and not self._unsettled

    # --- operations -------------------------------------------------------------------------------

    def issue(self) -> int:
        """An operation is issued that nobody waits for here; gives its number."""
        if not self._is_whole:
            return 0
        number = next(self._numbers)
        self._unsettled[number] = None
        if not self._is_shown:
            self._show(True)
        if len(self._unsettled) > MOST_UNSETTLED:
            self.lose()
        else:
            self._look_at_handles(CHECKED_AT_ONCE)
        return number

    def follow(self, number: int, work: Any) -> None:
        """That is its handle, which says by itself when it is over: nobody may ever wait for it."""
        if number in self._unsettled:
            self._unsettled[number] = work

    def settle(self, number: int) -> None:
        """From any thread: that operation has ended well."""
        self._unsettled.pop(number, None)

    def _look_at_handles(self, count: int) -> None:
        unsettled = self._unsettled
        with suppress(RuntimeError):  # another thread has just settled one
            for number in list(itertools.islice(unsettled, count)):
                work = unsettled.get(number)
                if work is None or not work.is_completed():
                    continue
                if not torch_private.has_succeeded(work):
                    self.lose()
                    return
                unsettled.pop(number, None)

    def _show(self, is_unsettled: bool) -> None:
        self._is_shown = is_unsettled
        self._region.set_unsettled(is_unsettled)

    # --- looked at when nothing begins any more ---------------------------------------------------

    def note_rest(self) -> None:
        """From the main thread: a request is over."""
        if self.depth:  # an interrupt has come between two lines
            self.depth = 0
            self.lose()
        if self._is_shown:
            self._look_at_handles(len(self._unsettled))
            self._show(bool(self._unsettled))

    def give_up(self) -> bool:
        """From the control thread, once nothing may begin: whether they have to be shut.

        Somebody may wait within gloo then. Where nobody can, they stay as they are.
        """
        if self._is_whole and not self.depth:
            self._look_at_handles(len(self._unsettled))
            if self._is_whole and not self._unsettled:
                return False
        self.lose()
        return True
