"""Ranks with different numbers of batches, both ways to divide: pytorch/pytorch#38174."""

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
result = {}
# %%
for by_initial in (True, False):
    torch.manual_seed(0)
    model = DDP(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=by_initial):
        for batch in range(3 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((4, 2), float(batch + rank))).mean().backward()
            optimizer.step()
    result[f"by initial size: {by_initial}"] = model.module.weight.tolist()
# %%
dist.destroy_process_group()
