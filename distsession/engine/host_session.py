"""A session's part on another host than the kernel's: a folder, an agent, and roads to the kernel.

The agent, its relay and the ranks connect to unix sockets in the session's folder, wherever they
run. Here each of these is carried to the kernel, over a stream of its own; what is at the other
end does not know.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from distsession.engine import store_server
from distsession.engine.log_file import read_tail
from distsession.engine.oom import OomKills, oom_text
from distsession.engine.process import agent_environment, module_command
from distsession.engine.process_state import switches
from distsession.protocol import folder_lock, places, unix_socket
from distsession.protocol.attach import attach_path
from distsession.protocol.forward import Forwarder, UnixForwarder, pump
from distsession.protocol.host_link import ATTACH, MESSAGES, SOCKETS, STORE, TCP_STORE
from distsession.protocol.message_stream import lend
from distsession.protocol.secure_stream import SecureStream, connect
from distsession.protocol.wire import socket_path

__all__ = ["HostSession", "Order"]

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 5.0
"""Seconds that a connection to the kernel may take."""
END_TIMEOUT_S = 5.0
"""Seconds that the agent has to end its ranks and itself."""
LOG_TAIL_BYTES = 2000
BACKLOG = 4096


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the kernel wants to be begun here.

    Attributes:
        node: The number of this host's agent.
        epoch: Of the kernel that owns the session.
        address: Where the kernel is reached from here, which may be the path of a socket; empty
            where it has to come.
        port: Where it takes streams.
        link: By which the kernel knows this process, for another may take its place.
    """

    node: int
    epoch: int
    address: str
    port: int
    link: str


