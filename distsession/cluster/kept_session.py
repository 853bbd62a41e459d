"""A session of this user that outlives its kernels, as the files in its folder say.

``session.json`` and ``owner.json`` are those of :mod:`distsession.protocol.kept_record`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import distsession
from distsession.engine.process import started_at
from distsession.engine.process_state import GONE, process_state
from distsession.errors import KeptSessionError
from distsession.protocol import folder_lock
from distsession.protocol.host_clock import host_clock
from distsession.protocol.kept_record import (
    OWNER_FILE,
    SESSION_FILE,
    EndedSession,
    Owner,
    read_record,
    write_record,
)
from distsession.ranks import count_text

__all__ = [
    "KeptSession",
    "end_text",
    "lost_text",
    "read_kept",
    "refuse_lost",
    "time_text",
    "users",
    "uses",
    "write_kept",
]


@dataclass(frozen=True, kw_only=True)
class KeptSession:
    """A session that is kept, as its files say.

    Attributes:
        folder: Of the session.
        version: Of the package that has written them.
        name: Of the session.
        world_size: Number of ranks.
        nodes: Number of nodes, each with an agent.
        backend: Of the process group.
        started: When the session was started, by ``time.time()``.
        keep_s: Seconds that it stays after its last owner has gone.
        keep_idle_s: Seconds that it may be idle meanwhile; 0 for any number.
        keep_output_bytes: Bytes of text that are kept of each rank.
        agents: The pid of each node's agent; of several hosts, that of the one here.
        board: Under which path the agent of the first node has the board open.
        keeper: The pid of the process that keeps other hosts; 0 where there are none.
        owner: Who has it or had it last; None before the agent has written that down.
    """

    folder: str
    version: str
    name: str
    world_size: int
    nodes: int = 1
    backend: str = ""
    started: float = 0.0
    keep_s: float = 0.0
    keep_idle_s: float = 0.0
    keep_output_bytes: int = 0
    agents: tuple[int, ...]
    board: str = ""
    keeper: int = 0
    owner: Owner | None = None

    @property
    def gone_agents(self) -> dict[int, int]:
        """The nodes whose agents have ended, with the pids that these had."""
        return {n: pid for n, pid in enumerate(self.agents) if not uses(pid, self.folder)}

    @property
    def is_keeper_gone(self) -> bool:
        """Whether the process has ended that kept other hosts, and with it all ranks."""
        return self.keeper != 0 and not uses(self.keeper, self.folder)

    @property
    def is_alive(self) -> bool:
        """Whether an agent of it lives."""
        return len(self.gone_agents) < len(self.agents)

    @property
    def has_owner(self) -> bool:
        """Whether a process has it that lives."""
        owner = self.owner
        if owner is None or owner.gone_at is not None or process_state(owner.pid) in GONE:
            return False
        return not owner.began or started_at(owner.pid) == owner.began

    @property
    def lease_left_s(self) -> float | None:
        """Seconds until it ends if nobody attaches; None while somebody has it."""
        owner = self.owner
        if owner is None or owner.lease_ends_at is None:
            return None
        if owner.lease_ends_clock is None:  # another version has written it
            return max(0.0, owner.lease_ends_at - time.time())
        return min(self.keep_s, max(0.0, owner.lease_ends_clock - host_clock()))

    @property
    def lease_ends_at(self) -> float | None:
        """The same as a moment, by the clock as it is set now."""
        left = self.lease_left_s
        return None if left is None else time.time() + left

    @property
    def is_of_this_version(self) -> bool:
        """Whether the same version of the package has written it."""
        return self.version == distsession.__version__

    def __str__(self) -> str:
        ranks = count_text(self.world_size)
        return f"session {self.name} ({', '.join(filter(None, (ranks, self.backend)))})"


def write_kept(
    folder: str,
    *,
    name: str | None,
    world_size: int,
    nodes: int,
    backend: str,
    keep_s: float,
    keep_idle_s: float,
    keep_output_bytes: int,
    agents: Sequence[int],
    board: str,
    started: float | None = None,
    keeper: int = 0,
) -> KeptSession:
    """Write ``session.json``, by which others find a session; also again, when agents are new.

    Args:
        folder: Of the session.
        name: Of the session. Default: that of the folder, which no other session has.
        world_size: Number of ranks.
        nodes: Number of nodes.
        backend: Of the process group.
        keep_s: See :class:`KeptSession`.
        keep_idle_s: See there.
        keep_output_bytes: See there.
        agents: The pid of each node's agent.
        board: Where the agent of the first node has the board open.
        started: When it was started. Default: now.
        keeper: See :class:`KeptSession`.

    Raises:
        OSError: It cannot be written.
    """
    kept = KeptSession(
        folder=folder,
        version=distsession.__version__,
        name=name or os.path.basename(folder),
        world_size=world_size,
        nodes=nodes,
        backend=backend,
        started=time.time() if started is None else started,
        keep_s=keep_s,
        keep_idle_s=keep_idle_s,
        keep_output_bytes=keep_output_bytes,
        agents=tuple(agents),
        board=board,
        keeper=keeper,
    )
    facts = asdict(kept)
    del facts["folder"], facts["owner"]
    write_record(folder, SESSION_FILE, facts)
    return kept


def read_kept(folder: str) -> KeptSession:
    """What the files in a session's folder say.

    Raises:
        FileNotFoundError: It is no folder of a session that is kept.
        KeptSessionError: A file is damaged, or cannot be read; it names the file.
    """
    kept = _read(folder, SESSION_FILE, KeptSession, folder=folder, owner=None)
    with contextlib.suppress(FileNotFoundError):
        return replace(kept, owner=_read(folder, OWNER_FILE, Owner))
    return kept


def time_text(when: float, now: float | None = None) -> str:
    """A moment of today as ``14:02``, another as ``21 Nov 14:02``."""
    moment, today = time.localtime(when), time.localtime(time.time() if now is None else now)
    is_today = moment[:3] == today[:3]
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", moment)


def end_text(end: EndedSession) -> str:
    """When and why a session has ended."""
    ranks = ", ".join(filter(None, (count_text(end.world_size), end.backend)))
    return f"session {end.name} ({ranks}) {end.how} at {time_text(end.at)}: {end.reason}."


def lost_text(end: EndedSession) -> str:
    """The same for somebody who wanted to have it."""
    return f"{end_text(end)} Its variables are lost."


T = TypeVar("T")


def _read(folder: str, name: str, kind: type[T], /, **known: Any) -> T:
    """The content of a file.

    Raises:
        FileNotFoundError: There is none.
        KeptSessionError: It is damaged, or cannot be read.
    """
    try:
        return read_record(folder, name, kind, **known)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(os.path.join(folder, name)) from None
    except (OSError, ValueError) as error:
        pids = ", ".join(map(str, users(folder)))
        whom = f"pid {pids}: `kill` ends its agents and ranks" if pids else "no process any more"
        raise KeptSessionError(
            f"{os.path.join(folder, name)} cannot be read, so its session cannot be had: "
            f"{str(error).rstrip('.')}. The folder is used by {whom}."
        ) from None


def refuse_lost(kept: KeptSession) -> None:
    """Nobody can own a session any more whose hosts have ended with what kept them.

    Raises:
        KeptSessionError: It is one.
    """
    if kept.is_keeper_gone:
        raise KeptSessionError(
            f"{kept} is lost: the process that held the connections to its hosts (pid "
            f"{kept.keeper}) has ended, and with it all ranks. `distsession stop {kept.name}` "
            "removes what is left of it."
        )


# --- processes ------------------------------------------------------------------------------------


def users(folder: str) -> list[int]:
    """The pids of all processes of this user that hold the lock of a folder."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if uses(pid, folder)]


def uses(pid: int, folder: str) -> bool:
    """Whether a process lives that holds the lock of a folder; its pid may be another's by now."""
    if process_state(pid) in GONE:
        return False
    try:
        lock = os.stat(os.path.join(folder, folder_lock.LOCK))
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), lock):
                return True
    return False
