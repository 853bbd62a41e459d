"""Broken programs: the first lines of what a user sees say who, in what, and where.

Each program is a short cell. What is asserted is the text of its error as IPython shows it: its
first three lines name the rank at fault, the operation and the line; nothing of gloo's own is
anywhere in it; and the next cell works.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from distsession import Session
from distsession.errors import DistsessionError, RunTimeoutError
from tests.backends import LEAVES_MESSAGE, Backend, only
from tests.integration.broken_program import Program
from tests.integration.broken_programs import BROKEN
from tests.integration.first_lines import alarm_of, begin, every_third, problem_of, set_up
from tests.integration.right_programs import RIGHT

RAW = ("/gloo/", "onnection closed by peer", "losed by", "Connection reset", "ProcessGroupGloo")
LABEL = "In[7]"

SETUP = """
import os, signal, sys, threading, time
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
number = 40 + rank
odd = rank == 2
some = torch.ones(4)
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
others = dist.new_group([0, 1, 2, 3])
dist.barrier()
"""


@dataclass(frozen=True)
class Broken:
    """A program that cannot work.

    Attributes:
        code: Of the cell.
        who: Regular expression for how the first lines name the culprit.
        what: The operation, or the error that a rank raised by itself.
        line: At which line, or one of which lines.
        also: What else the first lines say, such as what differs.
    """

    code: str
    who: str = "rank 2"
    what: str = "all_reduce"
    line: int | tuple[int, ...] = 1
    also: tuple[str, ...] = field(default=())


def check_lines(shown: list[str], broken: Broken) -> None:
    text = "\n".join(shown)
    first = "\n".join(shown[:3])
    assert re.search(rf"(?<!\d){broken.who}(?!\d)", first), text
    assert broken.what in first, text
    lines = broken.line if isinstance(broken.line, tuple) else (broken.line,)
    for line in lines:
        assert re.search(rf"In\[7\],? line {line}(?!\d)|\band line {line}(?!\d)", first), text
    for also in broken.also:
        assert also in first, text
    for raw in RAW:
        assert raw not in text
    assert ".." not in first.replace("...", ""), text


def fail(session: Session, code: str) -> list[str]:
    """What IPython shows of the cell's error."""
    with pytest.raises((DistsessionError, KeyboardInterrupt)) as caught:
        session.execute(code, label=LABEL, timeout=60)
    assert not isinstance(caught.value, RunTimeoutError), str(caught.value)
    shown: list[str] = caught.value._render_traceback_()  # type: ignore[attr-defined]
    return "\n".join(shown).splitlines()


def check_works(session: Session) -> None:
    session.execute("probe = torch.ones(2)\ndist.all_reduce(probe)", timeout=60)
    right = [float(session.world_size)] * 2
    assert dict(session.evaluate("probe.tolist()")) == dict.fromkeys(session.ranks, right)
    assert dict(session.evaluate("number")) == {r: 40 + r for r in session.ranks}


@pytest.fixture(scope="module")
def session(backend: Backend) -> Iterator[Session]:
    with backend.session(4, threads=1) as session:
        session.execute(SETUP)
        yield session


