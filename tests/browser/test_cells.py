"""A session's day in JupyterLab: cells, Stop, a mistake, completion."""

from __future__ import annotations

from collections.abc import Callable

from tests.browser.lab import Notebook

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


def test_stop_in_the_toolbar_ends_a_hung_collective_and_variables_stay(open_notebook: Open) -> None:
    notebook = open_notebook(
        [START, "%%distributed\nx = rank + 41", HANG, "%%distributed\nprint('x is', x)"]
    )
    notebook.run(0)
    notebook.run(1)
    notebook.start(2)
    notebook.wait_text(2, "busy")
    notebook.interrupt()
    notebook.wait(2)
    assert "KeyboardInterrupt" in notebook.text(2)
    text = notebook.run(3)
    assert "x is 41" in text
    assert "x is 42" in text
    notebook.screenshot("stopped")
