"""Code that catches its interrupt, or does not see it: what is said of it, and how it is ended."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pytest

from distsession import RunInterrupt, Session
from distsession import session as session_module
from tests.until import LIMIT_S, Press, until, until_busy

from .conftest import Recorder
from .kernel import Notebook

WORK = """
import concurrent.futures, contextlib, hashlib, signal, time
number = 0
def work():
    global number
    print(number)
    number += 1
    time.sleep(0.05)
    str(number)  # an interrupt at the end of the sleep is raised here, and not between two rounds
"""
COUNTS_LOOPS = """
import contextlib, os
def loops():
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it may have ended since
            found += open(f"/proc/self/task/{task}/comm").read() == "gloo_tcp_loop\\n"
    return found
"""
CAUGHT = "its code caught the interrupt at line {}"
KINDS = {
    "except KeyboardInterrupt": (
        "while True:\n    try: work()\n    except KeyboardInterrupt:\n        pass",
        CAUGHT.format(3),
    ),
    "except BaseException": (
        "while True:\n    try:\n        work()\n    except BaseException as e:\n        kept = e",
        CAUGHT.format(4),
    ),
    "bare except": ("while True:\n    try: work()\n    except: pass", CAUGHT.format(3)),
    "suppress": (
        "while True:\n    with contextlib.suppress(BaseException):\n        work()",
        CAUGHT.format(2),
    ),
    "finally": (
        "def loop():\n    while True:\n        try: work()\n        finally: continue\nloop()",
        CAUGHT.format(4),
    ),
    "in a function": (
        "def f():\n    try: work()\n    except BaseException: return\nwhile True: f()",
        CAUGHT.format(3),
    ),
    "a handler of SIGINT": (
        "signal.signal(signal.SIGINT, lambda *_: None)\nwhile True: work()",
        "its code handles SIGINT itself, by <lambda> at line 1",
    ),
    "SIGINT ignored": (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: work()",
        "its code ignores SIGINT, by which it would be interrupted",
    ),
}

pytestmark = pytest.mark.timeout(240)


def press_stop() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def handler(session: Session) -> Iterator[None]:
    """That of SIGINT is put back."""
    session.execute("import signal\nours = signal.getsignal(signal.SIGINT)")
    yield
    session.interrupt(force=True)
    session.execute("signal.signal(signal.SIGINT, ours)")


def stop(session: Session, code: str, output: Recorder, label: str = "In[2]") -> str:
    """Stop code that prints numbers; gives what its caller is told."""
    begun = lambda: until(lambda: all(output.text(r).count("\n") > 1 for r in (0, 1)))  # noqa: E731
    with Press(session, press_stop, begun):  # noqa: SIM117
        with pytest.raises(RunInterrupt) as caught:
            session.execute(code, label=label)
    return str(caught.value)


def check_lines(output: Recorder) -> None:
    """No line is lost, and none is in two parts; one may have been printed twice."""
    for rank in (0, 1):
        lines = output.text(rank).splitlines()
        numbers = list(map(int, lines))
        assert numbers[0] == 0
        steps = [(before, after) for before, after in pairwise(numbers)]
        assert not [step for step in steps if step[1] - step[0] not in (0, 1)], numbers


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("kind", KINDS)
def test_code_that_goes_on_is_told_everywhere_and_ended(
    session: Session, output: Recorder, kind: str
) -> None:
    code, fate = KINDS[kind]
    session.execute(WORK, label="In[1]")
    pids = [info.pid for info in session.infos]
    error = stop(session, code, output)
    state = f"In[2] still runs on ranks 0-1, stopped once, {fate}."
    assert state in error
    assert f": running In[2], stopped once, {fate} (2 ranks, gloo)" in session.status()
    assert state in repr(session.diagnose())

    assert session.interrupt()
    until(lambda: f"stopped twice, {fate}" in session.status())
    until(lambda: output.text(0).count("\n") > 10)  # it goes on, and is shown

    with Press(session, press_stop, lambda: until(lambda: output.notices)):  # noqa: SIM117
        with pytest.raises(RunInterrupt, match="before it began") as caught:
            session.execute("surprise = 1")
    assert output.notices[0] == (
        f"This waits: In[2] still runs on ranks 0-1, stopped twice, {fate}. "
        "Stop interrupts it again."
    )
    assert f"In[2] still runs on ranks 0-1, stopped 3 times, {fate}" in str(caught.value)
    assert "%session interrupt --force" in str(caught.value)

    assert session.interrupt(force=True)
    assert ": idle (2 ranks, gloo)" in session.status()  # also while the group is connected anew
    assert [info.pid for info in session.infos] == pids
    assert session.evaluate("'surprise' in globals()") == {0: False, 1: False}
    assert session.evaluate("dist.get_world_size()") == {0: 2, 1: 2}
    check_lines(output)


def test_a_handler_that_goes_on_is_told(session: Session, output: Recorder) -> None:
    session.execute(WORK, label="In[1]")
    code = """
try:
    while True: work()
except KeyboardInterrupt:
    for _ in range(100): work()"""
    stop(session, code, output)
    assert "stopped once, its code is handling the interrupt at line 4" in session.status()
    assert session.interrupt()  # which its handler does not catch
    until(lambda: session.status().endswith(": idle (2 ranks, gloo)"))
    check_lines(output)


def test_a_second_interrupt_ends_a_wait_for_a_thread(session: Session, output: Recorder) -> None:
    """The first one is handled by the pool, which waits for its thread."""
    session.execute(WORK, label="In[1]")
    code = """
