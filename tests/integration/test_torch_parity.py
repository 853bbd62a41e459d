"""What code can see of torch on ranks, beside plain processes that run the same code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsession import Session
from tests.ports import held_port

PLAIN = """
import json, os, pathlib, sys
import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), 2
folder = pathlib.Path(sys.argv[1])
for name, code in json.loads((folder / "codes").read_text()).items():
    place = f"file://{folder / name}.store"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size)
    names = {"torch": torch, "dist": dist, "rank": rank, "world_size": world_size}
    exec(compile(code, name, "exec"), names)
    dist.is_initialized() and dist.destroy_process_group()
    (folder / f"{name}.{rank}").write_text(json.dumps(names["seen"]))
os._exit(0)  # gloo of a group that is still held may end the process badly
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(2, threads=1) as session:
        yield session


def on_ranks(session: Session, code: str) -> list[Any]:
    session.execute(code, timeout=100)
    return [
        json.loads(text) for text in session.evaluate("__import__('json').dumps(seen)").values()
    ]


OVERLOADS = """
from datetime import timedelta
group, limit = dist.group.WORLD, timedelta(seconds=30)
peers, seen = range(world_size), {}

def ones(): return torch.full((2,), 1.0 + rank)
def rows(): return [torch.full((2,), 1.0 + rank + each) for each in peers]

def call(text):
    one, many, whole, part, lists = ones(), rows(), torch.ones(4), torch.ones(2), [rows()]
    values = dict(one=one, many=many, whole=whole, part=part, lists=lists, limit=limit, dist=dist)
    work = eval(f"group.{text}", {"group": group}, values)
    work.wait()
    seen[text] = [part.tolist() for part in (one, *many, whole, part, *lists[0])]

MAX = "dist.ReduceOp.MAX"
for text in (
    "allreduce([one])", "allreduce(one)", "allreduce(tensors=[one])", "allreduce(tensor=one)",
    f"allreduce([one], {MAX})", f"allreduce([one], op={MAX}, timeout=limit)",
    f"allreduce(tensor=one, op={MAX})", "allreduce_coalesced([one])",
    "allreduce_coalesced(tensors=[one])",
    "broadcast([one])", "broadcast(tensors=[one])", "broadcast(one, 1)",
    "broadcast(tensor=one, root=1, timeout=limit)",
    "reduce([one])", "reduce(one, 1)", f"reduce(tensor=one, root=1, op={MAX})",
    "allgather([many], [one])", "allgather(many, one)", "allgather(many, input_tensor=one)",
    "allgather(output_tensors=[many], input_tensors=[one])",
    "allgather_coalesced(output_lists=[[each] for each in many], input_list=[one])",
    "_allgather_base(whole, one)", "_allgather_base(output=whole, input=one)",
    "allgather_into_tensor_coalesced(outputs=[whole], inputs=[one])",
    "gather(([many] if group.rank() == 0 else []), [one])",
    "gather((many if group.rank() == 1 else []), one, 1)",
    "gather(output_tensors=(many if group.rank() == 1 else []), input_tensor=one, root=1)",
    "scatter([one], ([many] if group.rank() == 0 else []))",
    "scatter(output_tensor=one, input_tensors=(many if group.rank() == 1 else []), root=1)",
    "reduce_scatter([one], [many])", "reduce_scatter(one, many)",
    f"reduce_scatter(output=one, input=many, op={MAX})",
    "_reduce_scatter_base(outputTensor=part, inputTensor=whole)",
    "reduce_scatter_tensor_coalesced(outputs=[part], inputs=[whole])",
    "alltoall_base(output=part, input=one, output_split_sizes=[], input_split_sizes=[])",
    "alltoall_base(part, one, [], [], timeout=limit)",
    "barrier()", "barrier(timeout=limit)",
    "send([one], dstRank=1, tag=3) if group.rank() == 0 else group.recv([one], srcRank=0, tag=3)",
):
    # torch 2.8 takes no limit in these forms, and its gloo no lists for the root alone.
    is_newer = "timeout" in dist.ProcessGroup.allreduce.__doc__
    if is_newer or not ("timeout" in text or "rank() == 1" in text):
        call(text)
"""
WORKS = """
t, seen = torch.ones(2), {}
others = ("exception", "is_success", "source_rank", "synchronize", "result")
def look(name, work):
    for each in ("_get_op_type", "_get_duration", "block_current_stream", "get_future", *others):
        if not hasattr(dist.Work, each):  # a torch before 2.9
            continue
        try:
            seen[f"{name}.{each}"] = str(getattr(work, each)()).partition(" object at ")[0]
        except Exception as error:
            seen[f"{name}.{each}"] = [type(error).__name__, str(error)[:60]]
work = dist.group.WORLD.allreduce([t])
work.wait()
look("all_reduce", work)
work = dist.irecv(t, 1) if rank == 0 else dist.isend(t, 0)
work.wait()
look("message", work)
work = dist.irecv(t) if rank == 0 else dist.isend(t, 0)
work.wait()
look("from_any", work)
"""
LOGGED = """
import os
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
ddp(torch.ones(1, 2)).sum().backward()
seen = dict(ddp._get_ddp_logging_data())
seen = {key: seen[key] for key in sorted(seen) if not key.endswith("_time") and "avg" not in key}
seen.pop("master_port")
"""
PROFILED = """
from torch.profiler import ProfilerActivity, profile
t = torch.ones(3)
dist.barrier()
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for source in (None, 1):
        dist.recv(t, source) if rank == 0 else dist.send(t, 0)
    dist.irecv(t).wait() if rank == 0 else dist.isend(t, 0).wait()
    dist.all_reduce(t)
found = [e for e in profiler.events() if e.name.startswith(("gloo:", "c10d::"))]
seen = sorted(
    [e.name, e.is_async, e.input_shapes if e.name.startswith("gloo:") else []] for e in found
)
"""
BACKENDS = """
import warnings
warnings.simplefilter("ignore")
class Own(dist.ProcessGroup):
    def getBackendName(self):
        return "Own"
    def allreduce(self, tensors, opts=None):
        tensors[0].add_(7)
        done = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)
def asked():
    names = ("gloo", "GLOO", "nccl", "cpu:gloo", "own", "OWN", "cpu:own", "cpu:gloo,cuda:own")
    return [dist.is_backend_available(name) for name in names]
seen = [asked()]
if not hasattr(dist.Backend, "OWN"):
    dist.Backend.register_backend("own", lambda store, rank, size, limit: Own(rank, size))
seen += [asked(), dist.get_backend(), str(dist.get_backend_config())]
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("own", rank=rank, world_size=world_size)
t = torch.ones(1)
dist.all_reduce(t)
seen += [t.item(), dist.get_backend(), dist.get_rank(), dist.get_world_size()]
dist.destroy_process_group()
"""
MEETING = """
import time
from datetime import timedelta
from torch.distributed import rendezvous
seen = []
def told(call):
    try:
        call()
    except Exception as error:
        known = "The client socket has timed out after 1000ms while trying to connect to (no.such"
        seen.append([type(error).__name__, known in str(error)])
limit = timedelta(seconds=1)
host = "no.such.host.invalid"
told(lambda: dist.TCPStore(host, 29999, 2, False, limit))
told(lambda: next(rendezvous(f"tcp://{host}:29999", rank, 2, timeout=limit)))
dist.destroy_process_group()
told(lambda: dist.init_process_group("gloo", f"tcp://{host}:29999", limit, 2, rank))
told(lambda: next(rendezvous("tcp://127.0.0.1:70000", rank, 2, timeout=limit)))
url = "tcp://127.0.0.1:PORT?use_libuv=0"
store, *rest = next(rendezvous(url, rank, 2, timeout=timedelta(seconds=30)))
seen.append([rest, store.host, store.port, store.libuvBackend])
store.set_timeout(timedelta(seconds=0.2))
for wait in (lambda: store.get("missing"), lambda: store.wait(["missing"])):
    try:
        wait()
    except Exception as error:
        seen.append([type(error).__name__, "after 200ms, keys: /" in str(error)])
seen.append(store.timeout.total_seconds())
store.add("over", 1)
while rank == 0 and store.add("over", 0) < 2:
    time.sleep(0.01)
"""


CODES = {
    "overloads": OVERLOADS,
    "works": WORKS,
    "logged": LOGGED,
    "profiled": PROFILED,
    "backends": BACKENDS,
    "meeting": MEETING,
}


@pytest.fixture(scope="module")
def codes() -> Iterator[dict[str, str]]:
    with held_port() as port:
        yield {name: code.replace("PORT", str(port)) for name, code in CODES.items()}


@pytest.fixture(scope="module")
def plain(codes: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two plain processes have written what each code has seen, with which number."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "codes").write_text(json.dumps(codes))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PLAIN, str(folder)],
            env={**os.environ, **shared, "RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=100)
            assert process.returncode == 0, said.decode()[-2000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder


@pytest.mark.parametrize("name", CODES)
def test_ranks_see_what_plain_processes_see(
    session: Session, codes: dict[str, str], plain: Path, name: str
) -> None:
    expected = [json.loads((plain / f"{name}.{rank}").read_text()) for rank in range(2)]
    assert on_ranks(session, codes[name]) == expected
    session.execute("t = torch.ones(1)\ndist.all_reduce(t)")
    assert list(session.evaluate("t.item()").values()) == [2, 2]
