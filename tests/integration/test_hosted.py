"""A front end that knows no subshells, as hosted notebooks and editors are.

``make test-hosted`` runs this with what such notebooks have installed. With newer packages, too, a
front end may send everything to the kernel's main thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from distsession.notebook.panel import LATE_CLICKS_HINT

from .kernel import Notebook, Shown
from .test_panel import HANG, WIDGET_VIEW_TYPE, FrontEnd

SLOW_S = 120.0
"""What a cell may take on a machine that does much else."""

BARS = """\
%%distributed
from tqdm.auto import tqdm
for step in tqdm(range(10), desc=f"fit {rank}"):
    pass"""
SLIDER = """\
%%distributed
import ipywidgets
slider = ipywidgets.IntSlider(value=rank)
slider"""


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    front = FrontEnd(subshells=False)
    try:
        front.run("%load_ext distsession\nsession = %session start 2 --backend gloo")
        assert not front.errors
        yield front
    finally:
        front.notebook.close()


@pytest.fixture
def notebook(front: FrontEnd) -> Notebook:
    return front.notebook


def run(notebook: Notebook, cell: str, *answers: str) -> Shown:
    shown = notebook.run(cell, SLOW_S, answers)
    assert not shown.error, shown.error
    return shown


def show_panel(front: FrontEnd) -> None:
    front.run("session")
    front.wait(lambda: "idle" in front.values(), SLOW_S)


def interrupt(front: FrontEnd) -> None:
    """Its own Stop."""
    front.client.control_channel.send(front.client.session.msg("interrupt_request", {}))


def test_the_panel_is_live_while_a_cell_runs_and_the_own_stop_ends_it(front: FrontEnd) -> None:
    show_panel(front)
    assert WIDGET_VIEW_TYPE in front.shown[-1]
    front.errors.clear()
    request = front.start(HANG)
    front.wait(lambda: "waiting in barrier" in front.values(), SLOW_S)
    interrupt(front)
    front.wait(lambda: request in front.idle, SLOW_S)
    assert front.errors == ["RunInterrupt"]
    front.wait(lambda: "waiting in barrier" not in front.values(), SLOW_S)


def test_a_click_on_stop_waits_for_the_cell_and_says_which_one_works(front: FrontEnd) -> None:
    show_panel(front)
    request = front.start(HANG)
    front.wait(lambda: "waiting in barrier" in front.values(), SLOW_S)
    front.press("Stop")
    front.take(1)  # nothing is to happen
    assert request not in front.idle
    interrupt(front)
    front.wait(lambda: request in front.idle, SLOW_S)
    front.wait(lambda: f"nothing was running. {LATE_CLICKS_HINT}" in front.values(), SLOW_S)


def test_buttons_work_between_cells(front: FrontEnd) -> None:
    show_panel(front)
    front.press("Diagnose")
    front.wait(lambda: "Diagnose, " in front.values(), SLOW_S)
    front.press("Close")
    front.wait(lambda: "Diagnose, " not in front.values(), SLOW_S)
    front.run("%%distributed\nprint('said by', rank)")
    front.press("Log")
    front.wait(lambda: "said by 0" in front.values(), SLOW_S)
    front.press("Close log")


def test_a_rank_that_dies_is_replaced_by_the_button(front: FrontEnd) -> None:
    show_panel(front)
    front.run("import os\nos.kill(session.infos[1].pid, 9)")
    choice = front.rank_choice()
    front.wait(lambda: front.models[choice]["index"] == 2, SLOW_S)
    front.press("Restart rank")
    front.wait(lambda: "Rank 1 has a fresh process" in front.values(), SLOW_S)
    front.run("%distributed rank")
    assert front.shown[-1]["text/plain"] == "[rank 0] 0\n[rank 1] 1"


def test_bars_stand_beside_their_ranks_and_end_as_text(front: FrontEnd, notebook: Notebook) -> None:
    front.run(BARS)
    shown = next(data for data in reversed(front.shown) if WIDGET_VIEW_TYPE in data)
    box = front.models[shown[WIDGET_VIEW_TYPE]["model_id"]]
    assert box["_model_name"] == "VBoxModel"
    assert [front.models[row[10:]]["_model_name"] for row in box["children"]] == ["HBoxModel"] * 2
    bars = [m for m in front.models.values() if m["_model_name"] == "FloatProgressModel"]
    assert [(bar["value"], bar["bar_style"]) for bar in bars] == [(10.0, "success")] * 2
    lines = run(notebook, BARS).plain.splitlines()
    assert [line.partition("|")[0] for line in lines] == [
        f"[rank {rank}] fit {rank}: 100%" for rank in range(2)
    ]


def test_a_slider_that_is_moved_reaches_its_rank(front: FrontEnd) -> None:
    front.run(SLIDER)
    front.set(front.model("IntSliderModel", value=1), value=42)

    def is_there() -> bool:
        front.run("%distributed slider.value")
        return bool(front.shown[-1]["text/plain"] == "[rank 0]  0\n[rank 1] 42")

    front.wait(is_there, SLOW_S)


def test_a_rank_asks_and_is_answered(notebook: Notebook) -> None:
    shown = run(notebook, "%%distributed\nif rank == 1:\n    name = input('who? ')", "somebody")
    assert [prompt.endswith("who? ") for prompt in shown.prompts] == [True]
    shown = run(notebook, "%distributed name if rank else ''")
    assert shown.result == "[rank 0] ''\n[rank 1] 'somebody'"


def test_a_rank_is_stepped_through(notebook: Notebook) -> None:
    code = "%%distributed 1\ndef double(x):\n    breakpoint()\n    return 2 * x\nprint(double(21))"
    shown = run(notebook, code, "p x", "c")
    assert len(shown.prompts) == 2
    assert "21" in shown.plain
    assert "42" in shown.plain


def test_hidden_cells_of_an_editor_change_no_numbers(front: FrontEnd, notebook: Notebook) -> None:
    def number() -> int:
        error = notebook.run("%%distributed 0\n1 / 0", SLOW_S).error
        return int(re.findall(r"at In\[(\d+)\] line 2", error)[0])

    before = number()
    front.run("__vsc_ipynb_file__ = '/home/me/a.ipynb'", silent=True, store_history=False)
    assert number() == before + 1


def test_px_and_cells_share_variables(notebook: Notebook) -> None:
    run(notebook, "%%distributed\nshared = rank + 1")
    shown = str(run(notebook, "%%px\nprint('px', shared)"))
    assert "px 1" in shown
    assert "px 2" in shown


def test_a_note_stands_below_its_error(notebook: Notebook) -> None:
    shown = notebook.run("del session\nsession", SLOW_S)
    assert shown.ename == "NameError"
    assert shown.error.endswith("has no variable yet. Type: session = %session"), shown.error
    run(notebook, "session = %session")
    noted = "error = ValueError('what')\nerror.add_note('and why')\nraise error"
    assert re.search(r"ValueError: what\nand why$", notebook.run(noted, SLOW_S).error)
    run(notebook, "%xmode Plain")
    assert re.search(r"ValueError: what\nand why\s*$", notebook.run(noted, SLOW_S).error)
    run(notebook, "%xmode Context")
    chained = "try:\n    " + noted.replace("\n", "\n    ") + "\nexcept ValueError:\n    1 / 0"
    assert notebook.run(chained, SLOW_S).error.count("ValueError: what\nand why\n") == 1


def test_an_error_on_a_rank_is_told_with_its_notes(notebook: Notebook) -> None:
    run(notebook, "weights = 3")
    shown = notebook.run("%distributed weights", SLOW_S)
    assert shown.ename == "RunError"
    assert "%%distributed --push weights" in shown.error


def test_the_session_ends_and_the_panel_says_so(front: FrontEnd) -> None:
    show_panel(front)
    front.run("session.close()")
    front.wait(lambda: ": closed" in front.values(), SLOW_S)
