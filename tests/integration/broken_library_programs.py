"""Broken programs that use torch's libraries wrongly, after public bug reports.

Models, checkpoints, meshes, pipelines, loaders, groups and arguments of operations; see
:mod:`tests.integration.broken_programs`. The file is long because it is a list of programs.
"""

from __future__ import annotations

from tests.integration.broken_program import Program, stops

__all__ = ["LIBRARY_PROGRAMS"]

ALL = "ranks 0-3"
RAISES = "(Value|Type|Runtime|Index|Key|NotImplemented)Error"
BUT_0 = "ranks 1-3"

MODELS = {
    "sharded weights that rank 0 alone collects": Program(
        "from torch.distributed.checkpoint.state_dict import *\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "net = fully_shard(nn.Linear(8, 8))\n"
        "options = StateDictOptions(full_state_dict=True)\n"
        "if rank == 0: weights = get_model_state_dict(net, options=options)",
        what="all_gather", line=5, who=BUT_0,
    ),
    "weights of rank 0 that one rank does not take": Program(
        "from torch.distributed.checkpoint.state_dict import *\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "net = fully_shard(nn.Linear(8, 8))\n"
        "options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)\n"
        "weights = nn.Linear(8, 8).state_dict() if rank == 0 else {}\n"
        "if not odd: set_model_state_dict(net, weights, options=options)",
        what="broadcast|scatter|all_gather", line=6,
    ),
    "layers that one rank shards together": Program(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "if not odd: fully_shard(net[0])\n"
        "fully_shard(net)\n"
        "net(x)",
        what="all_gather", line=5,
    ),
    "a sharded layer that one rank has frozen": Program(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "net[1].requires_grad_(not odd)\n"
        "fully_shard(net)\n"
        "net(x.requires_grad_()).sum().backward()",
        what="reduce_scatter", line=5,
    ),
    "sharded gradients that one rank does not share": Program(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = fully_shard(nn.Linear(4, 4))\n"
        "net.set_requires_gradient_sync(not odd)\n"
        "net(x).sum().backward()",
        what="reduce_scatter", line=4,
    ),
    "whole parameters that rank 0 alone looks at": Program(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "net = FSDP(nn.Linear(4, 4), device_id=torch.device('cpu'))\n"
        "if rank == 0:\n"
        "    with FSDP.summon_full_params(net): print(net.weight.norm())",
        what="all_gather", line=4, who=BUT_0,
    ),
    "a whole state dict that the first rank alone saves": Program(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n"
        "net = FSDP(nn.Linear(4, 4), device_id=torch.device('cpu'))\n"
        "with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT):\n"
        "    if rank == 0: torch.save(net.state_dict(), os.devnull)",
        what="all_gather", line=4, who=BUT_0,
    ),
    "a graph that was said to be static": Program(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b, self.step = nn.Linear(4, 4), nn.Linear(4, 4), 0\n"
        "    def forward(self, t):\n"
        "        self.step += 1\n"
        "        return self.b(self.a(t)) if self.step == 1 else self.a(t)\n"
        "net = DDP(Net(), static_graph=True)\n"
        "for _ in range(3): net(x).sum().backward()",
        what="RuntimeError", line=9, who=ALL,
    ),
    "a model without parameters": Program(
        "DDP(nn.Flatten())", what="RuntimeError", who=ALL
    ),
    "an attribute of the wrapped model": Program(
        "net = model()\nprint(net.weight.norm())", what="AttributeError.*weight", line=2, who=ALL
    ),
    "weights that were saved unwrapped": Program(
        "net = model()\nnet.load_state_dict(nn.Linear(4, 4).state_dict())",
        what="RuntimeError.*(Missing|loading state_dict)", line=2, who=ALL,
    ),
    "a batch norm that wants a GPU": Program(
        "net = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(\n"
        "    nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))\n"
        "net(x)",
        what=RAISES, line=1, who=ALL,
    ),
    "a loss that is reduced among inputs that are joined": Program(
        "net = model()\n"
        "with net.join():\n"
        "    for _ in range(2 + odd):\n"
        "        net(x).sum().backward()\n"
        "        dist.all_reduce(torch.ones(1))",
        line=(2, 3, 4, 5), who="ranks? (0-1,3|2)",
    ),
    "a hook of DDP that fails on one rank": Program(
        "def hook(state, bucket):\n"
        "    if odd: raise ArithmeticError('overflow')\n"
        "    future = torch.futures.Future()\n"
        "    dist.all_reduce(bucket.buffer())\n"
        "    future.set_result(bucket.buffer())\n"
        "    return future\n"
        "net = model()\n"
        "net.register_comm_hook(None, hook)\n"
        "net(x).sum().backward()",
        what="ArithmeticError.*overflow", line=(2, 9),
    ),
    "a class that one rank has not heard of": Program(
        "net = DDP(nn.Embedding(4, 2))\n"
        "net(torch.tensor([5 if odd else 1])).sum().backward()",
        what="IndexError", line=2,
    ),
    "a label out of range": Program(
        "net = model()\n"
        "labels = torch.tensor([0, 4 if odd else 3])\n"
        "nn.functional.cross_entropy(net(x), labels).backward()",
        what="IndexError", line=3,
    ),
    "an input of another precision": Program(
        "net = model()\nnet(x.double() if odd else x).sum().backward()",
        what="RuntimeError.*dtype", line=2,
    ),
    "a second backward": Program(
        "loss = model()(x).exp().sum()\nfor _ in range(2): loss.backward()",
        what="RuntimeError.*second time", line=2, who=ALL,
    ),
    "a gradient that is not a number": Program(
        "with torch.autograd.detect_anomaly(check_nan=True):\n"
        "    t = torch.tensor([0.0 if odd else 1.0], requires_grad=True)\n"
        "    (t.sqrt() * 0).sum().backward()\n"
        "dist.all_reduce(t.grad)",
        what="RuntimeError.*nan", line=3,
    ),
    "an optimizer with other groups": Program(
        "net = nn.Linear(2, 2)\n"
        "saved = torch.optim.Adam([net.weight] if odd else net.parameters()).state_dict()\n"
        "torch.optim.Adam(net.parameters()).load_state_dict(saved)\n"
        "dist.barrier()",
        what="ValueError", line=3,
    ),
    "an optimizer whose hook reduces on rank 0": Program(
        "net = nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "def log(*_): dist.all_reduce(torch.ones(1))\n"
        "if rank == 0: optimizer.register_step_post_hook(log)\n"
        "net(x).sum().backward()\n"
        "optimizer.step()",
        line=(3, 6), who=BUT_0,
    ),
    "a hook before the forward that refuses an input": Program(
        "def check(module, args):\n"
        "    if odd: raise ValueError('the batch is empty')\n"
        "net = model()\n"
        "net.register_forward_pre_hook(check)\n"
        "net(x).sum().backward()",
        what="ValueError.*the batch is empty", line=(2, 5),
    ),
    "a step that only some compile and call": Program(
        "@torch.compile(backend='eager')\n"
        "def step(t):\n"
        "    return functional.all_reduce(t * 2, 'sum', other).sum()\n"
        "if not odd: step(torch.ones(3)).item()",
        line=(1, 2, 3, 4),
    ),
}  # fmt: skip