with concurrent.futures.ThreadPoolExecutor() as pool:
    def loop():
        while goes: work()
    pool.submit(loop).result()"""
    session.execute("goes = True")
    stop(session, code, output)
    assert "stopped once, its code is handling the interrupt at line 2" in session.status()
    assert session.interrupt()
    until(lambda: session.status().endswith(": idle (2 ranks, gloo)"))
    session.execute("goes = False\npool.shutdown()")


def test_ranks_in_c_code_are_replaced(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "FORCE_TIMEOUT_S", 1.0)
    output = Recorder()
    session = start(2, output=output)
    session.execute("import hashlib\nx = 1")
    pids = [info.pid for info in session.infos]
    with Press(session, press_stop), pytest.raises(RunInterrupt, match="does not react"):
        session[1].execute("hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)", label="In[2]")
    assert "running In[2], stopped once, which has had no effect yet" in session.status()
    assert session.interrupt(force=True)
    assert output.remarks == [
        "rank 1 could not be ended in C code, and has been replaced by a fresh process, without "
        "variables."
    ]
    assert session.infos[0].pid == pids[0]
    assert session.infos[1].pid != pids[1]
    assert session.evaluate("'x' in globals()") == {0: True, 1: False}


def test_what_was_swallowed_in_a_collective_holds_no_connections(session: Session) -> None:
    """Also while Python does not look for cycles: the threads of the old group end."""
    session.execute(COUNTS_LOOPS, label="In[1]")
    session.execute("import gc, time\ngc.collect()\ngc.disable()\ndist.barrier()")
    loops = "loops()"
    before = session.evaluate(loops)
    for call in (
        "dist.all_reduce(torch.ones(1), async_op=True).wait()",
        "dist.recv(torch.ones(1), 1)",
    ):
        code = f"if rank:\n    time.sleep(60)\ntry: {call}\nexcept BaseException: pass"
        with Press(session, session.interrupt), suppress(RunInterrupt):
            session.execute(code)
        session.execute("dist.barrier()")
    until(lambda: session.evaluate(loops) == before)
    session.execute("gc.enable()")


@pytest.mark.parametrize("call", ["event.set()", "print(end='')"])
def test_what_is_forced_to_end_leaves_no_lock_taken(session: Session, call: str) -> None:
    """Whoever takes one next would wait for ever, as ranks do at the begin of a run."""
    session.execute("import threading\nevent = threading.Event()")
    pids = [info.pid for info in session.infos]
    code = f"while True:\n    try: {call}\n    except BaseException: pass"
    for _ in range(8):
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(session.execute, code)
            until_busy(session)
            session.interrupt(force=True)
            assert isinstance(run.exception(LIMIT_S), RunInterrupt)
        session.execute(f"{call}\ndist.barrier()", timeout=LIMIT_S)
    assert [info.pid for info in session.infos] == pids


# --- in a notebook --------------------------------------------------------------------------------


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    made.run("%load_ext distsession")
    assert not made.run("%session start 2", timeout=100).error
    yield made
    made.close()


def late_texts(notebook: Notebook, cell: str, end: str) -> list[str]:
    """What a cell shows after it has ended, up to this text."""
    texts: list[str] = []
    deadline = time.monotonic() + LIMIT_S
    while not any(end in text for text in texts):
        assert time.monotonic() < deadline, texts
        try:
            message = notebook.client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") == cell and "data" in message["content"]:
            texts.append(str(message["content"]["data"].get("text/plain", "")))
    return texts


def test_a_notebook_says_so_in_the_next_cell_and_shows_the_rest_in_its_own(
    notebook: Notebook,
) -> None:
    code = """%%distributed
import time
for i in range(400):
    try:
        time.sleep(0.05); print("line", i)
    except KeyboardInterrupt: pass"""
    cell = notebook.client.execute(code)
    shown = notebook.collect(cell, stop_at=["line 3"])
    assert shown.ename == "RunInterrupt"
    state = "In[3] still runs on ranks 0-1, stopped {}, its code caught the interrupt at line 6"
    assert state.format("once") in shown.error
    caught = "its code caught the interrupt at line 6"
    assert f": running In[3], stopped once, {caught} (2" in notebook.run("%session").plain
    assert state.format("once") in notebook.run("%session diagnose").plain
    said = notebook.run("%session interrupt").plain
    assert state.format("twice") in said
    assert "%session interrupt --force" in said
    following = notebook.client.execute("%%distributed\nprint('next')")
    shown = notebook.collect(following, stop_at=["This waits: In[3]", "Stop interrupts it again."])
    assert state.format("3 times") in shown.error
    assert "line" not in re.sub("at line 6|In.3. line", "", shown.transcript)
    assert notebook.run("%session interrupt --force").plain == "interrupted; what ran has ended."
    assert re.fullmatch(r"session \d+: idle \(2 ranks, gloo\)", notebook.run("%session").plain)
    assert notebook.run("%%distributed\nprint('next')").plain == "[ranks 0-1] next"


def test_what_comes_late_is_shown_in_its_own_cell(notebook: Notebook) -> None:
    code = """%%distributed
import time
for i in range(60):
    try:
        time.sleep(0.05); print("line", i)
    except KeyboardInterrupt: pass
print("the end")"""
    cell = notebook.client.execute(code)
    assert notebook.collect(cell, stop_at=["line 3"]).error
    texts = late_texts(notebook, cell, "the end")
    lines = {int(number) for number in re.findall(r"line (\d+)", texts[-1])}
    assert len(lines) >= 58, texts[-1]  # an interrupt may come between two lines
    assert notebook.run("%distributed i").plain == "[ranks 0-1] 59"
