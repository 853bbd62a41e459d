"""Memory of a sender's that a rank has mapped, and keeps for the next payload.

To map a payload of 256 MB takes four ranks a third of the time of a memcpy, nearly all of it to
find each page the first time that it is read. So what was mapped stays so for a second after the
last value in it is gone, and the sender is told that it may write there again.

That has to be certain, for a value must never change by itself:

* A mapping is looked at by Python's own count: each buffer that is taken of it counts, and each
  tensor or array holds such a buffer until its memory is given back.
* What the rank has changed lies in pages of its own. The system says which (pagemap), and they are
  given back, so that what is written next is seen there.
* A process that was forked while a value was there has it, too. What was mapped then is not kept;
  once it is gone everywhere the sender finds that out by a lease. The child gives nothing back, and
  does not get what is idle.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from distsession.engine.pages import changed_pages
from distsession.protocol.large_pages import FileMemory
from distsession.protocol.shared_memory import (
    KEEP,
    KEPT,
    Handed,
    Returns,
    map_private,
    split,
)

__all__ = ["Mappings"]

log = logging.getLogger(__name__)

FOLLOWED = 2 * KEPT
"""Of how many payloads the values are followed, the last ones; their senders keep fewer."""

_forks = 0
"""How often this process may have been forked."""


def _note_fork() -> None:
    global _forks
    _forks += 1


# Between the two, other threads may run: what they map then has been inherited, or may be.
os.register_at_fork(before=_note_fork, after_in_parent=_note_fork)


class _Mapping:
    """One segment of a sender's, seen by this process alone."""

    def __init__(self, descriptor: int, facts: os.stat_result):
        # Opened anew, so that the sender can tell by a lease whether it is still mapped.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.key = facts.st_ino
            self.returns = Returns(own, facts.st_size)
            self._memory = FileMemory(own, facts.st_size - mmap.PAGESIZE, mmap.MAP_PRIVATE)
        finally:
            os.close(own)
        self._unused = object()
        """Has one reference, as the memory has where nobody uses it."""
        self._place = 0
        self._forks = _forks
        self.since = 0.0
        """When it became idle."""

    @property
    def is_in_use(self) -> bool:
        """Whether a buffer of it is left, in this process."""
        # How much the question itself adds depends on Python's version, but is the same for both.
        return sys.getrefcount(self._memory.mapped) != sys.getrefcount(self._unused)

    @property
    def was_forked(self) -> bool:
        return self._forks != _forks

    def lend(self, place: int, sizes: Sequence[int]) -> list[memoryview]:
        """The frames in it, which are to be returned at this place."""
        self._place, self._forks = place, _forks
        self._memory.advise(mmap.MADV_DOFORK)
        return split(self._memory.view(), sizes)

    def forget_changes(self) -> None:
        """See what the sender has written, everywhere.

        Raises:
            OSError: The system does not say what was changed here.
        """
        memory = self._memory
        for begin, end in changed_pages(memory.address, memory.length):
            memory.advise(mmap.MADV_DONTNEED, begin - memory.address, end - begin)
        memory.advise(mmap.MADV_DONTFORK)

    def give_back(self) -> None:
        """The sender may write to it from here on."""
        self.returns.give_back(self._place)


class Mappings:
    """What this process has mapped of its senders' segments; for several threads."""

    def __init__(self) -> None:
        self._lent: deque[_Mapping] = deque(maxlen=FOLLOWED)
        self._idle: dict[int, _Mapping] = {}
        self._lock = threading.Lock()

    def map(self, handed: Handed, sizes: Sequence[int]) -> list[memoryview]:
        """The frames of a segment, to read and to change, seen by this process alone.

        Args:
            handed: What a link has brought.
            sizes: Bytes of each frame.

        Raises:
            OSError: There is not as much memory.
        """
        if not handed.place:
            return map_private(handed.descriptor, sizes)
        facts = os.fstat(handed.descriptor)
        # A number is not given to another file while this one is mapped.
        mapped = self._idle.pop(facts.st_ino, None) or _Mapping(handed.descriptor, facts)
        frames = mapped.lend(handed.place, sizes)
        self._lent.append(mapped)
        return frames

    def tidy(self) -> None:
        """Give back what nobody uses any more; called often, and cheap where there is nothing."""
        if not (self._lent or self._idle) or not self._lock.acquire(blocking=False):
            return
        try:
            for mapped in tuple(self._lent):
                if not mapped.is_in_use or mapped.returns.is_closed:
                    with contextlib.suppress(ValueError):  # so many have come meanwhile
                        self._lent.remove(mapped)
                        self._give_back(mapped)
            now = time.monotonic()
            for key, mapped in tuple(self._idle.items()):
                if mapped.returns.is_closed or now - mapped.since > KEEP:
                    self._idle.pop(key, None)
        finally:
            self._lock.release()

    def _give_back(self, mapped: _Mapping) -> None:
        if mapped.was_forked or mapped.returns.is_closed:
            return
        try:
            mapped.forget_changes()
        except OSError as error:
            log.debug("a payload's memory is not kept: %s", error)
            return
        mapped.since = time.monotonic()
        self._idle[mapped.key] = mapped
        mapped.give_back()
