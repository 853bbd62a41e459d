"""A rank that has nothing to do sleeps until something comes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distsession import RunError, RunInterrupt, Session
from distsession.engine.capture import (
    IDLE_INTERVAL_S,
    PUMP_INTERVAL_S,
    QUIET_INTERVAL_S,
    REST_AFTER_S,
)
from tests.backends import Backend
from tests.integration.conftest import Recorder
from tests.until import until

LOOK_S = 4.0
THREADS = "{t.name: t.native_id for t in __import__('threading').enumerate()}"


def sleeps(pid: int, thread: int) -> int:
    """How often a thread has gone to sleep."""
    status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_the_threads_of_idle_ranks_sleep(session: Session) -> None:
    session.execute("dist.barrier()")
    found = session.evaluate(THREADS)
    threads = {
        (info.pid, name): info.pid if name == "MainThread" else found[info.rank][name]
        for info in session.infos
        for name in ("MainThread", "distsession-control", "distsession-output")
    }
    time.sleep(2 * REST_AFTER_S)
    before = {key: sleeps(key[0], thread) for key, thread in threads.items()}
    time.sleep(LOOK_S)
    woken = {key: sleeps(key[0], thread) - before[key] for key, thread in threads.items()}
    for (_, name), count in woken.items():
        # A look itself may take the thread to sleep more than once.
        allowed = 3 * LOOK_S / IDLE_INTERVAL_S if name == "distsession-output" else 0
        assert count <= allowed < LOOK_S / PUMP_INTERVAL_S, woken


def test_a_run_that_puts_nothing_out_is_looked_at_seldom(session: Session) -> None:
    thread = session.evaluate(THREADS)[0]["distsession-output"]
    future = session.submit(time.sleep, LOOK_S + 2)
    time.sleep(1)
    before = sleeps(session.infos[0].pid, thread)
    time.sleep(LOOK_S)
    count = sleeps(session.infos[0].pid, thread) - before
    assert count <= 3 * LOOK_S / QUIET_INTERVAL_S < LOOK_S / PUMP_INTERVAL_S
    future.result(60)


def test_what_a_quiet_run_prints_is_shown_while_it_runs(session: Session, output: Recorder) -> None:
    code = "import os, time\ntime.sleep(1)\nprint('by Python')\nos.write(1, b'by C code\\n')\n"
    future = session.submit(exec, f"{code}time.sleep(600)")
    texts = ("by Python", "by C code")
    until(lambda: all(output.text(rank).count(each) for rank in (0, 1) for each in texts))
    session.interrupt()
    with pytest.raises(RunInterrupt):
        future.result(60)


def test_what_is_put_out_at_rest_is_shown_all_the_same(session: Session, output: Recorder) -> None:
    session.execute(
        "import os, threading, time\n"
        f"def later(write):\n    time.sleep({2 * REST_AFTER_S})\n    write()\n"
        "writes = [lambda: print('by Python'), lambda: os.write(1, b'by C code\\n')]\n"
        "for write in writes: threading.Thread(target=later, args=[write]).start()"
    )
    seen: list[str] = []

    def is_shown() -> bool:
        session.execute("pass")
        seen.append(output.text(0) + output.text(1))
        return all(seen[-1].count(text) == 2 for text in ("by Python", "by C code"))

    until(is_shown)


def test_a_limit_holds_that_begins_when_all_is_at_rest(backend: Backend) -> None:
    """The control thread, which keeps it on a device, has nothing to wait for before."""
    with backend.session(2, output=Recorder(), threads=1, timeout=1.0) as session:
        session.execute("x = torch.ones(2); dist.all_reduce(x); print(x.tolist())")
        for _ in range(2):
            time.sleep(2 * REST_AFTER_S)
            with pytest.raises(RunError) as caught:
                session.execute(
                    "import time\nif rank: time.sleep(5)\ndist.all_reduce(x); print(x.tolist())"
                )
            assert "1 s" in str(caught.value)
