"""Code that makes and destroys process groups by itself, as scripts for torchrun do."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distsession import Session
from distsession.errors import CollectiveHangError, RunError, RunInterrupt, SessionStateError
from tests.backends import Backend, only
from tests.integration.conftest import Recorder
from tests.until import LIMIT_S, Press, until

SUM = "t = torch.ones(1)\ndist.all_reduce(t)"


@pytest.fixture(scope="module")
def _shared(backend: Backend) -> Iterator[tuple[Session, Recorder]]:
    recorder = Recorder()
    with backend.session(2, output=recorder) as session:
        yield session, recorder


@pytest.fixture(autouse=True)
def _in_the_sessions_group(session: Session) -> None:
    session.execute("x = rank * 10")
    session.reconnect()


def total(session: Session) -> list[float]:
    session.execute(SUM)
    return list(session.evaluate("t.item()").values())


@pytest.mark.parametrize(
    "call",
    [
        "dist.init_process_group('gloo')",
        "dist.init_process_group(backend='gloo', init_method='env://')",
        "dist.init_process_group('gloo', rank=rank, world_size=world_size)",
        "dist.init_process_group('cpu:gloo', 'tcp://localhost:12355', rank=rank, world_size=2)",
        "from torch.distributed import init_process_group\ninit_process_group('gloo')",
        "dist.distributed_c10d.init_process_group()",
    ],
)
def test_making_a_group_that_is_there_warns_and_goes_on(
    session: Session, output: Recorder, backend: Backend, call: str
) -> None:
    output.clear()
    call = call.replace("cpu:gloo", f"{backend.device}:gloo").replace("gloo", backend.name)
    session.execute(f"import warnings; warnings.simplefilter('always')\n{call}")
    assert "in a process group already" in output.text(0, "stderr")
    assert total(session) == [2, 2]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("dist.init_process_group('nccl')", "whose backend is gloo, not nccl"),
        ("dist.init_process_group('gloo', rank=5, world_size=2)", "with rank=[01], not 5"),
        ("dist.init_process_group('gloo', world_size=4, rank=rank)", "with world_size=2, not 4"),
    ],
)
def test_making_one_that_contradicts_it_says_what(
    session: Session, backend: Backend, call: str, why: str
) -> None:
    call, why = (text.replace("gloo", backend.name) for text in (call, why))
    with pytest.raises(RunError, match=f"ValueError .*{why}. Leave the call out, or call"):
        session.execute(call)
    assert total(session) == [2, 2]


def test_a_tutorials_setup_and_cleanup_run_again_and_again(
    session: Session, backend: Backend
) -> None:
    """With its own port, which torch would open, and find in use the second time."""
    session.execute(
        "import os\n"
        "before = dict(os.environ)\n"
        "def setup(rank, world_size):\n"
        "    os.environ['MASTER_ADDR'] = 'localhost'\n"
        "    os.environ['MASTER_PORT'] = '12355'\n"
        f"    dist.init_process_group('{backend}', rank=rank, world_size=world_size)\n"
        "def demo(rank, world_size):\n"
        "    setup(rank, world_size)\n"
        "    t = torch.ones(1)\n"
        "    dist.all_reduce(t)\n"
        "    dist.destroy_process_group()\n"
        "    return t.item()\n"
    )
    for _ in range(20):
        session.execute("got = demo(rank, world_size)", timeout=30)
        assert list(session.evaluate("got").values()) == [2, 2]
    session.execute("os.environ.update(before)")


def test_without_a_group_the_status_says_so_and_how_to_get_one(
    session: Session, backend: Backend
) -> None:
    with pytest.raises(RunError) as raised:
        session.execute(f"dist.destroy_process_group()\n{SUM}")
    assert "the next run has the session's" in "\n".join(raised.value._render_traceback_())
    session.execute("dist.destroy_process_group()")
    assert "no process group on ranks 0-1" in session.status()
    assert "the next run has the session's group again" in session.status()
    assert "idle" not in session.status()
    assert total(session) == [2, 2]
    assert f"idle (2 ranks, {backend})" in session.status()


def test_a_group_that_is_destroyed_on_some_ranks_comes_back_on_all(session: Session) -> None:
    session.execute("if rank == 1:\n    dist.destroy_process_group()")
    assert "no process group on rank 1" in session.status()
    assert total(session) == [2, 2]
    session[0].execute("dist.destroy_process_group()")
    assert dict(session[1].evaluate("dist.is_initialized()")) == {1: True}
    assert total(session) == [2, 2]


def test_all_go_on_with_a_group_that_some_had_destroyed(session: Session, backend: Backend) -> None:
    for who in ("rank == 0", "rank == 1"):
        session.execute(f"if {who}:\n    dist.destroy_process_group()")
        session.execute(f"dist.init_process_group('{backend}')\n{SUM}", timeout=60)
        assert list(session.evaluate("t.item()").values()) == [2, 2]


def test_a_group_given_back_gives_way_to_one_that_code_makes(
    session: Session, output: Recorder, backend: Backend
) -> None:
    session.execute("dist.destroy_process_group()\nfrom datetime import timedelta")
    output.clear()
    session.execute(f"dist.init_process_group('{backend}', timeout=timedelta(seconds=77))\n{SUM}")
    assert "in a process group already" not in output.text(0, "stderr")
    assert list(session.evaluate("t.item()").values()) == [2, 2]
    assert "idle (2 ranks" in session.status()


@only("device", "gloo connects to gloo, however it was asked for")
def test_a_rank_that_is_replaced_meets_the_others_in_the_sessions_group(
    start: Callable[..., Session], backend: Backend
) -> None:
    """It knows nothing of the group that code on the others has made in another way."""
    session = start(2, **backend.options(2))
    session.execute("kept = rank")
    both = f"'cpu:gloo,{backend.device}:{backend}'"
    for call in ("'gloo'", both, "device_id=device"):
        session.execute(
            f"dist.destroy_process_group()\ndist.init_process_group({call})", timeout=LIMIT_S
        )
        session.reconnect()  # of ranks that all know it
        session.restart([1])
        assert total(session) == [2, 2], call
        assert dict(session[0].evaluate("kept")) == {0: 0}
        made = dict(session.evaluate("dist.group.WORLD.recipe.backends"))
        assert list(made.values()) == [{backend.device: backend.name}] * 2, call


def test_what_holds_the_group_goes_on_after_a_reconnect(session: Session) -> None:
    session.execute("ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))")
    session.reconnect()
    session.execute("ddp(torch.ones(1, 2) * (rank + 1)).sum().backward()")
    gradients = session.evaluate("ddp.module.weight.grad.tolist()")
    assert list(gradients.values()) == [[[1.5, 1.5]]] * 2


KINDS = """
import time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import distsession.distributed as dd
if device.type != "cpu":  # only then can a group be split
    dist.destroy_process_group()
    dist.init_process_group(device_id=device)