class HostSession:
    """Starts the agent of this host, and carries what is to go to the kernel.

    Args:
        order: What is wanted.
        secret: Of the session: opens streams.
        ask: Has the kernel make a connection to a port of this host, where it cannot be reached.

    Attributes:
        folder: The session's, on this host.
        store_port: Where torch's TCP store is reached from this host.
    """

    def __init__(self, order: Order, secret: bytes, ask: Callable[[int], None] = lambda port: None):
        self._order, self._secret, self._ask = order, secret, ask
        self._epoch = 0
        self._forwarders: list[Forwarder] = []
        self._to_kernel: list[Forwarder] = []
        """Those of the sockets of the kernel that owns the session."""
        self._retired: list[Forwarder] = []
        """Those of the kernel before it, through which something may still come or go."""
        self._agent: subprocess.Popen[bytes] | None = None
        self._signs: tuple[str, ...] | None = None
        """Its last signs of life since it was told to end; None if it was not."""
        self._oom_kills = OomKills()
        self.folder, self._lock = places.make_folder()
        folder_lock.sweep(os.path.dirname(self.folder))  # of sessions that were killed
        try:
            path = store_server.socket_path(self.folder)
            self._forwarders.append(UnixForwarder(path, self._open_stream, STORE))
            self.set_owner(order.epoch)
            tcp = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            self.store_port = int(tcp.getsockname()[1])
            self._forwarders.append(Forwarder(tcp, self._open_stream, TCP_STORE))
        except BaseException:
            self.close()
            raise

    def set_owner(self, epoch: int) -> None:
        """Carry from now on what is for the sockets of this owner; 0 says that nobody is there.

        Raises:
            OSError: Its sockets cannot be made here.
        """
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self._to_kernel:
            for forwarder in self._retired:
                forwarder.close()
            self._retired, self._to_kernel = self._to_kernel, []
            for forwarder in self._retired:
                forwarder.stop_listening()
        for service in SOCKETS if epoch else ():
            path = socket_path(self.folder, service, epoch)
            carry = lend if service == MESSAGES else pump
            forwarder = UnixForwarder(path, partial(self._open_stream, epoch=epoch), service, carry)
            self._to_kernel.append(forwarder)

    def _open_stream(self, service: str, **more: object) -> SecureStream:
        said = {name: str(value) for name, value in more.items()}
        hello = {"link": self._order.link, "service": service, **said}
        return connect(self._connection(), self._secret, hello)

    def answer(self, token: str) -> None:
        """Connect the agent to somebody at the kernel's host who wants to attach."""

        def carry() -> None:
            try:
                with contextlib.closing(self._open_stream(ATTACH, token=token)) as stream:
                    path = attach_path(self.folder, self._order.node)
                    pump(stream, unix_socket.connect(path))
            except OSError as error:
                log.warning("nobody can attach: %s", error)

        threading.Thread(target=carry, name="distsession-attach", daemon=True).start()

    def _connection(self) -> socket.socket:
        """A connection to the kernel."""
        if self._order.address.startswith("/"):  # a socket that ssh carries there
            return unix_socket.connect(self._order.address, timeout_s=DIAL_TIMEOUT_S)
        if self._order.address:
            address = self._order.address, self._order.port
            return socket.create_connection(address, DIAL_TIMEOUT_S)
        with socket.create_server(("", 0)) as door:  # for this one alone
            door.settimeout(DIAL_TIMEOUT_S)
            self._ask(int(door.getsockname()[1]))
            connection, _ = door.accept()
            return connection

    # --- the agent --------------------------------------------------------------------------------

    def start_agent(self) -> int:
        """Start the agent, of which there is none; gives its pid."""
        arguments = [self.folder, str(self._order.node), str(os.getpid()), str(self._epoch)]
        self._oom_kills.look_up(os.getpid())
        self._signs = None
        with open(self._log_path, "wb") as output:
            self._agent = subprocess.Popen(
                [*module_command("distsession.engine.agent"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=agent_environment(_without_launcher(os.environ)),
                start_new_session=True,
            )
        self._oom_kills.watch(self._agent.pid)
        return self._agent.pid

    def ended(self) -> Mapping[str, Any] | None:
        """How the agent has ended, once, if it has."""
        if self._agent is None or (code := self._agent.poll()) is None:
            return None
        pid, self._agent = self._agent.pid, None
        is_killed, limit = self._oom_kills.check(pid)
        oom = oom_text(limit) if is_killed and code == -signal.SIGKILL else ""
        return {"pid": pid, "code": code, "oom": oom, "log": self._log_tail()}

    @property
    def agent_pid(self) -> int:
        """Of the agent's process; 0 where there is none."""
        return 0 if self._agent is None else self._agent.pid

    def signs_of_life(self) -> tuple[str, ...]:
        """Once the agent has been told to end: what shows that it is not stuck, if that is new."""
        if self._signs is None or self._agent is None:
            return ()
        before, self._signs = self._signs, switches(self._agent.pid)
        return self._signs if self._signs != before else ()

    def end_agent(self, *, at_once: bool = False) -> None:
        """Tell the agent to end with its ranks; ``at_once`` leaves it no choice."""
        if self._agent is None or self._agent.poll() is not None:
            return
        if not at_once:
            self._signs = self._signs or ()
            self._agent.terminate()
            return
        # Its ranks die with it, but not what they have started, which is in their groups.
        for pid in _children(self._agent.pid):
            with contextlib.suppress(OSError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
        self._agent.kill()

    @property
    def _log_path(self) -> str:
        return os.path.join(self.folder, "agent.log")

    def _log_tail(self) -> str:
        return read_tail(self._log_path, LOG_TAIL_BYTES).strip()

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the agent with its ranks, and remove the folder. Harmless when repeated."""
        self.end_agent()
        for forwarder in (*self._forwarders, *self._to_kernel, *self._retired):
            forwarder.close()
        if self._agent is not None:
            try:
                self._agent.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.end_agent(at_once=True)
                self._agent.wait()
        folder_lock.remove(self.folder)
        folder_lock.release(self._lock)


def _without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what ipyparallel's launcher has put there for engines of its own."""
    return {name: value for name, value in environ.items() if not name.startswith("IPP_")}


def _children(pid: int) -> list[int]:
    """The processes that a process has started itself."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            # Behind the name, which is in parentheses and may hold anything.
            if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                found.append(int(name))
    return found
