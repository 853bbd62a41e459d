"""Others look on at a session that a process owns, and nobody of it notices."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession import Session, SessionStateError
from distsession.cluster.kept import find_kept
from distsession.errors import KeptSessionError
from distsession.view import INTERNAL
from distsession.viewer import NEEDS_OWNER, SessionViewer
from tests.until import until

from .conftest import Recorder

OWNER = """
import sys, threading
from distsession import Session
from distsession.kernel.output import Output

class Cell(Output):
    pass

number = 0

def make_output():
    made = Cell()
    made.cell = number or None
    return made

session = Session(2, keep=60, name=sys.argv[1], output=make_output)

def cell(code, **options):
    global number
    number += 1
    session.execute(code, label=f"In[{number}]", **options)

def behind(code, **options):
    threading.Thread(target=cell, args=[code], kwargs=options, daemon=True).start()

print("ready", flush=True)
for line in sys.stdin:
    try:
        exec(eval(line))
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""

LOOP = """\
import os
print("of the loop", rank)
open({begun!r} + str(rank), "w").close()
count, goes_on = 0, torch.ones(1)
while goes_on.item():
    dist.all_reduce(torch.ones(4))
    goes_on.fill_(float(not os.path.exists({gate!r})))
    dist.broadcast(goes_on, 0)
    count += 1
print("out of it", rank)
"value", rank
"""


class Owner:
    """A process that owns a session and does what it is told.

    Args:
        name: Of the session.
        folder: For files.
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self._gates: list[Path] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, code: str) -> str:
        """Have it run some Python; what has come of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{code!r}\n")
        self._process.stdin.flush()
        return self._answer()

    def loop(self) -> Callable[[], None]:
        """Have the ranks loop over collectives, in a cell; gives what ends that."""
        begun = self.folder / f"{self.name}-begun{len(self._gates)}-"
        gate = self.folder / f"{self.name}-gate{len(self._gates)}"
        self._gates.append(gate)
        assert self(f"behind({LOOP.format(begun=str(begun), gate=str(gate))!r})") == "done"
        until(lambda: all(os.path.exists(f"{begun}{rank}") for rank in (0, 1)), "the loop")
        return gate.touch

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def close(self) -> None:
        for gate in self._gates:
            gate.touch()
        if self._process.poll() is None:
            self("session.close()")
        else:
            with contextlib.suppress(KeptSessionError):
                Session.attach(self.name).close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    made = Owner("shown", tmp_path_factory.mktemp("shown"))
    yield made
    made.close()


@pytest.fixture
def owner(_shared: Owner) -> Owner:
    """A process that owns a session of two ranks, which the tests of this module share."""
    return _shared


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[[str], Owner]]:
    """Start such a process for a test of its own."""
    made: list[Owner] = []

    def begin(name: str) -> Owner:
        made.append(Owner(name, tmp_path))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.fixture
def look(owner: Owner) -> Iterator[Callable[..., SessionViewer]]:
    made: list[SessionViewer] = []

    def begin(name: str = "", **options: Any) -> SessionViewer:
        made.append(Session.view(name or owner.name, **options))
        return made[-1]

    yield begin
    for each in made:
        each.close()


Look = Callable[..., SessionViewer]


def test_two_look_on_at_a_loop_of_collectives(owner: Owner, look: Look) -> None:
    end = owner.loop()
    for viewer in (look(), look()):
        status = viewer.status()
        assert status.startswith("shown: ")
        assert "(2 ranks, gloo)" in status
        assert f"owned by pid {owner.pid} since " in status
        assert viewer.world_size == 2
        assert [info.rank for info in viewer.infos] == [0, 1]
        assert viewer.options.keep == 60
        until(lambda v=viewer: "In[1] line " in repr(v.diagnose()), "its line")
        assert "idle" not in repr(viewer.diagnose())
        config = repr(viewer.show_config())
        assert "gloo" in config
        assert "CPU" in config
        assert str(viewer.infos[1].pid) in config
        assert "cpu" in repr(viewer.devices())
    end()
    until(lambda: "idle" in viewer.status(), "the end of the loop")


def test_what_a_running_cell_has_written_is_seen(owner: Owner, look: Look) -> None:
    owner("cell('print(\"of the cell before\", rank)')")
    recorder = Recorder()
    viewer = look(output=recorder)
    end = owner.loop()
    until(lambda: "of the loop" in seen(viewer, recorder), "text")
    assert seen(viewer, recorder) == "of the loop 0\n"
    assert "This is the text so far of In[" in repr(viewer.show_output())
    assert recorder.text(1).endswith("of the loop 1\n")
    end()
    until(lambda: "This was the output of In[" in repr(viewer.show_output()), "its end")
    assert seen(viewer, recorder) == "of the loop 0\nout of it 0\n"
    assert recorder.shown[-1][1][0]["text/plain"] == "('value', 1)"
    with pytest.raises(SessionStateError, match=r"no output of ranks in In\[99\]"):
        viewer.show_output(99)


def seen(viewer: SessionViewer, recorder: Recorder) -> str:
    recorder.clear()
    viewer.show_output()
    return recorder.text(0)


def test_how_a_cell_has_failed_is_seen(owner: Owner, look: Look) -> None:
    assert owner("cell('print(rank); 1 / (1 - rank)')") == "RunError"
    assert "ZeroDivisionError on rank 1" in repr(look().show_output(ranks=1))


def test_it_goes_on_where_nobody_of_the_session_could_answer(owner: Owner, look: Look) -> None:
    end = owner.loop()
    viewer = look()
    pids = [*find_kept(owner.name).agents, owner.pid, *(info.pid for info in viewer.infos)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: repr(viewer.diagnose()).count("stopped") >= 2, "stopped ranks")
        assert "stopped" in repr(viewer.show_config())
        assert "of the loop" in Path(str(viewer.log_path(0))).read_text()
        assert f"owned by pid {owner.pid}" in viewer.status()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        end()
    until(lambda: "idle" in viewer.status(), "the end of the loop")


