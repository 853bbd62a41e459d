"""The panel of a session in JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Locator, expect

from tests.browser.lab import Notebook, boxes, contrast
from tests.until import until

Open = Callable[..., Notebook]

START = """\
import distsession, os
%load_ext distsession
session = distsession.Session(2, backend="gloo")"""

HANG = """\
%%distributed
import time
if rank == 0:
    dist.barrier()
else:
    while True: time.sleep(0.01)"""


def row(notebook: Notebook, rank: int) -> Locator:
    table = notebook.output(1).get_by_role("table", name="Ranks of the session")
    return table.get_by_role("row").filter(
        has=notebook.page.get_by_role("rowheader", name=str(rank), exact=True)
    )


def press(notebook: Notebook, name: str) -> None:
    notebook.output(1).get_by_role("button", name=name, exact=True).click()


def edge(part: Locator) -> float:
    """Where it ends on the right."""
    (box,) = boxes(part, 1)
    return box["x"] + box["width"]


def test_states_are_live_and_stop_works_while_a_cell_runs(open_notebook: Open) -> None:
    notebook = open_notebook([START, "session", HANG, "session.close()"])
    notebook.run(0)
    notebook.run(1)
    expect(row(notebook, 0)).to_contain_text("idle")
    notebook.start(2)
    expect(row(notebook, 0)).to_contain_text("waiting in barrier")
    expect(row(notebook, 1)).to_contain_text(re.compile(r"running In\[\d+\] line 6"))
    assert "[*]" in notebook.prompt(2)
    press(notebook, "Diagnose")
    notebook.wait_text(1, re.compile("for rank 1, which runs"))
    for rank in range(2):
        until(lambda rank=rank: lines_of(row(notebook, rank).locator("td span").nth(1)) == 1)
    notebook.screenshot("panel-light", notebook.output(1))
    assert "[*]" in notebook.prompt(2)
    press(notebook, "Stop")
    notebook.wait(2)
    notebook.expect(2, "KeyboardInterrupt")
    expect(row(notebook, 0)).to_contain_text("idle")
    notebook.run(3)
    notebook.wait_text(1, re.compile(r": closed"))
    expect(row(notebook, 0)).to_contain_text("ended")
    expect(notebook.output(1).get_by_role("button", name="Stop")).to_be_disabled()


def test_a_killed_rank_is_restarted_by_its_button(open_notebook: Open) -> None:
    notebook = open_notebook([START, "session.show_config()", "os.kill(session.infos[1].pid, 9)"])
    notebook.run(0)
    notebook.run(1)
    notebook.run(2)
    expect(row(notebook, 1)).to_contain_text("dead (was killed by SIGKILL")
    notebook.screenshot("panel-dead", notebook.output(1))
    # The others are of the log below.
    expect(notebook.output(1).locator("select").first).to_have_value("rank 1")
    press(notebook, "Restart rank")
    notebook.wait_text(1, "Rank 1 has a fresh process, without variables.")
    expect(row(notebook, 1)).to_contain_text("idle")


def test_it_can_be_read_in_the_dark_theme_and_with_many_ranks(open_notebook: Open) -> None:
    many = START.replace("(2,", "(12,")
    notebook = open_notebook([many, "session"])
    notebook.set_theme("JupyterLab Dark")
    try:
        notebook.run(0, seconds=110)
        notebook.run(1)
        cells = row(notebook, 11).get_by_role("cell")
        expect(cells.first).to_be_attached()
        for cell in (cells.first, row(notebook, 0).get_by_role("cell").first):
            assert contrast(cell) >= 4.5
        notebook.output(1).get_by_role("group").get_by_text("Configuration").click()
        notebook.expect(1, "start_timeout")
        notebook.screenshot("panel-dark", notebook.output(1))
    finally:
        notebook.set_theme("JupyterLab Light")


def test_nobody_looks_when_the_output_is_gone(open_notebook: Open) -> None:
    count = """