MISMATCHED = {
    "dtype": Broken(
        "dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))",
        also=("int32 [4]", "ranks 0-1,3 with float32 [4]"),
    ),
    "shape": Broken(
        "dist.all_reduce(torch.ones(4 if odd else 2))",
        also=("rank 2 called all_reduce with float32 [4], ranks 0-1,3 with float32 [2], at",),
    ),
    "reduction": Broken(
        "dist.all_reduce(some, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)",
        also=("rank 2 called all_reduce with max, ranks 0-1,3 with sum, at In[7] line 1",),
    ),
    "root": Broken(
        "dist.broadcast(some, src=2 if odd else 0)",
        what="broadcast",
        also=("with root 2, ranks 0-1,3 with root 0",),
    ),
    "another operation": Broken(
        "if odd:\n    dist.broadcast(some, src=0)\nelse:\n    dist.all_reduce(some)",
        what="broadcast",
        line=(2, 4),
        also=("rank 2 called broadcast", "ranks 0-1,3 called all_reduce"),
    ),
    "an extra call": Broken(
        "if odd: dist.barrier()\ndist.all_reduce(some)",
        what="barrier",
        line=(1, 2),
    ),
    "another order": Broken(
        "calls = [lambda: dist.barrier(), lambda: dist.all_reduce(some)]\n"
        "for call in reversed(calls) if odd else calls: call()",
    ),
    "another group": Broken(
        "dist.all_reduce(some, group=others if odd else None); FINISH",
        also=("(ranks 0-3)",),
    ),
    "a size in a reduce_scatter": Broken(
        "n = 3 if odd else 2\ndist.reduce_scatter_tensor(torch.ones(n), torch.ones(4 * n))",
        what="reduce_scatter_tensor",
        line=2,
        also=("float32 [3]", "float32 [2]"),
    ),
    "shapes in an all_gather": Broken(
        "t = torch.ones(3 if odd else 2)\ndist.all_gather([torch.ones_like(t)] * 4, t)",
        what="all_gather",
        line=2,
        also=("float32 [3]", "float32 [2]"),
    ),
    "sizes in an all_to_all": Broken(
        "receive = [2 if odd else 1] * 4\n"
        "dist.all_to_all_single(torch.zeros(sum(receive)), torch.ones(4), receive, [1] * 4)",
        what="all_to_all_single",
        line=2,
        also=("rank 2 called all_to_all_single to receive 2 from rank 0, which sends 1",),
    ),
    "root of a gather": Broken(
        "root = 1 if odd else 0\n"
        "dist.gather(some, [torch.ones(4)] * 4 if rank == root else None, dst=root)",
        what="gather",
        line=2,
        also=("root 1", "root 0"),
    ),
    "root of a scatter": Broken(
        "root = 2 if odd else 0\n"
        "dist.scatter(torch.ones(4), [some] * 4 if rank == root else None, src=root)",
        what="scatter",
        line=2,
        also=("root 2", "root 0"),
    ),
    "asynchronously": Broken(
        "dist.all_reduce(torch.ones(4 if odd else 2), async_op=True).wait()",
        also=("rank 2 called all_reduce with float32 [4], ranks 0-1,3 with float32 [2], at",),
    ),
    "asynchronously, another operation": Broken(
        "work = dist.broadcast(some, 0, async_op=True) if odd else "
        "dist.all_reduce(some, async_op=True)\nwork.wait()",
        also=("rank 2 called broadcast", "called all_reduce"),
    ),
    "functional": Broken(
        "functional.all_reduce(torch.ones(4 if odd else 2), 'sum', dist.group.WORLD).tolist()",
        also=("float32 [4]", "float32 [2]"),
    ),
    "a message that is too long": Broken(
        "if rank == 2: dist.send(torch.ones(8), 3)\nif rank == 3: dist.recv(torch.ones(4), 2)",
        what="send to rank 3",
        line=(1, 2),
        also=("rank 3 called recv from rank 2", "8 elements", "4 elements"),
    ),
    "a message of another dtype": Broken(
        "if rank == 2: dist.isend(torch.ones(4), 3).wait()\n"
        "if rank == 3: dist.irecv(torch.ones(4, dtype=torch.int64), 2).wait()",
        what="send to rank 3",
        line=(1, 2),
        also=("float32", "int64"),
    ),
    "buckets of a model": Broken(
        "model = DistributedDataParallel(torch.nn.Linear(4, 5 if odd else 4), init_sync=False)\n"
        "model(torch.ones(1, 4)).sum().backward()",
        line=2,
        also=("float32 [25]", "float32 [20]"),
    ),
    "a new group with other members": Broken(
        "dist.new_group([0, 2] if odd else [0, 1, 2])",
        what="new_group",
    ),
    "a new group by its members only": Broken(
        "if rank in (1, 2):\n    dist.new_group([1, 2])\ndist.barrier()",
        who="ranks (1-2|0,3)",
        what="new_group",
        line=2,
    ),
}

