"""Random faults on a session over three hosts, and what must hold after each.

``python -m tests.integration.host_chaos --steps 200`` (``make soak-hosts``) runs it for long, and
``--work all_reduce --fault host`` one kind of step. It needs what ``host_lab`` does.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from distsession import DistsessionError, RunInterrupt, Session
from distsession.cluster import hosts as cluster_hosts
from distsession.cluster.host_links import HostLinks
from distsession.cluster.hosts import LOST_S, SILENT_S
from distsession.cluster.kept import kept_sessions
from tests.integration.conftest import Recorder
from tests.integration.host_lab import HostLab, LabHost, host_lab
from tests.integration.host_sessions import options_of, processes, python, reduced, start
from tests.until import until

__all__ = ["FAULTS", "WORKS", "HostChaos", "Violation"]

NAMES, SPARE = ("gpu1", "gpu2", "gpu3"), "gpu4"
LIMIT_S = 90.0
"""Seconds after which a call, or what puts an end to a fault, counts as a hang."""
PATIENCE_S = 8.0
"""Of hosts that do not hear from the kernel; shorter than theirs, for each step waits for it."""
SHORT_S, LONG_S = (0.5, 3.5), (LOST_S + 1, 20.0)
"""Of a silence that must cost nothing, and of one that costs the host."""
DOUBT_S = 1.0
"""How much longer than was meant a silence may be on a busy machine, and still cost nothing."""
LATE_S, LATE_LOSS = 0.1, 0.01
"""What a packet takes each way over a network that is far too long, and the part that is lost."""
WORK_S = 1.5
"""Seconds that work takes about which no fault disturbs."""
ELEMENTS = 8 << 20
"""Of a tensor of 32 MB."""
TMP_BYTES = 128 << 20
"""Of the disk that a host has for its ``/tmp``."""

REDUCE = """
import time
for _ in range({count}):
    t = torch.ones(1000)
    dist.all_reduce(t)
    time.sleep(0.01)
"""
TRAIN = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range({count}):
    optimizer.zero_grad()
    model(torch.ones(8, 256)).sum().backward()
    optimizer.step()
"""
LOOP = """
import time
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    pass
"""

SWALLOW = """
import time
while True:
    try:
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
"""
KEEPER = """
import os, random, signal, subprocess, threading
from distsession import Session
from distsession.cluster import kept_hosts

def start(*args, **kwargs):
    process = subprocess.Popen(*args, **kwargs)
    timer = threading.Timer({seconds}, os.kill, (process.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()
    return process

kept_hosts.subprocess = type(
    "Subprocess", (), {{**vars(subprocess), "Popen": staticmethod(start)}}
)
try:
    session = Session(**{options!r}, keep=60, name="second")
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
else:
    session.close()
    print("started")
"""
"""Starts a second session, and kills the keeper of its hosts so many seconds after its start."""
KILLED = re.compile(r"LaunchError .* was killed by SIGKILL before the session had started\b.*")

WORKS = ("idle", "sleep", "loop", "all_reduce", "push", "pull", "train", "restart", "swallow")
LOSSES = ("rank", "agent", "relay", "host", "ssh", "all", "long cut")
"""Faults that cost ranks."""
FAULTS = (*LOSSES, "stop", "cut", "slow", "late", "full", "interrupt", "keeper")


@dataclass(frozen=True)
class Step:
    """What is done in one step.

    Attributes:
        fault_at_s: Seconds after the beginning of the work.
        fault_s: How long the fault lasts, where it lasts.
        mends: How the session is made whole: which ranks, which host, or another in its place.
    """

    number: int
    work: str
    fault: str
    host: str
    rank: int
    fault_at_s: float
    fault_s: float
    mends: str


