"""Kernels of a kept session that are killed at any moment lose nothing, and nothing comes twice.

``python -m tests.integration.keep_kills --kills 1000`` (``make soak-keep``) does it for long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 120.0
"""Seconds in which a kernel attaches, and checks what it finds."""
RUNS = ("cell", "collective", "call", "submit", "ask", "debug", "swallow")
"""The operations that run code of the user's."""
TAKEN_SHARE = 0.2
"""Of the kernels: they are not killed, but their session is taken over."""
LINES = 60
"""That each rank prints in an operation."""
TAKEN = re.compile(
    r"SessionStateError: (taken over by process \d+ at \d\d:\d\d:\d\d\.|"
    r".* is no longer this process's: process \d+ has taken it at .*)"
)
"""What a kernel is told whose session another one has taken over, in one line."""

KERNEL = '''
import faulthandler, json, os, random, sys, threading, time
from collections import Counter
from distsession import RunError, RunInterrupt, Session, SessionStateError
from distsession.protocol.messages import (Text)
from distsession.view import Output

faulthandler.enable()
folder, seed, number, size, lines = sys.argv[1], *map(int, sys.argv[2:6])
takes = int(sys.argv[8])
is_last, is_taking = sys.argv[6] == "last", sys.argv[7] == "takes"
dice = random.Random(f"{seed} {number}")
ledger = os.open(os.path.join(folder, "ledger"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
outputs = []
is_attaching = False

def note(**facts):
    os.write(ledger, (json.dumps(facts) + "\\n").encode())

class Keep(Output):
    def __init__(self):
        self.texts = {}
        outputs.append(self)

    can_ask = True

    def ask(self, prompt, secret):
        if is_attaching:
            return "c" if "Pdb" in prompt else "42"
        await_taken()  # nobody sits there; the kernel is killed before that, or loses its session
        return "43"

    def write(self, message):
        if isinstance(message, Text):
            key = message.rank, message.stream
            self.texts[key] = self.texts.get(key, "") + message.text

def seen(op):
    """How often each rank's lines of an operation have come here."""
    found = {}
    for output in outputs:
        for (rank, _), text in output.texts.items():
            for line in text.splitlines():
                word, number, index = (line.split() + ["", "", ""])[:3]
                if word == "op" and number == str(op):
                    found.setdefault(rank, Counter())[index] += 1
    return {rank: [len(c), max(c.values())] for rank, c in sorted(found.items())}

def await_taken():
    while not session.launcher.taken:
        time.sleep(0.01)

def force(op, stops):
    """Interrupt what catches it, once all its lines are here, and then end it."""
    while seen(op) != {rank: [lines, 1] for rank in range(2)}:
        time.sleep(0.01)
        if session.launcher.taken:
            return
    for _ in range(stops):
        session.interrupt()
        time.sleep(0.05)
    session.interrupt(force=True)

def in_thread(function, *arguments):
    def call():
        try:
            function(*arguments)
        except SessionStateError:
            if not session.launcher.taken:
                raise
    thread = threading.Thread(target=call)
    thread.start()
    return thread

PRELUDE = """
import time
def swallow():
    while True:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
def work(op, size=0):
    ran.append(op)
    for index in range({lines}):
        print("op", op, index, flush=index % 7 == 0)
        if index % 10 == 9:
            time.sleep(pause)
    return op, rank, bytes([op % 251]) * size
""".format(lines=lines)

name = "soak"
if number == 0:
    session = Session(2, keep=600, name=name, output=Keep, threads=1)
    session.execute(PRELUDE + "ran = []\\nblob = b''\\npause = 0.02")
    note(pids=[info.pid for info in session.infos])
else:
    is_attaching = True
    note(attaching=True)
    began = time.perf_counter()
    session = Session.attach(name, output=Keep, take=is_taking)
    took = round(time.perf_counter() - began, 4)
    note(attached=took, dead=sorted(session.launcher.dead_ranks()))
    runs = list(session._adopted._runs)
    for run in runs:
        op = int(run.source.rpartition("#op")[2] or -1) if "#op" in run.source else -1
        error = ""
        forcing = in_thread(force, op, 1) if "swallow()  #op" in run.source else None
        try:
            if run.is_followed:
                run.future.result(60) if run.future else run.pending.wait(lambda _: None, 60)
            else:
                session._adopted.follow(run)
        except (RunError, RunInterrupt) as raised:
            error = str(raised).splitlines()[0]
        if forcing:
            forcing.join()
            assert ": idle" in session.status(), session.status()
            # The latter where the kernel before was killed as it had ended it.
            is_right = "was stopped" in error or error.startswith("KeyboardInterrupt on rank")
            error = "" if is_right else error or "it was not stopped"
        time.sleep(0.02)
        value = run.future.result() if run.future and not error else None
        if value is not None and isinstance(value[0], tuple) and len(value[0]) == 3:
            op = value[0][0]
            assert [(v[0], v[1]) for v in value.values()] == [(op, 0), (op, 1)], value
        note(adopted=op, error=error, missing=list(run.missing), seen=seen(op) if op >= 0 else {},
             kind=str(run.began.kind), label=run.began.label)
    if dead := sorted(session.launcher.dead_ranks()):
        session.restart(dead)
    has = session.evaluate("'pause' in globals() and 'blob' in globals()")
    if empty := [rank for rank in range(2) if not has[rank]]:  # killed in the midst of a restart
        (full,) = set(range(2)) - set(empty)
        session[empty].push(ran=session[full].evaluate("ran")[full])
        session[empty].push(blob=session[full].evaluate("blob")[full])
        session[empty].execute(PRELUDE + "pause = 0.02")
        note(restored=empty)
    found = session.evaluate("(ran, len(blob), blob[:1])")
    note(found={rank: [value[0], value[1], value[2].hex()] for rank, value in found.items()})
    session.execute("t = torch.ones(1)\\ndist.all_reduce(t)\\nassert int(t) == 2")
is_attaching = False
if is_taking:  # who had it before may have more to note
    while open(os.path.join(folder, "ledger")).read().count('"taken"') < takes:
        time.sleep(0.01)
note(ready=True)
if is_last:
    session.close()
    note(closed=True)
    sys.exit(0)

def run_cell(op):
    session.execute(f"work({op})  #op{op}")
    return None

def run_collective(op):
    loop = "for _ in range(20):\\n    dist.all_reduce(t)\\n    t /= 2"
    session.execute(f"work({op})\\nt = torch.ones(1000)\\n{loop}  #op{op}")

def call_work(op, size):
    import __main__
    return __main__.work(op, size)

def run_call(op):
    results = session.run(call_work, op, 300_000)
    assert [r[0] for r in results.values()] == [op, op]

def run_submit(op):
    futures = []
    for i in range(3):
        futures.append(session.submit(call_work, op * 1000 + i, 0))
        note(sent=op * 1000 + i)
    for i, future in enumerate(futures):
        future.result()
        note(ended=op * 1000 + i)
    return [op * 1000 + i for i in range(3)]

def run_push(op):
    session.push(blob=bytes([op % 251]) * size)

def run_pull(op):
    session.pull("blob")

def run_restart(op):
    session.restart([1], restore=["ran", "blob"])
    session[1].execute(PRELUDE + "pause = 0.02")

def run_ask(op):
    session.execute(f"asked = int(input('op {op}? ')) == 42\\nassert asked\\nwork({op})  #op{op}")

def run_debug(op):
    session.execute(f"if rank == {op % 2}:\\n    breakpoint()\\nwork({op})  #op{op}")

def run_swallow(op):
    forcing = in_thread(force, op, dice.randrange(1, 4))
    try:
        session.execute(f"work({op})\\nswallow()  #op{op}")
    except RunInterrupt as raised:
        note(ended=op)  # before all else, within which the kernel may be killed
        assert "was stopped" in str(raised), raised
    else:
        raise AssertionError("it was not stopped")
    forcing.join()
    assert ": idle" in session.status(), session.status()
    assert seen(op) == {rank: [lines, 1] for rank in range(2)}, seen(op)

def run_idle(op):
    await_taken()
    session.execute("1")

KINDS = {name[4:]: function for name, function in list(globals().items())
         if name.startswith("run_")}
# The last three wait until the kernel is killed.
WEIGHTS = dict(cell=6, collective=6, call=6, submit=6, push=6, pull=6, restart=4, swallow=4, idle=1,
               ask=1, debug=1)
op = open(os.path.join(folder, "ledger")).read().count('"begin"')
while True:
    op += 1
    kind = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    note(begin=op, kind=kind)
    try:
        ids = KINDS[kind](op)
    except SessionStateError as error:
        if not session.launcher.taken:
            raise
        assert "taken over" in session.status(), session.status()
        note(taken=f"{type(error).__name__}: {error}", kind=kind)
        sys.exit(0)
    if kind in ("cell", "collective", "call", "ask", "debug"):
        note(ended=op)
    note(done=op, kind=kind, ids=ids or [op], seen={i: seen(i) for i in ids or [op]})
'''