CROSSED = Broken(
    "for group in (None, others): dist.all_reduce(some, group=group); FINISH\n"
    "if odd: dist.all_reduce(some, group=others)\n"
    "dist.all_reduce(some)\n"
    "if not odd: dist.all_reduce(some, group=others)\n"
    "print(some.sum().item())",
    line=(2, 3),
    also=("(ranks 0-3)", "each waits for the other", "in different orders"),
)

HUNG = {
    "a call that one rank skips": Broken("if not odd:\n    dist.all_reduce(some); FINISH", line=2),
    "one rank calls alone": Broken(
        "if rank == 2:\n    dist.barrier()", what="barrier", line=2, also=("rank 2 waits.",)
    ),
    "another number of iterations": Broken(
        "for step in range(3 + (not odd)):\n    dist.all_reduce(some); FINISH", line=2
    ),
    "a send that nobody receives": Broken(
        "if rank == 2: dist.send(torch.ones(10_000_000), 3); FINISH", what="send", also=("rank 3",)
    ),
    "a receive without a source": Broken(
        "if rank == 2: dist.recv(torch.ones(4))",
        what="recv",
        also=(
            "ranks 0-1,3 sent nothing for recv",
            "they finished their part",
        ),
    ),
    "a receive from the wrong source": Broken(
        "if rank == 0: dist.send(some, 2)\nif rank == 2: dist.recv(torch.ones(4), 1); FINISH",
        what="recv",
        line=2,
        also=("rank 1 sent nothing for recv",),
    ),
    "an irecv": Broken(
        "if rank == 2:\n    work = dist.irecv(torch.ones(4), 3)\n    work.wait(); FINISH",
        what="recv",
        line=2,
        also=("rank 3 sent nothing for recv",),
    ),
    "an async collective that one does not issue": Broken(
        "if not odd:\n    dist.all_reduce(some, async_op=True).wait(); FINISH", line=2
    ),
    "a batch of messages in which one is missing": Broken(
        "def op(kind, peer): return dist.P2POp(kind, torch.ones(4), peer)\n"
        "ops = [] if odd else [op(dist.isend, (rank + 1) % 4)]\n"
        "ops.append(op(dist.irecv, (rank - 1) % 4))\n"
        "for work in dist.batch_isend_irecv(ops): work.wait(); FINISH",
        what="recv",
        line=4,
    ),
    "two groups in different orders": CROSSED,
    "objects in an all_gather": Broken(
        "if not odd:\n    dist.all_gather_object([None] * 4, rank)", what="all_gather", line=2
    ),
    "objects in a broadcast": Broken(
        "if not odd:\n    dist.broadcast_object_list([rank], src=0)", what="broadcast", line=2
    ),
    "fewer batches for one rank": Broken(
        "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for batch in range(2 if odd else 3):\n"
        "    model(torch.ones(1, 4)).sum().backward(); FINISH",
        line=3,
    ),
    "a redistribution of a DTensor": Broken(
        "from torch.distributed import tensor as dt\n"
        "mesh = dist.init_device_mesh(device.type, (4,))\n"
        "whole = dt.distribute_tensor(torch.ones(8, 2), mesh, [dt.Shard(0)])\n"
        "if not odd:\n"
        "    whole.redistribute(mesh, [dt.Replicate()]).to_local().tolist()",
        what="all_gather",
        line=5,
    ),
    "a forward of FSDP2": Broken(
        "from torch.distributed.fsdp import fully_shard\n"
        "model = torch.nn.Linear(8, 8)\n"
        "fully_shard(model)\n"
        "if not odd:\n"
        "    model(torch.ones(1, 8)).tolist()",
        what="all_gather",
        line=5,
    ),
    "a key of the store": Broken(
        "store = dist.distributed_c10d._get_default_store()\n"
        "if rank == 2:\n    store.get('the key')",
        what="the key",
        line=3,
        also=("ranks 0-1,3",),
    ),
    "keys of the store, with a limit": Broken(
        "from datetime import timedelta\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "if rank == 2:\n    store.wait(['the key'], timedelta(seconds=2))",
        what="the key",
        line=4,
    ),
    "a thread": Broken(
        "if odd:\n"
        "    thread = threading.Thread(target=lambda: dist.all_reduce(some))\n"
        "    thread.start()\n"
        "    thread.join(); FINISH",
        line=2,
    ),
}

