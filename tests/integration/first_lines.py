"""Programs after public bug reports, and whether the first line says who, what and where.

A broken one ends by itself, or is stopped once its ranks get no further. The first line of what is
shown then names a rank at fault, the operation or the error, and the line of the cell. A right one,
of which many look like a broken one, shows no error and no remark.

``make soak`` runs all of them; ``tests/integration/test_first_lines.py`` runs every third one::

    python -m tests.integration.first_lines
"""

# ruff: noqa: E501  (a program is a text)

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from distsession import Session
from distsession.errors import DistsessionError
from tests.integration.conftest import Recorder
from tests.until import Press

__all__ = ["BROKEN", "RIGHT", "Program", "alarm_of", "begin", "every_third", "problem_of", "set_up"]

LABEL = "In[7]"
RANKS = 4
LIMIT_S = 60
V = TypeVar("V")

SETUP = """
import asyncio, contextlib, functools, os, queue, random, signal, sys, tempfile, threading, time
import torch.distributed._functional_collectives as functional
import torch.utils.data as data
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
odd = rank == 2
some = torch.ones(4)
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
other = dist.new_group([0, 1, 2, 3])
kept = 40 + rank
def model(): return DDP(nn.Linear(4, 4))
x = torch.ones(2, 4)
"""


@dataclass(frozen=True)
class Program:
    """A broken one.

    Attributes:
        code: Of the cell.
        what: A regular expression for the operation, or the error, in the first line.
        line: The line of the cell in it, or one of several that it may be.
        who: A regular expression for the rank at fault.
        is_stopped: It never ends by itself.
        is_caught: Its code catches the error, so that a remark says it.
    """

    code: str
    what: str = "all_reduce"
    line: int | tuple[int, ...] = 1
    who: str = r"ranks? (\d-)?2"
    is_stopped: bool = False
    is_caught: bool = False


def stops(code: str, line: int | tuple[int, ...], what: str = "", who: str = r"rank 2") -> Program:
    """One that somebody has to stop."""
    return Program(code, what, line, who, is_stopped=True)


