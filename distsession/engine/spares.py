"""Processes that are forked ahead of time, to become ranks at the next restart.

To fork a process with torch, and to copy the pages that each rank writes to as it begins, is most
of what a restart takes. An idle agent has that done before somebody waits for it. A spare runs no
code of the user's and has nothing of a rank yet: it waits to be told which one it is.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

from distsession.engine import deaths
from distsession.engine.pages import Pages, take_pages
from distsession.engine.process import (
    die_with_parent,
    exit_after,
    forget_kept_back_finalizers,
)
from distsession.protocol.agent_messages import StartRanks

__all__ = ["Spare", "Start", "fork_spare"]


@dataclass(frozen=True)
class Start:
    """What some ranks are started with; it is packed once for all of them.

    Attributes:
        ranks: What the kernel wants.
        store_port: Of the rendezvous store.
    """

    ranks: StartRanks
    store_port: int

    @functools.cached_property
    def packed(self) -> bytes:
        return pickle.dumps((self.ranks, self.store_port), protocol=5)


@dataclass(frozen=True)
class Spare:
    """A process that waits to become a rank.

    Attributes:
        pid: Its own.
        link: Tells it which rank it is.
        memory: Shared with it, for the line that it will be at.
        owners: Tells it of another kernel, where the session is kept.
    """

    pid: int
    link: Connection
    memory: mmap.mmap
    owners: Connection | None

    def become(self, start: Start, rank: int) -> bool:
        """Have it be this rank from here on; False if it has ended."""
        try:
            self.link.send((rank, start.packed))
        except OSError:
            self.close()
            return False
        self.link.close()
        return True

    def close(self) -> None:
        """Give up what this process has of it."""
        self.link.close()
        self.memory.close()
        if self.owners is not None:
            self.owners.close()


def fork_spare(fork: Callable[[], int], pages: Pages, *, is_kept: bool) -> Spare:
    """Fork this process; returns here alone, and never in the child.

    Args:
        fork: Does so, and gives what ``os.fork`` does.
        pages: What a rank copies and maps as it begins, which the child does at once.
        is_kept: The session is kept, so the rank may come to another kernel.
    """
    agent, memory = os.getpid(), deaths.make_memory()
    its, link = Pipe(duplex=False)
    its_owners, owners = Pipe(duplex=False) if is_kept else (None, None)
    pid = fork()
    if pid == 0:
        with exit_after():
            link.close()
            if owners is not None:
                owners.close()
            _serve(its, agent, pages, memory, its_owners)
    its.close()
    if its_owners is not None:
        its_owners.close()
    return Spare(pid, link, memory, owners)


def _serve(
    link: Connection,
    agent: int,
    pages: Pages,
    memory: mmap.mmap,
    owners: Connection | None,
) -> None:
    """Wait to be told which rank this is, and be that one until the end."""
    os.setsid()
    die_with_parent(agent)
    forget_kept_back_finalizers()
    take_pages(pages)
    from distsession.engine import process_group, rank  # they hold nearly all of the engine

    process_group.inherited_environment()
    try:
        number, packed = link.recv()
    except EOFError:  # it is not needed any more
        return
    link.close()
    start, store_port = pickle.loads(packed)
    rank.main(start, number, store_port=store_port, memory=memory, owners=owners)
