"""The process that a launcher starts on a host: it dials the kernel, and tells what is there.

It gets the path of a file with the keys of the session, or ``-`` for its text on the standard
input. Where it reaches no address of the kernel's, it listens itself, and says so on its standard
output, which the launcher hands to the kernel. It ends when it is told to, and when the kernel is
silent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import zmq

from distsession.engine.host_facts import OwnName, installed_facts
from distsession.engine.host_session import HostSession, Order
from distsession.engine.process import module_command
from distsession.engine.reach import ReachListener, own_addresses, try_peers
from distsession.protocol.host_link import (
    FAILS,
    LISTENS,
    MESSAGE_MAX,
    PING_S,
    STARTS,
    TUNNEL,
    LinkKeys,
    decode,
    encode,
    read_keys,
    tcp_place,
    tunnel_path,
)
from distsession.protocol.link_connections import LinkConnections

__all__ = ["HostProcess", "host_name", "main", "place_among_hosts"]

DIAL_TIMEOUT_S = 3.0
"""Seconds that an address of the kernel's has to take a connection, and then to show its key."""
RECONNECT_S = 1.5
"""Seconds without a connection after which the kernel is gone: zmq tries again ten times a second.
A network that is cut closes no connection; zmq does, after a time without heartbeats."""
LISTEN_S = 5.0
"""Seconds that the kernel has to connect, before all goes through ssh where that is possible."""
LOOK_S = 0.2
"""Seconds between two looks at what does not come as a message."""

NAME_TIMEOUT_S = 1.0
"""Seconds that the look-up of this host's name may hold up what it tells of itself. It is less than
what the kernel takes for silence."""

NAMES = ("SLURMD_NODENAME",)
"""Variables by which a launcher names the host; otherwise it is asked for its own name."""
PLACES = ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SGE_TASK_ID")
"""Variables by which it numbers the processes that it starts, in the order of the hosts."""


def main() -> None:
    """Be the agent: ``PATH_OR_DASH [NAME]``."""
    _say(STARTS)
    source, *names = sys.argv[1:]
    name = names[0] if names else host_name(os.environ)
    keys = _read_keys(source)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        HostProcess(keys, name).run()
    except (KeyboardInterrupt, _Terminated):
        sys.exit(1)


class _Terminated(BaseException):
    """Somebody has sent SIGTERM: a scheduler whose job is over, say."""


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is told once
    raise _Terminated


def _say(line: str) -> None:
    """To the launcher, and through it to the kernel."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _read_keys(source: str) -> LinkKeys:
    try:
        if source == "-":
            return read_keys(sys.stdin.read())
        with open(source, encoding="utf-8") as file:
            return read_keys(file.read())
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        place = "standard input" if source == "-" else source
        _fail(f"the keys cannot be read from {place}: {problem}")


def _fail(text: str) -> NoReturn:
    _say(f"{FAILS}{host_name(os.environ)}: {text}")
    sys.exit(1)


def host_name(environ: Mapping[str, str]) -> str:
    """What this host is called by its launcher, or by itself."""
    return next((environ[name] for name in NAMES if environ.get(name)), socket.gethostname())


def place_among_hosts(environ: Mapping[str, str]) -> int | None:
    """Which of the hosts this is, in the launcher's order, if it says so."""
    return next((int(environ[name]) for name in PLACES if environ.get(name, "").isdigit()), None)


