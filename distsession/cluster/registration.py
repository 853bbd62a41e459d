"""The ranks as ipyparallel's engines: its controller, which of them have registered, its client.

Nothing of it is started before somebody asks for it, so that whoever uses cells and calls alone
pays nothing. A rank is told once where the controller is and registers when it is idle; the process
that replaces it is told again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from distsession.cluster.channel import SocketChannel
from distsession.cluster.descriptor_limit import check_room, with_remedy
from distsession.cluster.ipyparallel import Controller
from distsession.cluster.monitor import Monitor
from distsession.errors import LaunchError, LaunchTimeoutError, SessionStateError
from distsession.ranks import ranks_text

__all__ = ["Registration"]

log = logging.getLogger(__name__)

SESSION_CLOSED = "the session was closed while ipyparallel's client was being connected."
CLIENT_DESCRIPTORS, CONTROLLER_DESCRIPTORS = 40, 130
"""How many descriptors ipyparallel (9.2) takes in the kernel, and in its controller beside some for
each rank. Without them zmq ends the process, or nobody answers any more."""


class _Ranks(Protocol):
    """What is needed of the launcher."""

    @property
    def folder(self) -> str: ...
    @property
    def channel(self) -> SocketChannel: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def agent_pid(self) -> int: ...
    @property
    def forked_in(self) -> Mapping[int, int]: ...
    def kernel_address(self, rank: int) -> str: ...


class Registration:
    """Has the ranks of a session register with ipyparallel's controller.

    Args:
        ranks: The session's, all of which have started once this is used.
        monitor: Hears which of them have registered.
        timeout: Seconds that the controller has to start where nobody waits for it.
        is_open: Some ranks are on other hosts.
    """

    def __init__(self, ranks: _Ranks, monitor: Monitor, *, timeout: float, is_open: bool):
        self._ranks, self._monitor = ranks, monitor
        self._timeout, self._is_open = timeout, is_open
        self.controller: Controller | None = None
        self._controller_lock = threading.Lock()
        self.lock = threading.Lock()
        """Held while ranks are replaced, or told to register."""
        self._told: dict[int, int] = {}
        """In which generation a rank was forked that has been told."""
        self._asking = 0
        """How many threads wait for the client."""

    @property
    def _world(self) -> Sequence[int]:
        return sorted(self._ranks.forked_in)

    # --- the client -------------------------------------------------------------------------------

    def client(self, timeout: float) -> Any:
        """Ipyparallel's client, once all ranks have registered.

        Args:
            timeout: In seconds.

        Raises:
            LaunchError: The controller does not serve, or a rank cannot register.
            LaunchTimeoutError: Some have not registered in time.
            SessionStateError: A rank has died, or the session is over.
        """
        self._asking += 1
        try:
            return self._client(timeout)
        except Exception:
            if self._ranks.is_closed:  # whatever the first was that the close took away
                raise SessionStateError(SESSION_CLOSED) from None
            raise
        finally:
            self._asking -= 1

    def _client(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        self._check_ranks()
        self._retry()
        controller = self._register(timeout)
        world = self._world
        ids = self._monitor.wait_registered(world, max(0.0, deadline - time.monotonic()))
        self._check_ranks()
        for rank in world:
            if ids.get(rank, 0) < 0:
                raise LaunchError(
                    f"rank {rank} could not register with ipyparallel's controller, so %px and "
                    "session.client do not work: "
                    f"{with_remedy(self._monitor.unregistered[rank] + '.')} Cells and calls do "
                    "not need it."
                )
        if missing := [rank for rank in world if rank not in ids]:
            raise LaunchTimeoutError(
                f"{ranks_text(missing)} did not register with ipyparallel's controller within "
                f"{timeout:g} s. A rank registers when it is idle: is one still running?"
            )
        return controller.client(ids.values(), max(1.0, deadline - time.monotonic()))

    def _check_ranks(self) -> None:
        """Refuse to wait for ranks that cannot register."""
        if not self._ranks.is_alive:
            raise SessionStateError(self._monitor.agent_gone_text)
        if dead := sorted(self._monitor.dead):
            raise SessionStateError(
                f"ipyparallel's client needs all ranks, and {ranks_text(dead)} "
                f"{'has' if len(dead) == 1 else 'have'} died: session.restart({dead}) first."
            )

    def waits_for(self) -> str:
        """What somebody waits for, if anybody does; else nothing."""
        if not self._asking:
            return ""
        if self.controller is None or not self.controller.is_ready:
            return "ipyparallel's controller to start"
        if late := self._monitor.late_engines(self._world):
            return f"{ranks_text(late)} to be idle and register with ipyparallel's controller"
        return ""

    @property
    def has_died(self) -> bool:
        """Whether the controller has served and is gone."""
        return self.controller is not None and self.controller.has_died

    # --- registering ------------------------------------------------------------------------------

    def _register(self, timeout: float) -> Controller:
        """Start the controller if nobody has yet, and have the ranks register."""
        with self._controller_lock:
            controller = self.controller
            if controller is None or controller.has_failed:
                if controller is not None:
                    controller.close()
                if self._ranks.is_closed:
                    raise SessionStateError(SESSION_CLOSED)
                count = len(self._world)
                check_room(CLIENT_DESCRIPTORS, "ipyparallel", CONTROLLER_DESCRIPTORS + 8 * count)
                controller = self.controller = Controller(
                    self._ranks.folder, self._ranks.agent_pid, ranks=count, is_open=self._is_open
                )
            controller.start()
        controller.wait_ready(timeout)
        with self.lock:
            self._tell(controller)
        return controller

    def _tell(self, controller: Controller) -> None:
        """Tell each rank's present process once where the controller is."""
        for rank, generation in self._ranks.forked_in.items():
            if self._told.get(rank) != generation:
                info = controller.info(self._ranks.kernel_address(rank))
                self._ranks.channel.send_control(rank, info)
                self._told[rank] = generation

    def _retry(self) -> None:
        """Ranks that could not register try again."""
        with self.lock:
            failed = [rank for rank, number in self._monitor.engine_ids.items() if number < 0]
            self._monitor.forget_engines(failed)
            for rank in failed:
                self._told.pop(rank, None)

    def begin(self) -> None:
        """Start the controller and have the ranks register, while nobody waits for it."""

        def register() -> None:
            try:
                self._register(self._timeout)
            except (LaunchError, SessionStateError) as error:
                if not self._ranks.is_closed:
                    log.warning("%s", error)

        threading.Thread(target=register, name="distsession-register", daemon=True).start()

    # --- ranks that are replaced ------------------------------------------------------------------

    def engine_ids(self, ranks: Sequence[int]) -> list[int]:
        """The engines of those of some ranks that were told to register, before they end."""
        return [self._monitor.engine_ids.get(rank, rank) for rank in ranks if rank in self._told]

    def replace(self, engine_ids: Sequence[int]) -> None:
        """Fresh ranks register if those before them had been told to.

        Args:
            engine_ids: Those of the ranks before them.
        """
        controller = self.controller
        if controller is None:
            return
        if controller.has_died:
            log.warning("ipyparallel's controller is gone; a new one is started")
            with self._controller_lock:
                controller.close()
                self.controller = None
            self._told.clear()
            self._monitor.forget_engines(list(self._monitor.engine_ids))
            self.begin()
        elif controller.is_ready:
            controller.unregister([number for number in engine_ids if number >= 0])
            self._tell(controller)

    def close(self) -> None:
        """End the controller."""
        with self._controller_lock:
            if self.controller is not None:
                self.controller.close()
