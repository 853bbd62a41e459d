"""A script's session outlives it, and another process has all that ran in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distsession import RunError, Session, SessionStateError
from distsession.cluster.kept import find_kept
from distsession.errors import KeptSessionError
from distsession.kernel.kept_state import look_at
from tests.until import until

from .conftest import Recorder

BEGIN = """
import glob, os, signal, sys, threading, time
from distsession import Session

name, folder = sys.argv[1:]
begun, gate = os.path.join(folder, "begun"), os.path.join(folder, "gate")
session = Session(2, keep=60, name=name)


def wait(what):
    import os, time
    open(f"{begun}{what}{rank}", "w").close()
    while not os.path.exists(gate):
        time.sleep(0.01)
    return what, rank


def until(what, ranks=(0, 1)):
    while not all(os.path.exists(f"{begun}{what}{rank}") for rank in ranks):
        time.sleep(0.01)


def until_sent(number):
    while session.launcher.board.last_committed() < number or is_sending():
        time.sleep(0.01)


def is_sending():
    # A thread of zmq has something to do, so what was sent may still be in this process.
    stats = [open(path).read() for path in glob.glob("/proc/self/task/*/stat")]
    return any("(ZMQbg" in stat and ") S " not in stat for stat in stats)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def behind(function, *args, **kwargs):
    threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True).start()


session.push(wait=wait, begun=begun, gate=gate)
"""

CELL = "print('of the cell', rank)\nwait('cell')\n'value', rank"


class Left:
    """What a process leaves that is killed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.sessions: list[Session] = []

    def __call__(self, name: str, code: str, end: int = -signal.SIGKILL, *, nodes: int = 1) -> None:
        ran = subprocess.run(
            [sys.executable, "-c", BEGIN + code, name, str(self.folder)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "DISTSESSION_NODES": str(nodes)},
        )
        assert ran.returncode == end, ran.stderr

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def attach(self, name: str, **options: Any) -> tuple[Session, Recorder]:
        recorder = Recorder()
        session = Session.attach(name, output=recorder, **options)
        self.sessions.append(session)
        return session, recorder


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    made = Left(tmp_path)
    yield made
    made.open_gate()
    for session in made.sessions:
        session.close()


def until_idle(name: str) -> None:
    def is_so() -> bool:
        return not any(r.request for r in look_at(find_kept(name)).reports.values())

    until(is_so, "idle ranks")


def test_everything_goes_on_in_the_order_in_which_it_was_asked(left: Left) -> None:
    left(
        "order",
        f"""
session.execute("x = [rank]")
futures = [session.submit(wait, "call"), session.submit(lambda: ("second", rank))]
until("call")
behind(session.execute, {CELL!r}, fetch=True)
until_sent(6)
behind(session.evaluate, "x.append(1)")
until_sent(7)
die()
""",
    )
    session, recorder = left.attach("order")
    assert session.attach("order") is session
    pending = session.pending()
    assert len(pending) == 4
    assert [*map(id, session.pending())] == [*map(id, pending)]
    assert not any(future.done() for future in pending)
    left.open_gate()
    said: list[str] = []
    session.follow(said.append)
    assert [line.partition(" begun")[0] for line in said] == ["In[6],", "In[7],"]
    assert [recorder.text(rank) for rank in (0, 1)] == ["of the cell 0\n", "of the cell 1\n"]
    values = [dict(future.result(60)) for future in pending]
    assert values == [
        {rank: ("call", rank) for rank in (0, 1)},
        {rank: ("second", rank) for rank in (0, 1)},
        {rank: ("value", rank) for rank in (0, 1)},
        {rank: None for rank in (0, 1)},
    ]
    assert dict(session.evaluate("x")) == {0: [0, 1], 1: [1, 1]}
    names = [entry.name for entry in session.history.entries]
    assert names[-6:-1] == [
        "In[3]", "session.run(wait)", "session.run(<lambda>)", "In[6]", "%distributed x.append(1)"
    ]  # fmt: skip
    assert session.last_run is not None
    assert (session.last_run.number, session.last_run.ranks) == (6, (0, 1))
    session.timeline()


