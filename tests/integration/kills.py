"""A kernel that is killed at any moment of a session's life leaves nothing.

``python -m tests.integration.kills --kills 300`` (``make soak``) does it for long.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

LIMIT = 20.0
"""Seconds after which a process that is still there has been left behind."""
PATIENCE = 120.0
"""Seconds in which a kernel comes to the step at which it is killed."""

KERNEL = """
import os, sys
def step(name):
    os.write(1, f"{name}\\n".encode())
step("import")
from distsession import LaunchTimeoutError, Session
def client():
    try:
        session.client
    except LaunchTimeoutError:  # on a machine that is busy with kernels
        pass
step("start")
session = Session(2, ipyparallel=os.environ["KILLS_IPYPARALLEL"])
step("client")
client()
step("replace")
session.restart([1])
step("restart")
session.restart()
step("again")
client()
step("close")
session.close()
step("over")
"""
STEPS = ("import", "start", "start", "start", "client", "client", "client", "replace", "restart",
         "again", "close")  # fmt: skip
SLOW = ("distsession.engine.agent", "distsession.engine.rank", "torch", "zmq", "ipyparallel",
        "ipyparallel.controller.app", "distsession.cluster.ipyparallel_controller")  # fmt: skip

SITE = """
import os, random, sys, time
class Slow:
    names = dict(part.split(":") for part in os.environ.get("KILLS_SLOW", "").split(",") if part)
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            time.sleep(float(self.names.pop(name)))
sys.meta_path.insert(0, Slow())
"""


class Left(AssertionError):
    """Something has been left behind."""


class Kills:
    """Starts kernels in a folder of their own, kills them and looks for what they have left.

    Args:
        seed: Decides when and how they are killed.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.random = random.Random(seed)
        self.done: list[str] = []
        self._outer = tempfile.TemporaryDirectory(prefix="kills-", dir="/tmp")
        self.base = os.path.join(self._outer.name, "t")
        os.mkdir(self.base)
        Path(self._outer.name, "sitecustomize.py").write_text(SITE)

    def close(self) -> None:
        self._outer.cleanup()

    # --- one kill ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """Start a kernel, kill it at some moment, and wait until nothing of it is left."""
        step = self.random.choice(STEPS)
        delay = self.random.random() ** 2 * (3.0 if step in ("start", "client") else 0.6)
        how = self.random.choice(("kernel", "kernel", "group", "agent too", "agent first"))
        self.done.append(f"{how} {delay:.3f} s after {step}")
        kernel = self._start()
        try:
            self._wait_for(kernel, step)
            time.sleep(delay)
            agents = [p.pid for p in self.processes() if is_agent(p)] if "agent" in how else []
            if how == "agent first":
                end(agents)
            if how == "group":
                os.killpg(kernel.pid, signal.SIGKILL)
            else:
                kernel.kill()
            if how == "agent too":
                end(agents)
        finally:
            kernel.kill()
            kernel.communicate()
        self.check()

    def _start(self, code: str = KERNEL) -> subprocess.Popen[bytes]:
        slow = self.random.sample(SLOW, self.random.randrange(4))
        delays = ",".join(f"{name}:{self.random.uniform(0.1, 1.0):.2f}" for name in slow)
        root = str(Path(__file__).parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=self._outer.name,
            env={
                **os.environ,
                "TMPDIR": self.base,
                "PYTHONPATH": os.pathsep.join((self._outer.name, root)),
                "KILLS_SLOW": delays,
                "KILLS_IPYPARALLEL": self.random.choice(("lazy", "eager")),
            },
        )

    def _wait_for(self, kernel: subprocess.Popen[bytes], step: str) -> None:
        assert kernel.stdout is not None
        timer = threading.Timer(PATIENCE, kernel.kill)
        timer.start()
        try:
            for line in kernel.stdout:
                if line.decode().strip() == step:
                    return
        finally:
            timer.cancel()
        raise Left(f"the kernel never came to {step}: {kernel.communicate()[1].decode()}")

    # --- what is left -----------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """All processes that these kernels have started, wherever they belong by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == self.base:
                    found.append(process)
        return found

    def folders(self) -> list[Path]:
        return sorted(Path(self.base).glob("distsession-*"))  # torch has some of its own

    def check(self) -> None:
        """No process is left, thus no port, and no folder that others could read."""
        deadline = time.monotonic() + LIMIT
        while left := self.processes():
            if time.monotonic() > deadline:
                raise Left(f"{len(left)} processes are left: {[told(p) for p in left]}")
            time.sleep(0.05)
        for folder in self.folders():
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode != 0o700:
                raise Left(f"{folder} has mode {mode:o}: {sorted(folder.rglob('*'))}")

    def check_sweep(self) -> int:
        """The next start removes all that was left; gives how many folders that were."""
        left = self.folders()
        for folder in left:
            os.utime(folder, (0, 0))  # what is not complete is only removed when it is old
            for path in folder.iterdir():
                os.utime(path, (0, 0))
        code = "from distsession import Session\nSession(1).close()"
        kernel = self._start(code)
        _, error = kernel.communicate(timeout=PATIENCE)
        if kernel.returncode:
            raise Left(f"the next start failed: {error.decode()}")
        self.check()
        if stay := self.folders():
            raise Left(f"the next start has left {[(f, sorted(f.rglob('*'))) for f in stay]}")
        return len(left)

    def go(self, kills: int) -> int:
        """Kill so many kernels; gives how many folders the starts after them have removed."""
        try:
            swept = 0
            for number in range(kills):
                self.kill()
                if number % 10 == 9:
                    swept += self.check_sweep()
            return swept + self.check_sweep()
        except Left as error:
            raise Left(
                f"seed {self.seed}, kill {len(self.done)}: {self.done[-1]}: {error}"
            ) from None


def is_agent(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "engine.agent" in " ".join(process.cmdline())
    return False


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def told(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        line = " ".join(process.cmdline())[-120:]
        return f"{process.pid} (of {process.ppid()}, {process.status()}) {line}"
    return str(process.pid)


def main() -> int:
    """Run it for long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    kills = Kills(arguments.seed)
    began = time.monotonic()
    try:
        swept = kills.go(arguments.kills)
    except Left as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        kills.close()
    print(
        f"seed {arguments.seed}: {arguments.kills} kills in {time.monotonic() - began:.0f} s, "
        f"no process left, {swept} folders removed by the next start"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
