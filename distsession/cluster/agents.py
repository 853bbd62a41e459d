"""The agents of a session: one process for each node, on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, BinaryIO, Protocol

from distsession.cluster.base import python_command
from distsession.cluster.deaths import agent_text, ended_text, not_ready_text
from distsession.engine.log_file import read_tail
from distsession.engine.oom import OomKills, oom_text
from distsession.engine.process import agent_environment, started_at
from distsession.engine.process_state import switches
from distsession.errors import LaunchError, LaunchTimeoutError, SessionStateError
from distsession.protocol import unix_socket, whole_messages
from distsession.protocol.agent_messages import AgentStarted
from distsession.protocol.wire import socket_path

__all__ = ["AgentProcess", "Agents"]

log = logging.getLogger(__name__)

LOG_TAIL = 2000
HELLO_TIMEOUT_S = 5.0
"""Seconds that an agent which has connected may take to say which it is."""
STUCK_S = 3.0
"""Seconds without any sign of life after which an agent that is to end is killed."""
END_S = 60.0
"""Seconds that an agent has to end its ranks and itself while it shows signs of life."""
GONE_S = 1.0
"""Seconds that an agent's process may take to end after its link has closed."""
LOOK_S = 0.25
"""Seconds between two looks at whether it does."""


UNKNOWN = -1
"""The exit code of a process of which only the end is known."""


