"""Where another thread is, and when it is not looked at."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import distsession
from distsession.engine import frames

ROOT = Path(distsession.__file__).parents[1]


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    """A thread that waits in ``wait_for_the_end``."""
    end = threading.Event()

    def wait_for_the_end() -> None:
        end.wait()

    thread = threading.Thread(target=wait_for_the_end)
    thread.start()
    yield thread
    end.set()
    thread.join()


def names(thread: int) -> list[str]:
    frame, found = frames.innermost(thread), []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_the_frames_of_a_thread_are_seen(waiting: threading.Thread) -> None:
    assert waiting.ident is not None
    assert "wait_for_the_end" in names(waiting.ident)


def test_a_thread_that_is_none_has_no_frame() -> None:
    assert frames.innermost(-1) is None


def test_frames_are_gone_through_to_the_outermost() -> None:
    found = [*frames.outward(sys._getframe())]
    assert found[0] is sys._getframe()
    assert found[1] is found[0].f_back
    assert found[-1].f_back is None


def test_what_is_no_frame_is_not_looked_into() -> None:
    assert [*frames.outward(threading.Condition())] == []
    assert [*frames.outward(None)] == []


COMPILES = """
import sys, threading, torch
from distsession.engine import frames

assert frames.compile_lock() is None  # which would be imported by a look
main, seen = threading.main_thread().ident, []

def look():
    thread = threading.Thread(target=lambda: seen.append(frames.innermost(main)))
    thread.start()
    thread.join()

def backend(graph, inputs):
    look()
    return graph.forward

look()
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
look()
print([frame is not None for frame in seen])
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_thread_that_compiles_is_not_looked_at() -> None:
    assert run(COMPILES) == "[True, False, True]"


FORKS = """
import os, sys, threading
import torch._dynamo.convert_frame as convert_frame
from distsession.engine import frames

looks, forked = threading.Event(), threading.Event()

def current_frames():
    looks.set()
    forked.wait()
    return {}

thread = threading.Thread(target=frames.innermost, args=[0])
real, sys._current_frames = sys._current_frames, current_frames
thread.start()
looks.wait()
pid = os.fork()
if pid == 0:
    os._exit(0 if convert_frame.compile_lock.acquire(timeout=10) else 1)
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), frames.compile_lock().acquire(timeout=10))
"""


def test_a_process_that_is_forked_in_the_midst_of_a_look_can_compile() -> None:
    assert run(FORKS) == "0 True"
