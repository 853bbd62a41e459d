"""A notebook that is opened again, in the page that its user left yesterday."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.lab import LIMIT_S, Notebook, wait_ready

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
    shown.get_by_text("as it was then").click()
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


def test_a_cell_and_a_panel_whose_kernel_was_restarted_do_not_say_that_something_runs(
    open_notebook: Callable[..., Notebook],
) -> None:
    busy = "%%distributed\nimport time\nwhile True: time.sleep(0.01)"
    notebook = open_notebook([START, "session", busy])
    notebook.run(0)
    notebook.run(1)
    notebook.start(2)
    notebook.wait_text(2, re.compile(r"running In\[3\] line 3"))
    cell = notebook.output(2)
    outdated = cell.get_by_text(re.compile(r"So it was at \d\d:\d\d:\d\d; nothing has come"))
    live = cell.locator(".distsession-live")

    def is_outdated(says: str) -> bool:
        """Whether it says so, or does not; neither at the moment at which it is replaced."""
        box = outdated.bounding_box()
        opacity = live.evaluate("element => getComputedStyle(element).opacity")
        height, shade = (box["height"] if box else -1), {"yes": "0.5", "no": "1"}[says]
        return opacity == shade and (height > 10 if says == "yes" else height == 0)

    notebook.page.wait_for_timeout(6000)  # longer than it stays live by itself
    until(lambda: is_outdated("no"), notebook)
    notebook.page.evaluate("() => void jupyterapp.commands.execute('notebook:restart-kernel')")
    notebook.page.get_by_role("button", name="Confirm Kernel Restart").click()
    until(lambda: is_outdated("yes"), notebook)
    panel = notebook.output(1).locator(".distsession-panel")
    said = "element => getComputedStyle(element, '::before').content"
    until(lambda: "The kernel has ended." in panel.evaluate(said), notebook)
    notebook.screenshot("restarted")
    wait_ready(notebook.page)
    save(notebook)
    reload(notebook)
    until(lambda: is_outdated("yes"), notebook)
    notebook.screenshot("restarted-reopened")
    notebook.trouble.clear()  # the panel's model is not found, as any widget's


def until(condition: Callable[[], bool], notebook: Notebook) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        notebook.page.wait_for_timeout(100)
