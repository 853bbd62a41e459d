"""What is said about the end of a rank, of an agent, and what to do then."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from distsession.engine.oom import oom_text
from distsession.errors import EngineDiedError
from distsession.protocol.agent_messages import RankExited
from distsession.ranks import RankInfo, ranks_text

__all__ = [
    "AGENT_GONE",
    "SilentHost",
    "agent_text",
    "death_error",
    "ended_text",
    "node_gone_text",
    "node_text",
    "relay_gone_text",
    "replace_text",
    "restart_text",
]

AGENT_GONE = (
    "the session's agent (the process that started the ranks) is gone, and with it all ranks. "
    "session.restart() brings them back, without their variables."
)


@dataclass(frozen=True)
class SilentHost:
    """A host that does not answer, and may do so again.

    Attributes:
        name: Of it.
        ranks: Of it.
        seconds: Since something has come from it.
        is_cut_off: Its system does not answer either: it is down, or its network is.
        lost_after_s: The seconds after which it counts as gone.
    """

    name: str
    ranks: tuple[int, ...]
    seconds: float
    is_cut_off: bool
    lost_after_s: float

    @property
    def text(self) -> str:
        """What people read."""
        return f"{self.name} has not answered for {self.seconds:.0f} s"

    def error_of(self, info: RankInfo) -> EngineDiedError:
        """The error of a rank of it that is waited for no longer."""
        how = f"cannot be reached: {self.text}"
        return EngineDiedError(
            f"rank {info.rank} (pid {info.pid}) {how}.",
            rank=info.rank,
            pid=info.pid,
            returncode=-signal.SIGKILL,
            how=how,
            remedy=(
                f"If it answers again within {self.lost_after_s:.0f} s, its ranks keep their "
                f"variables; otherwise session.restart({list(self.ranks)}) replaces them."
            ),
        )


def death_error(
    message: RankExited, *, while_starting: bool = False, operation: str = ""
) -> EngineDiedError:
    """The error of a rank that has ended: how and where, and the last lines that it wrote.

    Args:
        message: What its agent says.
        while_starting: It was not ready yet.
        operation: The collective that its main thread waited in, with its place.
    """
    how, details = "was ended by session.restart() or close()", ""
    if not message.expected:
        how, details = _how(message, while_starting, operation), _last_lines(message)
    can_be_replaced = not while_starting and not message.expected
    return EngineDiedError(
        f"rank {message.rank} (pid {message.pid}) {how}.",
        rank=message.rank,
        pid=message.pid,
        returncode=message.returncode,
        log_tail=message.log_tail,
        how=how,
        remedy=restart_text([message.rank]) if can_be_replaced else "",
        details=details,
    )


def _last_lines(message: RankExited) -> str:
    """What a rank has left: its Python stack, and what it wrote last."""
    tail = "\n".join(message.log_tail.strip().splitlines()[-15:])
    last = f"\nIts last lines:\n{tail}" if tail else " It wrote nothing."
    if message.stack:
        stack = "\n".join(f"  {line}" for line in message.stack)
        last = f"\nIts Python stack, innermost line first:\n{stack}{last if tail else ''}"
    return last


def _how(message: RankExited, while_starting: bool, operation: str) -> str:
    """How and where a rank ended."""
    how = ended_text(message.returncode)
    if message.oom:
        how += f", {oom_text(message.oom_limit)}"
    elif message.is_terminated:
        how = "was ended by SIGTERM, which this session has not sent,"
    return how + (" while it was starting" if while_starting else _where(message, operation))


def ended_text(code: int) -> str:
    """How a process ended, by its exit code or the negative number of its signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _where(message: RankExited, operation: str) -> str:
    """The line at which a rank ended, as far as it is known."""
    if message.place and message.is_certain:
        return f" at {message.place}"
    if operation:
        return f" in {operation}"
    if message.place:
        return f", last seen at {message.place}"
    if message.runs:
        return f", while it ran {message.runs}"
    return " while it was idle" if message.is_idle else ""


def agent_text(node: int, host: str = "") -> str:
    """How messages call the agent of a node; with the name of its host, where it has one."""
    if host:
        return f"the agent on {host}"
    return f"the agent of node {node}" if node else "the agent"


def node_text(node: int, host: str = "") -> str:
    """How messages call a node: by its host, where that has a name."""
    return host or f"node {node}"


def node_gone_text(node: int, ranks: Sequence[int], host: str = "", why: str = "") -> str:
    """What the end of a node's agent means, why it was if known, and what to do about it."""
    return (
        f"{agent_text(node, host)} (the process that started its ranks) is gone"
        f"{f' ({why})' if why else ''}, and with it "
        f"{ranks_text(ranks)}. session.restart({list(ranks)}) starts another agent and replaces "
        "them; restore=[...] copies variables from a rank that stays."
    )


def relay_gone_text(node: int, ranks: Sequence[int], host: str = "") -> str:
    """What the end of a node's relay means, and what to do about it."""
    return (
        f"the relay of {node_text(node, host)} (the process through which its ranks are reached) "
        f"has ended, so nobody reaches {ranks_text(ranks)}. session.restart({list(ranks)}) starts "
        "another relay and replaces them; restore=[...] copies variables from a rank that stays."
    )


def replace_text(ranks: Sequence[int], world: int) -> str:
    """What to do about ranks that live and do not come back."""
    if len(ranks) == world:
        return "session.restart() replaces all ranks, without their variables."
    them = "it" if len(ranks) == 1 else "them"
    return f"session.restart({list(ranks)}) replaces {them} alone; the others keep their variables."


def restart_text(ranks: Sequence[int], world: int = 0) -> str:
    """What to do about the death of some ranks.

    Args:
        ranks: Which.
        world: How many there were, where these may be all.
    """
    if len(ranks) == world:
        return "session.restart() replaces all ranks, without their variables."
    return (
        f"session.restart({list(ranks)}) replaces {'it' if len(ranks) == 1 else 'them'}; "
        "restore=[...] copies variables from a rank that stays."
    )