RAISED = {
    "an exception before a collective": Broken(
        "if odd: raise ValueError('no such file.')\ndist.all_reduce(some); FINISH",
        what="ValueError",
    ),
    "an exception in a loop": Broken(
        "for step in range(9):\n"
        "    if odd and step == 5: {}['gone']\n"
        "    dist.all_reduce(some); FINISH",
        what="KeyError",
        line=2,
    ),
    "an exception in a forward": Broken(
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if odd: raise ValueError('bad batch')\n"
        "        return super().forward(x)\n"
        "model = DistributedDataParallel(Net(4, 4))\n"
        "model(torch.ones(1, 4)).sum().backward(); FINISH",
        what="ValueError",
        line=6,
    ),
    "an exception in a backward": Broken(
        "def check(grad):\n"
        "    if odd: raise ValueError('not finite')\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "out = model(torch.ones(1, 4))\n"
        "out.register_hook(check)\n"
        "out.sum().backward(); FINISH",
        what="ValueError",
        line=6,
    ),
    "an exception beside functional collectives": Broken(
        "if odd: raise ValueError('no')\n"
        "functional.all_reduce(some, 'sum', dist.group.WORLD).tolist()",
        what="ValueError",
    ),
    "an exit": Broken("if odd: sys.exit(3)\ndist.all_reduce(some); FINISH", what="SystemExit"),
    "an exit of torch's own": Broken(
        "if odd: dist.recv(torch.ones(4), src=9)\ndist.all_reduce(some); FINISH", what="ValueError"
    ),
    "a worker of a DataLoader": Broken(
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, n):\n"
        "        if odd and n == 2: raise ValueError('bad sample')\n"
        "        return n\n"
        "for batch in torch.utils.data.DataLoader(Data(), num_workers=1):\n"
        "    dist.all_reduce(some); FINISH",
        what="ValueError",
        line=6,
    ),
    "one that others wrap": Broken(
        "try:\n"
        "    if odd: raise ValueError('no')\n"
        "    dist.all_reduce(some); FINISH\n"
        "except RuntimeError as error:\n"
        "    raise RuntimeError('step failed') from error",
        what="ValueError",
        line=2,
    ),
    "a monitored barrier": Broken(
        "from datetime import timedelta\n"
        "if odd: time.sleep(4)\n"
        "dist.monitored_barrier(timeout=timedelta(seconds=2))",
        what="monitored_barrier",
        line=3,
    ),
    "an error in a thread": Broken(
        # Made here, for a thread has torch's own default device.
        "def reduce(tensor=torch.ones(4 if odd else 2)): dist.all_reduce(tensor)\n"
        "thread = threading.Thread(target=reduce)\n"
        "thread.start()\n"
        "thread.join()",
    ),
}

