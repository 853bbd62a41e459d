"""Handlers of signals that user code sets: what they raise never ends a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distsession import RunError, RunInterrupt, Session
from tests.until import Press, until

LOADER = """
import torch.utils.data
loader = torch.utils.data.DataLoader([0, 1], num_workers=2, persistent_workers=True)
batches = iter(loader)
both = [next(batches), next(batches)]  # from here on no worker holds a lock of the queue
kept = 5
"""
WORKERS = "[w.pid for w in batches._workers]"
HANDLER = """
import signal
def on_signal(number, frame):
    raise TimeoutError("it took too long")
before = signal.signal(signal.{name}, on_signal)
kept = 5
"""


def is_dead(pid: int) -> bool:
    """Whether all threads of a process have ended; its parent is told of no death before that."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            is_zombie = file.read().rpartition(")")[2].split()[0] == "Z"
        return is_zombie and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return True


def test_a_loaders_worker_that_dies_while_the_rank_is_idle_is_told_with_the_next_cell(
    session: Session, output: Any
) -> None:
    session.execute(LOADER)
    before = session[1].evaluate("__import__('os').getpid()")[1]
    pid = session[1].evaluate(WORKERS)[1][0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_dead(pid))

    def is_told() -> bool:
        session.pull("kept")  # no run: the rank may hear of the death now, but tells it later
        assert dict(session.evaluate("kept")) == {0: 5, 1: 5}
        return bool(output.text(1, "stderr"))

    until(is_told)
    told = output.text(1, "stderr")
    assert f"DataLoader worker (pid {pid}) is killed by signal: Killed" in told
    assert told.startswith("while no code of yours ran here: the handler of SIGCHLD raised")
    assert not output.text(0, "stderr")
    output.clear()
    assert session[1].evaluate("__import__('os').getpid()")[1] == before
    assert not output.text(1, "stderr")
    session.execute("del batches, loader")


def test_a_loaders_worker_that_dies_in_the_midst_of_a_cell_is_that_cells_error(
    session: Session,
) -> None:
    session.execute(LOADER)
    with pytest.raises(RunError, match="DataLoader worker") as caught:
        session.execute(
            "import os, signal\n"
            "if rank == 1:\n"
            "    os.kill(batches._workers[0].pid, signal.SIGKILL)\n"
            "    while True:\n"
            "        signal.pause()\n"
            "dist.barrier()"
        )
    assert next(iter(caught.value.by_rank)) == 1
    assert dict(session.evaluate("kept")) == {0: 5, 1: 5}
    session.execute("del batches, loader")


@pytest.mark.parametrize("name", ["SIGALRM", "SIGUSR1"])
def test_a_handler_that_raises_while_the_rank_is_idle_is_told_once(
    session: Session, output: Any, name: str
) -> None:
    session.execute(HANDLER.format(name=name))
    pid = session[0].evaluate("__import__('os').getpid()")[0]
    os.kill(pid, signal.Signals[name])
    assert dict(session.evaluate("kept")) == {0: 5, 1: 5}
    assert f"the handler of {name} raised TimeoutError: it took too long" in output.text(
        0, "stderr"
    )
    output.clear()
    session.execute("pass")
    assert not output.messages
    session.execute(f"signal.signal(signal.{name}, signal.SIG_DFL)")


def test_within_a_cell_a_handler_raises_as_ever(session: Session) -> None:
    session.execute(HANDLER.format(name="SIGALRM"))
    caught = session.evaluate("signal.getsignal(signal.SIGALRM) is on_signal")
    assert dict(caught) == {0: True, 1: True}
    with pytest.raises(RunError, match="TimeoutError on ranks 0-1"):
        session.execute("signal.setitimer(signal.ITIMER_REAL, 0.05)\nwhile True: signal.pause()")
    again = session.evaluate("signal.signal(signal.SIGALRM, signal.SIG_DFL) is on_signal")
    assert dict(again) == {0: True, 1: True}


def test_a_thousand_errors_of_handlers_are_three_lines(session: Session, output: Any) -> None:
    session.execute(
        "import os, signal\n"
        "seen = 0\n"
        "def on_signal(number, frame):\n"
        "    global seen\n"
        "    seen += 1\n"
        "    raise RuntimeError(f'number {seen}')\n"
        "signal.signal(signal.SIGUSR1, on_signal)"
    )
    pid = session[0].evaluate("os.getpid()")[0]
    while session[0].pull("seen")[0] < 1000:
        os.kill(pid, signal.SIGUSR1)
    session.execute("pass")
    lines = output.text(0, "stderr").splitlines()
    assert len(lines) == 4
    assert "more such errors" in lines[-1]
    session.execute("signal.signal(signal.SIGUSR1, signal.SIG_DFL)")


def test_a_handler_of_sigterm_that_raises_ends_the_rank_as_before(
    start: Callable[..., Session],
) -> None:
    session = start(2)
    session.execute(
        "import signal, sys\n"
        "def on_signal(number, frame):\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, on_signal)"
    )
    pids = [info.pid for info in session.infos]
    session.close()
    assert all(is_dead(pid) for pid in pids)


def test_signals_of_user_code_reach_no_report_of_an_error(session: Session, output: Any) -> None:
    session.execute(
        "import os, signal\n"
        "def on_signal(number, frame): raise TimeoutError('in between')\n"
        "signal.signal(signal.SIGUSR1, on_signal)\n"
        "class Odd(Exception):\n"
        "    def __str__(self):\n"
        "        if 'RANK' in os.environ:  # not where the notebook shows it\n"
        "            signal.raise_signal(signal.SIGUSR1)\n"
        "        return 'odd'"
    )
    with pytest.raises(RunError, match=r"Odd on rank 0 .* odd"):
        session[0].execute("raise Odd")
    session[0].execute("pass")
    assert "TimeoutError: in between" in output.text(0, "stderr")


# --- Stop within an import ------------------------------------------------------------------------

PACKAGE = """
import {name}.part, time
import torch.distributed as dist
pauses = 2000
while pauses:  # for a second once Stop has come
    pauses = min(pauses - 1, 100 if dist.group.WORLD._recorder.abort else 2000)
    time.sleep(0.01)
kept = {name}.part.number
"""


def make_package(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "part.py").write_text("number = 5")
    (folder / name / "__init__.py").write_text(PACKAGE.format(name=name))


def test_a_stop_lets_the_import_of_a_library_come_to_its_end(
    session: Session, tmp_path: Path
) -> None:
    """Cut off, it would be missing what it had imported by then, whenever it is imported again."""
    folder = tmp_path / "site-packages"
    make_package(folder, "sluggish")
    session.execute(f"import sys; sys.path.insert(0, {str(folder)!r})")
    with Press(session, session.interrupt), pytest.raises(RunInterrupt):
        session.execute("import sluggish\nwhile True: pass")
    assert session.execute("import sluggish\nsluggish.kept", fetch=True) == {0: 5, 1: 5}


def test_a_stop_cuts_off_the_import_of_ones_own_file(session: Session, tmp_path: Path) -> None:
    make_package(tmp_path, "mine")
    session.execute(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    with Press(session, session.interrupt), pytest.raises(RunInterrupt):
        session.execute("import mine")
    assert session.evaluate("'mine' in sys.modules")[0] is False
