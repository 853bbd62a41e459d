"""The relays of all nodes but the kernel's own, as they come and go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from distsession.cluster.relay import Relay
from distsession.protocol import unix_socket
from distsession.protocol.wire import RelayHere, Wire, listen

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
        self._pids: dict[int, int] = {}
        self.is_expected: Callable[[int], bool] = lambda node: False
        """Whether the end of a node's relay is part of something that is told anyway."""
        self.on_lost: Callable[[int, bool], None] = lambda node, is_replaced: None
        """Called, in a thread of a relay's, when that of a node has ended, and only that; also
        told whether another one has come by now."""

    def accept(self) -> None:
        """Take in a relay that has connected."""
        try:
            connection = unix_socket.accept(self.listener)
        except OSError as error:
            log.warning("no relay is taken: %s", error)
            return
        wire = Wire(connection)
        try:
            hello = wire.receive(time.monotonic() + HELLO)
            assert isinstance(hello, RelayHere)
        except Exception as error:
            log.warning("somebody has connected who does not say to be a relay: %r", error)
            wire.close()
            return
        with self._changed:
            before = self._relays.get(hello.node)
            self._relays[hello.node] = Relay(hello.node, wire, self._on_lost)
            self._pids[hello.node] = hello.pid
            self._changed.notify_all()
        if before is not None:
            before.close()

    def _on_lost(self, relay: Relay) -> None:
        time.sleep(SETTLE)
        # Its agent may have started another by now, which the ranks have no connection to.
        if not (relay.is_forgotten or self.is_expected(relay.node)):
            self.on_lost(relay.node, self._relays.get(relay.node) is not relay)

    def of(self, node: int, name: str = "") -> Relay | None:
        """The relay of a node, if it lives and, where a rank is named, has a connection to it."""
        relay = self._relays.get(node)
        if relay is None or not relay.is_up or (name and name not in relay.linked):
            return None
        return relay

    def forget(self, node: int) -> None:
        """Another relay is to come for a node: the end of the one before is nothing to tell."""
        with self._changed:
            before = self._relays.pop(node, None)
        if before is not None:
            before.is_forgotten = True
            before.close()

    def wait_up(self, node: int, is_alive: Callable[[], bool], deadline: float) -> bool:
        """Wait for the relay of a node; False if its agent ended or the time is up."""
        with self._changed:
            while self.of(node) is None:
                if not is_alive() or time.monotonic() > deadline:
                    return False
                self._changed.wait(0.05)
        return True

    def pids(self) -> dict[int, int]:
        """The processes of those that live."""
        return {node: pid for node, pid in self._pids.items() if self.of(node) is not None}

    def close(self) -> None:
        """Close all streams, which ends the relays."""
        self.listener.close()
        for relay in self._relays.values():
            relay.is_forgotten = True
            relay.close()
