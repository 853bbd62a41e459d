"""Random faults on a session, and what must hold after each.

``python -m tests.integration.chaos --faults 1000`` (``make soak``) runs it for long. With
``--between 500 --faults 40`` the session ages: so many calls and cells come before each fault.
``--backend standin`` does the same where operations are given to a device, and ``--ranks 32`` where
many ranks share the processors.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from distsession import RunError, RunInterrupt, errors
from tests.backends import BACKENDS, GLOO, Backend
from tests.conftest import held_by_others, shared_memory
from tests.integration.agent_children import spares_of
from tests.integration.conftest import Recorder

RANKS = 4
LIMIT, LIMIT_PER_RANK = 30.0, 2.0
"""Seconds after which a fault that has not come to its end counts as a hang."""

SETUP = """
import ctypes, os, time
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
x = torch.arange(4.0) + 1
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def backward():
    model(torch.ones(1, 4)).sum().backward()

def state():
    momenta = [s["momentum_buffer"].tolist() for s in optim.state.values()]
    return x.tolist(), [p.tolist() for p in model.parameters()], momenta

for _ in range(3):
    optim.zero_grad()
    backward()
    optim.step()
"""
NAMES = ["model", "optim", "x", "backward", "state"]

COLLECTIVES = (
    "dist.all_reduce(x.clone()); FINISH",
    "dist.broadcast(x.clone(), src=0); FINISH",
    "dist.barrier()",
    "dist.all_gather([torch.zeros(4) for _ in range(world_size)], x); FINISH",
    "dist.all_reduce(x.clone(), async_op=True).wait(); FINISH",
    "dist.all_gather_object([None] * world_size, rank)",
    "backward(); FINISH",
)
MISMATCHES = (
    "dist.all_reduce(torch.ones(4 + odd))",
    "dist.all_reduce(torch.ones(4).to(torch.float64 if odd else torch.float32))",
    "dist.all_reduce(x.clone(), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)",
    "dist.broadcast(x.clone(), src=int(odd))",
    "dist.barrier() if odd else dist.all_reduce(x.clone())",
    "dist.all_reduce(torch.ones(4 + odd), async_op=True).wait()",
)
SHAPES = 5000
"""As many different tensors are reduced in the session's life."""
GROUP = """
ranks = [{a}, {b}]
other = dist.new_group(ranks)
if rank in ranks:
    dist.all_reduce(torch.ones({size}), group=other)
    dist.destroy_process_group(other)
del other
"""
MEMORY_GROWTH = 64 << 20
"""Bytes by which a process may be larger than when all that it needs had been loaded."""
DEVICE_STREAMS = 32
"""A device's streams are used again when there are so many; the stand-in's have a thread each."""
SWALLOWING = (
    "while True:\n    try: time.sleep(0.01)\n    except KeyboardInterrupt: pass",
    "while True:\n    try: print(end='')\n    except: pass",
    "def f():\n    while True:\n        try: time.sleep(0.01)\n        finally: continue\nf()",
    "while True:\n    try: dist.all_reduce(x.clone()); FINISH\n    except BaseException: pass",
    "while True:\n"
    "    try: dist.barrier() if rank != {victim} else time.sleep(60)\n"
    "    except BaseException: pass",
    "if rank != {victim}: dist.barrier()\n"
    "while True:\n    try: time.sleep(0.01)\n    except KeyboardInterrupt: pass",
    "import signal\nours = signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "while True: time.sleep(0.01)",
)
"""Loops that an interrupt does not end."""
BUSY = ("while True: pass", "time.sleep(60)", "while True: dist.all_reduce(x.clone()); FINISH")


@dataclass(frozen=True)
class Held:
    """What the kernel and each rank hold."""

    processes: int
    shared_memory: frozenset[str]
    kernel: tuple[int, int]
    ranks: tuple[tuple[int, int], ...]
    memory: tuple[int, ...]


def total(numbers: Any) -> float:
    """What ranks are called with."""
    return float(sum(numbers))


class Violation(AssertionError):
    """Something that must hold does not."""


