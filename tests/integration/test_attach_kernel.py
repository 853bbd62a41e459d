"""A kernel is restarted or shut down, and the session that it has kept is there in the next one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from distsession.cluster.end_kept import end_session
from distsession.cluster.kept import find_kept, kept_sessions
from tests.until import LIMIT_S, until

from .kernel import Notebook

NAME = f"kept-{os.getpid()}"
START = f"%load_ext distsession\n%session start 2 --keep 10m --name {NAME}"
ATTACH = f"%session attach {NAME}"

TRAIN = """\
%%distributed
import os, time
print("begins", rank)
for step in range(10_000):
    last = torch.tensor(os.path.exists({go!r}), dtype=torch.int)
    dist.all_reduce(last)
    if last:
        break
    open(f"{begun}{{rank}}", "w").close()
    time.sleep(0.01)
print("ends", rank)
step >= 0"""

pytestmark = pytest.mark.timeout(240)


class Gate:
    """Files by which a cell on the ranks says that it is under way, and is told to end."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.begun, self.go = str(folder / "begun"), str(folder / "go")

    def train(self) -> str:
        return TRAIN.format(begun=self.begun, go=self.go)

    def wait(self) -> None:
        """Until both ranks are in the midst of it."""
        until(lambda: all(os.path.exists(f"{self.begun}{rank}") for rank in range(2)))

    def open(self) -> None:
        Path(self.go).touch()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def kernel() -> Iterator[Callable[[], Notebook]]:
    """Start kernels; they are ended after the test, and so is what they have kept."""
    started: list[Notebook] = []

    def start() -> Notebook:
        started.append(Notebook())
        return started[-1]

    yield start
    for notebook in started:
        notebook.client.stop_channels()
        notebook.manager.shutdown_kernel(now=True)
    for kept in kept_sessions():
        if kept.name == NAME:
            end_session(kept, "the test is over")


@pytest.fixture
def notebook(kernel: Callable[[], Notebook]) -> Notebook:
    """A kernel with a session of two ranks that is kept, which have a variable."""
    made = kernel()
    assert not made.run(START, timeout=100).error
    made.run("%%distributed\nimport os\nmine = os.getpid()\nx = torch.ones(2) * (rank + 1)")
    return made


def restart(notebook: Notebook, how: str) -> None:
    """End a kernel in some way, and start another in its place."""
    if how == "killed":
        os.kill(notebook.manager.provisioner.pid, signal.SIGKILL)
    notebook.manager.restart_kernel(now=how == "at once")
    notebook.client.wait_for_ready(timeout=100)


def pids(notebook: Notebook) -> str:
    """The ranks' processes, as they have them in a variable and as they are."""
    shown = notebook.run("%distributed (mine, __import__('os').getpid() == mine)")
    assert not shown.error
    return shown.plain


def loaded(notebook: Notebook) -> str:
    """What is said when the extension is loaded."""
    shown = notebook.run("%load_ext distsession")
    assert not shown.error
    return shown.stdout


@pytest.mark.parametrize("how", ["restarted", "at once", "killed"])
def test_a_cell_goes_on_in_the_kernel_that_comes_after(
    notebook: Notebook, gate: Gate, how: str
) -> None:
    before = pids(notebook)
    cell = notebook.client.execute(gate.train())
    gate.wait()
    restart(notebook, how)

    said = loaded(notebook)
    assert re.search(rf"session {NAME} \(2 ranks, gloo\) is still there: ", said)
    assert re.search(rf" In\[4\] line \d+ since \d\d:\d\d\. %session attach {NAME}", said)
    attaching = notebook.client.execute(ATTACH)
    gate.open()
    shown = notebook.collect(attaching)
    assert attaching != cell
    assert not shown.error, shown
    assert re.search(r"^In\[4\], begun \d\d:\d\d:\d\d", shown.stdout, re.MULTILINE)
    for rank in range(2):
        assert shown.plain.count(f"begins {rank}") == shown.plain.count(f"ends {rank}") == 1
    assert "[ranks 0-1] True" in shown.plain
    assert pids(notebook) == before
    assert notebook.run("%distributed x.sum().item()").plain == "[rank 0] 2.0\n[rank 1] 4.0"
    assert "begins 0" not in notebook.run(ATTACH).transcript  # once


