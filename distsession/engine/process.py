"""What a freshly forked process does to stand on its own."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
    "KeptBackFinalizers",
    "agent_environment",
    "die_with_parent",
    "exit_after",
    "forget_inherited_finalizers",
    "forget_kept_back_finalizers",
    "interrupt_children",
    "module_command",
    "redirect_standard_streams",
    "signal_when_parent_ends",
    "started_at",
]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_TICKS = os.sysconf("SC_CLK_TCK")


def module_command(module: str, python: str = "") -> list[str]:
    """The command that runs ``main()`` of one of our modules in a process of its own.

    The package may have been found by a ``sys.path`` that only this process has.

    Args:
        module: Its name.
        python: Default: the one that runs here.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
    return [python or sys.executable, "-c", code]


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an agent is started with, where this is the environment."""
    return {
        **environ,
        # One thread only: a child forked from a process with a thread pool hangs in it.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Counting GPUs must not initialise CUDA.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel (Linux's) kill this process when its parent ends, however that ends.

    Args:
        parent: Its pid. If it is gone already, this process ends at once.
    """
    signal_when_parent_ends(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def exit_after() -> Iterator[None]:
    """End a forked child here: it must never return into its parent's stack."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def signal_when_parent_ends(number: int) -> None:
    """Have the kernel (Linux's) send this process a signal when its parent ends.

    It comes as well when only the thread ends that started this process, so a handler has to look.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            _libc().prctl(_PR_SET_PDEATHSIG, number)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def started_at(pid: int) -> int:
    """When a process was started, in ticks since the system was; 0 where that is not known."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat") as stat:
        # Behind the name, which is in parentheses and may hold anything.
        fields = stat.read().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0


def redirect_standard_streams(out_path: str, err_path: str) -> None:
    """Point descriptors 0, 1 and 2 at nothing and at two log files.

    Regular files, because a write to one never blocks: whatever holds the interpreter's lock, a C
    library that prints cannot wait for the thread of ours that would have to read a pipe.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    targets = [
        (os.open(os.devnull, os.O_RDONLY), 0),
        (os.open(out_path, flags, 0o600), 1),
        (os.open(err_path, flags, 0o600), 2),
    ]
    for descriptor, number in targets:
        os.dup2(descriptor, number)
        os.close(descriptor)


def forget_inherited_finalizers() -> None:
    """Leave the finalizers of the parent's objects to the parent.

    torch alone has over a hundred, which take a forked process 70 ms to run when it ends.
    """
    for finalizer in list(_finalizers()):
        finalizer.atexit = False


class KeptBackFinalizers:
    """Leaves the finalizers of this process to it: those that it forks need not forget them.

    What they would write to is in pages that each of them would have to copy.
    """

    def __init__(self) -> None:
        self._last: weakref.finalize[..., Any] | None = None
        self._kept_back: list[weakref.finalize[..., Any]] = []

    def keep_back(self) -> None:
        """Before a fork: none that there is by now runs at the end of a process."""
        found = _finalizers()
        last = next(reversed(found), None)
        if last is self._last:  # none is new; to look at each would write to it
            return
        self._last = last
        for finalizer in list(found):
            if finalizer.atexit:
                finalizer.atexit = False
                self._kept_back.append(finalizer)

    def give_back(self) -> None:
        """At the end of this process: here they run as ever."""
        for finalizer in self._kept_back:
            finalizer.atexit = True
        self._kept_back.clear()


def forget_kept_back_finalizers() -> None:
    """In a process that was forked after :meth:`~KeptBackFinalizers.keep_back`, as it begins.

    Else Python would look at each of them at its end.
    """
    global _last_inherited
    _last_inherited = next(reversed(_finalizers()), None)
    _run_no_finalizers()


def pass_over_inherited_finalizers() -> None:
    """At the end of that process: its own first finalizer has had Python look at all once more."""
    for finalizer in reversed(_finalizers()):
        if finalizer is _last_inherited:
            break
        if finalizer.atexit:
            return
    _run_no_finalizers()


def _run_no_finalizers() -> None:
    if getattr(weakref.finalize, "_registered_with_atexit", False):
        atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


_last_inherited: weakref.finalize[..., Any] | None = None


def _finalizers() -> dict[weakref.finalize[..., Any], Any]:
    """In the order in which they were made."""
    return getattr(weakref.finalize, "_registry", {})


def interrupt_children(seconds: float) -> None:
    """Send SIGINT to the processes of our group that were started within the last seconds.

    Ctrl-C in a terminal reaches them too; but those that were there before, such as a server that
    an earlier cell has started, are left alone.
    """
    if not os.path.exists("/proc/self/stat"):
        return
    since = (time.clock_gettime(time.CLOCK_BOOTTIME) - seconds) * _TICKS - 1
    me, group = os.getpid(), os.getpgrp()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat") as stat:
                # Behind the name, which is in parentheses and may hold anything.
                fields = stat.read().rpartition(")")[2].split()
            if pid != me and int(fields[2]) == group and int(fields[19]) >= since:
                os.kill(pid, signal.SIGINT)
