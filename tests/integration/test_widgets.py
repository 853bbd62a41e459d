"""Widgets made on ranks, in a real kernel, and what becomes of them elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from distsession.display.widgets import WIDGET_VIEW
from tests.until import until as wait_until

from .kernel import Notebook, execute_notebook

BARS = """\
%%distributed
import time
from tqdm.auto import tqdm
time.sleep(0.1 * (world_size - rank))
for step in tqdm(range(10), desc=f"fit {rank}"):
    time.sleep(0.02)"""

SLIDER = """\
%%distributed
import ipywidgets
slider = ipywidgets.IntSlider(value=rank)
seen = []
slider.observe(lambda change: seen.append(change["new"]), "value")
slider"""

SIZES = """\
from distsession.notebook.comms import relay
from distsession.notebook.widget_versions import comm_manager, instances
len(relay), len(relay.models), len(comm_manager().comms), len(instances())"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    shown = notebook.run("%load_ext distsession\nsession = %session start 2\nimport time")
    assert not shown.error, shown.error
    notebook.run("from distsession import current_session\nsession = current_session()")
    yield notebook
    notebook.close()


def move(notebook: Notebook, rank: int, value: int) -> None:
    """Move the slider of a rank as the page would."""
    comm_id = re.findall(r"'(\w+)'", notebook.run("%distributed slider.model_id").result)[rank]
    data = {"method": "update", "state": {"value": value}, "buffer_paths": []}
    message = notebook.client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
    notebook.client.shell_channel.send(message)


def until(notebook: Notebook, expression: str, expected: str) -> None:
    deadline = time.monotonic() + 30
    while (found := notebook.run(f"%distributed {expression}").result) != expected:
        assert time.monotonic() < deadline, found


def test_bars_stand_in_the_order_of_ranks_and_end_as_text_too(notebook: Notebook) -> None:
    shown = notebook.run(BARS)
    # Without a widget, for which a notebook that is opened again has but an error.
    assert not any(WIDGET_VIEW in each for each in shown.data)
    data = next(each for each in shown.data if "fit 0" in each["text/plain"])
    assert "fit 1: 100%" in data["text/html"]
    lines = data["text/plain"].splitlines()
    assert [line.partition("|")[0] for line in lines] == [
        f"[rank {rank}] fit {rank}: 100%" for rank in range(2)
    ]
    assert "model not found" not in shown.plain


def test_a_slider_reaches_its_rank_and_no_other(notebook: Notebook) -> None:
    notebook.run(SLIDER)
    move(notebook, 1, 42)
    until(notebook, "slider.value, seen", "[rank 0] (0, [])\n[rank 1] (42, [42])")


def test_what_comes_while_a_rank_is_busy_waits_for_its_end(notebook: Notebook) -> None:
    notebook.run(SLIDER)
    notebook.run("%%distributed\ndef work():\n    time.sleep(1.0)\n    return list(seen)")
    notebook.run("future = session.submit(lambda: work())")
    move(notebook, 0, 7)
    assert notebook.run("list(future.result()[0])").result == "[]"
    until(notebook, "seen", "[rank 0] [7]\n[rank 1] []")


def test_an_error_of_a_callback_is_shown_and_the_rank_goes_on(notebook: Notebook) -> None:
    notebook.run(SLIDER)
    notebook.run("%%distributed\nslider.observe(lambda _: 1 / 0, 'value')")
    move(notebook, 0, 5)
    until(notebook, "slider.value", "[rank 0] 5\n[rank 1] 1")


def test_a_callback_that_hangs_is_ended_by_a_stop(notebook: Notebook, tmp_path: Path) -> None:
    path = tmp_path / "begun"
    notebook.run(SLIDER)
    notebook.run(
        "%%distributed\n"
        f"def hang(_):\n    open({str(path)!r}, 'w').close()\n    time.sleep(600)\n"
        "slider.observe(hang, 'value')"
    )
    move(notebook, 0, 5)
    wait_until(path.exists)
    notebook.run(
        "import os, signal, threading, time\n"
        "def press():\n"
        "    missing = lambda: [p.missing for p in session.channel.pending()]\n"
        "    while missing() != [(0,)]: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=press).start()"
    )
    error = notebook.run("%distributed rank").error
    assert "when rank 1 had finished it already; it does not begin on rank 0" in error
    shown = notebook.run("%distributed slider.value")
    assert shown.result == "[rank 0] 5\n[rank 1] 1"


@pytest.mark.timeout(600)
def test_ten_thousand_comms_of_two_ranks_leave_nothing_in_the_kernel(notebook: Notebook) -> None:
    notebook.run(SLIDER)
    before = notebook.run(SIZES).result
    # zmq drops what is published faster than this test reads it: from 1,000 messages on, of which
    # up to 499 are those of earlier cells that it has not counted as read yet.
    for _ in range(125):
        notebook.run(
            "%%distributed\n"
            "import comm\n"
            "for number in range(40):\n"
            "    made = comm.create_comm(target_name='jupyter.widget', data={'state': {}})\n"
            "    made.send({'method': 'update', 'state': {'value': number}})\n"
            "    made.close()"
        )
    assert notebook.run(SIZES).result == before
    few = "[ranks 0-1] True"
    assert notebook.run("%distributed len(comm.get_comm_manager().comms) < 100").result == few


def test_px_shows_its_widgets_beside_ours(notebook: Notebook) -> None:
    notebook.run("%px pass")
    theirs = notebook.run("%px ipywidgets.IntSlider(value=3)")
    assert not theirs.error
    assert "IntSlider(value=3)" in theirs.plain
    notebook.run(SLIDER)
    move(notebook, 0, 33)
    until(notebook, "slider.value", "[rank 0] 33\n[rank 1]  1")