def test_what_nobody_follows_goes_on_behind_and_its_output_is_shown(left: Left) -> None:
    left(
        "behind",
        """
behind(session.execute, "wait('cell')\\nfor i in range(60_000): print(i, '.' * 100)\\n1 / 0")
until("cell")
die()
""",
    )
    session, recorder = left.attach("behind")
    left.open_gate()
    assert dict(session.evaluate("rank")) == {0: 0, 1: 1}
    until(lambda: not session.channel.pending())
    lines = "".join(f"{number} {'.' * 100}\n" for number in range(60_000))
    until(lambda: len(recorder.text(0)) == len(recorder.text(1)) == len(lines))
    assert recorder.text(0) == recorder.text(1) == lines


def test_a_cell_says_at_once_what_of_another_kernel_it_waits_for(left: Left) -> None:
    left("ahead", f"behind(session.execute, {CELL!r})\nuntil('cell')\ndie()\n")
    session, recorder = left.attach("ahead")
    with ThreadPoolExecutor() as threads:
        ran = threads.submit(session.evaluate, "rank")
        until(lambda: recorder.notices)
        waits = r"This waits for In\[\d+\] of the earlier kernel, \d+:\d\d\."
        assert re.fullmatch(waits, recorder.notices[0])
        assert not ran.done()
        left.open_gate()
        assert dict(ran.result(60)) == {0: 0, 1: 1}
    recorder.clear()
    session.evaluate("rank")
    assert recorder.notices == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_was_submitted_just_before_the_session_is_let_go_reaches_all_ranks(
    left: Left, nodes: int
) -> None:
    left(
        "let_go",
        """
session.execute("seen = []")
for number in range(400):
    session.submit(lambda n, text: seen.append(n), number, "x" * 60_000)
session.detach()
""",
        end=0,
        nodes=nodes,
    )
    session, _ = left.attach("let_go")
    assert [*session.evaluate("seen").values()] == 2 * [[*range(400)]]


def test_a_rank_that_died_meanwhile_fails_the_cell_it_was_in(left: Left) -> None:
    left(
        "died",
        f"""
behind(session.execute, {CELL!r})
until("cell")
print(session.infos[1].pid)
os.kill(session.infos[1].pid, signal.SIGSTOP)
open(os.path.join(folder, "pid"), "w").write(str(session.infos[1].pid))
die()
""",
    )
    os.kill(int((left.folder / "pid").read_text()), signal.SIGKILL)
    session, recorder = left.attach("died")
    left.open_gate()
    with pytest.raises(RunError, match=r"rank 1 .* was killed by SIGKILL, (while|last)") as caught:
        session.follow()
    assert dict(caught.value.by_rank).keys() == {1}
    assert recorder.text(0) == "of the cell 0\n"
    session.restart([1])
    assert dict(session.evaluate("rank")) == {0: 0, 1: 1}


def test_a_run_that_was_not_sent_any_more_is_said_to_be_lost(left: Left) -> None:
    left(
        "unsent",
        """
session.execute("y = 1")
session.channel._send_to_all = lambda *_: die()
session.execute("y = 2", label="In[9]")
""",
    )
    session, _ = left.attach("unsent")
    said: list[str] = []
    session.follow(said.append)
    (line,) = said
    assert line.startswith("In[9], begun ")
    assert line.endswith(
        "never reached its ranks, for its kernel ended as it sent it: run it again."
    )
    assert dict(session.evaluate("y")) == {0: 1, 1: 1}
    assert session.last_run is not None
    session.timeline()
    session.follow(said.append)
    assert len(said) == 1


