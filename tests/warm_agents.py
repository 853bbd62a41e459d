"""Agents for tests that have imported torch already: a start then costs 0.3 s instead of 2.

Two of three minutes of processor time of the suite went into importing torch in the agent of each
session. So one process of the test run imports what an agent imports, and agents are forked from
it: with the arguments, descriptors, output and parent that a started one has, only the imports are
done. A test that sets a variable of the environment gets an agent that is started as users' are,
and so do kernels, terminals and all other programs that tests start.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from typing import BinaryIO, NoReturn

_CLONE_PARENT = 0x8000
"""The child's parent is the parent of the process that forks (clone(2))."""
_SYSTEM_CALL = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)
"""The number of clone(2)."""
_MAX_MESSAGE_BYTES = 4096
_PASSING = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that may differ: nothing of ours reads them, and torch sets the second by itself."""


class WarmAgents:
    """The process that agents are forked from; to be made in the main thread, for it ends with it.

    Args:
        environ: What agents are started with.
    """

    def __init__(self, environ: dict[str, str]):
        self._environ = _comparable(environ)
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _program(), str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def can_fork(self, environ: dict[str, str]) -> bool:
        """Whether an agent with this environment would have been started with the same imports."""
        return bool(_SYSTEM_CALL) and _comparable(environ) == self._environ

    def fork(
        self, arguments: list[str], board: int, output: BinaryIO, environ: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Fork an agent; it is a child of this process."""
        message = "\0".join((os.getcwd(), str(board), *arguments)).encode()
        socket.send_fds(self._socket, [message], [board, output.fileno()])
        answer = self._socket.recv(4)
        if not answer:
            raise RuntimeError("the process that agents are forked from has ended")
        (pid,) = struct.unpack("i", answer)
        return _ForkedProcess(pid, arguments)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()  # it may still be importing
        self._process.wait()


class _ForkedProcess(subprocess.Popen[bytes]):
    """A child that this process has not started by itself."""

    def __init__(self, pid: int, arguments: list[str]):
        self.args, self.pid, self.returncode = arguments, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


def _program() -> str:
    """This file as a program without a name, as that of agents is: it is no code of the user's."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(__file__) as file:
        source = file.read()
    begin = f"import sys; sys.path.insert(0, {root!r})  # distsession.engine.agent"
    return f"{source}\n{begin}\nserve(int(sys.argv[1]))\n"


def serve(descriptor: int) -> NoReturn:
    """Import what agents import, and fork one for each message."""
    from distsession.engine import agent, deaths, host_info, rank, relay, store, usage  # noqa: F401

    for name in agent.DDP_IMPORTS:
        with warnings.catch_warnings():
            importlib.import_module(name)
    assert not host_info.fork_problem()
    with socket.socket(fileno=descriptor) as link:
        while True:
            message, descriptors, *_ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, 2)
            if not message:
                os._exit(0)
            pid = _fork_sibling()
            if pid == 0:
                link.close()
                _become_agent(message.decode().split("\0"), *descriptors)
            for number in descriptors:
                os.close(number)
            link.send(struct.pack("i", pid))


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


def _become_agent(message: list[str], board: int, output: int) -> NoReturn:
    from distsession.engine import agent

    os.setsid()
    folder, number, *arguments = message
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if board != int(number):
        os.dup2(board, int(number))
        os.close(board)
    os.set_inheritable(int(number), True)
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


def _comparable(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _PASSING}
