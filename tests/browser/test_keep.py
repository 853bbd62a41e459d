"""A kernel is restarted by the toolbar in the midst of a training, and the next one goes on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Locator, expect

from distsession.cluster.end_kept import end_session
from distsession.cluster.kept import kept_sessions
from tests.browser.lab import Lab, Notebook, Tab, wait_ready, write_notebook
from tests.until import until

Open = Callable[..., Notebook]

NAME = f"digits-{os.getpid()}"
START = f"%load_ext distsession\n%session start 2 --keep 10m --name {NAME}"
PREPARE = "%%distributed\nimport os, time\nweights = torch.zeros(3)\nmine = os.getpid()"
TRAIN = """\
%%distributed
from tqdm.auto import tqdm
print("begins", rank)
for step in tqdm(range(2000), desc=f"fit {rank}", mininterval=0.05):
    weights += 1
    last = torch.tensor(os.path.exists("go"), dtype=torch.int)
    dist.all_reduce(last)
    if last:
        break
    time.sleep(0.02)
print("ends", rank)
int(weights[0]) == step + 1"""
MINE = "%distributed (mine, os.getpid() == mine)"
AGAIN = "%load_ext distsession"
ATTACH = f"%session attach {NAME}"
ADD = "%%distributed\ndist.all_reduce(weights)\nint(weights[0]) >= 2"
CLOSE = "%session close"
LIST = "%session list"
OUTPUT = "%session output In 3"


@pytest.fixture(autouse=True)
def _nothing_kept(lab: Lab) -> Iterator[None]:
    """What a test that fails has kept is ended."""
    yield
    (lab.notebooks / "go").unlink(missing_ok=True)
    for kept in kept_sessions():
        if kept.name == NAME:
            end_session(kept, "the test is over")


@pytest.fixture
def second_browser(lab: Lab, browser: Browser) -> Iterator[Open]:
    """Open a notebook in a page that shares nothing with the other tests' one."""
    tab = Tab(lab, browser)
    opened: list[Notebook] = []

    def go(cells: list[str]) -> Notebook:
        opened.append(tab.open(write_notebook(cells, "python3"), "second", "python3"))
        return opened[-1]

    yield go
    tab.close()
    for notebook in opened:
        lab.ask("DELETE", f"api/kernels/{notebook.kernel}")
    assert [trouble for notebook in opened for trouble in notebook.trouble] == []


def restart(notebook: Notebook) -> None:
    """Press Restart in the toolbar, and say yes."""
    page = notebook.page
    page.locator('.jp-NotebookPanel-toolbar [data-jp-item-name="restart"] jp-button').click()
    with page.expect_response(lambda said: "/restart" in said.url):
        page.locator(".jp-Dialog .jp-mod-accept").click()
    wait_ready(page)


def steps(part: Locator) -> list[int]:
    """How far the bars are that a cell shows."""
    return [int(step) for step in re.findall(r"(\d+)/2000", part.inner_text())]


def until_bars_move(part: Locator) -> None:
    seen: list[int] = []

    def have_moved() -> bool:
        now = steps(part)
        if not seen and len(now) == 2:
            seen.extend(now)
        return len(now) == 2 and all(new > old for new, old in zip(now, seen, strict=True))

    until(have_moved, "two bars that move")


