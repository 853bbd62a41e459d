"""ipyparallel beside our own channel: its controller, the engines' registration, its client.

It starts when it is first asked for, in threads of its own: one with ipyparallel's event loop, and
one that connects the client. So whoever waits for it can be interrupted and leaves nothing half
made; the next one who asks finds what has come about meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import glob
import json
import logging
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any

import zmq

from distsession.cluster.base import python_command
from distsession.errors import DistsessionError, LaunchError, LaunchTimeoutError
from distsession.protocol import folder_lock
from distsession.protocol.messages import ControllerInfo
from distsession.protocol.places import has_ipython_folder
from distsession.protocol.signing import no_signing_warning
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
LOG_TAIL = 2000
LOOK_MS = 100
"""Milliseconds between two looks at whether the controller still lives."""
OUTPUT_S = 10.0
"""Seconds that output has to reach a new client. Now and then (1 of 200 on a busy machine) nothing
ever does, and another client is made."""
SEEN_MS = 3000
"""Milliseconds that the controller has to see which engines are gone."""
LEAVE_S = 5.0
"""Seconds that the threads have to end."""


class Controller:
    """One controller and the client connected to it.

    Args:
        folder: The session's folder; ipyparallel's profile is made in it.
        pid_of_agent: The running agent, which ipyparallel's cluster adopts as its engine set.
        ranks: How many engines there are.
        is_open: Engines come from other hosts, so it listens at all addresses. Whoever has not its
            keys (CURVE) is not let in.
    """

    def __init__(self, folder: str, pid_of_agent: int, *, ranks: int = 1, is_open: bool = False):
        self._ip = "0.0.0.0" if is_open else "127.0.0.1"
        # A folder of its own: what an earlier controller has written there leads nowhere.
        self._profile = tempfile.mkdtemp(prefix="ipyparallel-", dir=folder)
        self._folder = folder
        self._agent, self._ranks = pid_of_agent, ranks
        self._listed = ""
        """The file by which ``ipcluster list`` finds it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cluster: Any = None
        self._connection: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._client: Any = None
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_begun = False
        self._launched = False
        self._closed = False

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the controller behind. Harmless when repeated."""
        if self._threads:
            return

        def run() -> None:
            with self._lock:  # an interrupt may have hidden that this was begun already
                if self._is_begun:
                    return
                self._is_begun = True
            try:
                asyncio.run(self._run())
            except BaseException as error:
                self._error = error
                log.debug("ipyparallel's controller did not start", exc_info=True)
            finally:
                self._ready.set()

        self._in_thread(run)

    def _in_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="distsession-ipyparallel", daemon=True)
        thread.start()
        self._threads.append(thread)

    async def _run(self) -> None:
        import ipyparallel
        from ipyparallel.cluster.launcher import LocalEngineLauncher, NotRunning
        from traitlets.config import Config

        config = Config()
        config.LocalControllerLauncher.controller_cmd = [
            *python_command("distsession.cluster.ipyparallel_controller"),
            str(os.getpid()),
            self._folder,
        ]
        config.LocalControllerLauncher.controller_args = [
            "--IPController.use_threads=True",
            "--IPController.enable_curve=True",
            f"--HeartMonitor.period={HEARTBEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={HEARTBEAT_MISSES}",
            "--log-level=30",
        ]
        self._stopped = asyncio.Event()
        self._connecting = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        with self._lock:  # once it is closed, nothing may be written to the folder any more
            if self._closed:
                return
            cluster = self._cluster = ipyparallel.Cluster(
                config=config,
                profile_dir=self._profile,
                cluster_id="",
                cluster_file="",  # nothing is to be written behind our back once the session ends
                load_profile=False,
                shutdown_atexit=False,
                controller_ip=self._ip,
                controller_location="127.0.0.1",
                delay=0,
                log=_ipyparallel_log,
            )
            # It dies with the thread that has started it, which is this one.
            await cluster.start_controller()
            self._launched = True
        connection = await cluster.controller.get_connection_info()
        with contextlib.suppress(NotRunning):  # without its agent, the session ends in a moment
            # The agent runs already: ipyparallel takes it over as if it had started it.
            cluster.engines["agent"] = LocalEngineLauncher.from_dict(
                {"pid": self._agent, "state": "running"},
                parent=cluster,
                log=_ipyparallel_log,
                profile_dir=self._profile,
                engine_set_id="agent",
            )
        self._connection = connection
        with self._lock, contextlib.suppress(OSError):  # nobody has to find it
            if not self._closed and has_ipython_folder():
                self._list(cluster)
        self._ready.set()
        await self._stopped.wait()

    def _list(self, cluster: Any) -> None:
        """Have ``ipcluster list`` find it, among the clusters of the user's profile."""
        import ipyparallel

        found = cluster.to_dict()
        # The pids of ranks may be those of another host; and its agent ends them all.
        agent = {"pid": self._agent, "state": "running"}
        engines = {str(rank): agent for rank in range(self._ranks)}
        found["engines"]["sets"] = {"agent": {"state": "running", "engines": engines}}
        name = found["cluster"]["cluster_id"] = os.path.basename(self._folder)
        path = str(ipyparallel.Cluster(cluster_id=name, load_profile=False).cluster_file)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        for stale in glob.glob(os.path.join(os.path.dirname(path), _LISTED)):
            _remove_if_over(stale)  # of a kernel that was killed
        self._listed = path
        with open(path, "w", encoding="utf-8", opener=_private) as file:
            json.dump(found, file)

    def wait_ready(self, timeout: float) -> None:
        """Wait until it serves.

        Raises:
            LaunchError: It did not start, or is gone again.
        """
        if not self._ready.wait(timeout):
            raise LaunchTimeoutError(
                f"ipyparallel's controller did not start within {timeout:g} s."
            )
        if self._connection is None and self._error is not None:
            raise LaunchError(f"ipyparallel's controller did not start: {self._why()}")
        self._check_lives()

    def _why(self) -> str:
        """What prevented the start, with what the controller wrote last."""
        launcher: Any = getattr(self._cluster, "controller", None)
        has_run = getattr(launcher, "process", None) is not None
        output = str(launcher.get_output()) if has_run else ""
        tail = "\n".join(output[-LOG_TAIL:].strip().splitlines()[-15:])
        return f"{self._error}\nIts last lines:\n{tail}" if tail else str(self._error)

    def info(self, address: str = "") -> ControllerInfo:
        """What an engine needs to register.

        Args:
            address: Of this host, as that of the engine sees it; empty where it is the same.
        """
        assert self._connection is not None
        connection = self._connection["engine"]
        if not address:
            return ControllerInfo(connection, self._profile)
        at = {"location": address, "interface": f"tcp://{address}"}
        return ControllerInfo({**connection, **at}, "")

    @property
    def is_ready(self) -> bool:
        return self._connection is not None

    @property
    def has_failed(self) -> bool:
        """Whether it did not start, so that another one can be tried."""
        return self._ready.is_set() and self._connection is None

    @property
    def has_died(self) -> bool:
        """Whether it served and its process has ended."""
        process: Any = getattr(getattr(self._cluster, "controller", None), "process", None)
        return self.is_ready and process is not None and not process.is_running()

    # --- use --------------------------------------------------------------------------------------

    def client(self, engines: Collection[int], timeout: float) -> Any:
        """The connected client, once it knows these engines.

        Args:
            engines: The ids of the ranks' engines, which have registered.
            timeout: In seconds.

        Raises:
            LaunchError: The controller is gone, or does not answer in time.
        """
        assert self._loop is not None
        connected = self._connected(set(engines), timeout)
        try:
            future = asyncio.run_coroutine_threadsafe(connected, self._loop)
            while not concurrent.futures.wait([future], LOOK_MS / 1000).done:
                if self._loop.is_closed():  # it took this, and ended before it came to it
                    raise CancelledError
            client = future.result()
        except DistsessionError:
            raise
        except (CancelledError, RuntimeError):  # the loop has ended
            connected.close()
            raise LaunchError(CONTROLLER_GONE) from None
        client.wait_for_engines(len(engines), timeout=timeout, interactive=False)
        return client

    async def _connected(self, engines: set[int], timeout: float) -> Any:
        """The client, made once, whoever asks and goes on waiting or not."""
        async with self._connecting:
            if self._client is None:
                made: Future[Any] = Future()
                self._in_thread(lambda: self._connect(made, engines, timeout))
                self._client = await asyncio.wrap_future(made)
            return self._client

    def _connect(self, made: Future[Any], engines: set[int], timeout: float) -> None:
        """Make the client, in a thread, for ipyparallel's own loop must not wait for it."""
        try:
            import ipyparallel

            assert self._connection is not None
            self._wait_for_engines(engines, timeout)
            deadline = time.monotonic() + timeout
            while True:
                with no_signing_warning():
                    client = ipyparallel.Client(
                        self._connection["client"],
                        cluster=self._cluster,
                        profile_dir=self._profile,
                        ipython_dir=self._profile,  # else it is looked for, for nothing
                        timeout=timeout,
                    )
                try:
                    self._wait_for_output(client, min(OUTPUT_S, timeout))
                    made.set_result(client)
                    return
                except LaunchTimeoutError:
                    client.close()
                    if time.monotonic() > deadline:
                        raise
                except BaseException:
                    client.close()
                    raise
        except InvalidStateError:  # the session was closed meanwhile
            return
        except DistsessionError as error:
            problem: Exception = error
        except BaseException as error:
            log.debug("ipyparallel's client did not connect", exc_info=True)
            problem = LaunchError(f"ipyparallel's client did not connect: {error}")
        with contextlib.suppress(InvalidStateError):
            made.set_exception(problem)

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
                while not socket.poll(LOOK_MS):
                    self._check_lives()
                    if time.monotonic() > deadline:
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
                self._check_lives()
                if time.monotonic() > deadline:
                    raise LaunchTimeoutError(
                        "the output of ipyparallel's engines did not reach its client within "
                        f"{timeout:g} s."
                    )
                content = {"name": "stdout", "text": ""}
                session.send(socket, "stream", content=content, parent=parent, ident=b"distsession")
                time.sleep(0.005)
        client.metadata.pop(request)

    def _check_lives(self) -> None:
        if self.has_died or self._closed:
            raise LaunchError(CONTROLLER_GONE)

    def unregister(self, engine_ids: Collection[int]) -> None:
        """Tell the controller that engines are gone; their ids are free when this returns.

        The controller itself would notice much later, by missed heartbeats. It answers no such
        request. But it takes those of one socket in turn, so what it answers to the next one says
        that it has seen all: others that registered before that would be given other ids.
        """
        if self._connection is None or not engine_ids:
            return
        facts = self._connection["client"]
        session = _message_session(facts)
        with _connect(zmq.DEALER, facts, "registration", linger=500) as socket:
            for engine_id in engine_ids:
                session.send(socket, "unregistration_request", content={"id": engine_id})
            session.send(socket, "connection_request")
            if not socket.poll(SEEN_MS):
                log.warning("ipyparallel's controller is busy: fresh ranks may get other ids")

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the controller and disconnect the client."""
        with self._lock:
            self._closed = True
            if self._listed:
                with contextlib.suppress(OSError):
                    os.unlink(self._listed)
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()
        if self._launched:
            self._kill()
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
        # One that still imports ipyparallel sees by itself that it is not wanted any more.
        deadline = time.monotonic() + LEAVE_S
        for thread in self._threads:
            if self._launched and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        """End it at once: it keeps nothing that outlives the session."""
        launcher: Any = getattr(self._cluster, "controller", None)
        if getattr(launcher, "process", None) is not None:
            # It leads a process group, of which ipyparallel's heart monitor is a member.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.process.pid, signal.SIGKILL)
            launcher._wait_thread.join(2.0)  # ipyparallel's own thread reaps it


_LISTED = f"cluster-{folder_lock.PREFIX}*.json"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove_if_over(path: str) -> None:
    """Remove a file for ``ipcluster list`` whose session is over."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(path, encoding="utf-8") as file:
            profile = str(json.load(file)["cluster"]["profile_dir"])
        if not os.path.isdir(profile):
            os.unlink(path)


def _message_session(facts: dict[str, Any]) -> Any:
    """What packs and signs messages as the controller expects them."""
    from jupyter_client.session import Session

    with no_signing_warning():
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
