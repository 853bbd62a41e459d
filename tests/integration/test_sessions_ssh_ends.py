"""What is left of sessions on hosts by ssh, however they end, and what is said if none starts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import distsession
from distsession import LaunchError
from distsession.engine.process import module_command
from tests.integration.host_lab import HostLab, host_lab
from tests.integration.host_sessions import nothing_left, options_of, start
from tests.until import until, until_settled

pytestmark = pytest.mark.timeout(90)

NAMES = ("gpu1", "gpu2", "gpu3")
ROOT = Path(distsession.__file__).parents[1]


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    with host_lab(NAMES) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(lab: HostLab) -> Iterator[None]:
    yield
    nothing_left(lab)
    assert not list(lab.folder.glob("distsession-*"))


STARTS = """
from distsession import Session, session as module
def make(*given, make=module._make_launcher):
    print("starts", flush=True)
    return make(*given)
module._make_launcher = make
"""
"""Says when the options are read, and the start has begun."""


class Kernel:
    """A process with a session on the hosts."""

    def __init__(self, lab: HostLab, code: str, **changes: Any):
        options = options_of(lab, "gpu1", "gpu2", ranks_per_host=[1, 1], **changes)
        begin = f"{STARTS}session = Session(**{options!r})\n"
        end = "\nprint('ready', flush=True)\nimport time\ntime.sleep(600)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{begin}{code}{end}"], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def wait_starts(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "starts\n"

    def wait_ready(self) -> None:
        self.wait_starts()
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def end(self, number: int) -> str:
        """Send a signal, and wait for the end; gives what it wrote to stderr."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[1]


@pytest.fixture
def kernel(lab: HostLab) -> Iterator[Callable[..., Kernel]]:
    made: list[Kernel] = []

    def make(code: str = "pass", **changes: Any) -> Kernel:
        made.append(Kernel(lab, code, **changes))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.communicate()
    for folder in lab.folder.glob("distsession-start-*"):  # goes with the next start there
        assert not (folder / "keys").exists()
        shutil.rmtree(folder)


def children(lab: HostLab) -> list[int]:
    """Processes that a user's code has started on hosts."""
    found = []
    for pid in lab.processes():
        try:
            if b"sleep\x00601" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


RUNS = {
    "in a collective": "session.submit(lambda: torch.distributed.barrier() if int(__import__('os')"
    ".environ['RANK']) else __import__('time').sleep(600))",
    "children": 'session.execute(\'import subprocess; p = subprocess.Popen(["sleep", "601"])\')',
}


@pytest.mark.parametrize("code", RUNS.values(), ids=RUNS)
def test_a_killed_kernel_leaves_nothing(
    lab: HostLab, kernel: Callable[..., Kernel], code: str
) -> None:
    one = kernel(code.replace("torch.", "__import__('torch').") if "lambda" in code else code)
    one.wait_ready()
    if "601" in code:
        assert len(children(lab)) == 2
    one.end(signal.SIGKILL)
    nothing_left(lab)


def test_a_script_that_ends_without_closing_leaves_nothing(
    lab: HostLab, kernel: Callable[..., Kernel]
) -> None:
    one = kernel("import sys\nsession.execute('x = 1')\nsys.exit(3)")
    _, written = one.process.communicate(timeout=60)
    assert one.process.returncode == 3, written
    # On a slow machine it says what the start waits for.
    assert all(line.startswith("distsession: starting") for line in written.splitlines()), written


MOMENTS = ("connects", "starts", "imports", "is stuck", "forks", "joins")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_start_that_is_interrupted_leaves_nothing(
    lab: HostLab, kernel: Callable[..., Kernel], moment: str
) -> None:
    host = lab["gpu2"]
    with host.unplugged() if moment == "connects" else contextlib.nullcontext():
        one = kernel()
        one.wait_starts()  # a host may still begin, and end, what an earlier kernel has asked for
        agent = " ".join(module_command("distsession.engine.agent")[1:])
        moments: dict[str, Callable[[], object]] = {
            "connects": lambda: [p for p in psutil.Process(one.process.pid).children()
                                 if p.name() == "ssh"],
            "starts": lab.processes,
            "imports": host.left,
            "is stuck": lambda: len(_running(lab, agent)) == 2,
            "forks": lambda: len(_running(lab, agent)) > 2,
            "joins": lambda: len(_running(lab, agent)) > 2,
        }  # fmt: skip
        until(moments[moment], "that moment of the start")
        if moment in ("is stuck", "joins"):  # and one of them never comes
            os.kill(max(_running(lab, agent)), signal.SIGSTOP)
            time.sleep(1)
        assert_stopped(one.end(signal.SIGINT))