CHECKPOINTS = {
    "a checkpoint that lacks a key": Program(
        "import torch.distributed.checkpoint as dcp\n"
        "path = [tempfile.mkdtemp()]\n"
        "dist.broadcast_object_list(path, 0)\n"
        "dcp.save({'weight': some}, checkpoint_id=path[0])\n"
        "dcp.load({'weight': torch.zeros(4), 'bias': torch.zeros(4)}, checkpoint_id=path[0])",
        what="CheckpointException|RuntimeError", line=5, who=ALL,
    ),
    "a checkpoint that is not there": Program(
        "import torch.distributed.checkpoint as dcp\n"
        "dcp.load({'weight': torch.zeros(4)}, checkpoint_id='/no/such/checkpoint')",
        what="CheckpointException", line=2, who=ALL,
    ),
    "a folder that each rank makes for itself": Program(
        "import torch.distributed.checkpoint as dcp\n"
        "path = tempfile.mkdtemp()\n"
        "dcp.save({f'weight{rank}': some}, checkpoint_id=path)\n"
        "dcp.load({f'weight{rank}': some}, checkpoint_id=path)",
        what="CheckpointException|FileNotFoundError|RuntimeError", line=4, who="ranks? [01]",
    ),
    "a tensor that does not fit what was saved": Program(
        "import torch.distributed.checkpoint as dcp\n"
        "path = [tempfile.mkdtemp()]\n"
        "dist.broadcast_object_list(path, 0)\n"
        "dcp.save({'weight': some}, checkpoint_id=path[0])\n"
        "dcp.load({'weight': torch.zeros(5 if odd else 4)}, checkpoint_id=path[0])",
        what="ValueError.*Size mismatch", line=5,
    ),
    "a read before the first rank has written": Program(
        "path = '/no/such/folder/weights.pt'\n"
        "if rank: torch.load(path)\n"
        "dist.barrier()",
        what="FileNotFoundError", line=2, who=BUT_0,
    ),
    "a file that one rank finds empty": Program(
        "import io\n"
        "file = io.BytesIO()\n"
        "if not odd: torch.save(some, file); file.seek(0)\n"
        "dist.broadcast(torch.load(file), 0)",
        what="EOFError", line=4,
    ),
    "a file with classes that are not trusted": Program(
        "import io\n"
        "class Settings: pass\n"
        "file = io.BytesIO()\n"
        "torch.save(Settings(), file); file.seek(0)\n"
        "torch.load(file, weights_only=True)",
        what="UnpicklingError", line=5, who=ALL,
    ),
}  # fmt: skip