@pytest.mark.parametrize("name", sorted(NEEDS_OWNER))
def test_what_would_send_something_is_refused(owner: Owner, look: Look, name: str) -> None:
    viewer = look()
    assert hasattr(Session, name), name
    with pytest.raises(SessionStateError) as told:
        getattr(viewer, name)("x = 1")
    text = str(told.value)
    assert f"process {owner.pid} has owned session shown since " in text
    assert "%session attach shown --take" in text
    assert "Session.attach('shown', take=True)" in text


def test_everything_that_a_session_has_is_here_or_refused(look: Look) -> None:
    has = {name for name in dir(Session) if not name.startswith("_")}
    only = {"attach", "view", "list", "output", "last_run", "session"}
    assert has - only - INTERNAL - set(dir(look())) - NEEDS_OWNER == set()


def test_a_rank_of_it_is_refused_and_so_are_stacks(owner: Owner, look: Look) -> None:
    viewer = look()
    with pytest.raises(SessionStateError, match="take=True"):
        viewer[0]
    with pytest.raises(SessionStateError, match="only the ranks know their stacks"):
        viewer.diagnose(stacks=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        viewer.nothing  # noqa: B018


def test_attaching_in_python_says_that_one_can_look_on(owner: Owner) -> None:
    with pytest.raises(SessionStateError, match=r"Session\.view.*take=True"):
        Session.attach(owner.name)


def test_a_fresh_process_and_its_log_are_seen(owner: Owner, look: Look) -> None:
    viewer = look()
    before, log = viewer.infos[1].pid, viewer.log_path(1)
    assert owner("session.restart([1])") == "done"
    assert viewer.infos[1].pid != before
    assert viewer.log_path(1) != log
    assert owner("cell('print(\"of the fresh one\", rank)')") == "done"
    assert "idle" in viewer.status()
    assert str(viewer.infos[1].pid) in repr(viewer.show_config())
    recorder = Recorder()
    look(output=recorder).show_output()
    assert recorder.text(1) == "of the fresh one 1\n"


def test_text_is_followed_until_the_end_of_the_session(
    own: Callable[[str], Owner], look: Look
) -> None:
    owner, recorder = own("followed"), Recorder()
    owner("cell('print(\"before\", rank)')")
    viewer = look("followed", output=recorder)
    watching = threading.Thread(target=viewer.watch)
    watching.start()
    until(lambda: "before 1\n" in recorder.text(1), "what was there")
    owner("cell('print(\"meanwhile\", rank)')")
    until(lambda: "meanwhile 0\n" in recorder.text(0), "what comes")
    owner("session.restart([0])")
    owner("cell('print(\"of a fresh one\", rank)')")
    until(lambda: "of a fresh one 0\n" in recorder.text(0), "text of a fresh process")
    owner("session.close()")
    watching.join(60)
    assert not watching.is_alive()
    assert recorder.text(0) == "before 0\nmeanwhile 0\nof a fresh one 0\n"


def test_what_is_not_known_of_a_run_is_said(owner: Owner, look: Look) -> None:
    recorder = Recorder()
    viewer = look(output=recorder)
    begun, gate = owner.folder / "alone", owner.folder / "alone-gate"
    wait = f"import os, time; print('waits'); open({str(begun)!r}, 'w').close()\n"
    wait += f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
    owner(f"behind('print(1)\\nif rank:\\n ' + {wait!r}.replace(chr(10), chr(10) + ' '))")
    until(begun.exists, "the cell")
    assert owner("session[0].execute('x = 1')") == "done"
    try:
        text = repr(viewer.show_output())
        assert "This is the text so far of In[" in text
        assert recorder.text(1) == "1\nwaits\n"
        assert "Not kept: the text, until the cell has ended, of rank 0." in text
    finally:
        gate.touch()
    until(lambda: "idle" in viewer.status(), "the end of it")


def test_who_looks_no_longer_is_told_so(owner: Owner) -> None:
    with Session.view(owner.name) as viewer:
        assert viewer.is_open
    assert not viewer.is_open
    with pytest.raises(SessionStateError, match="shown is not looked at any more"):
        viewer.diagnose()
    with pytest.raises(SessionStateError, match="not looked at any more"):
        viewer.run(print)
    with pytest.raises(KeptSessionError, match="there is no session nobody"):
        Session.view("nobody")


def test_a_killed_owner_a_new_one_and_the_end_are_seen(
    own: Callable[[str], Owner], look: Look
) -> None:
    former = own("passes-on")
    former.loop()
    viewer = look("passes-on")
    former.kill()
    until(lambda: "owned by nobody since" in viewer.status(), "the owner's end")
    assert "In[1] line" in viewer.status()
    with pytest.raises(SessionStateError, match="session passes-on has no owner"):
        viewer.run(print)
    with Session.attach("passes-on") as session:
        assert f"owned by pid {os.getpid()} since" in viewer.status()
        for info in session.infos:
            os.kill(info.pid, signal.SIGKILL)
        until(lambda: repr(viewer.diagnose()).count("dead") >= 2, "dead ranks")
        folder = find_kept("passes-on").folder
    assert viewer.status() == "session passes-on has ended"
    assert not viewer.is_open
    assert repr(viewer) == "<SessionViewer session passes-on has ended>"
    with pytest.raises(SessionStateError, match=r"session passes-on has ended\."):
        viewer.show_config()
    with pytest.raises(SessionStateError, match=r"session passes-on has ended\."):
        viewer.execute("1")
    assert not os.path.exists(folder)
