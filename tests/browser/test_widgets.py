"""Widgets that are made on a rank, in JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, expect

from tests.browser.lab import Lab, Notebook, Tab, write_notebook
from tests.browser.test_reopened import reload, save
from tests.until import until
from tests.warm_agents import WarmProcess

Open = Callable[..., Notebook]

START = """\
import distsession
%load_ext distsession
session = distsession.Session({})"""

BARS = """\
%%distributed
import time
from tqdm.auto import tqdm
time.sleep(0.2 * (world_size - rank))  # the last rank comes first
for step in tqdm(range(30), desc=f"fit {rank}"):
    time.sleep(0.02)"""

NESTED = """\
%%distributed
for epoch in tqdm(range(4), desc="epochs"):
    for step in tqdm(range(10), desc="steps", leave=False):
        time.sleep(0.02)"""

SLIDER = """\
%%distributed
import ipywidgets
slider = ipywidgets.IntSlider(value=10 * rank, max=50, description=f"of {rank}")
seen = []
slider.observe(lambda change: seen.append(change["new"]), "value")
slider"""


def plain(text: str) -> str:
    """Text with ordinary spaces; tqdm has others."""
    return text.replace("\u2007", " ")


def ended_bars(part: Locator) -> int:
    """How many bars say that their rank has ended."""
    return len(re.findall(r"rank \d \(ended\)\s+fit:\s+40%", plain(part.inner_text())))


def test_bars_of_four_ranks_reach_their_end_in_the_ranks_order(open_notebook: Open) -> None:
    notebook = open_notebook([START.format(4), BARS, NESTED])
    notebook.run(0)
    notebook.run(1)
    shown = notebook.output(1)
    ends = [(str(rank), str(rank)) for rank in range(4)]
    until(lambda: re.findall(r"rank (\d)\s+fit (\d): 100%", plain(shown.inner_text())) == ends)
    until(lambda: shown.inner_text().count("30/30") == 4)
    expect(shown.locator(".jupyter-widgets")).to_have_count(0)  # they are text at their end
    notebook.screenshot("widget-bars")
    notebook.run(2)
    shown = notebook.output(2)
    until(lambda: plain(shown.inner_text()).count("epochs: 100%") == 4)
    expect(shown).not_to_contain_text("steps")
    assert "model not found" not in notebook.page.inner_text("body")


def test_a_slider_in_the_page_reaches_its_rank(open_notebook: Open) -> None:
    notebook = open_notebook([START.format(2), SLIDER, "%%distributed\nprint(slider.value, seen)"])
    notebook.run(0)
    notebook.run(1)
    sliders = notebook.output(1).locator(".widget-slider")
    sliders.nth(1).wait_for()
    handle = sliders.nth(1).locator(".noUi-handle")
    handle.focus()
    for _ in range(3):
        notebook.page.keyboard.press("ArrowRight")
    sliders.nth(1).get_by_text("13").wait_for()
    # The page sends a change only when the kernel has taken the one before.
    until(lambda: re.search(r"rank 1\s+13", notebook.run(2)))
    notebook.expect(2, re.compile(r"rank 0\s+0 \[\]"))
    notebook.expect(2, re.compile(r"rank 1\s+13 \[.*13\]"))
    notebook.screenshot("widget-slider")


def test_a_rank_changes_what_the_page_shows(open_notebook: Open) -> None:
    notebook = open_notebook(
        [START.format(2), SLIDER, "%%distributed 1\nslider.value = 44", "session.restart([1])"]
    )
    for number in range(3):
        notebook.run(number)
    notebook.output(1).locator(".widget-slider").nth(1).get_by_text("44").wait_for()
    notebook.run(3)
    notebook.output(1).get_by_text("rank 1 (ended)").wait_for()


def test_widgets_are_there_again_when_the_page_is_loaded_again(open_notebook: Open) -> None:
    notebook = open_notebook([START.format(2), SLIDER, "%%distributed\nprint(slider.value)"])
    notebook.run(0)
    notebook.run(1)
    notebook.output(1).locator(".widget-slider").nth(1).wait_for()
    save(notebook)
    reload(notebook)
    notebook.output(1).locator(".widget-slider").nth(1).wait_for()
    handle = notebook.output(1).locator(".widget-slider").nth(1).locator(".noUi-handle")
    handle.focus()
    notebook.page.keyboard.press("ArrowRight")
    notebook.output(1).locator(".widget-slider").nth(1).get_by_text("11").wait_for()
    notebook.run(2)
    notebook.expect(2, re.compile(r"rank 1\s+11"))


def test_what_ranks_showed_is_there_again_after_they_have_ended(open_notebook: Open) -> None:
    killed = "%%distributed 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    running = """\
%%distributed
from tqdm.auto import tqdm
bar = tqdm(total=10, desc="fit", mininterval=0)
bar.update(4)"""
    notebook = open_notebook(
        [START.format(2), SLIDER, running, killed, "session.restart()", "%distributed rank"]
    )
    for number in range(6):
        notebook.run(number)
    save(notebook)
    for _ in range(2):
        notebook.output(1).get_by_text("rank 1 (ended)").wait_for()
        notebook.output(1).locator(".widget-slider").nth(1).wait_for()
        shown = notebook.output(2)
        shown.locator(".progress-bar-danger").nth(1).wait_for()
        until(lambda: ended_bars(notebook.output(2)) == 2)
        notebook.screenshot("widgets-ended")
        reload(notebook)
    assert "not found" not in notebook.page.inner_text("body")


def test_a_page_that_knows_no_widgets_shows_bars_as_text(
    browser: Any, warm: WarmProcess, tmp_path: Path
) -> None:
    lab = Lab(tmp_path, warm, without=["@jupyter-widgets/jupyterlab-manager"])
    tab = Tab(lab, browser)
    try:
        cells = write_notebook([START.format(2), BARS, BARS])
        notebook = tab.open(cells, "without-widgets", "python3")
        notebook.run(0)
        for number in (1, 2):
            notebook.run(number)
            notebook.expect(
                number, re.compile(r"rank 0\W+fit 0: 100%.*rank 1\W+fit 1: 100%", re.DOTALL)
            )
        assert notebook.output(2).inner_text().count("30/30") == 2
        notebook.screenshot("without-widgets")
        lab.ask("DELETE", f"api/kernels/{notebook.kernel}")
    finally:
        tab.close()
        lab.close()
