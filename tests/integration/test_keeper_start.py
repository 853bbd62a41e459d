"""A session over hosts whose keeper does not come up is told so, and does not wait for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession import Session
from distsession.cluster import kept_hosts
from distsession.errors import LaunchError, LaunchTimeoutError

pytestmark = pytest.mark.timeout(60)

WAITS = "sleep 3; test {agent}"
"""The command of a host that does not come, and ends by itself when its keeper is killed."""


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has the keeper that starts next end by a signal, so many seconds after its start."""
    timers = []

    def do(seconds: float, number: int = signal.SIGKILL) -> None:
        def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(*args, **kwargs)
            timer = threading.Timer(seconds, os.kill, (process.pid, number))
            timers.append(timer)
            timer.start()
            return process

        only_here = type("Subprocess", (), {**vars(subprocess), "Popen": staticmethod(start)})
        monkeypatch.setattr(kept_hosts, "subprocess", only_here)

    yield do
    for timer in timers:
        timer.join()


def started(folder: Path, **options: Any) -> Session:
    return Session(
        launcher="command", command=WAITS, ranks_per_host=[1], keep=60, name="dying",
        folder=str(folder), **options,
    )  # fmt: skip


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.6, 1.0, 2.0])
def test_a_keeper_that_is_killed_as_it_starts_fails_the_start(
    tmp_path: Path, killed_after: Any, seconds: float
) -> None:
    killed_after(seconds)
    began = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        started(tmp_path)
    assert time.monotonic() - began < seconds + 15
    assert "was killed by SIGKILL before the session had started" in str(caught.value)
    assert "session.restart" not in str(caught.value)


def test_what_a_keeper_wrote_that_cannot_start_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "print('y' * 9_000_000); raise SystemExit('no module named so')"
    monkeypatch.setattr(kept_hosts, "python_command", lambda module: [sys.executable, "-c", code])
    with pytest.raises(LaunchError, match="ended with exit code 1") as caught:
        started(tmp_path)
    assert "Its last lines:" in str(caught.value)
    assert "no module named so" in str(caught.value)
    assert len(str(caught.value)) < 4000


def test_a_keeper_that_is_stopped_as_it_starts_is_named(tmp_path: Path, killed_after: Any) -> None:
    killed_after(0.05, signal.SIGSTOP)
    with pytest.raises(LaunchError, match=r"is stopped by SIGSTOP .* `kill -CONT \d+`"):
        started(tmp_path)


def test_a_keeper_that_says_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time; time.sleep(60)"
    monkeypatch.setattr(kept_hosts, "python_command", lambda module: [sys.executable, "-c", code])
    monkeypatch.setattr(kept_hosts, "BEGIN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(kept_hosts, "CLOSE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(kept_hosts, "END_TIMEOUT_S", 0.5)
    with pytest.raises(LaunchTimeoutError, match="has not answered within 1 s"):
        started(tmp_path)