mesh = init_device_mesh(device.type, (1, 2), mesh_dim_names=("one", "two"))
whole = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh["two"], [Shard(0)])
groups = {
    "new": dist.new_group([0, 1]),
    "own": dist.new_group([rank], use_local_synchronization=True),
    "parts": dd.split_group(1),
    "one": mesh.get_group("one"),
    "two": mesh.get_group("two"),
}
if device.type != "cpu":
    groups["split"] = dist.split_group(split_ranks=[[0, 1]])

def use():
    for group in groups.values():
        t = torch.full((3,), rank + 1.0)
        dist.all_reduce(t, group=group)
        yield t[0].item()
    yield whole.full_tensor().sum().item()
    yield whole.redistribute(mesh["two"], [Replicate()]).to_local().sum().item()
"""
STUCK_IN = ["groups['new']", "groups['parts']", "groups['two']"]


def test_groups_of_every_kind_go_on_after_a_stop_within_one(
    session: Session, backend: Backend
) -> None:
    session.execute(KINDS)
    split = [3.0] * backend.is_device
    right = {rank: [3.0, rank + 1.0, 3.0, rank + 1.0, 3.0, *split, 28.0, 28.0] for rank in (0, 1)}
    assert dict(session.evaluate("list(use())")) == right
    for group in [*STUCK_IN, *["groups['split']"] * backend.is_device]:
        code = f"if rank: time.sleep(60)\ndist.all_reduce(torch.ones(3), group={group}); FINISH"
        with Press(session, session.interrupt), pytest.raises(RunInterrupt, match="waits"):
            session.execute(backend.program(code))
        assert dict(session.evaluate("list(use())")) == right
    session.execute("dist.destroy_process_group()")


def test_a_reconnect_waits_for_nobody(session: Session) -> None:
    future = session.submit(lambda: __import__("time").sleep(60))
    with pytest.raises(SessionStateError, match=r"ranks 0-1 still run something, .* wait"):
        session.reconnect()
    session.interrupt()
    with pytest.raises(KeyboardInterrupt):
        future.result(30)


def test_a_rank_that_does_not_come_is_named_and_the_wait_ends(
    session: Session, backend: Backend
) -> None:
    session.execute("dist.destroy_process_group()")
    with pytest.raises(CollectiveHangError) as raised:
        session.execute(f"if rank == 0:\n    dist.init_process_group('{backend}')", timeout=60)
    text = "\n".join(raised.value._render_traceback_())
    assert re.search(
        "rank 1 did not set the key .rendezvous of 2 ranks at the session's port", text
    )
    assert "it finished its part without it; rank 0 waits" in text
    assert list(session.evaluate("x").values()) == [0, 10]
    assert total(session) == [2, 2]


def test_stop_ends_the_wait_and_keeps_the_variables(session: Session, backend: Backend) -> None:
    session.execute("dist.destroy_process_group()")
    code = (
        f"import time\nif rank == 0:\n    dist.init_process_group('{backend}')\n"
        "else:\n    time.sleep(60)"
    )
    stopper = threading.Thread(
        target=lambda: (
            until(lambda: "rendezvous of 2 ranks" in str(session.diagnose())),
            session.interrupt(),
        )
    )
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        session.execute(code)
    stopper.join()
    assert list(session.evaluate("x").values()) == [0, 10]
    assert total(session) == [2, 2]


def test_a_time_limit_of_ones_own_counts_and_the_next_try_works(
    session: Session, backend: Backend
) -> None:
    session.execute("dist.destroy_process_group()\nfrom datetime import timedelta")
    making = f"dist.init_process_group('{backend}', timeout=timedelta(seconds=0.3))"
    with pytest.raises(RunError, match="timeout"):
        session.execute(f"if rank == 0:\n    {making}")
    session.execute(f"dist.is_initialized() or dist.init_process_group('{backend}')", timeout=60)
    assert total(session) == [2, 2]


def test_rpc_works_beside_the_group_and_without_it(session: Session) -> None:
    code = (
        "from torch.distributed import rpc\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)\n"
        "one = torch.ones(1, device='cpu')\n"
        "got = rpc.rpc_sync(f'worker{1 - rank}', torch.add, args=(one, rank)).item()\n"
        "rpc.shutdown()"
    )
    for before in ("", "dist.destroy_process_group()\n"):
        session.execute(before + code, timeout=60)
        assert list(session.evaluate("got").values()) == [1, 2]


def test_a_group_of_some_of_the_ranks_is_given_back(
    start: Callable[..., Session], backend: Backend
) -> None:
    session = start(3, **backend.options(3))
    session.execute("dist.destroy_process_group()")
    making = f"dist.init_process_group('{backend}', rank=rank, world_size=2)"
    session[:2].execute(making, timeout=30)
    session[:2].execute(SUM)
    assert list(session[:2].evaluate("t.item()").values()) == [2, 2]
    assert "ranks 0-1 in another process group" in session.status()
    assert "session.reconnect()" in session.status()
    session.reconnect()
    assert total(session) == [3, 3, 3]


OWN = only("gloo", "that group is of torch's own gloo on each")


@OWN
def test_a_world_that_is_larger_than_the_session_is_torchs_own_affair(session: Session) -> None:
    session.execute("dist.destroy_process_group()\nfrom datetime import timedelta")
    with pytest.raises(RunError) as raised:
        session[0].execute(
            "dist.init_process_group('gloo', 'tcp://127.0.0.1:0', rank=0, world_size=3, "
            "timeout=timedelta(seconds=1))",
            timeout=30,
        )
    assert "rendezvous of" not in str(raised.value)


@OWN
def test_a_place_that_nobody_can_meet_at_the_sessions_port_is_refused() -> None:
    with Session(2) as session:  # with its own MASTER_PORT, which other tests have changed
        for place in ("rank=rank, world_size=3", "rank=2 + rank, world_size=2"):
            session.execute("import torch.distributed as dist\ndist.destroy_process_group()")
            match = r"the session has 2 ranks|rank [23] of world_size=2"
            with pytest.raises(RunError, match=match):
                session.execute(f"dist.init_process_group('gloo', {place})", timeout=30)


@OWN
def test_processes_that_a_rank_spawns_meet_at_a_port_of_their_own(
    session: Session, tmp_path: Path, port: int
) -> None:
    (tmp_path / "spawned.py").write_text(
        "import os\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "def demo(rank, world, port, folder):\n"
        "    os.environ.update(MASTER_ADDR='localhost', MASTER_PORT=str(port))\n"
        "    dist.init_process_group('gloo', rank=rank, world_size=world)\n"
        "    t = torch.ones(1)\n"
        "    dist.all_reduce(t)\n"
        "    open(os.path.join(folder, str(rank)), 'w').write(str(t.item()))\n"
        "    dist.destroy_process_group()\n"
    )
    session[0].execute(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import spawned\n"
        "import torch.multiprocessing as mp\n"
        f"mp.spawn(spawned.demo, args=(2, {port}, {str(tmp_path)!r}), nprocs=2)",
        timeout=60,
    )
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2.0", "2.0"]


OWN_WORLD = """
import tempfile, time, traceback
import multiprocessing
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