def test_the_comms_of_a_rank_that_is_replaced_are_closed(notebook: Notebook) -> None:
    notebook.run(SLIDER)
    notebook.run("from distsession.notebook.comms import relay")
    ranks = "sorted({remote.rank for remote in relay._remotes.values()})"
    assert notebook.run(ranks).result == "[0, 1]"
    notebook.run("session.restart([1])")
    notebook.run("%distributed rank")
    assert notebook.run(ranks).result == "[0]"


def execute(*cells: str) -> Any:
    """A notebook that nbclient has executed."""
    made = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    execute_notebook(made, timeout=120)
    return made


def test_an_executed_notebook_keeps_the_final_state_of_bars() -> None:
    made = execute("%load_ext distsession\n%session start 4", BARS, "%session close")
    nbformat.validate(made)
    state = made.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    bars = [m["state"] for m in state.values() if m["model_name"] == "FloatProgressModel"]
    assert [(bar["value"], bar["bar_style"]) for bar in bars] == [(10.0, "success")] * 4
    boxes = [m["state"] for m in state.values() if m["model_name"] == "VBoxModel"]
    assert [len(box["children"]) for box in boxes] == [4]
    for child in boxes[0]["children"]:
        assert child.removeprefix("IPY_MODEL_") in state


def test_bars_of_many_ranks_are_lines_of_text() -> None:
    made = execute(
        "%load_ext distsession\n%session start 9",
        BARS.replace(" {rank}", "")
        + "\nimport ipywidgets\ndisplay(ipywidgets.IntSlider(value=rank))",
        "%session close",
    )
    outputs = made.cells[1].outputs
    texts = [output["data"].get("text/plain", "") for output in outputs]
    assert any("(slowest)] fit" in text for text in texts)
    assert any(text.count("IntSlider(value=") == 9 for text in texts)
    state = made.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    names = [model["model_name"] for model in state.values()]
    assert names.count("IntSliderModel") == 9
    assert "FloatProgressModel" not in names


def test_a_script_on_ranks_writes_its_bars_as_text(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tqdm.auto import tqdm\n"
        "for epoch in range(2):\n"
        "    for step in tqdm(range(20), desc=f'epoch {epoch}'):\n"
        "        pass\n"
        "    print('done', epoch)\n"
    )
    for flags in ([], ["--plain"]):
        ended = subprocess.run(
            [sys.executable, "-m", "distsession", "run", "-n", "2", *flags, str(script)],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        for epoch in range(2):
            assert ended.stderr.count(f"epoch {epoch}: 100%|") == 2, ended.stderr


WIDGETS = "application/vnd.jupyter.widget-state+json"


def convert(to: str, source: Path, *options: str) -> Path:
    """What nbconvert makes of a notebook."""
    command = [sys.executable, "-m", "nbconvert", "--to", to, *options]
    made = source.with_name(f"made.{'html' if to == 'html' else 'ipynb'}")
    command += ["--output", made.name, str(source)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return made


def texts_below(state: dict[str, Any], model_id: str) -> Iterator[str]:
    """What a widget that an executed notebook has kept, and all in it, say; none is missing."""
    model = state[model_id.removeprefix("IPY_MODEL_")]
    for name in ("value", "bar_style"):
        if name in model["state"]:
            yield str(model["state"][name]).replace("\u2007", " ")
    for name in ("layout", "style", "children"):
        references = model["state"].get(name) or []
        for reference in references if isinstance(references, list) else [references]:
            yield from texts_below(state, reference)


@pytest.mark.timeout(600)
def test_nbconvert_keeps_sliders_as_they_were_last_and_bars_as_text(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert", reason="the notebooks extra is not installed")
    nested = (
        "%%distributed\nfrom tqdm.notebook import tqdm\n"
        "for epoch in tqdm(range(2), desc='epochs'):\n"
        "    for step in tqdm(range(3), desc='steps', leave=False):\n"
        "        pass"
    )
    moved = "%%distributed\nslider.value = 70 + rank"
    cells = ["%load_ext distsession\nsession = %session start 2", BARS, nested, SLIDER, moved]
    source = tmp_path / "notebook.ipynb"
    made = new_notebook(cells=[new_code_cell(cell) for cell in (*cells, "session.close()")])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(made, source)
    executed = convert("notebook", source, "--execute")
    notebook = nbformat.read(executed, as_version=4)
    nbformat.validate(notebook)
    state = notebook.metadata["widgets"][WIDGETS]["state"]
    shown = [
        list(texts_below(state, output["data"][WIDGET_VIEW]["model_id"]))
        for cell in notebook.cells
        for output in cell.outputs
        if WIDGET_VIEW in output.get("data", {})
    ]
    [sliders] = shown
    stays = "\n".join(
        str(output["data"]["text/html"])
        for cell in notebook.cells
        for output in cell.outputs
        if "%|" in str(output.get("data", {}).get("text/html", ""))
    )
    assert [stays.count(f"fit {rank}: 100%") for rank in (0, 1)] == [1, 1]
    assert stays.count("epochs: 100%") == 2
    assert "steps" not in stays
    assert [text for text in sliders if text.isdigit()] == ["70", "71"]
    page = convert("html", executed).read_text()
    assert WIDGETS in page
    assert "fit 1:" in page.replace("\\u2007", " ").replace("\u2007", " ")
