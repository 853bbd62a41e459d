"""Attaching to a session that is kept: the launcher's state, and the way to its agents."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from distsession.cluster.deaths import agent_text
from distsession.cluster.folder import AttachedFolder
from distsession.cluster.kept_session import lost_text
from distsession.cluster.pending import PendingRequest
from distsession.engine.process_state import STOPPED, process_state
from distsession.errors import KeptSessionError, SessionStateError
from distsession.host_plan import HostPlan
from distsession.options import SessionOptions
from distsession.protocol import unix_socket
from distsession.protocol.attach import Attached, AttachRefused, AttachRequest, attach_path
from distsession.protocol.kept_record import read_end
from distsession.protocol.messages import Addressed, RankAttached, Request
from distsession.rank_plan import RankPlan
from distsession.ranks import RankInfo

__all__ = [
    "Adopted",
    "Attachment",
    "FarHosts",
    "LauncherState",
    "LeftRequest",
    "connect",
    "read_state",
    "requests_of",
    "write_state",
]

log = logging.getLogger(__name__)

STATE_FILE = "state.pickle"
ANSWER_TIMEOUT_S = 60.0
"""Seconds that an agent may take to say whether one may attach: on a busy machine it may just
import something large for ranks that are forked later."""
STOPPED_TIMEOUT_S = 1.0
"""The same for one that is stopped, and will not."""


@dataclass(frozen=True)
class FarHosts:
    """What a launcher knows of other hosts, by the numbers of their agents.

    Attributes:
        plan: Which, and how agents come there.
        interfaces: By which each meets the others.
        addresses: At which.
        names: Theirs.
    """

    plan: HostPlan
    interfaces: Mapping[int, str]
    addresses: Mapping[int, str]
    names: Mapping[int, str]


@dataclass(frozen=True)
class LauncherState:
    """What a launcher knows of the ranks that it has started.

    Attributes:
        hosts: Where they are, if not on this one; the agent of node 0 has no ranks then.
        board: A path at which the memory that all ranks share can be opened.
        started: When the session was, by ``time.time()``.
    """

    options: SessionOptions
    plan: RankPlan
    infos: tuple[RankInfo, ...]
    board: str
    started: float
    hosts: FarHosts | None = None

    @property
    def far(self) -> Mapping[int, str]:
        """The agents on other hosts, with the names of these."""
        return {} if self.hosts is None else self.hosts.names

    @property
    def nodes(self) -> range:
        """The numbers of all agents."""
        return range(self.plan.nodes + (self.hosts is not None))


@dataclass(frozen=True)
class Adopted:
    """A request of a former owner, which somebody may wait for now.

    Attributes:
        pending: What comes of it.
        missing: Ranks that were to get it and never did: their kernel ended as it sent it.
    """

    request: Request
    pending: PendingRequest
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Attachment:
    """The agents of a session that this process owns now; without those of hosts that are gone."""

    folder: AttachedFolder
    state: LauncherState
    epoch: int
    links: dict[int, Connection]
    agents: dict[int, Attached]


def write_state(folder: str, state: LauncherState) -> None:
    """Write down what another kernel needs to attach."""
    path = os.path.join(folder, STATE_FILE)
    with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        pickle.dump(state, file)
    os.replace(f"{path}.new", path)


def read_state(folder: str) -> LauncherState:
    """What :func:`write_state` has written.

    Only for folders of this user: to read it runs what its pickle names.

    Raises:
        OSError: There is none.
    """
    with open(os.path.join(folder, STATE_FILE), "rb") as file:
        state: LauncherState = pickle.load(file)
    return state


def connect(folder: str, version: str, *, take: bool = False) -> Attachment:
    """Become the owner of a session.

    Args:
        folder: Its own.
        version: Of this package.
        take: Also if it has an owner, who can ask nothing of it from then on.

    Raises:
        SessionStateError: It is gone, has an owner, or its agents do not answer.
    """
    with contextlib.ExitStack() as stack:
        try:
            place = AttachedFolder(folder)
        except OSError:
            raise _ended(folder) or SessionStateError(
                f"the session in {folder} is gone: `distsession ls` shows those that are there."
            ) from None
        stack.callback(place.release)
        links: dict[int, Connection] = {}
        agents: dict[int, Attached] = {}
        # Jupyter's server tells a kernel so.
        notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
        request = AttachRequest(os.getpid(), version, take, notebook=notebook)
        try:
            link, attached = _ask(folder, 0, agent_text(0), request)
        except SessionStateError as error:
            raise _ended(folder) or error from None
        stack.callback(link.close)
        links[0], agents[0], epoch = link, attached, attached.epoch
        state = read_state(folder)
        request = replace(request, epoch=epoch)
        for node in state.nodes[1:]:
            try:
                link, attached = _ask(
                    folder, node, agent_text(node, state.far.get(node, "")), request
                )
            except _AgentGone as error:
                if node not in state.far:
                    raise
                log.warning("%s", error)
            else:
                stack.callback(link.close)
                links[node], agents[node] = link, attached
        stack.pop_all()
    return Attachment(place, state, epoch, links, agents)


def _ended(folder: str) -> KeptSessionError | None:
    """The error for a session that has come to its end just now, where that is known."""
    end = read_end(folder)
    return None if end is None else KeptSessionError(lost_text(end))


class _AgentGone(SessionStateError):
    """An agent has ended, or its host is gone."""


def _ask(folder: str, node: int, who: str, request: AttachRequest) -> tuple[Connection, Attached]:
    link = _open(folder, node, who)
    try:
        link.send(request)
        if problem := _wait_for_answer(link):
            raise SessionStateError(f"{who} {problem}")
        answer = link.recv()
    except (EOFError, OSError) as error:
        link.close()
        raise _AgentGone(f"{who} is gone{f': {error}' if str(error) else ''}.") from None
    except BaseException:
        link.close()
        raise
    if isinstance(answer, AttachRefused):
        link.close()
        raise SessionStateError(f"this session cannot be attached to: {answer.reason}")
    assert isinstance(answer, Attached)
    return link, answer


def _wait_for_answer(link: Connection) -> str:
    """Wait until the agent at the other end has answered; gives why it has not, or nothing."""
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        pid = unix_socket.peer(end).pid
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not link.poll(STOPPED_TIMEOUT_S):
        if process_state(pid) in STOPPED:
            return (
                f"(pid {pid}) is stopped by a signal (SIGSTOP) or a debugger: `kill -CONT {pid}` "
                "lets it go on."
            )
        if time.monotonic() > deadline:
            return f"(pid {pid}) has not answered within {ANSWER_TIMEOUT_S:g} s."
    return ""


def _open(folder: str, node: int, who: str) -> Connection:
    try:
        return Connection(unix_socket.connect(attach_path(folder, node)).detach())
    except OSError as error:
        raise SessionStateError(
            f"{who} of the session in {folder} cannot be reached ({error}): it is gone, or was not "
            "started with keep=."
        ) from None


@dataclass(frozen=True)
class LeftRequest:
    """A request of a former owner that nobody has seen the end of.

    Attributes:
        answered: The ranks that have answered it.
        running: Those that run it.
        queued: Those at which it waits.
        missing: Those that were to get it and did not, as their kernel ended while it sent it.
        gone: Those that have ended, so that nobody knows.
    """

    request: Request
    answered: tuple[int, ...]
    running: tuple[int, ...]
    queued: tuple[int, ...]
    missing: tuple[int, ...]
    gone: tuple[int, ...]

    @property
    def begun(self) -> tuple[int, ...]:
        return tuple(sorted((*self.answered, *self.running)))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted((*self.begun, *self.queued)))


def requests_of(ranks: Sequence[RankAttached]) -> list[LeftRequest]:
    """What a former owner has left, in its order, by what each rank has said."""
    found: dict[int, Addressed] = {}
    of: dict[str, dict[int, list[int]]] = {"answered": {}, "running": {}, "queued": {}}
    for said in ranks:
        running = () if said.running is None else (said.running,)
        for how, each in (
            ("answered", said.answered),
            ("running", running),
            ("queued", said.queued),
        ):
            for addressed in each:
                found[addressed.request.id] = addressed
                of[how].setdefault(addressed.request.id, []).append(said.rank)
    here = {said.rank for said in ranks}
    left = []
    for number, addressed in sorted(found.items()):
        at = {how: tuple(of[how].get(number, ())) for how in of}
        had = {rank for part in at.values() for rank in part}
        missing = tuple(rank for rank in addressed.ranks if rank in here and rank not in had)
        gone = tuple(rank for rank in addressed.ranks if rank not in here)
        left.append(LeftRequest(addressed.request, missing=missing, gone=gone, **at))
    return left
