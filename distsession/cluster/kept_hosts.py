"""The hosts of a session that is kept, whose links are in a process that outlives the kernel.

That process (``host_keeper``) has what the kernel has itself without ``keep``: the links, the
streams, the launcher's processes. The kernel asks it by calls, and is told how the hosts are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

from distsession.cluster.agents import LOG_TAIL, AdoptedProcess, AgentProcess
from distsession.cluster.base import python_command
from distsession.cluster.deaths import ended_text
from distsession.cluster.host_links import LinkedHost
from distsession.engine.log_file import read_tail
from distsession.engine.process_state import STOPPED, process_state
from distsession.errors import DistsessionError, LaunchError, LaunchTimeoutError, SessionStateError
from distsession.host_plan import HostPlan
from distsession.protocol import folder_lock, unix_socket
from distsession.protocol.attach import keeper_path
from distsession.protocol.host_checks import HostProblem, Reach
from distsession.protocol.host_facts import HostFacts

__all__ = ["BeginHosts", "Call", "HostsState", "KeptHosts", "Result", "TakeHosts"]

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks at the process that is to answer."""
BEGIN_TIMEOUT_S = 120.0
"""Seconds that it has to say that it is there, perhaps from a network's disk that is cold."""
TAKE_TIMEOUT_S = 20.0
"""Seconds that the process has to have hosts bring all to another owner."""
GONE_LOOK_S = 0.1
"""Seconds within which the process is gone where what it held has just ended with it."""
END_LOOK_S = 1.0
"""Seconds in which it turns out how it has ended, once its connection is broken."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that it may take to say that it will end."""
END_TIMEOUT_S = 60.0
"""Seconds that it has to end all on the hosts, and itself."""
BACKLOG = 16


# --- to that process ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginHosts:
    """The first message of the kernel that has started it: which hosts, and how."""

    plan: HostPlan


