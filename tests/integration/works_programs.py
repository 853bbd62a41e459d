"""Programs in which C++ keeps the handle of an operation after Python has let go of it.

Each says in ``found`` what it has computed. A test runs them in cells and by torchrun.
"""

from __future__ import annotations

__all__ = ["HEAD", "PROGRAMS"]

HEAD = """
import contextlib, gc, threading, time
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as through
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

def model_of(width=3, **options):
    torch.manual_seed(0)
    layers = torch.nn.Linear(width, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    return DDP(torch.nn.Sequential(*layers), **options)

def batches(count, width=3):
    torch.manual_seed(10 + rank)
    return [torch.randn(5, width) for _ in range(count)]

def train(ddp, inputs):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for batch in inputs:
        optimizer.zero_grad()
        ddp(batch).square().sum().backward()
        optimizer.step()
    return numbers(ddp.parameters())

def numbers(tensors):
    return [round(value, 4) for t in tensors for value in t.detach().flatten().tolist()]

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.one, self.other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    def forward(self, batch):
        return (self.one if batch.sum() > 0 else self.other)(batch)
"""

JOINED = """
ddp = model_of()
with ddp.join(divide_by_initial_world_size={divide}):
    found = train(ddp, batches(2 + 2 * rank))
"""

HOOKED = """
ddp = model_of(8)
ddp.register_comm_hook({state}, {hook})
found = train(ddp, batches(6, 8))
"""

