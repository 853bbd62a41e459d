"""Another user of this machine, for tests: only root can become one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["NOBODY", "as_stranger", "from_another_user", "stranger"]

NOBODY = 65534
"""The number of another user."""

from_another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user"
)


def as_stranger(ask: Callable[[], Any], *, within: float = 60.0) -> Any:
    """What another user of this machine finds; it is asked in a process of its own."""
    with stranger(ask, within=within) as answer:
        return answer()


@contextlib.contextmanager
def stranger(
    ask: Callable[[], Any], *, within: float = 60.0, first: Callable[[], Any] | None = None
) -> Iterator[Callable[[], Any]]:
    """The same, while this process goes on.

    Args:
        ask: What it does; its value can be written as JSON.
        within: Seconds after which it is ended.
        first: What it does before; this waits for it.

    Yields:
        What waits for the value.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.closerange(3, writing)
            os.closerange(writing + 1, 4096)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            signal.alarm(int(within))
            if first is not None:
                first()
            os.write(writing, b"\n")
            os.write(writing, json.dumps(ask()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.readline() == "\n", "the stranger has not begun"

        def answer() -> Any:
            said = pipe.read()
            assert said, "the stranger did not come to an end"
            return json.loads(said)

        try:
            yield answer
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
