"""Python's debugger on ranks, in a terminal and in scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pexpect
import pytest

from .terminal import press_ctrl_c, spawn_ipython
from .test_debugger import STOPS_AT_CALL

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

SCRIPT = """
from distsession import RunInterrupt, Session

with Session(2, backend="gloo") as session:
    try:
        session.execute(
            "x = 4\\nif rank == 1:\\n    breakpoint()\\n    x = 5\\ndist.barrier()", label="In[1]"
        )
    except RunInterrupt as stop:
        print("stopped:", stop)
    session.execute("t = torch.ones(1); dist.all_reduce(t); print('after', t.item(), x)")
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, "TERM": "dumb"}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def run(script: str, text: str | None) -> subprocess.CompletedProcess[str]:
    more = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=environment(),
        check=False, **more,
    )  # fmt: skip


def test_a_script_reads_commands_from_its_input(script: str) -> None:
    done = run(script, "p x + 30\nc\n")
    assert done.returncode == 0, done
    assert "[rank 1] (Pdb) [1] 34\n" in done.stdout
    assert "[0] after 2.0 4\n" in done.stdout
    assert "[1] after 2.0 5\n" in done.stdout


@pytest.mark.parametrize("text", [None, "p x\n"])
def test_the_end_of_the_input_ends_the_run(script: str, text: str | None) -> None:
    done = run(script, text)
    assert done.returncode == 0, done
    line = 3 if STOPS_AT_CALL else 4
    assert f"stopped: stopped in the debugger of rank 1 at In[1] line {line}." in done.stdout
    assert "[1] after 2.0 4\n" in done.stdout


@pytest.fixture
def terminal():
    child = spawn_ipython(env=environment(), timeout=90)
    try:
        child.expect(r"In \[1\]: ")
        child.sendline("%load_ext distsession")
        child.sendline("%session start 2 --backend gloo")
        child.expect("2 ranks, gloo")
        child.sendline("session = __import__('distsession').current_session()")
        yield child
        child.sendline("exit")
        child.expect(pexpect.EOF)
        child.wait()
    finally:
        child.close(force=True)


CELL = (
    "session.execute('x = 4\\nif rank == 1:\\n    breakpoint()\\n    x = 5\\ndist.barrier()\\nx')"
)


def test_commands_are_typed_into_the_terminal(terminal) -> None:
    terminal.sendline(CELL)
    terminal.expect_exact("[rank 1] (Pdb) ")
    terminal.sendline("p x + 30")
    terminal.expect_exact("[1] 34")
    terminal.expect_exact("[rank 1] (Pdb) ")
    terminal.sendline("c")
    terminal.expect_exact("[rank 1] 5")


@pytest.mark.parametrize("how", ["eof", "interrupt", "killed"])
def test_what_ends_the_prompt_ends_the_run(terminal, how: str) -> None:
    terminal.sendline("session.infos[1].pid")
    terminal.expect(r"Out\[\d+\]: (\d+)")
    pid = int(terminal.match.group(1))
    terminal.sendline(CELL)
    terminal.expect_exact("[rank 1] (Pdb) ")
    if how == "eof":
        terminal.sendeof()
        terminal.expect_exact("stopped in the debugger of rank 1")
    elif how == "interrupt":
        press_ctrl_c(terminal)
        terminal.expect_exact("which is in the debugger at In[")
    else:
        os.kill(pid, signal.SIGKILL)
        terminal.expect_exact("was killed by SIGKILL")
        terminal.sendline("session.restart()")
    terminal.sendline("session.execute('t = torch.ones(1); dist.all_reduce(t); t.item() + 40')")
    terminal.expect_exact("[ranks 0-1] 42.0")
