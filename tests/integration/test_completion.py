"""Completion and inspection in a real Jupyter kernel."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from distsession.devices import NCCL_NAMES

from .kernel import Notebook


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    shown = notebook.run("%load_ext distsession\n%session start 2 --backend gloo")
    assert "2 ranks, gloo" in shown.result, shown
    notebook.run(
        "%%distributed\nmodel = torch.nn.Linear(2, 2)\ncalls = 0\n"
        "def train_there(model, lr=0.1):\n    '''Train it.'''\n"
        "class C:\n    @property\n    def p(self):\n        global calls; calls += 1\n"
        "c = C()\nif rank == 1: only_one = {'the key': 1}"
    )
    notebook.run("here_only = 1\nimport time\nfrom distsession import current_session")
    yield notebook
    notebook.close()


def complete(notebook: Notebook, code: str) -> list[str]:
    reply = notebook.client.complete(code, len(code), reply=True, timeout=60)["content"]
    assert reply["status"] == "ok"
    start = reply["cursor_start"]
    return [code[:start] + match for match in reply["matches"]]


def inspect(notebook: Notebook, code: str) -> Any:
    return notebook.client.inspect(code, len(code), reply=True, timeout=60)["content"]


def check_names(notebook: Notebook) -> None:
    assert "%%distributed\nx = train_there" in complete(notebook, "%%distributed\nx = train_")
    assert "%%distributed\nmodel.bias" in complete(notebook, "%%distributed\nmodel.bi")
    text = inspect(notebook, "%%distributed\ntrain_there(")["data"]["text/plain"]
    assert "[ranks 0-1]" in text
    assert "Signature: train_there(model, lr=0.1)" in text
    assert "Train it." in text


def test_cells_use_the_ranks_names(notebook: Notebook) -> None:
    check_names(notebook)
    assert complete(notebook, "%%distributed 1\nonly_one['the") == [
        "%%distributed 1\nonly_one['the key']"
    ]
    assert "%distributed train_there" in complete(notebook, "%distributed train_t")
    assert "%distributed --diff model" in complete(notebook, "%distributed --diff mod")
    text = inspect(notebook, "%%distributed\nrank")["data"]["text/plain"]
    assert "[rank 0]" in text
    assert "[rank 1]" in text


def test_flags_of_the_magics_are_offered(notebook: Notebook) -> None:
    assert "%%distributed --timeout" in complete(notebook, "%%distributed --t")
    assert "%%distributed 0 --out" in complete(notebook, "%%distributed 0 --o")
    assert "%session diagnose" in complete(notebook, "%session dia")
    assert "%session start --backend" in complete(notebook, "%session start --ba")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%session start 2 --backend ", ["gloo", *NCCL_NAMES, "mpi", "ucc", "cpu:gloo,cuda:nccl"]),
        ("session = %session start 2 --backend=gl", ["gloo"]),
        ("%session start 2 --check ", ["shared", "strict", "detail", "off"]),
        ("%session start 2 --device-ipc ", ["auto", "off"]),
        ("%session start 2 --launcher in", ["inline"]),
        ("%session start 2 --launcher s", ["ssh", "slurm", "sge"]),
        ("%session start --ranks-per", ["--ranks-per-host"]),
        ("%session start --ho", ["--hosts"]),
        ("%session start --launcher-", ["--launcher-options"]),
        ("%session start --com", ["--command"]),
        ("%session start --add", ["--addresses"]),
        ("%session start --py", ["--python"]),
        ("%session start --fo", ["--folder"]),
        ("%session start --preload torchg", ["torchgen"]),
        ("%session preload torchg", ["torchgen"]),
        ("%session preload json torchg", ["torchgen"]),
        ("%session auto o", ["on", "off"]),
        ("%%distributed --push here_o", ["here_only"]),
        ("%%distributed --push time,here_o", ["here_only"]),
        ("%%distributed --pull mod", ["model"]),
        ("%%distributed --debug ", ["0", "1", "0-1"]),
        ("%distributed --d", ["--diff"]),
    ],
)
def test_values_of_the_magics_flags_are_offered(
    notebook: Notebook, line: str, words: list[str]
) -> None:
    begun = line[: len(line) - len(re.split("[ =,]", line)[-1])]
    found = complete(notebook, line)
    assert set(found) == {begun + each for each in words}


def test_ranks_are_offered_beside_flags(notebook: Notebook) -> None:
    assert {"%%distributed 0", "%%distributed 0-1", "%%distributed --out"} <= {
        *complete(notebook, "%%distributed ")
    }
    assert "%session restart 1" in complete(notebook, "%session restart ")
    assert "%session start 1" not in complete(notebook, "%session start ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("%session", ["start", "restart", "diagnose", "%session help COMMAND"]),
        ("%distributed", ["--diff", "%%distributed"]),
        ("%%distributed", ["--out", "--push", "--pull", "--timeout", "--debug", "--profile-to"]),
    ],
)
def test_a_question_mark_and_help_show_all_options(
    notebook: Notebook, name: str, words: list[str]
) -> None:
    asked = inspect(notebook, name)["data"]["text/plain"]
    helped = notebook.run(f"{name} --help").stdout
    for word in words:
        assert word in asked
        assert word in helped
    if name == "%session":
        assert notebook.run("%session help").stdout == notebook.run("%session -h").stdout == helped


def test_nothing_runs(notebook: Notebook) -> None:
    assert "%%distributed\nc.p" in complete(notebook, "%%distributed\nc.")
    complete(notebook, "%%distributed\nc.p.")
    inspect(notebook, "%%distributed\nc.p")
    assert notebook.run("%distributed calls").result == "[ranks 0-1] 0"


def test_other_cells_use_the_notebooks_names(notebook: Notebook) -> None:
    assert "here_only" in complete(notebook, "here_on")
    assert "train_there" not in complete(notebook, "train_th")
    assert not inspect(notebook, "train_there")["found"]
    assert inspect(notebook, "time.sleep")["found"]


def test_busy_ranks_answer_all_the_same(notebook: Notebook) -> None:
    notebook.run(
        "def busy():\n    import time\n    end = time.time() + 20\n"
        "    if rank: dist.barrier()\n"
        "    while time.time() < end: pass\n"
        "future = current_session().submit(busy); time.sleep(0.3)"
    )
    began = time.monotonic()
    check_names(notebook)
    assert time.monotonic() - began < 10
    assert notebook.run("future.done()").result == "False"
    notebook.run("%session interrupt")
    notebook.run("future.exception(20)")


def test_ranks_that_cannot_answer_are_not_waited_for(notebook: Notebook) -> None:
    notebook.run(
        "import os, signal\npids = [i.pid for i in current_session().infos]\n"
        "for pid in pids: os.kill(pid, signal.SIGSTOP)"
    )
    try:
        began = time.monotonic()
        complete(notebook, "%%distributed\ntrain_th")
        assert time.monotonic() - began < 5
        assert not inspect(notebook, "%%distributed\ntrain_there")["found"]
    finally:
        notebook.run("for pid in pids: os.kill(pid, signal.SIGCONT)")
    check_names(notebook)


def test_a_question_mark_shows_what_the_ranks_have(notebook: Notebook) -> None:
    shown = notebook.run("%%distributed\ntrain_there?")
    assert "Train it." in str(shown.data) + shown.stdout


def test_unloading_takes_it_away(notebook: Notebook) -> None:
    assert not notebook.run("%unload_ext distsession").error
    assert "%%distributed\ntrain_there" not in complete(notebook, "%%distributed\ntrain_th")
    assert not inspect(notebook, "%%distributed\ntrain_there")["found"]
    assert not notebook.run("%load_ext distsession").error
    check_names(notebook)