MISSING = {
    "only rank 0 reduces a metric": Program(
        "loss = torch.tensor(1.0)\nif rank == 0:\n    dist.all_reduce(loss)\n    print(loss)",
        line=3, who="ranks 1-3",
    ),
    "validation on rank 0 with the wrapped model": Program(
        "net = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))\n"
        "if rank == 0:\n    net(x)",
        what="broadcast", line=3, who="ranks 1-3",
    ),
    "a barrier for all but the writer": Program(
        "if rank != 2:\n    dist.barrier()\nelse:\n    weights = torch.zeros(4)",
        what="barrier", line=2,
    ),
    "early stopping that one rank decides": Program(
        "for epoch in range(4):\n    if odd and epoch == 2: break\n    dist.all_reduce(some)",
        line=3,
    ),
    "a batch that one rank skips": Program(
        "for step in range(3):\n"
        "    if odd and step == 1: continue\n"
        "    dist.all_reduce(torch.ones(4))",
        line=3,
    ),
    "uneven batches of a DataLoader": Program(
        "net = model()\n"
        "for batch in data.DataLoader(range(4 - odd)):\n"
        "    net(x).sum().backward()",
        line=3,
    ),
    "a gather of objects by some": Program(
        "found = [None] * 4\nif not odd: dist.all_gather_object(found, rank)",
        what="all_gather", line=2,
    ),
    "a scatter of objects by some": Program(
        "mine = [None]\n"
        "if not odd: dist.scatter_object_list(mine, [1, 2, 3, 4] if rank == 0 else None)\n"
        "if not odd: dist.barrier()",
        what="broadcast|scatter|barrier", line=(2, 3),
    ),
    "a group whose last member does not come": Program(
        "if rank == 3:\n    dist.all_reduce(some, group=halves[1])", line=2
    ),
    "a new group by its members only": Program(
        "if rank in (0, 1, 3): group = dist.new_group([0, 1, 3])", what="new_group"
    ),
    "a mesh that one rank does not make": Program(
        "if not odd: dist.init_device_mesh('cpu', (2, 2))", what="new_group|all_gather|broadcast"
    ),
    "SyncBatchNorm-like statistics on some ranks": Program(
        "class Norm(nn.Module):\n"
        "    def forward(self, t):\n"
        "        if self.training: dist.all_reduce(t.mean())\n"
        "        return t\n"
        "norm = Norm().train(not odd)\n"
        "norm(x)",
        line=3,
    ),
    "a gradient clipped by a norm that some compute": Program(
        "grads = [torch.ones(3)] * (2 - odd)\n"
        "for grad in grads:\n    dist.all_reduce(grad)",
        line=3,
    ),
    "a tensor-parallel forward of one rank less": Program(
        "def row_parallel(t):\n    functional_sum = functional.all_reduce(t, 'sum', other)\n"
        "    return functional_sum.sum().item()\n"
        "if not odd: row_parallel(x)",
        line=(2, 3),
    ),
    "a pipeline whose stage sends nothing": Program(
        "if rank == 3:\n    dist.recv(some, src=2)", what="recv", line=2
    ),
    "a pipeline whose stage receives nothing": Program(
        "if rank == 1:\n    dist.send(torch.ones(2_000_000), dst=2)", what="send", line=2
    ),
    "a tag that does not fit": Program(
        "if odd: dist.send(torch.ones(2_000_000), 3, tag=1)\n"
        "if rank == 3: dist.recv(torch.ones(2_000_000), 2, tag=2)",
        what="send|recv", line=(1, 2),
    ),
    "receives before sends, in a ring": Program(
        "t = torch.ones(2)\ndist.recv(t, (rank - 1) % 4)\ndist.send(t, (rank + 1) % 4)",
        what="recv", line=2, who="rank 0",
    ),
    "groups in another order": Program(
        "groups = [None, other]\n"
        "for group in reversed(groups) if odd else groups:\n"
        "    dist.all_reduce(some, group=group)",
        line=3,
    ),
    "a checkpoint that only rank 0 gathers": Program(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = nn.Linear(8, 8)\n"
        "fully_shard(net)\n"
        "if rank == 0: net.weight.full_tensor().sum().item()",
        what="all_gather", line=4, who="ranks 1-3",
    ),
    "a worker thread that reduces on some": Program(
        "def reduce(t=torch.ones(4)): dist.all_reduce(t)\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    if not odd: pool.submit(reduce).result()",
        line=(1, 3),
    ),
    "a function that logs from rank 0 and returns early": Program(
        "def log(value):\n"
        "    if rank != 2: return\n"
        "    dist.barrier()\n"
        "    print(value)\n"
        "log(1)",
        what="barrier", line=3, who="ranks 0-1,3",
    ),
    "a rank that waits for a key": Program(
        "store = dist.distributed_c10d._get_default_store()\nif odd: store.get('ready')",
        what="key 'ready'", line=2, who="ranks 0-1,3",
    ),
}  # fmt: skip

DIFFERENT = {
    "another length of the last batch": Program(
        "dist.all_reduce(torch.ones(3 if odd else 4))"
    ),
    "a loss of another dtype": Program(
        "loss = torch.tensor(1.0, dtype=torch.float64 if odd else torch.float32)\n"
        "dist.all_reduce(loss)",
        line=2,
    ),
    "another number of parameters": Program(
        "net = nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4)] * odd)\n"
        "for p in net.parameters(): dist.broadcast(p.data, 0)\n"
        "dist.barrier()",
        what="broadcast|barrier|all_reduce", line=(2, 3),
    ),
    "a set that is not sorted": Program(
        "names = ['b', 'a'] if odd else ['a', 'b']\n"
        "sizes = {'a': 2, 'b': 3}\n"
        "for name in names:\n    dist.all_reduce(torch.ones(sizes[name]))",
        line=4,
    ),
    "an average by another reduction": Program(
        "dist.all_reduce(some, op=dist.ReduceOp.MIN if odd else dist.ReduceOp.MAX)"
    ),
    "a root that is the own rank": Program(
        "dist.broadcast(some, src=rank)", what="broadcast", who="rank 0"
    ),
    "a barrier against a reduction": Program(
        "if odd:\n    dist.barrier()\nelse:\n    dist.all_reduce(some)",
        what="barrier", line=(2, 4),
    ),
    "lists of objects against tensors": Program(
        "if odd: dist.broadcast_object_list([1], 0)\nelse: dist.all_reduce(some)",
        what="broadcast", line=(1, 2),
    ),
    "splits that do not fit": Program(
        "send = [1, 1, 1, 2] if odd else [1] * 4\n"
        "dist.all_to_all_single(torch.ones(4), torch.ones(sum(send)), [1] * 4, send)",
        what="all_to_all_single", line=2,
    ),
    "layers in another order": Program(
        "net = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2, bias=False)])\n"
        "for layer in reversed(net) if odd else net:\n"
        "    dist.all_reduce(layer.weight.data)",
        line=3,
    ),
    "a message of another length": Program(
        "if odd: dist.send(torch.ones(3), 3)\nif rank == 3: dist.recv(torch.ones(2), 2)",
        what="send|recv", line=(1, 2),
    ),
}  # fmt: skip

