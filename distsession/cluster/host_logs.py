"""Reading logs on the hosts of a session that is kept, for those who only look on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distsession.protocol.attach import LogPart, LogRead, LogsReply, LogsRequest

__all__ = ["ANSWER_TIMEOUT_S", "HostLogs"]

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""Seconds that an agent has to send parts of logs; it may just import something large."""
PAUSE_S = 0.25
"""Seconds of a host's time that a question takes up, for whoever looks on: answering one costs its
processors two milliseconds, and what ranks do is to have 99 % of a processor at least."""
BURST = 16
"""Questions that need not wait for that, where there were none before."""
HOSTS_AT_ONCE = 16


class HostLogs:
    """Asks the agents, each one thing at a time and not too often, however many look on.

    Args:
        host: Gives what the host of a node is called, and whether it is gone.
        ask: Asks the agent of a node, within some seconds; gives None if it does not answer.
    """

    def __init__(
        self,
        host: Callable[[int], tuple[str, bool]],
        ask: Callable[[int, object, float], Any],
    ):
        self._host, self._ask = host, ask
        self._lock = threading.Lock()
        self._asking: dict[int, threading.Lock] = {}
        self._free_at: dict[int, float] = {}

    def read(
        self, reads: Sequence[LogRead], ranks: Mapping[int, Sequence[int]]
    ) -> tuple[LogPart, ...]:
        """Parts of logs, one for each that is wanted.

        Args:
            reads: Which.
            ranks: Those of each node.
        """
        node_of = {rank: node for node, each in ranks.items() for rank in each}
        wanted: dict[int, list[LogRead]] = {}
        for read in reads:
            if read.rank in node_of:
                wanted.setdefault(node_of[read.rank], []).append(read)
        if not wanted:
            return tuple(LogPart() for _ in reads)
        with ThreadPoolExecutor(min(len(wanted), HOSTS_AT_ONCE)) as pool:
            found = dict(zip(wanted, pool.map(self._read_on, wanted, wanted.values()), strict=True))
        parts = {node: iter(each) for node, each in found.items()}
        return tuple(
            next(parts[node_of[read.rank]]) if read.rank in node_of else LogPart() for read in reads
        )

    def _read_on(self, node: int, reads: Sequence[LogRead]) -> Sequence[LogPart]:
        """Parts of logs of one host."""
        with self._lock:
            asking = self._asking.setdefault(node, threading.Lock())
        with asking:
            self._wait_for_turn(node)
            name, is_gone = self._host(node)
            problem = f"{name} does not answer now"
            if not is_gone:
                try:
                    reply = self._ask(node, LogsRequest(tuple(reads)), ANSWER_TIMEOUT_S)
                    if isinstance(reply, LogsReply) and len(reply.parts) == len(reads):
                        return reply.parts
                except (EOFError, OSError) as error:
                    log.warning("the logs on %s cannot be read: %s", name, error)
                name, is_gone = self._host(node)
            if is_gone:
                problem = f"{name} is gone, and what its ranks wrote with it"
            return [LogPart(problem=problem)] * len(reads)

    def _wait_for_turn(self, node: int) -> None:
        now = time.monotonic()
        free_at = max(now, self._free_at.get(node, 0.0))
        self._free_at[node] = free_at + PAUSE_S
        time.sleep(max(0.0, free_at - now - BURST * PAUSE_S))
