"""The process that keeps the hosts of a session, also while no kernel is there.

It has their links, the streams that come from them, and the launcher's processes, and carries them
to the sockets of the kernel that owns the session. It is on the kernel's host, and lasts as long as
the session's agent there, which has the stores and the lease. Before the session has begun, it
ends with its kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from distsession.cluster.host_links import LinkedHost
from distsession.cluster.host_logs import HostLogs
from distsession.cluster.hosts import FIRST, Hosts
from distsession.cluster.kept_hosts import BeginHosts, Call, HostsState, Result, TakeHosts
from distsession.engine.process import started_at
from distsession.engine.process_state import DEAD
from distsession.errors import DistsessionError, SessionStateError
from distsession.protocol import folder_lock, unix_socket, whole_messages
from distsession.protocol.attach import (
    BoardReply,
    BoardRequest,
    LogsReply,
    LogsRequest,
    attach_path,
)
from distsession.protocol.board import Board
from distsession.protocol.board_mirror import apply, unpack
from distsession.protocol.forward import UnixListener
from distsession.protocol.host_facts import HostFacts

__all__ = ["HostKeeper", "main"]

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks at who is there, and how the hosts are."""
FIRST_TIMEOUT_S = 5.0
"""Seconds that one who has connected may take to say what it wants."""
START_END_TIMEOUT_S = 20.0
"""Seconds that a start has to end that was given up."""
FOLLOW_S = 1.0
"""Seconds between two looks at what ranks do, for who looks on."""
BOARD_TIMEOUT_S = 5.0
"""Seconds that an agent has to say that; it may just import something large."""
ORPHANS_TIMEOUT_S = 5.0
"""Seconds that other processes of the session have to let go of its folder."""


