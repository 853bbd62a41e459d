"""What docs/hangs.md says and shows is so.

Its examples are run, and what they show is compared with the page. The sentences that no other
test shows have a test here; ``tests/unit/test_hangs_doc.py`` says which sentence has which test.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distsession import RunError, RunInterrupt, Session, SessionOptions, errors
from distsession.kernel import watchdog
from distsession.kernel.snapshot import Snapshots
from tests.sentences import DOCS, code_blocks

from .conftest import Recorder
from .kernel import Notebook
from .test_run import by_value

PAGE = (DOCS / "hangs.md").read_text()
EXAMPLE = code_blocks(PAGE, "python")[0].replace("%%distributed", "# %%distributed")

SETUP = """
import ctypes, os, signal, threading, time
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
x = torch.ones(4, 2)
number = [40 + rank]
"""
LOOK_AGAIN = 0.05
LONG = 20.0
"""Seconds that tell what comes by itself from what never comes."""


def begin(ranks: int, **options: Any) -> Session:
    session = Session(ranks, output=Recorder(), threads=1, **options)
    session.execute(SETUP)
    return session


@pytest.fixture(scope="module")
def _four() -> Iterator[Session]:
    with begin(4, hang_grace=0.5) as session:
        yield session


@pytest.fixture
def four(_four: Session) -> Session:
    """Four ranks, as in the examples."""
    return freed(_four)


@pytest.fixture(scope="module")
def _two() -> Iterator[Session]:
    with begin(2, hang_grace=0.2) as session:
        yield session


@pytest.fixture
def two(_two: Session) -> Session:
    return freed(_two)


def freed(session: Session) -> Session:
    """The session, also if a test before has failed and left something running."""
    if "idle" not in session.status():
        session.interrupt()
        session.restart()
        session.execute(SETUP)
    return session


@contextlib.contextmanager
def kept(session: Session) -> Iterator[None]:
    """What happens within takes no process and no variable, and the next collective is right."""
    pids = [info.pid for info in session.infos]
    before = session.evaluate("(number, id(number))")
    yield
    session.execute("probe = torch.ones(2)\ndist.all_reduce(probe)")
    right = [float(session.world_size)] * 2
    assert dict(session.evaluate("probe.tolist()")) == dict.fromkeys(session.ranks, right)
    assert [info.pid for info in session.infos] == pids
    assert session.evaluate("(number, id(number))") == before


def in_background(session: Session, code: str, label: str = "In[6]") -> Future[Any]:
    """Run a cell in a thread of its own, as a notebook that is busy with it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(session.execute, code, label=label)
    pool.shutdown(wait=False)
    return future