class AgentProcess(Protocol):
    """The process of an agent, with what is used of ``subprocess.Popen``."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class AdoptedProcess:
    """A process that is no child of this one."""

    def __init__(self, pid: int):
        self.pid = pid
        self._began = started_at(pid)

    def poll(self) -> int | None:
        is_same = self._began and started_at(self.pid) == self._began
        return None if is_same else UNKNOWN

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(0.005)
        return UNKNOWN

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)


class Agents:
    """Starts agents, sends to them, and ends them.

    Args:
        folder: The session's private folder.
        board: A descriptor that all of them inherit.
        pids_of: Gives the pids of a node's ranks, as far as they are known and live.
        epoch: Of the kernel that owns the session.
    """

    def __init__(
        self, folder: str, board: int, pids_of: Callable[[int], Iterable[int]], epoch: int = 1
    ):
        self._epoch = epoch
        self._folder = folder
        self._board = board
        self._pids_of = pids_of
        self._is_urgent = threading.Event()
        self._oom_kills = OomKills()
        self._processes: dict[int, AgentProcess] = {}
        self._links: dict[int, Connection] = {}
        self._lock = threading.Lock()
        self._path = socket_path(folder, "agent", epoch)
        self._listener = unix_socket.listen(self._path)

    def adopt(self, node: int, pid: int, link: Connection) -> None:
        """An agent that another kernel has started serves this one."""
        self._processes[node], self._links[node] = AdoptedProcess(pid), link
        self._oom_kills.look_up(pid)
        self._oom_kills.watch(pid)

    def abandon(self) -> None:
        """Let go of all agents, which live on."""
        with self._lock:
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._processes.clear()
        self._close_listener()

    def start(self, node: int) -> None:
        """Start the agent of a node, also in the place of one that is gone."""
        self.end(node)
        self._oom_kills.look_up(os.getpid())
        process = self._processes[node] = self._start_process(node)
        self._oom_kills.watch(process.pid)

    def _start_process(self, node: int) -> AgentProcess:
        arguments = [self._folder, str(node), str(os.getpid()), str(self._epoch)]
        with open(self._log_path(node), "wb") as output:
            return start_process(arguments, self._board, output, agent_environment(os.environ))

    def accept(self, deadline: float) -> dict[int, Connection]:
        """Wait for every agent that was started and has not connected yet.

        Raises:
            LaunchError: One ended.
            LaunchTimeoutError: One did not come in time.
        """
        come: dict[int, Connection] = {}
        while late := [node for node in self._processes if node not in self._links]:
            if not wait([self._listener], timeout=0.05):
                for node in late:
                    if not self.runs(node):
                        raise LaunchError(not_ready_text(self._who(node), self.how_ended(node)))
                if time.monotonic() > deadline:
                    raise LaunchTimeoutError(f"{self._who(late[0])} did not come up.")
                continue
            try:
                link = Connection(unix_socket.accept(self._listener).detach())
                hello = whole_messages.receive(link, HELLO_TIMEOUT_S)
            except (EOFError, OSError):  # it has ended, which is seen above, or is a stranger
                continue
            assert isinstance(hello, AgentStarted)
            come[hello.node] = self._links[hello.node] = link
        return come

    def send(self, node: int, message: Any) -> None:
        """Send to an agent.

        Raises:
            SessionStateError: It is gone.
        """
        with self._lock:
            link = self._links.get(node)
            gone = f"{self._who(node)} of this session is gone"
            if link is None or link.closed:
                raise SessionStateError(f"{gone}: call session.restart().")
            try:
                link.send(message)
            except OSError as error:
                raise SessionStateError(f"{gone} ({error}): call session.restart().") from error

    def runs(self, node: int = 0) -> bool:
        """Whether an agent's process lives."""
        process = self._processes.get(node)
        return process is not None and process.poll() is None

    def is_link_over(self, node: int) -> bool:
        """Whether nothing more comes from an agent, be it that nobody has read that yet."""
        link = self._links.get(node)
        return link is None or link.closed or whole_messages.is_over(link)

    def how_ended(self, node: int) -> str:
        """How an agent has ended, once its link has closed: by itself, or what ended it.

        Returns:
            Such as ``"was killed by SIGKILL"``; empty where that is not known.
        """
        process = self._processes.get(node)
        if process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(GONE_S)
            killed = self._oom_text(process, code)
            known = ended_text(code) if code not in (0, UNKNOWN) else killed and "was ended"
            return f"{known}, {killed}" if killed else known
        return ""

    def _oom_text(self, process: AgentProcess, code: int) -> str:
        """What is said if the system has ended it for want of memory; else nothing."""
        is_killed, limit = self._oom_kills.check(process.pid)
        return oom_text(limit) if is_killed and code in (-signal.SIGKILL, UNKNOWN) else ""

    def forget_kills(self) -> None:
        """The system has ended ranks for want of memory, which is known of them."""
        self._oom_kills.forget()

    def pid(self, node: int = 0) -> int:
        """Of an agent's process; 0, which is nobody's, once it has been ended."""
        process = self._processes.get(node)
        return 0 if process is None else process.pid

    def name(self, node: int) -> str:
        """What the host of a node is called, if it is another one."""
        return ""

    def _who(self, node: int) -> str:
        return agent_text(node, self.name(node))

    def log_tails(self) -> str:
        """What the agents wrote last, for a message."""
        parts = []
        for node in self._processes:
            if tail := read_tail(self._log_path(node), LOG_TAIL).strip():
                text = self._who(node)
                parts.append(f"\n{text[0].upper()}{text[1:]}'s last lines:\n{tail}")
        return "".join(parts)

    def _log_path(self, node: int) -> str:
        return os.path.join(self._folder, f"agent-{node}.log" if node else "agent.log")

    # --- end --------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """Have all agents end their ranks and themselves, without waiting."""
        for process in self._processes.values():
            process.terminate()

    def release(self) -> None:
        """Have all agents end, also one that is in the midst of an import, and close all links."""
        self.terminate()
        with self._lock:
            for link in self._links.values():
                link.close()

    def end_at_once(self) -> None:
        """Somebody does not want to wait: what ends now is killed."""
        self._is_urgent.set()

    def close(self) -> None:
        """End all agents and wait for them."""
        self.release()
        self._end(list(self._processes))
        self._close_listener()

    def _close_listener(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):  # somebody may have removed the folder
            os.unlink(self._path)

    def end(self, node: int) -> None:
        """End the agent of a node, if there is one, with its ranks, and wait for it."""
        self._end([node])

    def _end(self, nodes: Sequence[int]) -> None:
        processes = dict[int, AgentProcess]()
        for node in nodes:
            with self._lock:
                link = self._links.pop(node, None)
                if link is not None:
                    link.close()
            process = self._processes.pop(node, None)
            if process is not None:
                process.terminate()
                processes[node] = process
        stuck = self._await_ends(processes)
        for node in stuck:
            if not self._is_urgent.is_set():
                log.warning("%s is stuck, so it is killed with its ranks", self._who(node))
            self._kill_ranks(node)
            processes[node].kill()
        for node in stuck:
            processes[node].wait()

    def _kill_ranks(self, node: int) -> None:
        """Its ranks die with an agent, but not what they have started."""
        # While it lives, their pids are theirs, for nobody else reaps them.
        for pid in self._pids_of(node):
            with contextlib.suppress(OSError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)

    def _activity(self, process: AgentProcess) -> tuple[str, ...]:
        """What changes as long as a process shows signs of life."""
        return switches(process.pid)

    def _await_ends(self, processes: Mapping[int, AgentProcess]) -> list[int]:
        """Wait for agents to end, for each as long as it shows signs of life.

        How long it takes depends on their ranks, and on what else runs on the machine.

        Returns:
            The nodes of those that have not ended.
        """
        began = time.monotonic()
        seen: dict[int, tuple[tuple[str, ...], float]] = {}
        stuck, waiting = list[int](), list(processes)
        while waiting and not self._is_urgent.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[waiting[0]].wait(timeout=LOOK_S)
            waiting = [node for node in waiting if processes[node].poll() is None]
            now = time.monotonic()
            for node in list(waiting):
                signs = self._activity(processes[node])
                if node not in seen or signs != seen[node][0]:
                    seen[node] = signs, now
                if now - seen[node][1] > STUCK_S or now - began > END_S:
                    waiting.remove(node)
                    stuck.append(node)
        return [node for node in (*stuck, *waiting) if processes[node].poll() is None]


def start_process(
    arguments: list[str], board: int, output: BinaryIO, environ: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process of an agent.

    Args:
        arguments: The session's folder, the node, and this process.
        board: The descriptor that it inherits.
        output: Where it writes.
        environ: Its environment.
    """
    return subprocess.Popen(
        [*python_command("distsession.engine.agent"), *arguments],
        pass_fds=[board],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,  # Jupyter interrupts the kernel's whole process group
    )
