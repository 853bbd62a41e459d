"""Where methods run: the ranks of a session, and plain processes. Both tell how it went alike."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from distsession import DistsessionError, RunError, Session
from distsession.kernel.output import Silent
from tests.torch_suites.outcome import WORST_FIRST, Outcome
from tests.torch_suites.suites import Suite

__all__ = ["Plain", "Ranks"]

ROOT = Path(__file__).parents[2]
PRELOAD = ["torch._dynamo", "torch.testing._internal.common_distributed"]
"""What torch's tests import, and what takes seconds."""
USABLE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
"""Of the plain processes, which import torch and its tests."""
END_TIMEOUT_S = 30.0
"""From a method's time limit until its plain processes have been ended."""
LOOK = 0.9
"""At this part of a method's time limit it is looked where its ranks are."""


class Ranks:
    """The ranks of one session, which run one method after another."""

    def __init__(self, count: int):
        self._count = count
        self._session = Session(count, output=Silent, preload=PRELOAD)
        self._begin()

    def _begin(self) -> None:
        self._loaded: set[str] = set()
        self._session.execute(
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from tests.torch_suites import method as _torch_suites"
        )

    def run(self, suite: Suite, method: str, limit: float) -> Outcome:
        if suite.is_once and self._loaded:
            self._session.restart()
            self._begin()
        if suite.name not in self._loaded:
            self._session.execute(f"_torch_suites.load({suite.name!r})")
            self._loaded.add(suite.name)
        with tempfile.TemporaryDirectory() as folder:
            call = f"_torch_suites.run({suite.name!r}, {method!r}, rank, {folder!r})"
            began = time.monotonic()
            said, status, seen = "", "died", [""]
            look = threading.Timer(limit * LOOK, lambda: seen.append(self._look()))
            look.start()
            try:
                self._session.execute(call, timeout=limit)
            except TimeoutError as error:
                said, status = f"{error}\n{seen[-1]}", "timeout"
            except RunError as error:
                said, status = str(error), "failed"
            except (DistsessionError, RuntimeError) as error:
                said = f"{type(error).__name__}: {error}"
            finally:
                look.cancel()
            took = time.monotonic() - began
            return _outcome(folder, suite, took, status, said, self._unusable())

    def _look(self) -> str:
        return str(self._session.diagnose(stacks=True))

    def _unusable(self) -> str:
        try:
            self._session.execute(
                "if not dist.is_initialized(): dist.init_process_group('gloo')\n"
                "_t = torch.ones(1); dist.all_reduce(_t)\n"
                "assert _t.item() == world_size == dist.get_world_size(), _t",
                timeout=USABLE_TIMEOUT_S,
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def renew(self) -> None:
        """Another session, whose ranks have run nothing."""
        self.close()
        self.__init__(self._count)  # type: ignore[misc]

    def close(self) -> None:
        self._session.close()


class Plain:
    """Processes that are forked for each method."""

    def __init__(self) -> None:
        self._read = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch_suites.plain"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._expect("ready", START_TIMEOUT_S)

    def run(self, suite: Suite, method: str, limit: float) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            self._ask({"suite": suite.name, "method": method, "folder": folder, "limit": limit})
            took = time.monotonic() - began
            missing = "timeout" if took >= limit else "died"
            said = "".join(
                path.read_text(errors="replace")[-1000:]
                for path in sorted(Path(folder).glob("*.out"))
            )
            return _outcome(folder, suite, took, missing, said)

    def _ask(self, what: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._expect("done", what["limit"] + END_TIMEOUT_S)

    def _expect(self, word: str, timeout: float) -> None:
        """Read lines until one is the word. Whoever does not say it in time is ended."""
        assert self._process.stdout
        deadline = time.monotonic() + timeout
        while word not in self._read.decode(errors="replace").splitlines():
            left = max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._process.stdout], [], [], left)
            said = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not said:
                what = "have ended" if ready else f"have not said {word!r} within {timeout:g} s"
                self._end()
                raise RuntimeError(f"the plain processes {what}")
            self._read += said
        self._read = b""

    def _end(self) -> None:
        whole = [*psutil.Process(self._process.pid).children(recursive=True), self._process]
        for process in whole:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._end()
            self._process.wait()


def _outcome(
    folder: str, suite: Suite, took: float, missing: str, said: str, unusable: str = ""
) -> Outcome:
    """From what the ranks have written down; those that have not count as ``missing``."""
    statuses, texts = [], {}
    for rank in range(suite.ranks):
        path = Path(folder) / f"{rank}.json"
        told = json.loads(path.read_text()) if path.exists() else None
        statuses.append(told["status"] if told else missing)
        if told is None or told["text"]:
            texts[rank] = told["text"] if told else said
    worst = min(statuses, key=WORST_FIRST.index)
    return Outcome(worst, texts, took, unusable)
