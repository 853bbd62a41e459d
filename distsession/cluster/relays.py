"""The relays of all nodes but the kernel's own, as they come and go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from distsession.cluster.relay import Relay
from distsession.protocol.wire import RelayHere, Wire, listen
from distsession.ranks import format_ranks

__all__ = ["Relays"]

log = logging.getLogger(__name__)

HELLO = 1.0
"""Seconds that a relay which has connected may take to say whose it is."""

SETTLE = 0.2
"""Seconds in which it turns out whether more has ended than a relay."""


class Relays:
    """Takes in relays that connect, and knows which of them live.

    Args:
        folder: The session's private folder.
        epoch: Of the kernel that owns the session.
    """

    def __init__(self, folder: str, epoch: int = 1):
        self.listener = listen(folder, epoch)
        self._changed = threading.Condition()
        self._relays: dict[int, Relay] = {}
        self.is_expected: Callable[[int], bool] = lambda node: False
        """Whether the end of a node's relay is part of something that is told anyway."""

    def accept(self) -> None:
        """Take in a relay that has connected."""
        connection, _ = self.listener.accept()
        connection.settimeout(HELLO)
        wire = Wire(connection)
        try:
            hello = wire.receive()
            assert isinstance(hello, RelayHere)
        except Exception as error:
            log.warning("somebody has connected who does not say to be a relay: %r", error)
            wire.close()
            return
        connection.settimeout(None)
        with self._changed:
            before = self._relays.get(hello.node)
            self._relays[hello.node] = Relay(hello.node, wire, self._on_lost)
            self._changed.notify_all()
        if before is not None:
            before.close()

    def _on_lost(self, relay: Relay) -> None:
        time.sleep(SETTLE)
        if not self.is_expected(relay.node):
            log.warning(
                "the relay of node %d has ended: tensors go there and back through the sockets of "
                "its ranks, which is slower, until session.restart() starts another one",
                relay.node,
            )

    def of(self, node: int, name: str = "") -> Relay | None:
        """The relay of a node, if it lives and, where a rank is named, has a connection to it."""
        relay = self._relays.get(node)
        if relay is None or not relay.is_up or (name and name not in relay.linked):
            return None
        return relay

    def wait_up(self, node: int, is_alive: Callable[[], bool], deadline: float) -> bool:
        """Wait for the relay of a node; False if its agent ended or the time is up."""
        with self._changed:
            while self.of(node) is None:
                if not is_alive() or time.monotonic() > deadline:
                    return False
                self._changed.wait(0.05)
        return True

    def problems(self) -> str:
        """What does not work; empty where all is well."""
        down = [node for node, relay in self._relays.items() if not relay.is_up]
        if not down:
            return ""
        one = len(down) == 1
        return (
            f"The relay{'' if one else 's'} of node{'' if one else 's'} {format_ranks(down)} "
            f"ha{'s' if one else 've'} ended, so tensors go there and back through sockets, which "
            "is slower: session.restart() starts another."
        )

    def close(self) -> None:
        """Close all streams, which ends the relays."""
        self.listener.close()
        for relay in self._relays.values():
            relay.close()
