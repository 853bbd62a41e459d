"""The debugger of a rank, in JupyterLab's input box."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.browser.lab import Notebook

Open = Callable[..., Notebook]

START = """\
import distsession
%load_ext distsession
session = distsession.Session(2)
session.infos[1].pid"""

CELL = """\
%%distributed
x = rank * 3
if rank == 1:
    breakpoint()
    x = 5
dist.barrier()
print("x is", x)"""

BOX = ".jp-Stdin-input"


def type_into_box(notebook: Notebook, number: int, text: str) -> None:
    """Answer what is asked below a cell."""
    box = notebook.cell(number).locator(BOX).last
    box.wait_for(timeout=30e3)
    box.fill(text)
    box.press("Enter")
    notebook.wait_text(number, f"(Pdb)  {text}")


def test_commands_are_typed_into_the_box(open_notebook: Open) -> None:
    notebook = open_notebook([START, CELL, CELL, "%%distributed\nprint('still', x)"])
    notebook.run(0)
    notebook.start(1)
    notebook.cell(1).locator(BOX).wait_for(timeout=30e3)
    assert "[rank 1] (Pdb)" in notebook.text(1)
    assert "-> x = 5" in notebook.text(1)
    type_into_box(notebook, 1, "p x * 37")
    notebook.wait_text(1, "111")
    notebook.screenshot("debugger", notebook.cell(1))
    type_into_box(notebook, 1, "c")
    notebook.wait(1)
    assert "x is 5" in notebook.text(1)

    notebook.start(2)
    type_into_box(notebook, 2, "q")
    notebook.wait(2)
    assert "KeyboardInterrupt: stopped in the debugger of rank 1 at In[3]" in notebook.text(2)
    assert "still 3" in notebook.run(3)


def test_stop_and_death_end_the_prompt(open_notebook: Open) -> None:
    notebook = open_notebook([START, CELL, CELL, "%session restart 1", "%distributed rank"])
    pid = int(notebook.run(0).split()[-1])
    notebook.start(1)
    notebook.cell(1).locator(BOX).wait_for(timeout=30e3)
    notebook.interrupt()
    notebook.wait(1)
    assert "which is in the debugger at In[2]" in notebook.text(1)

    notebook.start(2)
    notebook.cell(2).locator(BOX).wait_for(timeout=30e3)
    os.kill(pid, signal.SIGKILL)
    notebook.wait(2)
    assert "was killed by SIGKILL" in notebook.text(2)
    notebook.screenshot("debugger-killed", notebook.cell(2))
    # JupyterLab leaves the box where it is, and runs no cell before it has been answered.
    notebook.cell(2).locator(BOX).press("Enter")
    notebook.run(3)
    assert "[rank 1] 1" in notebook.run(4)