class HostKeeper:
    """Serves one kernel at a time, until the session has ended.

    Args:
        folder: The session's.
        listener: Where kernels connect.
        kernel: The process that has started this one.
    """

    def __init__(self, folder: str, listener: socket.socket, kernel: int):
        self._folder, self._listener, self._kernel = folder, listener, kernel
        self._hosts: Hosts | None = None
        self._agent: tuple[int, int] | None = None
        """The session's agent on this host, and when it was started; once the session is kept."""
        self._owner: Connection | None = None
        self._sending = threading.Lock()
        self._is_over = threading.Event()
        self._starting = threading.Lock()
        self._owning = threading.Lock()
        self._waits_for = ""
        self._notices: dict[bytes, str] = {}
        self._doors: list[UnixListener] = []
        self._board: Board | None = None
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._logs = HostLogs(self._host_name, self._ask)

    def run(self) -> None:
        """Serve until the session has ended."""
        threading.Thread(target=self._tell_state, name="distsession-state", daemon=True).start()
        try:
            while not self._is_over.is_set() and self._has_somebody():
                ready, _, _ = select.select([self._listener], [], [], LOOK_S)
                if ready:
                    self._accept()
        finally:
            self._end()

    def end(self) -> None:
        """From a signal's handler: end all on the hosts, and this."""
        self._is_over.set()

    def _has_somebody(self) -> bool:
        """Whether the session is there, or its first kernel."""
        if self._agent is not None:
            pid, started = self._agent
            return started_at(pid) == started
        return os.getppid() == self._kernel

    def _end(self) -> None:
        self._is_over.set()
        with contextlib.ExitStack() as steps:  # from the last, whatever becomes of one of them
            steps.callback(self._listener.close)
            if self._hosts is not None:
                steps.callback(self._end_hosts, self._hosts)
            for door in self._doors:
                steps.callback(door.close)

    def _end_hosts(self, hosts: Hosts) -> None:
        hosts.cancel()
        # What it has just started must not be left.
        has_ended = self._starting.acquire(timeout=START_END_TIMEOUT_S)
        try:
            hosts.close()
        finally:
            if has_ended:
                self._starting.release()

    # --- owners -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection = Connection(unix_socket.accept(self._listener).detach())
        except OSError as error:
            log.warning("no connection is taken: %s", error)
            return
        threading.Thread(
            target=self._serve, args=(connection,), name="distsession-owner", daemon=True
        ).start()

    def _serve(self, connection: Connection) -> None:
        """Do what somebody wants until it goes: a kernel that owns the session, or who looks on."""
        try:
            first = whole_messages.receive(connection, FIRST_TIMEOUT_S)
            if isinstance(first, LogsRequest):
                self._show_logs(first, connection)
                return
            if not self._begin(first, connection):
                return
            while True:
                call = connection.recv()
                if isinstance(call, Call):
                    # A start may wait for hours, and is to be given up meanwhile.
                    threading.Thread(
                        target=self._do, args=(connection, call), name=call.name, daemon=True
                    ).start()
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("somebody has sent what cannot be read")
        finally:
            self._leave(connection)
            connection.close()

    def _begin(self, first: object, connection: Connection) -> bool:
        """Take in an owner; whether it is one."""
        try:
            match first:
                case BeginHosts() if self._hosts is None:
                    self._hosts = Hosts(first.plan, self._note_waiting)
                    self._hosts.carry(self._folder)
                    self._hosts.on_notice(self._note_notice)
                    self._owner = connection
                case TakeHosts() if self._hosts is not None:
                    before, self._owner = self._owner, connection
                    if before is not None:
                        _hang_up(before)
                    with self._owning:
                        self._hosts.set_owner(first.epoch)
                case _:
                    log.warning("somebody has connected who does not say what for: %r", first)
                    return False
        except DistsessionError as error:
            self._send(connection, Result(0, error=error))
            return False
        self._send_state(connection)
        self._send(connection, Result(0))
        return True

    def _leave(self, connection: Connection) -> None:
        """A kernel has gone."""
        with self._owning:
            if self._owner is not connection:
                return
            self._owner = None
            if self._agent is not None and self._hosts is not None and not self._is_over.is_set():
                self._hosts.set_owner(0)

    # --- who only looks on ------------------------------------------------------------------------

    def _show_logs(self, wanted: LogsRequest, connection: Connection) -> None:
        """Read logs on hosts for somebody, as often as it asks, until it goes."""
        while isinstance(wanted, LogsRequest):
            connection.send(LogsReply(self._logs.read(wanted.reads, self._ranks)))
            wanted = connection.recv()

    def _host_name(self, node: int) -> tuple[str, bool]:
        """What the host of a node is called, and whether it is gone."""
        assert self._hosts is not None
        link = self._hosts.links[node - FIRST]
        return link.name, self._hosts.is_lost(link)

    def _ask(self, node: int, question: object, timeout: float) -> Any:
        """The answer of the agent of a node; None if it does not come in time.

        Raises:
            EOFError: There is no such agent.
            OSError: The connection to it is broken.
        """
        mine, its = socket.socketpair()
        threading.Thread(target=self._call, args=(node - FIRST, its), daemon=True).start()
        with Connection(mine.detach()) as connection:
            connection.send(question)
            try:
                return whole_messages.receive(connection, timeout)
            except TimeoutError:
                return None

    # --- what it wants ----------------------------------------------------------------------------

    def _do(self, connection: Connection, call: Call) -> None:
        if connection is not self._owner:
            return
        try:
            result = Result(call.number, self._calls[call.name](*call.arguments))
        except DistsessionError as error:
            result = Result(call.number, error=error)
        except Exception as error:  # which another process may not be able to read
            log.exception("a call has failed")
            result = Result(
                call.number, error=SessionStateError(f"{type(error).__name__}: {error}")
            )
        self._send_state(connection)  # first: with the result, all that it has changed is known
        self._send(connection, result)

    @property
    def _calls(self) -> Mapping[str, Callable[..., Any]]:
        hosts = self._hosts
        assert hosts is not None
        return {
            "start": self._start,
            "begin": self._begin_hosts,
            "reach": hosts.reach,
            "forget_problems": hosts.forget_problems,
            "set_store_port": hosts.set_store_port,
            "start_agent": lambda identity: hosts.start_agent(self._link(identity)),
            "tell": lambda identity, *what: hosts.tell(self._link(identity), *what),
            "give_up": lambda identity: hosts.give_up(self._link(identity)),
            "replace": self._replace,
            "lost_for_good": self._lost_for_good,
            "seconds_left": hosts.seconds_left,
            "keep": self._keep,
            "close": self._is_over.set,
        }

    def _link(self, identity: bytes) -> LinkedHost:
        assert self._hosts is not None
        return next(link for link in self._hosts.links if link.identity == identity)

    def _start(self) -> None:
        assert self._hosts is not None
        with self._starting:
            self._hosts.start()
        self._waits_for = ""

    def _begin_hosts(self, links: Mapping[int, bytes], epoch: int) -> tuple[HostFacts, ...]:
        assert self._hosts is not None
        facts = self._hosts.begin({n: self._link(link) for n, link in links.items()}, epoch)
        for node in range(FIRST + len(self._doors), FIRST + len(self._hosts.links)):
            index = node - FIRST
            path = attach_path(self._folder, node)
            self._doors.append(UnixListener(path, partial(self._call, index)))
        return facts

    def _call(self, index: int, connection: socket.socket) -> None:
        """Connect somebody to the agent of a host, as if it were here."""
        assert self._hosts is not None
        link = self._hosts.links[index]
        if self._hosts.is_lost(link):
            connection.close()
        else:
            self._hosts.call(link, connection)

    def _replace(self, index: int, name: str) -> None:
        assert self._hosts is not None
        with self._starting:
            self._hosts.replace(index, name)

    def _lost_for_good(self, suspects: Sequence[bytes]) -> list[bytes]:
        assert self._hosts is not None
        links = self._hosts.lost_for_good([self._link(identity) for identity in suspects])
        return [link.identity for link in links]

    def _keep(self, agent: int, board: str, ranks: Mapping[int, Sequence[int]]) -> None:
        self._ranks = {node: tuple(each) for node, each in ranks.items()}
        if self._agent is not None:  # again, since ranks were replaced
            return
        descriptor = os.open(board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = Board(descriptor, sum(map(len, ranks.values())))
        finally:
            os.close(descriptor)
        self._agent = agent, started_at(agent)
        threading.Thread(target=self._follow, name="distsession-board", daemon=True).start()

    # --- the boards of hosts ----------------------------------------------------------------------

    def _follow(self) -> None:
        """Know what ranks do while no kernel is there, which then has it from their relays."""
        known: set[int] = set()
        while not self._is_over.wait(FOLLOW_S):
            hosts, board = self._hosts, self._board
            assert hosts is not None
            assert board is not None
            if self._owner is not None:
                known.clear()
            for node, link in enumerate(hosts.links, FIRST):
                if hosts.is_lost(link):
                    self._note_lost(board, node)
                    known.discard(node)
                elif self._owner is None and self._bring(board, node, whole=node not in known):
                    known.add(node)

    def _note_lost(self, board: Board, node: int) -> None:
        """Whose host is gone does not write any more that it has ended."""
        for rank in self._ranks.get(node, ()):
            region = board.regions[rank]
            region.set_process_state(region.process, DEAD)
            region.seen_at_ns = time.monotonic_ns()

    def _bring(self, board: Board, node: int, *, whole: bool) -> bool:
        """Write down here what has changed on the board of a host; False if that is not known."""
        try:
            reply = self._ask(node, BoardRequest(whole), BOARD_TIMEOUT_S)
            with self._owning:
                if self._owner is not None or not isinstance(reply, BoardReply):
                    return False
                apply(board, unpack(reply.frames), self._ranks[node])
        except (EOFError, OSError, ValueError) as error:
            log.warning("the board of node %d is not known: %s", node, error)
            return False
        now = time.monotonic_ns()
        for rank in self._ranks[node]:
            region = board.regions[rank]
            region.clock_behind_ns, region.seen_at_ns = now - reply.clock_ns, now
        return True

    # --- what it is told --------------------------------------------------------------------------

    def _note_waiting(self, text: str) -> None:
        self._waits_for = text

    def _note_notice(self, link: LinkedHost, what: str) -> None:
        self._notices[link.identity] = what

    def _tell_state(self) -> None:
        """Tell the owner how the hosts are, as soon as something has come from one."""
        while not self._is_over.is_set():
            owner, hosts = self._owner, self._hosts
            if owner is None or hosts is None:
                time.sleep(LOOK_S)
                continue
            self._send_state(owner)
            hosts.wait_for_news(LOOK_S)

    def _send_state(self, connection: Connection) -> None:
        hosts = self._hosts
        assert hosts is not None
        links = hosts.snapshot()
        state = HostsState(
            pid=os.getpid(),
            plan=hosts.plan,
            links=links,
            lost=frozenset(link.identity for link in links if hosts.is_lost(link)),
            cut_off=frozenset(link.identity for link in links if hosts.is_cut_off(link)),
            silent={link.identity: hosts.silent_s(link) for link in links},
            problems=tuple(hosts.problems),
            job=hosts.job,
            waits_for=self._waits_for,
            notices=dict(self._notices),
        )
        self._send(connection, state)

    def _send(self, connection: Connection, message: object) -> None:
        with self._sending, contextlib.suppress(OSError):  # it has gone
            connection.send(message)


def _hang_up(connection: Connection) -> None:
    """Nothing more comes from one that owned the session, or goes there; it may be stopped."""
    with contextlib.suppress(OSError):
        end = socket.socket(fileno=os.dup(connection.fileno()))
        with end:
            end.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Be that process: ``FOLDER KERNEL LISTENER``."""
    folder, kernel = sys.argv[1], int(sys.argv[2])
    listener = socket.socket(fileno=int(sys.argv[3]))
    listener.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("distsession").addHandler(logging.StreamHandler())
    try:
        lock = folder_lock.hold(folder)
    except FileNotFoundError:  # the session has been closed, or its kernel is gone
        sys.exit(0)
    keeper = HostKeeper(folder, listener, kernel)
    signal.signal(signal.SIGTERM, lambda *_: keeper.end())
    try:
        keeper.run()
    finally:
        began = time.monotonic()
        folder_lock.remove_unused(
            folder, lock, lambda: time.monotonic() - began > ORPHANS_TIMEOUT_S
        )
