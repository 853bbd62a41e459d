"""Where another thread is, and when it is not looked at."""

from __future__ import annotations

import gc
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


def test_a_thread_that_has_no_frame_has_no_callers() -> None:
    assert frames.outward(None) == []


COLLECTS = """
import gc, sys, threading, time
from distsession.engine import frames

def generate(depth):
    if depth:
        yield from generate(depth - 1)
    else:
        time.sleep(0.00005)
    yield 1

def run():
    list(generate(6))
    taken = [bytes(n) for n in range(100, 420, 4) for _ in range(8)]  # memory of what is over
    time.sleep(0.0001)

def look():
    while time.monotonic() < end:
        looked = frames.outward(frames.innermost(main))
        names.extend(each.f_code.co_name for each in looked)
        assert gc.isenabled()
        del names[:-10_000], looked

# A collection begins with every few objects, and lets the other thread go on, as finalizers may.
gc.callbacks.append(lambda phase, info: threading.get_ident() != main and time.sleep(0.0002))
gc.set_threshold(4, 1000, 1000)
main, names, end = threading.main_thread().ident, [], time.monotonic() + 1
thread = threading.Thread(target=look)
thread.start()
while thread.is_alive():
    run()
print("generate" in names, gc.isenabled())
"""


def test_garbage_that_is_collected_meanwhile_does_not_end_the_process() -> None:
    assert run(COLLECTS) == "True True"


def test_collection_stays_off_where_it_is() -> None:
    gc.disable()
    try:
        frames.outward(frames.innermost(threading.get_ident()))
        assert not gc.isenabled()
    finally:
        gc.enable()


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


COLLECTS_IN_CHILD = """
import gc, os
from distsession.engine import frames

with frames.without_gc():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.isenabled() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), gc.isenabled())
"""


def test_a_process_that_is_forked_in_the_midst_of_a_look_collects_garbage() -> None:
    assert run(COLLECTS_IN_CHILD) == "0 True"


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
