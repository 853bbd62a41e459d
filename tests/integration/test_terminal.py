"""The magics in IPython in a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pexpect
import pytest

from .terminal import spawn_ipython

PROMPT = r"In \[\d+\]: "


class Terminal:
    """IPython in a terminal, and what it writes."""

    def __init__(self) -> None:
        self._child = spawn_ipython(
            timeout=60,
            dimensions=(50, 500),  # what is typed is echoed in one line
        )
        self._child.expect(PROMPT)

    def send(self, *lines: str) -> None:
        """Run a line, or a cell magic with its cell."""
        first, *rest = lines
        if rest:
            cell = "\n".join(rest)
            first = f"get_ipython().run_cell_magic('distributed', {first!r}, {cell!r})"
        self._child.sendline(first)

    def wait(self) -> str:
        self._child.expect(PROMPT)
        return re.sub(r"\x1b\[K", "", str(self._child.before)).replace("\r\n", "\n")

    def run(self, *lines: str) -> str:
        """The same; gives what is written after it."""
        self.send(*lines)
        return self.wait().partition("\n")[2]

    def stop(self) -> None:
        self._child.sendintr()

    def expect(self, text: str) -> None:
        self._child.expect_exact(text)

    def close(self) -> None:
        self._child.sendline("exit()")
        self._child.expect(pexpect.EOF)
        self._child.close()


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    terminal.run("%load_ext distsession")
    assert "idle (2 ranks, gloo)" in terminal.run("%session start 2 --backend gloo")
    yield terminal
    terminal.close()


def test_each_line_is_marked_and_values_are_folded(terminal: Terminal) -> None:
    written = terminal.run("", "print('at', rank)", "rank * 0")
    lines = written.strip().splitlines()
    assert sorted(lines[:2]) == ["[0] at 0", "[1] at 1"]
    assert lines[2:] == ["[ranks 0-1] 0"]


def test_figures_and_html_are_said_in_words(terminal: Terminal) -> None:
    cell = ("from IPython.display import HTML, display", "display(HTML('<b>x</b>'))")
    written = terminal.run("0", *cell)
    assert written.strip() == "[rank 0] <IPython.core.display.HTML object>"


def test_a_widgets_bar_is_a_line_of_text(terminal: Terminal) -> None:
    cell = ("from tqdm.auto import tqdm", "for _ in tqdm(range(30), desc='fit'): pass")
    lines = terminal.run("", *cell).replace("\r", "\n").splitlines()
    ends = [line for line in lines if "| 30/30 [" in line]
    assert sorted(line[:14] for line in ends) == ["[0] fit: 100%|", "[1] fit: 100%|"]


def test_tables_are_text(terminal: Terminal) -> None:
    written = terminal.run("%session config")
    assert re.search(r"backend +gloo", written)
    assert "<" not in written


def test_ctrl_c_frees_a_hung_collective(terminal: Terminal) -> None:
    terminal.run("", "kept = rank + 5")
    terminal.send(
        "",
        "if rank == 0: dist.barrier()",
        "import time; print('asleep', flush=True); time.sleep(600)",
    )
    terminal.expect("[1] asleep")
    terminal.stop()
    written = terminal.wait()
    assert "the run on ranks 0-1 was stopped: rank 0 waits in barrier" in written
    assert "[rank 0] 5\n[rank 1] 6" in terminal.run("%distributed kept")
