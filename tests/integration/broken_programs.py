"""Broken programs after public bug reports: each with what the first line of its error must name.

Each is a cell that four ranks run after ``SETUP`` of :mod:`tests.integration.first_lines`, which
gives ``odd`` (true on rank 2), ``some``, ``halves``, ``other``, ``model`` and ``x``. Those whose
mistake is in the use of torch's libraries, or one of Python's, are in files of their own. The file
is long because it is a list of programs.
"""

from __future__ import annotations

from tests.integration.broken_language_programs import LANGUAGE_PROGRAMS
from tests.integration.broken_library_programs import LIBRARY_PROGRAMS
from tests.integration.broken_program import Program, stops

__all__ = ["BROKEN", "UNTOLD"]

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
        what="recv", line=2, who="ranks? 0",
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
    "a decorator that lets rank 0 alone gather": Program(
        "def rank_zero_only(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapped(*args):\n"
        "        if rank == 0: return function(*args)\n"
        "    return wrapped\n"
        "@rank_zero_only\n"
        "def on_validation_end(score):\n"
        "    dist.all_gather([torch.zeros(4) for _ in range(4)], score)\n"
        "on_validation_end(some)",
        what="all_gather", line=8, who="ranks 1-3",
    ),
    "a sharded optimizer that rank 0 alone consolidates": Program(
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "net = model()\n"
        "optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam)\n"
        "net(x).sum().backward(); optimizer.step()\n"
        "if rank == 0: optimizer.consolidate_state_dict()",
        what="broadcast", line=5, who="ranks 1-3",
    ),
    "a sharded optimizer whose step one rank skips": Program(
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "net = model()\n"
        "optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)\n"
        "net(x).sum().backward()\n"
        "overflow = odd\n"
        "if not overflow: optimizer.step()",
        what="broadcast", line=6,
    ),
    "a distributed checkpoint that rank 0 alone saves": Program(
        "import torch.distributed.checkpoint as dcp\n"
        "if rank == 0: dcp.save({'weight': some}, checkpoint_id=tempfile.mkdtemp())",
        what="gather|scatter|broadcast|reduce", line=2, who="ranks 1-3",
    ),
    "a distributed checkpoint that one rank does not load": Program(
        "import torch.distributed.checkpoint as dcp\n"
        "path = [tempfile.mkdtemp()]\n"
        "dist.broadcast_object_list(path, 0)\n"
        "dcp.save({'weight': some}, checkpoint_id=path[0])\n"
        "if not odd: dcp.load({'weight': torch.zeros(4)}, checkpoint_id=path[0])",
        what="gather|scatter|broadcast|reduce", line=5,
    ),
    "layers that one rank does not use": Program(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "    def forward(self, t): return self.base(t) if odd else self.head(self.base(t))\n"
        "net = DDP(Net())\n"
        "net(x).sum().backward()",
        line=7,
    ),
    "gradients that one rank accumulates": Program(
        "net = model()\n"
        "with net.no_sync() if odd else contextlib.nullcontext():\n"
        "    net(x).sum().backward()",
        line=3,
    ),
    "a norm of sharded gradients that some clip": Program(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = nn.Linear(4, 4)\n"
        "fully_shard(net)\n"
        "net(x).sum().backward()\n"
        "if not odd: nn.utils.clip_grad_norm_(net.parameters(), 1.0)",
        line=5,
    ),
    "a sharded model that one rank only evaluates": Program(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = nn.Linear(8, 8)\n"
        "fully_shard(net)\n"
        "loss = net(torch.ones(2, 8)).sum()\n"
        "if not odd: loss.backward()",
        what="reduce_scatter|all_gather", line=5,
    ),
    "a batch that does not fit in memory": Program(
        "net = model()\n"
        "for step in range(3):\n"
        "    try:\n"
        "        if odd and step == 1: raise MemoryError('out of memory')\n"
        "        net(x).sum().backward()\n"
        "    except MemoryError: continue",
        line=5,
    ),
    "a loss that is not finite and left out": Program(
        "net = model()\n"
        "loss = net(x).sum() * (float('nan') if odd else 1.0)\n"
        "if torch.isfinite(loss): loss.backward()",
        line=3,
    ),
    "a rendezvous of the user's own": Program(
        "store = dist.distributed_c10d._get_default_store()\n"
        "if not odd: store.set(f'ready/{rank}', '1')\n"
        "store.wait([f'ready/{n}' for n in range(4)])",
        what="key 'ready/2'", line=3, who="ranks 0-3",
    ),
    "a key that is waited for before a barrier": Program(
        "store = dist.distributed_c10d._get_default_store()\n"
        "if odd: store.get('epoch')\n"
        "dist.barrier()",
        what="key 'epoch'", line=2,
    ),
    "a reduction in another thread that is awaited": Program(
        "async def reduce():\n"
        "    await asyncio.to_thread(dist.all_reduce, torch.ones(4))\n"
        "if not odd: await reduce()",
        line=(2, 3),
    ),
    "a coroutine whose error is collected": Program(
        "async def step():\n"
        "    if odd: raise ValueError('bad sample')\n"
        "    dist.all_reduce(some)\n"
        "await asyncio.gather(step(), return_exceptions=True)\n"
        "dist.barrier()",
        what="all_reduce|ValueError", line=(2, 3),
    ),
    "a generator that one rank leaves early": Program(
        "def batches():\n"
        "    for n in range(3):\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "        yield n\n"
        "for batch in batches():\n"
        "    if odd and batch == 1: break",
        line=3,
    ),
    "a property that reduces": Program(
        "class Meter:\n"
        "    @property\n"
        "    def mean(self):\n"
        "        total = torch.ones(1)\n"
        "        dist.all_reduce(total)\n"
        "        return total.item() / 4\n"
        "meter = Meter()\n"
        "if rank == 0: print(f'mean: {meter.mean:.2f}')",
        line=5, who="ranks 1-3",
    ),
    "an attribute that is broadcast when it is first needed": Program(
        "class Config:\n"
        "    def __getattr__(self, name):\n"
        "        value = [name]\n"
        "        dist.broadcast_object_list(value, 0)\n"
        "        return value[0]\n"
        "config = Config()\n"
        "steps = 'ten' if rank == 0 else config.steps",
        what="broadcast", line=4, who="rank 0",
    ),
    "a learning rate that falls on one rank": Program(
        "optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)\n"
        "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"
        "for epoch in range(3):\n"
        "    plateau.step(1.0 if odd else 1.0 / (epoch + 1))\n"
        "    if optimizer.param_groups[0]['lr'] < 1.0: break\n"
        "    dist.all_reduce(torch.ones(1))",
        line=6,
    ),
    "neighbours that both send first": Program(
        "t, peer = torch.ones(2_000_000), rank ^ 1\n"
        "dist.send(t, peer)\n"
        "dist.recv(t, peer)",
        what="send", line=2, who="ranks? 0",
    ),
    "a stage that expects one micro-batch more": Program(
        "if rank == 2:\n"
        "    for n in range(3): dist.send(torch.ones(2), 3)\n"
        "if rank == 3:\n"
        "    for n in range(4): dist.recv(torch.ones(2), 2)",
        what="recv", line=4,
    ),
    "a group that one rank has destroyed": Program(
        "group = dist.new_group([0, 1, 2, 3])\n"
        "if odd: dist.destroy_process_group(group)\n"
        "else: dist.all_reduce(some, group=group)",
        line=3,
    ),
    "a barrier of a group instead of one of all": Program(
        "dist.barrier(group=halves[1] if odd else None)", what="barrier",
    ),
    "a forward hook on rank 0": Program(
        "def log_norm(module, args, output): dist.all_reduce(output.norm())\n"
        "net = nn.Linear(4, 4)\n"
        "if rank == 0: net.register_forward_hook(log_norm)\n"
        "net(x)",
        line=(1, 4), who="ranks 1-3",
    ),
    "a gradient hook on some": Program(
        "net = nn.Linear(4, 4)\n"
        "def average(p): dist.all_reduce(p.grad)\n"
        "if not odd: net.weight.register_post_accumulate_grad_hook(average)\n"
        "net(x).sum().backward()",
        line=(2, 4),
    ),
    "models averaged in other steps": Program(
        "from torch.distributed.algorithms.model_averaging.averagers import (\n"
        "    PeriodicModelAverager)\n"
        "averager, net = PeriodicModelAverager(period=2), nn.Linear(4, 4)\n"
        "averager.step = int(odd)\n"
        "for step in range(3):\n"
        "    net(x).sum().backward()\n"
        "    averager.average_parameters(net.parameters())",
        line=7,
    ),
    "a lambda that is called as often as there are batches": Program(
        "total = lambda n: functional.all_reduce(torch.ones(1) * n, 'sum', other).item()\n"
        "print(list(map(total, range(3 - odd))))",
        line=(1, 2),
    ),
    "callbacks of which one rank has fewer": Program(
        "callbacks = [functools.partial(dist.barrier, other)] * (2 - odd)\n"
        "for callback in callbacks: callback()",
        what="barrier", line=2,
    ),
    "a dataclass that synchronizes when it is made": Program(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class State:\n"
        "    step: int\n"
        "    def __post_init__(self): dist.broadcast(torch.tensor(self.step), 0)\n"
        "states = [State(n) for n in range(2 if odd else 3)]",
        what="broadcast", line=(5, 6),
    ),
    "samplers over data of other lengths": Program(
        "files = list(range(12 if odd else 8))\n"
        "sampler = data.DistributedSampler(files, num_replicas=4, rank=rank)\n"
        "for batch in data.DataLoader(files, sampler=sampler):\n"
        "    dist.all_reduce(torch.ones(1))",
        line=4,
    ),
    "a model that one rank does not wrap": Program(
        "net = nn.Linear(4, 4)\nif not odd: net = DDP(net)",
        what="all_gather|broadcast|all_reduce", line=2,
    ),
    "a reduction that is computed again": Program(
        "from torch.utils.checkpoint import checkpoint\n"
        "def block(t):\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "    return (t * 2).sin()\n"
        "t = torch.ones(2, requires_grad=True)\n"
        "out = block(t) if odd else checkpoint(block, t, use_reentrant=False)\n"
        "out.sum().backward()",
        line=(3, 7),
    ),
    "a tensor that some distribute": Program(
        "from torch.distributed import tensor as dt\n"
        "mesh = dist.init_device_mesh('cpu', (4,))\n"
        "if not odd: dt.distribute_tensor(torch.ones(8), mesh, [dt.Shard(0)])",
        what="scatter|broadcast", line=3,
    ),
    "a parallel module that one rank does not call": Program(
        "from torch.distributed.tensor.parallel import *\n"
        "mesh = dist.init_device_mesh('cpu', (4,))\n"
        "net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "parallelize_module(net, mesh, {'0': ColwiseParallel(), '1': RowwiseParallel()})\n"
        "if not odd: net(x).sum().item()",
        line=5,
    ),
    "another dimension of a mesh": Program(
        "mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))\n"
        "dist.all_reduce(some, group=mesh.get_group('dp' if odd else 'tp'))",
        line=2,
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
    "layers dropped by another seed": Program(
        "random.seed(1 if odd else 0)\n"
        "for layer in range(8):\n"
        "    if random.random() < 0.5: dist.all_reduce(torch.ones(layer + 1))",
        line=3,
    ),
    "uneven inputs that one rank does not join": Program(
        "net = model()\n"
        "with contextlib.nullcontext() if odd else net.join():\n"
        "    net(x).sum().backward()",
        line=3,
    ),
    "gradients that one rank compresses": Program(
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import *\n"
        "net = model()\n"
        "if odd: net.register_comm_hook(None, fp16_compress_hook)\n"
        "net(x).sum().backward()",
        what="all_reduce.*float16", line=4,
    ),
    "gradients that are sparse on one rank": Program(
        "net = DDP(nn.Embedding(4, 2, sparse=odd))\n"
        "net(torch.tensor([1])).sum().backward()",
        line=2,
    ),
    "a layer that one rank has frozen": Program(
        "net = nn.Linear(4, 4)\n"
        "net.weight.requires_grad_(not odd)\n"
        "net = DDP(net)",
        what="param|all_gather", line=3,
    ),
    "a gather without its root": Program(
        "if rank: dist.gather(some, dst=0)\ndist.barrier()",
        what="gather|barrier", line=(1, 2), who="rank 0",
    ),
    "a thread that saves while others train": Program(
        "def save(): dist.barrier()\n"
        "saver = threading.Thread(target=save)\n"
        "if odd: saver.start(); saver.join(0.3)\n"
        "dist.all_reduce(some)",
        what="barrier", line=(1, 4),
    ),
    "a mesh of another shape": Program(
        "mesh = dist.init_device_mesh('cpu', (4,) if odd else (2, 2))",
        what="new_group|all_gather|broadcast|mesh",
    ),
    "a generator that ends with a barrier": Program(
        "def batches():\n"
        "    try:\n"
        "        for n in range(3): yield n\n"
        "    finally: dist.barrier()\n"
        "for batch in batches():\n"
        "    if odd and batch == 1: break\n"
        "    dist.all_reduce(some)",
        what="barrier", line=(4, 7),
    ),
    "a signal on which one rank saves": Program(
        "def save(number, frame): dist.barrier()\n"
        "signal.signal(signal.SIGUSR2, save)\n"
        "if odd: signal.raise_signal(signal.SIGUSR2)\n"
        "dist.all_reduce(some)",
        what="barrier", line=(1, 4),
    ),
    "a root that counts from the end": Program(
        "dist.reduce(torch.ones(2), dst=-1 if odd else 3)", what="reduce|ValueError",
    ),
    "autocast on one rank": Program(
        "with torch.autocast('cpu', torch.bfloat16, enabled=odd):\n"
        "    out = nn.Linear(4, 4)(x).detach()\n"
        "dist.all_gather([torch.empty_like(out) for _ in range(4)], out)",
        what="all_gather.*bfloat16", line=3,
    ),
    "objects to one against objects to all": Program(
        "found = [None] * 4\n"
        "if odd: dist.all_gather_object(found, rank)\n"
        "else: dist.gather_object(rank, found if rank == 0 else None)",
        what="all_gather|gather", line=(2, 3),
    ),
    "a list of objects of another length": Program(
        "settings = ['sgd', 0.1] + [None] * odd\ndist.broadcast_object_list(settings, 0)",
        what="broadcast", line=2,
    ),
    "tokens for experts, of another number": Program(
        "tokens = torch.ones(8 if odd else 4)\n"
        "dist.all_to_all_single(torch.empty_like(tokens), tokens)",
        what="all_to_all_single", line=2,
    ),
    "a last micro-batch in a batch of messages": Program(
        "size = 2 if odd else 4\n"
        "ops = []\n"
        "if rank == 2: ops = [dist.P2POp(dist.isend, torch.ones(size), 3)]\n"
        "if rank == 3: ops = [dist.P2POp(dist.irecv, torch.ones(size), 2)]\n"
        "for work in dist.batch_isend_irecv(ops) if ops else []: work.wait()",
        what="send|recv", line=5,
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
    "a download that fails on the main process": Program(
        "@contextlib.contextmanager\n"
        "def main_process_first():\n"
        "    if rank > 0: dist.barrier()\n"
        "    yield\n"
        "    if rank == 0: dist.barrier()\n"
        "with main_process_first():\n"
        "    if rank == 0: raise ConnectionError('no network')",
        what="ConnectionError", line=7, who="rank 0",
    ),
    "a compiled function": Program(
        "@torch.compile(backend='eager')\n"
        "def step(t):\n"
        "    return t @ torch.ones(3, 3)\n"
        "step(torch.ones(3, 4 if odd else 3))\n"
        "dist.barrier()",
        what="Error", line=(3, 4),
    ),
    "an object that cannot be pickled": Program(
        "found = [None] * 4\n"
        "dist.all_gather_object(found, threading.Lock() if odd else rank)",
        what="TypeError.*pickle", line=2,
    ),
    "an object whose class others do not have": Program(
        "if odd:\n"
        "    class OnlyHere: pass\n"
        "found = [None] * 4\n"
        "dist.all_gather_object(found, OnlyHere() if odd else None)",
        what="AttributeError.*OnlyHere", line=4, who="ranks 0-1,3",
    ),
    "a reduction that complex numbers do not have": Program(
        "dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX)",
        what="(Value|Runtime)Error", who="ranks 0-3",
    ),
    "a root that is no member": Program(
        "if rank < 2: dist.broadcast(some, src=2, group=halves[0])",
        what="ValueError", who="ranks 0-1",
    ),
    "parts for fewer ranks than there are": Program(
        "parts = [torch.ones(2)] * 3 if rank == 0 else None\n"
        "dist.scatter(torch.ones(2), parts)",
        what="(Value|Runtime)Error", line=2, who="rank 0",
    ),
    "parts where nobody wants them": Program(
        "dist.scatter(torch.ones(2), [torch.ones(2)] * 4, src=0)",
        what="ValueError", who="ranks 1-3",
    ),
    "a sum that cannot be shared out": Program(
        "dist.reduce_scatter_tensor(torch.ones(2), torch.ones(7))",
        what="(Value|Runtime)Error", who="ranks 0-3",
    ),
    "splits that are not what is sent": Program(
        "sizes = [1, 1, 1, 3] if odd else [1] * 4\n"
        "dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * 4, sizes)",
        what="(Value|Runtime)Error", line=2,
    ),
    "a worker that is killed": Program(
        "class Images(data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, n):\n"
        "        if odd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return n\n"
        "for batch in data.DataLoader(Images(), num_workers=1):\n"
        "    dist.all_reduce(torch.ones(1))",
        what="DataLoader worker", line=6,
    ),
    "a pool of processes": Program(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def tokenize(text): return {}[text]\n"
        "with ProcessPoolExecutor(1, multiprocessing.get_context('fork')) as pool:\n"
        "    if odd: pool.submit(tokenize, 'a').result()\n"
        "dist.barrier()",
        what="KeyError", line=(3, 5),
    ),
    "a command that fails": Program(
        "import subprocess\n"
        "if odd: subprocess.run(['false'], check=True)\n"
        "dist.barrier()",
        what="CalledProcessError", line=2,
    ),
    "an error that cannot be printed": Program(
        "class ConfigError(Exception):\n"
        "    def __str__(self): return self.missing\n"
        "if odd: raise ConfigError('lr')\n"
        "dist.barrier()",
        what="ConfigError", line=3,
    ),
    "a backward of the user's own": Program(
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, t): return t * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        if odd: raise ArithmeticError('overflow')\n"
        "        return grad * 2\n"
        "Double.apply(model()(x)).sum().backward()",
        what="ArithmeticError", line=(6, 8),
    ),
    "a value that was changed in place": Program(
        "net = model()\n"
        "out = net(x).exp()\n"
        "if odd: out.add_(1)\n"
        "out.sum().backward()",
        what="RuntimeError", line=4,
    ),
    "layers that no rank uses": Program(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 4)\n"
        "    def forward(self, t): return self.base(t)\n"
        "net = DDP(Net())\n"
        "for step in range(2): net(x).sum().backward()",
        what="RuntimeError.*reduction", line=7, who="ranks 0-3",
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
    "a select": stops(
        "import select, socket\nends = socket.socketpair()\n"
        "if odd: select.select([ends[0]], [], [])",
        3, "select",
    ),
    "a socket to which nobody writes": stops(
        "import socket\nends = socket.socketpair()\nif odd: ends[0].recv(1)", 3, "recv"
    ),
    "a condition of which nobody tells": stops(
        "condition = threading.Condition()\nwith condition:\n    if odd: condition.wait()",
        3, "condition.wait",
    ),
    "a thread that does not end": stops(
        "thread = threading.Thread(target=threading.Event().wait, daemon=True)\n"
        "if odd: thread.start(); thread.join()",
        2, "thread.join",
    ),
    "a process that does not end": stops(
        "import multiprocessing\n"
        "context = multiprocessing.get_context('fork')\n"
        "child = context.Process(target=time.sleep, args=(30,), daemon=True)\n"
        "if odd: child.start(); child.join()",
        4, "child.join",
    ),
    "a sleep in a coroutine": stops(
        "async def back_off():\n    await asyncio.sleep(60)\nif odd: await back_off()",
        (2, 3), "sleep|back_off",
    ),
    "a sleep in a comprehension": stops(
        "def poll(n): time.sleep(60)\nif odd: [poll(n) for n in range(3)]", (1, 2), "sleep|poll"
    ),
    "a loop that computes": stops(
        "t = torch.ones(64, 64)\nif odd:\n    while True:\n        t = t @ t / 64",
        (3, 4), "while|t @ t",
    ),
    "a lock that its own thread wants again": stops(
        "lock = threading.Lock()\nwith lock:\n    if odd:\n        with lock: pass",
        4, "lock",
    ),
    "a work that is polled": stops(
        "if not odd:\n"
        "    work = dist.all_reduce(some, async_op=True)\n"
        "    while not work.is_completed(): time.sleep(0.05)",
        (2, 3), "all_reduce|is_completed|sleep", "rank 2|ranks 0-1,3",
    ),
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
    "a future at which nobody looks": Program(
        "def step():\n"
        "    if not odd: dist.all_reduce(torch.ones(4))\n"
        "with ThreadPoolExecutor(1) as pool: pool.submit(step)",
        line=2, is_caught=True,
    ),
    "a hang that is suppressed": Program(
        "with contextlib.suppress(Exception):\n    if not odd: dist.barrier()",
        what="barrier", line=2, is_caught=True,
    ),
    "a mismatch of coroutines whose errors are collected": Program(
        "async def step(): dist.all_reduce(torch.ones(4 + odd))\n"
        "await asyncio.gather(step(), return_exceptions=True)",
        is_caught=True,
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

BROKEN: dict[str, Program] = (
    LIBRARY_PROGRAMS  # before those that leave a thread, which might set a key
    | MISSING
    | DIFFERENT
    | RAISED
    | STOPPED
    | CAUGHT
    | LANGUAGE_PROGRAMS
)

UNTOLD = {
    "a text that takes for ever to match": stops(
        "import re\nif odd: re.match(r'(a+)+$', 'a' * 60 + 'b')", 2, "re.match"
    ),
    "a tensor with gaps": Program("dist.all_reduce(torch.ones(8)[::2] if odd else torch.ones(4))"),
}  # fmt: skip
"""Broken ones of which the first line cannot say all. They are not run.

C code that keeps Python from running also keeps it from being asked for its line: the cell is
named. Of the other one nothing is said: torch (2.13) sums what lies beside the elements, without an
error, and a comparison of what ranks call knows no strides."""