def own(place=0, size=1, path=None, store=None):
    store = store or dist.FileStore(path or tempfile.mktemp(), size)
    dist.init_process_group("gloo", store=store, rank=place, world_size=size)

def child(code, queue):
    try:
        queue.put(str(eval(code)))
    except BaseException as error:
        queue.put(f"{type(error).__name__}: {error}")

def in_child(code):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(code, queue))
    process.start()
    said = queue.get()
    process.join()
    return said
"""
AND_SUM = f"\n{SUM}"


@OWN
@pytest.mark.parametrize(
    ("code", "left"),
    [
        (f"if rank == 0:\n    dist.destroy_process_group()\n    own(){AND_SUM}", "rank 0"),
        (f"if rank == 1:\n    dist.destroy_process_group()\n    own(){AND_SUM}", "rank 1"),
        (f"if rank == 1:\n    own(){AND_SUM}", "rank 1"),
        (f"if rank == 0:\n    dist.destroy_process_group()\nelse:\n    {SUM.splitlines()[0]}"
         "\n    dist.all_reduce(t)", "rank 0"),
        ("if rank == 0:\n    c10d._abort_process_group()\nelse:\n    dist.barrier()", "rank 0"),
        (f"if rank == 0:\n    dist.destroy_process_group()\n    dist.init_process_group(){AND_SUM}",
         "rank 0"),
        ("if rank == 0:\n    c10d.GroupMember.WORLD = None\nelse:\n    dist.barrier()", "rank 0"),
        (f"if rank == 0:\n    c10d._update_default_pg(None)\n    own(){AND_SUM}", "rank 0"),
        ("if rank == 0:\n    dist.destroy_process_group()\nelse:\n    dist.send(torch.ones(1), 0)\n"
         "    dist.recv(torch.ones(1), 0)", "rank 0"),
        ("if rank == 0:\n    dist.destroy_process_group()\nelse:\n    time.sleep(1)\n"
         "    dist.send(torch.ones(1), 0)\n    dist.recv(torch.ones(1), 0)", "rank 0"),
        ("if rank == 0:\n    dist.destroy_process_group()\nelse:\n    dist.recv(torch.ones(1))",
         "rank 0"),
        (f"if rank == 0:\n    own(store=dist.HashStore()){AND_SUM}", "rank 0"),
        ("if rank == 0:\n    dist.destroy_process_group()\n"
         f"    own(store=dist.TCPStore('127.0.0.1', 0, 1, True)){AND_SUM}", "rank 0"),
        ("if rank == 0:\n    dist.destroy_process_group()\n    dist.init_process_group('gloo', "
         f"'file://' + tempfile.mktemp(), rank=0, world_size=1){AND_SUM}", "rank 0"),
        ("if rank == 0:\n    dist.destroy_process_group()\n    dist.init_process_group('fake', "
         f"store=FakeStore(), rank=0, world_size=2){AND_SUM}", "rank 0"),
        (f"g = dist.new_group([0])\nif rank == 0:\n    c10d._update_default_pg(g){AND_SUM}",
         "rank 0"),
        (f"g = dist.new_group([1])\nif rank == 1:\n    dist.group.WORLD = g{AND_SUM}", "rank 1"),
        ("if rank == 0:\n    c10d._world.pg_map.clear()\n    c10d._update_default_pg(None)\n"
         "else:\n    dist.barrier()", "rank 0"),
        ("if rank == 1:\n    dist.destroy_process_group()\nelse:\n    dist.monitored_barrier()",
         "rank 1"),
        ("if rank == 0:\n    dist.destroy_process_group()\nelse:\n    dist.new_group([0, 1])",
         "rank 0"),
        ("if rank == 0:\n    dist.destroy_process_group()\n"
         "else:\n    dist.all_gather_object([None, None], 1)", "rank 0"),
        ("ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
         "if rank == 0:\n    dist.destroy_process_group()\n"
         "else:\n    ddp(torch.ones(1, 2)).sum().backward()", "rank 0"),
        ("with torch.no_grad():\n    if rank == 0:\n        time.sleep(1)\n"
         "        dist.destroy_process_group()\n    else:\n"
         "        dist.all_reduce(torch.ones(1), async_op=True).wait()", "rank 0"),
    ],
)  # fmt: skip
def test_a_rank_that_has_left_the_group_is_named_with_its_line(
    session: Session, code: str, left: str
) -> None:
    session.execute(OWN_WORLD)
    with pytest.raises(CollectiveHangError) as raised:
        session.execute(code, timeout=60)
    first = str(raised.value).splitlines()[0]
    assert re.match(rf"{left} left the session's group at In\[\d+\] line \d+:", first), first
    assert list(session.evaluate("x").values()) == [0, 10]
    assert total(session) == [2, 2]


@OWN
def test_a_rank_that_left_in_an_earlier_run_is_named_with_that_line(session: Session) -> None:
    session.execute(OWN_WORLD)
    session.execute("if rank == 1:\n    own()")
    assert "rank 1 in another process group" in session.status()
    with pytest.raises(CollectiveHangError, match="rank 1 left the session's group at In"):
        session.execute(SUM, timeout=60)
    assert total(session) == [2, 2]


@OWN
def test_a_member_that_has_destroyed_its_group_is_named(session: Session) -> None:
    session.execute("g = dist.new_group([0, 1])")
    code = (
        "if rank == 0:\n    dist.destroy_process_group(g)\n"
        "else:\n    dist.all_reduce(torch.ones(1), group=g)"
    )
    with pytest.raises(CollectiveHangError, match=r"rank 0 left group \S+ \(ranks 0-1\) at In"):
        session.execute(code, timeout=60)
    assert total(session) == [2, 2]


@OWN
def test_several_that_have_left_are_named_together(start: Callable[..., Session]) -> None:
    session = start(3)
    left = "if rank < 2:\n    dist.destroy_process_group()\n"
    pair = "    dist.init_process_group('gloo', rank=rank, world_size=2)\n    dist.barrier()\n"
    for code in (left, left + pair):
        with pytest.raises(CollectiveHangError, match="ranks 0-1 left the session's group at In"):
            session.execute(f"{code}else:\n    dist.barrier()", timeout=60)
        assert total(session) == [3, 3, 3]
    session.execute("g = dist.new_group([0, 1])")
    code = "if rank == 0:\n    dist.destroy_process_group()\nelif rank == 1:\n    dist.barrier(g)"
    with pytest.raises(CollectiveHangError, match=r"rank 0 left group \S+ \(ranks 0-1\) at In"):
        session.execute(code, timeout=60)
    assert total(session) == [3, 3, 3]


@OWN
def test_worlds_of_other_ranks_are_not_taken_for_the_sessions(
    session: Session, tmp_path: Path
) -> None:
    session.execute(OWN_WORLD)
    # Each is rank 0 of a world of its own, and comes to operations at other times.
    session.execute(
        "dist.destroy_process_group()\nown()\nt = torch.full((2,), 1.0 + rank)\n"
        "if rank:\n    dist.all_reduce(t)\n    dist.barrier()\n"
        "g = dist.new_group([0])\ndist.broadcast(t, 0, group=g)\ngot = t[0].item()",
        timeout=60,
    )
    assert list(session.evaluate("got").values()) == [1, 2]
    session.reconnect()
    # The ranks of that world are numbered the other way round.
    session.execute(
        "dist.destroy_process_group()\n"
        f"own(1 - rank, 2, {str(tmp_path / 'store')!r})\n"
        "t = torch.full((1,), 1.0 + rank)\ndist.broadcast(t, 0)\n"
        "g = dist.new_group([0])\n"
        "if rank == 1:\n    dist.all_reduce(torch.ones(1), group=g)\n"
        "dist.barrier()",
        timeout=60,
    )
    assert list(session.evaluate("t.item()").values()) == [2, 2]
    session.reconnect()
    # A rank that has been in others is in step with the rest all the same.
    session.execute(
        "if rank == 0:\n    dist.destroy_process_group()\n    own()\n"
        "dist.destroy_process_group()\ndist.init_process_group('gloo')\n" + SUM,
        timeout=60,
    )
    assert list(session.evaluate("t.item()").values()) == [2, 2]


@OWN
def test_a_call_with_a_store_of_its_own_makes_a_world_of_its_own(
    session: Session, output: Recorder
) -> None:
    session.execute(OWN_WORLD)
    output.clear()
    session.execute(f"import warnings; warnings.simplefilter('always')\nown(){AND_SUM}")
    assert "leaves it for its own" in output.text(0, "stderr")
    assert list(session.evaluate("(t.item(), dist.get_world_size())").values()) == [(1, 1)] * 2
    session.execute("dist.destroy_process_group()\nhad_one = dist.is_initialized()")
    assert list(session.evaluate("had_one").values()) == [False, False]
    assert total(session) == [2, 2]
    url = "dist.init_process_group('gloo', 'file://' + tempfile.mktemp(), rank=0, world_size=1)"
    session.execute(f"{url}\nsize = dist.get_world_size()\ndist.destroy_process_group()")
    assert list(session.evaluate("size").values()) == [1, 1]


@OWN
def test_a_forked_process_is_refused_the_ranks_group_at_once(session: Session) -> None:
    session.execute(OWN_WORLD)
    uses = [
        "dist.init_process_group('gloo')",
        "own()",
        "dist.all_reduce(torch.ones(1))",
        "dist.barrier()",
        "dist.new_group([0, 1])",
        "dist.new_group([rank], use_local_synchronization=True)",
    ]
    for said in session.execute(f"[in_child(use) for use in {uses}]", fetch=True).values():
        for each in said:
            assert "CollectiveError: this process was forked from rank" in each
            assert "'spawn'" in each
    seen = "[in_child('(dist.get_rank(), dist.get_world_size())')]"
    assert session.execute(seen, fetch=True)[1] == ["(1, 2)"]
    # One that has no group, or has given up the rank's, makes its own as in a plain program.
    alone = "own(), dist.all_reduce(torch.ones(1)), dist.get_world_size()"
    code = f"[in_child({f'dist.destroy_process_group(), {alone}'!r})]"
    assert session.execute(code, fetch=True)[0] == ["(None, None, None, 1)"]
    code = f"dist.destroy_process_group()\n[in_child({alone!r})]"
    assert session.execute(code, fetch=True)[0] == ["(None, None, 1)"]
    assert total(session) == [2, 2]


LAUNCHED = """
import torch.distributed as dist