RAISED = {
    "a file that one rank has not": Program(
        "path = '/no/such/file' if odd else os.devnull\nopen(path).close()\ndist.barrier()",
        what="FileNotFoundError", line=2,
    ),
    "a shape that does not fit": Program(
        "net = model()\nnet(torch.ones(2, 3 if odd else 4)).sum().backward()",
        what="RuntimeError", line=2,
    ),
    "not a number": Program(
        "loss = float('nan') if odd else 1.0\nassert loss == loss, 'the loss is not a number'\n"
        "dist.all_reduce(torch.tensor(loss))",
        what="AssertionError", line=2,
    ),
    "a key that is missing": Program(
        "batch = {} if odd else {'x': 1}\nvalue = batch['x']\ndist.all_reduce(some)",
        what="KeyError", line=2,
    ),
    "a state dict with other keys": Program(
        "nn.Linear(2, 2).load_state_dict({f'stage{rank}.weight': torch.ones(2, 2)})",
        what="RuntimeError", who="ranks 0-3",
    ),
    "a worker of a DataLoader": Program(
        "class Files(data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, n):\n"
        "        return n if n < 2 or not odd else {}['pixels']\n"
        "for batch in data.DataLoader(Files(), num_workers=1): dist.all_reduce(torch.ones(1))",
        what="KeyError", line=4,
    ),
    "a process of its own": Program(
        "import torch.multiprocessing as mp\n"
        "def work(n): raise OSError('no scratch space')\n"
        "if odd: mp.start_processes(work, nprocs=1, start_method='fork')\n"
        "dist.barrier()",
        what="OSError.*no scratch space", line=2,
    ),
    "several errors": Program(
        "async def load(): raise TimeoutError('no answer')\n"
        "async def loads():\n"
        "    async with asyncio.TaskGroup() as group: group.create_task(load())\n"
        "if odd: await loads()\n"
        "dist.barrier()",
        what="TimeoutError at In\\[7\\] line 1", line=(1, 4),
    ),
    "the reason at the end": Program(
        "steps = 'step done\\n' * 50\n"
        "if odd: raise RuntimeError(f'while loading:\\n{steps}the disk is full')\n"
        "dist.barrier()",
        what="the disk is full", line=2,
    ),
    "an end of the process": Program(
        "if odd: sys.exit('no GPU')\ndist.barrier()", what="SystemExit"
    ),
    "recursion": Program(
        "def walk(tree): return walk(tree)\nif odd: walk({})\ndist.barrier()",
        what="RecursionError", line=(1, 2),
    ),
    "cleaning up with a barrier": Program(
        "try:\n    if odd: raise ValueError('bad sample')\n    dist.all_reduce(some)\n"
        "finally:\n    dist.barrier()",
        what="ValueError", line=2,
    ),
    "telling the others that it has failed": Program(
        "failed = torch.zeros(1)\n"
        "try:\n    if odd: raise ValueError('bad sample')\n    dist.all_reduce(some)\n"
        "except ValueError:\n    dist.broadcast(failed, 2)",
        what="ValueError", line=3,
    ),
    "a region that ends with a barrier": Program(
        "@contextlib.contextmanager\n"
        "def region():\n"
        "    try: yield\n"
        "    finally: dist.barrier()\n"
        "with region():\n"
        "    if odd: raise ValueError('bad sample')\n"
        "    dist.all_reduce(some)",
        what="ValueError", line=6,
    ),
    "saving what was computed, after an error": Program(
        "def save(): dist.all_gather_object([None] * 4, rank)\n"
        "with contextlib.ExitStack() as stack:\n"
        "    stack.callback(save)\n"
        "    if odd: raise MemoryError('no more')\n"
        "    dist.all_reduce(some)",
        what="MemoryError", line=4,
    ),
    "the end of the data of one rank": Program(
        "batches = iter(range(2 + (not odd)))\n"
        "while True:\n"
        "    try: next(batches)\n"
        "    except StopIteration: dist.barrier(); break\n"
        "    dist.all_reduce(some)",
        what="StopIteration", line=3,
    ),
}  # fmt: skip

