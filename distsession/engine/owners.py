"""Who owns a session that is kept, as the agent of one node sees it.

The agent listens in the session's folder. One owner at a time stays connected; when it is gone, a
lease begins, at whose end the session ends. Who owns it is written beside the sockets, for those
who only look.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from distsession.engine.process import started_at
from distsession.options import duration_text
from distsession.protocol import unix_socket, whole_messages
from distsession.protocol.agent_messages import StartRanks
from distsession.protocol.attach import (
    Attached,
    AttachRefused,
    AttachRequest,
    BoardReply,
    BoardRequest,
    Ended,
    EndSession,
    Fenced,
    LogPart,
    LogRead,
    LogsReply,
    LogsRequest,
    attach_path,
)
from distsession.protocol.host_clock import host_clock
from distsession.protocol.kept_record import OWNER_FILE, Owner, write_record

__all__ = ["Owners"]

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 1.0
"""Seconds that one who has connected may take to say what it wants."""

BACKLOG = 16
REPLY_TIMEOUT_S = 1.0
"""Seconds that one who has asked may take to read what the system does not take."""
ANSWER_TIMEOUT_S = 5.0
"""The same for one who is to be the owner, and whom the one before has made room for."""
SEND_BYTES = 208 << 10
"""Room that is asked for, and may be had everywhere; the system makes twice as much of it."""


class Owners:
    """The owner of a session, those who want to be it, and the lease while there is none.

    Args:
        start: What the first ranks were started with.
        pid: Of the kernel that has started them.
    """

    def __init__(self, start: StartRanks, pid: int):
        self._folder, self._node = start.folder, start.node
        self._keep_s, self._keep_idle_s = start.keep, start.keep_idle
        self._version = start.version
        self._listener = unix_socket.listen(attach_path(self._folder, self._node), backlog=BACKLOG)
        self.epoch, self._pid, self._since = start.epoch, pid, time.time()
        self._began = started_at(pid)
        self._gone_at: float | None = None
        self._lease_began = 0.0
        self._idle_since: float | None = None
        self.left_at_ns = 0
        """When the owner has gone, by the clock of the board."""
        self._write()

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()

    # --- the lease --------------------------------------------------------------------------------

    def leave(self) -> None:
        """The owner is gone."""
        self._gone_at, self._lease_began = time.time(), host_clock()
        self.left_at_ns = time.monotonic_ns()
        self._idle_since = None
        self._write()

    def let_go(self, link: Connection, reason: str) -> None:
        """Tell an owner that it is none any more, or it would take this agent for gone.

        Args:
            link: To it; it is closed.
            reason: Why.
        """
        _tell(link, Fenced(reason))

    def problem(self, is_idle: Callable[[], bool]) -> str:
        """Why the session is over; empty while it is not.

        Args:
            is_idle: Whether no rank runs anything.
        """
        if self._gone_at is None:
            return ""
        now = host_clock()
        if now > self._lease_began + self._keep_s:
            return f"nobody had attached for {duration_text(self._keep_s)}"
        if not self._keep_idle_s:
            return ""
        if not is_idle():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now > self._idle_since + self._keep_idle_s:
            idle = duration_text(self._keep_idle_s)
            return f"nobody had attached, and the ranks had been idle for {idle}"
        return ""

    def _write(self) -> None:
        """Say in a file who owns it."""
        if self._node:
            return
        gone_at = self._gone_at
        ends_at = None if gone_at is None else gone_at + self._keep_s
        owner = Owner(
            epoch=self.epoch,
            pid=self._pid,
            began=self._began,
            since=self._since,
            gone_at=gone_at,
            lease_ends_at=ends_at,
            lease_ends_clock=None if gone_at is None else self._lease_began + self._keep_s,
        )
        try:
            write_record(self._folder, OWNER_FILE, asdict(owner))
        except OSError:
            log.exception("could not write who owns the session")

    # --- those who connect ------------------------------------------------------------------------

    def accept(
        self,
        link: Connection | None,
        attached: Callable[[int], Attached],
        read_board: Callable[[bool], BoardReply],
        read_logs: Callable[[Sequence[LogRead]], tuple[LogPart, ...]],
    ) -> tuple[Connection | None, int] | EndSession | None:
        """Take in one who has connected.

        Args:
            link: To the present owner; closed if another takes its place.
            attached: What the new owner of an epoch is told.
            read_board: What somebody is told who only looks: all of it, or what is new.
            read_logs: Reads parts of logs for somebody who only looks.

        Returns:
            The link to another owner, which is None if it is gone already, and its pid; or that the
            session is to end; or None where all stays as it was.
        """
        try:
            connection = Connection(unix_socket.accept(self._listener).detach())
        except OSError as error:
            log.warning("no connection is taken: %s", error)
            return None
        try:
            wanted = whole_messages.receive(connection, REQUEST_TIMEOUT_S)
            match wanted:
                case EndSession():
                    _tell(link, Fenced(wanted.reason, is_over=True))
                    with contextlib.suppress(OSError):  # who asked for it may not wait
                        whole_messages.send(connection, Ended(), REPLY_TIMEOUT_S)
                    return wanted
                case AttachRequest():
                    if refusal := self._refusal(wanted, link is not None):
                        whole_messages.send(connection, AttachRefused(refusal), REPLY_TIMEOUT_S)
                    else:
                        return self._change(wanted, connection, link, attached)
                case BoardRequest():
                    whole_messages.send(connection, read_board(wanted.whole), REPLY_TIMEOUT_S)
                case LogsRequest():
                    _make_room(connection)
                    reply = LogsReply(read_logs(wanted.reads))
                    whole_messages.send(connection, reply, REPLY_TIMEOUT_S)
                case _:
                    log.warning("somebody has connected who does not say what for: %r", wanted)
        except TimeoutError as error:
            log.warning("somebody who connected is given up: %s", error)
        except (EOFError, OSError) as error:
            log.warning("somebody who connected is gone: %s", error)
        except Exception:
            log.exception("dropped what somebody has sent who connected")
        connection.close()
        return None

    def _refusal(self, wanted: AttachRequest, is_owned: bool) -> str:
        if wanted.version != self._version:
            return (
                f"it was started by distsession {self._version}, and this is {wanted.version}: "
                "attach with the same version, or end it with `distsession stop`."
            )
        if self._node and wanted.epoch <= self.epoch:
            return "another kernel has attached meanwhile."
        if is_owned and not wanted.take and not self._node:
            since = time.strftime("%H:%M:%S", time.localtime(self._since))
            return (
                f"process {self._pid} has owned it since {since}: look on with %session view "
                "(Session.view), detach there (%session detach), or take it with %session attach "
                "--take (take=True); the other one can then ask nothing of it any more."
            )
        return ""

    def _change(
        self,
        wanted: AttachRequest,
        connection: Connection,
        link: Connection | None,
        attached: Callable[[int], Attached],
    ) -> tuple[Connection | None, int]:
        epoch = wanted.epoch or self.epoch + 1
        answer = attached(epoch)
        at = time.strftime("%H:%M:%S")
        _tell(link, Fenced(f"{wanted.who} has taken it at {at}", taken=f"by {wanted.who} at {at}"))
        self.epoch = epoch
        self._pid, self._since, self._gone_at = wanted.pid, time.time(), None
        self._began = started_at(wanted.pid)
        self._write()
        try:
            whole_messages.send(connection, answer, ANSWER_TIMEOUT_S)
        except OSError as error:  # it has not waited, and the one before has been told of it
            log.warning("who has attached is gone: %s", error)
            connection.close()
            return None, wanted.pid
        return connection, wanted.pid


def _make_room(connection: Connection) -> None:
    """For one who reads slowly, or over a slow network."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)


def _tell(link: Connection | None, message: Any) -> None:
    """Send an owner the last message that it gets; it may be stopped and not read."""
    if link is None:
        return
    with contextlib.suppress(OSError):
        if select.select([], [link], [], 0)[1]:
            link.send(message)
    link.close()