def train(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)

def train_alone(rank, world):  # as ignite does
    if dist.is_initialized():
        raise RuntimeError("Can not create new group if default one is already initialized")
"""


@OWN
@pytest.mark.parametrize(
    "launch",
    [
        "mp.start_processes(launched.train, args=(2,), nprocs=2, start_method='fork')",
        "mp.start_processes(launched.train_alone, args=(2,), nprocs=2, start_method='fork')",
        "elastic_launch(LaunchConfig(1, 1, 1, rdzv_endpoint='127.0.0.1:{port}', "
        "rdzv_backend='static', rdzv_configs={{'rank': 0}}, run_id='x'), launched.train)(0, 1)",
    ],
)
def test_code_that_starts_ranks_on_ranks_is_told_in_one_line(
    session: Session, tmp_path: Path, port: int, launch: str
) -> None:
    (tmp_path / "launched.py").write_text(LAUNCHED)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RunError) as raised:
        session.execute(
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
            "import launched\n"
            "import torch.multiprocessing as mp\n"
            "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
            + launch.format(port=port),
            timeout=60,
        )
    lines = str(raised.value).splitlines()
    assert "the ranks are these processes already: call train" in lines[0]
    assert len("\n".join(raised.value._render_traceback_()).splitlines()) < 15
    assert total(session) == [2, 2]


@pytest.mark.parametrize("restart", [[0], [0, 2], None], ids=["one", "two", "all"])
def test_groups_of_ranks_that_died_are_destroyed_with_the_rest(
    start: Callable[..., Session], backend: Backend, restart: list[int] | None
) -> None:
    session = start(3, **backend.options(3))
    session.execute("parts = [dist.new_group([0, 1]), dist.new_group([1, 2])]\n" + SUM)
    for rank in restart or [0, 1]:
        os.kill(session.infos[rank].pid, signal.SIGKILL)
    until(lambda: "dead" in session.status())
    session.restart(restart)
    assert total(session) == [3, 3, 3]
    if restart is not None:  # rank 1 has groups that the new rank does not know
        call = "dist.get_backend(parts[0]), parts[0].name(), parts[0]._has_hooks()"
        assert session[1].execute(call, fetch=True)[1][0] == backend.name
        for use in ("dist.barrier(parts[0])", "parts[0]._get_sequence_number_for_group()"):
            with pytest.raises(RunError, match=r"was made before rank 0.* was replaced"):
                session[1].execute(use)
    making = f"dist.destroy_process_group()\ndist.init_process_group('{backend}')\n{SUM}"
    for _ in range(2):
        session.execute(making, timeout=60)
        assert list(session.evaluate("t.item()").values()) == [3, 3, 3]
    session.execute("dist.destroy_process_group()")
    assert total(session) == [3, 3, 3]


def test_a_reconnect_needs_all_ranks(session: Session) -> None:
    os.kill(session.infos[1].pid, signal.SIGKILL)
    until(lambda: "dead" in session.status())
    with pytest.raises(SessionStateError, match="rank 1 died and has to be replaced first"):
        session.reconnect()
    session.restart([1])
    assert total(session) == [2, 2]
