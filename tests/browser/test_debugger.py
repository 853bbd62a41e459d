"""The debugger of a rank, in JupyterLab's input box."""

from __future__ import annotations

import os
import re
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
    box.wait_for()
    box.fill(text)
    box.press("Enter")
    notebook.wait_text(number, f"(Pdb)  {text}")


def test_commands_are_typed_into_the_box(open_notebook: Open) -> None:
    notebook = open_notebook([START, CELL, CELL, "%%distributed\nprint('still', x)"])
    notebook.run(0)
    notebook.start(1)
    notebook.cell(1).locator(BOX).wait_for()
    notebook.expect(1, "[rank 1] (Pdb)")
    notebook.expect(1, "-> x = 5")
    type_into_box(notebook, 1, "p x * 37")
    notebook.wait_text(1, "111")
    notebook.screenshot("debugger", notebook.cell(1))
    type_into_box(notebook, 1, "c")
    notebook.wait(1)
    notebook.expect(1, "x is 5")

    notebook.start(2)
    type_into_box(notebook, 2, "q")
    notebook.wait(2)
    notebook.expect(2, "KeyboardInterrupt: stopped in the debugger of rank 1 at In[3]")
    notebook.run(3)
    notebook.expect(3, "still 3")


def test_stop_and_death_end_the_prompt(open_notebook: Open) -> None:
    notebook = open_notebook([START, CELL, CELL, "%session restart 1", "%distributed rank"])
    notebook.run(0)
    notebook.expect(0, re.compile(r"\d+\s*$"))
    pid = int(notebook.text(0).split()[-1])
    notebook.start(1)
    notebook.cell(1).locator(BOX).wait_for()
    notebook.interrupt()
    notebook.wait(1)
    notebook.expect(1, "which is in the debugger at In[2]")

    notebook.start(2)
    notebook.cell(2).locator(BOX).wait_for()
    os.kill(pid, signal.SIGKILL)
    notebook.wait(2)
    notebook.expect(2, "was killed by SIGKILL")
    notebook.screenshot("debugger-killed", notebook.cell(2))
    # JupyterLab leaves the box where it is, and runs no cell before it has been answered.
    notebook.cell(2).locator(BOX).press("Enter")
    notebook.run(3)
    notebook.run(4)
    notebook.expect(4, "[rank 1] 1")
