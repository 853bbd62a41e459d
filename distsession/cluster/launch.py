"""Ranks on this machine: one agent that forks them.

Runs in: the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from distsession.cluster.base import Launcher, OutputMessage, Pending, python_command
from distsession.cluster.channel import SocketChannel
from distsession.cluster.controller import Controller
from distsession.cluster.monitor import Monitor
from distsession.errors import EngineDiedError, LaunchError, LaunchTimeoutError
from distsession.messages import ControllerInfo, PrepareAgent, RejoinRequest, StartRanks, StopRanks
from distsession.options import RankPlan, SessionOptions, plan_ranks
from distsession.ranks import RankInfo

__all__ = ["LocalLauncher"]

log = logging.getLogger(__name__)

UNIX_PATH_MAX = 100
"""A unix socket's path has 107 bytes at most (sun_path in <sys/un.h>), less where we add a name."""
AGENT_LOG_TAIL = 2000


class LocalLauncher(Launcher):
    """Starts an agent and, through it, ranks on this machine.

    Args:
        options: What to start.
        on_background: Takes output that belongs to no run, in a thread of its own.
    """

    name = "local"
    channel: SocketChannel

    def __init__(self, options: SessionOptions, on_background: Callable[[OutputMessage], None]):
        self._options = options
        self._generation = 0
        self._plan: RankPlan | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._controller: Controller | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self._folder = _private_folder()
        self._monitor = Monitor(self._on_death)
        self._background = Pending(0, [-1])
        self.channel = SocketChannel(self._folder, self._monitor.hear, self._background)
        threading.Thread(
            target=self._background.wait, args=(on_background,), name="distsession-background",
            daemon=True,
        ).start()  # fmt: skip

    @property
    def folder(self) -> str:
        """The session's private folder: sockets and logs."""
        return self._folder

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> tuple[RankInfo, ...]:
        deadline = time.monotonic() + self._options.start_timeout
        try:
            self._spawn_agent()
            if not self.channel.accept_agent(self._agent_runs, deadline):
                raise LaunchError(
                    "the agent did not come up."
                    if self._agent_runs()
                    else "the agent ended before it was ready."
                )
            self.channel.send_agent(PrepareAgent(self._options.preload, tuple(sys.path)))
            host = self._monitor.wait_host(self._agent_runs, deadline)
            self._plan = plan_ranks(self._options, host)
            infos = self._launch(range(self._plan.world_size), deadline)
            self._start_controller()
            return infos
        except LaunchTimeoutError as error:
            raise LaunchTimeoutError(
                f"the ranks did not start within start_timeout={self._options.start_timeout:g} s: "
                f"{error}{self._close_with_log()}"
            ) from None
        except LaunchError as error:
            raise type(error)(f"{error}{self._close_with_log()}") from None
        except OSError as error:
            self.close()
            raise LaunchError(
                f"the session could not be set up: {error}. `distsession doctor` says what this "
                "machine lacks."
            ) from error
        except BaseException:  # also Ctrl-C: nothing stays
            self.close()
            raise

    def _spawn_agent(self) -> None:
        environ = {
            **os.environ,
            # One thread only: a child forked from a process with a thread pool hangs in it.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            # Counting GPUs must not initialise CUDA.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        with open(os.path.join(self._folder, "agent.log"), "wb") as output:
            self._process = subprocess.Popen(
                [*python_command("distsession.engine.agent"), self._folder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,  # Jupyter interrupts the kernel's whole process group
            )

    def _agent_runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _close_with_log(self) -> str:
        """End everything; gives what the agent wrote, for the message."""
        tail = ""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, "agent.log"), "rb") as f:
            tail = f.read()[-AGENT_LOG_TAIL:].decode("utf-8", "replace").strip()
        self.close()
        return f"\nThe agent's last lines:\n{tail}" if tail else ""

    def _launch(self, ranks: Sequence[int], deadline: float) -> tuple[RankInfo, ...]:
        """Fork these ranks into the present generation and wait for the whole world."""
        plan = self._plan
        assert plan is not None
        world = range(plan.world_size)
        self._monitor.forget(ranks)
        self.channel.send_agent(
            StartRanks(
                ranks=tuple(ranks),
                world_size=plan.world_size,
                generation=self._generation,
                devices=plan.devices,
                backend=plan.backend,
                timeout=self._options.timeout,
                seed=self._options.seed,
                seed_per_rank=self._options.seed_per_rank,
                threads=plan.threads,
                folder=self._folder,
                cwd=os.getcwd(),
                sys_path=tuple(sys.path),
                environ=dict(os.environ),
            )
        )
        rejoining = []
        for rank in world:
            if rank in ranks:
                self.channel.set_identity(rank, self._generation)
            else:
                rejoining.append(rank)
        pending = None
        if rejoining:
            pending = self.channel.submit(
                rejoining, lambda number: RejoinRequest(number, self._generation), []
            )
        self._monitor.wait_ready(world, self._generation, deadline)
        if pending is not None:
            self.channel.forget(pending)
        return tuple(self._monitor.ready[rank] for rank in world)

    # --- ipyparallel ------------------------------------------------------------------------------

    def _start_controller(self) -> None:
        assert self._process is not None
        self._controller = Controller(self._folder, self._process.pid)
        self._controller.start(self._register_all)

    def _register_all(self, info: ControllerInfo) -> None:
        assert self._plan is not None
        for rank in range(self._plan.world_size):
            self.channel.send_control(rank, info)

    def client(self, timeout: float) -> Any:
        assert self._controller is not None
        assert self._plan is not None
        world = range(self._plan.world_size)
        return self._controller.client(
            lambda limit: self._monitor.wait_registered(world, limit), len(world), timeout
        )

    # --- restart ----------------------------------------------------------------------------------

    def restart(self, ranks: Sequence[int] | None) -> tuple[RankInfo, ...]:
        assert self._plan is not None
        deadline = time.monotonic() + self._options.start_timeout
        wanted = tuple(range(self._plan.world_size)) if ranks is None else tuple(ranks)
        # A rank that is dead now must come back too: the group needs all of them.
        wanted = tuple(sorted({*wanted, *self._monitor.dead}))
        engine_ids = [self._monitor.engine_ids.get(rank, rank) for rank in wanted]
        living = [rank for rank in wanted if rank not in self._monitor.dead]
        if living:
            self.channel.send_agent(StopRanks(tuple(living)))
            self._monitor.wait_exited(living, self._options.start_timeout)
        self._generation += 1
        try:
            infos = self._launch(wanted, deadline)
        except LaunchTimeoutError as error:
            raise LaunchTimeoutError(
                f"{error} Ranks that are busy cannot join the new process group: "
                "session.restart() without ranks replaces all of them."
            ) from None
        controller = self._controller
        if controller is not None and controller.is_ready:
            for engine_id in engine_ids:
                controller.unregister(engine_id)
            for rank in wanted:
                self.channel.send_control(rank, controller.info())
        return infos

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._agent_runs() and not self._monitor.agent_gone

    def dead_ranks(self) -> dict[int, EngineDiedError]:
        return dict(self._monitor.dead)

    def _on_death(self, error: EngineDiedError) -> None:
        self.channel.bury(error)

    # --- close ------------------------------------------------------------------------------------

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child of the kernel owns nothing of this
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.channel.close()  # the agent ends its ranks and itself when this link closes
        if self._controller is not None:
            self._controller.close()
        if self._process is not None:
            self._process.terminate()  # in case it is in the midst of an import
            try:
                self._process.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                log.warning("the agent did not end by itself and is killed")
                self._process.kill()
                self._process.wait()
        self._monitor.hear(None)
        self._background.put_death(EngineDiedError("", rank=-1, pid=0, returncode=0))
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    """A new folder that only this user can open, with a path short enough for unix sockets."""
    for base in (tempfile.gettempdir(), "/tmp", os.environ.get("XDG_RUNTIME_DIR")):
        if not base or not os.access(base, os.W_OK | os.X_OK) or len(base) > UNIX_PATH_MAX - 40:
            continue
        try:
            folder = tempfile.mkdtemp(prefix="distsession-", dir=base)
        except OSError:
            continue
        os.mkdir(os.path.join(folder, "logs"), mode=0o700)
        return folder
    raise LaunchError(
        "there is no folder for the session's sockets and logs: neither "
        f"{tempfile.gettempdir()}, /tmp nor $XDG_RUNTIME_DIR can be written to (or its path is too "
        "long for a socket). Set TMPDIR to a short, writable path."
    )