class Lost(AssertionError):
    """Something was lost, or came twice."""


class KeepKills:
    """Kills the kernels of one session, each by the next, and checks what is found.

    Args:
        seed: Decides what they do, and when they are killed.
        megabytes: Of what is pushed.
    """

    def __init__(self, seed: int, megabytes: int):
        self.random = random.Random(seed)
        self.seed = seed
        self.size = megabytes << 20
        self._outer = tempfile.TemporaryDirectory(prefix="keep-", dir="/tmp")
        self.folder = self._outer.name
        self.ledger = Path(self.folder, "ledger")
        self.killed: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self._former: subprocess.Popen[bytes] | None = None
        """A kernel that is alive, and whose session the next one takes over."""
        self.attach_s: list[float] = []
        self.half_sent = self.untold = 0

    def go(self, kills: int) -> None:
        """Kill so many kernels."""
        for number in range(kills):
            self._kernel(number, is_last=False)
            self.check()
        self._kernel(kills, is_last=True)
        self.check()
        left = [p.pid for p in self._processes()]
        if left or list(Path(self.folder).glob("distsession-*")):
            raise Lost(f"after the close there are left: {left}")

    def close(self) -> None:
        if self._former is not None:
            self._former.kill()
            self._former.wait()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._outer.cleanup()

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == self.folder:
                    found.append(process)
        return found

    def _kernel(self, number: int, *, is_last: bool) -> None:
        root = str(Path(__file__).parents[2])
        seen = self.text().count("\n")
        numbers = [str(value) for value in (self.seed, number, self.size, LINES)]
        former, self._former = self._former, None
        how = "takes" if former else "attaches"
        takes = sum(self.taken.values()) + (former is not None)
        arguments = [self.folder, *numbers, "last" * is_last, how, str(takes)]
        errors = Path(self.folder, f"errors{number % 2}")
        with open(errors, "wb") as file:
            kernel = subprocess.Popen(
                [sys.executable, "-c", KERNEL, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=self.folder,
                env={**os.environ, "TMPDIR": self.folder, "PYTHONPATH": root},
            )
        try:
            is_early = number > 0 and not is_last and self.random.random() < 0.15
            if former is not None:
                is_early = False
                self._wait(kernel, seen, "attached", errors)
                self._check_taken(former, Path(self.folder, f"errors{1 - number % 2}"))
            self._wait(kernel, seen, "attaching" if is_early else "ready", errors)
            if is_last:
                kernel.wait(PATIENCE_S)
                return
            time.sleep(self.random.uniform(0, 0.02 if is_early else 1.2))
            if kernel.poll() is not None:
                raise Lost(f"the kernel ended by itself:\n{errors.read_text()}")
            if not is_early and self.random.random() < TAKEN_SHARE:
                self._former = kernel
                return
        finally:
            if kernel is not self._former:
                kernel.kill()
                kernel.wait()
        last = self.entries()[-1]
        self.killed["attaching" if is_early else str(last.get("kind", "idle"))] += 1

    def _check_taken(self, former: subprocess.Popen[bytes], errors: Path) -> None:
        """Who had the session is told so, in one line, in whatever it does; nobody has died."""
        try:
            former.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            stacks = self._stacks()
            raise Lost(f"the former kernel was never told:\n{stacks}") from None
        finally:
            former.kill()
            former.wait()
        told = [entry for entry in self.entries() if "taken" in entry]
        if former.returncode or len(told) != sum(self.taken.values()) + 1:
            raise Lost(f"the former kernel, when its session was taken:\n{errors.read_text()}")
        if not TAKEN.fullmatch(told[-1]["taken"]):
            raise Lost(f"what the former kernel was told: {told[-1]}")
        self.taken[told[-1]["kind"]] += 1

    def _wait(self, kernel: subprocess.Popen[bytes], seen: int, word: str, errors: Path) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not any(word in line for line in self.text().splitlines()[seen:]):
            if kernel.poll() is not None:
                raise Lost(f"the kernel ended before it was {word}:\n{errors.read_text()}")
            if time.monotonic() > deadline:
                stacks = self._stacks()
                kernel.send_signal(signal.SIGABRT)
                kernel.wait()
                raise Lost(f"the kernel never was {word}:\n{errors.read_text()}\n{stacks}")
            time.sleep(0.002)

    def _stacks(self) -> str:
        """The stacks of all its processes, where py-spy is installed."""
        spy = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
        if spy is None:
            return "py-spy, which would show the stacks, is not installed"
        told = []
        for process in self._processes():
            command = [spy, "dump", "--pid", str(process.pid)]
            told.append(subprocess.run(command, capture_output=True, text=True, timeout=30).stdout)
        return "\n".join(told)

    def text(self) -> str:
        return self.ledger.read_text() if self.ledger.exists() else ""

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]

    # --- what must be so --------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that was done or taken over is on all ranks once, and so are its lines."""
        entries = self.entries()
        whole = {str(rank): [LINES, 1] for rank in range(2)}
        done: set[int] = set()
        half: set[int] = set()
        for entry in entries:
            if "done" in entry and entry["kind"] in RUNS:
                done |= set(entry["ids"])
                for op, lines in entry["seen"].items():
                    if lines != whole:
                        raise Lost(f"lines of operation {op}, which was done: {lines}")
            if "adopted" in entry and entry["missing"]:
                half.add(entry["adopted"])
                self.half_sent += 1
            elif entry.get("adopted", -1) >= 0:
                done.add(entry["adopted"])
                if entry["seen"] != whole or entry["error"]:
                    raise Lost(f"operation {entry['adopted']}, which was taken over: {entry}")
        self.attach_s = [entry["attached"] for entry in entries if "attached" in entry]
        found = [entry["found"] for entry in entries if "found" in entry]
        if not found:
            return
        values = found[-1]
        first, second = values["0"], values["1"]
        if first != second and not half:
            raise Lost(f"the ranks differ: {values}")
        ran = Counter(first[0])
        if twice := [op for op, count in ran.items() if count > 1]:
            raise Lost(f"operations that ran twice: {twice}")
        position = max(i for i, entry in enumerate(entries) if "found" in entry)
        known = {
            op
            for entry in entries[:position]
            if "done" in entry
            for op in entry["ids"]
            if entry["kind"] in RUNS
        }
        known |= {entry["sent"] for entry in entries[:position] if "sent" in entry}
        known |= {entry["ended"] for entry in entries[:position] if "ended" in entry}
        if lost := known - set(ran) - half:
            raise Lost(f"operations that were sent or done, and are gone: {sorted(lost)}")
        told = {entry[how] for entry in entries for how in ("ended", "adopted") if how in entry}
        self.untold = len(set(ran) - told)
        # A kernel may be killed between the end of an operation and its note of it.
        if self.untold > 1 + len(found) // 50:
            raise Lost(f"operations of whose end nobody heard: {sorted(set(ran) - told)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    kills = KeepKills(options.seed, options.megabytes)
    began = time.monotonic()
    try:
        kills.go(options.kills)
    except Lost:
        sys.stderr.write(kills.text()[-3000:])
        raise
    finally:
        kills.close()
    attach = sorted(kills.attach_s)
    sys.stdout.write(
        f"{options.kills} kernels killed in {time.monotonic() - began:.0f} s: "
        f"{dict(kills.killed)}; taken over: {dict(kills.taken)}; "
        f"attached within {attach[len(attach) // 2]:.3f} s (median), "
        f"{attach[-1]:.3f} s (longest); half sent: {kills.half_sent}; killed "
        f"between an end and its note: {kills.untold}; nothing lost or twice\n"
    )


if __name__ == "__main__":
    main()
