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
    notebook.page.reload()
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
    expect(live).to_be_visible(timeout=30e3)
    expect(table).to_be_hidden()
    save(notebook)
    reload(notebook)
    expect(live).to_be_visible(timeout=30e3)
    expect(table).to_be_hidden()
    assert notebook.trouble == []

    notebook.lab.ask("POST", f"api/kernels/{notebook.kernel}/restart")
    reload(notebook)
    expect(shown.get_by_role("row").filter(has_text="idle")).to_have_count(2)
    expect(table).to_have_text(re.compile(r"world size\s*2"))
    expect(live).to_have_count(0)
    notebook.screenshot("reopened", shown)
    assert all("widget model not found" in said for said in notebook.trouble)  # as of any widget
    notebook.trouble.clear()