STOPPED = {
    "a loop that never ends": stops("while odd:\n    pass", (1, 2), "while odd|pass"),
    "a wait for a file": stops(
        "while odd and not os.path.exists('/never'):\n    time.sleep(0.05)",
        (1, 2), "time.sleep|while",
    ),
    "an empty queue": stops("if odd:\n    queue.Queue().get()", 2, "queue.Queue"),
    "a lock that is held": stops(
        "lock = threading.Lock()\nlock.acquire()\nif odd: lock.acquire()", 3, "lock.acquire"
    ),
    "a future that nobody sets": stops(
        "if odd: await asyncio.get_running_loop().create_future()", 1, "await"
    ),
    "a program that does not end": stops(
        "import subprocess\nif odd: subprocess.run(['sleep', '60'])", 2, "subprocess"
    ),
    "all in a loop": stops("while True:\n    time.sleep(0.05)", (1, 2), "sleep", "ranks 0-3"),
    "one is late for all": stops(
        "if odd: time.sleep(60)\ndist.all_reduce(some)", (1, 2), "all_reduce.*line 2.*for rank 2"
    ),
    "in a function": stops("def spin():\n    while True: pass\nif odd: spin()", 2, "while"),
}  # fmt: skip

CAUGHT = {
    "a mismatch that is caught": Program(
        "try: dist.all_reduce(torch.ones(4 + odd))\nexcept Exception: pass", is_caught=True
    ),
    "a hang that is caught": Program(
        "try:\n    if not odd: dist.all_reduce(some)\nexcept Exception as error: print(error)",
        line=2, is_caught=True,
    ),
    "a mismatch while an object is deleted": Program(
        "class Handle:\n    def __del__(self): dist.all_reduce(torch.ones(4 + odd))\n"
        "handle = Handle()\ndel handle",
        line=2, is_caught=True,
    ),
}  # fmt: skip

CAUGHT["a collective in a forked child"] = Program(
    "if odd:\n"
    "    child = os.fork()\n"
    "    if not child:\n"
    "        try: dist.all_reduce(some)\n"
    "        finally: os._exit(0)\n"
    "    os.waitpid(child, 0)",
    line=4, is_caught=True,
)  # fmt: skip

BROKEN: dict[str, Program] = MISSING | DIFFERENT | RAISED | STOPPED | CAUGHT