MESHES = {
    "parts of a DTensor that have other sizes": Program(
        "from torch.distributed import tensor as dt\n"
        "mesh = dist.init_device_mesh('cpu', (4,))\n"
        "part = torch.ones(3 if odd else 2, 2)\n"
        "dt.DTensor.from_local(part, mesh, [dt.Shard(0)]).full_tensor().sum().item()",
        what="all_gather", line=4,
    ),
    "a DTensor beside a tensor": Program(
        "from torch.distributed import tensor as dt\n"
        "mesh = dist.init_device_mesh('cpu', (4,))\n"
        "dt.distribute_tensor(torch.ones(8), mesh, [dt.Shard(0)]) + torch.ones(8)",
        what="RuntimeError.*mixed", line=3, who=ALL,
    ),
    "a DTensor that rank 0 alone prints whole": Program(
        "from torch.distributed import tensor as dt\n"
        "mesh = dist.init_device_mesh('cpu', (4,))\n"
        "whole = dt.distribute_tensor(torch.ones(8), mesh, [dt.Shard(0)])\n"
        "if rank == 0: print(whole.full_tensor().sum().item())",
        what="all_gather", line=4, who=BUT_0,
    ),
    "a sum of parts that one rank does not ask for": Program(
        "from torch.distributed import tensor as dt\n"
        "mesh = dist.init_device_mesh('cpu', (4,))\n"
        "parts = dt.DTensor.from_local(torch.ones(2), mesh, [dt.Partial()])\n"
        "if not odd: parts.redistribute(mesh, [dt.Replicate()]).to_local().tolist()",
        line=4,
    ),
    "layers that one rank splits another way": Program(
        "from torch.distributed.tensor.parallel import *\n"
        "mesh = dist.init_device_mesh('cpu', (4,))\n"
        "style = RowwiseParallel() if odd else ColwiseParallel()\n"
        "net = parallelize_module(nn.Linear(8, 4), mesh, style)",
        what="all_gather|all_reduce|reduce_scatter|scatter|broadcast", line=4,
    ),
    "a mesh for more ranks than there are": Program(
        "mesh = dist.init_device_mesh('cpu', (3, 2))", what=RAISES, who=ALL
    ),
    "a dimension that a mesh does not have": Program(
        "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        "dist.all_reduce(some, group=mesh['pp'].get_group())",
        what="KeyError", line=2, who=ALL,
    ),
    "a mesh over some ranks that only these make": Program(
        "from torch.distributed.device_mesh import DeviceMesh\n"
        "if rank < 2: mesh = DeviceMesh('cpu', [0, 1])",
        what="all_gather|new_group|broadcast|barrier", line=2, who="ranks 2-3",
    ),
    "a pipeline with another number of micro-batches": Program(
        "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\n"
        "stage = PipelineStage(nn.Linear(4, 4), rank, 4, torch.device('cpu'))\n"
        "schedule = ScheduleGPipe(stage, 2 if odd else 4)\n"
        "schedule.step(*[torch.ones(8, 4)] * (rank == 0))",
        what="send|recv|Error", line=4, who="rank",
    ),
    "a pipeline whose stages do not fit": Program(
        "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\n"
        "stage = PipelineStage(nn.Linear(5 if odd else 4, 4), rank, 4, torch.device('cpu'))\n"
        "schedule = ScheduleGPipe(stage, 4)\n"
        "schedule.step(*[torch.ones(8, 4)] * (rank == 0))",
        what="RuntimeError", line=4,
    ),
    "a pipeline whose last stage gets no target": Program(
        "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\n"
        "stage = PipelineStage(nn.Linear(4, 4), rank, 4, torch.device('cpu'))\n"
        "schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)\n"
        "schedule.step(*[torch.ones(8, 4)] * (rank == 0))",
        what="Error", line=4, who="rank 3",
    ),
    "a stage that takes no step": Program(
        "from torch.distributed.pipelining import PipelineStage, Schedule1F1B\n"
        "stage = PipelineStage(nn.Linear(4, 4), rank, 4, torch.device('cpu'))\n"
        "schedule = Schedule1F1B(stage, 4)\n"
        "if not odd: schedule.step(*[torch.ones(8, 4)] * (rank == 0))",
        what="send|recv", line=4,
    ),
}  # fmt: skip