PROGRAMS = {
    "join, divided by all": JOINED.format(divide=True),
    "join, divided by those that go on": JOINED.format(divide=False),
    "join that raises on all": """
ddp = model_of()
try:
    with ddp.join(throw_on_early_termination=True):
        found = train(ddp, batches(2 + 2 * rank))
except RuntimeError as error:
    found = ["exhausted" in str(error), numbers(ddp.parameters())]
""",
    "join with parameters that are not used": """
ddp = DDP(Branches(), find_unused_parameters=True)
with ddp.join():
    found = train(ddp, batches(3 + rank))
""",
    "join of a model in steps that are not synchronized": """
ddp = model_of()
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
with ddp.join():
    for batch in batches(2 + rank):
        with ddp.no_sync():
            ddp(batch).square().sum().backward()
        ddp(batch).sum().backward()
        optimizer.step()
found = numbers(ddp.parameters())
""",
    "Join of two models": """
one, other = model_of(), DDP(torch.nn.Linear(3, 2, bias=False))
with Join([one, other]):
    for batch in batches(2 + rank):
        one(batch).sum().backward()
        other(batch).square().sum().backward()
found = numbers(p.grad for p in [*one.parameters(), *other.parameters()])
""",
    "parameters that are not used": """
ddp = DDP(Branches(), find_unused_parameters=True)
found = train(ddp, batches(4))
""",
    "a static graph": """
ddp = model_of(static_graph=True)
found = train(ddp, batches(4))
""",
    "a hook that averages": HOOKED.format(state=None, hook="default_hooks.allreduce_hook"),
    "a hook with float16": HOOKED.format(state=None, hook="default_hooks.fp16_compress_hook"),
    "a hook with powerSGD": HOOKED.format(
        state="powerSGD_hook.PowerSGDState(\n"
        "    None, matrix_approximation_rank=1, start_powerSGD_iter=2,\n"
        "    min_compression_rate=0.5)",
        hook="powerSGD_hook.powerSGD_hook",
    ),
    "a wrapped hook": HOOKED.format(
        state=None, hook="default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)"
    ),
    "a built-in hook": """
ddp = model_of()
ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
found = train(ddp, batches(4))
""",
    "a hook of one's own": """
def hook(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    gc.collect()
    return future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() * 3)
ddp = model_of()
ddp.register_comm_hook(None, hook)
found = train(ddp, batches(4))
""",
    "a future whose handle is gone": """
tensor = torch.arange(4.0) + rank
future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: 2 * done.value()[0])
gc.collect()
found = numbers([future.wait(), tensor])
""",
    "many futures, collected": """
tensors = [torch.full((2,), float(rank + n)) for n in range(20)]
futures = [dist.all_reduce(t, async_op=True).get_future() for t in tensors]
gc.collect()
together = torch.futures.collect_all(futures)
del futures
found = numbers(each.value()[0] for each in together.wait())
""",
    "a handle that is dropped before its operation begins elsewhere": """
if rank == 0:
    time.sleep(0.3)
tensor = torch.ones(3) * (rank + 1)
dist.all_reduce(tensor, async_op=True)
gc.collect()
dist.barrier()
dist.all_reduce(torch.ones(1))
found = numbers([tensor])
""",
    "functional results that are dropped": """
for turn in range(5):
    funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    funcol.all_gather_tensor(torch.ones(3), 0, dist.group.WORLD)
gc.collect()
last = funcol.all_reduce(torch.arange(3.0) + rank, "sum", dist.group.WORLD)
found = numbers([last])
""",
    "functional results that are waited for late": """
makers = [
    lambda t: funcol.all_reduce(t, "sum", dist.group.WORLD),
    lambda t: funcol.all_gather_tensor(t, 0, dist.group.WORLD),
    lambda t: funcol.reduce_scatter_tensor(t.repeat(world_size), "sum", 0, dist.group.WORLD),
    lambda t: funcol.broadcast(t, 0, dist.group.WORLD),
    lambda t: funcol.all_to_all_single(t.repeat(world_size), None, None, dist.group.WORLD),
]
results = [make(torch.arange(2.0) + rank) for make in makers]
gc.collect()
time.sleep(0.1 * rank)
found = numbers(results[::-1])
""",
    "collectives in a backward": """
leaf = (torch.arange(4.0) + rank).requires_grad_()
through.all_reduce(leaf.square()).sum().backward()
found = numbers([leaf.grad])
parts = through.all_gather(leaf)
sum(n * part.square().sum() for n, part in enumerate(parts, 1)).backward()
found += numbers([leaf.grad])
through.broadcast(leaf * 2, 0).sum().backward()
found += numbers([leaf.grad])
out = torch.zeros(world_size)
through.all_to_all_single(out, leaf.sum().repeat(world_size)).square().sum().backward()
found += numbers([leaf.grad])
""",
    "a reducer that outlives its module": """
ddp = model_of()
loss = ddp(batches(1)[0]).sum()
parameters = list(ddp.parameters())
del ddp
gc.collect()
loss.backward()
found = numbers(p.grad for p in parameters)
""",
    "calls of RPC beside collectives": """
from torch.distributed import rpc
rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
to = f"rank{(rank + 1) % world_size}"
for turn in range(20):
    rpc.rpc_async(to, torch.add, (torch.ones(2), turn))
    dist.all_reduce(torch.ones(2), async_op=True)
gc.collect()
asked = [rpc.rpc_async(to, torch.add, (torch.ones(2), turn)).then(lambda f: f.wait() * 2)
         for turn in range(5)]
total = torch.ones(2)
reduced = dist.all_reduce(total, async_op=True).get_future()
gc.collect()
found = numbers([*torch.futures.wait_all(asked), reduced.wait()[0]])
rpc.shutdown()
""",
    "handles as script objects": """
mine, tensors = torch.ones(2) + rank, [torch.zeros(2) for _ in range(world_size - 1)]
works = [dist.all_reduce(mine, async_op=True)]
if rank == 0:
    works += [dist.irecv(tensor) for tensor in tensors]
else:
    dist.isend(torch.full((2,), float(rank)), 0).wait()
held = [work.boxed() for work in works]
if hasattr(torch._C._distributed_c10d, "PythonCallbackWork"):  # from torch 2.10 on
    del works
gc.collect()
for each in held:
    dist.Work.unbox(each).wait()
found = sorted(numbers([mine, *tensors]))
""",
    "all at once": """
inputs = [torch.ones(2) * n for n in range(6)]
with dist._coalescing_manager(async_ops=True) as together:
    for t in inputs:
        dist.all_reduce(t)
gc.collect()
together.wait()
found = numbers(inputs)
""",
}
