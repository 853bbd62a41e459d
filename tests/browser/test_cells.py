"""A session's day in JupyterLab: cells and what they show, Stop, a rank that dies, completion."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.browser.lab import COLD, Notebook

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
import time
from tqdm import tqdm
for step in tqdm(range(60), desc="train"):
    time.sleep(0.05 * (1 + rank))
print("loss", 0.25)"""

NESTED = """\
%%distributed
import time
from tqdm import tqdm
for epoch in tqdm(range(6), desc="epochs"):
    for step in tqdm(range(20), desc="steps", leave=False):
        time.sleep(0.02)
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
    assert "KeyboardInterrupt: the run on ranks 0-1 was stopped" in notebook.text(2)
    assert "Rank 0 waits in all_reduce" in notebook.text(2)
    assert re.search(r"rank 0\s+x is 41\s+rank 1\s+x is 42", notebook.run(3))


def test_a_cell_shows_a_bar_for_each_rank_and_then_what_they_said(open_notebook: Open) -> None:
    notebook = open_notebook([START, TRAIN])
    notebook.run(0)
    notebook.start(1)
    bars = notebook.output(1).locator("progress")
    bars.nth(1).wait_for()
    notebook.page.wait_for_function(
        "document.querySelectorAll('.jp-Cell-outputArea progress')[0]?.value > 20"
    )
    values = [float(bars.nth(rank).get_attribute("value") or 0) for rank in (0, 1)]
    assert values[0] > values[1]
    notebook.screenshot("live")
    notebook.wait(1)
    text = notebook.text(1)
    assert "ranks 0-1: " in text
    assert text.count("60/60") == 2
    assert text.count("loss 0.25") == 1
    assert bars.count() == 0


def test_bars_within_bars_are_drawn_and_bury_nothing(open_notebook: Open) -> None:
    notebook = open_notebook([START, NESTED])
    notebook.run(0)
    notebook.start(1)
    notebook.output(1).locator("progress").nth(3).wait_for()
    notebook.screenshot("nested")
    notebook.wait(1)
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
    left, right = (pictures.nth(rank).bounding_box() for rank in (0, 1))
    assert left is not None
    assert right is not None
    assert left["x"] + left["width"] <= right["x"]
    assert abs(left["y"] - right["y"]) < 2
    assert [pictures.nth(n).get_attribute("alt") for n in (0, 1)] == [
        f"rank {n}: <Figure size 200x150 with 1 Axes>" for n in (0, 1)
    ]
    labels = notebook.output(1).locator(LABELS)
    assert labels.all_inner_texts() == ["ranks 0-1", "rank 0", "rank 1"]
    notebook.screenshot("figures")


def test_copying_a_ranks_text_gives_just_its_text(open_notebook: Open) -> None:
    notebook = open_notebook([START, "%%distributed\nprint(f'first {rank}\\nsecond')"])
    notebook.run(0)
    notebook.run(1)
    block = notebook.output(1).locator("[role=group]").nth(1)
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
            assert _contrast(notebook, notebook.output(1).locator(part).first) > 4.5, (theme, part)
        notebook.screenshot(f"theme-{theme.lower()}")
    notebook.set_theme("JupyterLab Light")


def _contrast(notebook: Notebook, element: object) -> float:
    """The ratio of an element's colour to what is behind it, as WCAG 2 defines it."""
    return float(
        element.evaluate(  # type: ignore[attr-defined]
            """element => {
                const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
                const over = (top, below) => {
                    const alpha = top.length > 3 ? top[3] : 1;
                    return below.map((value, n) => alpha * top[n] + (1 - alpha) * value);
                };
                const chain = [];
                for (let at = element; at; at = at.parentElement) chain.unshift(at);
                let back = [255, 255, 255];
                let opacity = 1;
                for (const at of chain) {
                    const style = getComputedStyle(at);
                    back = over(parse(style.backgroundColor), back);
                    opacity *= Number(style.opacity);
                }
                const colour = parse(getComputedStyle(element).color).slice(0, 3);
                const front = over([...colour, opacity], back);
                const light = rgb => {
                    const [r, g, b] = rgb.map(v => v / 255).map(
                        v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                };
                const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
                return (a + 0.05) / (b + 0.05);
            }"""
        )
    )


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
    assert "killed by SIGKILL" in notebook.run(1)
    assert "idle" in notebook.run(2)
    assert re.search(r"rank 0\s+True 2\s+rank 1\s+False 2", notebook.run(3))


def test_tab_completes_from_the_ranks(open_notebook: Open) -> None:
    notebook = open_notebook(
        [START, "%%distributed\nonly_on_the_ranks = 5", "%%distributed\nonly_on"]
    )
    notebook.run(0)
    notebook.run(1)
    notebook.cell(2).locator(".cm-content").click()
    notebook.page.keyboard.press("Control+End")
    notebook.page.keyboard.press("Tab")
    notebook.page.wait_for_function(
        """() => document.querySelector('.jp-Completer-item')
            || document.querySelectorAll('.jp-Notebook .jp-Cell')[2]
                .querySelector('.cm-content').innerText.includes('only_on_the_ranks')"""
    )
    popup = notebook.page.locator(".jp-Completer-item", has_text="only_on_the_ranks")
    if popup.count():
        popup.first.click()
    assert "only_on_the_ranks" in notebook.cell(2).locator(".cm-content").inner_text()


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
    said = notebook.run(1)
    assert "OutOfMemoryError on ranks 0-11" in said
    assert said.count("Cell In[2], line 2") == 1
    assert "2.00" in said  # what differs is there for each rank
    assert "4.75" in said
    assert len(said.strip().splitlines()) < 40
    assert notebook.output(1).locator(".ansi-red-fg, .ansi-red-intense-fg").count() > 0
    notebook.screenshot("twelve-out-of-memory", notebook.output(1))
