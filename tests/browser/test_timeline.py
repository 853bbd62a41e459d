"""A cell's timeline in JupyterLab."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.lab import Notebook

Open = Callable[..., Notebook]

START = """\
import distsession
%load_ext distsession
session = distsession.Session(3)"""

CELL = """\
%%distributed --timeline
import time
x = torch.ones(1000)
for step in range(4):
    time.sleep(0.02 + 0.05 * (rank == 1))
    dist.all_reduce(x)"""


def test_the_picture_says_who_was_waited_for_and_can_be_enlarged(open_notebook: Open) -> None:
    notebook = open_notebook([START, CELL])
    notebook.run(0)
    notebook.run(1)
    notebook.wait_text(1, "The others waited for rank 1: ")
    picture = notebook.output(1).locator("svg[role=img]").first
    assert "waited for rank 1" in (picture.get_attribute("aria-label") or picture.inner_html())
    titles = picture.locator("title").all_text_contents()
    waits = [title for title in titles if "all_reduce" in title and "In[2] line 6" in title]
    assert len(waits) >= 4, titles
    inner = picture.locator("svg").first
    before = inner.get_attribute("viewBox") or ""
    picture.dblclick()
    expect(inner).not_to_have_attribute("viewBox", before)
    notebook.screenshot("timeline", notebook.cell(1))