import threading, time
def count(): return sum(t.name == "distsession-panel" for t in threading.enumerate())
deadline = time.monotonic() + 30
while count() != {} and time.monotonic() < deadline: time.sleep(0.05)
count()"""
    notebook = open_notebook([START, "session", count.format(1), count.format(0)])
    notebook.run(0)
    notebook.run(1)
    expect(row(notebook, 1)).to_contain_text("idle")
    notebook.run(2)
    notebook.expect(2, re.compile(r"\b1\s*$"))
    notebook.write(1, "None")
    notebook.run(1)
    notebook.run(3)
    notebook.expect(3, re.compile(r"\b0\s*$"))


def test_it_is_docked_beside_the_notebook_and_live_there(open_notebook: Open) -> None:
    notebook = open_notebook([START, "session", HANG, "session.close()"])
    notebook.run(0)
    notebook.run(1)
    expect(row(notebook, 0)).to_contain_text("idle")
    row(notebook, 0).click(button="right")
    notebook.page.get_by_text("Create New View for Cell Output").click()
    docked = notebook.page.locator(".jp-LinkedOutputView")
    table = docked.get_by_role("table", name="Ranks of the session")
    expect(table).to_be_visible()
    notebook.start(2)
    expect(table).to_contain_text("waiting in barrier")
    docked.get_by_role("button", name="Diagnose", exact=True).click()
    expect(docked.get_by_text(re.compile("for rank 1, which runs"))).to_be_visible()
    notebook.screenshot("panel-docked")
    docked.get_by_role("button", name="Stop", exact=True).click()
    notebook.wait(2)
    expect(docked.get_by_text(re.compile("what ran is interrupted"))).to_be_visible()
    notebook.run(3)
    expect(table).to_contain_text("ended")


def test_a_narrow_panel_keeps_memory_and_history(open_notebook: Open) -> None:
    notebook = open_notebook([START, "session"])
    notebook.run(0)
    notebook.run(1)
    shown = notebook.output(1)
    history = row(notebook, 1).get_by_role("img", name=re.compile("use of late"))
    memory = row(notebook, 1).get_by_text(re.compile(r"\d (MiB|GiB)"))
    expect(history).to_be_visible()
    for width in (1300, 900, 720, 560):
        notebook.page.set_viewport_size({"width": width, "height": 1000})
        right = shown.evaluate("element => element.getBoundingClientRect().right")
        for part in (history, memory):
            assert edge(part) <= right, width
        notebook.screenshot(f"panel-{width}", shown)


def test_an_answer_is_closed_and_not_inherited(open_notebook: Open) -> None:
    notebook = open_notebook([START, "session", "session"])
    notebook.run(0)
    notebook.run(1)
    expect(row(notebook, 0)).to_contain_text("idle")
    answer = notebook.output(1).get_by_text(re.compile(r"Diagnose, \d\d:\d\d:\d\d"))
    press(notebook, "Diagnose")
    expect(answer).to_be_visible()
    press(notebook, "Close")
    expect(answer).to_have_count(0)
    expect(notebook.output(1).get_by_role("button", name="Close")).to_be_hidden()
    press(notebook, "Diagnose")
    expect(answer).to_be_visible()
    notebook.run(2)
    expect(notebook.output(2).get_by_role("button", name="Diagnose", exact=True)).to_be_visible()
    expect(notebook.page.get_by_text(re.compile(r"Diagnose, \d\d:"))).to_have_count(0)


def test_a_log_is_followed_and_searched(open_notebook: Open) -> None:
    write = "%%distributed 1\nfor n in range(3000): print('step', n, 'nan' if n == 1234 else 'ok')"
    notebook = open_notebook([START, "session", write])
    notebook.run(0)
    notebook.run(1)
    expect(row(notebook, 1)).to_contain_text("idle")
    panel = notebook.output(1)
    panel.get_by_role("combobox").first.select_option("rank 1")
    press(notebook, "Log")
    log = panel.get_by_role("log", name="Log of rank 1, stdout")
    notebook.run(2)
    expect(log).to_contain_text("step 2999 ok")
    expect(log.get_by_text("step 2999 ok")).to_be_in_viewport()
    panel.get_by_placeholder("Find").fill("NaN".lower())
    panel.get_by_placeholder("Find").press("Enter")
    expect(log.locator("mark")).to_have_text("nan")
    expect(log).to_contain_text("step 1234 nan")
    notebook.screenshot("panel-log", panel)
    press(notebook, "Close log")
    expect(log).to_be_hidden()


def lines_of(part: Locator) -> int:
    """How many lines its text takes."""
    return int(part.evaluate("element => element.getClientRects().length"))


def resize(notebook: Notebook, part: Locator, height: int) -> None:
    """Give a view below the notebook another height, as one does who pulls its edge."""
    (box,) = boxes(part, 1)
    edges = notebook.page.locator(".lm-SplitPanel-handle").evaluate_all(
        "edges => edges.map(edge => edge.getBoundingClientRect()).filter(edge => edge.width > 99)"
    )
    handle = max(edges, key=lambda edge: float(edge["y"]))
    x, y = handle["x"] + 9, handle["y"]
    notebook.page.mouse.move(x, y)
    notebook.page.mouse.down()
    notebook.page.mouse.move(x, y + box["height"] - height, steps=5)
    notebook.page.mouse.up()


def test_stop_and_answers_are_in_sight_in_a_low_and_narrow_dock(open_notebook: Open) -> None:
    notebook = open_notebook([START, "session", HANG, "session.close()"])
    notebook.run(0)
    notebook.run(1)
    expect(row(notebook, 0)).to_contain_text("idle")
    notebook.page.set_viewport_size({"width": 620, "height": 800})
    row(notebook, 0).click(button="right")
    notebook.page.get_by_text("Create New View for Cell Output").click()
    docked = notebook.page.locator(".jp-LinkedOutputView")
    expect(docked.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    resize(notebook, docked, 170)
    notebook.start(2)
    expect(docked.get_by_role("table")).to_contain_text("waiting in barrier")
    docked.get_by_role("button", name="Diagnose", exact=True).click()
    answer = docked.get_by_text(re.compile("for rank 1, which runs"))
    expect(answer).to_be_in_viewport()
    notebook.screenshot("panel-low")
    docked.get_by_text("Configuration").last.scroll_into_view_if_needed()
    expect(answer).not_to_be_in_viewport()
    stop = docked.get_by_role("button", name="Stop", exact=True)
    expect(stop).to_be_in_viewport(ratio=1)
    notebook.screenshot("panel-low-scrolled")
    stop.click()
    notebook.wait(2)
    docked.get_by_text(re.compile("what ran is interrupted")).wait_for()
    notebook.run(3)


def test_many_ranks_share_rows_odd_ones_first_and_can_be_filtered(open_notebook: Open) -> None:
    hang = HANG.replace("rank == 0", "rank != 7")
    notebook = open_notebook([START.replace("(2,", "(18,"), "session", hang, "session.close()"])
    notebook.run(0, seconds=110)
    notebook.run(1)
    rows = notebook.output(1).get_by_role("table", name="Ranks of the session").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(re.compile(r"^0-17.*idle"))
    notebook.start(2)
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text(re.compile(r"^7.*running In\[\d+\] line 6"))
    expect(rows.nth(1)).to_contain_text(re.compile(r"^0-6,8-17.*waiting in barrier at In\[\d+\] "))
    for number in range(2):
        until(lambda number=number: lines_of(rows.nth(number).locator("td span").nth(1)) == 1)
    notebook.screenshot("panel-many", notebook.output(1))
    wanted = notebook.output(1).get_by_placeholder("Ranks, such as")
    wanted.fill("6-8")
    expect(rows).to_have_count(3)
    notebook.wait_text(1, "3 of 18 ranks")
    notebook.screenshot("panel-filtered", notebook.output(1))
    notebook.output(1).get_by_role("combobox").filter(has_text="any state").select_option("running")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(re.compile(r"^7.*running"))
    wanted.fill("6-88")
    notebook.wait_text(1, "there is no rank 18: this session has ranks 0 to 17.")
    press(notebook, "Stop")
    notebook.wait(2, seconds=110)
    notebook.run(3)
