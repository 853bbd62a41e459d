"""Methods in plain processes. Reads a line for each, ``{"suite", "method", "folder", "limit"}``.

torch and the tests are imported once. Each method gets processes of its own, forked from this one,
as each gets new ones from torch's runner.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.torch_suites import method as one
from tests.torch_suites import suites


def main() -> None:
    one.load_torch()
    _say("ready")
    for line in sys.stdin:
        ask = json.loads(line)
        suite = next(suite for suite in suites.SUITES if suite.name == ask["suite"])
        one.load(suite.name)
        run(suite, ask["method"], ask["folder"], ask["limit"])
        _say("done")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def run(suite: suites.Suite, method: str, folder: str, limit: float) -> None:
    """Fork a process for each rank, and wait until all have ended, or end them."""
    pids = {}
    for rank in range(suite.ranks):
        pid = os.fork()
        if not pid:
            _child(suite.name, method, rank, folder)
        pids[pid] = rank
    deadline = time.monotonic() + limit
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del pids[pid]
        time.sleep(0.01)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(name: str, method: str, rank: int, folder: str) -> None:
    try:
        os.setpgid(0, 0)
        output = os.open(Path(folder) / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["RANK"] = str(rank)
        one.run(name, method, rank, folder)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