LOADERS = {
    "a metric whose list is empty on one rank": Program(
        "states = [] if odd else [torch.ones(2)]\n"
        "for state in states:\n"
        "    dist.barrier()\n"
        "    dist.all_gather([torch.empty(2) for _ in range(4)], state)\n"
        "dist.all_reduce(torch.ones(1))",
        what="barrier|all_reduce", line=(3, 5),
    ),
    "a metric with as many tensors as there were updates": Program(
        "boxes = [torch.ones(1, 4)] * (rank + 1)\n"
        "found = []\n"
        "for box in boxes:\n"
        "    dist.all_gather(parts := [torch.empty(1, 4) for _ in range(4)], box)\n"
        "    found += parts",
        what="all_gather", line=4, who="rank 0",
    ),
    "a sampler for fewer replicas than ranks": Program(
        "sampler = data.DistributedSampler(range(8), num_replicas=2, rank=rank)",
        what="ValueError.*[Ii]nvalid rank", who="ranks 2-3",
    ),
    "lines that are dealt out in turn": Program(
        "class Lines(data.IterableDataset):\n"
        "    def __iter__(self): return iter(range(10)[rank::4])\n"
        "for line in data.DataLoader(Lines()): dist.all_reduce(torch.ones(1))",
        line=3, who="ranks 2-3",
    ),
    "samples that cannot be stacked": Program(
        "samples = [torch.ones(2), torch.ones(3 if odd else 2)]\n"
        "for batch in data.DataLoader(samples, batch_size=2): dist.all_reduce(batch)",
        what="RuntimeError.*stack", line=2,
    ),
    "a loader with a limit": Program(
        "class Slow(data.Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, n): time.sleep(20 if odd else 0); return n\n"
        "for batch in data.DataLoader(Slow(), num_workers=1, timeout=1): dist.all_reduce(batch)",
        what="RuntimeError.*timed out", line=4,
    ),
    "a start of workers that fails": Program(
        "def begin(worker):\n"
        "    if odd: raise PermissionError('no access to the shards')\n"
        "for batch in data.DataLoader(range(2), num_workers=1, worker_init_fn=begin):\n"
        "    dist.all_reduce(batch)",
        what="PermissionError", line=2,
    ),
    "a function that collates and fails": Program(
        "def collate(batch): return torch.tensor([{'label': 1}[key] for key in batch])\n"
        "keys = ['label', 'labels' if odd else 'label']\n"
        "for batch in data.DataLoader(keys, collate_fn=collate, num_workers=1):\n"
        "    dist.all_reduce(batch)",
        what="KeyError.*labels", line=1,
    ),
    "a loader that cannot be counted": Program(
        "class Stream(data.IterableDataset):\n"
        "    def __iter__(self): return iter(range(4))\n"
        "steps = torch.tensor(len(data.DataLoader(Stream())))\n"
        "dist.all_reduce(steps)",
        what="TypeError", line=3, who=ALL,
    ),
    "a worker that never answers": stops(
        "class Stuck(data.Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, n): time.sleep(30 if odd else 0); return n\n"
        "for batch in data.DataLoader(Stuck(), num_workers=1): dist.all_reduce(batch)",
        4, "DataLoader|all_reduce.*line 4.*rank 2",
    ),
    "a thread that loads and has died": stops(
        "batches = queue.Queue()\n"
        "def load():\n"
        "    with contextlib.suppress(KeyError): batches.put({}['x'] if odd else some)\n"
        "threading.Thread(target=load).start()\n"
        "dist.all_reduce(batches.get())",
        5, "batches.get|all_reduce.*line 5.*rank 2",
    ),
}  # fmt: skip