class Violation(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    descriptors: int
    threads: int


def hold() -> Held:
    this = psutil.Process()
    return Held(this.num_fds(), this.num_threads())


class HostChaos:
    """A session on hosts that are done harm to.

    Args:
        lab: Has the hosts, and one more.
        seed: Decides what is done.
        works: What may be begun.
        faults: What may come meanwhile.
        longest_s: Of all faults.
    """

    def __init__(
        self,
        lab: HostLab,
        seed: int,
        *,
        works: tuple[str, ...] = WORKS,
        faults: tuple[str, ...] = FAULTS,
        longest_s: float = LONG_S[1],
    ):
        self.lab, self.seed = lab, seed
        self.random = random.Random(seed)
        self._works, self._faults, self._longest_s = works, faults, longest_s
        self._queue: list[str] = []
        self.done: list[str] = []
        self._dark_s = 0.0
        self._crashed: set[str] = set()
        """Hosts on which nobody was left to clean up; the next start there does."""
        for host in lab.hosts:
            host.run("mount", "-o", f"remount,size={TMP_BYTES}", "/tmp")
        self._patch = pytest.MonkeyPatch()
        patient = partial(HostLinks, patience_s=PATIENCE_S)
        self._patch.setattr(cluster_hosts, "HostLinks", patient)
        self._before = hold()
        self.session: Session = start(lab, *NAMES, output=Recorder(), threads=1, hang_grace=1.0)

    @property
    def names(self) -> list[str]:
        """The hosts that have ranks now."""
        return [host.name for host in self.session.hosts]

    # --- one step ---------------------------------------------------------------------------------

    def go(self, steps: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Do so many steps, and check after each."""
        for number in range(steps):
            step = self._choose(number)
            self.done.append(f"{step.work}/{step.fault}")
            say(f"{step}")
            began = time.monotonic()
            try:
                told = self._do(step)
            except BaseException as error:
                before = self.done[-4:-1]
                text = f"seed {self.seed}, {step}, after {before}: {type(error).__name__}: {error}"
                raise Violation(text) from error
            say(f"    {time.monotonic() - began:.1f} s: {told}")

    def _choose(self, number: int) -> Step:
        """The faults come in turns, each round in another order."""
        dice = self.random
        self._queue = self._queue or dice.sample(self._faults, len(self._faults))
        fault = self._queue.pop()
        lasts = {"stop": SHORT_S, "cut": SHORT_S, "long cut": LONG_S}.get(fault, (0.5, 2.0))
        place = dice.randrange(len(NAMES))
        return Step(
            number=number,
            work=dice.choice(self._works),
            fault=fault,
            host=self.names[place],
            rank=2 * place + dice.randrange(2),
            fault_at_s=dice.choice((0.0, 0.02, 0.3, 1.0, WORK_S)) * dice.random(),
            fault_s=min(dice.uniform(*lasts), self._longest_s),
            mends=dice.choice(("ranks", "host", "other", "all")),
        )

    def _do(self, step: Step) -> str:
        session = self.session
        session.push(kept=step.number)
        session.execute(f"kept = [kept, rank]\nbig = torch.full(({ELEMENTS},), float(rank))")
        before = {info.rank: info.pid for info in session.infos}
        victims = next(host.ranks for host in session.hosts if host.name == step.host)
        is_over = threading.Event()
        error = self._disturbed(step, is_over)
        told = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        self._check_error(step, error, victims)
        dead = self._dead(step, victims)
        if dead - set(victims) and step.work != "restart":
            raise Violation(f"{sorted(dead)} are dead, and {told!r} was told")
        fresh = self._mend(step, dead, is_over)
        self._check_state(step, before, fresh, error)
        return f"{sorted(dead)} dead; {told}"

    def _disturbed(self, step: Step, is_over: threading.Event) -> BaseException | None:
        """Do the work, and the fault meanwhile; gives what was raised."""
        begin, end = self._fault(step)
        began = threading.Event()
        failed: list[BaseException] = []

        def disturb() -> None:
            try:
                time.sleep(step.fault_at_s)
                try:
                    begin()
                finally:
                    began.set()
                if end is not None:
                    since = time.monotonic()
                    time.sleep(step.fault_s)
                    end()
                    self._dark_s = time.monotonic() - since
            except BaseException as error:
                failed.append(error)
            finally:
                is_over.set()

        thread = threading.Thread(target=disturb)
        error: BaseException | None = None
        self._dark_s = 0.0
        with at_most(LIMIT_S, f"the {step.work} does not end", self.session):
            try:
                thread.start()  # Ctrl-C may come as soon as it has
                self._work(step)
            except (DistsessionError, KeyboardInterrupt) as raised:
                error = raised
            try:
                began.wait()
                time.sleep(0.05)
            except KeyboardInterrupt as raised:
                error = error or raised
        if step.fault != "long cut":
            thread.join()
        if failed:
            raise failed[0]
        return error

    # --- work -------------------------------------------------------------------------------------

    def _work(self, step: Step) -> None:
        session = self.session
        match step.work:
            case "idle":
                time.sleep(WORK_S)
            case "sleep":
                session.execute(f"import time\ntime.sleep({WORK_S})")
            case "loop":
                session.execute(LOOP.format(seconds=WORK_S))
            case "all_reduce":
                session.execute(REDUCE.format(count=100))
            case "push":
                session.push(other=torch.zeros(ELEMENTS))
            case "pull":
                if [float(each[-1]) for each in session.pull("big").values()] != [*range(6)]:
                    raise Violation("what was pulled is wrong")
            case "train":
                session.execute(TRAIN.format(count=60))
            case "swallow":
                self._swallow(step)
            case "restart":
                session.restart(None if step.mends == "all" else [step.rank])

    def _swallow(self, step: Step) -> None:
        """Stop code that catches the interrupt, again, and then force its end."""
        session = self.session

        def press() -> None:
            time.sleep(WORK_S / 3)
            while not is_over.is_set() and not session.interrupt():
                time.sleep(0.01)
            for _ in range(step.number % 3):
                time.sleep(0.05)
                session.interrupt()
            if not is_over.is_set():
                session.interrupt(force=True)

        is_over = threading.Event()
        presser = threading.Thread(target=press)
        presser.start()
        try:
            session.execute(SWALLOW, label="In[1]")
        except RunInterrupt:
            if step.fault == "interrupt":
                raise
        finally:
            is_over.set()
            presser.join()
            session.interrupt(force=True)  # where it was the fault that ended the waiting
        if "running" in (status := session.status()):
            raise Violation(f"{status!r} of what was ended")

    # --- faults -----------------------------------------------------------------------------------

    def _fault(self, step: Step) -> tuple[Callable[[], object], Callable[[], object] | None]:
        """How it begins, and how it ends, where it does."""
        host = self.lab[step.host]
        there = processes(self.session, step.host)
        match step.fault:
            case "rank":
                return lambda: kill(self.session.infos[step.rank].pid), None
            case "agent" | "relay" | "host":
                return lambda: kill(there[step.fault].pid), None
            case "ssh":
                (client,) = ssh_clients(step.host)
                return client.kill, None
            case "all":
                return host.crash, None
            case "stop":
                stopped: list[int] = []
                return lambda: stop(host, stopped), lambda: let_go_on(stopped)
            case "cut" | "long cut":
                return as_pair(host.unplugged())
            case "slow":
                return as_pair(slow(host))
            case "late":
                return as_pair(self.lab.delayed(step.host, LATE_S, LATE_LOSS))
            case "full":
                return as_pair(full(host))
            case "keeper":
                return lambda: self._kill_keeper(step), None
            case _:
                return lambda: os.kill(os.getpid(), signal.SIGINT), None

    def _kill_keeper(self, step: Step) -> None:
        """The start of another session says that its keeper was killed, and leaves nothing."""
        options = options_of(self.lab, step.host, threads=1)
        code = KEEPER.format(seconds=2.5 * step.fault_s**2 / 4, options=options)
        with python(code) as process:
            try:
                said, errors = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Violation("a start does not end whose keeper is killed") from None
        if not (KILLED.fullmatch(said.strip()) or said == "started\n") or errors:
            raise Violation(f"a start whose keeper was killed said {said!r}, {errors!r}")
        if second := [kept.name for kept in kept_sessions() if kept.name == "second"]:
            raise Violation(f"{second} is kept, whose keeper was killed")

    # --- what must be so --------------------------------------------------------------------------

    def _is_loss(self, step: Step) -> bool:
        return step.fault in LOSSES

    def _may_be_loss(self, step: Step) -> bool:
        """Whether it may cost ranks, for it took longer than it should."""
        return self._is_loss(step) or self._dark_s > LOST_S - DOUBT_S

    def _may_be_cut_off(self, step: Step) -> bool:
        """Whether others may have been freed from waiting for it, which costs no ranks."""
        return step.fault == "cut" and self._dark_s > SILENT_S - DOUBT_S

    def _check_error(self, step: Step, error: BaseException | None, victims: Any) -> None:
        if error is None:
            return
        text = str(error)
        if step.fault == "interrupt":
            if not isinstance(error, KeyboardInterrupt):
                raise Violation(f"Ctrl-C gave {error!r}") from error
        elif self._may_be_loss(step) or self._may_be_cut_off(step):
            ranks = "|".join(map(str, victims))
            if not re.search(rf"{step.host}\b|\branks? ({ranks})\b", text):
                raise Violation(f"the error names neither {step.host} nor its ranks: {error!r}")
        elif step.fault != "full" or step.work != "restart":
            raise Violation(f"this is no reason for {error!r}") from error

    def _dead(self, step: Step, victims: Any) -> set[int]:
        """The ranks that are dead, once that is known."""
        launcher = self.session.launcher
        if self._is_loss(step) and step.work == "restart":
            # It may have hit those that were to be replaced, or others, who live a moment longer.
            deadline = time.monotonic() + LOST_S
            while not launcher.dead_ranks() and time.monotonic() < deadline:
                self._ask_all()
                time.sleep(0.1)
            self._ask_all()
        elif self._is_loss(step):
            hit = {step.rank} if step.fault == "rank" else set(victims)
            until(lambda: hit <= set(launcher.dead_ranks()), f"that {sorted(hit)} are dead")
        # What was lost on a connection is sent again some time after the network has come back.
        until(lambda: not launcher.silent_hosts(), "hosts that answer again, or are gone")
        dead = set(launcher.dead_ranks())
        if dead and not self._may_be_loss(step) and step.work != "restart":
            raise Violation(f"{sorted(dead)} are dead, for nothing")
        return dead

    def _ask_all(self) -> None:
        """Have it known which ranks are dead: a call ends for each that is not known to be."""
        session, known = self.session, None
        with at_most(LIMIT_S, "a call does not end", session):
            while known != (dead := set(session.launcher.dead_ranks())):
                known = dead
                if living := sorted(set(session.ranks) - dead):
                    with contextlib.suppress(DistsessionError):
                        session[living].run(int)

    def _mend(self, step: Step, dead: set[int], is_over: threading.Event) -> set[int]:
        """Make the session whole; gives the ranks that may be fresh."""
        session = self.session
        others = [name for name in (*NAMES, SPARE) if name not in self.names]
        moves = step.mends == "other" and self._is_loss(step) and dead
        fresh = set(dead)
        if not moves:
            with at_most(LIMIT_S, "the fault does not end", session):
                is_over.wait()
            dead = fresh = dead | set(session.launcher.dead_ranks())
        ranks = next(host.ranks for host in session.hosts if host.name == step.host)
        with at_most(LIMIT_S, "the restart does not end", session):
            if moves:
                fresh |= set(ranks)
                session.restart(hosts={step.host: others[0]}, restore="kept")
            elif dead and step.mends == "host":
                fresh |= set(ranks)
                session.restart(hosts=[step.host], restore="kept")
            elif dead and step.mends == "all":
                fresh |= set(session.ranks)
                session.restart()
                session.execute(f"kept = [{step.number}, rank]")
            elif dead:
                survivors = set(session.ranks) - dead
                session.restart(sorted(dead), restore="kept" if survivors else ())
        with at_most(LIMIT_S, "the fault does not end", session):
            is_over.wait()
        return fresh

    def _check_state(
        self, step: Step, before: dict[int, int], fresh: set[int], error: BaseException | None
    ) -> None:
        session = self.session
        with at_most(LIMIT_S, "a call does not end", session):
            if step.work == "restart":
                fresh |= set(session.ranks if step.mends == "all" else [step.rank])
                has = session.evaluate("'kept' in globals()")
                if empty := [rank for rank in session.ranks if not has[rank]]:
                    session[empty].execute("kept = None")
            if (sums := reduced(session)) != {6.0}:
                raise Violation(f"the next collective is wrong: {sums}")
            kept = session.pull("kept")
        for info in session.infos:
            if info.rank not in fresh and info.pid != before[info.rank]:
                raise Violation(f"rank {info.rank} was replaced, for nothing")
            is_same = info.pid == before[info.rank] and step.mends != "all"
            if is_same and kept[info.rank] != [step.number, info.rank]:
                raise Violation(f"rank {info.rank} has lost its variables: {kept[info.rank]}")
        mine = set(self.names)
        if step.fault in ("host", "all") and step.host not in mine:
            self._crashed.add(step.host)
        self._crashed -= mine
        try:
            until(lambda: self._left() == sorted(mine))
        except AssertionError:
            raise Violation(f"folders are on {self._left()}, ranks on {sorted(mine)}") from None

    def _left(self) -> list[str]:
        """The hosts that have folders of sessions; each so often as it has."""
        hosts = [host for host in self.lab.hosts if host.name not in self._crashed]
        return sorted(host.name for host in hosts for _ in host.left())

    def close(self) -> None:
        """Close the session; nothing is left of it anywhere."""
        try:
            with at_most(LIMIT_S, "the session does not close", self.session):
                self.session.close()
        finally:
            self._patch.undo()
        until(lambda: not self.lab.processes(), "the end of all processes on the hosts")
        if left := self._left():
            raise Violation(f"folders are left on {left}")
        until(lambda: not _threads(), f"the end of {_threads()}")
        if children := [p for p in psutil.Process().children() if p.name() == "ssh"]:
            raise Violation(f"processes are left: {children}")
        more = hold().descriptors - self._before.descriptors
        if more > 8:  # of torch, once
            raise Violation(f"{more} descriptors are left: {_descriptors()}")


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("distsession")]


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


# --- faults ---------------------------------------------------------------------------------------


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ssh_clients(host: str) -> list[psutil.Process]:
    """That run here, to a host."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == "ssh" and host in process.cmdline():
                found.append(process)
    return found


def stop(host: LabHost, stopped: list[int]) -> None:
    for pid in host.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)


def let_go_on(stopped: list[int]) -> None:
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def as_pair(
    fault: contextlib.AbstractContextManager[None],
) -> tuple[Callable[[], object], Callable[[], object]]:
    return fault.__enter__, lambda: fault.__exit__(None, None, None)


@contextlib.contextmanager
def slow(host: LabHost) -> Iterator[None]:
    """What goes there waits in a long queue, for little of it gets through."""
    queue = ["dev", host.plug, "root"]
    tc("qdisc", "add", *queue, "tbf", "rate", "40mbit", "burst", "32kb", "latency", "200ms")
    try:
        yield
    finally:
        tc("qdisc", "del", *queue)


def tc(*arguments: str) -> None:
    environ = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    subprocess.run(["tc", *arguments], check=True, env=environ)


@contextlib.contextmanager
def full(host: LabHost) -> Iterator[None]:
    """No byte more can be written to its ``/tmp``."""
    host.run("sh", "-c", "dd if=/dev/zero of=/tmp/full bs=64k 2>/dev/null; true")
    try:
        yield
    finally:
        host.run("rm", "-f", "/tmp/full")


@contextlib.contextmanager
def at_most(seconds: float, what: str, session: Session) -> Iterator[None]:
    """Something that ends within this time, or is broken, with the stacks of all threads."""

    def strike(*_: object) -> None:
        faulthandler.dump_traceback(all_threads=True, file=sys.__stderr__)
        told = []
        thread = threading.Thread(target=lambda: told.append(session.diagnose()), daemon=True)
        thread.start()
        thread.join(5.0)
        raise Violation(f"{what} within {seconds:g} s: {told}")

    former = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def main() -> int:
    """Run it for long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--work", choices=WORKS)
    parser.add_argument("--fault", choices=FAULTS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="    %(asctime)s %(name)s: %(message)s")
    began = time.monotonic()
    with host_lab((*NAMES, SPARE)) as lab:
        chaos = HostChaos(
            lab,
            arguments.seed,
            works=(arguments.work,) if arguments.work else WORKS,
            faults=(arguments.fault,) if arguments.fault else FAULTS,
        )
        try:
            chaos.go(arguments.steps, say=lambda text: print(text, flush=True))
        except Violation as error:
            print(f"{error}\nsteps: {chaos.done}", file=sys.stderr)
            return 1
        finally:
            chaos.close()
    counts = Counter(name.partition("/")[2] for name in chaos.done)
    print(f"seed {arguments.seed}: {dict(counts)} in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