PROGRAMS = MISMATCHED | HUNG | RAISED
GLOO_ONLY = {
    "a receive without a source": "NCCL receives from nobody in particular",
    "a monitored barrier": "torch has it for gloo alone",
    "objects in a broadcast": "it is over for those that have come; what is next tells",
    "a worker of a DataLoader": "a worker, which is forked, cannot make tensors on a device",
}
LEAVE_MESSAGES = {
    "a message of another dtype",
    "a message that is too long",
    "a send that nobody receives",
    "a receive from the wrong source",
    "an irecv",
    "a late sender",
}


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Of the test of that program."""
    found = [LEAVES_MESSAGE] if name in LEAVE_MESSAGES else []
    return [*found, only("gloo", GLOO_ONLY[name])] if name in GLOO_ONLY else found


@pytest.mark.parametrize(
    "broken",
    [pytest.param(program, marks=marks(name)) for name, program in PROGRAMS.items()],
    ids=PROGRAMS,
)
def test_the_first_lines_say_who_in_what_and_where(
    session: Session, backend: Backend, broken: Broken
) -> None:
    if backend.is_device:  # only those are compared that have come by then
        told = tuple(text for text in broken.also if "ranks 0-1,3 with" not in text)
        broken = replace(broken, also=told)
    try:
        check_lines(fail(session, backend.program(broken.code)), broken)
    finally:
        if session.status():
            check_works(session)


def test_no_rank_goes_on_with_what_came_of_operations_in_different_orders(
    session: Session, backend: Backend
) -> None:
    session.execute("passed = False")
    # The devices of the others go on to what rank 2 waits for before it is freed itself.
    session[2].execute(
        "from distsession.engine import control\n"
        "grace, control.ABORT_GRACE_S = control.ABORT_GRACE_S, 0.5"
    )
    check_lines(fail(session, f"{backend.program(CROSSED.code)}\npassed = True"), CROSSED)
    assert dict(session.evaluate("passed")) == dict.fromkeys(session.ranks, False)
    session[2].execute("control.ABORT_GRACE_S = grace")
    check_works(session)


DEATHS = {
    "an exit code": Broken(
        "if odd: os._exit(3)\ndist.all_reduce(some); FINISH", what="exit code 3"
    ),
    "a signal": Broken(
        "if odd:\n    os.kill(os.getpid(), 9)\ntime.sleep(rank)\ndist.all_reduce(some); FINISH",
        what="SIGKILL",
        line=2,
    ),
}


@pytest.mark.parametrize("broken", DEATHS.values(), ids=DEATHS)
def test_the_first_lines_of_a_death_say_who_and_how(
    session: Session, backend: Backend, broken: Broken
) -> None:
    shown = fail(session, backend.program(broken.code))
    session.restart()
    session.execute(SETUP)
    first = "\n".join(shown[:3])
    assert broken.who in first
    assert broken.what in first
    assert not [raw for raw in RAW if raw in "\n".join(shown)]


LIMITED = {
    "a late rank": Broken(
        "if odd: time.sleep(5)\ndist.all_reduce(torch.ones(4)); FINISH",
        line=(1, 2),
        also=("within 2 s", "rank 2 was at In[7] line 1"),
    ),
    "a late rank, where the outcome is needed": Broken(
        "total = torch.ones(4)\n"
        "if odd: time.sleep(5)\n"
        "dist.all_reduce(total)\n"
        "print(total.sum().item())",
        line=(2, 3),
        also=("within 2 s", "rank 2 was at In[7] line 2"),
    ),
    "a late rank, in a barrier": Broken(
        "if odd: time.sleep(5)\ndist.barrier()",
        what="barrier",
        line=(1, 2),
        also=("within 2 s", "rank 2 was at In[7] line 1"),
    ),
    "a late rank of a group with its own limit": Broken(
        "from datetime import timedelta\n"
        "group = dist.new_group(timeout=timedelta(seconds=1))\n"
        "dist.all_reduce(torch.ones(4), group=group); FINISH\n"
        "if odd: time.sleep(5)\n"
        "dist.all_reduce(torch.ones(4), group=group); FINISH",
        line=(4, 5),
        also=("within 1 s", "rank 2 was at In[7] line 4"),
    ),
    "a late rank of a group that is given another limit": Broken(
        "from datetime import timedelta\n"
        "group = dist.new_group()\n"
        "dist.all_reduce(torch.ones(4), group=group); FINISH\n"
        "dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)\n"
        "if odd: time.sleep(5)\n"
        "dist.all_reduce(torch.ones(4), group=group); FINISH",
        line=(5, 6),
        also=("within 1 s",),
    ),
    "a late rank, asynchronously": Broken(
        "if odd: time.sleep(5)\ndist.all_reduce(torch.ones(4), async_op=True).wait(); FINISH",
        line=(1, 2),
        also=("rank 2 was at In[7] line 1",),
    ),
    "a late rank in a backward": Broken(
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "out = model(torch.ones(1, 4)).sum()\n"
        "if odd: time.sleep(5)\n"
        "out.backward(); FINISH",
        line=(3, 4),
    ),
    "a late sender": Broken(
        "if odd: time.sleep(5); dist.send(torch.ones(4), 0)\n"
        "if rank == 0: dist.recv(torch.ones(4), 2); FINISH",
        what="recv",
        line=(1, 2),
        also=("rank 2 did not send to rank 0 within 2 s",),
    ),
}


@pytest.fixture(scope="module")
def limited(backend: Backend) -> Iterator[Session]:
    with backend.session(4, threads=1, timeout=2) as session:
        session.execute("import time\nodd = rank == 2\nnumber = 40 + rank")
        check_works(session)  # or all meet for a first operation, on whatever backend
        yield session


@pytest.mark.parametrize(
    "broken",
    [pytest.param(program, marks=marks(name)) for name, program in LIMITED.items()],
    ids=LIMITED,
)
def test_a_time_limit_says_who_is_late_and_where_it_is(
    limited: Session, backend: Backend, broken: Broken
) -> None:
    check_lines(fail(limited, backend.program(broken.code)), broken)
    check_works(limited)


@only("device", "gloo ends an operation at its limit, whether somebody waits for it or not")
def test_a_rank_that_does_not_wait_yet_is_not_cut_off_at_a_limit(
    limited: Session, backend: Backend
) -> None:
    limited.execute(
        "store = dist.distributed_c10d._get_default_store()\n"
        "total = torch.ones(2)\n"
        "if odd: time.sleep(3)\n"
        "work = dist.all_reduce(total, async_op=True)\n"
        "if odd: store.set('came', '')\n"
        "while not store.check(['came']): time.sleep(0.05)\n"
        "work.wait()\n"
        "total = total.tolist()",
        timeout=60,
    )
    assert all(total == [4.0, 4.0] for total in limited.evaluate("total").values())


def test_of_two_ranks_both_sides_are_told(start, backend: Backend) -> None:
    session = start(2, threads=1, **backend.options(2))
    session.execute("number = 40 + rank")
    shown = fail(session, "dist.all_reduce(torch.ones(4 + rank))")
    check_lines(shown, Broken("", "rank 0", also=("float32 [4], rank 1 with float32 [5]",)))
    check_works(session)


def test_a_function_of_the_notebook_has_its_line(session: Session) -> None:
    source = "def step(rank, dist, some):\n    if rank != 2:\n        dist.barrier()\n"
    session.execute("import linecache\n" + f"source = {source!r}\n"
                    "name = '/tmp/ipykernel_1/1.py'\n"
                    "linecache.cache[name] = (len(source), None, source.splitlines(True), name)\n"
                    "exec(compile(source, name, 'exec'))")  # fmt: skip
    shown = fail(session, "step(rank, dist, some)")
    first = "\n".join(shown[:3])
    assert "barrier" in first
    assert "notebook cell line 3" in first
    assert "rank 2 did not come to" in first
    check_works(session)


# --- after public bug reports ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported() -> Iterator[Session]:
    with begin() as session:
        set_up(session)
        yield session


MENDED = (  # those that have found a fault here are always run
    "an alarm that raises in those who wait",
    "an alarm in those who wait, who catch it and go on",
    "a tensor that does not fit what was saved",
    "a mismatch of a task at which nobody looks",
)
SOME_BROKEN = every_third(BROKEN) | {name: BROKEN[name] for name in MENDED}
SOME_RIGHT = every_third(RIGHT)


@pytest.mark.parametrize("program", SOME_BROKEN.values(), ids=SOME_BROKEN)
def test_the_first_line_alone_says_who_what_and_where(reported: Session, program: Program) -> None:
    assert not problem_of(reported, program)


@pytest.mark.parametrize("code", SOME_RIGHT.values(), ids=SOME_RIGHT)
def test_a_right_program_gives_no_alarm(reported: Session, code: str) -> None:
    assert not alarm_of(reported, code)
