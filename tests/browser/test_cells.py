"""A session's day in JupyterLab: cells and what they show, Stop, a rank that dies, completion."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.lab import COLD, Notebook, boxes, contrast

Open = Callable[..., Notebook]

START = """\
import distsession
%load_ext distsession
session = distsession.Session(2)"""

HANG = """\
%%distributed
import time
if rank == 0:
    dist.all_reduce(torch.ones(1))
else:
    print("busy", flush=True)
    while True: time.sleep(0.05)"""

TRAIN = """\
%%distributed
import os, time
from tqdm import tqdm
for step in tqdm(range(60), desc="train"):
    time.sleep(0.05 * (1 + rank))
    while step == 40 - 20 * rank and not os.path.exists("bars-seen"): time.sleep(0.02)
print("loss", 0.25)"""

NESTED = """\
%%distributed
import os, time
from tqdm import tqdm
for epoch in tqdm(range(6), desc="epochs"):
    for step in tqdm(range(20), desc="steps", leave=False):
        time.sleep(0.02)
        while epoch == 2 and step == 10 and not os.path.exists("nested-seen"): time.sleep(0.02)
    tqdm.write(f"loss {epoch}")"""

FIGURES = """\
%%distributed
import matplotlib.pyplot as plt
print("both plot")
plt.figure(figsize=(2, 1.5)); plt.plot([0, rank, 1]); plt.show()
print("rank", rank, "has plotted")"""

LABELS = "[role=group] > span"


def test_stop_in_the_toolbar_ends_a_hung_collective_and_variables_stay(open_notebook: Open) -> None:
    notebook = open_notebook(
        [START, "%%distributed\nx = rank + 41", HANG, "%%distributed\nprint('x is', x)"],
        kernel=COLD,
    )
    notebook.run(0)
    notebook.run(1)
    notebook.start(2)
    notebook.wait_text(2, "in all_reduce #")
    notebook.wait_text(2, "busy")
    notebook.interrupt()
    notebook.wait(2)
    stopped = "KeyboardInterrupt: the run on ranks 0-1 was stopped: rank 0 waits in all_reduce"
    notebook.expect(2, stopped)
    notebook.run(3)
    notebook.expect(3, re.compile(r"rank 0\s+x is 41\s+rank 1\s+x is 42"))


def test_a_cell_shows_a_bar_for_each_rank_and_then_what_they_said(open_notebook: Open) -> None:
    notebook = open_notebook([START, TRAIN])
    notebook.run(0)
    notebook.start(1)
    bars = notebook.output(1).locator("progress")
    notebook.page.wait_for_function(
        """() => {
            const [first, second] = document.querySelectorAll('.jp-Cell-outputArea progress');
            return second?.value > 0 && first.value > 20 && first.value > second.value;
        }"""
    )
    notebook.screenshot("live")
    (notebook.lab.notebooks / "bars-seen").touch()
    notebook.wait(1)
    notebook.expect(1, "ranks 0-1: ")
    expect(bars).to_have_count(0)
    text = notebook.text(1)
    assert text.count("60/60") == 2
    assert text.count("loss 0.25") == 1


def test_bars_within_bars_are_drawn_and_bury_nothing(open_notebook: Open) -> None:
    notebook = open_notebook([START, NESTED])
    notebook.run(0)
    notebook.start(1)
    notebook.output(1).locator("progress").nth(3).wait_for()
    notebook.screenshot("nested")
    (notebook.lab.notebooks / "nested-seen").touch()
    notebook.wait(1)
    expect(notebook.output(1).locator("progress")).to_have_count(0)
    text = notebook.text(1)
    assert [f"loss {epoch}" in text for epoch in range(6)] == [True] * 6
    assert text.count("epochs: 100%") == 2
    assert text.count("loss") == 6
    assert "steps" not in text


def test_figures_of_the_ranks_stand_side_by_side(open_notebook: Open) -> None:
    notebook = open_notebook([START, FIGURES])
    notebook.run(0)
    notebook.run(1)
    pictures = notebook.output(1).locator("img")
    left, right = boxes(pictures, 2)
    assert left["x"] + left["width"] <= right["x"]
    assert abs(left["y"] - right["y"]) < 2
    assert [pictures.nth(n).get_attribute("alt") for n in (0, 1)] == [
        f"rank {n}: <Figure size 200x150 with 1 Axes>" for n in (0, 1)
    ]
    labels = notebook.output(1).locator(LABELS)
    expect(labels).to_have_text(["ranks 0-1", "rank 0", "rank 1"], use_inner_text=True)
    notebook.screenshot("figures")


def test_copying_a_ranks_text_gives_just_its_text(open_notebook: Open) -> None:
    notebook = open_notebook([START, "%%distributed\nprint(f'first {rank}\\nsecond')"])
    notebook.run(0)
    notebook.run(1)
    block = notebook.output(1).locator("[role=group]").nth(1)
    expect(block).to_contain_text("second")
    selected = block.evaluate(
        "block => { getSelection().selectAllChildren(block); return getSelection().toString(); }"
    )
    assert selected.strip() == "first 1\nsecond"


def test_both_themes_can_be_read(open_notebook: Open) -> None:
    notebook = open_notebook(
        [
            START,
            "%%distributed\nimport sys\nprint('plain', rank)\nprint('oops', file=sys.stderr)",
        ]
    )
    notebook.run(0)
    notebook.run(1)
    for theme in ("Dark", "Light"):
        notebook.set_theme(f"JupyterLab {theme}")
        for part in (LABELS, "[role=group] pre", "[role=group] pre span"):
            assert contrast(notebook.output(1).locator(part).first) > 4.5, (theme, part)
        notebook.screenshot(f"theme-{theme.lower()}")
    notebook.set_theme("JupyterLab Light")


def test_a_killed_rank_is_told_and_replaced(open_notebook: Open) -> None:
    notebook = open_notebook(
        [
            START,
            "%%distributed\nkept = rank\nimport os, signal\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
            "session.restart([1])\nsession",
            "%%distributed\nprint('kept' in globals(), dist.get_world_size())",
        ]
    )
    notebook.run(0)
    notebook.run(1)
    notebook.expect(1, "killed by SIGKILL")
    notebook.run(2)
    notebook.expect(2, "idle")
    notebook.run(3)
    notebook.expect(3, re.compile(r"rank 0\s+True 2\s+rank 1\s+False 2"))


def test_tab_completes_from_the_ranks(open_notebook: Open) -> None:
    notebook = open_notebook(
        [START, "%%distributed\nonly_on_the_ranks = 5", "%%distributed\nonly_on"]
    )
    notebook.run(0)
    notebook.run(1)
    notebook.cell(2).locator(".cm-content").click()
    notebook.page.keyboard.press("Control+End")
    notebook.page.keyboard.press("Tab")
    popup = notebook.page.locator(".jp-Completer-item", has_text="only_on_the_ranks")
    code = notebook.cell(2).locator(".cm-content")
    # Where there is one completion only, it may be written at once.
    expect(popup.or_(code.get_by_text("only_on_the_ranks")).first).to_be_visible()
    if popup.count():
        popup.first.click()
    expect(code).to_contain_text("only_on_the_ranks")


def test_a_cell_of_the_ranks_is_highlighted_as_python(open_notebook: Open) -> None:
    notebook = open_notebook(["%%distributed\nfor step in range(3):\n    pass"])
    words = notebook.cell(0).locator(".cm-content span", has_text=re.compile("^for$"))
    plain = notebook.cell(0).locator(".cm-line").nth(1)
    colours = [part.evaluate("e => getComputedStyle(e).color") for part in (words.first, plain)]
    assert colours[0] != colours[1]


OUT_OF_MEMORY = """\
%%distributed
raise torch.OutOfMemoryError(
    f"CUDA out of memory. Tried to allocate {2 + rank / 4:.2f} GiB. GPU {rank} has a total "
    f"capacity of 23.69 GiB of which {300 + 7 * rank}.00 MiB is free.")"""


def test_twelve_ranks_out_of_memory_are_one_error_in_colours(open_notebook: Open) -> None:
    notebook = open_notebook([START.replace("Session(2)", "Session(12)"), OUT_OF_MEMORY])
    notebook.run(0, seconds=110)
    notebook.run(1)
    expect(notebook.output(1).locator(".ansi-red-fg, .ansi-red-intense-fg").first).to_be_attached()
    said = notebook.text(1)
    assert "OutOfMemoryError on ranks 0-11" in said
    assert said.count("Cell In[2], line 2") == 1
    assert "2.00" in said  # what differs is there for each rank
    assert "4.75" in said
    assert len(said.strip().splitlines()) < 40
    notebook.screenshot("twelve-out-of-memory", notebook.output(1))
