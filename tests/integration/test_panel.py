"""The panel of a session in a real Jupyter kernel, with a front end that is played here."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ipykernel
import pytest

from distsession import Session
from distsession.protocol.agent_messages import UsageRequest

from .kernel import Notebook

WIDGET_VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
HANG = (
    "%%distributed\nimport time\nif rank == 0:\n    dist.barrier()\n"
    "else:\n    while True:\n        time.sleep(0.01)"
)


HAS_SUBSHELLS = ipykernel.version_info >= (7,)
"""Whether a kernel can take clicks while a cell runs."""
needs_subshells = pytest.mark.skipif(not HAS_SUBSHELLS, reason="clicks wait for the cell")


class FrontEnd:
    """Keeps the state of all widgets, and what is shown, as a notebook in a browser would.

    Args:
        subshells: As JupyterLab does, send clicks to a thread beside the cells where there is one.
    """

    def __init__(self, *, subshells: bool = HAS_SUBSHELLS) -> None:
        self.notebook = Notebook()
        self.client = self.notebook.client
        self.models: dict[str, dict[str, Any]] = {}
        self.shown: list[dict[str, Any]] = []
        self.text = ""
        self.errors: list[str] = []
        self.idle: set[str] = set()
        self.updates = 0
        self.subshell: str | None = None
        if subshells:
            question = self.client.session.msg("create_subshell_request", {})
            self.client.control_channel.send(question)
            self.subshell = self.client.get_control_msg(timeout=60)["content"]["subshell_id"]

    def take(self, seconds: float = 0.2) -> None:
        """Take in what the kernel sends for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                return
            self._hear(message["msg_type"], message["content"], message["parent_header"])

    def _hear(self, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        if kind == "comm_open":
            self.models[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.models[content["comm_id"]] |= content["data"]["state"]
            self.updates += 1
        elif kind in ("display_data", "execute_result"):
            self.shown.append(content["data"])
        elif kind == "stream":
            self.text += content["text"]
        elif kind == "error":
            self.errors.append(content["ename"])
        elif kind == "status" and content["execution_state"] == "idle":
            self.idle.add(parent["msg_id"])

    def wait(self, condition: Callable[[], bool], seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline:
                said = " ".join(re.sub("<[^>]*>", " ", self.values()).split())
                pytest.fail(f"{said}; {self.text!r}; {self.errors}")
            self.take()

    def start(self, code: str, **options: Any) -> str:
        return str(self.client.execute(code, **options))

    def run(self, code: str, **options: Any) -> None:
        request = self.start(code, **options)
        self.wait(lambda: request in self.idle)

    def values(self) -> str:
        """All that the widgets show."""
        return "\n".join(str(model.get("value", "")) for model in self.models.values())

    def model(self, name: str, **having: Any) -> str:
        """The number of the last widget of that kind."""
        found = [
            number
            for number, model in self.models.items()
            if model["_model_name"] == name
            and all(model.get(key) == value for key, value in having.items())
        ]
        return found[-1]

    def rank_choice(self) -> str:
        """The number of the list beside the buttons."""
        found = [
            number
            for number, model in self.models.items()
            if "choose a rank" in model.get("_options_labels", ())
        ]
        return found[-1]

    def send(self, comm: str, data: dict[str, Any], subshell: str | None = None) -> str:
        message = self.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def press(self, name: str) -> str:
        button = self.model("ButtonModel", description=name)
        data = {"method": "custom", "content": {"event": "click"}}
        return self.send(button, data, self.subshell)

    def set(self, comm: str, **state: Any) -> None:
        self.send(comm, {"method": "update", "state": state, "buffer_paths": []}, self.subshell)


@pytest.fixture(scope="module")
def _front() -> Iterator[FrontEnd]:
    front = FrontEnd()
    front.run(
        "import distsession, threading, os\n%load_ext distsession\n"
        "session = distsession.Session(2, backend='gloo')"
    )
    yield front
    front.notebook.close()


@pytest.fixture
def front(_front: FrontEnd) -> FrontEnd:
    """With the panel shown anew, and no longer with what ranks did in the test before."""
    _front.run("session.show_config()")
    _front.wait(lambda: "waiting in" not in _front.values())
    _front.errors.clear()
    _front.text = ""
    return _front


def test_the_panel_is_shown_as_widgets_and_as_a_table_with_the_same_facts(front: FrontEnd) -> None:
    def has_usage() -> bool:  # the agent has more to import after a start
        front.run("session.show_config()")
        return "MiB" in front.shown[-2]["text/plain"]

    front.wait(has_usage)
    table, live = front.shown[-2:]
    assert set(table) == {"text/html", "text/plain"}
    assert set(live) == {WIDGET_VIEW_TYPE, "text/html", "text/plain"}
    assert "MiB" not in live["text/html"]
    assert front.models[live[WIDGET_VIEW_TYPE]["model_id"]]["_model_name"] == "VBoxModel"
    front.wait(lambda: "MiB" in front.values())
    for fact in ("world size", "gloo", "start_timeout", "given", "default", "idle", "MiB"):
        assert fact in table["text/plain"]
        assert fact in table["text/html"]
        assert fact in front.values()
    assert "<table>" in table["text/html"]
    hidden = re.search(r"<style>\.(\S+)\{display:none\}</style>", front.values())
    assert hidden is not None
    assert table["text/html"].startswith(f'<div class="{hidden[1]}">')


def test_the_session_itself_is_shown_so_too(front: FrontEnd) -> None:
    front.run("session")
    assert [set(shown) for shown in front.shown[-2:]] == [
        {"text/html", "text/plain"},
        {WIDGET_VIEW_TYPE, "text/html", "text/plain"},
    ]
    front.run("print(repr(session))")
    assert "idle (2 ranks, gloo)>" in front.text
    assert "\n" not in front.text.strip()


def test_who_can_be_asked_nothing_gets_the_table_alone(front: FrontEnd) -> None:
    front.run("session", allow_stdin=False)
    assert set(front.shown[-1]) == {"text/html", "text/plain"}
    front.run("session.show_config()", allow_stdin=False)
    assert set(front.shown[-1]) == {"text/html", "text/plain"}


def test_the_states_are_live_while_a_cell_runs(front: FrontEnd) -> None:
    request = front.start(HANG)
    front.wait(lambda: "waiting in barrier" in front.values())
    front.wait(lambda: "running In[" in front.values())
    front.wait(lambda: "line 7" in front.values() or "line 6" in front.values())
    assert request not in front.idle
    assert front.text == ""
    front.notebook.manager.interrupt_kernel()
    front.wait(lambda: request in front.idle)
    front.wait(lambda: "waiting" not in front.values())


def test_nothing_is_sent_while_nothing_changes(front: FrontEnd) -> None:
    front.run("agent = session.run(os.getppid)[0]\nos.kill(agent, 19)")  # its readings do change
    front.take(5.0)  # its last readings are too old to be shown by then
    before = front.updates
    front.take(3.0)
    assert front.updates == before
    front.run("os.kill(agent, 18)")
    front.wait(lambda: front.updates > before)


@needs_subshells
def test_stop_and_diagnose_work_while_a_cell_runs(front: FrontEnd) -> None:
    request = front.start(HANG)
    front.wait(lambda: "waiting in barrier" in front.values())
    front.press("Diagnose")
    front.wait(lambda: "for rank 1, which runs" in front.values())
    front.press("Stacks")
    front.wait(lambda: "time.sleep(0.01)" in front.values())
    front.press("Restart rank")
    front.wait(lambda: "choose a rank first" in front.values())
    assert request not in front.idle
    front.press("Stop")
    front.wait(lambda: request in front.idle)
    assert front.errors == ["RunInterrupt"]
    front.press("Stop")
    front.wait(lambda: "nothing was running" in front.values())


def test_a_front_end_without_subshells_is_told_to_use_its_own_stop(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "subshell", None)
    request = front.start(HANG)
    front.wait(lambda: "waiting in barrier" in front.values())
    front.press("Stop")
    front.take(1)
    assert request not in front.idle
    front.notebook.manager.interrupt_kernel()
    front.wait(lambda: request in front.idle)
    front.wait(lambda: "own Stop" in front.values())


@needs_subshells
def test_the_log_is_shown_and_searched_while_a_cell_runs(front: FrontEnd) -> None:
    request = front.start("%%distributed\nprint('said by', rank)\n" + HANG.partition("\n")[2])
    front.press("Log")
    front.wait(lambda: "said by 0" in front.values())
    front.set(front.model("DropdownModel", _options_labels=["rank 0", "rank 1"]), index=1)
    front.wait(lambda: "said by 1" in front.values())
    front.set(front.model("TextModel"), value="by")
    front.wait(lambda: "<mark>by</mark> 1" in front.values())
    front.press("Close log")
    assert request not in front.idle
    front.press("Stop")
    front.wait(lambda: request in front.idle)


@needs_subshells
def test_a_rank_is_not_restarted_beside_one_that_runs(front: FrontEnd) -> None:
    request = front.start(HANG)
    front.wait(lambda: "waiting in barrier" in front.values())
    choice = front.rank_choice()
    front.set(choice, index=1)
    front.press("Restart rank")
    front.wait(lambda: "rank 1 still runs something" in front.values())
    assert request not in front.idle
    front.set(choice, index=0)
    front.press("Stop")
    front.wait(lambda: request in front.idle)


def test_a_dead_rank_is_shown_chosen_and_replaced_by_the_button(front: FrontEnd) -> None:
    front.run("%%distributed 0\nkept = 7")
    front.run("os.kill(session.infos[1].pid, 9)")
    front.wait(lambda: "dead (was killed by SIGKILL" in front.values())
    choice = front.rank_choice()
    front.wait(lambda: front.models[choice]["index"] == 2)
    front.press("Restart rank")
    front.wait(lambda: "Rank 1 has a fresh process" in front.values())
    front.wait(lambda: front.models[choice]["index"] == 0)
    front.wait(lambda: "dead (" not in front.values())
    front.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)")
    front.run("%distributed t.item() + (0 if rank else kept)")
    assert front.shown[-1]["text/plain"] == "[rank 0] 9.0\n[rank 1] 2.0"


def test_a_rank_that_lives_is_replaced_once_that_is_confirmed(front: FrontEnd) -> None:
    front.run("%%distributed\nkept = 7")
    choice = front.rank_choice()
    front.set(choice, index=2)
    front.press("Restart rank")
    front.wait(lambda: "its variables are lost" in front.values())
    front.run("session[1].pull('kept')[1]")
    assert front.shown[-1]["text/plain"] == "7"
    front.press("Restart rank 1 all the same")
    front.wait(lambda: "Rank 1 has a fresh process" in front.values())
    front.run("%%distributed --out known\n'kept' in globals()")
    front.run("dict(known)")
    assert front.shown[-1]["text/plain"] == "{0: True, 1: False}"


def panels(front: FrontEnd) -> str:
    front.run("sum(t.name == 'distsession-panel' for t in threading.enumerate())")
    return str(front.shown[-1]["text/plain"])


def test_there_is_one_thread_however_often_the_panel_is_shown(front: FrontEnd) -> None:
    front.run("session.show_config()")
    first = front.shown[-1][WIDGET_VIEW_TYPE]["model_id"]
    front.run("session")
    assert front.shown[-1][WIDGET_VIEW_TYPE]["model_id"] == first
    assert panels(front) == "1"


def test_nobody_looks_once_the_output_is_cleared_and_again_when_it_is_back(
    front: FrontEnd,
) -> None:
    box = front.shown[-1][WIDGET_VIEW_TYPE]["model_id"]
    front.set(box, _view_count=1)
    front.set(box, _view_count=0)
    front.wait(lambda: panels(front) == "0")
    front.set(box, _view_count=1)
    front.wait(lambda: panels(front) == "1")


def test_widgets_that_were_closed_are_made_anew(front: FrontEnd) -> None:
    first = front.shown[-1][WIDGET_VIEW_TYPE]["model_id"]
    front.run("import ipywidgets\nipywidgets.Widget.close_all()")
    front.wait(lambda: panels(front) == "0")
    front.run("session")
    assert front.shown[-1][WIDGET_VIEW_TYPE]["model_id"] != first
    assert panels(front) == "1"


def test_the_panel_says_that_the_session_is_closed_and_ends(front: FrontEnd) -> None:
    front.run("second = distsession.Session(1, backend='gloo')\nsecond")
    assert panels(front) == "2"
    front.run("second.close()")
    front.wait(lambda: ": closed" in front.values() and "ended" in front.values())
    front.wait(lambda: panels(front) == "1")
    assert front.models[front.model("ButtonModel", description="Stop")]["disabled"]
    front.run("second")
    assert set(front.shown[-1]) == {"text/plain"}
    assert "closed" in front.shown[-1]["text/plain"]
    front.take(1.5)
    before = front.updates
    front.run("session.close()")
    front.wait(lambda: panels(front) == "0")
    front.take()
    before = front.updates
    front.take(2.5)
    assert front.updates == before


def test_in_a_terminal_there_is_text(tmp_path: Any) -> None:
    script = tmp_path / "script.ipy"
    script.write_text(
        "%load_ext distsession\nfrom distsession import Session\nsession = Session(1)\n"
        "get_ipython().run_cell('session')\nprint('---')\n"
        "get_ipython().run_cell('session.show_config()')\nprint('---', repr(session))\n"
        "import sys; print('ipywidgets' in sys.modules)\nsession.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        check=False,
    )
    shown, asked, rest = done.stdout.split("---")
    assert "world size" in shown, done.stdout + done.stderr
    assert "world size" in asked
    assert rest.startswith(" <Session 1: idle (1 rank, gloo)>\n")
    assert "\nFalse" in done.stdout


def test_the_table_says_what_ranks_do_and_use(start: Callable[..., Session]) -> None:
    session = start(2, hang_grace=1.5)
    text = str(session.show_config())
    assert re.search(r"^hang_grace +1\.5 +given$", text, re.MULTILINE)
    future = session.submit(_spin, 4.0)
    while text.count("running test_panel.py line") < 2:
        assert not future.done(), text
        text = str(session.show_config())
    future.result()
    deadline = time.monotonic() + 60
    used = None
    while used is None or not all(use.cpu_seconds > 1 for use in used.uses):
        assert time.monotonic() < deadline, used
        used = session.launcher.usage(1.0)
    assert [use.pid for use in used.uses] == [info.pid for info in session.infos]
    assert all(use.rss > 10 << 20 for use in used.uses)
    assert all(use.gpu_memory == -1 for use in used.uses if not session.infos[0].device.uuid)


def test_an_agent_that_is_stopped_delays_nothing_for_long(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(2)
    agent = int(session.run(os.getppid)[0])
    asked: list[object] = []
    agents = session.launcher._agents  # type: ignore[attr-defined]
    send = agents.send
    monkeypatch.setattr(agents, "send", lambda node, what: (asked.append(what), send(node, what)))
    os.kill(agent, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(20):
            session.launcher.usage(0.01)
        assert "idle" in str(session.show_config())
        assert time.monotonic() - began < 10
        assert asked == [UsageRequest(1, {})]  # of more than twenty looks
    finally:
        os.kill(agent, signal.SIGCONT)
    used = session.launcher.usage(60.0)
    assert used is not None
    assert [use.rank for use in used.uses] == [0, 1]


def _spin(seconds: float) -> None:
    """Compute; how long that takes, the machine decides."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
