"""Agents for tests that have imported torch already: a start then costs 0.3 s instead of 2.

Two of three minutes of processor time of the suite went into importing torch in the agent of each
session. So one process of the test run imports what an agent imports, and agents are forked from
it: with the arguments, descriptors, environment, output and parent that a started one has, only
the imports are done.

Agents have to be children of the program that has the session. So a kernel, and a server that has
kernels, is forked from that process as well. It forks one of its own, which its agents will be
forked from, and then executes its program, so that it has imported nothing itself.

A test that sets a variable of the environment gets agents that are started as users' are, and so do
terminals and all other programs that tests start.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

STARTED = "AGENTS_ARE_STARTED"
"""A variable of the environment of those who get agents, and kernels, as users do."""
LINK = 3
"""The descriptor by which a program that was started here asks for its agents."""

_CLONE_PARENT = 0x8000
"""The child's parent is the parent of the process that forks (clone(2))."""
_SYSTEM_CALL = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)
"""The number of clone(2)."""
_MAX_MESSAGE_BYTES = 100_000
_PASSING = {
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "HOME", "IPYTHONDIR", "MPLBACKEND"),
    *("TERM", "PAGER", "GIT_PAGER", "CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "LINES"),
    *("COLUMNS", "PYDEVD_USE_FRAME_EVAL"),
}
"""Variables that may differ, as may those of Jupyter: no import reads them."""


