"""Handles of operations that only C++ still holds: they end with torchrun's numbers, or by Stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsession import RunInterrupt, Session
from tests.integration.conftest import Recorder
from tests.integration.works_programs import HEAD, PROGRAMS

TORCHRUN_TIMEOUT_S = 150

SCRIPT = """
import json, os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
results = {}
exec(compile(%(head)r, "head", "exec"))
for name, program in %(programs)r.items():
    scope = dict(globals())
    try:
        exec(compile(program, name, "exec"), scope)
        results[name] = scope["found"]
    except Exception as error:
        results[name] = type(error).__name__
    dist.barrier()
open(os.path.join(%(folder)r, str(rank)), "w").write(json.dumps(results))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(scope="module")
def session(ranks: int) -> Iterator[Session]:
    with Session(ranks, threads=1, output=Recorder(), hang_grace=0.5) as session:
        session.execute(HEAD)
        yield session


@pytest.fixture(scope="module")
def right(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, object]]:
    """What each program finds on each rank under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    script = folder / "script.py"
    script.write_text(SCRIPT % {"head": HEAD, "programs": PROGRAMS, "folder": str(folder)})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, str(ranks), str(script)],
        env=environ,
        timeout=TORCHRUN_TIMEOUT_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = {rank: json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)}
    return {name: {rank: found[rank][name] for rank in found} for name in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_torchrun(
    session: Session, right: dict[str, dict[int, object]], name: str
) -> None:
    session.execute(PROGRAMS[name], timeout=60)
    assert dict(session.evaluate("found")) == right[name]
    check(session)


def check(session: Session) -> None:
    """Nothing is left under way, and the next collective is right."""
    session.execute("probe = torch.ones(2)\ndist.all_reduce(probe)", timeout=30)
    total = [float(session.world_size)] * 2
    assert dict(session.evaluate("probe.tolist()")) == dict.fromkeys(session.ranks, total)


# --- Stop -----------------------------------------------------------------------------------------

LATE = "if rank == world_size - 1: time.sleep(1000)\n"
WAITS = {
    "a backward of DistributedDataParallel": "ddp = model_of()\nloss = ddp(batches(1)[0]).sum()\n"
    + LATE
    + "loss.backward()",
    "a step of join": "ddp = model_of()\nwith ddp.join():\n"
    "    if rank == world_size - 1: time.sleep(1000)\n    train(ddp, batches(2))",
    "the end of join": "ddp = model_of()\nwith ddp.join(divide_by_initial_world_size=False):\n"
    "    train(ddp, batches(1))\n"
    "    if rank == world_size - 1: time.sleep(1000)",
    "a hook": "ddp = model_of()\n"
    "ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)\n"
    "loss = ddp(batches(1)[0]).sum()\n" + LATE + "loss.backward()",
    "a hook of C++": "ddp = model_of()\n"
    "ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)\n"
    "loss = ddp(batches(1)[0]).sum()\n" + LATE + "loss.backward()",
    "parameters that are not used": "ddp = DDP(Branches(), find_unused_parameters=True)\n"
    "loss = ddp(batches(1)[0]).sum()\n" + LATE + "loss.backward()",
    "a functional result": LATE
    + 'funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist()',
    "a backward of all_reduce": "leaf = torch.ones(2, requires_grad=True)\n"
    "total = through.all_reduce(leaf).sum()\n" + LATE + "total.backward()",
    "a future": LATE + "future = dist.all_reduce(torch.ones(2), async_op=True).get_future()\n"
    "gc.collect()\nfuture.then(lambda done: done.value()[0]).wait()",
}


@pytest.mark.parametrize("name", WAITS)
def test_stop_ends_the_wait(session: Session, name: str) -> None:
    last, lines = session.world_size - 1, WAITS[name].splitlines()
    sleeps = 1 + next(number for number, line in enumerate(lines) if "sleep(1000)" in line)

    def stop() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            rows = str(session.diagnose()).splitlines()
            if any(
                row.startswith(f"{last} ") and row.find(f"] line {sleeps} ") > 0 for row in rows
            ):
                break
            time.sleep(0.05)
        time.sleep(0.5)  # for the others to get into the wait
        session.interrupt()

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        with pytest.raises(RunInterrupt):
            session.execute(WAITS[name], timeout=60)
    finally:
        stopper.join()
    check(session)


# --- age ------------------------------------------------------------------------------------------

COUNT = """
import psutil
from distsession.engine.collectives import torch_private, work

def held():
    gc.collect()
    works = sum(isinstance(each, work.IssuedWork) for each in gc.get_objects())
    process = psutil.Process()
    return works, process.num_fds(), process.num_threads(), process.memory_info().rss / 2**20

def drop(count):
    for n in range(count):
        tensor = torch.ones(8)
        match n % 4:
            case 0:
                dist.all_reduce(tensor, async_op=True)
            case 1:
                dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: None)
            case 2:  # torch keeps those that nobody waits for
                funcol.all_reduce(tensor, "sum", dist.group.WORLD).tolist()
            case 3:
                dist.broadcast(tensor, 0, async_op=True).wait()
        if n % 100 == 0:
            dist.barrier()
    dist.barrier()
"""
MOST_GROWN_MB = 12


def test_nothing_stays_of_ten_thousand_that_were_dropped(session: Session) -> None:
    session.execute(COUNT)
    session.execute("drop(3000)\nbefore = held()", timeout=200)
    session.execute("drop(10_000)\nafter = held()", timeout=300)
    before, after = dict(session.evaluate("before")), dict(session.evaluate("after"))
    for rank in session.ranks:
        assert after[rank][0] <= before[rank][0]
        assert after[rank][1:3] == before[rank][1:3]
        assert after[rank][3] - before[rank][3] < MOST_GROWN_MB
    check(session)
