"""What torch.distributed has: each part is known here, and the new ones run as under torchrun.

A release of torch that brings another module, or another public name of those that grow, fails
``test_each_part_of_torch_distributed_is_known`` until somebody has looked at it: a program below,
which a session and torchrun run alike, or a reason why there is none.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import DeviceMesh

from distsession import Session

LIMIT_S = 240

KNOWN: dict[str, str] = {
    "torch.distributed": """
        _checkpointable _composable _composable_state _dist2 _functional_collectives
        _functional_collectives_impl _local_tensor _mesh_layout _meta_registrations _nccl4py _ops
        _pycute _serialization _shard _sharded_tensor _sharding_spec _state_dict_utils
        _symmetric_memory _tensor _token_switch _tools _transport _watchdog algorithms argparse_util
        autograd benchmarks c10d_logger checkpoint collective_utils config constants debug
        device_mesh distributed_c10d elastic flight_recorder fsdp launch launcher logging_handlers
        nn optim pipelining remote_device rendezvous rpc run tensor utils
    """,
    "torch.distributed.checkpoint": """
        _async_executor _async_process_executor _async_thread_executor _checkpointer
        _consolidate_hf_safetensors _dedup_save_plans _dedup_tensors _experimental _extension
        _fsspec_filesystem _hf_utils _nested_dict _pg_transport _sharded_tensor_utils
        _state_dict_stager _storage_utils _traverse _version api default_planner examples filesystem
        format_utils hf_storage logger logging_handlers metadata optimizer planner planner_helpers
        quantized_hf_storage resharding staging state_dict state_dict_loader state_dict_saver
        stateful storage utils
    """,
    "DeviceMesh": """
        device_type from_group get_all_groups get_coordinate get_group get_local_rank get_rank mesh
        mesh_dim_names ndim shape size
    """,
    "functional": """
        AsyncCollectiveTensor all_gather_into_tensor_coalesced all_gather_inplace
        all_gather_single all_gather_single_autograd all_gather_single_coalesced all_gather_tensor
        all_gather_tensor_autograd all_gather_tensor_inplace all_reduce all_reduce_coalesced
        all_reduce_inplace all_to_all_inplace all_to_all_single all_to_all_single_autograd
        allow_inflight_collective_as_graph_input_ctx broadcast permute_tensor reduce_scatter_single
        reduce_scatter_single_autograd reduce_scatter_single_coalesced reduce_scatter_tensor
        reduce_scatter_tensor_autograd reduce_scatter_tensor_coalesced
        reduce_scatter_tensor_inplace wait_tensor
    """,
}
"""What was there up to torch 2.13, and what has a program below or needs GPUs: ``_nccl4py`` (NCCL
in Python), ``_token_switch`` (NCCL's device API), ``_symmetric_memory``."""

NEW = {
    "torch.distributed.checkpoint": {"_fsspec_filesystem", "fsspec_filesystem", "protocol"},
    "DeviceMesh": {"abort"},
    "functional": {"batch_p2p_ops_inplace", "irecv_inplace", "isend_inplace", "wait_tensors",
                   "reduce_scatter_inplace"},
}  # fmt: skip
"""Of 2.14 and 2.15, for which there are programs."""

FUNCTIONAL = """
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _get_default_group
group, t = _get_default_group(), torch.arange(4.0) + 10 * rank
wait = functional.wait_tensor
result = {
    "all_reduce": wait(functional.all_reduce(t, "sum", group)).tolist(),
    "broadcast": wait(functional.broadcast(t, 1, group)).tolist(),
    "permute": wait(functional.permute_tensor(t, [1, 0], group)).tolist(),
}
for name, more in {
    "all_gather_single": (0, group),
    "reduce_scatter_single": ("sum", 0, group),
    "all_gather_tensor": (0, group),
    "reduce_scatter_tensor": ("sum", 0, group),
}.items():
    if hasattr(functional, name):
        result[name] = wait(getattr(functional, name)(t, *more)).tolist()
if hasattr(functional, "all_gather_single_coalesced"):
    for each in functional.all_gather_single_coalesced([t, t + 1], group):
        result.setdefault("gathered together", []).append(wait(each).tolist())
    together = functional.reduce_scatter_single_coalesced([t, t + 1], "sum", [0, 0], group)
    for each in together:
        result.setdefault("reduced together", []).append(wait(each).tolist())
"""
INPLACE = """
import torch.distributed._functional_collectives as functional
t = torch.arange(2.0) + 10 * rank
out = torch.empty(2)
functional.reduce_scatter_inplace(out, [t, t + 1])
got = torch.empty(2)
if rank == 0:
    works = [functional.isend_inplace(t, 1), functional.irecv_inplace(got, 1)]
else:
    works = [functional.irecv_inplace(got, 0), functional.isend_inplace(t, 0)]
functional.wait_tensors([each for each in works if isinstance(each, torch.Tensor)])
result = {"scattered": out.tolist(), "received": got.tolist()}
"""
LOCAL = """
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _get_default_group
parts = {r: torch.full((2,), float(r + 1)) for r in range(world_size)}
with LocalTensorMode(world_size):
    t = LocalTensor(parts)
    summed = functional.wait_tensor(functional.all_reduce(t * 2, "sum", _get_default_group()))
result = {str(r): each.tolist() for r, each in summed._local_tensors.items()}
t = torch.ones(1)
dist.all_reduce(t)
result["after it"] = t.tolist()
"""
LOCAL_IN_PLACE = """
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
parts = {r: torch.full((2,), float(r + 1)) for r in range(world_size)}
with LocalTensorMode(world_size):
    t = LocalTensor(parts)
    dist.all_reduce(t)
result = {str(r): each.tolist() for r, each in t._local_tensors.items()}
"""
TRANSPORT = """
from torch.distributed._transport import Transport, new_transport_rank, register_transport

class ByStore(Transport):  # only meets: what it would carry is up to a library that is not there
    peer = None
    @staticmethod
    def supported():
        return True
    def bind(self, *, timeout=None):
        return f"rank {dist.get_rank()}".encode()
    def connect(self, peer_url, *, timeout=None):
        self.peer = peer_url.decode()
        return 0
    def connected(self):
        return self.peer is not None
    def register_memory(self, tensor, *, timeout=None):
        raise NotImplementedError
    def write(self, local_buffer, remote_buffer, *, async_op=False, timeout=None):
        raise NotImplementedError
    def read(self, local_buffer, remote_buffer, *, async_op=False, timeout=None):
        raise NotImplementedError
    def close(self, *, timeout=None):
        self.peer = None

for name in ByStore.__abstractmethods__:
    setattr(ByStore, name, lambda self, *args, **named: None)
ByStore.__abstractmethods__ = frozenset()
register_transport("bystore", ByStore)
found = [new_transport_rank("bystore", "cpu", peer_rank=1 - rank) for _ in range(2)]
result = [each.peer for each in found]
"""
WATCHDOG = """
import threading
from torch.distributed import _watchdog
fired = threading.Event()
_watchdog.init(poll_interval=0.05)
_watchdog.cpu_timeout(0.1, fired.set)
handle = _watchdog.cpu_timeout(600.0, lambda: None)
dist.barrier()
handle.cancel()
result = fired.wait(30)
_watchdog.shutdown()
"""
CHECKPOINT = """
import os, shutil, tempfile
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate, distribute_tensor
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder, 0)
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("all",))
whole = torch.arange(12.0).reshape(4, 3)
state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(7)}
dcp.save(state, checkpoint_id=os.path.join(folder[0], "now"))
dcp.async_save(state, checkpoint_id=os.path.join(folder[0], "later")).result()
result = {}
for name in ("now", "later"):
    read = {"w": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]), "step": torch.tensor(0)}
    dcp.load(read, checkpoint_id=os.path.join(folder[0], name))
    result[name] = [read["w"].to_local().tolist(), read["step"].item()]
if hasattr(dcp, "FsspecWriter"):
    try:
        import fsspec
    except ImportError:
        pass
    else:
        at = os.path.join(folder[0], "fsspec")
        dcp.save(state, storage_writer=dcp.FsspecWriter(at))
        read = {"w": distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()])}
        dcp.load(read, storage_reader=dcp.FsspecReader(at))
        result["fsspec"] = read["w"].to_local().tolist()
dist.barrier()
if rank == 0:
    shutil.rmtree(folder[0])
"""
MESH = """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("one", "all"))
t = torch.ones(1)
dist.all_reduce(t, group=mesh["all"].get_group())
result = [t.item(), dist.is_initialized()]
mesh.abort()
try:
    dist.all_reduce(t, group=mesh["all"].get_group())
except Exception as error:
    result.append("refused")
"""

PROGRAMS = {
    "functional": (FUNCTIONAL, ""),
    "functional in place": (INPLACE, "_functional_collectives.reduce_scatter_inplace"),
    "local tensors": (LOCAL, "_local_tensor"),
    "local tensors in place": (LOCAL_IN_PLACE, "_local_tensor"),
    "transport": (TRANSPORT, "_transport"),
    "watchdog": (WATCHDOG, "_watchdog"),
    "checkpoint": (CHECKPOINT, ""),
    "mesh": (MESH, "device_mesh.DeviceMesh.abort"),
}
"""Each program, and what it needs of torch.distributed; all leave ``result``."""

SCRIPT = """
import json, os, sys, traceback
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
names = {"torch": torch, "dist": dist, "rank": rank, "world_size": world_size}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), names)
with open(f"{sys.argv[2]}.{rank}", "w") as said:
    json.dump(names["result"], said)
os._exit(0)
"""


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def modules(package: ModuleType) -> set[str]:
    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def is_there(path: str) -> bool:
    try:
        pkgutil.resolve_name(f"torch.distributed.{path}".rstrip("."))
    except (ImportError, AttributeError):
        return False
    return True


def functions() -> set[str]:
    """Of functional collectives, but for what their registration with autograd needs."""
    parts = ("_backward", "_setup_context")
    own = {
        name
        for name, member in inspect.getmembers(functional, callable)
        if getattr(member, "__module__", "") == functional.__name__
    }
    return {name for name in public(own) if not name.endswith(parts)}


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("torch.distributed", lambda: modules(dist)),
        ("torch.distributed.checkpoint", lambda: modules(checkpoint)),
        ("DeviceMesh", lambda: public(dir(DeviceMesh))),
        ("functional", functions),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_part_of_torch_distributed_is_known(part: str, found: Callable[[], set[str]]) -> None:
    unknown = found() - set(KNOWN[part].split()) - NEW.get(part, set())
    assert not unknown, f"look at what torch {torch.__version__} has, and add it here: {unknown}"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_in_a_session_what_it_does_under_torchrun(
    start: Callable[..., Session], name: str, tmp_path: Path
) -> None:
    program, needs = PROGRAMS[name]
    if needs and not is_there(needs):
        pytest.skip(f"this torch has no torch.distributed.{needs}")
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "script.py", "program.py", "said"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S / 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain = {rank: json.loads((tmp_path / f"said.{rank}").read_text()) for rank in (0, 1)}
    session = start(2, backend="gloo", threads=1)
    session.execute(program)
    said = session.evaluate("__import__('json').dumps(result)")
    assert {rank: json.loads(text) for rank, text in said.items()} == plain
    session.execute("dist.barrier()" if name != "mesh" else "1")