def test_the_bars_of_a_training_go_on_in_a_kernel_that_was_restarted(open_notebook: Open) -> None:
    cells = [
        START,
        PREPARE,
        MINE,
        TRAIN,
        AGAIN,
        ATTACH,
        MINE,
        ADD,
        "%session output In 4 --kernel 1",
    ]
    notebook = open_notebook([*cells, "%session detach", ATTACH, CLOSE, LIST])
    for number in range(3):
        notebook.run(number)
    before = notebook.text(2)
    notebook.start(3)
    until_bars_move(notebook.output(3))
    restart(notebook)

    said = notebook.run(4)
    assert re.search(rf"session {NAME} \(2 ranks, gloo\) is still there: .* In\[4\]", said), said
    notebook.start(5)
    notebook.expect(5, re.compile(r"In\[4\], begun \d\d:\d\d:\d\d"))
    bars = notebook.output(5).locator(".jupyter-widgets.widget-vbox")
    until_bars_move(bars)
    expect(bars.locator("progress, .progress-bar")).to_have_count(2)
    notebook.screenshot("kept-bars", notebook.output(5))
    (notebook.lab.notebooks / "go").touch()
    notebook.wait(5)
    for rank in range(2):
        notebook.expect(5, f"begins {rank}")
        notebook.expect(5, f"ends {rank}")
    notebook.expect(5, re.compile(r"ranks 0-1\s+True"))
    shown = notebook.text(5)
    assert shown.count("begins 1") == shown.count("ends 0") == 1
    assert notebook.run(6) == before
    notebook.run(7)
    notebook.expect(7, re.compile(r"ranks 0-1\s+True"))
    notebook.run(8)
    notebook.expect(8, "begins 1")
    notebook.expect(8, "This was the output of In[4]")
    assert "detached; its ranks go on" in notebook.run(9)
    assert "begins" not in notebook.run(10)
    assert "closed" in notebook.run(11)
    assert NAME not in notebook.run(12)
    notebook.trouble.clear()


def test_stop_in_the_toolbar_ends_what_an_earlier_kernel_began(open_notebook: Open) -> None:
    cells = [START, PREPARE, TRAIN, AGAIN, ATTACH, ADD, CLOSE]
    notebook = open_notebook(cells)
    notebook.run(0)
    notebook.run(1)
    notebook.start(2)
    until_bars_move(notebook.output(2))
    restart(notebook)
    notebook.run(3)
    notebook.start(4)
    until_bars_move(notebook.output(4).locator(".jupyter-widgets.widget-vbox"))
    notebook.interrupt()
    notebook.wait(4)
    notebook.expect(4, "KeyboardInterrupt")
    notebook.expect(4, "all variables are kept")
    notebook.run(5)
    notebook.expect(5, re.compile(r"ranks 0-1\s+True"))
    assert "closed" in notebook.run(6)
    notebook.trouble.clear()


def test_a_second_browser_looks_on_after_the_tab_was_closed(
    open_notebook: Open, second_browser: Open, tab: Tab
) -> None:
    owner = open_notebook([START, PREPARE, TRAIN])
    owner.run(0)
    owner.run(1)
    owner.start(2)
    until_bars_move(owner.output(2))
    tab.close()

    viewer = second_browser(
        [AGAIN, ATTACH, "%session config", "%session diagnose", ADD, OUTPUT, LIST]
    )
    viewer.run(0)
    assert "this one only looks on" in viewer.run(1)
    viewer.run(2)
    panel = viewer.output(2)
    rows = panel.get_by_role("table", name="Ranks of the session").get_by_role("row")
    expect(rows.filter(has_text=re.compile(r"running In\[3\]|waiting in"))).to_have_count(2)
    for name in ("Stop", "Restart rank"):
        expect(panel.get_by_role("button", name=name, exact=True)).to_be_disabled()
    panel.get_by_role("button", name="Diagnose", exact=True).click()
    expect(panel.get_by_text(re.compile(r"Diagnose, [\d:]+"))).to_be_visible()
    expect(
        panel.get_by_text(re.compile(r"^(in \w+ .*|running) In\[3\] line \d"))
    ).not_to_have_count(0)
    viewer.screenshot("viewer", panel)
    assert "In[3]" in viewer.run(3)
    assert f"has owned session {NAME} since" in viewer.run(4)
    assert "begins 1" in viewer.run(5)
    (viewer.lab.notebooks / "go").touch()
    expect(rows.filter(has_text="idle")).to_have_count(2)
    assert "idle" in viewer.run(6)
    viewer.trouble.clear()
    owner.trouble.clear()
