"""Ending a session that is kept, whoever has it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

from distsession.cluster.deaths import agent_text
from distsession.cluster.kept_session import KeptSession, users
from distsession.engine.process import started_at
from distsession.engine.process_state import STOPPED, process_state
from distsession.errors import KeptSessionError
from distsession.protocol import folder_lock, unix_socket
from distsession.protocol.attach import AttachRefused, EndSession, attach_path

__all__ = ["end_session"]

ANSWER_TIMEOUT_S = 60.0
"""Seconds that an agent has to take in that the session is to end."""
END_TIMEOUT_S = 60.0
"""Seconds that agents have to end their ranks and themselves."""
FOLDER_TIMEOUT_S = 2.0
"""Seconds that others have to let go of the folder of a session that has ended."""
POLL_S = 0.05
FAR = -1
"""Stands for the process that keeps other hosts, and ends what is there."""


def end_session(kept: KeptSession, reason: str) -> list[int]:
    """Have the agents of a session end it, and wait until they have.

    Args:
        kept: Which.
        reason: What its owner is told.

    Returns:
        The pids of processes that keep its folder: a kernel that has not noticed yet.

    Raises:
        KeptSessionError: An agent is stopped, does not answer or does not end; it is named.
    """
    living = _living(kept)
    began = {node: started_at(pid) for node, pid in living.items()}
    with contextlib.ExitStack() as open_links:
        links = {}
        for node in living:
            with _refusals_named(kept, node):
                links[node] = open_links.enter_context(_connect(kept.folder, node))
                links[node].send(EndSession(reason))
        for node, link in links.items():
            with _refusals_named(kept, node):
                if not link.poll(ANSWER_TIMEOUT_S):
                    raise TimeoutError(f"it does not answer within {ANSWER_TIMEOUT_S:g} s")
                answer = link.recv()
                if isinstance(answer, AttachRefused):
                    raise KeptSessionError(f"{kept} is not ended: {answer.reason}")
    if kept.keeper:
        began[FAR] = started_at(kept.keeper)
    _wait_for_agents(kept, began)
    return _wait_for_folder(kept.folder)


def _connect(folder: str, node: int) -> Connection:
    """A link to the agent of a node; one whose queue is full is not waited for."""
    link = unix_socket.connect(attach_path(folder, node), timeout_s=ANSWER_TIMEOUT_S)
    link.setblocking(True)
    return Connection(link.detach())


@contextlib.contextmanager
def _refusals_named(kept: KeptSession, node: int) -> Iterator[None]:
    try:
        yield
    except KeptSessionError:
        raise
    except Exception as error:  # what an agent of another version says may be unknown here, too
        _refuse_stopped(kept, {node: kept.agents[node]})
        if _ends_by_itself(kept, node):
            return
        pid = kept.agents[node]
        raise KeptSessionError(
            f"{agent_text(node)} (pid {pid}) of {kept} cannot be told to end it: "
            f"{str(error) or 'it has hung up'}. `kill {pid}` ends it with its ranks."
        ) from None


def _ends_by_itself(kept: KeptSession, node: int) -> bool:
    """Whether an agent that takes in nothing any more is about to end, as it is to."""
    deadline = time.monotonic() + FOLDER_TIMEOUT_S
    while node not in kept.gone_agents:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _living(kept: KeptSession) -> dict[int, int]:
    """The nodes whose agents live, with their pids.

    Raises:
        KeptSessionError: One of them is stopped.
    """
    gone = kept.gone_agents
    living = {node: pid for node, pid in enumerate(kept.agents) if node not in gone}
    _refuse_stopped(kept, living)
    return living


def _refuse_stopped(kept: KeptSession, agents: Mapping[int, int]) -> None:
    for node, pid in agents.items():
        if process_state(pid) in STOPPED:
            who = "what keeps the hosts" if node == FAR else agent_text(node)
            raise KeptSessionError(
                f"{who} (pid {pid}) of {kept} is stopped by a signal (SIGSTOP) or a "
                f"debugger, so it can end nothing: `kill -CONT {pid}` lets it go on, and "
                f"`kill -KILL {pid}` ends it with its ranks."
            )


def _wait_for_agents(kept: KeptSession, began: Mapping[int, int]) -> None:
    """Wait until processes have ended, which are known by their pids and when they began."""
    deadline = time.monotonic() + END_TIMEOUT_S
    agents = {node: kept.keeper if node == FAR else kept.agents[node] for node in began}
    while living := {
        node: pid for node, pid in agents.items() if began[node] and started_at(pid) == began[node]
    }:
        _refuse_stopped(kept, living)
        if time.monotonic() > deadline:
            pids = " ".join(map(str, living.values()))
            raise KeptSessionError(
                f"{kept} has not ended within {END_TIMEOUT_S:g} s of being told to: "
                f"`kill -KILL {pids}` ends it now."
            )
        time.sleep(POLL_S)


def _wait_for_folder(folder: str) -> list[int]:
    """Wait until a folder is gone; gives who keeps it."""
    deadline = time.monotonic() + FOLDER_TIMEOUT_S
    while os.path.lexists(folder):
        folder_lock.sweep(os.path.dirname(folder))
        if time.monotonic() > deadline:
            return users(folder)
        time.sleep(POLL_S)
    return []