def test_a_transfer_of_a_dead_process_is_let_go_of_silently(left: Left) -> None:
    left(
        "transfer",
        """
behind(session[0].execute, "wait('cell')")
until("cell", [0])
behind(session.pull, "gate")
until_sent(4)
die()
""",
    )
    session, recorder = left.attach("transfer")
    assert list(session.pending()) == []
    left.open_gate()
    session.follow()
    until(lambda: not session.channel.pending())
    assert recorder.messages == []
    assert dict(session.pull("gate")) == {rank: str(left.folder / "gate") for rank in (0, 1)}


def test_a_process_that_ends_by_itself_lets_go(left: Left) -> None:
    left("by-itself", "session.execute('z = 3')", end=0)
    session, _ = left.attach("by-itself")
    assert dict(session.evaluate("z")) == {0: 3, 1: 3}


def test_what_has_ended_before_a_process_did_is_not_told_again(left: Left) -> None:
    left(
        "told",
        """
behind(session[0].execute, "wait('cell')")
until("cell", [0])
session[1].execute("print('told already')")
assert session[1].run(lambda: 5)[1] == 5
die()
""",
    )
    session, recorder = left.attach("told")
    assert list(session.pending()) == []
    left.open_gate()
    session.follow()
    until(lambda: not session.channel.pending())
    assert recorder.text(1) == ""


AGAIN = """
import os, signal, sys
from distsession import Session
session = Session.attach(sys.argv[1])
session._record._journal.tidy()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_two_processes_have_not_seen_the_end_of_the_third_has(left: Left) -> None:
    left(
        "third",
        f"""
behind(session.execute, {CELL!r}, label="In[7]")
until("cell")
future = session[0].submit(lambda: "of a call")
behind(session.push, big=b"0" * (1 << 22))
die()
""",
    )
    ended = subprocess.run([sys.executable, "-c", AGAIN, "third"], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    session, recorder = left.attach("third")
    (future,) = session.pending()
    left.open_gate()
    said: list[str] = []
    session.follow(said.append)
    assert [line.partition(",")[0] for line in said] == ["In[7]"]
    assert recorder.text(1) == "of the cell 1\n"
    assert dict(future.result(60)) == {0: "of a call"}
    names = [entry.name for entry in session.history.entries]
    assert names[-2:] == ["In[7]", "session.run(<lambda>)"]


def test_what_one_process_has_seen_the_third_does_not_tell_again(left: Left) -> None:
    left(
        "seen",
        """
behind(session[0].execute, "wait('cell')")
until("cell", [0])
for number in range(20):
    session[1].execute("print('told already')")
assert session[1].run(lambda: 5)[1] == 5
session.requests.journal._limit = 0
session.requests.journal.tidy()
die()
""",
    )
    ended = subprocess.run([sys.executable, "-c", AGAIN, "seen"], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    session, recorder = left.attach("seen")
    assert list(session.pending()) == []
    left.open_gate()
    said: list[str] = []
    session.follow(said.append)
    assert len(said) == 1
    until(lambda: not session.channel.pending())
    assert recorder.text(1) == ""


def test_a_session_that_is_not_kept_cannot_be_let_go_of(start: Callable[..., Session]) -> None:
    session = start(2)
    with pytest.raises(SessionStateError, match=r"is not kept.*--keep 12h"):
        session.detach()
    assert session.is_open


def test_one_that_was_let_go_of_says_how_it_is_had_again(left: Left) -> None:
    left("again", "", end=0)
    session, _ = left.attach("again")
    session.detach()
    assert session.status() == "again: detached"
    with pytest.raises(SessionStateError, match="%session attach again takes it up again"):
        session.execute("1")
    other, _ = left.attach("again")
    assert other is not session
    other.execute("1")


def test_attach_needs_a_session(left: Left) -> None:
    with pytest.raises(KeptSessionError, match=r"there is no session .*nothing"):
        Session.attach("nothing")


def test_the_list_says_who_has_it(left: Left) -> None:
    left("listed", "", end=0)
    session, _ = left.attach("listed")
    text = repr(Session.list())
    assert "listed" in text
    assert f"pid {os.getpid()} since" in text
    assert session.name == "listed"
