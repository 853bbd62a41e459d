"""A kernel ends in the midst of its work, and another one goes on with it, in real kernels."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .kernel import Notebook, Shown

LONG = """\
%%distributed
import os, time
print('came', rank)
open({begun!r} + str(rank), 'w').close()
while not os.path.exists({gate!r}):
    time.sleep(0.01)
print('went', rank)
x * 10"""


class Kernels:
    """Kernels that have one session, one after the other.

    Args:
        name: Of the session.
        folder: For files.
    """

    def __init__(self, name: str, folder: Path):
        self.name = name
        self.begun, self.gate = folder / "begun", folder / "gate"
        self.long = LONG.format(begun=str(self.begun), gate=str(self.gate))
        self.kernels: list[Notebook] = []
        self.first = self.start()
        self.first.run(f"%session start 2 --keep 60s --name {name}")
        self.first.run("%%distributed\nx = rank + 1\nprint('x is', x)")

    def start(self) -> Notebook:
        self.kernels.append(Notebook())
        self.loaded = self.kernels[-1].run("%load_ext distsession")
        return self.kernels[-1]

    def wait_for_begun(self) -> None:
        until_exist(*(Path(f"{self.begun}{rank}") for rank in (0, 1)))

    def kill(self, notebook: Notebook) -> None:
        pid = int(notebook.run("import os; os.getpid()").result)
        self.kill_pid(pid)

    def kill_pid(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_in_long_cell(self) -> None:
        """End the first kernel once its ranks are in the long cell."""
        pid = int(self.first.run("import os; os.getpid()").result)
        self.first.client.execute(self.long)
        self.wait_for_begun()
        self.kill_pid(pid)

    def close(self) -> None:
        self.gate.touch()
        last = self.kernels[-1]
        last.run(f"%session attach {self.name} --take")
        assert "closed" in last.run("%session close").transcript
        for notebook in self.kernels:
            notebook.close()


def until_exist(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Kernels]]:
    made = []

    def begin(name: str) -> Kernels:
        made.append(Kernels(name, tmp_path))
        return made[-1]

    yield begin
    for kernels in made:
        kernels.close()


def plain(shown: Shown) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", shown.transcript)


def test_a_running_cell_goes_on_in_a_new_kernel(make: Callable[[str], Kernels]) -> None:
    kernels = make("goes-on")
    kernels.kill_in_long_cell()
    second = kernels.start()
    hint = kernels.loaded.stdout
    assert re.search(
        r"^session goes-on \(2 ranks, gloo\) is still there: ranks? .* In\[5\] line \d since "
        r"\d\d:\d\d\. %session attach goes-on$",
        hint,
        re.M,
    ), hint
    listed = second.run("%session list").transcript
    assert "goes-on" in listed
    request = second.client.execute("%session attach goes-on")
    kernels.gate.touch()
    shown = second.collect(request)
    assert shown.error == ""
    text = plain(shown)
    assert re.search(r"^In\[5\], begun \d\d:\d\d:\d\d", text, re.M), text
    for rank in (0, 1):
        assert text.count(f"came {rank}") == 1
        assert text.count(f"went {rank}") == 1
    assert "[rank 0] 10\n[rank 1] 20" in text
    assert second.run("%distributed x").result == "[rank 0] 1\n[rank 1] 2"

    again = plain(second.run("%session output In 3"))
    assert "x is 1" in again
    assert "This was the output of In[3] of kernel 1, which began at" in again
    assert "went 1" in plain(second.run("%session output In 5"))


def test_what_ended_meanwhile_is_shown_once_one_after_the_other(
    make: Callable[[str], Kernels],
) -> None:
    kernels = make("ended")
    kernels.first.run("import distsession; session = distsession.current_session()")
    kernels.first.run("future = session[0].submit(lambda: 'of a call')")
    kernels.kill_in_long_cell()
    kernels.gate.touch()
    until_idle(kernels.name)
    second = kernels.start()
    assert "its ranks are idle, and it ends at" in kernels.loaded.stdout
    text = plain(second.run("%session attach ended"))
    assert re.search(r"^In\[7\], begun \d\d:\d\d:\d\d, ended \d\d:\d\d:\d\d$", text, re.M), text
    assert "[rank 0] 10\n[rank 1] 20" in text
    again = plain(second.run("%session attach ended"))
    assert "begun" not in again


def until_idle(name: str) -> None:
    from distsession.cluster.kept import find_kept
    from distsession.kernel.kept_state import look_at

    deadline = time.monotonic() + 60
    while any(report.request for report in look_at(find_kept(name)).reports.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_cell_that_failed_meanwhile_raises_here(make: Callable[[str], Kernels]) -> None:
    kernels = make("failed")
    kernels.long += "\nif rank: raise ValueError('no')"
    kernels.kill_in_long_cell()
    second = kernels.start()
    request = second.client.execute("%session attach failed")
    kernels.gate.touch()
    shown = second.collect(request)
    assert shown.ename == "RunError"
    assert "ValueError on rank 1" in shown.error
    assert "In[5] line 9" in shown.error
    assert "failed: idle" in second.run("%session status").transcript
    assert "ValueError" in plain(second.run("%session output In 5"))


def test_stop_ends_a_cell_that_an_earlier_kernel_began(make: Callable[[str], Kernels]) -> None:
    kernels = make("stopped")
    kernels.kill_in_long_cell()
    second = kernels.start()
    shown = second.collect(second.client.execute("%session attach stopped"), stop_at=["In[5] line"])
    assert shown.ename == "RunInterrupt", shown
    assert second.run("%distributed x").result == "[rank 0] 1\n[rank 1] 2"
    assert "In[5]" not in second.run("%session attach stopped").transcript


@pytest.mark.parametrize("is_taken", [False, True], ids=["after its end", "taken"])
def test_a_question_is_asked_again(make: Callable[[str], Kernels], is_taken: bool) -> None:
    name = "asks-taken" if is_taken else "asks"
    kernels = make(name)
    pid = int(kernels.first.run("import os; os.getpid()").result)
    asking = kernels.first.client.execute("%%distributed 0\nprint('hello', input('who? '))")
    deadline = time.monotonic() + 60
    while "who?" not in str(kernels.first.client.get_stdin_msg(timeout=60)["content"]["prompt"]):
        assert time.monotonic() < deadline
    if not is_taken:
        kernels.kill_pid(pid)
    second = kernels.start()
    attach = f"%session attach {name}{' --take' * is_taken}"
    shown = second.collect(second.client.execute(attach), answers=["world"])
    assert shown.prompts == ["[rank 0] who? "]
    assert "hello world" in plain(shown)
    if is_taken:  # nobody has answered there
        assert "taken over by process" in kernels.first.collect(asking).error


def test_the_end_of_a_kernel_lets_go_and_its_calls_can_be_got_back(
    make: Callable[[str], Kernels], tmp_path: Path
) -> None:
    kernels = make("calls")
    kernels.first.run("import distsession; session = distsession.current_session()")
    kernels.first.run(
        "def work(path):\n    import os, time\n"
        "    while not os.path.exists(path): time.sleep(.01)\n"
        f"    return rank\nfuture = session.submit(work, {str(kernels.gate)!r})"
    )
    kernels.first.client.stop_channels()
    kernels.first.manager.shutdown_kernel()
    kernels.kernels.remove(kernels.first)
    second = kernels.start()
    text = plain(second.run("%session attach calls"))
    assert "current_session().pending()" in text
    kernels.gate.touch()
    found = second.run(
        "from distsession import current_session\n(future,) = current_session().pending()\n"
        "assert current_session().pending() == [future]\nfuture.result(60)"
    )
    assert found.result == "[rank 0] 0\n[rank 1] 1"
    script = tmp_path / "calls.py"
    assert second.run(f"%session export {script} --cells work").error == ""
    assert "def work(path):" in script.read_text()


def test_a_session_is_let_go_of_and_taken_up(make: Callable[[str], Kernels]) -> None:
    kernels = make("let-go")
    let_go = kernels.first.run("%session detach")
    assert "%session attach let-go takes it up again" in let_go.transcript
    assert "no session is open" in kernels.first.run("%distributed 1").error
    back = kernels.first.run("%session attach let-go")
    assert back.error == ""
    assert kernels.first.run("%distributed x").result == "[rank 0] 1\n[rank 1] 2"


def test_one_who_takes_it_has_it_and_the_other_is_told(make: Callable[[str], Kernels]) -> None:
    kernels = make("taken")
    second = kernels.start()
    assert "session taken" not in kernels.loaded.stdout
    assert "%session attach taken --take" in second.run("%session attach taken").transcript
    assert second.run("%session attach taken --take").error == ""
    told = kernels.first.run("%distributed x")
    assert "no longer this process's" in told.error
    assert "taken over" in kernels.first.run("%session status").transcript
    assert second.run("%distributed x").result == "[rank 0] 1\n[rank 1] 2"


def shown_until(notebook: Notebook, cell: str, end: str) -> str:
    """What a cell writes up to this text."""
    text = ""
    while end not in text:
        message = notebook.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == cell:
            text += message["content"].get("text", "")
    return text


@pytest.mark.parametrize("how", ["cell", "call"])
def test_what_runs_while_it_is_taken_goes_on_there(
    make: Callable[[str], Kernels], how: str
) -> None:
    kernels = make(f"taken-{how}")
    code = kernels.long
    if how == "call":
        body = "".join(f"    {line}\n" for line in kernels.long.splitlines()[1:])
        code = (
            f"def work():\n{body}"
            "from distsession import current_session\ncurrent_session().run(work)"
        )
    first = kernels.first.client.execute(code)
    kernels.wait_for_begun()
    second = kernels.start()
    attaching = second.client.execute(f"%session attach taken-{how} --take")
    told = kernels.first.collect(first)
    assert re.fullmatch(
        r"SessionStateError: taken over by process \d+ at \d\d:\d\d:\d\d\.", told.error.strip()
    ), told.error
    assert "taken over by process" in kernels.first.run("%session").plain
    text = shown_until(second, attaching, ", begun")
    kernels.gate.touch()
    shown = second.collect(attaching)
    assert shown.error == ""
    text += plain(shown)
    what = "In[4]" if how == "cell" else "work() in In[4]"
    assert re.search(
        rf"^attached to .*: running {re.escape(what)} of the earlier kernel, \d:\d\d \(2 ranks",
        text,
        re.M,
    ), text
    assert re.search(rf"^{re.escape(what)}, begun \d\d:\d\d:\d\d$", text, re.M), text
    for rank in (0, 1):
        assert text.count(f"came {rank}") == text.count(f"went {rank}") == 1
    assert "came" not in plain(second.run("%distributed x"))
    assert ": idle (2 ranks" in second.run("%session").plain


def test_cells_of_one_number_are_told_apart(make: Callable[[str], Kernels]) -> None:
    kernels = make("numbers")
    kernels.first.run(
        "%%distributed\nprint('first')\ndef broken():\n    raise ValueError('of the first')"
    )
    kernels.kill(kernels.first)
    second = kernels.start()
    second.run("%session attach numbers")
    second.run("1")
    shown = second.run("%%distributed\n# another cell\nprint('second')\nbroken()")
    assert "raise ValueError('of the first')" in shown.error
    assert "In[4] (kernel 2) line 4" in shown.error
    again = plain(second.run("%session output In 4"))
    assert "[ranks 0-1] second" in again
    assert "first" not in again.partition("This was")[0]
    assert "In[4] of an earlier kernel is there, too: %session output In 4 --kernel 1" in again
    assert "[ranks 0-1] first" in plain(second.run("%session output In 4 --kernel 1"))
