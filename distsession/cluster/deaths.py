"""What is said about the end of a rank, of an agent, and what to do then."""

from __future__ import annotations

import copy
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distsession.engine.oom import oom_text
from distsession.errors import EngineDiedError
from distsession.protocol.agent_messages import RankExited
from distsession.protocol.cause import sentence
from distsession.ranks import RankInfo, ranks_text

__all__ = [
    "AGENT_GONE",
    "AGENT_REMEDY",
    "JobEnd",
    "SilentHost",
    "agent_text",
    "alike_text",
    "death_error",
    "ended_text",
    "joint_error",
    "joint_remedy",
    "node_gone_text",
    "node_remedy",
    "node_text",
    "not_ready_text",
    "relay_gone_text",
    "replace_text",
    "restart_text",
]

AGENT_GONE = (
    "the session's agent (the process that started the ranks) is gone, and with it all ranks."
)
AGENT_REMEDY = "session.restart() brings them back, without their variables."


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
        remedy = (
            f"If it answers again within {self.lost_after_s:.0f} s, its ranks keep their "
            f"variables; otherwise session.restart({list(self.ranks)}) replaces them."
        )
        return _left_behind(info, f"cannot be reached: {self.text}", remedy)


def stuck_error(info: RankInfo, operation: str, seconds: float, remedy: str) -> EngineDiedError:
    """The error of a rank that an abort of the group does not free.

    Args:
        info: The rank's.
        operation: The one that it waits in.
        seconds: The time since the abort.
        remedy: What to do about it.
    """
    how = f"could not be freed from {operation} within {seconds:.0f} s: {info.backend} does not end"
    how += " it when it is told to"
    return _left_behind(info, how, remedy)


def _left_behind(info: RankInfo, how: str, remedy: str) -> EngineDiedError:
    """The error of a rank that lives, and that its run does not wait for any longer."""
    return EngineDiedError(
        f"rank {info.rank} (pid {info.pid}) {how}.",
        rank=info.rank,
        pid=info.pid,
        returncode=-signal.SIGKILL,
        how=how,
        remedy=remedy,
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
        how = _how(message, while_starting, operation)
        details = f" {message.limit}" if message.limit else _last_lines(message)
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


def joint_error(deaths: Mapping[int, EngineDiedError]) -> EngineDiedError:
    """One error for ranks that were needed and have died, which names all of them.

    Args:
        deaths: The error of each. Not empty.
    """
    first = deaths[min(deaths)]
    if len(deaths) == 1:
        return copy.copy(first)  # it may be given notes
    alike: dict[str, list[int]] = {}
    for rank in sorted(deaths):
        alike.setdefault(deaths[rank].how, []).append(rank)
    joint = copy.copy(first)
    joint.args = (" ".join(alike_text(ranks, deaths) for ranks in alike.values()),)
    remedies = {rank: error.remedy for rank, error in deaths.items() if error.remedy}
    joint.remedy = " ".join(joint_remedy(remedies))
    return joint


def alike_text(ranks: Sequence[int], deaths: Mapping[int, EngineDiedError]) -> str:
    """The sentence about ranks that have died alike."""
    texts = {str(deaths[rank].args[0]) for rank in ranks}
    if len(texts) == 1:  # of one rank, or said of all of them together
        return texts.pop()
    return sentence(f"{ranks_text(ranks)}: each {deaths[ranks[0]].how}")


def joint_remedy(remedies: Mapping[int, str], world: int = 0) -> list[str]:
    """What to do about the deaths of several ranks, said once.

    Args:
        remedies: What is said about each of them alone.
        world: How many ranks there were, where these may be all.
    """
    ranks, different = sorted(remedies), list(dict.fromkeys(remedies.values()))
    are_all = len(ranks) == world and len(different) > 1  # of several hosts
    if are_all or all(remedies[rank] == restart_text([rank]) for rank in ranks):
        return [restart_text(ranks, world)] if ranks else []
    return different


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
    elif message.limit:
        how += ", for it was refused a process or thread,"
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


def not_ready_text(who: str, how: str) -> str:
    """What the end of an agent means that was to be ready.

    Args:
        who: The agent.
        how: It has ended, where that is known.
    """
    return f"{who} {how or 'ended'} before it was ready."


def node_gone_text(node: int, ranks: Sequence[int], host: str = "", why: str = "") -> str:
    """What the end of a node's agent means, and why it was if known."""
    return (
        f"{agent_text(node, host)} (the process that started its ranks) is gone"
        f"{f' ({why})' if why else ''}, and with it {ranks_text(ranks)}."
    )


def node_remedy(ranks: Sequence[int], world: int, *, alone: bool) -> str:
    """What to do about the end of a node's agent.

    Args:
        ranks: Of the node.
        world: How many ranks there are.
        alone: The launcher can start one host again without the others.
    """
    if not alone:
        return "session.restart() starts all hosts anew, with ranks that have no variables."
    if len(ranks) == world:
        return "session.restart() starts another agent and all ranks, without their variables."
    return (
        f"session.restart({list(ranks)}) starts another agent and replaces them; restore=[...] "
        "copies variables from a rank that stays."
    )


@dataclass(frozen=True)
class JobEnd:
    """The end of the job that all hosts are in.

    Attributes:
        scheduler: Its name, such as ``"Slurm"``.
        job: Its id.
        is_own: The session has submitted it, and can submit another.
    """

    scheduler: str
    job: str
    is_own: bool

    @property
    def text(self) -> str:
        """What people read."""
        return (
            f"{self.scheduler} job {self.job} was cancelled or preempted, or has reached its time "
            "limit."
        )

    @property
    def remedy(self) -> str:
        """What to do about it."""
        if self.is_own:
            return "session.restart() submits a new one; its ranks have no variables."
        return (
            "session.restart() starts all hosts anew if the allocation still stands; otherwise "
            "start a session in another one."
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
