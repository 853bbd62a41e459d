"""What a process says to the agents of a session that is kept, and what they answer.

Each agent of a kept session listens on a unix socket in the session's folder, which only its user
can open. One who connects says first what it wants. Only an owner stays connected: there is one at
a time, told from those before it by its epoch. The process that keeps other hosts listens there,
too, and answers those who want to read logs in the same words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from distsession.ranks import HostInfo

__all__ = [
    "Adopt",
    "AttachRefused",
    "AttachRequest",
    "Attached",
    "BoardReply",
    "BoardRequest",
    "EndSession",
    "Ended",
    "Fenced",
    "LogPart",
    "LogRead",
    "LogsReply",
    "LogsRequest",
    "SetOwner",
    "attach_path",
    "keeper_path",
]


def attach_path(folder: str, node: int) -> str:
    """Where the agent of a node listens."""
    return os.path.join(folder, f"attach-{node}.sock")


def keeper_path(folder: str) -> str:
    """Where the process that keeps the hosts listens."""
    return os.path.join(folder, "hosts.sock")


# --- from one who connects ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """Somebody wants to own the session.

    Attributes:
        pid: Of its process.
        version: Of its package.
        take: Also if it has an owner.
        epoch: What the agent of the first node has given; 0 for that agent itself.
        notebook: The notebook that it is the kernel of; empty where that is not known.
    """

    pid: int
    version: str
    take: bool = False
    epoch: int = 0
    notebook: str = ""

    @property
    def who(self) -> str:
        """What sentences call it: ``"process 12 (train.ipynb)"``."""
        return f"process {self.pid}{f' ({self.notebook})' if self.notebook else ''}"


@dataclass(frozen=True, slots=True)
class Adopt:
    """The sockets of this epoch are there: the ranks are to connect to them."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """End the ranks and everything else of the session, whoever owns it.

    Attributes:
        reason: What its owner is told.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class BoardRequest:
    """Somebody wants to know what stands on the board of another host; nobody becomes its owner.

    Attributes:
        whole: All of it, and not only what has changed since the last request.
    """

    whole: bool


@dataclass(frozen=True, slots=True)
class LogRead:
    """A part of a log that somebody wants.

    Attributes:
        stream: ``"out"`` or ``"err"``.
        generation: In which the rank was forked; None for its newest log.
        begin: Where the part begins, in bytes.
        count: How many bytes of it at most; none asks for the size.
    """

    rank: int
    stream: str
    generation: int | None
    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class LogsRequest:
    """Somebody wants parts of logs on another host; nobody becomes its owner."""

    reads: tuple[LogRead, ...]


# --- from an agent --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """The one who has asked is the owner now.

    Attributes:
        epoch: Its number.
        host: Facts of the agent's host.
        store_port: Of torch's TCP store.
        ranks: Those whose processes live: the generation that each was forked for, and its pid.
        events: What an owner would have been told of: ends of other ranks, and of stores.
        pid: Of the agent.
    """

    epoch: int
    host: HostInfo
    store_port: int
    ranks: dict[int, tuple[int, int]]
    events: tuple[Any, ...]
    pid: int


@dataclass(frozen=True, slots=True)
class BoardReply:
    """What has changed on the board of another host.

    Attributes:
        frames: See ``board_mirror.pack``.
        clock_ns: What the monotonic clock says there.
    """

    frames: list[bytes]
    clock_ns: int


@dataclass(frozen=True, slots=True)
class LogPart:
    """A part of a log.

    Attributes:
        generation: Whose log it is; None where there is none.
        newest: The generation of the rank's newest log.
        path: Of the log, where it is.
        size: Bytes of it; 0 if it is gone.
        begin: Where the data begins, behind what was given back to the disk.
        data: Empty where nothing is left from there on.
        problem: Why it cannot be had; empty if it can.
    """

    generation: int | None = None
    newest: int | None = None
    path: str = ""
    size: int = 0
    begin: int = 0
    data: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LogsReply:
    """One part for each that was wanted; all of them together are of a bounded size."""

    parts: tuple[LogPart, ...]


@dataclass(frozen=True, slots=True)
class AttachRefused:
    """It is not.

    Attributes:
        reason: Why, as a sentence that says what to do.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is being ended, as it was asked."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """To an owner: somebody else owns the session from now on, or somebody has ended it.

    Attributes:
        reason: Who, as a sentence.
        is_over: It has been ended.
        taken: By whom it was taken, and when: ``"by process 12 at 18:02:11"``.
    """

    reason: str
    is_over: bool = False
    taken: str = ""


# --- from an agent to its ranks, by a pipe --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetOwner:
    """Whose sockets a rank is to connect to: those of this epoch; 0 says that nobody is there."""

    epoch: int