class Chaos:
    """A session that is done harm to.

    Args:
        seed: Decides which faults come, and where.
        backend: What the session runs on.
        ranks: How many it has.
    """

    def __init__(self, seed: int, backend: Backend = GLOO, ranks: int = RANKS):
        self.seed = seed
        self.backend = backend
        self.ranks = ranks
        self.limit = LIMIT + LIMIT_PER_RANK * max(0, ranks - RANKS)
        self.random = random.Random(seed)
        self.calls = 0
        self._sizes = itertools.cycle(range(1, SHAPES + 1))
        self.done: list[str] = []
        self.output = Recorder()
        self.session = backend.session(ranks, output=self.output, threads=1, hang_grace=0.3)
        self.session.execute(SETUP)
        self.state = self.session.evaluate("state()")[0]
        self.faults: dict[str, Callable[[], None]] = {
            name.removeprefix("fault_"): getattr(self, name)
            for name in sorted(vars(Chaos))
            if name.startswith("fault_")
        }

    # --- faults -----------------------------------------------------------------------------------

    def run(self, code: str, *expected: type[BaseException]) -> None:
        """Run a cell in a thread, so that one that never ends is noticed."""
        code = self.backend.program(code)
        pool = concurrent.futures.ThreadPoolExecutor(1)
        future = pool.submit(self.session.execute, code, label="In[1]")
        pool.shutdown(wait=False)
        try:
            future.result(self.limit)
        except concurrent.futures.TimeoutError:
            raise Violation(f"hangs:\n{code}\n{self.session.diagnose(stacks=True)!r}") from None
        except expected:
            return
        if expected:
            raise Violation(f"nothing was raised by:\n{code}")

    @property
    def meetings(self) -> list[str]:
        """Collectives in which all wait for one that does not come.

        On a device a broadcast is over for those that have come.
        """
        is_device = self.backend.is_device
        return [each for each in COLLECTIVES if not (is_device and "broadcast" in each)]

    @property
    def victim(self) -> int:
        return self.random.randrange(self.ranks)

    def later(self, seconds: float, action: Callable[[], Any]) -> threading.Timer:
        timer = threading.Timer(seconds, action)
        timer.start()
        return timer

    def interrupt_later(self, seconds: float) -> threading.Timer:
        """Press Stop some time after what comes next has begun."""

        def press() -> None:
            deadline = time.monotonic() + self.limit
            while not self.session.interrupt() and time.monotonic() < deadline:
                time.sleep(0.01)  # nothing runs yet, on a machine that has much else to do

        return self.later(seconds, press)

    def fault_kill(self) -> None:
        victim = self.victim
        pid = self.session.infos[victim].pid
        if self.random.random() < 0.5:
            code = self.random.choice(("os.kill(os.getpid(), 9)", "os._exit(1)"))
            collective = self.random.choice(COLLECTIVES)
            self.run(f"if rank == {victim}: {code}\n{collective}", RunError)
        else:
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 5
            while "dead" not in self.session.status() and time.monotonic() < deadline:
                time.sleep(0.005)
        self.session.restart([victim], restore=NAMES)
        self.session[victim].execute("import ctypes, os, time")

    def fault_stop_and_continue(self) -> None:
        pid = self.session.infos[self.victim].pid
        os.kill(pid, signal.SIGSTOP)
        timer = self.later(self.random.uniform(0.1, 0.8), lambda: os.kill(pid, signal.SIGCONT))
        try:
            self.run("for _ in range(5): dist.all_reduce(x.clone())")
        finally:
            timer.join()

    def fault_hang(self) -> None:
        victim, collective = self.victim, self.random.choice(self.meetings)
        expected = (errors.CollectiveHangError, RunError)
        self.run(f"if rank != {victim}: {collective}", *expected)

    def fault_stop_a_hang(self) -> None:
        victim, collective = self.victim, self.random.choice(self.meetings)
        timer = self.interrupt_later(self.random.uniform(0.05, 0.4))
        self.run(f"if rank != {victim}: {collective}\nelse: time.sleep(60)", RunInterrupt)
        timer.join()

    def fault_mismatch(self) -> None:
        code = self.random.choice(MISMATCHES)
        self.run(
            f"odd = rank == {self.victim}\n{code}".replace("src=int(odd)", "src=rank"), RunError
        )

    def fault_raise(self) -> None:
        collective = self.random.choice((*COLLECTIVES, "dist.recv(torch.ones(1), src={victim})"))
        victim = self.victim
        code = collective.replace("{victim}", str(victim))
        self.run(f"if rank == {victim}: raise ValueError(rank)\n{code}", RunError)

    def fault_flood(self) -> None:
        self.run(
            f"for i in range(20):\n"
            f"    if rank == {self.victim}: print('x' * 60 * 1000)\n"
            "    dist.all_reduce(x.clone())"
        )

    def fault_interrupt(self) -> None:
        timer = self.interrupt_later(self.random.uniform(0.05, 0.4))
        self.run(self.random.choice(BUSY), RunInterrupt)
        timer.join()

    def fault_swallow(self) -> None:
        """Stop code that catches the interrupt, some times, and then force its end."""
        code = self.random.choice(SWALLOWING).replace("{victim}", str(self.victim))
        self.done[-1] += f": {code!r}"
        more, is_waited_for = self.random.randrange(4), self.random.random() < 0.8
        pids = [info.pid for info in self.session.infos]
        timer = self.interrupt_later(self.random.uniform(0.05, 0.4))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            if is_waited_for:
                ended = pool.submit(lambda: (timer.join(), self._force(code, more)))
            self.run(code, RunInterrupt)
            timer.join()
            if not is_waited_for:
                ended = pool.submit(self._force, code, more)
            ended.result()
        if "SIG_IGN" in code:
            self.session.execute("signal.signal(signal.SIGINT, ours)")
        if pids != [info.pid for info in self.session.infos]:
            raise Violation(f"ranks were replaced to end:\n{code}")

    def _force(self, code: str, more: int) -> None:
        """End what was stopped once and goes on."""
        session = self.session
        for _ in range(more):
            time.sleep(0.05)
            session.interrupt()
        # An interrupt that comes between two rounds of a loop ends it.
        going_on = r"running In\[1\], stopped (once|twice|\d times)\b"
        status = session.status()
        if not re.search(rf": ({going_on}|idle \()", status):
            raise Violation(f"{status!r} of what may go on:\n{code}")
        session.interrupt(force=True)
        requests = {region.request for region in session.launcher.board.regions}
        self.done[-1] += f" {more} {requests} {session.status()}"
        if f": idle ({self.ranks} ranks" not in session.status():
            raise Violation(f"{session.status()!r} of what was ended:\n{code}")

    # --- ordinary use -----------------------------------------------------------------------------

    def use(self, calls: int) -> None:
        """Do what people do between two mistakes, so that the session ages."""
        session, number = self.session, self.calls
        for number in range(self.calls, self.calls + calls):
            size = next(self._sizes)
            kind = self.random.random()
            if kind < 0.4:
                session.execute(f"y = torch.ones({size})\ndist.all_reduce(y)")
                if number % 50 == 0 and session.evaluate("y[-1].item()")[0] != self.ranks:
                    raise Violation(f"a sum is wrong after {number} calls")
            elif kind < 0.55:
                session.execute(f"z = [dist.all_reduce(torch.ones({size}, 2), async_op=True)]")
                session.execute("[work.wait() for work in z]; del z")
            elif kind < 0.75:
                if session.run(total, range(size))[self.ranks - 1] != size * (size - 1) / 2:
                    raise Violation(f"a call's result is wrong after {number} calls")
            elif kind < 0.8:
                a, b = self.random.sample(range(self.ranks), 2)
                session.execute(GROUP.format(a=min(a, b), b=max(a, b), size=size))
            elif kind < 0.85:
                code = (
                    "if rank == 0: dist.send(x, 1, tag={0})\nif rank == 1: dist.recv(x, 0, tag={0})"
                )
                session.execute(code.format(number))
            elif kind < 0.9:
                session.push(numbers=list(range(size)))
            elif kind < 0.95:
                session.execute(f"print('cell', {number}, rank)")
            else:
                session.pull("x")
        self.calls += calls

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """The next collective is right on all ranks, and their state is what it was."""
        self.run("probe = torch.ones(3) * (rank + 1)\ndist.all_reduce(probe)")
        sums = self.session.evaluate("probe.tolist()")
        right = [self.ranks * (self.ranks + 1) / 2] * 3
        if dict(sums) != dict.fromkeys(self.session.ranks, right):
            raise Violation(f"the next collective is wrong: {dict(sums)}")
        for rank, state in self.session.evaluate("state()").items():
            if state != self.state:
                raise Violation(f"the state of rank {rank} is {state}, it was {self.state}")

    def held(self) -> Held:
        """Descriptors and threads; old groups may take a moment to go."""
        kernel = psutil.Process()
        ranks = [psutil.Process(info.pid) for info in self.session.infos]
        # The tests keep agents in store, from which the session's may be: more of them or fewer.
        parents = {kernel, *(psutil.Process(rank.ppid()) for rank in ranks)}
        below = {p.pid for p in kernel.children()}
        below |= {p.pid for each in parents - {kernel} for p in each.children(recursive=True)}
        return Held(
            # Spares come a while after each start of ranks.
            processes=len(below | {p.pid for p in parents}) - len(spares_of(self.session)),
            shared_memory=shared_memory(),
            kernel=(kernel.num_fds(), kernel.num_threads()),
            ranks=tuple((rank.num_fds(), rank.num_threads()) for rank in ranks),
            memory=tuple(p.memory_info().rss for p in (kernel, *ranks)),
        )

    def check_held(self, before: Held) -> None:
        """Nothing has grown since; a rank that is new holds less, never more."""
        deadline = time.monotonic() + self.limit
        while True:
            now = self.held()
            most = tuple(max(counts) for counts in zip(*before.ranks, strict=True))
            streams = DEVICE_STREAMS if self.backend.is_device else 0
            grown = [
                counts
                for counts in now.ranks
                if counts[0] > most[0] or counts[1] > most[1] + streams
            ]
            new = now.shared_memory - before.shared_memory
            same = now.processes <= before.processes and not new - held_by_others(new)
            kernel_same = all(n <= b for n, b in zip(now.kernel, before.kernel, strict=True))
            larger = max(n - b for n, b in zip(now.memory, before.memory, strict=True))
            if not grown and same and kernel_same and larger < MEMORY_GROWTH:
                return
            if time.monotonic() > deadline:
                told = [_told(info.pid) for info in self.session.infos] if grown else []
                raise Violation(
                    "\n".join(map(str, ("more is held than before:", before, now, *told)))
                )
            time.sleep(0.1)

    def go(
        self, faults: int, *, between: int = 0, say: Callable[[str], None] = lambda _: None
    ) -> None:
        """Do so many faults, checking after each.

        Args:
            faults: How many, after one of each kind.
            between: How many calls and cells come before each.
            say: Is told how far it is.
        """
        self.use(min(between, 100))
        self.go_through()  # so that all is there that will be
        # And the buffer for small payloads, which a rank that is replaced may be the first to need.
        self.session.push(filling=bytes(200_000))
        time.sleep(0.5)
        before = self.held()
        for number in range(faults):
            self.use(between)
            name = self.random.choice(list(self.faults))
            self._do(name, self.faults[name])
            if number % 25 == 24:
                self.check_held(before)
                say(f"{number + 1} faults")
        self.check_held(before)

    def go_through(self) -> None:
        """Do one fault of each kind, checking after each."""
        for name, fault in self.faults.items():
            self._do(name, fault)

    def _do(self, name: str, fault: Callable[[], None]) -> None:
        self.done.append(name)
        self.output.messages.clear()  # a flood has 1 MB, which is no growth of the kernel's
        try:
            fault()
            self.check()
        except BaseException as error:
            last = self.done[-1]
            text = f"seed {self.seed}, fault {len(self.done)}: {last}, after {self.done[-6:-1]}"
            raise Violation(f"{text}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self.session.close()


def _told(pid: int) -> str:
    """The threads of a process, and what it has open."""
    threads = [
        Path(task, "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    files = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            files.append(os.readlink(path))
    return f"{pid}: {sorted(threads)} {sorted(files)}"


def main() -> int:
    """Run it for long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--between", type=int, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--fault", help="the only kind that comes; default: all")
    parser.add_argument("--backend", choices=[backend.name for backend in BACKENDS], default="gloo")
    arguments = parser.parse_args()
    backend = next(each for each in BACKENDS if each.name == arguments.backend)
    os.environ["PYTEST_RUN_OF"] = str(os.getpid())  # tells what it starts from what others start
    chaos = Chaos(arguments.seed, backend, arguments.ranks)
    if arguments.fault:
        chaos.faults = {arguments.fault: chaos.faults[arguments.fault]}
    began = time.monotonic()
    try:
        chaos.go(
            arguments.faults, between=arguments.between, say=lambda text: print(text, flush=True)
        )
    except Violation as error:
        print(f"{error}\nfaults: {chaos.done}", file=sys.stderr)
        return 1
    finally:
        chaos.close()
    names = [done.partition(":")[0] for done in chaos.done]
    counts = {name: names.count(name) for name in chaos.faults}
    used = f"{chaos.calls} calls and cells, "
    print(f"seed {arguments.seed}: {used}{counts} in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
