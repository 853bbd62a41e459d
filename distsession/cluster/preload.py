"""Having the agents of a session that runs import modules, for ranks that are forked later."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

from distsession.cluster.agents import Agents
from distsession.cluster.deaths import node_text
from distsession.cluster.monitor import Monitor
from distsession.errors import OptionsError, RunInterrupt, SessionStateError
from distsession.protocol.agent_messages import PreloadRequest
from distsession.protocol.cause import sentence

__all__ = ["Preload"]

REMEDY = "Nothing is changed: import it in a cell instead."


class Preload:
    """Tries modules in children of all agents, and then has the agents import them.

    An agent that has imported a module which starts a thread could fork no more ranks, and nothing
    takes an import back.

    Args:
        agents: Of the session.
        monitor: Hears what they answer.
        nodes: Those of the agents that fork ranks.
    """

    def __init__(self, agents: Agents, monitor: Monitor, nodes: Sequence[int]):
        self._agents, self._monitor, self._nodes = agents, monitor, nodes

    def check(self, names: Sequence[str]) -> tuple[str, ...]:
        """See that all agents can import modules, and fork thereafter.

        Args:
            names: Theirs.

        Returns:
            Those that all agents have imported already.

        Raises:
            OptionsError: One does not import, or no rank could be forked after it.
            RunInterrupt: Ctrl-C.
            SessionStateError: An agent is gone.
        """
        number = self._send(names, is_trial=True)
        try:
            replies = self._monitor.wait_preload(self._nodes, number)
        except KeyboardInterrupt:
            self._cancel()
            raise RunInterrupt(
                f"importing {', '.join(names)} was stopped: nothing is changed."
            ) from None
        for node, reply in replies.items():
            if reply.problem:
                self._cancel()
                text = sentence(f"{self._where(node)}{reply.problem}")
                raise OptionsError(text, remedy=REMEDY)
        return tuple(name for name in names if all(name in one.known for one in replies.values()))

    def begin(self, names: Sequence[str]) -> int:
        """Have the agents import modules that :meth:`check` has seen to be all right."""
        return self._send(names, is_trial=False)

    def wait(self, number: int) -> None:
        """Wait until they have.

        Args:
            number: From :meth:`begin`.

        Raises:
            OptionsError: A module has imported in a child, and not in an agent.
            SessionStateError: An agent is gone.
        """
        for node, reply in self._monitor.wait_preload(self._nodes, number).items():
            if reply.problem:
                text = sentence(f"{self._where(node)}{reply.problem}")
                raise OptionsError(
                    text, remedy="It did in a process of its own: start the session anew."
                )

    def _cancel(self) -> None:
        """Agents may still be trying."""
        with contextlib.suppress(SessionStateError):  # one is gone
            self._send((), is_trial=True)

    def _send(self, names: Sequence[str], *, is_trial: bool) -> int:
        number = time.monotonic_ns()  # that no earlier kernel of the session has given
        request = PreloadRequest(number, tuple(names), tuple(sys.path), is_trial)
        for node in self._nodes:
            self._agents.send(node, request)
        return number

    def _where(self, node: int) -> str:
        return f"on {node_text(node, self._agents.name(node))}, " if len(self._nodes) > 1 else ""
