"""The time of day is set while sessions run: forward, back, and in some processes only.

What cannot be set, the time since the system was started, is left as it is.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distsession import KeptSessionError, Session
from distsession.cluster.end_kept import end_session
from distsession.cluster.kept import find_kept
from tests.until import until

pytestmark = pytest.mark.timeout(120)

DAY_S = 24 * 3600
LEAVES = """
import os, sys
from distsession import Session
session = Session(2, name=sys.argv[1], keep=float(sys.argv[2]))
session.submit(lambda: __import__("time").sleep(60))
os._exit(0)
"""
WORKS = """
import struct, sys, time
from distsession import Session

def set_clock(days):
    with open(sys.argv[1], "r+b") as file:
        file.write(struct.pack("l", days * 24 * 3600))

def work(rank):
    for _ in range(10):
        time.sleep(0.1)
    return time.time()

with Session(2, timeout=60) as session:
    for days in 1, -1, 0:
        before = time.time()
        future = session.submit(work, 0)
        set_clock(days)
        times = future.result(timeout=60)
        session.execute("t = torch.ones(1)\\ndist.all_reduce(t)")
        assert session.evaluate("int(t)") == {0: 2, 1: 2}
        print(days, round((times[0] - before) / 3600))
    set_clock(5)
    session.restart()
    assert session.evaluate("rank") == {0: 0, 1: 1}
"""


SHIM = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY | O_CLOEXEC);
    offset = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int result = syscall(SYS_clock_gettime, id, at);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) && offset)
        at->tv_sec += *offset;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
"""Lets a process see another time of day, which a file has. libfaketime does not let it sleep."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no compiler to build a clock with")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(SHIM)
    built = str(folder / "clock.so")
    command = [compiler, "-shared", "-fPIC", "-o", built, str(folder / "clock.c")]
    subprocess.run(command, check=True)
    return built


class Clock:
    """The time of day that some processes see."""

    def __init__(self, path: Path, shim: str):
        self.path = path
        path.write_bytes(struct.pack("l", 0))
        self.environ = {**os.environ, "LD_PRELOAD": shim, "CLOCK_OFFSET": str(path)}

    def set(self, days: int) -> None:
        with self.path.open("r+b") as file:
            file.write(struct.pack("l", days * DAY_S))

    def run(self, code: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=self.environ, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def clock(tmp_path: Path, shim: str) -> Clock:
    return Clock(tmp_path / "clock", shim)


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Of sessions that a test leaves."""
    left: list[str] = []
    yield left
    for name in left:
        end_session(find_kept(name), "the test is over")


def processes_of(name: str) -> list[psutil.Process]:
    agents = [psutil.Process(pid) for pid in find_kept(name).agents]
    return [*agents, *(child for agent in agents for child in agent.children(recursive=True))]


@pytest.mark.parametrize("days", [2, -2])
def test_a_clock_that_is_set_does_not_end_a_lease(
    clock: Clock, names: list[str], days: int
) -> None:
    clock.run(LEAVES, "set", "600")
    names.append("set")
    until(lambda: find_kept("set").lease_left_s, "the lease's begin")
    clock.set(days)
    time.sleep(1.5)  # the agent looks every half second
    kept = find_kept("set")
    assert kept.is_alive
    assert 0 < (kept.lease_left_s or 0) <= 600
    session = Session.attach("set")
    assert "of the earlier kernel, 0:" in session.status()
    session.detach()


@pytest.mark.parametrize("days", [2, -2])
def test_a_clock_that_is_set_does_not_make_a_lease_longer(clock: Clock, days: int) -> None:
    clock.run(LEAVES, "over", "3")
    processes, folder = processes_of("over"), find_kept("over").folder
    clock.set(days)
    until(lambda: not any(process.is_running() for process in processes), "the lease's end")
    until(lambda: not os.path.exists(folder), "the folder's end")
    with pytest.raises(KeptSessionError, match=r"ended at .*: nobody had attached for 3s"):
        find_kept("over")


def test_a_session_of_a_process_with_another_time_is_had_by_others(
    clock: Clock, names: list[str]
) -> None:
    clock.set(1)
    clock.run(LEAVES, "skewed", "600")
    names.append("skewed")
    until(lambda: find_kept("skewed").lease_left_s, "the lease's begin")
    assert 0 < (find_kept("skewed").lease_left_s or 0) <= 600
    session = Session.attach("skewed")
    assert "of the earlier kernel, 0:" in session.status()
    session.restart()
    assert session.evaluate("rank") == {0: 0, 1: 1}
    session.detach()


def test_runs_and_restarts_go_on_while_the_clock_is_set(clock: Clock) -> None:
    said = clock.run(WORKS, str(clock.path))
    assert said.splitlines() == ["1 24", "-1 -48", "0 24"]
