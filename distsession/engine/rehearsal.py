"""A process that begins as a rank does, and shows what that takes of the system.

Which pages a rank copies and maps as it begins depends on what its agent has imported since the
last one began, and on what Python's caches hold: nobody knows before one has begun. So one is
forked that does it in a folder of its own, with a board, a store and a kernel's sockets that are
nobody else's. It runs no code of the user's, and is ended as soon as it has begun.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe

from distsession.engine import deaths, store_server
from distsession.engine.pages import Pages, copied_pages, mapped_pages
from distsession.engine.process import die_with_parent, exit_after, forget_kept_back_finalizers
from distsession.protocol import unix_socket
from distsession.protocol.agent_messages import StartRanks
from distsession.protocol.board import file_size, make_file
from distsession.protocol.wire import memory_path, socket_path

__all__ = ["Rehearsal", "begin_rehearsal"]

TIMEOUT_S = 10.0
"""Seconds that it has on a busy machine. What it does takes some 0.06."""


@dataclass(frozen=True)
class Rehearsal:
    """One that is under way.

    Attributes:
        pid: Its own.
        link: Is readable once it has begun, and has an end where it has failed.
        folder: All that it writes is there.
        since: When it was forked, by ``time.monotonic()``.
    """

    pid: int
    link: Connection
    folder: str
    since: float

    @property
    def is_over(self) -> bool:
        """It has begun, or failed, or takes too long."""
        return self.link.poll() or time.monotonic() - self.since > TIMEOUT_S

    def result(self, limit: int) -> Pages | None:
        """What it has copied and mapped; None where it has not begun.

        Args:
            limit: The most pages that it may have copied.
        """
        try:
            if not self.link.poll():
                return None
            self.link.recv()
        except (EOFError, OSError):
            return None
        return Pages(copied_pages(self.pid, limit), mapped_pages(self.pid))

    def end(self) -> None:
        """End it, wherever it is."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        """Remove what is left of it."""
        self.link.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def begin_rehearsal(fork: Callable[[], int], start: StartRanks) -> Rehearsal:
    """Fork this process; returns here alone, and never in the child.

    Args:
        fork: Does so, and gives what ``os.fork`` does.
        start: What the last ranks were started with.
    """
    agent = os.getpid()
    folder = tempfile.mkdtemp(prefix="rehearsal-", dir=start.folder)  # other agents may be there
    mine, its = Pipe(duplex=False)
    since = time.monotonic()
    try:
        pid = fork()
    except OSError:
        os.rmdir(folder)
        raise
    if pid == 0:
        with exit_after():
            mine.close()
            _begin(_alone(start, folder), agent)
            its.send(None)
            signal.pause()
    its.close()
    return Rehearsal(pid, mine, folder, since)


def _alone(start: StartRanks, folder: str) -> StartRanks:
    """The same for a single rank that reaches nobody, and no device."""
    return replace(
        start,
        ranks=(0,),
        world_size=1,
        generation=0,
        devices=("cpu",),
        visible=(),
        backend="gloo",
        folder=folder,
        is_whole=True,
        is_board_shared=True,
        node=0,
        nodes=1,
        node_rank=0,
        first_rank=0,
        keep=0.0,
    )


def _begin(start: StartRanks, agent: int) -> None:
    die_with_parent(agent)
    forget_kept_back_finalizers()
    os.mkdir(os.path.join(start.folder, "logs"))
    from distsession.engine import process_group, rank  # as in a spare

    process_group.inherited_environment()
    board = make_file()
    os.ftruncate(board, file_size(start.world_size))
    listeners = [
        _listen(socket_path(start.folder, "requests", start.epoch), socket.SOCK_STREAM),
        _listen(memory_path(start.folder, start.node, start.epoch), socket.SOCK_SEQPACKET),
    ]
    store = store_server.bind(store_server.socket_path(start.folder))
    threading.Thread(target=store_server.serve, args=(store, agent), daemon=True).start()
    rank.begin(replace(start, board=board), start.ranks[0], memory=deaths.make_memory())
    for listener in listeners:
        listener.close()


def _listen(path: str, kind: socket.SocketKind) -> socket.socket:
    return unix_socket.listen(path, kind=kind, backlog=1)