class WarmAgents:
    """Asks the process that agents are forked from.

    Args:
        link: Leads to that process.
    """

    def __init__(self, link: socket.socket):
        self._link = link
        self._lock = threading.Lock()

    def fork(
        self, arguments: list[str], board: int, output: BinaryIO, environ: dict[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """Fork an agent, which is a child of this process.

        Returns:
            Nothing if one that is started with this environment may have imported something else.
        """
        descriptors = [board, output.fileno()]
        return self._ask("agent", environ, os.getcwd(), (board, arguments), descriptors)

    def start_program(
        self,
        command: Sequence[str],
        environ: dict[str, str],
        folder: str,
        stdout: int = 1,
        stderr: int = 2,
    ) -> subprocess.Popen[bytes]:
        """Start ``python [options] -m module [arguments]``, whose agents will be forked."""
        at = command.index("-m")
        file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm_program.py")
        arguments = [*command[:at], file, *command[at + 1 :]]
        process = self._ask("program", environ, folder, (arguments,), [stdout, stderr])
        assert process is not None
        return process

    def _ask(
        self,
        kind: str,
        environ: dict[str, str],
        folder: str,
        rest: tuple[Any, ...],
        descriptors: list[int],
    ) -> subprocess.Popen[bytes] | None:
        message = pickle.dumps((kind, environ, folder, rest))
        with self._lock:
            socket.send_fds(self._link, [message], descriptors)
            answer = self._link.recv(4)
        if not answer:
            raise RuntimeError("the process that agents are forked from has ended")
        (pid,) = struct.unpack("i", answer)
        return _ForkedProcess(pid, rest[-1]) if pid else None


class WarmProcess(WarmAgents):
    """Starts that process; to be made in the main thread, for it ends with it.

    Args:
        environ: What agents are started with.
    """

    def __init__(self, environ: dict[str, str]):
        link, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(link)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _program(), str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
            )

    def close(self) -> None:
        self._link.close()
        self._process.kill()  # it may still be importing
        self._process.wait()


class _ForkedProcess(subprocess.Popen[bytes]):
    """A child that this process has not started by itself."""

    def __init__(self, pid: int, arguments: Sequence[str]):
        self.args, self.pid, self.returncode = arguments, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


def fork_agents(agents: ModuleType, warm: WarmAgents) -> None:
    """Have ``distsession.cluster.agents`` of this process fork them."""
    start_process = agents.start_process

    def start(
        arguments: list[str], board: int, output: BinaryIO, environ: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        forked = warm.fork(arguments, board, output, environ) if _SYSTEM_CALL else None
        return forked or start_process(arguments, board, output, environ)

    agents.start_process = start  # type: ignore[attr-defined]


def fork_agents_of_kernels(provisioner: ModuleType, warm: WarmAgents) -> None:
    """Have ``jupyter_client.provisioning.local_provisioner`` start kernels that fork agents."""
    launch_kernel = provisioner.launch_kernel

    def launch(cmd: list[str], **options: Any) -> subprocess.Popen[bytes]:
        known = {"env", "cwd"} >= {name for name, value in options.items() if value}
        environ = {**(options.get("env") or os.environ), "JPY_PARENT_PID": str(os.getpid())}
        is_ours = cmd[0] == sys.executable and "ipykernel_launcher" in cmd
        is_plain = known and is_ours and STARTED not in environ
        if not (_SYSTEM_CALL and is_plain):
            return launch_kernel(cmd, **options)
        return warm.start_program(cmd, environ, os.fspath(options.get("cwd") or os.getcwd()))

    provisioner.launch_kernel = launch  # type: ignore[attr-defined]


# --- the process that agents are forked from ------------------------------------------------------


def _program() -> str:
    """This file as a program without a name, as that of agents is: it is no code of the user's."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(__file__) as file:
        source = file.read()
    begin = f"import sys; sys.path.insert(0, {root!r})  # distsession.engine.agent"
    return f"{source}\n{begin}\nimport_and_serve(int(sys.argv[1]))\n"


def import_and_serve(descriptor: int) -> NoReturn:
    """Import what agents import, and fork one for each message."""
    environ = _comparable(dict(os.environ))
    from distsession.engine import agent, deaths, host_info, rank, relay, store, usage  # noqa: F401

    for name in agent.LATER_IMPORTS:
        with warnings.catch_warnings():
            importlib.import_module(name)
    assert not host_info.fork_problem()
    _serve(socket.socket(fileno=descriptor), environ)


def _serve(link: socket.socket, imported_with: dict[str, str]) -> NoReturn:
    while True:
        message, descriptors, *_ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        kind, environ, folder, rest = pickle.loads(message)
        can = kind == "program" or _comparable(environ) == imported_with
        if can and _fork_sibling() == 0:
            os.setsid()  # before anybody asks for the group that it is in
            link.send(struct.pack("i", os.getpid()))
            link.close()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environ)
            if kind == "agent":
                _become_agent(*rest, *descriptors)
            _become_program(*rest, *descriptors, imported_with)
        for number in descriptors:
            os.close(number)
        if not can:
            link.send(struct.pack("i", 0))


def _fork_sibling() -> int:
    """``os.fork()``, but the child is one of our parent."""
    system_call = ctypes.PyDLL(None).syscall
    system_call.restype = ctypes.c_long
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = system_call(_SYSTEM_CALL, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("clone() failed")
    return int(pid)


def _become_agent(number: int, arguments: list[str], board: int, output: int) -> NoReturn:
    from distsession.engine import agent

    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if board != number:
        os.dup2(board, number)
        os.close(board)
    os.set_inheritable(number, True)
    sys.argv = ["-c", *arguments]
    code = 1
    try:
        agent.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_program(
    command: list[str], stdout: int, stderr: int, imported_with: dict[str, str]
) -> NoReturn:
    """Execute it, with a child of its own that its agents are forked from."""
    its, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        its.close()
        os.setsid()  # what interrupts the program's group is not meant for it
        for number in (stdout, stderr):
            os.close(number)
        for number in (1, 2):
            os.dup2(0, number)
        _serve(link, imported_with)
    link.close()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    if its.fileno() == LINK:
        os.set_inheritable(LINK, True)
    else:
        os.dup2(its.fileno(), LINK)
    os.execve(command[0], command, dict(os.environ))


def _comparable(environ: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name not in _PASSING and not name.startswith(("JPY_", "JUPYTER_"))
    }
