"""Whether this process may open as many files and sockets as something takes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from distsession.engine import process_limit
from distsession.errors import LaunchError

__all__ = ["check_room", "with_remedy"]


def check_room(here: int, what: str, elsewhere: int = 0) -> None:
    """Refuse what would run out of descriptors half-way, where zmq may end the whole process.

    Args:
        here: How many it takes in this process.
        what: It, at the beginning of a sentence.
        elsewhere: How many it takes in a process that it starts, which may go up to the hard limit.

    Raises:
        LaunchError: There are not as many left.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = 0
    with contextlib.suppress(OSError):  # there is no /proc
        used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + here > limit:
        raise LaunchError(
            f"{what} takes about {here} open files and sockets in this process, which has {used} "
            f"and may have {limit}. {_remedy(used + here)}"
        )
    if most != resource.RLIM_INFINITY and elsewhere > most:
        raise LaunchError(
            f"{what} takes a process with about {elsewhere} open files and sockets, and a process "
            f"may have {most}. {_remedy(elsewhere)}"
        )


def with_remedy(text: str) -> str:
    """An error's text; with what to do if it says that a limit was met."""
    if f"[Errno {errno.EAGAIN}]" in text and process_limit.MET not in text:
        return f"{text.rstrip('.')}. {process_limit.refusal(text)}".rstrip()
    if os.strerror(errno.EMFILE) not in text:
        return text
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"{text.rstrip('.')} (a process may have {limit}). {_remedy(limit)}"


def _remedy(wanted: int) -> str:
    enough = max(1024, 2 * wanted)
    return f"Raise the limit in the shell that starts Python or Jupyter: ulimit -n {enough}."