RIGHT: dict[str, str] = {
    "a barrier after an error that all handle": "try: {}['x']\nexcept KeyError: dist.barrier()",
    "an error of one rank that is handled": "try:\n    if odd: raise ValueError\n"
    "except ValueError: pass\ndist.all_reduce(some)",
    "an error of one rank, told to all in its handler": "failed = torch.zeros(1)\n"
    "try:\n    if odd: raise ValueError\n    dist.all_reduce(failed)\n"
    "except ValueError: dist.all_reduce(failed)",
    "a finally with a barrier": "try: dist.all_reduce(some)\nfinally: dist.barrier()",
    "an exit stack": "with contextlib.ExitStack() as stack: stack.callback(dist.barrier)",
    "a slow rank": "if odd: time.sleep(0.8)\ndist.barrier()",
    "a slow rank in another place": "if odd: time.sleep(0.4); dist.barrier()\n"
    "else: dist.barrier()",
    "halves": "dist.all_reduce(some, group=halves[rank // 2])",
    "one half only": "if rank > 1: dist.all_reduce(some, group=halves[1])",
    "local synchronization": "if rank < 2: dist.new_group([0, 1], use_local_synchronization=True)",
    "a ring": "t = torch.ones(2)\n"
    "work = dist.isend(t, (rank + 1) % 4)\ndist.recv(torch.ones(2), (rank - 1) % 4)\nwork.wait()",
    "even and odd ranks": "t, peer = torch.ones(2), rank ^ 1\n"
    "dist.send(t, peer) if rank % 2 else dist.recv(t, peer)",
    "a batch of messages": "ops = [dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % 4),\n"
    "       dist.P2POp(dist.irecv, torch.ones(3), (rank - 1) % 4)]\n"
    "for work in dist.batch_isend_irecv(ops): work.wait()",
    "from anybody": "if odd:\n    for _ in range(3): dist.recv(torch.ones(1))\n"
    "else: dist.send(torch.ones(1), 2)",
    "tags in another order": "if rank == 0:\n    for tag in (1, 2): dist.send(torch.ones(1), 1, tag=tag)\n"
    "if rank == 1:\n    for tag in (1, 2): dist.recv(torch.ones(1), 0, tag=tag)",
    "works that are waited for in another order": "works = [dist.all_reduce(torch.ones(2), async_op=True)"
    " for _ in range(5)]\nfor work in reversed(works) if odd else works: work.wait()",
    "a work that nobody waits for": "dist.all_reduce(torch.ones(2), async_op=True)\ndist.barrier()",
    "splits of each rank": "send = [rank + 1] * 4\nget = [1, 2, 3, 4]\n"
    "dist.all_to_all_single(torch.ones(10), torch.ones(4 * rank + 4), get, send)",
    "objects of other sizes": "found = [None] * 4\ndist.all_gather_object(found, 'x' * 10 ** rank)",
    "objects to one": "dist.gather_object(rank, [None] * 4 if rank == 0 else None)",
    "a broadcast of objects": "dist.broadcast_object_list([rank, 'x' * 1000 * rank], 3)",
    "a reduction to one": "dist.reduce(torch.ones(3), 1)",
    "DDP": "net = model()\nfor _ in range(3): net(x).sum().backward()",
    "DDP without a step of its own": "net = model()\nwith net.no_sync(): net(x).sum().backward()\n"
    "net(x).sum().backward()",
    "DDP with parameters that one rank does not use": "net = DDP(nn.ModuleList([nn.Linear(4, 4)] * 1"
    " + [nn.Linear(4, 4)]), find_unused_parameters=True)\n"
    "net.module.forward = lambda t: net.module[0](t) + (0 if odd else net.module[1](t))\n"
    "net(x).sum().backward()",
    "uneven inputs that are joined": "net = model()\n"
    "with net.join():\n    for _ in range(2 + odd): net(x).sum().backward()",
    "sharded": "from torch.distributed.fsdp import fully_shard\nnet = nn.Linear(4, 4)\n"
    "fully_shard(net)\nnet(x).sum().backward()",
    "a DTensor": "from torch.distributed import tensor as dt\n"
    "mesh = dist.init_device_mesh('cpu', (4,))\n"
    "dt.distribute_tensor(torch.ones(8), mesh, [dt.Shard(0)]).full_tensor()",
    "a mesh of two dimensions": "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))\n"
    "dist.all_reduce(torch.ones(1), group=mesh.get_group('b'))",
    "functional": "functional.all_reduce(some, 'sum', other).sum().item()",
    "the rest of a round by one rank": "if odd: print(sum(range(10 ** 6)))\ndist.barrier()",
    "a thread": "def reduce(t=torch.ones(3)): dist.all_reduce(t)\n"
    "thread = threading.Thread(target=reduce)\nthread.start()\nthread.join()",
    "two threads on two groups": "def work(group): dist.all_reduce(torch.ones(2), group=group)\n"
    "with ThreadPoolExecutor(2) as pool: list(pool.map(work, [other, halves[rank // 2]]))",
    "a key that one sets later": "store = dist.distributed_c10d._get_default_store()\n"
    "if odd: time.sleep(0.4); store.set('k', 'v')\nelse: store.get('k')\ndist.barrier()",
    "a group that is destroyed": "group = dist.new_group([0, 1, 2, 3])\n"
    "dist.barrier(group=group)\ndist.destroy_process_group(group)",
    "a child process": "import multiprocessing\n"
    "child = multiprocessing.get_context('fork').Process(target=print, args=('x',))\n"
    "child.start()\nchild.join()\ndist.barrier()",
    "workers of a DataLoader": "for batch in data.DataLoader(range(4), num_workers=1):\n"
    "    dist.all_reduce(torch.ones(1))",
    "a loop that ends by a vote": "for step in range(9):\n"
    "    stop = torch.tensor(float(odd and step == 3))\n    dist.all_reduce(stop)\n"
    "    if stop: break",
    "retries within a handler": "try: raise OSError\nexcept OSError:\n"
    "    for _ in range(3): dist.all_reduce(some)",
    "a generator with a collective": "def steps():\n    for _ in range(2):\n        dist.barrier()\n"
    "        yield\nfor _ in steps(): dist.all_reduce(some)",
    "an iterator that ends": "batches = iter(range(2))\n"
    "while True:\n    try: next(batches)\n    except StopIteration: dist.barrier(); break\n"
    "    dist.all_reduce(some)",
    "an assertion that holds": "assert torch.isfinite(some).all()\ndist.monitored_barrier()",
    "an empty tensor": "dist.all_reduce(torch.ones(0))",
    "a refusal that all catch": "try: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)\n"
    "except RuntimeError: pass",
    "an error in a thread that nobody needs": "def fail():\n    try: raise ValueError\n"
    "    except ValueError: pass\nthread = threading.Thread(target=fail)\nthread.start()\n"
    "thread.join()\ndist.barrier()",
}  # fmt: skip


