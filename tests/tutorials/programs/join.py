"""Ranks with uneven inputs: Join lets the one that is done shadow the others."""

# %%
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
# %%
torch.manual_seed(0)
model = DDP(torch.nn.Linear(1, 1))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
inputs = [torch.tensor([1.0]) for _ in range(5 + rank)]  # rank 1 has one more
count = 0
with Join([model, optimizer]):
    for each in inputs:
        model(each).sum().backward()
        optimizer.step()
        count += 1
# %%
with model.join():
    for each in inputs[rank:]:
        model(each).sum().backward()
result = {"count": count, "weight": model.module.weight.item()}
# %%
dist.destroy_process_group()