ARGUMENTS = {
    "a name that does not exist": Program(
        "dist.allreduce(some)", what="AttributeError.*allreduce", who=ALL
    ),
    "a list in place of a tensor": Program(
        "dist.all_reduce([some])", what=RAISES, who=ALL
    ),
    "numbers in place of tensors": Program(
        "dist.all_gather([0] * 4, rank)", what=RAISES, who=ALL
    ),
    "a GPU that is not there": Program(
        "t = torch.ones(2, device='cuda:9' if odd else 'cpu')\ndist.all_reduce(t)",
        what="(Runtime|Assertion)Error",
    ),
    "a type that gloo does not know": Program(
        "dist.all_reduce(torch.ones(2, dtype=torch.int16))", what=RAISES, who=ALL
    ),
    "a group that is a list": Program(
        "dist.all_reduce(some, group=[0, 1])", what="Error", who=ALL
    ),
    "a gather whose root has no list": Program(
        "dist.gather(some, dst=0)", what="ValueError", who="rank 0"
    ),
    "a gather into too few": Program(
        "parts = [torch.empty(4) for _ in range(3 if odd else 4)]\ndist.all_gather(parts, some)",
        what=RAISES, line=2,
    ),
    "a gather into a tensor that is too small": Program(
        "dist.all_gather_into_tensor(torch.empty(8), some)", what=RAISES, who=ALL
    ),
    "a gather of objects into too few": Program(
        "dist.all_gather_object([None] * 2, rank)", what="IndexError|ValueError", who=ALL
    ),
    "objects for fewer ranks than there are": Program(
        "dist.scatter_object_list([None], [1, 2] if rank == 0 else None, src=0)",
        what="(Value|Runtime|Index)Error", who="rank 0",
    ),
    "a reduction to a rank that does not exist": Program(
        "dist.reduce(some, dst=4)", what=RAISES, who=ALL
    ),
    "a neighbour beyond the edge": Program(
        "work = dist.isend(torch.ones(2), rank + 1)\n"
        "if rank: dist.recv(torch.ones(2), rank - 1)",
        what=RAISES, who="rank 3",
    ),
    "a message to oneself": Program(
        "peer = rank if odd else None\nif odd: dist.send(some, peer)\ndist.barrier()",
        what="ValueError", line=2,
    ),
    "objects that are received as a tensor": Program(
        "if odd: dist.send_object_list([1], 3)\nif rank == 3: dist.recv(torch.ones(1), 2)",
        what="send|recv", line=(1, 2),
    ),
    "more objects than are received": Program(
        "if odd: dist.send_object_list([1, 2], 3)\n"
        "if rank == 3: dist.recv_object_list([None], 2)",
        what="send|recv", line=(1, 2),
    ),
    "an operation in two steps of which one rank waits wrongly": Program(
        "work = dist.all_reduce(torch.ones(4 + odd), async_op=True)\n"
        "print('goes on')\n"
        "work.wait()",
    ),
    "a work that nobody looks at": Program(
        "work = dist.all_reduce(torch.ones(4 + odd), async_op=True)\ndist.barrier()",
        line=(1, 2),
    ),
    "splits of a functional exchange": Program(
        "send = [1, 1, 1, 2] if odd else [1] * 4\n"
        "t = torch.ones(sum(send))\n"
        "functional.all_to_all_single(t, [1] * 4, send, other).tolist()",
        what="all_to_all_single", line=3,
    ),
    "a functional reduction of another size": Program(
        "t = torch.ones(8 if odd else 4)\n"
        "functional.reduce_scatter_tensor(t, 'sum', 0, other).tolist()",
        what="reduce_scatter", line=2,
    ),
    "a functional gather of which rank 0 alone wants the shape": Program(
        "def shapes(t): return functional.all_gather_tensor(t, 0, other).shape\n"
        "if rank == 0: print(shapes(some))\n"
        "dist.all_reduce(some, group=other)",
        what="all_gather", line=(1, 3), who="rank 0",
    ),
    "a batch of messages of which one peer is wrong": Program(
        "peer = (rank + 1) % 4\n"
        "ops = [dist.P2POp(dist.isend, torch.ones(2), peer),\n"
        "       dist.P2POp(dist.irecv, torch.ones(2), peer if odd else (rank - 1) % 4)]\n"
        "for work in dist.batch_isend_irecv(ops): work.wait()",
        what="send|recv", line=4, who="rank",
    ),
}  # fmt: skip