def every_third(programs: Mapping[str, V]) -> dict[str, V]:
    """A part of them that is of all kinds."""
    return dict(islice(programs.items(), 0, None, 3))


def begin() -> Session:
    """A session that the programs can run in."""
    return Session(RANKS, threads=1, output=Recorder(), hang_grace=0.3)


def set_up(session: Session) -> None:
    """What the programs use; also after ranks have been replaced."""
    session.execute(SETUP, timeout=LIMIT_S)


def first_line(session: Session, program: Program) -> str:
    """What is shown first of a broken program; empty if nothing is."""
    output = session.output()
    assert isinstance(output, Recorder)
    output.clear()
    output.remarks.clear()
    try:
        with _stop(session) if program.is_stopped else contextmanager(_nothing)():
            session.execute(program.code, label=LABEL, timeout=LIMIT_S)
    except (DistsessionError, KeyboardInterrupt) as error:
        shown: list[str] = error._render_traceback_()  # type: ignore[union-attr]
        return "" if program.is_caught else "\n".join(shown).splitlines()[0]
    written = [text for rank in session.ranks if (text := output.text(rank, "stderr"))]
    return next((text for text in (*output.remarks, *written) if program.is_caught), "")


def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _stop(session: Session) -> Iterator[None]:
    with Press(session, session.interrupt):
        yield


def problem_of(session: Session, program: Program) -> str:
    """What its first line lacks; empty if nothing."""
    line = first_line(session, program)
    lines = program.line if isinstance(program.line, tuple) else (program.line,)
    places = "|".join(map(str, lines))
    wanted = {
        "the rank": rf"{program.who}(?!\d)",
        "what it did": program.what,
        "the line": rf"In\[7\],? line ({places})(?!\d)|\band line ({places})(?!\d)",
    }
    lacks = [name for name, text in wanted.items() if not re.search(text, line)]
    return f"no {' and no '.join(lacks)} in: {line}" if lacks else after(session)


def alarm_of(session: Session, code: str) -> str:
    """What is shown of a right program, of which nothing should be."""
    output = session.output()
    assert isinstance(output, Recorder)
    output.remarks.clear()
    try:
        session.execute(code, label=LABEL, timeout=LIMIT_S)
    except (DistsessionError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    told = [text for text in output.remarks if text.startswith("Collective")]
    return told[0] if told else after(session)


def after(session: Session) -> str:
    """Whether the session is as it was; if not, what is wrong."""
    session.execute("probe = torch.ones(2)\ndist.all_reduce(probe)", timeout=LIMIT_S)
    found = session.evaluate("(kept, probe.tolist())")
    right = {rank: (40 + rank, [float(RANKS)] * 2) for rank in session.ranks}
    return "" if dict(found) == right else f"the next cell found {dict(found)}"


def score(
    session: Session, programs: Mapping[str, V], problem: Callable[[Session, V], str]
) -> list[str]:
    """Run programs; the names of those that have a problem, which is printed."""
    failed = []
    for name, program in programs.items():
        began = time.monotonic()
        if text := problem(session, program):
            failed.append(name)
            print(f"{name} ({time.monotonic() - began:.1f} s): {text}", flush=True)
            session.restart()
            set_up(session)
    print(f"{len(programs) - len(failed)} of {len(programs)} are as they should be", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of programs; by default all")
    names = parser.parse_args().names
    with begin() as session:
        set_up(session)
        broken = {name: p for name, p in BROKEN.items() if not names or name in names}
        right = {name: p for name, p in RIGHT.items() if not names or name in names}
        failed = score(session, broken, problem_of) + score(session, right, alarm_of)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
