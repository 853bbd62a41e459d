"""Starting: from nothing to the first barrier, and fresh ranks in a session that is warm."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from tests.benchmarks import peers
from tests.benchmarks.bench import Bench, settle_agent
from tests.benchmarks.figures import OURS, Arm, NotInstalled, Row, Target, take_turns
from tests.benchmarks.processes import program, snapshot, time_program
from tests.ports import held_port

RANKS = (1, 2, 4, 8)
IMPORT = "import torch"
IMPORT_INSIDE = "the statement import torch"


def import_torch() -> list[float]:
    """Seconds of a process that imports torch and ends: the unit of all starts.

    A third of it is Python's start and the end of a process that has torch.
    """
    return [time_program([sys.executable, "-c", "import torch"])]


def import_inside() -> list[float]:
    """Seconds of the statement alone, in such a process."""
    return [_import("import torch")[0] / 1e3]


def start(bench: Bench) -> Iterator[Row]:
    """Start to first barrier, as a multiple of one ``import torch``."""
    import_torch()  # whatever the disk has to bring is in memory from here on
    for ranks in RANKS:
        floor = Arm(IMPORT, import_torch)
        arms = [
            floor,
            Arm(IMPORT_INSIDE, import_inside),
            swept_arm(bench, OURS, partial(start_ours, ranks)),
            swept_arm(bench, "torchrun", partial(_start_torchrun, ranks)),
            swept_arm(bench, "ipyparallel", partial(_start_ipyparallel, ranks)),
            swept_arm(bench, "nbdistributed", partial(_start_nbdistributed, ranks)),
        ]
        take_turns(arms, bench.repeats)
        name = f"start to first barrier, N={ranks}"
        yield floor.row(name, "s")
        yield from (arm.row(name, "s", floor) for arm in arms[1:])


IMPORTS = {
    "import distsession": f"{OURS}",
    "from distsession import Session": f"{OURS}, Session",
    "import IPython": "IPython",
    "import torch": "torch",
}
IMPORT_LIMIT_MS = 100.0
TIMES = "from time import perf_counter as now; began = now(); {}; print((now() - began) * 1e3)"


def imports(bench: Bench) -> Iterator[Row]:
    """What importing takes, in a process that has imported nothing."""
    arms = [Arm(subject, partial(_import, what)) for what, subject in IMPORTS.items()]
    take_turns(arms, 3 * bench.repeats)  # short, and so the more of them
    for arm in arms:
        target = Target(IMPORT_LIMIT_MS) if arm.subject == OURS else None
        yield arm.row("import", "ms", target=target)


def _import(what: str) -> list[float]:
    command = [sys.executable, "-c", TIMES.format(what)]
    return [float(subprocess.run(command, capture_output=True, check=True).stdout)]


def swept_arm(bench: Bench, subject: str, measure: Callable[[], float]) -> Arm:
    """A start whose leftovers are ended before the next one."""

    def swept() -> list[float]:
        before = snapshot()
        try:
            seconds = measure()
        except NotInstalled:  # nothing was started, so nothing has ended
            raise
        except BaseException:
            bench.sweep(subject, before)
            raise
        bench.sweep(subject, before)
        return [seconds]

    return Arm(subject, swept)


def start_ours(ranks: int) -> float:
    return time_program(program("start_distsession", ranks), ready=1)


def _start_torchrun(ranks: int) -> float:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    script = program("start_torchrun")[1:]
    with held_port() as port:
        command = [*launcher, "--master-port", str(port), *script]
        return time_program(command, ready=ranks)


def _start_ipyparallel(ranks: int) -> float:
    with held_port() as port:
        return time_program(program("start_ipyparallel", ranks, port), ready=1)


def _start_nbdistributed(ranks: int) -> float:
    python = peers.python_with("nbdistributed")
    command = program("start_nbdistributed", ranks, python=python)
    return time_program(command, ready=1, env=peers.path_with(python))


def restart(bench: Bench) -> Iterator[Row]:
    """Fresh processes for all ranks of a session that has been running for a while."""
    with bench.session(4) as session:

        def measure() -> list[float]:
            settle_agent(session)
            began = time.perf_counter()
            session.restart()
            return [time.perf_counter() - began]

        floor = Arm(IMPORT, import_torch)
        ours = Arm(OURS, measure)
        take_turns([floor, ours], bench.repeats)
        yield ours.row("warm restart, N=4", "s", floor)
