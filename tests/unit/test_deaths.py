"""What is read of a rank's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distsession.engine import deaths
from distsession.protocol.board import Board, file_size, make_file
from distsession.protocol.messages import CellRequest

OWN = Path(deaths.__file__).parent
MAIN = f'''  File "/usr/lib/x/{os.__name__}.py", line 9 in wait
  File "In[7]", line 3 in work
  File "In[7]", line 5 in <module>
  File "{OWN}/execute.py", line 166 in _evaluate
  File "{OWN}/rank.py", line 300 in serve
'''
STACK = (
    'File "/usr/lib/x/os.py", line 9, in wait',
    'File "In[7]", line 3, in work',
    'File "In[7]", line 5, in <module>',
)
HEAD = "Fatal Python error: Segmentation fault\n\n"
MAIN_CRASHED = f"{HEAD}Current thread 0x00007f (most recent call first):\n{MAIN}"
NAMED = MAIN_CRASHED.replace("0x00007f", "0x00007f [python]") + (
    "\nCurrent thread's C stack trace (most recent call first):\n"
    '  Binary file "/lib/libc.so.6", at +0x1 [0x7f]\n'
)
OTHER_CRASHED = (
    f"{HEAD}Current thread 0x00008f (most recent call first):\n  <no Python frame>\n\n"
    f"Thread 0x00007f (most recent call first):\n{MAIN}"
)


@pytest.mark.parametrize("text", [MAIN_CRASHED, NAMED, OTHER_CRASHED, f"old\n{MAIN_CRASHED}"])
def test_a_crash_is_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "is_user_code", lambda name: name.startswith("In["))
    remains = deaths.read_fault(text)
    assert remains is not None
    assert (remains.place, remains.is_certain, remains.stack) == ("In[7] line 3", True, STACK)


def test_no_crash_is_read_from_other_text() -> None:
    assert deaths.read_fault("") is None
    assert deaths.read_fault("some words\n") is None


@pytest.mark.parametrize("name", sorted(deaths._FAULTS))
def test_a_crash_while_a_crash_is_written_leaves_the_first_ones_name(name: str) -> None:
    text = f"Fatal Python error: {name}\n\n"
    assert deaths.read_fault(text) is None
    assert deaths.read_fault(f"{text}Thread 0x00007f (most recent call first):\n") is None
    assert deaths.fault_signal(f"{HEAD}{text}") == deaths._FAULTS[name]


def test_no_signal_is_read_from_other_text() -> None:
    assert deaths.fault_signal("") == deaths.fault_signal("Bus error\n") == 0


def test_the_signals_have_the_names_that_python_gives_them() -> None:
    for number in set(deaths._FAULTS.values()):
        code = (
            "import ctypes, faulthandler, resource\n"
            "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
            f"faulthandler.enable(); ctypes.PyDLL(None)['raise']({int(number)})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == -number
        assert deaths.fault_signal(done.stderr) == number


def test_a_place_is_written_and_read() -> None:
    memory = deaths.make_memory()
    place = deaths.LastLine(memory)
    assert deaths.read_memory(memory).is_idle
    place.begin_request(CellRequest(1, "", "In[9]"))
    assert deaths.read_memory(memory) == deaths.DeathRecord(runs="In[9]")
    place.update()
    seen = deaths.read_memory(memory)
    assert seen.place.startswith("test_deaths.py line ")
    assert not seen.is_certain
    place.note_terminated(sys._getframe())
    assert deaths.read_memory(memory).is_terminated
    place.end_request(CellRequest(1, "", "In[9]"))
    place.update()
    assert deaths.read_memory(memory) == deaths.DeathRecord(is_idle=True)
    place.begin_request(CellRequest(2, "", "x" * 2 * deaths.MEMORY_BYTES))
    assert set(deaths.read_memory(memory).runs) == {"x"}


def test_a_place_is_seen_by_others_while_the_process_lives() -> None:
    descriptor = make_file()
    os.ftruncate(descriptor, file_size(2))
    board = Board(descriptor, 2)
    seen = Board(descriptor, 2, is_read_only=True)
    place = deaths.LastLine(deaths.make_memory())
    board.regions[1].set_last_line("of the process before")
    place.share(board.regions[1])
    assert seen.regions[1].last_line == ""
    place.begin_request(CellRequest(1, "", "In[9]"))
    assert seen.regions[1].last_line == "In[9]"
    place.update()
    assert seen.regions[1].last_line.startswith("test_deaths.py line ")
    assert seen.regions[0].last_line == ""
    place.end_request(CellRequest(1, "", "In[9]"))
    assert seen.regions[1].last_line == ""
    place.begin_request(CellRequest(2, "", "In[10]"))
    place.uninstall()
    place.begin_request(CellRequest(3, "", "of a forked process"))
    assert seen.regions[1].last_line == "In[10]"
    for each in (board, seen):
        each.close()
    os.close(descriptor)
