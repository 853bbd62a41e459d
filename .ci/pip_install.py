#!/usr/bin/env python3
"""pip install with one line that says how far it is: ``pip_install.py [--try] PYTHON [arguments]``.

All that pip says is added to ``pip.log`` in that Python's environment, and its last lines are shown
where it fails; with ``--try`` nothing is shown then. Needs Python's own library only.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

TICK_S = 1.0
QUIET_S = 15.0
"""Where the line cannot be written over, seconds between two."""
TAIL = 20


def stage(line: str) -> str:
    """What pip is doing, if this line of its output says so."""
    if match := re.match(r"\s*(?:Collecting|Processing) (\S+)", line):
        return f"looking for {Path(match[1]).name}"
    if match := re.match(r"\s*Downloading (\S+) \((.+)\)", line):
        return f"downloading {Path(match[1]).name.split('-')[0]}, {match[2]}"
    if match := re.match(r"Installing collected packages: (.+)", line):
        return f"installing {match[1].count(',') + 1} packages"
    return ""


def lines(pip: subprocess.Popen[str]) -> Iterator[str]:
    """What pip writes, and an empty text each second that it does not."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert pip.stdout is not None
        for line in pip.stdout:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=TICK_S)
        except queue.Empty:
            line = ""
        if line is None:
            return
        yield line


class Progress:
    """One line: written over in a terminal, elsewhere now and then."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, what: str, *, last: bool = False) -> None:
        now = time.monotonic()
        text = f"pip: {what} ({now - self._began:.0f} s)"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text[:79]}" + "\n" * last)
        elif last or now - self._shown >= QUIET_S:
            self._shown = now
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def main(arguments: list[str]) -> int:
    is_try = arguments[0] == "--try"
    python, *rest = arguments[is_try:]
    pip = subprocess.Popen(
        [python, "-m", "pip", "install", "--progress-bar=off", *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    progress, what, said = Progress(), "starting", []
    with Path(python).parent.parent.joinpath("pip.log").open("a") as log:
        for line in lines(pip):
            log.write(line)
            said += [line] if line.strip() and not line.startswith("WARNING") else []
            what = stage(line) or what
            progress.show(what)
    code = pip.wait()
    if code == 0:
        done = [line for line in said if line.startswith("Successfully installed")]
        count = len(done[-1].split()) - 2 if done else 0
        progress.show(f"installed {count} packages", last=True)
    elif not is_try:
        progress.show(f"failed: {' '.join(rest)}", last=True)
        sys.stderr.write("".join(said[-TAIL:]))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
