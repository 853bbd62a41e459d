"""How many processes and threads may run here, and which limit was met where one is refused.

The system refuses with one error for several limits: that of a control group, that of a user, those
of the whole system, and the memory maps that a process may have. So the limits are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from distsession.engine.cgroups import group_folders, read_lines, read_value

__all__ = ["MET", "RANK_THREADS", "refusal", "refused", "room_problem"]

MET = "No further process or thread could be started"
"""How what is said of a limit begins that was met."""
RANK_THREADS = 7
"""How many threads a rank has beside those that compute."""

COUNTED_BELOW = 10_000
"""Of a user with so much more left than is wanted, the processes are not counted."""
NEAR = 64
"""A limit with so much left, or less, can be the one that was met a moment ago."""

_FEWER = "start fewer ranks, or give each fewer threads (threads=)"
_GROUP_REMEDY = (
    "Raise it (docker run --pids-limit, TasksMax= of systemd, podPidsLimit of Kubernetes), or "
    f"{_FEWER}."
)
_USER_REMEDY = (
    "Raise it in the shell that starts Python or Jupyter (ulimit -u), end processes of this user, "
    f"or {_FEWER}."
)
_SYSTEM_REMEDY = f"{_FEWER[0].upper()}{_FEWER[1:]}; root raises it with sysctl."

_REFUSED = re.compile(
    r"can't start new thread|src/thread\.cpp|Thread creation failed|pthread_create failed"
)
"""What only somebody says to whom the system has refused a thread: Python, zmq, OpenMP, BLAS."""
_SIGNS = (os.strerror(errno.EAGAIN), "terminate called without an active exception")
"""What others say, torch's threads the latter; it may have another cause."""
_RLIMIT_EXEMPT = 1 << 21 | 1 << 24
"""The capabilities to which the limit of a user does not apply (``CAP_SYS_ADMIN``, ``..RESOURCE``).
"""


@dataclass(frozen=True)
class _Limit:
    """One of them.

    Attributes:
        most: How many there may be.
        used: How many there are.
        whose: As the subject of a sentence.
        name: As who raises it calls it.
        remedy: What to do.
        has_refused: It is known to have refused some.
    """

    most: int
    used: int
    whose: str
    name: str
    remedy: str
    has_refused: bool = False

    @property
    def left(self) -> int:
        return self.most - self.used

    @property
    def text(self) -> str:
        return (
            f"{self.whose} may have {self.most:,} processes and threads ({self.name}), of which "
            f"{max(0, self.used):,} are in use. {self.remedy}"
        )


def room_problem(wanted: int, what: str, each: int = 0) -> str:
    """Why there is no room for some processes and threads; empty if there is, or nobody knows.

    Args:
        wanted: How many.
        what: Takes them, at the beginning of a sentence.
        each: How many threads a single process of them has.
    """
    short = [limit for limit in _limits(wanted) if limit.left < wanted]
    if each > (most := _maps() // 2):
        name = f"vm.max_map_count = {2 * most}"
        short.append(_Limit(most, 0, "a single process", name, _SYSTEM_REMEDY))
    if not short:
        return ""
    limit = min(short, key=lambda limit: limit.left)
    return f"{what} about {wanted:,} processes and threads, and {limit.text}"


def refusal(text: str) -> str:
    """The limit that was met, where a text tells of a process or thread that was refused.

    Args:
        text: Of an error, or the last lines of a process.

    Returns:
        A sentence or two, with what to do; empty where the text tells of no such thing.
    """
    if _REFUSED.search(text) is not None:
        return refused()
    if any(sign in text for sign in _SIGNS) and (limit := _nearest()) is not None:
        return _met_text(limit)
    return ""


def refused() -> str:
    """The same where it is certain that one was refused."""
    limit = _nearest()
    if limit is not None:
        return _met_text(limit)
    return (
        "The system has refused to start a process or a thread: see `ulimit -u`, the limit of its "
        f"control group (pids.max) and `free`. {_FEWER[0].upper()}{_FEWER[1:]}."
    )


def _met_text(limit: _Limit) -> str:
    return f"{MET}: {limit.text}"


def _nearest() -> _Limit | None:
    """The limit that was met a moment ago, as far as it can be told."""
    near = [each for each in _limits(COUNTED_BELOW) if each.has_refused or each.left <= NEAR]
    return min(near, key=lambda limit: (not limit.has_refused, limit.left), default=None)


def _limits(wanted: int) -> Iterator[_Limit]:
    for folder in group_folders(os.getpid(), "pids"):
        most, used = (_number(os.path.join(folder, f"pids.{each}")) for each in ("max", "current"))
        if most is not None and used is not None:
            has_refused = read_value(os.path.join(folder, "pids.events"), "max", 0) > 0
            whose, name = "the control group of the session", f"pids.max in {folder}"
            yield _Limit(most, used, whose, name, _GROUP_REMEDY, has_refused)
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and most < wanted + COUNTED_BELOW and not _is_exempt():
        yield _Limit(most, _of_user(), "this user", "ulimit -u", _USER_REMEDY)
    used = _of_system()
    for name in ("kernel.pid_max", "kernel.threads-max"):
        most = _number(f"/proc/sys/{name.replace('.', '/')}")
        if most is not None:
            yield _Limit(most, used, "this system", name, _SYSTEM_REMEDY)


def _number(path: str) -> int | None:
    """What stands in a file; None where that is no number, such as ``max``."""
    for line in read_lines(path)[:1]:
        if line.isdigit():
            return int(line)
    return None


def _maps() -> int:
    return _number("/proc/sys/vm/max_map_count") or 1 << 30


def _is_exempt() -> bool:
    for line in read_lines("/proc/self/status"):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _RLIMIT_EXEMPT)
    return os.geteuid() == 0


def _of_user() -> int:
    """How many threads the processes of this user have."""
    count, user = 0, os.geteuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            if os.stat(f"/proc/{name}").st_uid == user:
                count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count


def _of_system() -> int:
    for line in read_lines("/proc/loadavg"):  # 0.20 0.18 0.12 1/80 11206
        with contextlib.suppress(IndexError, ValueError):
            return int(line.split()[3].partition("/")[2])
    return 0