class _Wake:
    """Wakes the thread that polls a socket, from any other."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]):
        socket.bind("inproc://wake")
        self._socket = context.socket(zmq.PUSH)
        self._socket.connect("inproc://wake")
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._socket.send(data)


class HostProcess:
    """An agent's link to the kernel.

    Args:
        keys: Of the session.
        name: Of this host.
    """

    def __init__(self, keys: LinkKeys, name: str):
        self._keys, self._name = keys, name
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes]
        self._connections: LinkConnections
        self._reach = ReachListener(name, keys.reach_key)
        self._own_name = OwnName()
        self._facts: subprocess.Popen[bytes] | None = None
        self._facts_asked: dict[str, Any] = {}
        self._is_over = False
        self._address = ""
        """Of the kernel, as it is reached from here."""
        self._session: HostSession | None = None
        self._doors: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Ports that the kernel is to connect to."""
        self._woken: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._wake = _Wake(self._context, self._woken)

    def run(self) -> None:
        """Find the kernel, and serve it until it ends this process or is silent."""
        try:
            if not self._dial() and not self._listen():
                self._dial_tunnel()
            if self._address != TUNNEL:
                self._close_tunnel()
            self._serve()
        except _Terminated:
            self._send("notice", {"signal": "SIGTERM"})
            raise
        finally:
            # What ends is not cut off: a launcher that finds it slow says so by SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._reach.close()
            self._close_tunnel()
            if self._session is not None:
                self._session.close()
            if self._facts is not None:
                self._facts.kill()
                self._facts.wait()
            self._connections.close()
            self._context.destroy(linger=500)

    # --- finding the kernel -----------------------------------------------------------------------

    def _dial(self) -> bool:
        """Connect to the first of the kernel's addresses that works."""
        for address in self._open_addresses():
            # Something else may have that address here; it has no key.
            if self._greet(tcp_place(address, self._keys.port), address):
                return True
        return False

    def _greet(self, place: str, address: str) -> bool:
        """Connect, and see whether that is the kernel."""
        self._make_socket()
        self._socket.connect(place)
        self._send("hello", self._hello(address))
        if self._socket.poll(round(1000 * DIAL_TIMEOUT_S)):
            self._address = address
            return True
        self._close_socket()
        return False

    def _tunnel(self, what: str) -> str:
        """The path of a socket that ssh carries to the kernel; empty without one."""
        if not self._keys.tunnel:
            return ""
        path = tunnel_path(self._keys.tunnel, self._name, what)
        return path if os.path.exists(path) else ""

    def _dial_tunnel(self) -> None:
        """Connect through ssh, where no network leads from one to the other."""
        if not self._greet(f"ipc://{self._tunnel('link')}", TUNNEL):
            self._fail_to_reach()

    def _close_tunnel(self) -> None:
        for what in ("link", "streams"):
            with contextlib.suppress(OSError):
                os.unlink(self._tunnel(what))

    def _open_addresses(self) -> list[str]:
        """Those where something listens, tried all at once: one that is dropped takes its time."""

        def is_open(address: str) -> bool:
            try:
                socket.create_connection((address, self._keys.port), DIAL_TIMEOUT_S).close()
            except OSError:
                return False
            return True

        addresses = self._keys.addresses
        with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
            return [
                each
                for each, yes in zip(addresses, pool.map(is_open, addresses), strict=True)
                if yes
            ]

    def _listen(self) -> bool:
        """Wait for the kernel to connect; False if it does not, and ssh is to carry all instead."""
        self._make_socket()
        port = self._connections.bind("tcp://*")
        place = {"name": self._name, "addresses": list(own_addresses().values()), "port": port}
        _say(f"{LISTENS}{json.dumps(place)}")
        output = select.poll()
        output.register(1, 0)  # that nobody reads it any more is told without being asked for
        has_tunnel = bool(self._tunnel("link"))
        patience_s = LISTEN_S if has_tunnel else self._keys.patience_s
        deadline = time.monotonic() + patience_s
        while not self._socket.poll(round(1000 * LOOK_S), zmq.POLLOUT):
            self._connections.look()
            is_late = time.monotonic() > deadline
            if is_late and has_tunnel:
                self._close_socket()
                return False
            if output.poll(0) or is_late:
                self._fail_to_reach()
        self._send("hello", self._hello(""))
        return True

    def _fail_to_reach(self) -> NoReturn:
        _fail(
            f"it reaches no address of the kernel's ({', '.join(self._keys.addresses)}, "
            f"port {self._keys.port}), and the kernel has not connected to it either"
        )

    def _make_socket(self) -> None:
        made: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.IDENTITY, os.urandom(8))
        made.setsockopt(zmq.MAXMSGSIZE, MESSAGE_MAX)
        made.setsockopt(zmq.IPV6, 1)  # as well
        # Answered by zmq's own thread there, also while a call of the user's holds the interpreter.
        made.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * min(PING_S, self._keys.patience_s)))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * self._keys.patience_s))
        made.curve_serverkey = self._keys.kernel_public.encode()
        made.curve_publickey = self._keys.public.encode()
        made.curve_secretkey = self._keys.secret.encode()
        self._connections = LinkConnections(self._context, made, expected=1)
        self._socket = made

    def _close_socket(self) -> None:
        self._connections.close()
        self._socket.close(linger=0)

    def _is_abandoned(self) -> bool:
        """Whether the connection is closed, and nobody has made it anew."""
        self._connections.look()
        lost_at = self._connections.lost_at
        return lost_at is not None and time.monotonic() - lost_at > RECONNECT_S

    def _hello(self, address: str) -> dict[str, Any]:
        return {
            "name": self._name,
            "place": place_among_hosts(os.environ),
            "pid": os.getpid(),
            "address": address,
        }

    def _send(self, kind: str, body: Mapping[str, Any] | None = None) -> None:
        with contextlib.suppress(zmq.Again):  # a kernel that came here has gone: it may come again
            self._socket.send(encode(kind, body), zmq.NOBLOCK)

    # --- serving it -------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_over:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._woken, zmq.POLLIN)
            if self._socket in dict(poller.poll(round(1000 * LOOK_S))):
                frame = self._socket.recv(copy=False)
                self._connections.note(frame)
                kind, body = decode(frame.bytes)
                self._handle(kind, body)
            elif self._is_abandoned():
                return
            self._tell_facts()
            self._tell_agent()
            self._tell_doors()

    def _handle(self, kind: str, body: dict[str, Any]) -> None:
        match kind:
            case "ping":
                self._send("pong", {"sent": body["sent"], "time": time.time()})
            case "facts":
                self._facts_asked = body
                command = module_command("distsession.engine.host_facts")
                self._facts = subprocess.Popen(
                    [*command, str(os.getpid())], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
                )
            case "reach":
                self._send("reached", {"peers": try_peers(body["peers"], self._keys.reach_key)})
            case "begin":
                self._begin(body)
            case "start-agent" if self._session is not None:
                self._send("agent", {"pid": self._session.start_agent(), "code": None})
            case "end-agent" if self._session is not None:
                self._session.end_agent(at_once=bool(body["at_once"]))
            case "owner" if self._session is not None:
                self._set_owner(self._session, int(body["epoch"]))
            case "attach" if self._session is not None:
                self._session.answer(str(body["token"]))
            case "end":
                self._is_over = True

    # --- a session --------------------------------------------------------------------------------

    def _begin(self, body: dict[str, Any]) -> None:
        """Make room for a session's ranks, and tell what it takes to start them."""
        identity = self._socket.getsockopt(zmq.IDENTITY)
        assert isinstance(identity, bytes)
        order = Order(
            node=int(body["node"]),
            epoch=int(body["epoch"]),
            address=self._tunnel("streams") if self._address == TUNNEL else self._address,
            port=int(body["port"]),
            link=identity.hex(),
        )
        try:
            session = HostSession(order, bytes.fromhex(self._keys.stream_key), self._ask)
        except OSError as error:
            self._send("begun", {"problem": f"it cannot begin: {error}"})
            return
        self._session = session
        found = {**self._own_facts(body), "folder": session.folder, "store": session.store_port}
        self._send("begun", found)
        self._send("agent", {"pid": session.start_agent(), "code": None})

    def _set_owner(self, session: HostSession, epoch: int) -> None:
        try:
            session.set_owner(epoch)
        except OSError as error:
            self._send("owner", {"epoch": epoch, "problem": str(error)})
        else:
            self._send("owner", {"epoch": epoch})

    def _ask(self, port: int) -> None:
        """From any thread: have the kernel connect to a port of this host."""
        self._doors.put(port)
        self._wake.send(b"")

    def _tell_doors(self) -> None:
        while self._woken.poll(0):
            self._woken.recv()
            self._send("open", {"port": self._doors.get()})

    def _tell_agent(self) -> None:
        """Say that the agent has ended, if it has, or that one which is to end is not stuck."""
        if self._session is None:
            return
        if ended := self._session.ended():
            self._send("agent", ended)
        elif signs := self._session.signs_of_life():
            self._send("agent", {"pid": self._session.agent_pid, "code": None, "signs": signs})

    # --- facts ------------------------------------------------------------------------------------

    def _own_facts(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of this host without torch."""
        nonce = asked.get("nonce", "")
        return {
            **installed_facts(),
            **self._own_name.facts(NAME_TIMEOUT_S),
            "name": self._name,
            "addresses": own_addresses(),
            "port": self._reach.port,
            "sees_folder": not nonce or _read(str(asked["path"])) == nonce,
            "has_directory": os.path.isdir(str(asked.get("directory", "/"))),
        }

    def _tell_facts(self) -> None:
        """Send the facts once they have been found."""
        if self._facts is None or self._facts.poll() is None:
            return
        process, self._facts = self._facts, None
        assert process.stdout is not None
        with process.stdout:
            text = process.stdout.read()
        try:
            found = json.loads(text)
        except ValueError:
            found = {"problem": f"importing torch ended the process (exit code {process.poll()})"}
        self._send("facts", {**found, **self._own_facts(self._facts_asked)})


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""