def until(ask: Callable[[], Any]) -> Any:
    """What this gives, once it gives something."""
    deadline = time.monotonic() + LONG
    while not (found := ask()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(LOOK_AGAIN)
    return found


def until_shown(session: Session, *texts: str, stacks: bool = False) -> str:
    """What ``diagnose`` shows, once all of this is in it."""
    shown = ""

    def look() -> bool:
        nonlocal shown
        shown = repr(session.diagnose(stacks=stacks))
        return all(text in shown for text in texts)

    until(look)
    return shown


def raised(session: Session, code: str, kind: type[BaseException], label: str = "In[7]") -> str:
    """What a cell raises by itself, as a notebook shows it."""
    with pytest.raises(kind) as caught:
        session.execute(code, label=label)
    return shown_of(caught.value)


def shown_of(error: BaseException) -> str:
    if isinstance(error, (errors.DistsessionError, RunInterrupt)):
        return "\n".join(error._render_traceback_())
    return f"{type(error).__name__}: {error}"


def stopped(session: Session, code: str, *texts: str, label: str = "In[7]") -> str:
    """The message of a cell that is stopped once ``diagnose`` shows all of this."""
    run = in_background(session, code, label)
    until_shown(session, *texts)
    assert session.interrupt()
    with pytest.raises(RunInterrupt) as caught:
        run.result(LONG)
    return str(caught.value)


# --- the examples of the page ---------------------------------------------------------------------


def on_the_page(*words: str) -> str:
    """The example that has all of these words."""
    found = [block for block in code_blocks(PAGE, "text") if all(word in block for word in words)]
    assert len(found) == 1, f"{len(found)} examples of docs/hangs.md have {words}"
    return found[0]


def _same(line: str) -> str:
    """A line without what differs from one machine, and one moment, to another."""
    line = re.sub(r"\(for \d+ s\)", "(for N s)", line)
    line = re.sub(r"\b\d+(\.\d)? s$", "N s", line.rstrip())
    line = re.sub(r"(\bpid|kill -CONT) \d+", r"\1 N", line)
    line = re.sub(r"\bgroup \d{5,}", "group N", line)
    line = re.sub(r"\([\w.-]+, cpu\)", "(HOST, cpu)", line)
    return re.sub(r" +", " ", line)


def assert_as_on_the_page(example: str, shown: str) -> None:
    """Every line of the example is shown, in this order."""
    lines = iter([_same(line) for line in shown.splitlines()])
    for line in filter(str.strip, example.splitlines()):
        assert _same(line) in lines, f"docs/hangs.md shows\n  {line}\nbut this came:\n{shown}"


@dataclass(frozen=True)
class Hang:
    """What was seen of the first example."""

    notice: str
    diagnosis: str
    stacks: str
    stop: str


def number_anew(session: Session) -> None:
    """Have the group connected anew, so that its operations are numbered from 1 again."""
    raised(session, "if rank == 0: raise ValueError\ndist.barrier()", RunError)


@pytest.fixture(scope="module")
def hang(_four: Session) -> Hang:
    four = _four
    with kept(four):
        number_anew(four)
        four.output().clear()
        run = in_background(four, EXAMPLE)
        diagnosis = until_shown(four, "ranks 0-1,3 wait", "(for 3 s)", "running In[6] line 4")
        stacks = repr(four.diagnose(stacks=True))
        notice = until(lambda: [text for text in four.output().notices if text])[0]
        assert four.interrupt()
        with pytest.raises(RunInterrupt) as caught:
            run.result(LONG)
    return Hang(notice, diagnosis, stacks, shown_of(caught.value))


def test_after_ten_seconds_a_line_says_who_waits_for_whom(hang: Hang) -> None:
    example = on_the_page("distsession: ", "In[6]").removeprefix("distsession: ")
    assert_as_on_the_page(example, hang.notice)
    seconds = re.search(r"\(for (\d+) s\)", hang.notice)
    assert seconds is not None
    assert 10 <= int(seconds[1]) < 10 + LONG
    assert watchdog.NOTICE_AFTER_S == 10


def test_the_message_of_a_stop_says_the_same_once_more(hang: Hang) -> None:
    assert_as_on_the_page(on_the_page("KeyboardInterrupt: ", "In[6]"), hang.stop)


def test_a_stop_says_where_ranks_are_that_wait_for_nobody(four: Session) -> None:
    with kept(four):
        text = stopped(
            four,
            "# %%distributed\n\nif rank == 2:\n    time.sleep(60)",
            "running In[11] line 4",
            label="In[11]",
        )
    assert f"KeyboardInterrupt: {text}".startswith(on_the_page("KeyboardInterrupt: ", "In[11]"))


def test_an_error_that_a_rank_was_handling_comes_first(four: Session) -> None:
    cell = """# %%distributed
try:
    if rank == 2:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(4))
finally:
    dist.barrier()"""
    text = raised(four, cell, RunError, "In[9]")
    assert text.startswith("ValueError on rank 2 (")
    assert on_the_page("handled that") in text


def test_diagnose_shows_the_verdict_and_a_row_for_each_rank(hang: Hang) -> None:
    example = on_the_page("rank  state", "In[6]")
    assert_as_on_the_page(example, hang.diagnosis)
    verdict, table = hang.diagnosis.split("\n\n")
    assert verdict.startswith("ranks 0-1,3 wait in")
    assert len(table.splitlines()) == 1 + 4


def test_stacks_are_shown_once_for_ranks_at_the_same_place(hang: Hang) -> None:
    assert_as_on_the_page(on_the_page("[rank 2]", "In[6]"), hang.stacks)
    culprit, waiting = hang.stacks.split("[rank 2]")[1].split("[ranks 0-1,3]")
    assert "Cell In[6], line 4" in culprit
    assert "Cell In[6], line 5" in waiting
    assert waiting.index("Cell In[6], line 5") < waiting.index("in all_reduce")


def test_the_error_of_a_rank_comes_first_and_the_others_are_freed(four: Session) -> None:
    number_anew(four)
    cell = """# %%distributed
if rank == 2:
    raise ValueError('no such file: digits.npz')
dist.all_reduce(x)
"""
    with kept(four):
        shown = raised(four, cell, RunError, "In[7]")
        assert_as_on_the_page(on_the_page("ValueError", "In[7]"), shown)
        assert shown.startswith("ValueError on rank 2")


def test_a_rank_that_has_ended_its_part_is_not_waited_for(four: Session) -> None:
    number_anew(four)
    with kept(four):
        shown = raised(
            four,
            "# %%distributed\nif rank != 2:\n    dist.barrier()",
            errors.CollectiveHangError,
            "In[8]",
        )
    assert_as_on_the_page(on_the_page("CollectiveHangError", "In[8]"), shown)


def test_a_rank_that_has_left_the_group_is_not_waited_for(four: Session) -> None:
    number_anew(four)
    cell = """# %%distributed
if rank == 0:
    dist.destroy_process_group()
else:
    dist.barrier()
"""
    with kept(four):
        shown = raised(four, cell, errors.CollectiveHangError, "In[9]")
    assert_as_on_the_page(on_the_page("CollectiveHangError: rank 0 left", "In[9]"), shown)


def test_while_a_rank_that_has_left_the_group_runs_the_others_are_freed(
    two: Session, tmp_path: Path
) -> None:
    code = (
        "import time\nfrom distsession.errors import CollectiveHangError\n"
        "if rank == 0:\n    dist.destroy_process_group()\n"
        "    began = time.monotonic()\n"
        "    while not os.path.exists(path) and time.monotonic() - began < 60: time.sleep(0.01)\n"
        "    found = os.path.exists(path)\n"
        "else:\n"
        "    try: dist.barrier()\n"
        "    except CollectiveHangError: open(path, 'w').close()"
    )
    two.execute(f"import os; path = {str(tmp_path / 'freed')!r}")
    with contextlib.suppress(errors.DistsessionError):
        two.execute(code, timeout=LONG)
    assert two[0].evaluate("found")[0]


def test_who_only_has_put_the_group_away_may_come_back_to_it(two: Session) -> None:
    two.execute(
        "import time\nfrom torch.distributed import distributed_c10d as c10d\n"
        "if rank == 0:\n"
        "    world, c10d.GroupMember.WORLD = c10d.GroupMember.WORLD, None\n"
        "    time.sleep(3)\n"
        "    c10d.GroupMember.WORLD = world\n"
        "dist.barrier()",
        timeout=LONG,
    )


def test_ranks_that_wait_for_each_other_in_different_groups_are_freed(four: Session) -> None:
    number_anew(four)
    cell = """# %%distributed
group = dist.new_group([0, 1, 2, 3])
for each in (None, group) if rank == 0 else (group, None):
    dist.all_reduce(x, group=each)
"""
    with kept(four):
        shown = raised(four, cell, errors.CollectiveMismatchError, "In[10]")
    assert_as_on_the_page(on_the_page("CollectiveMismatchError", "In[10]"), shown)


def test_a_mismatch_names_both_sides(four: Session) -> None:
    number_anew(four)
    cell = "# %%distributed\ny = torch.ones(3 if rank == 2 else 4)\ndist.all_reduce(y)"
    with kept(four):
        shown = raised(four, cell, RunError, "In[9]")
        assert_as_on_the_page(on_the_page("CollectiveMismatchError", "In[9]"), shown)
        assert all(four.evaluate("bool((y == 1).all())").values())


def test_a_time_limit_names_who_did_not_come() -> None:
    with begin(4, timeout=2) as session:
        cell = "if rank == 2: time.sleep(5)\ndist.all_reduce(torch.ones(4))"
        shown = raised(session, cell, RunError, "In[7]")
    assert_as_on_the_page(on_the_page("did not come to", "In[7]"), shown)


def test_a_new_group_is_met_by_all_ranks_or_with_local_synchronization_by_its_members(
    four: Session,
) -> None:
    with kept(four):
        text = raised(four, "if rank < 2: dist.new_group([0, 1])", errors.CollectiveHangError)
        assert "ranks 2-3 did not come to new_group #" in text
        assert "they finished their part without it; ranks 0-1 wait." in text
        text = raised(four, "dist.new_group([0, 1] if rank != 3 else [0, 3])", RunError)
        assert "CollectiveMismatchError" in text
        assert "rank 3 called new_group with ranks 0,3, ranks 0-2 with ranks 0-1" in text
        four.execute(
            "if rank < 2:\n"
            "    local = dist.new_group([0, 1], use_local_synchronization=True)\n"
            "    dist.all_reduce(torch.ones(1), group=local)\n"
            "    del local"
        )


def test_a_dead_rank_is_replaced_and_the_others_stay(four: Session) -> None:
    number_anew(four)
    four.execute("model = torch.nn.Linear(2, 2); torch.nn.init.constant_(model.weight, rank)")
    four.execute("optim = torch.optim.SGD(model.parameters(), lr=0.1); mine = rank")
    before = four.evaluate("(os.getpid(), id(model), number)")
    cell = """# %%distributed
if rank == 2:
    print('about to end', flush=True)
    time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
"""
    shown = raised(four, cell, RunError, "In[12]")
    assert_as_on_the_page(on_the_page("EngineDiedError", "In[12]"), shown)
    assert re.search(r"^2 +dead \(.*SIGKILL", repr(four.diagnose()), re.MULTILINE)
    with pytest.raises(RunError, match="rank 2"):
        four[[0, 1, 3]].execute("dist.barrier()")
    exec(code_blocks(PAGE, "python")[1], {"session": four})  # what the page says next
    after = four[[0, 1, 3]].evaluate("(os.getpid(), id(model), number)")
    assert dict(after) == {rank: before[rank] for rank in (0, 1, 3)}
    fresh = four[2].evaluate("model.weight.mean().item(), 'mine' in globals()")
    assert fresh[2] == (0.0, False)
    assert four[2].evaluate("optim.param_groups[0]['params'][0] is model.weight")[2] is True
    four.restart([0], restore="model")
    lowest = four.evaluate("model.weight.mean().item()")
    assert dict(lowest) == {0: 1.0, 1: 1.0, 2: 0.0, 3: 3.0}
    four.execute(SETUP)


def test_groups_that_a_replaced_rank_does_not_know_are_named(four: Session) -> None:
    four.execute(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "group = dist.new_group([0, 1, 2, 3])\n"
        "def make():\n"
        "    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        "    whole = torch.arange(16.0).reshape(4, 4)\n"
        "    return distribute_tensor(whole, mesh, [Shard(0), Shard(1)])\n"
        "sharded = make()"
    )
    four.restart([2])
    stays = four[[0, 1, 3]]
    with pytest.raises(RunError) as caught:
        stays.execute("dist.all_reduce(x, group=group)")
    assert_as_on_the_page(on_the_page("was made before rank 2"), shown_of(caught.value))
    with pytest.raises(RunError, match="was made before rank 2 was replaced"):
        four[3].execute("sharded.full_tensor()")  # which needs rank 2
    four[2].execute(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor"
    )
    four[2].push(make=four[0].pull("make")[0])
    four.execute("sharded = make()\ngroup = dist.new_group([0, 1, 2, 3])")
    four.execute("dist.all_reduce(torch.ones(1), group=group)")
    assert four.evaluate("sharded.full_tensor().sum().item()")[2] == 120.0
    four.execute(SETUP)


# --- how it is said -------------------------------------------------------------------------------

COLLECTIVES = {
    "all_reduce": ("dist.all_reduce(x)", "float32 [4, 2], sum"),
    "broadcast": ("dist.broadcast(x, src=0)", "float32 [4, 2], root 0"),
    "reduce": ("dist.reduce(x, dst=1)", "float32 [4, 2], sum, root 1"),
    "all_gather": ("dist.all_gather([x.clone(), x.clone()], x)", "float32 [4, 2]"),
    "all_gather_into_tensor": (
        "dist.all_gather_into_tensor(torch.ones(8, 2), x)",
        "float32 [4, 2]",
    ),
    "gather": ("dist.gather(x, [x.clone(), x.clone()], dst=0)", "float32 [4, 2], root 0"),
    "scatter": ("dist.scatter(x.clone(), [x, x], src=0)", "float32 [4, 2], root 0"),
    "reduce_scatter_tensor": (
        "dist.reduce_scatter_tensor(torch.ones(2, 2), x)",
        "float32 [2, 2], sum",
    ),
    "all_to_all_single": (
        "dist.all_to_all_single(x.clone(), x, [1, 3], [3, 1])",
        "float32 [2], send 3,1 receive 1,3",
    ),
    "barrier": ("dist.barrier()", ""),
    "send": ("dist.send(x, dst=1)", "float32, 8 elements"),
    "recv": ("dist.recv(x, src=1)", "float32, 8 elements"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_that_is_alone_waits_and_is_told_with_what(two: Session, name: str) -> None:
    call, detail = COLLECTIVES[name]
    text = raised(two, f"if rank == 0: {call}", errors.CollectiveHangError)
    did_not = {"send": "did not receive", "recv": "sent nothing for"}.get(name, "did not come to")
    what = f"{name} #N{f' ({detail})' if detail else ''} at In[7] line 1"
    said = re.sub(r"#\d+", "#N", text)
    assert f"rank 1 {did_not} {what}: it finished its part without it; rank 0 waits." in said


def test_the_line_is_the_users_own_whoever_makes_the_call(two: Session) -> None:
    two.execute(
        "site = os.path.dirname(os.path.dirname(torch.__file__))  # where packages are installed\n"
        "library = {}\n"
        "code = compile('def call(it):\\n    return it()', f'{site}/a_library/it.py', 'exec')\n"
        "exec(code, library)"
    )
    for call in (
        "dist.all_gather_object([None, None], rank)",
        "functional.all_reduce(x, 'sum', dist.group.WORLD).sum().item()",
        "library['call'](dist.barrier)",
    ):
        text = raised(two, f"if rank == 0:\n\n    {call}", errors.CollectiveHangError)
        assert re.search(r"rank 1 did not come to .* at In\[7\] line 3: ", text), call


def test_operations_are_numbered_in_their_group_and_anew_once_it_is_connected_anew(
    two: Session,
) -> None:
    number_anew(two)
    two.execute("other = dist.new_group([0, 1])")  # 1 in the default group
    two.execute("for _ in range(3): dist.barrier()\nfor _ in range(6): dist.barrier(group=other)")
    text = raised(two, "if rank == 0: dist.barrier()", errors.CollectiveHangError)
    assert "barrier #5 at" in text
    text = raised(two, "if rank == 0: dist.barrier()", errors.CollectiveHangError)
    assert "barrier #1 at" in text
    text = raised(two, "if rank == 0: dist.barrier(group=other)", errors.CollectiveHangError)
    assert re.search(r"barrier #1 of group \d+ \(ranks 0-1\) at", text)
    two.execute("del other")


# --- Stop -----------------------------------------------------------------------------------------


def test_what_waited_for_a_rank_has_not_begun(two: Session) -> None:
    with kept(two):
        two.execute("y = torch.full((4,), float(rank))")
        stopped(
            two,
            "if rank == 0:\n    dist.all_reduce(y)\nelse:\n    time.sleep(60)",
            "rank 0 waits in all_reduce",
            "running In[7] line 4",
        )
        assert two.evaluate("y.tolist()")[0] == [0.0] * 4
        raised(two, "if rank == 0: dist.all_reduce(y)", errors.CollectiveHangError)
        assert two.evaluate("y.tolist()")[0] == [0.0] * 4


def test_what_was_submitted_can_be_diagnosed_and_is_stopped_by_interrupt(two: Session) -> None:
    with kept(two):
        late = by_value("def late():\n    if rank == 1: time.sleep(60)\n    dist.barrier()", "late")
        run = two.submit(late)
        until_shown(two, "rank 0 waits in barrier")
        assert two.interrupt()
        with pytest.raises(RunInterrupt, match="rank 0 waits in barrier"):
            run.result(LONG)


def test_stop_leaves_processes_alone_that_an_earlier_cell_has_started(two: Session) -> None:
    two.execute("import subprocess\nearlier = subprocess.Popen(['sleep', '60'])")
    time.sleep(0.1)  # the system notes a process's start in steps of 10 ms
    with kept(two):
        stopped(two, "os.system('sleep 60')", "running In[7] line 1")
    assert dict(two.evaluate("earlier.poll()")) == {0: None, 1: None}
    two.execute("earlier.kill(); _ = earlier.wait()")


CANNOT_BE_STOPPED = {
    "C code that keeps the lock": ("ctypes.PyDLL(None).sleep(60)", "C code"),
    "C code that does not come back": (
        "mutex = ctypes.create_string_buffer(64)\n"
        "    ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
        "    ctypes.CDLL(None).pthread_mutex_lock(mutex)",
        "does not react",
    ),
    "a process that is stopped itself": ("os.kill(os.getpid(), signal.SIGSTOP)", "SIGSTOP"),
}


@pytest.mark.parametrize(("code", "why"), CANNOT_BE_STOPPED.values(), ids=CANNOT_BE_STOPPED)
def test_a_rank_that_cannot_be_stopped_is_named_and_replaced_alone(
    two: Session, code: str, why: str
) -> None:
    cell = f"if rank == 1:\n    {code}\ndist.barrier()"

    def press_stop() -> None:
        until_shown(two, "rank 0 waits in barrier", "not answering" if why == "C code" else "")
        time.sleep(0.3)  # until the code is where it cannot be stopped
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press_stop)
    presses.start()
    with pytest.raises(RunInterrupt) as caught:
        two.execute(cell)
    presses.join()
    assert why in str(caught.value)
    assert "session.restart([1]) replaces it alone" in str(caught.value)
    assert two[0].evaluate("number", timeout=LONG)[0] == [40]
    two.restart([1])
    two[1].execute(SETUP)
    with kept(two):
        two.execute("dist.barrier()")


def test_a_submitted_run_with_a_rank_that_cannot_be_stopped_is_given_up(two: Session) -> None:
    source = "def keeps():\n    if rank == 1: ctypes.PyDLL(None).sleep(60)\n    dist.barrier()"
    run = two.submit(by_value(source, "keeps"))
    until_shown(two, "rank 0 waits in barrier", "not answering")  # before that it can be stopped
    assert two.interrupt()
    with pytest.raises(RunInterrupt, match=r"C code.*session\.restart\(\[1\]\) replaces it alone"):
        run.result(LONG)
    two.restart([1])
    two[1].execute(SETUP)


def test_what_to_do_about_ranks_that_cannot_be_stopped_comes_once(two: Session) -> None:
    def press_stop() -> None:
        until_shown(two, "not answering")
        time.sleep(0.3)  # until the code is where it cannot be stopped
        two.interrupt()

    presses = threading.Thread(target=press_stop)
    presses.start()
    with pytest.raises(RunInterrupt) as caught:
        two.execute("ctypes.PyDLL(None).sleep(60)")
    presses.join()
    text = str(caught.value)
    assert "Ranks 0-1 each computes in C code" in text
    assert "session.restart() replaces all ranks, without their variables." in text
    assert text.count("session.restart(") == 1
    two.restart()
    two.execute(SETUP)


# --- diagnose -------------------------------------------------------------------------------------


def test_the_main_thread_is_not_disturbed_by_a_question(two: Session) -> None:
    # a signal, or whatever else comes to the thread, would end this sleep: what is left is given
    run = two.submit(by_value("def sleep(): return ctypes.CDLL(None).sleep(2)", "sleep"))
    for _ in range(10):
        assert "running" in repr(two.diagnose(stacks=True))
    assert dict(run.result(LONG)) == {0: 0, 1: 0}


def test_a_wait_is_seen_even_if_no_thread_answers(two: Session) -> None:
    keeps = "threading.Timer(0.3, ctypes.PyDLL(None).sleep, [2]).start()\n    "
    cell = f"if rank == 0:\n    {keeps}dist.barrier()\nelse: time.sleep(0.8)"
    text = raised(two, cell, errors.CollectiveHangError)
    assert "rank 1 did not come to barrier #" in text


def test_a_process_that_a_debugger_holds_is_shown(two: Session) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    attach, detach = 16, 17
    pid = two.infos[1].pid
    run = two.submit(time.sleep, 1)
    if libc.ptrace(attach, pid, None, None) != 0:
        run.result(LONG)
        pytest.skip("this system lets nobody trace processes")
    try:
        os.waitpid(pid, 0x40000000)  # __WALL: until it has stopped
        assert re.search(r"^1 +held by a debugger", repr(two.diagnose()), re.MULTILINE)
    finally:
        libc.ptrace(detach, pid, None, None)
    run.result(LONG)


# --- what ends by itself, and what does not -------------------------------------------------------


def test_a_submitted_run_is_looked_after_too(two: Session) -> None:
    with kept(two):
        run = two.submit(by_value("def f():\n    if rank == 0: dist.barrier()", "f"))
        with pytest.raises(errors.CollectiveHangError, match="rank 1 did not come to barrier"):
            run.result(LONG)


def test_what_was_submitted_behind_others_is_looked_after_when_its_turn_comes(
    two: Session,
) -> None:
    with kept(two):
        before = [two.submit(time.sleep, 0.01) for _ in range(200)]
        run = two.submit(by_value("def f():\n    if rank == 0: dist.barrier()", "f"))
        with pytest.raises(errors.CollectiveHangError, match="rank 1 did not come to barrier"):
            run.result(LONG)
        assert all(future.done() for future in before)


def test_what_a_rank_does_between_runs_is_not_watched(two: Session) -> None:
    two.execute("thread = threading.Thread(target=dist.barrier)\nif rank == 0: thread.start()")
    time.sleep(1)  # five times the grace of this session
    assert two[0].evaluate("thread.is_alive()")[0] is True
    two[1].execute("dist.barrier()")
    two[0].execute("thread.join(10); assert not thread.is_alive()")


def test_a_thread_is_not_ended_while_the_main_thread_does_something_else(two: Session) -> None:
    two.execute(
        "thread = threading.Thread(target=dist.barrier)\n"
        "if rank == 0: thread.start(); time.sleep(1.5); assert thread.is_alive()"
    )
    two[1].execute("dist.barrier()")
    two[0].execute("thread.join(10); assert not thread.is_alive()")


def test_a_rank_may_still_come_while_a_thread_that_it_has_started_goes_on(
    two: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "if rank == 1: threading.Thread(target=lambda: end.wait(LIMIT)).start()\n"
        "else: dist.barrier()"
    )
    with kept(two):
        two.execute("end = threading.Event()")
        for text in notices_of(two, monkeypatch, code.replace("LIMIT", "60")):
            assert "rank 1, which finished its part without it, but has a thread" in text
        two.execute("end.set(); end = threading.Event()")
        began = time.monotonic()
        raised(two, code.replace("LIMIT", "1.5"), errors.CollectiveHangError)
        assert time.monotonic() - began > 1.5


def test_a_collective_in_a_thread_that_is_awaited_ends(two: Session) -> None:
    text = raised(
        two,
        "import asyncio\nif rank == 0: await asyncio.to_thread(dist.barrier)",
        errors.CollectiveHangError,
    )
    assert text.startswith("CollectiveHangError: rank 1 did not come to barrier")
    assert "In[7] line 2" in text


def test_what_is_awaited_may_need_what_the_event_loop_does_next(two: Session) -> None:
    """Each rank begins two operations of two groups in another order, a while apart."""
    two.execute(
        "import asyncio\n"
        "groups = [dist.new_group(), dist.new_group()]\n"
        "async def each(number):\n"
        "    if number != rank: await asyncio.sleep(2.5)\n"
        "    await asyncio.to_thread(dist.barrier, groups[number])\n"
        "await asyncio.gather(each(0), each(1))"
    )


def notices_of(session: Session, monkeypatch: pytest.MonkeyPatch, code: str) -> tuple[str, str]:
    """The first notice of a cell, and the message of the stop that ends it."""
    monkeypatch.setattr(watchdog, "NOTICE_AFTER_S", 0.3)
    session.output().clear()
    run = in_background(session, code, "In[7]")
    notice = until(lambda: [text for text in session.output().notices if text])[0]
    assert session.interrupt()
    with pytest.raises(RunInterrupt) as caught:
        run.result(LONG)
    return notice, str(caught.value)


def test_a_receive_from_anyone_names_those_who_may_send(
    two: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(two):
        code = "if rank == 0: dist.recv(x)\nelse: time.sleep(60)"
        whom = "for a message from rank 1, which runs In[7] line 2"
        notice, stop = notices_of(two, monkeypatch, code)
        assert whom in notice
        assert whom in stop
        two.execute("if rank == 0: dist.recv(x)\nelse: time.sleep(1); dist.send(x, dst=0)")
        run = two[0].submit(by_value("def receive(): dist.recv(x)", "receive"))
        until_shown(two, "rank 0 waits in recv", "for a message from rank 1")
        time.sleep(0.5)
        assert not run.done()
        two[1].execute("dist.send(x, dst=0)")  # a later run brings it
        run.result(LONG)


def test_a_wait_in_the_store_is_told_in_a_notice(
    two: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(two):
        code = (
            "if rank == 0: time.sleep(60)\n"
            "else: dist.distributed_c10d._get_default_store().get('never')"
        )
        for text in notices_of(two, monkeypatch, code):
            assert "ank 1 waits for the key 'never' of the store at In[7] line 2" in text
            assert "which no rank has set: rank 0 runs In[7] line 1" in text


def test_a_thread_that_was_left_behind_is_not_seen_to_set_a_key(two: Session) -> None:
    two.execute(
        "store = dist.distributed_c10d._get_default_store()\n"
        "thread = threading.Timer(3, store.set, ['late', 'x'])\n"
        "if rank == 1: thread.start()"
    )
    text = raised(two, "if rank == 0: store.get('late')", errors.CollectiveHangError)
    assert "the key 'late'" in text
    two[1].execute("thread.join()")


def test_a_wait_in_a_store_of_ones_own_counts_as_code_that_runs(two: Session) -> None:
    two.execute(
        "import datetime\nown = dist.HashStore(); own.set_timeout(datetime.timedelta(seconds=3))"
    )
    run = in_background(two, "if rank == 0: dist.barrier()\nelse: own.get('never')", "In[7]")
    until_shown(two, "rank 0 waits in barrier", "for rank 1, which runs In[7] line 2")
    with pytest.raises(RunError):
        run.result(LONG)


def test_without_a_grace_only_what_is_certain_at_once_is_ended() -> None:
    with begin(2, hang_grace=0) as session, kept(session):
        run = in_background(session, "if rank == 0: dist.barrier()")
        until_shown(session, "rank 1 did not come to barrier")
        time.sleep(SessionOptions().hang_grace + 1)
        assert not run.done()
        assert session.interrupt()
        with pytest.raises(RunInterrupt):
            run.result(LONG)
        failing = "if rank == 0: dist.barrier()\nelse: raise ValueError('x')"
        assert raised(session, failing, RunError).startswith("ValueError on rank 1")
        raised(
            session,
            "group = dist.new_group([0, 1])\n"
            "for each in (None, group) if rank == 0 else (group, None): dist.barrier(each)",
            errors.CollectiveMismatchError,
        )
        leaving = "dist.destroy_process_group() if rank else dist.barrier()"
        raised(session, leaving, errors.CollectiveHangError)


# --- comparing ------------------------------------------------------------------------------------


def test_asynchronous_operations_may_be_issued_in_any_order_of_groups(two: Session) -> None:
    two.execute(
        "one, other = dist.new_group([0, 1]), dist.new_group([0, 1])\n"
        "order = (one, other) if rank == 0 else (other, one)\n"
        "works = [dist.all_reduce(torch.ones(4), group=g, async_op=True) for g in order]\n"
        "for work in works: work.wait()\n"
        "del one, other, order, works"
    )


def test_functional_collectives_are_compared_as_they_are_issued(two: Session) -> None:
    with kept(two):
        text = raised(
            two,
            "functional.all_reduce(torch.ones(4 + rank), 'sum', dist.group.WORLD).sum().item()",
            RunError,
        )
    assert "CollectiveMismatchError" in text
    # The first to come does not wait for the others: it has gone on when it is looked at.
    run = in_background(
        two,
        "if rank == 1: time.sleep(60)\n"
        "y = functional.all_reduce(x, 'sum', dist.group.WORLD)\n"
        "gone_on = True\ntime.sleep(60)",
    )
    until_shown(two, "running In[6] line 1", "running In[6] line 4")
    assert two.interrupt()
    with pytest.raises(RunInterrupt):
        run.result(LONG)


def test_the_last_rank_to_come_sees_a_mismatch_of_asynchronous_operations(two: Session) -> None:
    with kept(two), pytest.raises(RunError) as caught:
        two.execute(
            "seen = None\n"
            "if rank == 1: time.sleep(0.5)\n"
            "work = dist.all_reduce(torch.ones(4 + rank), async_op=True)\n"
            "seen = 'nothing'\n"
            "work.wait()"
        )
    assert isinstance(caught.value.by_rank[1], errors.CollectiveMismatchError)
    assert dict(two.evaluate("seen")) == {0: "nothing", 1: None}


def test_what_is_compared_and_how_long_is_waited_unless_asked_otherwise() -> None:
    assert SessionOptions().check == "shared"
    assert SessionOptions().hang_grace == 2


def test_a_check_in_detail_gives_torchs_message_and_frees_the_others() -> None:
    with begin(3, check="detail") as session, kept(session):
        with pytest.raises(RunError) as caught:
            session.execute("dist.all_reduce(torch.ones(4 + (rank == 2)))")
        by_rank = caught.value.by_rank
        assert set(by_rank) == {0, 1, 2}
        told = [e for e in by_rank.values() if isinstance(e, errors.CollectiveMismatchError)]
        assert told
        assert all("Detected mismatch between collectives" in str(error) for error in told)
        assert all(isinstance(error, errors.CollectiveError) for error in by_rank.values())


def test_without_a_check_nothing_is_compared_and_waits_are_said_all_the_same() -> None:
    with begin(2, check="off", hang_grace=0.2) as session, kept(session):
        session.execute(  # of which gloo makes something
            "dist.all_reduce(x, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)"
        )
        text = stopped(
            session,
            "if rank == 0: dist.all_reduce(x)\nelse: time.sleep(60)",
            "rank 0 waits in all_reduce #2 (float32 [4, 2], sum) at In[7] line 1",
            "0     in all_reduce #2",
        )
        assert "rank 0 waits in all_reduce #2 (float32 [4, 2], sum) at In[7] line 1" in text
        assert "for rank 1, which runs In[7] line 2" in text


# --- what survives --------------------------------------------------------------------------------


def test_data_parallel_goes_on_with_its_hooks_from_the_midst_of_a_bucket(two: Session) -> None:
    two.execute(
        "torch.manual_seed(0)\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 2))\n"
        "optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "calls = []\n"
        "def hook(state, bucket):\n"
        "    calls.append(1)\n"
        "    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n"
        "    return future.then(lambda f: f.value()[0] / 2)\n"
        "model.register_comm_hook(None, hook)\n"
        "def gradient():\n"
        "    optim.zero_grad()\n"
        "    (model(torch.ones(1, 4)) * (rank + 1)).sum().backward()\n"
        "    return model.module.bias.grad.tolist()\n"
        "first = gradient(); optim.step()\n"
        "state = [p.tolist() for p in model.parameters()], id(optim), len(optim.state)"
    )
    with kept(two):
        raised(two, "if rank == 0: raise ValueError\ngradient()", RunError)  # rank 1 is within
    now = "[p.tolist() for p in model.parameters()], id(optim), len(optim.state)"
    assert two.evaluate(now) == two.evaluate("state")
    two.execute("calls.clear(); again = gradient()")
    assert two.evaluate("again == first and again == [1.5, 1.5]")[1] is True
    assert all(two.evaluate("len(calls)").values())


def test_work_handles_and_keys_of_the_store_do_not_go_on(two: Session) -> None:
    two.execute(
        "store = dist.distributed_c10d._get_default_store()\n"
        "store.set('of mine', 'x')\n"
        "assert store.check(['of mine'])"
    )
    waits = "if rank == 0:\n    work = dist.all_reduce(x, async_op=True)\n    dist.barrier()"
    raised(two, waits, errors.CollectiveHangError)
    with pytest.raises(RunError, match=r"all_reduce float32 .* is gone: issue it again"):
        two[0].execute("work.wait()", timeout=LONG)
    until(lambda: not any(two.evaluate("store.check(['of mine'])", timeout=LONG).values()))
    fresh = "dist.distributed_c10d._get_default_store().check(['of mine'])"
    assert dict(two.evaluate(fresh, timeout=LONG)) == {0: False, 1: False}


def test_a_group_that_cannot_be_connected_says_which_rank_prevents_it(two: Session) -> None:
    pid = two.infos[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(errors.CollectiveHangError) as caught:
            two[0].execute("dist.barrier()")
        text = str(caught.value)
        example = on_the_page("The process group is not connected", "SIGSTOP")
        assert_as_on_the_page(example, text[text.index("The process group is not connected") :])
        facts = repr(Snapshots(two).take())
        assert f"kill -CONT {pid}" in facts
    finally:
        os.kill(pid, signal.SIGCONT)
    with kept(two):
        two.execute("dist.barrier()")


def test_a_shard_cannot_come_from_another_rank(two: Session) -> None:
    two.execute(
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh\n"
        "model = fully_shard(torch.nn.Linear(4, 4))\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])"
    )
    with pytest.raises(RunError, match="cannot be sent"):
        two.restart([1], restore="model")
    two.restart([1], restore="sharded")
    parts = two.evaluate("sharded.to_local().tolist()")
    assert dict(parts) == {0: [0.0, 1.0], 1: [0.0, 1.0]}
    two.execute(SETUP)


def test_a_stop_in_a_store_at_the_sessions_port_closes_it(two: Session) -> None:
    with kept(two):
        two.execute(
            "mine = dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=False)\n"
            "mine.set(f'a{rank}', 'b')\n"
            "assert mine.get(f'a{rank}') == b'b'"
        )
        stopped(
            two, "mine.get('never')", "0     running In[7] line 1", "1     running In[7] line 1"
        )
    with pytest.raises(RunError) as caught:
        two.execute("mine.get(f'a{rank}')", timeout=LONG)
    assert set(caught.value.by_rank) == {0, 1}


# --- in a notebook --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    shown = notebook.run("%load_ext distsession\n%session start 2 --backend gloo")
    assert "2 ranks, gloo" in shown.result, shown
    notebook.run("from distsession import current_session\nsession = current_session()")
    notebook.run(f"%%distributed\n{SETUP}")
    yield notebook
    notebook.run("%session close")
    notebook.close()


def test_magics_diagnose_and_interrupt_what_was_submitted(notebook: Notebook) -> None:
    notebook.run(
        "import time\ndef late():\n    import time\n    if rank == 1:\n        time.sleep(60)\n"
        "    dist.barrier()\n\nrun = session.submit(late)"
    )
    notebook.run(
        "import time\nwhile 'rank 0 waits in barrier' not in repr(session.diagnose()):"
        "\n    time.sleep(0.05)"
    )
    shown = notebook.run("%session diagnose").result
    # of the function's own cell, from its top
    cell = re.search(r"at (In\[\d+\]) line 6", shown)
    assert cell is not None
    assert f"running {cell[1]} line 5" in shown
    assert "def late():" in notebook.run(f"print({cell[1]})").stdout
    assert "time.sleep(60)" in notebook.run("%session diagnose --stacks").result
    assert "interrupted" in notebook.run("%session interrupt").result
    stopped = notebook.run("run.result(20)")
    assert stopped.ename == "RunInterrupt"
    assert f"at {cell[1]} line 6" in stopped.error
    notebook.run("%%distributed\ndist.barrier()")


def test_in_the_main_thread_nothing_later_can_come(notebook: Notebook) -> None:
    shown = notebook.run("session[0].run(lambda: dist.barrier())")
    assert shown.ename == "CollectiveHangError"
    notebook.run("run = session[0].submit(lambda: dist.barrier())\nimport time; time.sleep(3)")
    assert notebook.run("run.done()").result == "False"
    notebook.run("session[1].run(lambda: dist.barrier())")
    assert not notebook.run("run.result(20)").error


def test_a_rank_is_replaced_with_variables_by_a_magic(notebook: Notebook) -> None:
    notebook.run("%%distributed\nmodel = torch.nn.Linear(1, 1)\noptim = [*model.parameters()]")
    magic = re.search(r"`(%session restart 2 .*?)`", PAGE)
    assert magic is not None
    assert "idle" in notebook.run(magic[1].replace("restart 2", "restart 1")).result
    shown = notebook.run("%distributed optim[0] is model.weight").result
    assert shown == "[ranks 0-1] True"
