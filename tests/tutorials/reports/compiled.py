"""Compiled models under DDP, and compiled collectives: pytorch/pytorch#108966, #112028."""

# %%
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
result = {}
# %%
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
model = torch.compile(DDP(plain), backend="aot_eager")
for _ in range(2):
    plain.zero_grad()
    model(torch.full((2, 4), rank + 1.0)).mean().backward()
result["gradients"] = [p.grad.tolist() for p in plain.parameters()]


# %%
@torch.compile(backend="aot_eager", fullgraph=True)
def step(x):
    return functional.all_reduce(x * 2, "sum", list(range(world))) + 1


result["collective"] = step(torch.full((3,), rank + 1.0)).tolist()
torch._dynamo.reset()
# %%
dist.destroy_process_group()