@dataclass(frozen=True, slots=True)
class TakeHosts:
    """The first message of another kernel, which owns the session now."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Call:
    """Something is to be done.

    Attributes:
        number: Counts the calls.
        name: What.
        arguments: For that.
    """

    number: int
    name: str
    arguments: tuple[Any, ...]


# --- from it --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """What has come of a call.

    Attributes:
        number: Of the call; 0 for the first message.
        value: What it gave.
        error: What it raised.
    """

    number: int
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class HostsState:
    """How the hosts are.

    Attributes:
        pid: Of that process.
        plan: With other hosts in the place of those that were replaced.
        links: As that process has them.
        lost: The identities of those that count as gone.
        cut_off: The identities of those whose system does not answer either.
        silent: Seconds of silence, by identity.
        problems: What was found to be wrong.
        job: The id of the job that the agents are in.
        waits_for: What a start waits for.
        notices: By what hosts' processes have been told to end, by identity.
    """

    pid: int
    plan: HostPlan
    links: tuple[LinkedHost, ...]
    lost: frozenset[bytes]
    cut_off: frozenset[bytes]
    silent: Mapping[bytes, float]
    problems: tuple[HostProblem, ...]
    job: str
    waits_for: str
    notices: Mapping[bytes, str]


class KeptHosts:
    """As ``Hosts`` for who uses it; all that lives is in another process.

    Args:
        plan: Which hosts, and how.
        tell: Is told what is waited for.

    Attributes:
        links: The agents that have come, in the order of the hosts.
        problems: What was found to be wrong.
        job: The id of the job that the agents are in; empty without one.
        pid: Of the process that keeps them; 0 before it has said so.
        is_gone: It has ended, and was not told to.
    """

    def __init__(self, plan: HostPlan, tell: Callable[[str], object] = lambda text: None):
        self.plan, self._tell = plan, tell
        self.links: tuple[LinkedHost, ...] = ()
        self.problems: list[HostProblem] = []
        self.job = ""
        self.pid = 0
        self.is_gone = False
        self._on_notice: Callable[[LinkedHost, str], None] = lambda link, what: None
        self._state: HostsState | None = None
        self._process: AgentProcess | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._results: dict[int, Future[Any]] = {}
        self._last = 0
        self._is_released = False
        self._log_path = ""
        """What it writes, as long as it is to start a session."""

    # --- the process ------------------------------------------------------------------------------

    def carry(self, folder: str) -> None:
        """Start the process, which takes what hosts bring to the sockets in a session's folder.

        Raises:
            LaunchError: It has ended or does not answer, or there cannot be any hosts.
        """
        self._log_path = os.path.join(folder, "hosts.log")
        with (
            unix_socket.listen(keeper_path(folder), backlog=BACKLOG) as listener,
            open(self._log_path, "wb") as output,
        ):
            self._process = subprocess.Popen(
                [
                    *python_command("distsession.cluster.host_keeper"),
                    *(folder, str(os.getpid()), str(listener.fileno())),
                ],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Jupyter interrupts the kernel's whole process group
            )
        # From here on nobody else listens there: its end breaks the connection, accepted or not.
        self.pid = self._process.pid
        self._connect(folder, BeginHosts(self.plan), BEGIN_TIMEOUT_S)

    def take(self, folder: str, epoch: int) -> None:
        """Have the hosts of a session bring all to this process, which owns it now.

        Raises:
            SessionStateError: The process that keeps them is gone, or does not answer.
        """
        self._connect(folder, TakeHosts(epoch), TAKE_TIMEOUT_S)
        self._process = AdoptedProcess(self.pid)

    def _connect(self, folder: str, first: BeginHosts | TakeHosts, timeout: float) -> None:
        try:
            link = unix_socket.connect(keeper_path(folder))
        except OSError as error:
            raise self._gone_error(f" ({error.strerror or error})") from None
        self._connection = connection = Connection(link.detach())
        began: Future[Any] = Future()
        self._results[0] = began
        with contextlib.suppress(OSError):  # it is gone, which is seen by who receives
            connection.send(first)
        threading.Thread(
            target=self._receive, args=(connection,), name="distsession-hosts", daemon=True
        ).start()
        self._await_first(began, timeout)

    def _await_first(self, began: Future[Any], timeout: float) -> None:
        """Wait until the process has said that it is there; it may be stopped, or gone."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(FutureTimeoutError):
                began.result(LOOK_S)
                return
            kind = LaunchTimeoutError if self._log_path else SessionStateError
            if problem := self._stopped_text():
                raise kind(problem)
            if time.monotonic() > deadline:
                raise kind(
                    "the process that holds the connections to the hosts has not answered within "
                    f"{timeout:g} s: `distsession ls` shows its pid, and how it is."
                )

    def _gone_text(self) -> str:
        who = f" (pid {self.pid})" if self.pid else ""
        return (
            f"the process that holds the connections to the hosts{who} is gone, and with it all "
            "ranks: session.restart() starts all of them anew"
        )

    def _gone_error(self, why: str = "") -> DistsessionError:
        """What is said of its end: where there is no session yet, how it was and what it wrote."""
        if not self._log_path:
            return SessionStateError(f"{self._gone_text()}{why}.")
        how = "has ended"
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it has only hung up
                how = ended_text(self._process.wait(END_LOOK_S))
        tail = read_tail(self._log_path, LOG_TAIL).strip()
        wrote = f"Its last lines:\n{tail}" if tail else "It wrote nothing."
        return LaunchError(
            f"the process that holds the connections to the hosts (pid {self.pid}) {how} before "
            f"the session had started. {wrote}"
        )

    def check_runs(self) -> None:
        """See whether the process still runs, while a session starts that has failed.

        Raises:
            LaunchError: It has ended, which is why.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(GONE_LOOK_S)
                raise self._gone_error()

    def problem(self) -> str:
        """What to say of the process, if it does not do what it is there for."""
        if self.is_gone:
            text = self._gone_text()
            return f"{text[0].upper()}{text[1:]}."
        return self._stopped_text()

    def _stopped_text(self) -> str:
        if self.pid and process_state(self.pid) in STOPPED:
            return (
                f"The process that holds the connections to the hosts (pid {self.pid}) is stopped "
                f"by SIGSTOP or a debugger: no host is reached. `kill -CONT {self.pid}` lets it "
                "go on."
            )
        return ""

    def _receive(self, connection: Connection) -> None:
        try:
            while True:
                try:
                    message = connection.recv()
                except TypeError:  # it was closed here, in the midst of a message
                    break
                if isinstance(message, HostsState):
                    self._take_in(message)
                elif isinstance(message, Result):
                    self._settle(message)
        except (EOFError, OSError):
            pass
        finally:
            with self._lock:
                self.is_gone = not self._is_released
                waiting, self._results = list(self._results.values()), {}
            for future in waiting:
                future.set_exception(self._gone_error())

    def _settle(self, result: Result) -> None:
        with self._lock:
            future = self._results.pop(result.number, None)
        if future is None:
            return
        if result.error is not None:
            future.set_exception(result.error)
        else:
            future.set_result(result.value)

    def _take_in(self, state: HostsState) -> None:
        """Know how the hosts are; who has a link keeps the same one."""
        known = {link.identity: link for link in self.links}
        for link in state.links:
            mine = known.setdefault(link.identity, link)
            for field in fields(LinkedHost):
                setattr(mine, field.name, getattr(link, field.name))
        before = {} if self._state is None else self._state.notices
        self.links = tuple(known[link.identity] for link in state.links)
        self._state, self.plan, self.job, self.pid = state, state.plan, state.job, state.pid
        self.problems = list(state.problems)
        if state.waits_for:
            self._tell(state.waits_for)
        for identity, what in state.notices.items():
            if what != before.get(identity) and identity in known:
                self._on_notice(known[identity], what)

    def _call(self, name: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Have that process do something, and wait until it has.

        Raises:
            LaunchError: It is gone, as the session was starting.
            SessionStateError: It is gone.
            TimeoutError: It takes longer.
        """
        return self._post(name, *arguments).result(timeout)

    def _post(self, name: str, *arguments: Any) -> Future[Any]:
        """Have it do something.

        Raises:
            LaunchError: It is gone, as the session was starting.
            SessionStateError: It is gone.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._connection is None or self.is_gone or self._is_released:
                raise self._gone_error()
            self._last += 1
            self._results[self._last] = future
            try:
                self._connection.send(Call(self._last, name, arguments))
            except OSError:
                del self._results[self._last]
                raise self._gone_error() from None
        return future

    # --- as Hosts ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._call("start")

    def begin(self, links: Mapping[int, LinkedHost], epoch: int) -> tuple[HostFacts, ...]:
        facts: tuple[HostFacts, ...] = self._call(
            "begin", {node: link.identity for node, link in links.items()}, epoch
        )
        return facts

    def reach(self, facts: Sequence[HostFacts]) -> Reach:
        found: Reach = self._call("reach", facts)
        return found

    def offsets(self) -> dict[str, float]:
        return {link.name: link.offset for link in self.links}

    def forget_problems(self) -> None:
        self._call("forget_problems")

    def set_store_port(self, port: int) -> None:
        self._call("set_store_port", port)

    def start_agent(self, link: LinkedHost) -> None:
        self._call("start_agent", link.identity)

    def tell(self, link: LinkedHost, kind: str, body: Mapping[str, Any] | None = None) -> None:
        with contextlib.suppress(DistsessionError):  # then the host ends by itself
            self._post("tell", link.identity, kind, body)

    def give_up(self, link: LinkedHost) -> None:
        self._call("give_up", link.identity)

    def replace(self, index: int, name: str = "") -> LinkedHost:
        self._call("replace", index, name)
        return self.links[index]

    def lost_for_good(self, suspects: Sequence[LinkedHost]) -> list[LinkedHost]:
        lost = self._call("lost_for_good", [link.identity for link in suspects])
        return [link for link in suspects if link.identity in lost]

    def seconds_left(self) -> float | None:
        with contextlib.suppress(DistsessionError):
            left: float | None = self._call("seconds_left")
            return left
        return None

    def is_lost(self, link: LinkedHost) -> bool:
        state = self._state
        is_lost = state is not None and link.identity in state.lost
        return self.is_gone or self._is_released or link.is_given_up or is_lost

    def is_cut_off(self, link: LinkedHost) -> bool:
        return self._state is not None and link.identity in self._state.cut_off

    def silent_s(self, link: LinkedHost) -> float:
        return 0.0 if self._state is None else self._state.silent.get(link.identity, 0.0)

    def on_notice(self, tell: Callable[[LinkedHost, str], None]) -> None:
        self._on_notice = tell
        state = self._state
        for link in self.links:
            if state is not None and link.identity in state.notices:
                tell(link, state.notices[link.identity])

    # --- keeping ----------------------------------------------------------------------------------

    def keep(self, agent: int, board: str, ranks: Mapping[int, Sequence[int]]) -> None:
        """The session is there: it lasts as long as the agent on this host.

        Args:
            agent: Its process.
            board: Where it has the board open.
            ranks: Those of each node.
        """
        self._call("keep", agent, board, {node: tuple(each) for node, each in ranks.items()})
        self._log_path = ""

    def release(self) -> None:
        """Let go of the hosts, which go on. Harmless when repeated."""
        with self._lock:
            self._is_released = True
            connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=connection.fileno()) as end:
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
                end.detach()
            connection.close()

    def close(self) -> None:
        """End all on the hosts, and that process; nothing if this one has let go of it."""
        if self._is_released:
            return
        process, end_timeout = self._process, END_TIMEOUT_S
        try:
            self._call("close", timeout=CLOSE_TIMEOUT_S)
        except DistsessionError:  # it is gone
            pass
        except TimeoutError:  # hosts end without it, if it is stopped
            if self._stopped_text():
                end_timeout = 0.0
        self.release()
        if process is None:
            return
        try:
            process.wait(end_timeout)
        except subprocess.TimeoutExpired:
            log.warning("what keeps the hosts (pid %d) does not end, so it is killed", process.pid)
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):  # of one that was killed, the folder of its start
            folder_lock.sweep(os.path.abspath(os.path.expanduser(self.plan.folder)))
