"""A notebook that is opened again, in the page that its user left yesterday."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.lab import Notebook, wait_ready

START = """\
import distsession
%load_ext distsession
session = distsession.Session(2, backend="gloo")"""


def save(notebook: Notebook) -> None:
    with notebook.page.expect_response(
        lambda said: said.request.method == "PUT" and notebook.name in said.url
    ):
        notebook.page.keyboard.press("Control+s")


def reload(notebook: Notebook) -> None:
    notebook.load_again()
    wait_ready(notebook.page)


def test_the_panel_is_live_with_its_kernel_and_a_table_without(
    open_notebook: Callable[..., Notebook],
) -> None:
    notebook = open_notebook([START, "session"])
    shown = notebook.output(1)
    live = shown.get_by_role("table", name="Ranks of the session")
    table = shown.get_by_role("row", name=re.compile("world size"))
    notebook.run(0)
    notebook.run(1)
    expect(live).to_be_visible()
    expect(table).to_be_hidden()
    save(notebook)
    reload(notebook)
    expect(live).to_be_visible()
    expect(table).to_be_hidden()
    assert notebook.trouble == []

    notebook.lab.ask("POST", f"api/kernels/{notebook.kernel}/restart")
    reload(notebook)
    expect(
        shown.get_by_role("row").filter(has_text="idle", has_not_text="keep_idle")
    ).to_have_count(2)
    expect(table).to_have_text(re.compile(r"world size\s*2"))
    expect(live).to_have_count(0)
    notebook.screenshot("reopened", shown)
    assert all("widget model not found" in said for said in notebook.trouble)  # as of any widget
    notebook.trouble.clear()


def test_what_came_while_the_page_was_reloaded_is_shown_again(
    open_notebook: Callable[..., Notebook],
) -> None:
    slow = """\
%%distributed
import os, time
print("before", rank)
while not os.path.exists("go"): time.sleep(0.02)
print("after", rank)"""
    notebook = open_notebook([START, slow, "%session output"])
    notebook.run(0)
    save(notebook)
    notebook.start(1)
    notebook.wait_text(1, "before 1")
    notebook.load_again()
    (notebook.lab.notebooks / "go").touch()
    wait_ready(notebook.page)
    notebook.run(2)
    for text in ("before 0\nafter 0", "before 1\nafter 1", "This was the output of In[2]"):
        notebook.expect(2, re.compile(re.escape(text)))
    notebook.screenshot("output-again", notebook.output(2))
