"""Whoever failed by itself is told first; those that only suffered are one line at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from distsession import EngineDiedError, RunError, Session, errors
from distsession.scripts import run
from tests.backends import LEAVES_MESSAGE, Backend, only
from tests.integration.conftest import Recorder
from tests.until import Press


@pytest.fixture(scope="module")
def session(backend: Backend) -> Iterator[Session]:
    with backend.session(4, threads=1, output=Recorder(), hang_grace=0.5) as session:
        session.execute("import os, signal, time\nnumber = rank")
        yield session
        assert dict(session.evaluate("number")) == {r: r for r in range(4)}


def fails(session: Session, code: str) -> RunError:
    if session.world_size == 4 and session.infos[0].backend != "gloo":
        session.execute("dist.barrier()")  # or the members meet before the device is given anything
    with pytest.raises(RunError) as caught:
        session.execute(code, label="In[7]", timeout=60)
    return caught.value


def check_one_line(error: RunError, cause: int, name: str, suffered: set[int]) -> None:
    """The cause leads everywhere, and the others have one line together."""
    assert error.first_rank == cause
    assert type(error.first).__name__ == name
    assert error.as_group().exceptions[0] is error.first
    assert next(iter(error.by_rank)) == cause
    assert set(list(error.by_rank)[-len(suffered) :]) == suffered
    assert str(error).startswith(f"{name} on rank {cause} at In[7] line ")
    shown = error._render_traceback_()
    assert shown[0].startswith(f"{name} on rank {cause} ")
    assert "at In[7] line " in shown[0]
    about = [line for line in shown if " waited in " in line or " later" in line]
    assert len(about) == 1
    after = shown[shown.index(about[0]) + 1 :]
    connected = "The process group is connected anew, and all variables are kept."
    assert not after or after[0].startswith(connected)
    assert len(after) <= 1
    assert "CollectiveError" not in "\n".join(shown)
    assert str(error).count("CollectiveError") == 0


RAISE_LATE = {
    "they come a second later": "if rank < 2: time.sleep(1)\ndist.barrier()",
    "one after the other": "time.sleep(0.5 * rank)\ndist.barrier()",
    "all come later": "time.sleep(0.7)\ndist.barrier()",
    "each its own operation": pytest.param(
        "time.sleep(0.3 * rank)\ndist.all_reduce(torch.ones(rank + 1))",
        marks=only("gloo", "who waits for a device is freed later, and then they differ as well"),
    ),
    "they raise on top of it": "time.sleep(0.4 * rank)\n"
    "try:\n    dist.barrier()\n"
    "except RuntimeError as error:\n    raise RuntimeError('step failed') from error",
    "they hide it": "time.sleep(0.4 * rank)\n"
    "try:\n    dist.barrier()\n"
    "except RuntimeError:\n    raise OSError('no checkpoint') from None",
    "they fail in its handling": "time.sleep(0.4 * rank)\n"
    "try:\n    dist.barrier()\n"
    "except RuntimeError:\n    {}['gone']",
    "within a group of errors": "time.sleep(0.4 * rank)\n"
    "try:\n    dist.barrier()\n"
    "except RuntimeError as error:\n    raise ExceptionGroup('many', [error])",
    "while they handle something else": "time.sleep(0.4 * rank)\n"
    "try:\n    open('/no/cache')\n"
    "except OSError:\n    dist.barrier()",
    "asynchronously": "time.sleep(0.4 * rank)\n"
    "dist.all_reduce(torch.ones(4), async_op=True).wait(); FINISH",
    "functional": "time.sleep(0.4 * rank)\n"
    "import torch.distributed._functional_collectives as f\n"
    "f.all_reduce(torch.ones(4), 'sum', dist.group.WORLD).tolist()",
    "messages": pytest.param(
        "time.sleep(0.4 * rank)\ndist.recv(torch.ones(4), src=3); FINISH", marks=LEAVES_MESSAGE
    ),
    "from anybody": pytest.param(
        "time.sleep(0.4 * rank)\ndist.recv(torch.ones(4))",
        marks=only("gloo", "NCCL receives from nobody in particular"),
    ),
    "objects": "time.sleep(0.4 * rank)\ndist.all_gather_object([None] * 4, rank)",
    "a new group": "time.sleep(0.4 * rank)\ndist.new_group([0, 1, 2, 3])",
}  # fmt: skip


@pytest.mark.parametrize("rest", RAISE_LATE.values(), ids=RAISE_LATE)
def test_ranks_that_come_late_do_not_lead(session: Session, backend: Backend, rest: str) -> None:
    rest = backend.program(rest)
    error = fails(session, f"if rank == 3: raise ValueError('boom')\n{rest}")
    check_one_line(error, 3, "ValueError", {0, 1, 2})


def test_ranks_that_come_late_in_a_backward_do_not_lead(session: Session, backend: Backend) -> None:
    error = fails(
        session,
        backend.program(
            "from torch.nn.parallel import DistributedDataParallel\n"
            "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n"
            "loss = model(torch.ones(1, 4)).sum()\n"
            "if rank == 3: raise ValueError('boom')\n"
            "time.sleep(0.5 * rank)\n"
            "loss.backward(); FINISH"
        ),
    )
    check_one_line(error, 3, "ValueError", {0, 1, 2})


def test_ranks_that_finish_are_no_part_of_it(session: Session) -> None:
    error = fails(
        session,
        "if rank == 3: raise ValueError('boom')\n"
        "if rank: time.sleep(0.5); dist.barrier()",
    )  # fmt: skip
    check_one_line(error, 3, "ValueError", {1, 2})
    assert error.results.ranks == (0,)


def test_of_several_causes_the_earliest_is_first(session: Session) -> None:
    error = fails(
        session,
        "if rank == 3: raise ValueError('first')\n"
        "if rank == 0: time.sleep(1.5); raise KeyError('second')\n"
        "dist.barrier()",
    )
    assert list(error.by_rank) == [3, 0, 1, 2]
    shown = "\n".join(error._render_traceback_())
    assert shown.index("ValueError on rank 3") < shown.index("KeyError on rank 0")
    assert shown.index("KeyError on rank 0") < shown.index("Ranks 1-2 waited in barrier")


def test_an_error_before_the_last_collective_is_a_cause_of_its_own(session: Session) -> None:
    error = fails(
        session,
        "try:\n    if rank == 3: raise ValueError('boom')\n"
        "finally:\n    dist.barrier(dist.new_group([3])) if rank == 3 else dist.barrier()",
    )
    assert any("boom" in line for line in error._render_traceback_())


FIRST = "if odd: raise ValueError('boom')"
FAILS = f"{FIRST}\n    dist.all_reduce(some); FINISH"
HANDLING = {
    "finally": f"try:\n    {FAILS}\nfinally: dist.barrier()",
    "except": f"try:\n    {FAILS}\nexcept ValueError: dist.barrier()",
    "except, the others have finished": f"try:\n    {FIRST}\nexcept ValueError: dist.barrier()",
    "an exit": "class Timer:\n"
    "    def __enter__(self): pass\n"
    "    def __exit__(self, *error): dist.barrier()\n"
    f"with Timer():\n    {FAILS}",
    "an asynchronous exit": "class Timer:\n"
    "    async def __aenter__(self): pass\n"
    "    async def __aexit__(self, *error): dist.barrier()\n"
    "async def step():\n"
    f"  async with Timer():\n    {FAILS}\n"
    "await step()",
    "an exit stack": "with contextlib.ExitStack() as stack:\n"
    f"    stack.callback(dist.barrier)\n    {FAILS}",
    "a generator": "@contextlib.contextmanager\n"
    "def phase():\n"
    "    try: yield\n"
    "    finally: dist.barrier()\n"
    f"with phase():\n    {FAILS}",
    "objects in the handler": f"try:\n    {FAILS}\n"
    "except Exception as error: dist.all_gather_object([None] * 4, repr(error))",
    "an operation of another group": f"try:\n    {FAILS}\n"
    "finally: dist.all_reduce(some, group=other); FINISH",
    "a raise on top of it": f"try:\n    try:\n     {FIRST}\n     dist.all_reduce(some); FINISH\n"
    "    finally: dist.barrier()\n"
    "except RuntimeError as error: raise OSError('wrapped') from error",
    "what a thread has raised": "with futures.ThreadPoolExecutor(1) as pool:\n"
    "    try:\n"
    "        if odd: pool.submit(fail).result()\n"
    "    finally: dist.all_reduce(torch.ones(4 + odd)); FINISH",
    "where it begins a backward again": f"try:\n    {FIRST}\n    model(x).sum().backward()\n"
    "except ValueError: model(x[:, :2] @ torch.ones(2, 4)).sum().backward(); dist.barrier()",
}


@pytest.fixture(scope="module")
def handling(session: Session) -> Session:
    session.execute(
        "import contextlib\n"
        "from concurrent import futures\n"
        "odd, some, x = rank == 3, torch.ones(4), torch.ones(1, 4)\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "other = dist.new_group([0, 1, 2, 3])\n"
        "def fail(): raise ValueError('boom')"
    )
    return session


@only("gloo", "who waits for a device may be freed when the handler is over")
@pytest.mark.parametrize("code", HANDLING.values(), ids=HANDLING)
def test_what_a_rank_was_handling_leads(handling: Session, backend: Backend, code: str) -> None:
    error = fails(handling, backend.program(code))
    assert error.first_rank == 3
    assert type(error.first) is ValueError
    assert re.match(r"ValueError on rank 3 at In\[7\] line \d+: boom\. ", str(error))
    shown = error._render_traceback_()
    assert re.match(r"ValueError on rank 3 \(.*\) at In\[7\] line \d+: boom$", shown[0])
    assert "barrier" in str(error) or "all_reduce" in str(error) or "all_gather" in str(error)
    handling.execute("dist.barrier()", timeout=60)


@only("gloo", "who waits for a device may be freed when the handler is over")
def test_a_stop_tells_what_a_rank_was_handling(handling: Session) -> None:
    fails = "if odd: raise ValueError('boom')"
    code = f"try:\n    {fails}\n    time.sleep(60)\nfinally:\n    dist.barrier()"
    with Press(handling, handling.interrupt), pytest.raises(KeyboardInterrupt) as caught:
        handling.execute(code, label="In[7]", timeout=60)
    told = str(caught.value)
    assert re.search(r"rank 3 waits in barrier .* for ranks 0-2, which run In\[7\] line 3", told)
    assert "in the handling of ValueError on rank 3 at In[7] line 2: boom." in told


EXPLAINS_NOTHING = {
    "what all handle": "try: raise OSError('no cache')\n"
    "except OSError: dist.all_reduce(torch.ones(4 + odd)); FINISH",
    "what most handle": "try: raise OSError('no cache')\n"
    "except OSError:\n"
    "    if not odd: dist.all_reduce(some); FINISH",
    "what was handled before": "try:\n    if odd: raise OSError('no cache')\n"
    "except OSError: pass\n"
    "dist.all_reduce(torch.ones(4 + odd)); FINISH",
    "what a library has caught": "try:\n    if odd: int('x')\n"
    "except ValueError: flag = True\n"
    "if not odd: dist.barrier()",
}


@pytest.mark.parametrize("code", EXPLAINS_NOTHING.values(), ids=EXPLAINS_NOTHING)
def test_what_explains_nothing_does_not_lead(
    handling: Session, backend: Backend, code: str
) -> None:
    with pytest.raises(errors.DistsessionError) as caught:
        handling.execute(backend.program(code), label="In[7]", timeout=60)
    first = caught.value._render_traceback_()[0]
    assert first.startswith(("CollectiveMismatchError: rank 3 ", "CollectiveHangError: rank 3 "))
    assert "at In[7] line " in first


CAUGHT = {
    "a mismatch": (
        "try: dist.all_reduce(torch.ones(4 + odd))\nexcept RuntimeError: pass",
        "rank 3",
    ),
    "a hang": (
        "try:\n    if not odd: dist.all_reduce(some)\nexcept Exception: pass",
        "rank 3 did not come to",
    ),
    "a mismatch while an object is deleted": (
        "class Handle:\n"
        "    def __del__(self): dist.all_reduce(torch.ones(4 + odd))\n"
        "handle = Handle()\ndel handle",
        "rank 3",
    ),
    "a hang while an object is deleted": (
        "class Handle:\n"
        "    def __del__(self): dist.all_reduce(some)\n"
        "if not odd:\n    handle = Handle()\n    del handle",
        "rank 3 did not come to",
    ),
}


@only("gloo", "what is given to a device raises where it is waited for")
@pytest.mark.parametrize(("code", "who"), CAUGHT.values(), ids=CAUGHT)
def test_what_code_catches_is_told_all_the_same(handling: Session, code: str, who: str) -> None:
    output = handling.output()
    assert isinstance(output, Recorder)
    output.remarks.clear()
    handling.execute(code, label="In[7]", timeout=60)
    (remark,) = [text for text in output.remarks if text.startswith("Collective")]
    assert who in remark
    assert re.search(r"all_reduce .*at In\[7\] line \d", remark)
    output.remarks.clear()
    handling.execute("dist.barrier()", timeout=60)
    assert not output.remarks


def test_a_failure_of_its_own_after_a_hang_is_told_as_well(session: Session) -> None:
    with pytest.raises(errors.CollectiveHangError, match="KeyError on rank 2 at In") as caught:
        session.execute(
            "if rank == 2: time.sleep(6); raise KeyError('later')\nif rank != 3: dist.barrier()",
            label="In[7]",
        )
    assert "rank 3 finished its part without it" in str(caught.value)


def test_a_death_leads_though_others_come_late(start, backend: Backend) -> None:
    session = start(4, threads=1, **backend.options(4))
    error = fails(
        session,
        "import os, time\n"
        "if rank == 3: os.kill(os.getpid(), 9)\n"
        "time.sleep(0.6 * rank)\n"
        "dist.barrier()",
    )
    assert error.first_rank == 3
    assert isinstance(error.first, EngineDiedError)
    shown = error._render_traceback_()
    assert "rank 3" in shown[0]
    assert "SIGKILL" in shown[0]
    assert len([line for line in shown if "CollectiveError" in line]) == 0
    assert re.match(r"Ranks? 0\S* waited in barrier #\d at In\[7\] line 4 and w", shown[-2])
    assert len([line for line in shown if "waited in" in line or "later" in line]) == 1


def test_a_part_of_the_ranks_is_told_whom_it_waited_for(session: Session) -> None:
    others = session[2:4].submit(_fail_later)
    with pytest.raises((RunError, errors.CollectiveHangError)) as caught:
        session[0:2].execute("time.sleep(0.3 * rank)\ndist.barrier()", label="In[7]", timeout=60)
    first = caught.value._render_traceback_()[0]
    assert "barrier #1 at In[7] line 2" in first
    assert "ranks 2-3 did not come to" in first
    with pytest.raises(RunError, match="ZeroDivisionError on ranks 2-3"):
        others.result()


def _fail_later() -> None:
    time.sleep(1)
    raise ZeroDivisionError("no")


def test_a_script_says_the_cause_first(tmp_path, capfd) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "if rank == 3:\n"
        "    raise ValueError('boom')\n"
        "time.sleep(0.7 * rank)\n"
        "dist.barrier()\n"
    )
    assert run.run(str(path), [], {"ranks": 4, "threads": 1}) == 1
    told = capfd.readouterr().err.splitlines()
    first = next(line for line in told if line.startswith("distsession run: "))
    assert "ValueError on rank 3" in first
    assert "at train.py line 6: boom" in first
    assert "CollectiveError" not in "\n".join(told)
    assert sum(" waited in " in line for line in told) == 1
