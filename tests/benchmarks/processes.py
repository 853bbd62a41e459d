"""The processes and folders that a run of the benchmarks makes, and their end.

The run becomes the parent of every orphan among its descendants, so whatever a session or a peer
leaves behind is still found as a descendant, however it was detached, and is ended by its pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
START_TIMEOUT = 180.0
"""Seconds that a program may take from its start to its end."""


@contextlib.contextmanager
def own_world() -> Iterator[Path]:
    """A folder for everything that this run writes, and the end of all that it started.

    Raises:
        OSError: The kernel cannot hand orphans to us.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become the parent of orphans")
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))  # short: it holds unix sockets
    names = {
        **{"TMPDIR": "", "IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "jupyter"},
        # Users have compiled modules. Where this is forbidden, importing takes twice as long.
        "PYTHONDONTWRITEBYTECODE": None,
    }
    # Programs and agents import this checkout, installed or not.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    before = {name: os.environ.get(name) for name in (*names, "PYTHONPATH")}
    for name, part in names.items():
        if part is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(folder / part)
    os.environ["PYTHONPATH"] = path
    tempfile.tempdir = None
    try:
        yield folder
    finally:
        end_leftovers(0.0)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)


def _descendants(keep: Collection[int]) -> list[psutil.Process]:
    """Those that still run; the dead ones of which we are the parent are reaped.

    What one that is kept has started belongs to it, whenever that was.
    """
    living, kept = [], set(keep)
    for process in psutil.Process().children(recursive=True):  # each behind its parent
        with contextlib.suppress(psutil.Error):
            parent = process.ppid()
            if process.status() == psutil.STATUS_ZOMBIE:
                if parent == os.getpid():
                    process.wait(0)
            elif process.pid in kept or parent in kept:
                kept.add(process.pid)
            # Python's own helper for shared memory ends with the process that it belongs to.
            elif "resource_tracker" not in " ".join(process.cmdline()):
                living.append(process)
    return living


def end_leftovers(grace: float, keep: Collection[int] = ()) -> list[str]:
    """End what is still there of that which should be gone.

    Args:
        grace: Seconds that they have to end by themselves.
        keep: Pids of those that are still wanted.

    Returns:
        The command lines of those that had to be ended.
    """
    deadline = time.monotonic() + grace
    while (left := _descendants(keep)) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(process.cmdline())[:200])
            process.kill()
    psutil.wait_procs(left, timeout=5.0)
    return names


@dataclass(frozen=True)
class Snapshot:
    """What there is before something starts, and stays when that has ended."""

    pids: frozenset[int]
    folders: frozenset[Path]


def session_folders() -> set[Path]:
    """The folders of sessions of this run."""
    return set(Path(tempfile.gettempdir()).glob("distsession-*"))


def snapshot() -> Snapshot:
    """All that runs below us, and all folders of sessions."""
    pids = frozenset(process.pid for process in _descendants(()))
    return Snapshot(pids, frozenset(session_folders()))


def time_program(
    command: Sequence[str], *, ready: int = 0, env: dict[str, str] | None = None
) -> float:
    """Seconds from the start of a program until it says that it is ready.

    Args:
        command: What to start.
        ready: How many lines ``READY <time.time()>`` it prints; the last one counts. With 0 it is
            the end of the program that counts.
        env: Added to the environment.

    Raises:
        RuntimeError: It failed; the message ends with its last line.
        TimeoutError: It did not end in time.
    """
    began = time.time()
    out = run_program(command, env=env)
    if not ready:
        return time.time() - began
    times = [float(line.split()[1]) for line in out.splitlines() if line.startswith("READY ")]
    if len(times) != ready:
        raise RuntimeError(f"{len(times)} of {ready} said that they are ready")
    return max(times) - began


def run_program(command: Sequence[str], *, env: dict[str, str] | None = None) -> str:
    """What a program prints, once it has ended; what it has started may go on.

    Raises:
        RuntimeError: It failed; the message ends with its last line.
        TimeoutError: It did not end in time.
    """
    # Files rather than pipes: children that outlive the program would hold those open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            env={**os.environ, **(env or {})},
        )
        try:
            process.wait(START_TIMEOUT)
        except subprocess.TimeoutExpired:
            end_tree(process)
            raise TimeoutError(f"did not end within {START_TIMEOUT:g} s") from None
        except BaseException:
            end_tree(process)
            raise
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {err.read().strip()[-2000:]}")
        return out.read()


def end_tree(process: subprocess.Popen[str]) -> None:
    """End a process that we started, and what it started."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def program(name: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """The command line of one of our programs."""
    return [python, str(PROGRAMS / f"{name}.py"), *map(str, arguments)]