def assert_stopped(written: str) -> None:
    """A start says in one line that it was stopped, and shows nothing of how it works."""
    assert "the start was stopped" in written.splitlines()[-1], written
    assert written.count("Traceback") == 1, written
    assert "distsession/cluster" not in written


@pytest.mark.parametrize("keep", [0, 60], ids=["plain", "kept"])
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2, 0.4, 0.7, 1.1, 1.6, 2.2])
def test_a_start_that_is_interrupted_at_any_time_leaves_nothing(
    lab: HostLab, kernel: Callable[..., Kernel], delay_s: float, keep: float
) -> None:
    one = kernel(**({"keep": keep} if keep else {}))
    one.wait_starts()
    time.sleep(delay_s)
    one.process.send_signal(signal.SIGINT)
    said, written = one.process.communicate(timeout=60)
    if "ready" not in said:  # or it was done by then
        assert_stopped(written)


def _running(lab: HostLab, command: str) -> list[int]:
    found = []
    for pid in lab.processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if command.encode() in line:
            found.append(pid)
    return found


def test_close_ends_what_runs(lab: HostLab) -> None:
    with start(lab, "gpu1", "gpu2", ranks_per_host=[1, 1]) as session:
        future = session.submit(_sleep)
        until_settled(session)
        session.close()
        assert "closed" in str(future.exception(60))
    nothing_left(lab)


def _sleep() -> None:
    import time

    time.sleep(600)


# --- what does not start --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "changes", "says"),
    [
        (("gpu1", "gpu2", "nosuch.invalid"), {}, ["nosuch.invalid: no host of this name"]),
        (("gpu1", "gpu2:2222"), {}, ["gpu2:2222: nobody .* port 2222. .* gpu2:PORT"]),
        (("gpu1", "gpu2"), {"python": "/no/py"}, ["gpu1: .*/no/py", "gpu2: .*/no/py"]),
    ],
    ids=["one unknown", "one refused", "no python"],
)
def test_hosts_that_cannot_be_had_are_named_once(
    lab: HostLab, hosts: tuple[str, ...], changes: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        start(lab, *hosts, **changes)
    text = str(caught.value)
    for each in says:
        assert len(_lines(text, each)) == 1, text
    assert len(_lines(text, r"\. Try: ")) == len(says), text


def _lines(text: str, pattern: str) -> list[str]:
    return [line for line in text.splitlines() if re.search(pattern, line)]


def test_a_python_without_distsession_is_named(lab: HostLab) -> None:
    wrapper = lab.folder / "bare"
    wrapper.write_text('#!/bin/sh\nexec /usr/bin/python3 -S -E "$@"\n')
    wrapper.chmod(0o755)
    with pytest.raises(LaunchError) as caught:
        start(lab, "gpu1", python=str(wrapper))
    assert len(_lines(str(caught.value), "gpu1: .* pip install pyzmq")) == 1, str(caught.value)


def test_a_host_of_another_version_is_named(lab: HostLab) -> None:
    other = lab.folder / "other.py"
    source = ROOT / "distsession" / "__init__.py"
    other.write_text(source.read_text().replace(f'"{distsession.__version__}"', '"0.0.7"'))
    with lab["gpu2"].mounted(other, source), pytest.raises(LaunchError) as caught:
        start(lab, *NAMES, ranks_per_host=[1, 1, 1])
    assert len(_lines(str(caught.value), "gpu2: .*distsession 0.0.7")) == 1, str(caught.value)


def test_a_session_starts_after_all_of_these(lab: HostLab) -> None:
    with start(lab, *NAMES, ranks_per_host=[1, 1, 1]) as session:
        assert dict(session.evaluate("rank")) == {0: 0, 1: 1, 2: 2}
