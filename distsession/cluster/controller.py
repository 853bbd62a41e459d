"""ipyparallel beside our own channel: its controller, the engines' registration, its client.

Runs in: the kernel.

All of it happens behind the start, in a thread with an event loop of its own; importing
ipyparallel alone takes a fifth of a second that no run has to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zmq

from distsession.cluster.base import python_command
from distsession.errors import LaunchError, LaunchTimeoutError
from distsession.messages import ControllerInfo
from distsession.ranks import format_ranks

__all__ = ["Controller", "px_magic"]

log = logging.getLogger(__name__)
_ipyparallel_log = log.getChild("ipyparallel")
_ipyparallel_log.setLevel(logging.ERROR)  # it warns of every controller that we end

CONTROLLER_GONE = (
    "ipyparallel's controller has died, so %px and session.client do not work: session.restart() "
    "starts another one. Runs and cells do not need it."
)
HEARTBEAT_MS = 200
"""Period of the controller's heartbeat. An engine counts as registered with its first beat, so
ipyparallel's default of 3 s is what its users wait for."""
HEARTBEAT_MISSES = 100
"""Beats after which the controller takes an engine for dead. With many ranks on few processors one
may be late by seconds, and an engine that was taken for dead does not come back."""


class Controller:
    """One controller and the client connected to it.

    Args:
        folder: The session's folder; ipyparallel's profile is made in it.
        pid_of_agent: The running agent, which ipyparallel's cluster adopts as its engine set.
    """

    def __init__(self, folder: str, pid_of_agent: int):
        # A folder of its own: what an earlier controller has written there leads nowhere.
        self._profile = tempfile.mkdtemp(prefix="ipyparallel-", dir=folder)
        self._agent = pid_of_agent
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cluster: Any = None
        self._connection: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._client: Any = None
        self._client_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._launched = False
        self._closed = False

    # --- start ------------------------------------------------------------------------------------

    def start(self, on_ready: Callable[[ControllerInfo], None]) -> None:
        """Start the controller behind; ``on_ready`` is called in its thread when it serves."""

        def run() -> None:
            try:
                asyncio.run(self._run(on_ready))
            except BaseException as error:
                self._error = error
                if not self._closed:
                    log.exception("ipyparallel's controller did not start")
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=run, name="distsession-ipyparallel", daemon=True)
        self._thread.start()

    async def _run(self, on_ready: Callable[[ControllerInfo], None]) -> None:
        import ipyparallel
        from ipyparallel.cluster.launcher import LocalEngineLauncher
        from traitlets.config import Config

        config = Config()
        config.LocalControllerLauncher.controller_cmd = python_command(
            "distsession.cluster.controller_process"
        )
        config.LocalControllerLauncher.controller_args = [
            "--IPController.use_threads=True",
            "--IPController.enable_curve=True",
            f"--HeartMonitor.period={HEARTBEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={HEARTBEAT_MISSES}",
            "--log-level=30",
        ]
        self._stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        cluster = self._cluster = ipyparallel.Cluster(
            config=config,
            profile_dir=self._profile,
            cluster_id="",
            cluster_file="",  # nothing is to be written behind our back once the session ends
            load_profile=False,
            shutdown_atexit=False,
            controller_ip="127.0.0.1",
            controller_location="127.0.0.1",
            delay=0,
            log=_ipyparallel_log,
        )
        if self._closed:
            return
        try:
            await cluster.start_controller()
        finally:
            with self._lock:
                self._launched = True
                is_late = self._closed  # close() came in between and left the ending to us
            if is_late:
                self._kill()
        if is_late:
            return
        # The agent runs already: ipyparallel takes over the process as if it had started it.
        cluster.engines["agent"] = LocalEngineLauncher.from_dict(
            {"pid": self._agent, "state": "running"},
            parent=cluster,
            log=_ipyparallel_log,
            profile_dir=self._profile,
            engine_set_id="agent",
        )
        self._connection = await cluster.controller.get_connection_info()
        assert self._connection is not None
        self._ready.set()
        on_ready(self.info())
        await self._stopped.wait()

    def info(self) -> ControllerInfo:
        """What an engine needs to register."""
        assert self._connection is not None
        return ControllerInfo(self._connection["engine"], self._profile)

    @property
    def is_ready(self) -> bool:
        return self._connection is not None

    @property
    def has_died(self) -> bool:
        """Whether it ran and its process has ended."""
        process: Any = getattr(getattr(self._cluster, "controller", None), "process", None)
        return self._launched and process is not None and not process.is_running()

    # --- use --------------------------------------------------------------------------------------

    def client(
        self, wait_registered: Callable[[float], Mapping[int, int]], world: int, timeout: float
    ) -> Any:
        """The connected client, once each rank's engine is known to it.

        Raises:
            LaunchError: The controller or a rank's engine did not come.
        """
        if self.has_died:
            raise LaunchError(CONTROLLER_GONE)
        if not self._ready.wait(timeout):
            raise LaunchTimeoutError(
                f"ipyparallel's controller did not start within {timeout:g} s."
            )
        if self._connection is None:
            raise LaunchError(f"ipyparallel's controller did not start: {self._error}")
        ids = wait_registered(timeout)
        missing = [rank for rank in range(world) if ids.get(rank, -1) < 0]
        if missing:
            raise LaunchTimeoutError(
                f"rank {format_ranks(missing)} did not register with ipyparallel's controller "
                f"within {timeout:g} s. A rank registers when it is idle: is one still running?"
            )
        with self._client_lock:
            if self._client is None:
                import ipyparallel

                self._wait_for_engines(set(ids.values()), timeout)
                client = ipyparallel.Client(
                    self._connection["client"],
                    cluster=self._cluster,
                    profile_dir=self._profile,
                    timeout=timeout,
                )
                try:
                    self._wait_for_output(client, timeout)
                except BaseException:
                    client.close()
                    raise
                self._client = client
            client = self._client
        client.wait_for_engines(world, timeout=timeout, interactive=False)
        return client

    def _wait_for_engines(self, wanted: set[int], timeout: float) -> None:
        """Wait until the controller counts these engines as registered.

        It does with their first heartbeat. A client that connects before hears of it later, but not
        while its subscription is still on the way; then it would never know the engine.
        """
        assert self._connection is not None
        facts = self._connection["client"]
        session = _message_session(facts)
        deadline = time.monotonic() + timeout
        with _connect(zmq.DEALER, facts, "registration", linger=0) as socket:
            while True:
                session.send(socket, "connection_request")
                if not socket.poll(max(0, int((deadline - time.monotonic()) * 1e3))):
                    raise LaunchTimeoutError(
                        f"ipyparallel's controller did not answer within {timeout:g} s."
                    )
                _, reply = session.recv(socket)
                missing = wanted.difference(map(int, reply["content"]["engines"]))
                if not missing:
                    return
                if time.monotonic() > deadline:
                    raise LaunchTimeoutError(
                        f"ipyparallel's controller heard no heartbeat of engine "
                        f"{format_ranks(sorted(missing))} within {timeout:g} s."
                    )
                time.sleep(0.01)

    def _wait_for_output(self, client: Any, timeout: float) -> None:
        """Wait until what engines print reaches a new client.

        Its subscription takes a moment to arrive at the controller, and what an engine publishes
        before that is lost, also the word that a request is done, for which ``%%px`` waits without
        an end. So publish something as an engine would until the client has it.
        """
        assert self._connection is not None
        facts = self._connection["engine"]
        session = _message_session(facts)
        request = f"distsession-{uuid.uuid4().hex}"
        parent = {"msg_id": request, "session": client.session.session}
        deadline = time.monotonic() + timeout
        with _connect(zmq.PUB, facts, "iopub", linger=0) as socket:
            while request not in client.metadata:
                if time.monotonic() > deadline:
                    raise LaunchTimeoutError(
                        "the output of ipyparallel's engines did not reach its client within "
                        f"{timeout:g} s."
                    )
                content = {"name": "stdout", "text": ""}
                session.send(socket, "stream", content=content, parent=parent, ident=b"distsession")
                time.sleep(0.005)
        client.metadata.pop(request)

    def unregister(self, engine_id: int) -> None:
        """Tell the controller that an engine is gone, so that its id is free at once.

        The controller itself would notice much later, by missed heartbeats.
        """
        if self._connection is None:
            return
        facts = self._connection["client"]
        with _connect(zmq.DEALER, facts, "registration", linger=500) as socket:
            _message_session(facts).send(
                socket, "unregistration_request", content={"id": engine_id}
            )

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the controller and disconnect the client."""
        with self._lock:
            self._closed = True
            launched = self._launched
        with self._client_lock, contextlib.suppress(Exception):
            if self._client is not None:
                self._client.close()
        if launched:
            self._kill()
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _kill(self) -> None:
        """End it at once: it keeps nothing that outlives the session."""
        launcher: Any = getattr(self._cluster, "controller", None)
        if getattr(launcher, "process", None) is not None:
            # It leads a process group, of which ipyparallel's heart monitor is a member.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.process.pid, signal.SIGKILL)
            launcher._wait_thread.join(2.0)  # ipyparallel's own thread reaps it


def _message_session(facts: dict[str, Any]) -> Any:
    """What packs and signs messages as the controller expects them."""
    from jupyter_client.session import Session

    return Session(
        key=facts["key"].encode(),
        signature_scheme=facts["signature_scheme"],
        packer=facts["pack"],
        unpacker=facts["unpack"],
    )


@contextlib.contextmanager
def _connect(
    kind: int, facts: dict[str, Any], channel: str, *, linger: int
) -> Iterator[zmq.Socket[bytes]]:
    """A socket on one of the controller's channels; ``linger`` is in milliseconds."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(kind)
    try:
        if facts.get("curve_serverkey"):
            socket.curve_serverkey = facts["curve_serverkey"].encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(f"{facts['interface']}:{facts[channel]}")
        yield socket
    finally:
        socket.close(linger)
        context.term()


def px_magic(shell: Any, client: Any, line: str, cell: str | None) -> Any:
    """Run ipyparallel's ``%px`` or ``%%px`` on all engines of a client."""
    from ipyparallel.client.magics import ParallelMagics

    view = client[:]
    view.block = True
    magics = ParallelMagics(shell, view)
    return magics.px(line) if cell is None else magics.cell_px(line, cell)