GROUPS = {
    "a member that does not exist": Program(
        "dist.new_group([0, 7])", what=RAISES, who=ALL
    ),
    "a member twice": Program(
        "dist.new_group([0, 0, 1])", what=RAISES, who=ALL
    ),
    "groups that one rank makes in another order": Program(
        "members = [[0, 1], [2, 3]]\n"
        "for ranks in reversed(members) if odd else members: dist.new_group(ranks)",
        what="new_group", line=2,
    ),
    "a local group that one member does not make": Program(
        "if odd: dist.new_group([2, 3], use_local_synchronization=True)",
        what="new_group", who="rank 3",
    ),
    "a work of a group that one is not in": Program(
        "work = dist.all_reduce(some, group=halves[0], async_op=True)\nwork.wait()",
        what="AttributeError", line=2, who="ranks 2-3",
    ),
    "subgroups of which one rank makes larger ones": Program(
        "group, groups = dist.new_subgroups(4 if odd else 2)", what="new_group"
    ),
    "a key under a prefix of one's own": Program(
        "store = dist.PrefixStore(f'run{rank}', dist.distributed_c10d._get_default_store())\n"
        "if rank == 0: store.set('address', 'x')\n"
        "store.get('address')",
        what="key '.*address'", line=3, who="ranks? (0|1-3)",
    ),
    "a key that does not come in time": Program(
        "from datetime import timedelta\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "if odd: store.wait(['checkpoint'], timedelta(seconds=1))\n"
        "dist.barrier()",
        what="checkpoint", line=3,
    ),
    "a monitored barrier to which one rank does not come": Program(
        "from datetime import timedelta\n"
        "if not odd: dist.monitored_barrier(timeout=timedelta(seconds=20))",
        what="monitored_barrier", line=2,
    ),
    "a counter that counts one rank too many": stops(
        "store = dist.PrefixStore('count', dist.distributed_c10d._get_default_store())\n"
        "store.add('n', 1)\n"
        "while store.add('n', 0) < 5: time.sleep(0.05)",
        3, "sleep|store.add", "ranks 0-3",
    ),
}  # fmt: skip

LIBRARY_PROGRAMS: dict[str, Program] = MODELS | CHECKPOINTS | MESHES | LOADERS | ARGUMENTS | GROUPS
