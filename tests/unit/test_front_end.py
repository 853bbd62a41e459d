"""Front ends of which it is certain that they show no widgets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distsession.notebook import front_end
from distsession.notebook.front_end import has_ipywidgets, shows_widgets
from tests.until import until


@contextmanager
def program(*words: str) -> Iterator[int]:
    """A process with this command line."""
    with subprocess.Popen([*words, "300"], executable="/bin/sleep", stdin=subprocess.PIPE) as made:
        try:
            until(lambda: words[0] in Path(f"/proc/{made.pid}/cmdline").read_text())
            yield made.pid
        finally:
            made.kill()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("jupyter-lab",), True),
        (("/usr/bin/jupyter-console",), False),
        (("jupyter-qtconsole",), False),
        (("/home/me/jupyter_console_notes/run",), True),
    ],
)
def test_the_program_that_started_the_kernel_tells(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], shown: bool
) -> None:
    with program(*words) as pid:
        monkeypatch.setattr(os, "getppid", lambda: pid)
        assert shows_widgets() is shown


def test_a_module_that_is_run_is_a_program() -> None:
    assert not front_end._shows(["/bin/python3", "-m", "jupyter_console", ""])
    assert not front_end._shows(["/bin/python3", "-Xfrozen_modules=off", "/bin/jupyter-console"])
    assert front_end._shows(["/bin/python3", "-m", "nbconvert", "--to", "jupyter-console"])
    assert front_end._shows([""])


def test_a_kernel_whose_front_end_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with program("spyder") as pid:
        monkeypatch.setitem(sys.modules, "spyder_kernels", sys)
        monkeypatch.setattr(os, "getppid", lambda: pid)
        assert not shows_widgets()


def test_a_process_that_has_ended_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
    assert shows_widgets()


def test_there_are_none_without_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_ipywidgets()
    monkeypatch.delitem(sys.modules, "ipywidgets", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert not has_ipywidgets()
    assert not shows_widgets()