def test_the_end_of_a_session_that_was_attached_to_leaves_nothing(notebook: Notebook) -> None:
    restart(notebook, "restarted")
    loaded(notebook)
    assert not notebook.run(ATTACH).error
    kept = find_kept(NAME)
    ranks = re.findall(r"\d+", notebook.run("%distributed mine").plain)
    assert "closed" in notebook.run("%session close").transcript
    until(lambda: not any(map(psutil.pid_exists, kept.agents)))
    assert not [rank for rank in ranks[1::2] if psutil.pid_exists(int(rank))]
    assert not os.path.exists(kept.folder)
    assert NAME not in notebook.run("%session list").plain
    assert notebook.run(ATTACH).ename == "KeptSessionError"


def test_stop_ends_a_cell_though_the_session_is_kept(notebook: Notebook, gate: Gate) -> None:
    running = notebook.client.execute(gate.train())
    gate.wait()
    notebook.manager.interrupt_kernel()
    shown = notebook.collect(running)
    assert shown.ename == "RunInterrupt"
    assert "was stopped" in shown.error
    assert notebook.run("%session").plain == f"{NAME}: idle (2 ranks, gloo)"


def test_a_cell_that_ends_meanwhile_shows_once_what_it_gave(notebook: Notebook, gate: Gate) -> None:
    notebook.client.execute(gate.train())
    gate.wait()
    restart(notebook, "restarted")
    gate.open()
    until(lambda: "its ranks are idle" in loaded_again(notebook))
    shown = notebook.run(ATTACH)
    assert not shown.error
    assert re.search(r"^In\[\d\], begun \S+, ended \S+$", shown.stdout, re.MULTILINE)
    for rank in range(2):
        assert shown.plain.count(f"begins {rank}") == shown.plain.count(f"ends {rank}") == 1
    assert shown.plain.count("[ranks 0-1] True") == 1
    again = notebook.run("%session output In 3").plain
    assert "begins 0" in again
    assert "ends 1" in again
    notebook.run("%session detach")
    assert "begins" not in notebook.run(ATTACH).transcript


def loaded_again(notebook: Notebook) -> str:
    return notebook.run("%reload_ext distsession").stdout


@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_what_input_asks_is_asked_again(notebook: Notebook, how: str) -> None:
    notebook.client.execute(
        "%%distributed\nprint('before', rank)\nname = input('who? ') if rank == 1 else ''\nname"
    )
    notebook.client.get_stdin_msg(timeout=LIMIT_S)
    restart(notebook, how)
    loaded(notebook)
    shown = notebook.run(ATTACH, answers=["ada"])
    assert not shown.error, shown
    assert shown.prompts == ["[rank 1] who? "]
    assert "[rank 1] 'ada'" in shown.plain
    assert shown.plain.count("before 1") == 1


@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_a_debugger_that_is_open_asks_again(notebook: Notebook, how: str) -> None:
    notebook.client.execute(
        "%%distributed\nx = 40 + rank\nif rank == 1:\n    breakpoint()\nprint('after', x)"
    )
    notebook.client.get_stdin_msg(timeout=LIMIT_S)
    restart(notebook, how)
    loaded(notebook)
    shown = notebook.run(ATTACH, answers=["p x + 1", "c"])
    assert not shown.error, shown
    assert [prompt.strip() for prompt in shown.prompts] == ["[rank 1] (Pdb)"] * 2
    assert "42" in shown.plain
    assert "after 41" in shown.plain


def test_ranks_that_are_idle_wait_for_the_next_kernel(
    notebook: Notebook, kernel: Callable[[], Notebook]
) -> None:
    before = pids(notebook)
    notebook.manager.shutdown_kernel()  # as the menu's
    other = kernel()
    said = loaded(other)
    assert re.search(rf"{NAME} .* its ranks are idle, and it ends at \d\d:\d\d", said)
    first = other.run(f"session = %session attach {NAME}\nsession")
    assert f"{NAME}: idle" in first.transcript
    assert other.run(f"again = %session attach {NAME}\nagain is session").result == "True"
    assert pids(other) == before
    assert loaded_again(other) == ""  # somebody has it
